"""Exported models are loaded without this library and compared with the original."""

import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from composer.algorithms import EMA, BlurPool, Factorize, SqueezeExcite
from composer.core import DataSpec, evaluation_weights
from composer.export import ExportError, export_for_inference
from composer.functional.dtensors import is_dtensor
from composer.models import ComposerClassifier
from fixtures import make_classifier, make_conv_net, make_loader, small_run, trained, weights

ELSEWHERE = """
import sys
sys.modules["composer"] = None  # any import of it fails
import torch
exported = torch.export.load(sys.argv[1]).module()
case = torch.load(sys.argv[2], weights_only=True)
torch.testing.assert_close(exported(case["images"]), case["logits"])
print(sorted(name for name in sys.modules if name.startswith("composer")))
"""


class Tokens(nn.Module):
    """A small transformer over a batch of token ids with a mask."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.head = nn.Linear(8, 11)

    def forward(self, batch):
        hidden = self.layer(self.embedding(batch["input_ids"]), src_key_padding_mask=batch["is_padding"])
        return {"logits": self.head(hidden), "cache": object(), "attentions": None}


class Function(nn.Module):
    """A model without weights."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, batch):
        return self.function(batch)


def conv_net():
    return make_classifier(make_conv_net(), train_metrics=[])


def images(samples=4):
    generator = torch.Generator().manual_seed(samples)
    return torch.randn(samples, 3, 8, 8, generator=generator), torch.arange(samples) % 3


def tokens(samples=3):
    ids = torch.arange(samples * 6).reshape(samples, 6) % 11
    return {"input_ids": ids, "is_padding": ids == 10, "labels": ids, "text": ["a"] * samples}


def load(path):
    return torch.export.load(path).module()


@pytest.fixture
def changed():
    """Return a model after surgery and two batches of training."""
    trainer = trained(
        model=conv_net(),
        train_dataloader=[images(), images(5)],
        algorithms=[
            BlurPool(min_channels=1),
            SqueezeExcite(latent_channels=4, min_channels=16),
            Factorize(min_channels=16, latent_channels=4, factorize_linears=False),
        ],
    )
    kinds = {type(module).__name__ for module in trainer.state.model.modules()}
    assert {"BlurConv2d", "FactorizedConv2d", "SqueezeExciteConv2d"} & kinds, kinds
    return trainer.state.model


