"""Process groups of all processes, and of some."""

import pytest
import torch
from torch.testing._internal.distributed import fake_pg

from composer import distributed as cd
from composer.distributed.groups import with_timeout


def test_backend_without_timeout():
    """A process group whose backend has no timeout, as torch's "fake", stays as it is."""
    torch.distributed.init_process_group("fake", store=fake_pg.FakeStore(), rank=0, world_size=2)
    try:
        group = torch.distributed.new_group()
        assert with_timeout(group) is group
    finally:
        torch.distributed.destroy_process_group()


def test_missing_process_group_raises(monkeypatch):
    """Several processes without a process group raise."""
    monkeypatch.setenv("WORLD_SIZE", "2")

    with pytest.raises(RuntimeError, match=r"initialize_dist\(device\) first"):
        cd.all_reduce(torch.ones(1))
