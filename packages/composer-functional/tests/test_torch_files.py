"""Files of torch.save are read as torch reads them, and nothing in them is run."""

import datetime
import os
import random
import zipfile

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from composer.functional.torch_files import read_torch_file


class Bomb:
    def __init__(self, command):
        self.command = command

    def __reduce__(self):
        return (os.system, (self.command,))


def test_old_format(tmp_path):
    """Files of torch before 1.6 are no archives."""
    torch.save(nn.Linear(3, 2).state_dict(), tmp_path / "old.pt", _use_new_zipfile_serialization=False)

    with pytest.raises(ValueError, match=r"^is not a complete .* torch before 1\.6 have to be saved"):
        read_torch_file(tmp_path / "old.pt")


@pytest.mark.parametrize(
    "weight",
    [
        *(torch.arange(6).to(dtype).view(2, 3) for dtype in (torch.float64, torch.bfloat16, torch.int8, torch.bool)),
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
def test_same_as_torch(weight, tmp_path):
    """A tensor of any dtype and layout is the one that torch reads."""
    torch.save({"weight": weight, "again": weight}, tmp_path / "one.pt")

    loaded = read_torch_file(tmp_path / "one.pt")

    theirs = torch.load(tmp_path / "one.pt", weights_only=True)["weight"]
    assert (loaded["weight"].dtype, loaded["weight"].stride()) == (theirs.dtype, theirs.stride())
    assert torch.equal(loaded["weight"], theirs.detach())
    assert loaded["weight"].data_ptr() == loaded["again"].data_ptr()


def test_code_is_not_executed(tmp_path):
    """A file with a command raises with the function's name, and the command is not executed."""
    content = {"weight": torch.ones(1), "more": Bomb(f"touch {tmp_path}/ran")}
    torch.save(content, tmp_path / "bomb.pt")

    with pytest.raises(ValueError, match=r"^holds (posix|os|nt)\.system, which is not data"):
        read_torch_file(tmp_path / "bomb.pt")

    assert not (tmp_path / "ran").exists()


def test_changed_bytes(tmp_path):
    """A file with any changed bytes gives data, or raises the documented error and no other."""
    content = {"model": nn.Linear(2, 2).state_dict(), "rng": [{"numpy": np.arange(4, dtype=np.uint32)}]}
    content |= {"time": datetime.timedelta(seconds=3), "version": torch.__version__}
    torch.save(content, tmp_path / "good.pt")
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
            loaded = tree_leaves(read_torch_file(tmp_path / "bad.pt"))
        except ValueError:
            rejected += 1
        else:
            read += 1
            tensors = [one for one in loaded if isinstance(one, torch.Tensor)]
            assert sum(one.untyped_storage().nbytes() for one in tensors) < 10_000

    assert read > 10
    assert rejected > 10


@pytest.mark.parametrize("content", [b"", b"no file", b"PK\x03\x04 nothing", b"\x80\x02.", b"\x80\x02" + b"(" * 9999])
def test_other_files_raise(content, tmp_path):
    """Other files raise."""
    (tmp_path / "file.pt").write_bytes(content)

    with pytest.raises(ValueError, match=r"^is no"):
        read_torch_file(tmp_path / "file.pt")
