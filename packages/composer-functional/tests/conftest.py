"""Shared fixtures."""

from __future__ import annotations

import pytest
import torch

DEVICES = ["cpu", *([pytest.param("cuda", marks=pytest.mark.gpu)] if torch.cuda.is_available() else [])]


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> torch.device:
    """Every available device."""
    return torch.device(request.param)


@pytest.fixture
def generator() -> torch.Generator:
    """A generator with a fixed seed."""
    return torch.Generator().manual_seed(17)


@pytest.fixture(autouse=True)
def _seed() -> None:
    """Seed the inputs of every test."""
    torch.manual_seed(17)
