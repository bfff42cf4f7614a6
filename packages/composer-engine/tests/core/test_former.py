"""What programs for MosaicML Composer read from a run, and names in upper or lower case."""

import pickle

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from composer.core import Event, MemoryFormat, Precision, State, Time, Timestamp, TimeUnit
from composer.core.former import Device, StringEnum, to_device, warn_former


@pytest.fixture
def state():
    return State(nn.Linear(2, 2), dataloader=DataLoader(range(10), batch_size=2), max_duration="2ep")


class TestFormerState:
    @pytest.mark.parametrize(
        ("name", "value"),
        [
            ("is_model_ddp", False),
            ("fsdp_enabled", False),
            ("fsdp_config", None),
            ("fsdp_config_version", 0),
            ("fsdp_state_dict_type", None),
            ("fsdp_sharded_state_dict_enabled", False),
            ("load_monolith_rank0_only", False),
            ("deepspeed_enabled", False),
            ("precision_config", None),
            ("dataset_resumption", {}),
            ("save_metrics", True),
        ],
    )
    def test_former_attributes(self, state, name, value):
        """They have the value of a model that is not sharded, with a warning at the line that reads them."""
        with pytest.warns(DeprecationWarning, match=rf"state\.{name} is a former name: ") as caught:
            assert getattr(state, name) == value

        assert caught[0].filename == __file__

    def test_other_attributes_are_read_fast(self, state):
        """The class has no __getattr__, with which Python reads each attribute in each step several times as slowly."""
        assert not hasattr(State, "__getattr__")
        with pytest.raises(AttributeError, match="no attribute 'deepspeed'"):
            state.deepspeed  # noqa: B018

    def test_configuration_of_a_sharded_model(self, state, monkeypatch):
        """It is not in the state; the error contains where it is."""
        monkeypatch.setattr("composer.core.former.is_sharded", lambda _: True)

        with pytest.warns(DeprecationWarning, match="fsdp_enabled"):
            assert state.fsdp_enabled
        with (
            pytest.warns(DeprecationWarning, match="fsdp_config"),
            pytest.raises(AttributeError, match="read what you pass as parallelism_config"),
        ):
            _ = state.fsdp_config

    def test_unknown_attributes_raise(self, state):
        """A name that neither has is an error, without a warning."""
        with pytest.raises(AttributeError, match="'State' object has no attribute 'nothing'"):
            _ = state.nothing

        assert not hasattr(state, "nothing")


class TestLengthOfTheData:
    def test_it_is_a_number_and_a_time(self, state):
        """It computes as a number, and has the attributes of a time."""
        length = state.dataloader_len

        assert (length, length.value, length.unit, length.to_timestring()) == (5, 5, TimeUnit.BATCH, "5ba")
        assert length * 2 == 10
        assert Time(10, "ba") - length == Time(5, "ba")

    def test_assigned_values_are_converted(self, state):
        """Numbers and times can be assigned; None is an unknown length."""
        for given in (3, Time(3, "ba")):
            state.dataloader_len = given
            assert state.dataloader_len.value == 3
        state.dataloader_len = None
        assert state.dataloader_len is None
        state.set_dataloader(state.dataloader, "train", 2)
        assert state.dataloader_len.value == 2


class Kind(StringEnum):
    HELLO_WORLD = "hello_world"


class TestNames:
    @pytest.mark.parametrize("name", ["hello_world", "HELLO_WORLD", "Hello_World", Kind.HELLO_WORLD])
    def test_any_case_is_found_and_equal(self, name):
        """A member is found by its name or value in any case, and equals both."""
        assert Kind(name) is Kind.HELLO_WORLD
        assert name == Kind.HELLO_WORLD
        assert not name != Kind.HELLO_WORLD  # noqa: SIM202  (Python does not derive it from that of str)

    def test_precisions(self):
        """Precisions and memory formats are such names."""
        assert Precision.FP32 == "FP32"
        assert Precision("AMP_BF16") is Precision.AMP_BF16
        assert MemoryFormat("CHANNELS_LAST").to_torch() is torch.channels_last


def test_kinds_of_events():
    """Events of evaluations and predictions state that they are."""
    assert {one.name.split("_")[0] for one in Event if one.is_eval} == {"EVAL"}
    assert {one.name.split("_")[0] for one in Event if one.is_predict} == {"PREDICT"}
    assert not Event.BATCH_END.is_eval


def test_loading_a_timestamp():
    """A timestamp can be filled with saved counts in place, as Composer's."""
    clock = Timestamp()
    clock.load_state_dict(Timestamp(epoch=1, batch=5).state_dict())

    assert clock == Timestamp(epoch=1, batch=5)


def test_warnings_name_the_line_of_the_program():
    """The warning is given at the line that called the library."""
    with pytest.warns(DeprecationWarning, match="text") as caught:
        warn_former("text")

    assert caught[0].filename == __file__


class TestDevice:
    def test_equal_to_the_device_of_torch(self):
        """It equals torch's device in both directions, has its hash and repr, and is an instance."""
        device, other = Device("cuda:1"), torch.device("cuda", 1)

        assert device == other
        assert other == device
        assert device != Device("cuda:0")
        assert device != "cuda:1"
        assert isinstance(device, torch.device)
        assert {other: 3}[device] == 3
        assert (repr(device), str(device), device.type, device.index) == (repr(other), "cuda:1", "cuda", 1)

    def test_pickled(self):
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
                    torch.__version__.startswith("2.7."),
                    reason="torch 2.7 cannot trace an argument of a subclass of str",
                ),
            ),
        ],
    )
    def test_torch_accepts_it(self, use):
        """Functions of torch take it as a device."""
        assert use(Device("cpu")).device == Device("cpu")

    @pytest.mark.filterwarnings("ignore:composer.devices.Device:DeprecationWarning")
    def test_former_methods(self):
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

    def test_former_methods_warn_at_the_program(self):
        """The warning is at the line of the program."""
        with pytest.warns(DeprecationWarning, match=r"batch_to_device is a former name. Use move_batch") as caught:
            to_device("cpu").batch_to_device([])

        assert caught[0].filename == __file__

    def test_saved_by_torch(self, tmp_path):
        """torch.load reads a device and a clock that torch.save has written."""
        state = State(torch.nn.Linear(2, 2))
        torch.save({"device": state.device, **state.state_dict()}, tmp_path / "state.pt")

        read = torch.load(tmp_path / "state.pt", weights_only=True)

        assert read["device"] == torch.device("cpu")
        assert read["timestamp"]["batch"] == state.state_dict()["timestamp"]["Timestamp"]["batch"] == 0
