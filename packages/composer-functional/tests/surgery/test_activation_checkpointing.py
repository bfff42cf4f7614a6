"""Activation checkpointing: the same bits in less memory."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing as wrap_by_torch
from torch.profiler import profile

from composer import functional as cf
from composer.functional.layers.derived import plain_class

SIDE = {"d_model": 32, "nhead": 2, "dim_feedforward": 128, "batch_first": True}
POLICIES = ["full", "matmuls"]


def make_encoder(layers=3, **settings):
    """Return transformer layers with dropout, the same each time."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.TransformerEncoderLayer(**SIDE | settings) for _ in range(layers)), nn.Linear(32, 3))


class Block(nn.Module):
    """A convolution, a batch norm and dropout."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.drop = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Dropout(0.3)

    def forward(self, x):
        return x + self.drop(self.norm(self.conv(x)).relu())


def make_convolutions():
    """Return two of these blocks, the same each time."""
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block())


def gradients(model, input):
    """Return the gradients of all parameters and the output after one backward pass."""
    torch.manual_seed(1)
    output = model(input)
    output.square().mean().backward()
    return [output, *(parameter.grad.clone() for parameter in model.parameters())]


def is_equal(one, other):
    return all(torch.equal(*both) for both in zip(one, other, strict=True))


@pytest.mark.parametrize("policy", POLICIES)
class TestResults:
    def test_bits(self, policy):
        """Outputs and gradients of layers with dropout are those of the plain model bit for bit."""
        plain, model, input = make_encoder(), make_encoder(), torch.rand(4, 16, 32)

        report = cf.apply_activation_checkpointing(model, policy=policy)

        assert len(report) == 3
        assert is_equal(gradients(model, input), gradients(plain, input))

    def test_bits_under_autocast(self, policy):
        """The second computation is in the precision of the first."""
        plain, model, input = make_encoder(), make_encoder(), torch.rand(4, 16, 32)
        cf.apply_activation_checkpointing(model, policy=policy)

        results = []
        for one in (model, plain):
            torch.manual_seed(1)
            with torch.autocast("cpu", torch.bfloat16):
                output = one(input)
            output.sum().backward()  # outside, as in a training step
            results.append([output, *(parameter.grad for parameter in one.parameters())])

        assert results[0][0].dtype == torch.bfloat16
        assert is_equal(*results)

    def test_running_statistics(self, policy):
        """Batch norms count one pass, and have the same statistics and gradients."""
        plain, model, input = make_convolutions(), make_convolutions(), torch.rand(4, 4, 8, 8)
        cf.apply_activation_checkpointing(model, policy=policy)
        buffers = [id(buffer) for buffer in model.buffers()]

        results = gradients(model, input), gradients(plain, input)

        assert is_equal(*results)
        assert is_equal(model.buffers(), plain.buffers())
        assert int(model[0].norm.num_batches_tracked) == 1
        assert [id(buffer) for buffer in model.buffers()] == buffers

    def test_compiled(self, policy):
        """torch.compile makes one graph, with the same gradients."""
        plain, model, input = make_encoder(dropout=0.0), make_encoder(dropout=0.0), torch.rand(4, 16, 32)
        cf.apply_activation_checkpointing(model, policy=policy)

        results = gradients(torch.compile(model, backend="aot_eager", fullgraph=True), input), gradients(plain, input)

        torch.testing.assert_close(*results)

    def test_copies(self, policy):
        """Copies and pickled models are checkpointed, with the same weights and names."""
        model = make_encoder()
        names = list(model.state_dict())
        cf.apply_activation_checkpointing(model, policy=policy)

        for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert list(copied.state_dict()) == names
            assert type(copied[1]) is type(model[1])
            assert is_equal(
                gradients(copied, torch.ones(2, 4, 32)), gradients(copy.deepcopy(model), torch.ones(2, 4, 32))
            )


def count_passes(model):
    """Return how often the first layer of a model computes in a forward and a backward pass."""
    passes = []
    model[0].linear1.register_forward_hook(lambda *_: passes.append(1))
    gradients(model, torch.rand(2, 4, 32))
    return len(passes)


class TestMemory:
    def peak(self, policy=None, every=1):
        """Return the greatest memory that a step of 12 layers allocates beyond what it begins with, in bytes."""
        model, input = make_encoder(12), torch.rand(4, 64, 32)
        gradients(model, input)  # allocates the gradients
        if policy is not None:
            cf.apply_activation_checkpointing(model, every=every, policy=policy)
        with profile(profile_memory=True) as record:
            gradients(model, input)
        moments = [event for event in record.profiler.kineto_results.events() if event.name() == "[memory]"]
        now = peak = 0
        for event in sorted(moments, key=lambda one: one.start_ns()):
            now += event.nbytes()
            peak = max(peak, now)
        return peak

    def test_full(self):
        """Twelve layers need less than half the memory, and half of them with every=2 an amount between."""
        plain, half, full = self.peak(), self.peak("full", every=2), self.peak("full")

        assert full < 0.3 * plain
        assert full < half < 0.7 * plain

    def test_passes(self):
        """A checkpointed layer computes twice in training, and once in evaluation."""
        model = make_encoder()
        cf.apply_activation_checkpointing(model)

        assert count_passes(model) == 2
        assert count_passes(make_encoder()) == 1
        assert count_passes(model.eval()) == 1


class TestChoice:
    def test_every(self):
        """With every=2 the first, third, … block are changed."""
        model = make_encoder(5)

        report = cf.apply_activation_checkpointing(model, every=2)

        assert [entry.paths for entry in report] == [("0",), ("2",), ("4",)]

    @pytest.mark.parametrize(
        "modules", [nn.TransformerEncoderLayer, "TransformerEncoderLayer", [nn.TransformerEncoderLayer, "Other"]]
    )
    def test_classes(self, modules):
        """Blocks may be chosen by class or by name."""
        assert len(cf.apply_activation_checkpointing(make_encoder(1), modules)) == 1

    def test_other_surgery(self):
        """Blocks that were changed before are checkpointed with their change, and are pickled with both."""
        model = make_convolutions()
        cf.apply_stochastic_depth(model, Block, "sample", 0.5, "uniform")
        plain = copy.deepcopy(model)

        cf.apply_activation_checkpointing(model, Block)

        assert type(model[0]).__name__ == "CheckpointedStochasticBlock"
        assert plain_class(model[0]) is Block
        assert type(pickle.loads(pickle.dumps(model))[0]) is type(model[0])
        input = torch.rand(4, 4, 8, 8)
        assert is_equal(gradients(model, input), gradients(plain, input))

    @pytest.mark.parametrize("library", ["torchvision", "timm", "transformers"])
    def test_default_blocks(self, library):
        """The blocks of models of the known libraries are found, and train with bit-identical gradients."""
        model, blocks = KNOWN[library]()
        plain, input = copy.deepcopy(model), torch.rand(2, 3, 16, 16)

        report = cf.apply_activation_checkpointing(model)

        assert {entry.old for entry in report} == blocks
        runs = []
        for one in (model, plain):
            torch.manual_seed(1)
            output = one(input)
            (output if isinstance(output, torch.Tensor) else output.logits).square().sum().backward()
            runs.append([parameter.grad for parameter in one.parameters()] + [*one.buffers()])
        assert is_equal(*runs)


def make_torchvision():
    from torchvision.models import resnet18

    return resnet18(num_classes=3), {"BasicBlock"}


def make_timm():
    from timm.models import VisionTransformer

    sizes = {"img_size": 16, "patch_size": 8, "embed_dim": 16, "depth": 2, "num_heads": 2, "num_classes": 3}
    return VisionTransformer(**sizes, proj_drop_rate=0.1), {"Block"}


def make_transformers():
    from transformers import ViTConfig, ViTForImageClassification

    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    config = ViTConfig(**sizes, image_size=16, patch_size=8, hidden_dropout_prob=0.1)
    return ViTForImageClassification(config).train(), {"ViTEmbeddings", "ViTLayer"}


KNOWN = {"torchvision": make_torchvision, "timm": make_timm, "transformers": make_transformers}


def make_gpt2():
    """Return GPT-2 with two layers and dropout, the same each time."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(vocab_size=32, n_positions=16, n_embd=16, n_layer=2, n_head=2)).train()


