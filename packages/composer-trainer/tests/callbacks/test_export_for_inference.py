"""Models are exported at the end of training."""

import pytest
import torch
from torch import nn

from composer.algorithms import EMA, ColOut
from composer.callbacks import ExportForInferenceCallback
from composer.distributed import close_dist
from composer.models import HuggingFaceModel
from fixtures import image_batches, make_loader, make_network, small_run, trained


def fit(callback, algorithms=(), **options):
    torch.manual_seed(1)
    network = nn.Sequential(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.5), nn.Linear(4, 3))
    settings = {"train_dataloader": image_batches(3), "algorithms": algorithms, "run_name": "run"}
    return trained(network=network, callbacks=callback, **settings | options).state.model


def load(path):
    return torch.export.load(path).module()


@pytest.fixture
def alone():
    """FSDP2 in one process makes a group of it, which is closed at the end."""
    yield
    close_dist()


class TestExportForInferenceCallback:
    def test_exports_the_trained_model(self, tmp_path):
        """By default the last batch is the sample, and the exported model has equal outputs."""
        model = fit(ExportForInferenceCallback("torchexport", f"{tmp_path}/{{run_name}}/model.pt2"))

        images = torch.rand(7, 3, 8, 8)
        with torch.no_grad():
            expected = model.eval()((images, None))
        torch.testing.assert_close(load(tmp_path / "run/model.pt2")(images), expected)

    def test_averaged_weights(self, tmp_path):
        """With EMA the averages are exported, and the model keeps its training weights."""
        ema = EMA(half_life=None, smoothing=0.9)
        callback = ExportForInferenceCallback("torchexport", tmp_path / "model.pt2", output_names=["logits"])

        model = fit(callback, ema)

        images = torch.rand(2, 3, 8, 8)
        with torch.no_grad():
            averaged = ema.get_ema_model(model).eval()((images, None))
            own = model.eval()((images, None))
        exported = load(tmp_path / "model.pt2")(images)["logits"]
        torch.testing.assert_close(exported, averaged)
        assert not torch.allclose(own, averaged, atol=1e-4)

    def test_evaluation_sample(self, tmp_path):
        """The evaluation batch determines the size if an algorithm crops training images."""
        fit(
            ExportForInferenceCallback("torchexport", tmp_path / "model.pt2"),
            ColOut(p_row=0.5, p_col=0.5, batch=True),
            eval_dataloader=image_batches(1),
            eval_interval="1ba",
        )

        assert load(tmp_path / "model.pt2")(torch.rand(2, 3, 8, 8)).shape == (2, 3)

    def test_sharded_model(self, tmp_path, alone):
        """It raises before the first batch; a second program exports the same weights from a checkpoint."""
        sharded = {"parallelism_config": {"fsdp": {}}, "max_duration": "1ep"}
        callback = ExportForInferenceCallback("torchexport", tmp_path / "no.pt2")
        with (
            small_run(**sharded, callbacks=callback) as trainer,
            pytest.raises(ValueError, match="load_weights_only=True"),
        ):
            trainer.fit()
        assert int(trainer.state.timestamp.batch) == 0

        saving = trained(**sharded, save_folder=f"{tmp_path}/run")
        exporting = small_run(load_path=f"{tmp_path}/run/latest", load_weights_only=True)
        exporting.export_for_inference("torchexport", tmp_path / "model.pt2", sample_input=next(iter(make_loader())))

        inputs, network = torch.rand(5, 4), make_network()
        trained_weights = saving.state.model.state_dict().items()
        network.load_state_dict({name.removeprefix("module."): one.full_tensor() for name, one in trained_weights})
        torch.testing.assert_close(load(tmp_path / "model.pt2")(inputs), network(inputs))

    def test_transforms(self, tmp_path):
        """The exported copy is transformed, the model is not."""

        def forget(model):
            nn.init.zeros_(model.module[-1].weight)
            nn.init.ones_(model.module[-1].bias)

        model = fit(ExportForInferenceCallback("torchexport", tmp_path / "model.pt2", transforms=[forget]))

        assert load(tmp_path / "model.pt2")(torch.rand(1, 3, 8, 8)).tolist() == [[1.0, 1.0, 1.0]]
        assert model.module[-1].weight.abs().sum() > 0

    def test_bad_name(self):
        """An invalid name raises before the training."""
        with pytest.raises(ValueError, match=r"save_path may have \{run_name\} in it, nothing else in braces"):
            ExportForInferenceCallback("torchexport", "runs/{epoch}/model.pt2")

    def test_onnx_is_not_installed(self, monkeypatch):
        """The format "onnx" without its packages raises before the training."""
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "onnxscript" else name)
        with pytest.raises(ModuleNotFoundError, match=r"composer-trainer\[onnx\]"):
            ExportForInferenceCallback("onnx", "model.onnx")

    @pytest.mark.filterwarnings("ignore::DeprecationWarning")
    @pytest.mark.filterwarnings("ignore:.*get_attr")  # by torch 2.7
    def test_model_of_transformers(self, tmp_path):
        """The exported model needs no labels, which only the loss uses."""
        transformers = pytest.importorskip("transformers")
        sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
        network = transformers.BertForSequenceClassification(transformers.BertConfig(vocab_size=9, **sizes))
        model = HuggingFaceModel(network, use_logits=True)
        ids = torch.arange(24).view(4, 6) % 9
        batches = [{"input_ids": ids, "labels": torch.tensor([0, 1, 0, 1])}]
        path = tmp_path / "model.pt2"

        trainer = small_run(
            model=model,
            train_dataloader=batches,
            max_duration="1ep",
            callbacks=ExportForInferenceCallback("torchexport", path),
        )
        trainer.fit()
        trainer.export_for_inference("torchexport", tmp_path / "other.pt2")

        with torch.no_grad():
            expected = model.eval()({"input_ids": ids}).logits
        for exported in (load(path), load(tmp_path / "other.pt2")):
            outputs = exported(input_ids=ids)
            assert list(outputs) == ["logits"]
            torch.testing.assert_close(outputs["logits"], expected)
