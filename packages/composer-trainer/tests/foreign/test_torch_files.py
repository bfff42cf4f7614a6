"""Weights from torch.save files, without executing code."""

import collections
import datetime
import os
import random
import zipfile

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


class Bomb:
    def __init__(self, command):
        self.command = command

    def __reduce__(self):
        return (os.system, (self.command,))


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

    def test_old_format(self, tmp_path):
        """Files of torch before 1.6 are no archives."""
        torch.save(nn.Linear(3, 2).state_dict(), tmp_path / "old.pt", _use_new_zipfile_serialization=False)

        with pytest.raises(CheckpointError, match=r"old\.pt is not a complete .* torch before 1\.6 have to be saved"):
            load_torch_weights(tmp_path / "old.pt")

    @pytest.mark.parametrize(
        "weight",
        [
            *(
                torch.arange(6).to(dtype).view(2, 3)
                for dtype in (torch.float64, torch.bfloat16, torch.int8, torch.bool)
            ),
            torch.arange(6.0).view(2, 3).T,
            torch.arange(6.0)[1::2],
            torch.tensor(3.0),
            torch.empty(0, 2),
            torch.arange(3.0).to(torch.float8_e4m3fn),
            torch.arange(3).to(torch.uint16),
            torch.arange(4.0).to(torch.complex64),
            torch.tensor([1 + 2j, 3 - 4j]).conj(),
            torch.tensor([1 + 2j, 3 - 4j]).conj().imag,
            nn.Parameter(torch.ones(2)),
        ],
    )
    def test_same_as_torch(self, weight, tmp_path):
        """A tensor of any dtype and layout is the one that torch reads."""
        torch.save({"weight": weight, "again": weight}, tmp_path / "one.pt")

        loaded = load_torch_weights(tmp_path / "one.pt")

        theirs = torch.load(tmp_path / "one.pt", weights_only=True)["weight"]
        assert (loaded["weight"].dtype, loaded["weight"].stride()) == (theirs.dtype, theirs.stride())
        assert torch.equal(loaded["weight"], theirs.detach())
        assert loaded["weight"].data_ptr() == loaded["again"].data_ptr()

    def test_code_is_not_executed(self, tmp_path):
        """A file with a command raises with the function's name, and the command is not executed."""
        content = {"weight": torch.ones(1), "more": Bomb(f"touch {tmp_path}/ran")}
        torch.save(content, tmp_path / "bomb.pt")

        with pytest.raises(CheckpointError, match=r"bomb\.pt holds (posix|os|nt)\.system, which is not data"):
            load_torch_weights(tmp_path / "bomb.pt")

        assert not (tmp_path / "ran").exists()

    def test_changed_bytes(self, tmp_path):
        """A file with any changed bytes gives tensors by name, or raises the documented error and no other."""
        composer_file(tmp_path / "good.pt", nn.Linear(2, 2).state_dict())
        with zipfile.ZipFile(tmp_path / "good.pt") as good:
            records = {one.filename: good.read(one) for one in good.infolist()}
        [name] = [name for name in records if name.endswith("data.pkl")]
        draw, read, rejected = random.Random(0), 0, 0
        for _ in range(300):
            changed = bytearray(records[name])
            for _ in range(draw.randint(1, 4)):
                changed[draw.randrange(len(changed))] = draw.randrange(256)
            with zipfile.ZipFile(tmp_path / "bad.pt", "w") as bad:
                for other, content in {**records, name: bytes(changed)}.items():
                    bad.writestr(other, content)
            try:
                loaded = load_torch_weights(tmp_path / "bad.pt")
            except CheckpointError:
                rejected += 1
            else:
                read += 1
                assert all(isinstance(name, str) and isinstance(one, torch.Tensor) for name, one in loaded.items())
                assert sum(one.untyped_storage().nbytes() for one in loaded.values()) < 10_000

        assert read > 10
        assert rejected > 10

    def test_pickled_models_raise(self, tmp_path):
        """A pickled model raises with its class."""
        torch.save(nn.Linear(2, 2), tmp_path / "model.pt")

        with pytest.raises(CheckpointError, match=r"holds torch\.nn\.modules\.linear\.Linear, which is not data"):
            load_torch_weights(tmp_path / "model.pt")

    @pytest.mark.parametrize(
        "content", [b"", b"no file", b"PK\x03\x04 nothing", b"\x80\x02.", b"\x80\x02" + b"(" * 9999]
    )
    def test_other_files_raise(self, content, tmp_path):
        """Other files raise with their names."""
        (tmp_path / "file.pt").write_bytes(content)

        with pytest.raises(CheckpointError, match=r"file\.pt is no"):
            load_torch_weights(tmp_path / "file.pt")

    def test_extra_state(self, tmp_path):
        """A dictionary that a module has added to its state_dict does not make it a file without weights."""
        torch.save(nn.Sequential(nn.Linear(2, 2), Counter()).state_dict(), tmp_path / "weights.pt")

        assert list(load_torch_weights(tmp_path / "weights.pt")) == ["0.weight", "0.bias"]

    @pytest.mark.parametrize("content", [{}, [torch.ones(1)], {"epoch": 3}, torch.ones(2), {3: torch.ones(1)}])
    def test_file_without_weights_raises(self, content, tmp_path):
        """Data without named tensors raise."""
        torch.save(content, tmp_path / "file.pt")

        with pytest.raises(CheckpointError, match="holds no weights"):
            load_torch_weights(tmp_path / "file.pt")
