"""Configuration of the tests on the stand-in for a CUDA device, which are collected only where it is preloaded."""

import contextlib
import re

import pytest
import torch

from on_fake_device import guards

collect_ignore_glob = [] if guards.is_there() else ["test_*.py"]


def pytest_itemcollected(item):
    """Allow a loss of 0, as nothing is computed."""
    item.add_marker(pytest.mark.filterwarnings("ignore:The training loss is 0 in all batches"))


@pytest.fixture(autouse=True)
def _device():
    """Compute convolutions and attention without cuDNN, which has its own copy of the runtime."""
    torch.backends.cuda.enable_cudnn_sdp(enabled=False)
    with torch.backends.cudnn.flags(enabled=False):
        torch.manual_seed(0)
        yield


@pytest.fixture
def step(request):
    """Return the guard of a step; the exceptions have their number of waits in all steps of a test."""
    allowed = sum(waits for part, (waits, _) in guards.EXCEPTIONS.items() if re.search(part, request.node.name))
    waits = []

    @contextlib.contextmanager
    def guard():
        with guards.step(may_wait=allowed > 0) as counted:
            yield
        waits.extend(counted)

    yield guard
    assert sum(waits) == allowed