class TestTorchExport:
    def test_exported_surgery_does_not_need_composer(self, changed, tmp_path):
        """A new process that cannot import composer computes the changed model's outputs."""
        export_for_inference(changed, "torchexport", tmp_path / "a/model.pt2", sample_input=images())
        inputs = images(7)
        with torch.no_grad():
            torch.save({"images": inputs[0], "logits": changed.eval()(inputs)}, tmp_path / "case.pt")

        command = [
            sys.executable,
            "-W",
            "error",
            "-c",
            ELSEWHERE,
            str(tmp_path / "a/model.pt2"),
            str(tmp_path / "case.pt"),
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=False)

        assert done.returncode == 0, done.stderr
        assert done.stdout.strip() == "['composer']"  # the one that is blocked

    def test_mapping_inputs(self, tmp_path):
        """Unused entries are not inputs, and non-tensors are not outputs."""
        model = Tokens()

        export_for_inference(model, "torchexport", tmp_path / "model.pt2", sample_input=tokens())

        batch = tokens(5)
        with torch.no_grad():
            expected = model.eval()(batch)["logits"]
        outputs = load(tmp_path / "model.pt2")(input_ids=batch["input_ids"], is_padding=batch["is_padding"])
        assert list(outputs) == ["logits"]
        torch.testing.assert_close(outputs["logits"], expected)

    def test_model_is_not_modified(self, tmp_path):
        """Mode, weights, gradients, running statistics and torch's random numbers do not change."""
        model, calls = conv_net(), []
        model.register_forward_hook(lambda *_: calls.append(1))
        model(images()).sum().backward()
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        objects, gradients = list(map(id, model.parameters())), [one.grad.clone() for one in model.parameters()]
        drawn = torch.get_rng_state()
        calls.clear()

        def randomize(copied):
            nn.init.normal_(copied.module[0].weight)

        export_for_inference(model, "torchexport", tmp_path / "model.pt2", sample_input=images(), transforms=randomize)

        assert torch.equal(torch.get_rng_state(), drawn)
        assert model.training
        assert all(one.requires_grad for one in model.parameters())
        assert list(map(id, model.parameters())) == objects
        assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
        assert all(torch.equal(one.grad, old) for one, old in zip(model.parameters(), gradients, strict=True))

    def test_transforms_in_order(self, tmp_path):
        """Each transform receives the result of the previous one; additions are in evaluation mode."""
        modes = []

        def double(model):
            modes.append(model.training)
            return nn.Sequential(model, Function(lambda value: 2 * value))

        def add(model):
            model.append(Function(lambda value: value + 1))
            model.append(nn.Dropout(0.9))

        export_for_inference(
            nn.Identity(), "torchexport", tmp_path / "model.pt2", sample_input=torch.ones(3), transforms=[double, add]
        )

        assert load(tmp_path / "model.pt2")(torch.full((2,), 5.0)).tolist() == [11.0, 11.0]
        assert modes == [False]

    def test_different_outputs_are_not_written(self, tmp_path):
        """A model whose outputs depend on other state raises with the difference; an existing file is preserved."""
        counted = []

        def count(batch):
            counted.append(1)
            return batch + len(counted)

        (tmp_path / "model.pt2").write_text("the former one")

        with pytest.raises(ExportError, match=r"(?s)on 3 samples.*Greatest absolute difference: \d"):
            export_for_inference(Function(count), "torchexport", tmp_path / "model.pt2", sample_input=torch.ones(3))

        assert [path.name for path in tmp_path.iterdir()] == ["model.pt2"]
        assert (tmp_path / "model.pt2").read_text() == "the former one"

    def test_other_batch_sizes_are_compared(self, tmp_path):
        """An export that only agrees for the sample's size raises."""

        def size_dependent(batch):
            return batch * (1 if torch.compiler.is_exporting() or len(batch) == 4 else 2)

        with pytest.raises(ExportError, match=r"something else than the original on 5 samples"):
            export_for_inference(
                Function(size_dependent), "torchexport", tmp_path / "model.pt2", sample_input=torch.ones(4)
            )

    def test_url(self, tmp_path):
        """A URL that fsspec supports has the same file."""
        fsspec = pytest.importorskip("fsspec")
        model = conv_net().eval()

        export_for_inference(model, "torchexport", "memory://exports/model.pt2", sample_input=images())

        with fsspec.open("memory://exports/model.pt2") as remote:
            (tmp_path / "model.pt2").write_bytes(remote.read())
        inputs = images(2)
        with torch.no_grad():
            torch.testing.assert_close(load(tmp_path / "model.pt2")(inputs[0]), model(inputs))

    @pytest.mark.parametrize(
        ("change", "kind", "message"),
        [
            ({"save_format": "pickle"}, ValueError, "'torchexport', 'onnx'"),
            ({"sample_input": "text"}, TypeError, "sample_input must be a batch"),
            ({"sample_input": (3, torch.ones(2))}, ValueError, "uses no tensor"),
            ({"input_names": ["a", "b"]}, ValueError, "input_names .* 1 inputs"),
            ({"input_names": ["not a name"]}, ValueError, "input_names"),
            ({"output_names": ["a", "b"]}, ValueError, "output_names .* 1 outputs"),
            ({"rtol": 0.1}, ValueError, "together"),
        ],
    )
    def test_bad_arguments(self, tmp_path, change, kind, message):
        """Invalid arguments raise before anything is written."""
        arguments = {"save_format": "torchexport", "save_path": tmp_path / "model", "sample_input": (torch.ones(2), 3)}

        with pytest.raises(kind, match=message):
            export_for_inference(Function(lambda batch: 2 * torch.as_tensor(batch[0])), **arguments | change)

        assert list(tmp_path.iterdir()) == []

    def test_one_name(self, tmp_path):
        """A string is one name, and not one for each of its characters."""
        path = tmp_path / "model"
        names = {"input_names": "pixels", "output_names": "scores"}

        export_for_inference(
            Function(lambda batch: 2 * batch), "torchexport", path, sample_input=torch.ones(2), **names
        )

        assert torch.equal(torch.export.load(path).module()(torch.ones(3))["scores"], torch.full((3,), 2.0))

    def test_sharded_model(self, tmp_path):
        """A sharded model raises, also when it has its complete weights, as after a forward pass in evaluation."""
        torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
        try:
            model = fully_shard(nn.Linear(4, 2), mesh=init_device_mesh("cpu", (1,)))
            with torch.no_grad():
                model(torch.ones(1, 4))

            assert not is_dtensor(model.weight)
            with pytest.raises(ValueError, match="sharded over processes cannot be exported"):
                export_for_inference(model, "torchexport", tmp_path / "model", sample_input=torch.ones(2, 4))
        finally:
            torch.distributed.destroy_process_group()


