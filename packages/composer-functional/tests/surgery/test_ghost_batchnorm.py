"""Ghost batch normalization applied to models."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

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
