"""The device of a run is a torch.device, with Composer's methods."""

import copy
import pickle

import pytest
import torch

from composer.core import State
from composer.core.device import Device, to_device


def test_equal_to_the_device_of_torch():
    """It equals torch's device in both directions, has its hash and repr, and is an instance."""
    device, other = Device("cuda:1"), torch.device("cuda", 1)

    assert device == other
    assert other == device
    assert device != Device("cuda:0")
    assert device != "cuda:1"
    assert isinstance(device, torch.device)
    assert {other: 3}[device] == 3
    assert (repr(device), str(device), device.type, device.index) == (repr(other), "cuda:1", "cuda", 1)


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy])
def test_copies(copied):
    """A copy is an equal device of the same class."""
    assert copied(Device("cpu")) == Device("cpu")
    assert type(copied(Device("cpu"))) is Device


def test_pickled():
    """It is stored as torch's device, which torch.load reads."""
    assert type(pickle.loads(pickle.dumps(Device("cuda:1")))) is torch.device


@pytest.mark.parametrize(
    "use",
    [
        lambda device: torch.ones(2, device=device),
        lambda device: torch.ones(2).to(device),
        lambda device: torch.nn.Linear(2, 2).to(device).weight,
        lambda device: torch.ones(2).to(device=device, dtype=torch.float16),
        lambda device: torch.rand(2, device=device, generator=torch.Generator(device)),
        pytest.param(
            lambda device: torch.compile(lambda x: x.to(device), backend="eager", fullgraph=True)(torch.ones(2)),
            marks=pytest.mark.skipif(
                torch.__version__.startswith("2.7."), reason="torch 2.7 cannot trace an argument of a subclass of str"
            ),
        ),
    ],
)
def test_torch_accepts_it(use):
    """Functions of torch take it as a device."""
    assert use(Device("cpu")).device == Device("cpu")


def test_as_a_context():
    """Within its context, tensors are created on it."""
    with Device("meta"):
        assert torch.ones(2).is_meta
    assert not torch.ones(2).is_meta


@pytest.mark.filterwarnings("ignore:composer.devices.Device:DeprecationWarning")
def test_former_methods():
    """Batches, modules, tensors and the state of optimizers are moved."""
    device, parameter = State(model=None, device="meta").device, torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter], lr=0.1, momentum=0.9)
    parameter.grad = torch.ones(2)
    optimizer.step()

    batch = device.batch_to_device({"input": torch.ones(2), "names": ["a"]})

    assert batch["input"].is_meta
    assert batch["names"] == ["a"]
    assert device.tensor_to_device(torch.ones(2)).is_meta
    assert device.module_to_device(torch.nn.Linear(2, 2)).weight.is_meta
    assert device.optimizer_to_device(optimizer).state[parameter]["momentum_buffer"].is_meta
    assert [Device(name).name for name in ("cpu", "cuda:3", "mps")] == ["cpu", "gpu", "mps"]


def test_former_methods_warn_at_the_program():
    """The warning is at the line of the program."""
    with pytest.warns(DeprecationWarning, match=r"batch_to_device is a former name. Use move_batch") as caught:
        to_device("cpu").batch_to_device([])

    assert caught[0].filename == __file__


def test_saved_by_torch(tmp_path):
    """torch.load reads a device and a clock that torch.save has written."""
    state = State(torch.nn.Linear(2, 2))
    torch.save({"device": state.device, **state.state_dict()}, tmp_path / "state.pt")

    read = torch.load(tmp_path / "state.pt", weights_only=True)

    assert read["device"] == torch.device("cpu")
    assert read["timestamp"]["batch"] == state.state_dict()["timestamp"]["Timestamp"]["batch"] == 0