class TestOnnx:
    @pytest.fixture
    def evaluate(self):
        """Return a function that runs a file with the reference implementation of ONNX."""
        pytest.importorskip("onnxscript")
        reference = pytest.importorskip("onnx.reference")

        def run(path, **inputs):
            evaluator = reference.ReferenceEvaluator(str(path))
            arrays = {name: value.numpy() for name, value in inputs.items()}
            return dict(zip(evaluator.output_names, map(torch.as_tensor, evaluator.run(None, arrays)), strict=True))

        return run

    def test_classifier_with_surgery(self, changed, evaluate, tmp_path):
        """The images are the only input, with any batch size."""
        export_for_inference(
            changed,
            "onnx",
            tmp_path / "model.onnx",
            sample_input=images(),
            input_names=["images"],
            output_names=["logits"],
        )

        inputs = images(7)
        with torch.no_grad():
            expected = changed.eval()(inputs)
        outputs = evaluate(tmp_path / "model.onnx", images=inputs[0])
        torch.testing.assert_close(outputs["logits"], expected, rtol=1e-3, atol=1e-4)
        assert [path.name for path in tmp_path.iterdir()] == ["model.onnx"]

    def test_mapping(self, evaluate, tmp_path):
        """Inputs and outputs have their keys as names; no output has an input's name, as ONNX requires."""
        model = Function(lambda batch: {"sum": batch["first"] + batch["second"], "first": 2 * batch["first"]})
        sample = {"first": torch.ones(3, 2), "unused": torch.ones(3), "second": torch.ones(3, 2)}

        export_for_inference(model, "onnx", tmp_path / "model.onnx", sample_input=sample)

        outputs = evaluate(tmp_path / "model.onnx", first=torch.ones(2, 2), second=torch.zeros(2, 2))
        assert outputs["sum"].tolist() == [[1.0, 1.0], [1.0, 1.0]]
        assert outputs["first_output"].tolist() == [[2.0, 2.0], [2.0, 2.0]]


@pytest.mark.slow
@pytest.mark.parametrize("save_format", ["torchexport", "onnx"])
def test_resnet(save_format, tmp_path):
    """A ResNet-18 with blurred convolutions is exported in both formats, which compare outputs."""
    if save_format == "onnx":
        pytest.importorskip("onnxscript")
    from torchvision.models import resnet18

    from composer.functional import apply_blurpool

    network = resnet18(num_classes=5)
    apply_blurpool(network)
    model = ComposerClassifier(network)
    inputs = torch.randn(2, 3, 32, 32), torch.zeros(2, dtype=torch.long)

    export_for_inference(model, save_format, tmp_path / "model", sample_input=inputs)

    assert (tmp_path / "model").stat().st_size > 40_000_000


class TestTrainer:
    def test_the_first_batch_is_transformed(self, tmp_path):
        """Without a sample the model is exported with a batch transformed by the data spec."""
        batch = torch.ones(4, 4, dtype=torch.uint8), torch.zeros(4, dtype=torch.long)
        spec = DataSpec(
            [batch],
            batch_transforms=lambda batch: (batch[0].float(), batch[1]),
            microbatch_transforms=lambda batch: (batch[0] / 255, batch[1]),
        )
        trainer = small_run(train_dataloader=spec)

        trainer.export_for_inference("torchexport", tmp_path / "model.pt2")

        inputs = torch.rand(3, 4)
        with torch.no_grad():
            expected = trainer.state.model.eval()((inputs, None))
        torch.testing.assert_close(load(tmp_path / "model.pt2")(inputs), expected)

    def test_no_batch_is_taken_from_an_iterator(self, tmp_path):
        """The training would not have it."""
        trainer = small_run(train_dataloader=iter(list(make_loader())), max_duration="5ba")

        with pytest.raises(ValueError, match="give sample_input"):
            trainer.export_for_inference("torchexport", tmp_path / "model.pt2")

        assert trainer.fit().steps == 5


class TestEvaluationWeights:
    def test_averages_are_exported(self, tmp_path):
        """With EMA the exported weights are the averages, and training continues with its own."""
        ema = EMA(half_life=None, smoothing=0.9)
        trainer = small_run(algorithms=ema, max_duration="5ba")
        trainer.fit()
        own = weights(trainer)
        batch = next(iter(make_loader()))

        with evaluation_weights(trainer.state):
            export_for_inference(trainer.state.model, "torchexport", tmp_path / "model.pt2", sample_input=batch)

        assert torch.equal(weights(trainer), own)
        with torch.no_grad():
            expected = ema.get_ema_model(trainer.state.model).eval()(batch)
            other = trainer.state.model.eval()(batch)
        exported = load(tmp_path / "model.pt2")(batch[0])
        torch.testing.assert_close(exported, expected)
        assert not torch.allclose(exported, other, atol=1e-3)
