"""Functions of Composer that change models."""

import socket

import pytest
import torch
from torch import nn

from composer.compat.replacements import FSDPConfig, TPConfig
from composer.compat.surgery import (
    prepare_ddp_module,
    prepare_fsdp_module,
    prepare_tp_module,
    register_alibi,
)
from composer.functional import AlibiBias


@pytest.fixture
def group(monkeypatch):
    """Create a process group of one process."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    for name, value in {"RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}.items():
        monkeypatch.setenv(name, str(value))
    torch.distributed.init_process_group("gloo")
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("heads", [4, 6])
@pytest.mark.parametrize("causal", [False, True])
def test_biases_of_alibi(heads, causal):
    """The buffer has the biases of the surgery; a causal one differs by what is the same for all keys of a query."""
    module = register_alibi(nn.Linear(2, 2), heads, 5, causal)
    expected = AlibiBias(heads, causal=False)(5, 5).reshape(heads, 5, 5)

    assert module.alibi.shape == ((heads, 1, 5) if causal else (1, heads, 5, 5))
    if causal:
        mask = torch.full((5, 5), float("-inf")).triu(1)
        torch.testing.assert_close((module.alibi + mask).softmax(-1), (expected + mask).softmax(-1))
    else:
        torch.testing.assert_close(module.alibi[0], expected)


def test_modules_are_prepared(group):
    """A sharded model has the outputs of the plain one, and its optimizer trains it; DDP needs several processes."""
    torch.manual_seed(0)
    model, batch = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), torch.rand(3, 4)
    expected = model(batch)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    assert prepare_ddp_module(model, find_unused_parameters=True) is model
    assert prepare_fsdp_module(model, optimizer, FSDPConfig(use_orig_params=True), "fp32", "cpu") == ([], {})

    before = model[1].bias.full_tensor().clone()  # torch 2.7 leaves the parameters unsharded after a forward pass
    torch.testing.assert_close(model(batch), expected)
    assert isinstance(model, torch.distributed.fsdp.FSDPModule)
    model(batch).sum().backward()
    optimizer.step()
    torch.testing.assert_close(model[1].bias.full_tensor(), before - 0.3)


def test_layers_are_split(group):
    """A model with split layers has the outputs of the plain one."""
    model, batch = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), torch.rand(3, 4)
    expected = model(batch)

    prepare_tp_module(model, None, TPConfig(None, 1, {"0": "colwise", "1": "rowwise"}))

    assert isinstance(model[0].weight, torch.distributed.tensor.DTensor)
    torch.testing.assert_close(model(batch), expected)
