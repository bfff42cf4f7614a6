"""What several tests use."""

from __future__ import annotations

import pytest
import torch

DEVICES = ["cpu", *([pytest.param("cuda", marks=pytest.mark.gpu)] if torch.cuda.is_available() else [])]


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> torch.device:
    """Every device that this machine has."""
    return torch.device(request.param)


@pytest.fixture
def generator() -> torch.Generator:
    """A source of randomness with a fixed seed."""
    return torch.Generator().manual_seed(17)


@pytest.fixture(autouse=True)
def _seed() -> None:
    """Make the inputs of every test the same each time."""
    torch.manual_seed(17)
