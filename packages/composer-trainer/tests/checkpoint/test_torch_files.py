"""Weights from torch.save files, without executing code."""

import collections
import datetime
import os
import re
import struct
import zipfile

import pytest
import torch
from torch import nn

from composer.checkpoint import CheckpointError, load_checkpoint, load_torch_weights


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

    def test_composer_file(self, runs, tmp_path):
        """A checkpoint of Composer gives its weights, with any wrapper."""
        weights = runs.make().model.state_dict()
        later = runs.make(seed=1)

        loaded = load_checkpoint(composer_file(tmp_path / "ep1-ba5-rank0.pt", weights), later, weights_only=True)

        assert runs.same_tensors(later.model.state_dict(), weights)
        assert loaded.report.restored == ("model",)

    def test_old_format(self, tmp_path):
        """Files in the format before torch's archives are read."""
        torch.save(nn.Linear(3, 2).state_dict(), tmp_path / "old.pt", _use_new_zipfile_serialization=False)

        assert load_torch_weights(tmp_path / "old.pt").keys() == {"weight", "bias"}

    @pytest.mark.parametrize("new", [True, False])
    def test_code_is_not_executed(self, new, tmp_path):
        """A file with a command raises with the function's name, and the command is not executed."""
        content = {"weight": torch.ones(1), "more": Bomb(f"touch {tmp_path}/ran")}
        torch.save(content, tmp_path / "bomb.pt", _use_new_zipfile_serialization=new)

        with pytest.raises(CheckpointError, match=r"bomb\.pt holds (posix|os|nt)\.system, which is not data"):
            load_torch_weights(tmp_path / "bomb.pt")

        assert not (tmp_path / "ran").exists()

    def test_pickled_models_raise(self, tmp_path):
        """A pickled model raises with its class."""
        torch.save(nn.Linear(2, 2), tmp_path / "model.pt")

        with pytest.raises(CheckpointError, match=r"holds torch\.nn\.modules\.linear\.Linear, which is not data"):
            load_torch_weights(tmp_path / "model.pt")

    def test_allowed_globals_are_reset(self, tmp_path):
        """Globals allowed here are not allowed afterwards."""
        before = set(torch.serialization.get_safe_globals())

        load_torch_weights(composer_file(tmp_path / "one.pt", nn.Linear(2, 2).state_dict()))

        assert set(torch.serialization.get_safe_globals()) == before

    @pytest.mark.parametrize(
        "content", [b"", b"no file", b"PK\x03\x04 nothing", b"\x80\x02.", b"\x80\x02" + b"(" * 9999]
    )
    def test_other_files_raise(self, content, tmp_path):
        """Other files raise with their names."""
        (tmp_path / "file.pt").write_bytes(content)

        with pytest.raises(CheckpointError, match=r"file\.pt (is no|holds)"):
            load_torch_weights(tmp_path / "file.pt")

    @pytest.mark.parametrize("content", [{}, [torch.ones(1)], {"epoch": 3}, torch.ones(2), {3: torch.ones(1)}])
    def test_file_without_weights_raises(self, content, tmp_path):
        """Data without named tensors raise."""
        torch.save(content, tmp_path / "file.pt")

        with pytest.raises(CheckpointError, match="holds no weights"):
            load_torch_weights(tmp_path / "file.pt")

    def test_compressed_archives_raise(self, tmp_path):
        """A small file that expands to a large one raises."""
        torch.save({"weight": torch.zeros(100_000)}, tmp_path / "plain.pt")
        with (
            zipfile.ZipFile(tmp_path / "plain.pt") as plain,
            zipfile.ZipFile(tmp_path / "small.pt", "w", zipfile.ZIP_DEFLATED) as small,
        ):
            for one in plain.infolist():
                small.writestr(one.filename, plain.read(one))

        with pytest.raises(CheckpointError, match="is a compressed archive"):
            load_torch_weights(tmp_path / "small.pt")

    @pytest.mark.parametrize("way", ["bytes behind the end", "two tables of contents"])
    def test_ambiguous_archives_raise(self, way, tmp_path):
        """An archive that Python and torch read differently raises."""
        torch.save({"weight": torch.zeros(100_000)}, tmp_path / "plain.pt")
        with (
            zipfile.ZipFile(tmp_path / "plain.pt") as plain,
            zipfile.ZipFile(tmp_path / "small.pt", "w", zipfile.ZIP_DEFLATED) as small,
        ):
            for one in plain.infolist():
                small.writestr(one.filename, plain.read(one))
        content = (tmp_path / "small.pt").read_bytes()
        size, begin = struct.unpack("<LL", content[-10:-2])
        table = bytearray(content[begin : begin + size])
        for entry in re.finditer(b"PK\x01\x02", bytes(table)):
            table[entry.start() + 10 : entry.start() + 12] = b"\0\0"  # says: not compressed
        hidden = content + b"PK\5\6" if way == "bytes behind the end" else content[:-22] + table + content[-22:]
        (tmp_path / "small.pt").write_bytes(hidden)

        with pytest.raises(CheckpointError, match=r"small\.pt is (no archive as|not a complete file of) torch\.save"):
            load_torch_weights(tmp_path / "small.pt")

    def test_overlapping_entries_raise(self, tmp_path):
        """An archive with overlapping entries raises."""
        torch.save({"weight": torch.zeros(100_000)}, tmp_path / "plain.pt")
        with zipfile.ZipFile(tmp_path / "plain.pt") as plain, zipfile.ZipFile(tmp_path / "twice.pt", "w") as twice:
            for one in plain.infolist():
                twice.writestr(one.filename, plain.read(one))
        content = (tmp_path / "twice.pt").read_bytes()
        size, begin = struct.unpack("<LL", content[-10:-2])
        count = struct.unpack("<H", content[-12:-10])[0]
        end = b"PK\5\6\0\0\0\0" + struct.pack("<HHLLH", 2 * count, 2 * count, 2 * size, begin, 0)
        (tmp_path / "twice.pt").write_bytes(content[:-22] + content[begin : begin + size] + end)

        with pytest.raises(CheckpointError, match="is an archive whose parts overlap"):
            load_torch_weights(tmp_path / "twice.pt")
