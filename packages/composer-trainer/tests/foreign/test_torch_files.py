"""Weights from torch.save files, without executing code."""

import collections
import datetime

import pytest
import torch
from torch import nn

from composer.checkpoint import CheckpointError, load_checkpoint
from composer.core import State
from composer.foreign import ForeignFile, load_torch_weights


def composer_file(path, weights):
    """Write a checkpoint with Composer's nesting and types."""
    np = pytest.importorskip("numpy", reason="Composer's files hold NumPy's random state")
    content = {
        "state": {
            "model": collections.OrderedDict((f"module.{name}", value) for name, value in weights.items()),
            "optimizers": {"Adam": {"state": {"module.weight": {"step": torch.tensor(1.0)}}, "param_groups": []}},
            "algorithms": [("EMA", {"repr": "<EMA>", "ema_started": True})],
            "timestamp": {"Timestamp": {"batch": 5, "total_wct": datetime.timedelta(seconds=3)}},
            "metadata": {"torch_version": torch.__version__},
        },
        "rng": [{"python": (3, (1, 2), None), "numpy": ("MT19937", np.arange(4, dtype=np.uint32), 0, 0, 0.5)}],
    }
    torch.save(content, path)
    return path


class Counter(nn.Identity):
    """A layer whose state is a dictionary."""

    def get_extra_state(self):
        """Save."""
        return {"count": 3}


class TestLoadTorchWeights:
    @pytest.mark.parametrize("nest", [(), ("state_dict",), ("model",)])
    def test_plain_files(self, nest, tmp_path):
        """A state_dict is found directly and under the usual names."""
        weights = content = nn.Linear(3, 2).state_dict()
        for name in nest:
            content = {name: content, "epoch": 3}
        torch.save(content, tmp_path / "weights.pt")

        loaded = load_torch_weights(tmp_path / "weights.pt")

        assert loaded.keys() == weights.keys()
        assert all(torch.equal(loaded[name], value) for name, value in weights.items())

    def test_composer_file(self, tmp_path):
        """A checkpoint of Composer gives its weights, with any wrapper."""
        weights, later = nn.Linear(4, 3).state_dict(), State(nn.Linear(4, 3))
        file = composer_file(tmp_path / "ep1-ba5-rank0.pt", weights)

        loaded = load_checkpoint(ForeignFile(file), later, weights_only=True)

        assert all(torch.equal(value, weights[name]) for name, value in later.model.state_dict().items())
        assert loaded.report.restored == ("model",)

    def test_pickled_models_raise(self, tmp_path):
        """A pickled model raises with its class."""
        torch.save(nn.Linear(2, 2), tmp_path / "model.pt")

        with pytest.raises(CheckpointError, match=r"holds torch\.nn\.modules\.linear\.Linear, which is not data"):
            load_torch_weights(tmp_path / "model.pt")

    def test_extra_state(self, tmp_path):
        """A dictionary that a module has added to its state_dict does not make it a file without weights."""
        torch.save(nn.Sequential(nn.Linear(2, 2), Counter()).state_dict(), tmp_path / "weights.pt")

        assert list(load_torch_weights(str(tmp_path / "weights.pt"))) == ["0.weight", "0.bias"]

    def test_of_the_tutorial(self, tmp_path):
        """Torch's tutorial saves weights under model_state_dict, beside the optimizer's state."""
        torch.save({"model_state_dict": nn.Linear(2, 2).state_dict(), "epoch": 3}, tmp_path / "weights.pt")

        assert list(load_torch_weights(tmp_path / "weights.pt")) == ["weight", "bias"]

    @pytest.mark.parametrize("content", [{}, [torch.ones(1)], {"epoch": 3}, torch.ones(2), {3: torch.ones(1)}])
    def test_file_without_weights_raises(self, content, tmp_path):
        """Data without named tensors raise."""
        torch.save(content, tmp_path / "file.pt")

        with pytest.raises(CheckpointError, match="holds no weights"):
            load_torch_weights(tmp_path / "file.pt")