class TestCaches:
    def test_created_caches_are_left_out(self):
        """The cache that GPT-2 creates in training does not get keys twice; gradients are those without it."""
        ids, grads = torch.randint(32, (2, 8)), []
        for is_changed in (False, True):
            model = make_gpt2()
            if is_changed:
                cf.apply_activation_checkpointing(model)
            torch.manual_seed(1)
            model(ids, labels=ids, use_cache=is_changed).loss.backward()
            grads.append([parameter.grad for parameter in model.parameters()])

        assert is_equal(*grads)

    def test_filled_caches_raise(self):
        """A cache with keys, as that of prefix tuning, raises an error."""
        from transformers import DynamicCache

        model, cache = make_gpt2(), DynamicCache()
        model.eval()(torch.randint(32, (1, 4)), **{cache_argument(): cache})
        cf.apply_activation_checkpointing(model.train())

        with pytest.raises(ValueError, match=r"GPT2Block must not get a cache with keys .* got one of 4 tokens"):
            model(torch.randint(32, (1, 4)), **{cache_argument(): cache})

    def test_generation(self):
        """In evaluation the cache is used."""
        model = make_gpt2()
        cf.apply_activation_checkpointing(model)

        ids = model.eval().generate(torch.tensor([[1, 2]]), max_new_tokens=4, do_sample=False, pad_token_id=0)

        plain = make_gpt2().eval().generate(torch.tensor([[1, 2]]), max_new_tokens=4, do_sample=False, pad_token_id=0)
        assert torch.equal(ids, plain)


