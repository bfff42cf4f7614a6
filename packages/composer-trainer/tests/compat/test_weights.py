"""Composer's functions for states of models and optimizers."""

import pytest
import torch
from torch import nn

from composer.compat.weights import (
    download_monolithic_checkpoint,
    get_fsdp_full_optim_state_dict,
    get_model_state_dict,
    get_optim_state_dict,
    glob_filter,
)


@pytest.fixture
def model():
    return nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))


@pytest.fixture
def optimizer(model):
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.rand(4, 2)).sum().backward()
    optimizer.step()
    return optimizer


class TestModel:
    @pytest.mark.parametrize(("precision", "dtype"), [("bf16", torch.bfloat16), (torch.float16, torch.float16)])
    def test_dtype(self, model, precision, dtype):
        """All tensors have the dtype, and the model keeps its own."""
        weights = get_model_state_dict(model, precision=precision)

        assert {one.dtype for one in weights.values()} == {dtype}
        assert weights.keys() == model.state_dict().keys()
        assert model[0].weight.dtype is torch.float32

    @pytest.mark.parametrize(
        ("patterns", "names"),
        [
            ({"include_keys": "0.*"}, {"0.weight", "0.bias"}),
            ({"include_keys": ["0.weight", "1.bias"]}, {"0.weight", "1.bias"}),
            ({"ignore_keys": ["1.*", "*.bias"]}, {"0.weight"}),
        ],
    )
    def test_patterns(self, model, patterns, names):
        """Weights are chosen, or left out, by patterns."""
        assert get_model_state_dict(model, **patterns).keys() == names


class TestOptimizer:
    def test_state(self, model, optimizer):
        """The state can be loaded again."""
        state = get_optim_state_dict(model, optimizer)

        other = torch.optim.Adam(model.parameters(), lr=1.0)
        other.load_state_dict(state)

        assert other.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]
        assert torch.equal(other.state[model[0].weight]["exp_avg"], optimizer.state[model[0].weight]["exp_avg"])
        assert get_optim_state_dict(model, optimizer, precision="fp16")["state"][0]["exp_avg"].dtype is torch.float16

    @pytest.mark.parametrize(("rank0_only", "is_empty"), [(True, True), ("full", True), (False, False)])
    def test_other_processes(self, model, optimizer, monkeypatch, rank0_only, is_empty):
        """Only the first process gets the state, unless all are to get it."""
        assert get_fsdp_full_optim_state_dict(model, optimizer, rank0_only)["state"]

        monkeypatch.setenv("RANK", "1")

        assert (not get_fsdp_full_optim_state_dict(model, optimizer, rank0_only=rank0_only)) is is_empty


@pytest.mark.parametrize(
    ("patterns", "rest"),
    [
        (["state/model/*/weights"], {"state": {"model": {"a": {"bias": 2}, "b": {}}, "list": [{"in": 1}, "x"]}}),
        (["state/list/0"], {"state": {"model": {"a": {"weights": 1, "bias": 2}, "b": {"weights": 3}}, "list": ["x"]}}),
        (["state/list/0", "state/list/1", "state/model"], {"state": {"list": []}}),
        (["state/list/0/in", "state/model"], {"state": {"list": [{}, "x"]}}),
    ],
)
def test_filter(patterns, rest):
    """What matches a pattern is removed, of lists by the indices before."""
    saved = {"state": {"model": {"a": {"weights": 1, "bias": 2}, "b": {"weights": 3}}, "list": [{"in": 1}, "x"]}}

    glob_filter(patterns)(saved)

    assert saved == rest


def test_download(tmp_path):
    """A file is where it was asked for."""
    (tmp_path / "a.pt").write_text("weights")

    download_monolithic_checkpoint(str(tmp_path / "a.pt"), str(tmp_path / "b.pt"))

    assert (tmp_path / "b.pt").read_text() == "weights"
