"""Ghost batch normalization applied to models."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

from composer import functional as cf


class Activated(nn.BatchNorm2d):
    """A norm with an activation."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return super().forward(images).relu()


def _network() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3),
        nn.BatchNorm2d(8, eps=0.01, momentum=0.2),
        nn.Sequential(nn.Flatten(), nn.Linear(8 * 36, 6), nn.BatchNorm1d(6, affine=False), nn.Linear(6, 2)),
    )


class TestApplyGhostBatchnorm:
    def test_replaces_all_three(self):
        """Norms of one, two and three dimensions are replaced; nothing else is."""
        model = nn.Sequential(*_network(), nn.BatchNorm3d(4), nn.LayerNorm(4))

        report = cf.apply_ghost_batchnorm(model, 16)

        assert [(entry.paths, entry.new) for entry in report] == [
            (("1",), "GhostBatchNorm2d"),
            (("2.2",), "GhostBatchNorm1d"),
            (("3",), "GhostBatchNorm3d"),
        ]
        assert {model[1].ghost_batch_size, model[2][2].ghost_batch_size, model[3].ghost_batch_size} == {16}

    def test_pruned_layers_and_instance_forwards_are_unchanged(self):
        """Layers with weight hooks or a forward set on the instance do not change."""
        pruned, exchanged = nn.BatchNorm2d(4), nn.BatchNorm2d(4)
        prune.l1_unstructured(pruned, "weight", 0.5)
        exchanged.forward = lambda images: images

        assert not cf.apply_ghost_batchnorm(nn.Sequential(pruned, exchanged))

    def test_default_size_is_32(self):
        """The default ghost batch size is 32."""
        model = _network()

        cf.apply_ghost_batchnorm(model)

        assert model[1].ghost_batch_size == 32

    @pytest.mark.parametrize(
        "norm",
        [Activated(4), nn.SyncBatchNorm(4), nn.LazyBatchNorm2d(), nn.InstanceNorm2d(4, track_running_stats=True)],
    )
    def test_subclasses_are_unchanged(self, norm: nn.Module):
        """Subclasses of torch's layers do not change."""
        model = nn.Sequential(norm)

        assert not cf.apply_ghost_batchnorm(model)
        assert model[0] is norm

    def test_settings_and_tensors_are_preserved(self):
        """Parameters and running statistics are the same objects; settings are equal."""
        model = _network()
        tensors = [*model.parameters(), *model.buffers()]
        names = list(model.state_dict())

        cf.apply_ghost_batchnorm(model)

        assert all(new is old for new, old in zip([*model.parameters(), *model.buffers()], tensors, strict=True))
        assert list(model.state_dict()) == names
        assert (model[1].eps, model[1].momentum, model[1].affine, model[2][2].affine) == (0.01, 0.2, True, False)
        assert model[1].track_running_stats

    def test_training_normalizes_chunks(self):
        """In training each ghost batch is normalized separately; evaluation does not change."""
        model = nn.Sequential(nn.BatchNorm2d(3), nn.BatchNorm2d(3, track_running_stats=False)).double()
        plain, images = copy.deepcopy(model), torch.randn(7, 3, 4, 4, dtype=torch.float64)

        cf.apply_ghost_batchnorm(model, 4)

        torch.testing.assert_close(model(images), torch.cat([plain(images[:4]), plain(images[4:])]))
        plain.load_state_dict(model.state_dict())
        assert torch.equal(model.eval()(images), plain.eval()(images))

    def test_is_idempotent(self):
        """Ghost norms keep their size."""
        model = _network()
        cf.apply_ghost_batchnorm(model, 8)

        assert not cf.apply_ghost_batchnorm(model, 16)
        assert model[1].ghost_batch_size == 8

    def test_optimizer_updates_all_parameters(self):
        """One step of an existing optimizer updates all parameters and preserves state and names."""
        model = _network()
        optimizer = torch.optim.AdamW(model.named_parameters(), lr=0.1)
        model(torch.rand(4, 3, 8, 8)).square().sum().backward()
        optimizer.step()
        state = {parameter: optimizer.state[parameter] for parameter in model.parameters()}
        names = list(optimizer.param_groups[0]["param_names"])

        cf.apply_ghost_batchnorm(model, 2, optimizers=optimizer)
        before = copy.deepcopy(list(model.parameters()))
        optimizer.zero_grad()
        (model(torch.rand(4, 3, 8, 8)) * torch.rand(4, 2)).square().sum().backward()
        optimizer.step()

        assert not any(torch.equal(new, old) for new, old in zip(model.parameters(), before, strict=True))
        assert all(optimizer.state[parameter] is old for parameter, old in state.items())
        assert optimizer.param_groups[0]["param_names"] == names

    def test_hooks_mode_and_requires_grad_are_preserved(self):
        """Hooks are moved; mode and requires_grad do not change."""
        model = _network()
        model[1].eval().weight.requires_grad_(False)
        called: list[nn.Module] = []
        model[1].register_forward_hook(lambda module, args, output: called.append(module))

        cf.apply_ghost_batchnorm(model, 2)
        model(torch.rand(4, 3, 8, 8))

        assert called == [model[1]]
        assert [module.training for module in (model, model[1], model[2][2])] == [True, False, True]
        assert (model[1].weight.requires_grad, model[1].bias.requires_grad) == (False, True)
        assert model[1].num_batches_tracked == 0

    @pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
    def test_dtype_and_device_are_preserved(self, dtype: torch.dtype, device: torch.device):
        """The model keeps its dtype and device."""
        model = _network().to(device=device, dtype=dtype)

        cf.apply_ghost_batchnorm(model, 2)

        assert model(torch.rand(4, 3, 8, 8, device=device, dtype=dtype)).dtype == dtype
        assert {buffer.dtype for buffer in model.buffers() if buffer.is_floating_point()} == {dtype}

    def test_shared_layers_stay_shared(self):
        """A norm used twice becomes one norm used twice."""
        norm = nn.BatchNorm2d(3)
        model = nn.Sequential(norm, nn.ReLU(), norm)

        report = cf.apply_ghost_batchnorm(model)

        assert model[0] is model[2]
        assert [entry.paths for entry in report] == [("0", "2")]

    @pytest.mark.parametrize("training", [True, False])
    def test_exports(self, training: bool):
        """The model can be exported, for evaluation and for training."""
        model = _network().train(training)
        cf.apply_ghost_batchnorm(model, 2)
        images = torch.rand(6, 3, 8, 8)

        exported = torch.export.export(copy.deepcopy(model), (images,)).module()

        torch.testing.assert_close(exported(images), model(images))

    def test_root_layer_raises(self):
        """The root cannot be replaced; the error states the remedy."""
        with pytest.raises(ValueError, match=r"got a BatchNorm2d that is one itself\. Wrap it"):
            cf.apply_ghost_batchnorm(nn.BatchNorm2d(4))

    @pytest.mark.parametrize("size", [0, 2.5, None])
    def test_bad_size_raises(self, size: object):
        """An invalid size raises, also for a model without norms."""
        with pytest.raises((TypeError, ValueError), match="ghost_batch_size must be"):
            cf.apply_ghost_batchnorm(nn.Sequential(), size)

    def test_non_module_raises(self):
        """Only modules are supported."""
        with pytest.raises(TypeError, match=r"must be a torch.nn.Module, got list"):
            cf.apply_ghost_batchnorm([nn.BatchNorm2d(4)])