def cache_argument():
    """Return the name of the argument of GPT-2 for a cache, which depends on the version of Transformers."""
    import inspect

    names = inspect.signature(type(make_gpt2()).forward).parameters
    return next(name for name in ("cache", "past_key_values") if name in names)


class TestErrors:
    def test_other_checkpointing(self):
        """A model with gradient checkpointing of its own, of Transformers or of torch, raises an error."""
        by_transformers, by_torch = make_gpt2(), make_encoder()
        (
            getattr(by_transformers, "activation_checkpointing_enable", None)
            or by_transformers.gradient_checkpointing_enable
        )()
        wrap_by_torch(by_torch, check_fn=lambda module: isinstance(module, nn.TransformerEncoderLayer))

        for model in (by_transformers, by_torch):
            with pytest.raises(ValueError, match="must not use other gradient checkpointing, as"):
                cf.apply_activation_checkpointing(model)

    @pytest.mark.parametrize("name", ["GyroDropout", "SpectralNorm", "NoisyEmbedding"])
    def test_layers_with_a_state(self, name):
        """Layers whose forward pass changes the next one raise an error, and nothing has changed."""
        model = make_encoder()
        if name == "GyroDropout":
            cf.apply_gyro_dropout(model, 4, 2, 0.5, 4, 2)
        elif name == "NoisyEmbedding":
            model[0].embedding = nn.Embedding(4, 2)
            cf.apply_neftune(model)
        else:
            nn.utils.parametrizations.spectral_norm(model[1].linear1)

        with pytest.raises(ValueError, match=f"must not have {name} in a checkpointed block"):
            cf.apply_activation_checkpointing(model)

        assert {type(layer) for layer in model} == {nn.TransformerEncoderLayer, nn.Linear}

    @pytest.mark.parametrize("policy", POLICIES)
    def test_changed_buffers(self, policy):
        """A buffer that a forward pass changes, as of a spectral norm by hooks, raises an error in the first step."""
        model, input = make_convolutions(), torch.rand(2, 4, 5, 5)
        nn.utils.spectral_norm(model[1].conv)
        cf.apply_activation_checkpointing(model, policy=policy)

        with pytest.raises(ValueError, match=r"Block must not change its buffer 'conv\.weight_u' in its forward pass"):
            model(input)

        assert model.eval()(input).shape == input.shape
