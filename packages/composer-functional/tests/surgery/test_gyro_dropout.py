"""Gyro dropout applied to models."""

from __future__ import annotations

import copy

import pytest
import timm
import torch
import transformers
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from composer import functional as cf

SETTINGS = {"iters_per_epoch": 6, "max_epoch": 2, "p": 0.5, "sigma": 4, "tau": 2}


class Noise(nn.Dropout):
    """A dropout subclass with another forward."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return input + self.p


def _network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.1), nn.Sequential(nn.ReLU(), nn.Dropout(0.9)), nn.Linear(16, 3))


class TestApplyGyroDropout:
    def test_replaces_every_dropout(self):
        """All dropout layers are replaced with the given settings, for any rate."""
        model = _network()

        report = cf.apply_gyro_dropout(model, **SETTINGS)

        assert [(entry.paths, entry.old, entry.new) for entry in report] == [
            (("1",), "Dropout", "GyroDropout"),
            (("2.1",), "Dropout", "GyroDropout"),
        ]
        layer = model[2][1]
        assert (layer.p, layer.sigma, layer.tau, layer.period) == (0.5, 4, 2, 6)

    def test_other_dropouts_are_unchanged(self):
        """Disabled layers, subclasses and other kinds of dropout do not change."""
        model = nn.Sequential(nn.Dropout(0.0), Noise(0.1), nn.Dropout2d(0.5), nn.AlphaDropout(0.5))

        assert not cf.apply_gyro_dropout(model, **SETTINGS)

    def test_training_uses_all_masks_and_updates_all_parameters(self):
        """An existing optimizer keeps its state, and updates every parameter."""
        model = _network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        cf.apply_gyro_dropout(model, **SETTINGS)
        before = copy.deepcopy(list(model.parameters()))

        for _ in range(12):
            optimizer.zero_grad()
            model(torch.randn(4, 8)).square().sum().backward()
            optimizer.step()

        assert not any(torch.equal(new, old) for new, old in zip(model.parameters(), before, strict=True))
        assert model[1].position == 12

    @pytest.mark.parametrize("name", ["alexnet", "vgg11"])
    def test_on_torchvision(self, name: str):
        """Classifiers with two dropouts each are changed; evaluation outputs are equal."""
        import torchvision

        with torch.device("meta"):
            model = getattr(torchvision.models, name)()

        report = cf.apply_gyro_dropout(model, **SETTINGS)

        assert len(report) == 2
        assert model(torch.empty(4, 3, 224, 224, device="meta")).shape == (4, 1000)

    def test_on_a_language_model(self):
        """BERT trains with it, except for attention weights, whose dropout is a function of p."""
        from transformers import BertConfig, BertModel

        config = BertConfig(
            vocab_size=32, hidden_size=16, num_hidden_layers=2, num_attention_heads=4, intermediate_size=32
        )
        config._attn_implementation = "eager"
        model = BertModel(config, add_pooling_layer=False).eval()
        tokens = torch.arange(12).view(2, 6)
        expected = model(tokens).last_hidden_state

        report = cf.apply_gyro_dropout(model, **SETTINGS)
        unchanged = model(tokens).last_hidden_state
        model.train()(tokens).last_hidden_state.square().sum().backward()

        assert len(report) == 1 + 2 * 2
        assert not any(path.endswith("attention.self.dropout") for entry in report for path in entry.paths)
        assert {layer.attention.self.dropout.p for layer in model.encoder.layer} == {0.1}
        assert torch.equal(unchanged, expected)
        assert all(parameter.grad is not None for parameter in model.parameters())

    def test_gpt2_keeps_the_dropout_of_attention_weights(self):
        """Modules that attention only reads do not change; those it calls are replaced."""
        from transformers import GPT2Config, GPT2Model

        model = GPT2Model(GPT2Config(vocab_size=8, n_positions=8, n_embd=8, n_layer=1, n_head=2))

        report = cf.apply_gyro_dropout(model, **SETTINGS)

        assert [entry.paths for entry in report] == [("drop",), ("h.0.attn.resid_dropout",), ("h.0.mlp.dropout",)]

    def test_instance_forward_is_unchanged(self):
        """A layer with a forward set on the instance does not change."""
        layer = nn.Dropout(0.5)
        layer.forward = lambda hidden: hidden

        assert not cf.apply_gyro_dropout(nn.Sequential(layer), **SETTINGS)

    def test_is_idempotent(self):
        """Replaced layers are not nn.Dropout."""
        model = _network()
        cf.apply_gyro_dropout(model, **SETTINGS)

        assert not cf.apply_gyro_dropout(model, **SETTINGS)

    def test_shared_layers_hooks_and_mode(self):
        """A dropout used twice stays one, with its mode and hooks."""
        dropout = nn.Dropout()
        model = nn.Sequential(dropout, nn.ReLU(), dropout).eval()
        called: list[nn.Module] = []
        dropout.register_forward_hook(lambda module, args, output: called.append(module))

        report = cf.apply_gyro_dropout(model, **SETTINGS)
        model(torch.rand(2, 4))

        assert [entry.paths for entry in report] == [("0", "2")]
        assert model[0] is model[2]
        assert called == [model[0]] * 2
        assert not model[0].training

    def test_device_and_dtype(self, device: torch.device):
        """Buffers are on the model's device, as integers for any model dtype."""
        model = _network().to(device, torch.bfloat16)

        cf.apply_gyro_dropout(model, **SETTINGS)

        assert {(buffer.device.type, buffer.dtype) for buffer in model.buffers()} == {(device.type, torch.int64)}
        assert model(torch.rand(4, 8, device=device, dtype=torch.bfloat16)).dtype == torch.bfloat16

    @pytest.mark.parametrize("training", [True, False])
    def test_exports(self, training: bool):
        """The model can be exported, including masks."""
        model = _network().train(training)
        cf.apply_gyro_dropout(model, **SETTINGS)
        x = torch.rand(4, 8)
        torch.compiler.reset()  # what other tests compiled counts against a limit of torch 2.7

        exported = torch.export.export(model, (x,)).module()

        torch.testing.assert_close(exported(x), model(x))

    def test_gradient_checkpointing_raises(self):
        """A second forward pass would take other masks: as Transformers, timm and torch mark such models."""
        config = transformers.GPT2Config(n_embd=8, n_layer=1, n_head=1, vocab_size=9, bos_token_id=0, eos_token_id=0)
        language_model = transformers.GPT2LMHeadModel(config)
        if hasattr(language_model, "activation_checkpointing_enable"):  # its former name is deprecated
            language_model.activation_checkpointing_enable()
        else:
            language_model.gradient_checkpointing_enable()
        images = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=1)
        images.set_grad_checkpointing()
        wrapped = nn.Sequential(checkpoint_wrapper(nn.Sequential(nn.Linear(2, 2), nn.Dropout())))

        for model in (language_model, images, wrapped):
            with pytest.raises(ValueError, match="must not use gradient checkpointing with GyroDropout"):
                cf.apply_gyro_dropout(model, 10, 2, 0.5, 8, 2)
            assert not cf.count_module_instances(model, cf.GyroDropout)

    def test_bad_settings_raise(self):
        """Invalid settings raise, also for a model without dropout."""
        with pytest.raises(ValueError, match=r"p must lie in \[0, 1\), got 1"):
            cf.apply_gyro_dropout(nn.Sequential(nn.ReLU()), **{**SETTINGS, "p": 1})

    def test_root_layer_raises(self):
        """The root cannot be replaced."""
        with pytest.raises(ValueError, match=r"got a Dropout that is one itself\. Wrap it"):
            cf.apply_gyro_dropout(nn.Dropout(), **SETTINGS)

    def test_non_module_raises(self):
        """Only modules are supported."""
        with pytest.raises(TypeError, match=r"must be a torch.nn.Module, got list"):
            cf.apply_gyro_dropout([nn.Dropout()], **SETTINGS)
