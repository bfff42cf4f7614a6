"""Weights and optimizer state by name."""

import copy

import pytest
import torch
from torch import nn

from composer.core import State, StateMismatchError
from fixtures import same_bits


def load(state, saved, *, strict=True):
    """Load weights or optimizers into a run, which keeps everything else."""
    return state.load_state_dict(state.state_dict() | saved, strict=strict)


def make_net(bias=True):
    return nn.Sequential(nn.Linear(4, 3, bias=bias), nn.BatchNorm1d(3), nn.Linear(3, 2))


class Compiled(nn.Module):
    """A wrapper that names the module like torch.compile."""

    def __init__(self, model):
        super().__init__()
        self._orig_mod = model


def step(state, seed=0):
    """Take one step with constant input."""
    generator = torch.Generator().manual_seed(seed)
    loss = state.model(torch.rand(8, 4, generator=generator)).square().mean()
    for optimizer in state.optimizers:
        optimizer.zero_grad()
    loss.backward()
    for optimizer in state.optimizers:
        optimizer.step()
    return state


OPTIMIZERS = {
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, dampening=0.1),
    "Adam": lambda params: torch.optim.Adam(params, lr=0.01, amsgrad=True),
    "AdamW with a tensor for lr": lambda params: torch.optim.AdamW(params, lr=torch.tensor(0.01), foreach=False),
    "Adagrad": torch.optim.Adagrad,
    "RMSprop": lambda params: torch.optim.RMSprop(params, momentum=0.5, centered=True),
    "NAdam": torch.optim.NAdam,
    "Adafactor": torch.optim.Adafactor,
}


@pytest.fixture
def trained():
    """Return a function that creates a state after two steps."""

    def make(optimizer, **options):
        model = make_net(**options)
        return step(step(State(model=model, optimizers=optimizer(model.parameters()))), seed=1)

    return make


class TestModel:
    def test_names_exclude_wrappers(self):
        """Names do not contain the prefixes of torch's wrappers."""
        model = make_net()
        compiled = Compiled(model)
        parallel = nn.DataParallel(model)

        names = [list(State(model=one).get_model_state_dict()) for one in (model, compiled, parallel)]

        assert names == [list(model.state_dict())] * 3

    @pytest.mark.parametrize("wrap", [Compiled, nn.DataParallel, lambda model: model])
    def test_wrapped_and_bare_are_interchangeable(self, wrap):
        """A state saved from one is loaded into the other."""
        source, target = make_net(), make_net()

        load(State(model=wrap(target)), {"model": State(model=source).get_model_state_dict()})

        assert same_bits(source.state_dict(), target.state_dict())

    def test_weights_are_copied_on_load_only(self):
        """Saving does not copy; a loaded model is independent."""
        source, target = make_net(), make_net()
        weights = State(model=source).get_model_state_dict()

        load(State(model=target), {"model": weights})

        assert weights["0.weight"].data_ptr() == source[0].weight.data_ptr()
        assert target[0].weight.data_ptr() != source[0].weight.data_ptr()

    def test_all_differences_are_reported_together(self):
        """Shapes, missing and unexpected names are reported, with suggestions, and nothing changes."""
        model = make_net()
        before = copy.deepcopy(model.state_dict())
        saved = dict(model.state_dict())
        saved["0.wieght"] = saved.pop("0.weight") + 1
        saved["2.bias"] = torch.zeros(7)
        saved["0.bias"] = "text"

        with pytest.raises(StateMismatchError) as caught:
            load(State(model=model), {"model": saved})

        advice = "load_ignore_keys='%s' of a Trainer keeps its own."
        assert set(caught.value.problems) == {
            f"model.2.bias: must be a tensor of shape (2,), got a tensor of shape (7,); {advice % 'model/2.bias'}",
            f"model.0.bias: must be a tensor of shape (3,), got no tensor; {advice % 'model/0.bias'}",
            "model.0.weight is not saved; did you mean '0.wieght'?",
            "model.0.wieght is saved, and the model has no such weight; did you mean '0.weight'?",
        }
        assert same_bits(before, model.state_dict())

    def test_strict_false(self):
        """Common weights are loaded and the others reported; another shape is still an error."""
        source, target = make_net(), make_net(bias=False)
        state = State(model=target)

        with pytest.warns(UserWarning, match=r"model\.0\.bias is saved, and the model has no such weight"):
            report = load(state, {"model": source.state_dict()}, strict=False)

        assert torch.equal(target[0].weight, source[0].weight)
        assert len(report.unexpected) == 1
        with pytest.raises(StateMismatchError, match="must be a tensor of shape"):
            load(state, {"model": {"0.weight": torch.zeros(1)}}, strict=False)

    def test_tied_weights_are_loaded(self):
        """Also if they are NaN, after a training that diverged."""
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        model[1].weight = model[0].weight
        with torch.no_grad():
            model[0].weight[0] = torch.nan
        saved = copy.deepcopy(State(model).get_model_state_dict())
        torch.nn.init.ones_(model[0].weight)

        load(State(model), {"model": saved})

        assert model[1].weight.isnan().tolist() == [[True, True], [False, False]]

    def test_other_dtype_warns(self):
        """Converting weights to another dtype gives a warning."""
        source = {name: value.double() for name, value in make_net().state_dict().items() if value.is_floating_point()}
        state = State(model=make_net())

        with pytest.raises(
            StateMismatchError, match=r"model\.0\.bias: torch\.float64 was saved, torch\.float32 is set"
        ):
            load(state, {"model": state.get_model_state_dict() | source})


class TestOptimizers:
    @pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
    def test_resume_is_bit_identical(self, trained, make):
        """A second optimizer with loaded state takes a bit-identical third step."""
        first, second = trained(make), trained(make)
        weights, states = copy.deepcopy((first.get_model_state_dict(), first.get_optim_state_dict()))

        load(second, {"model": weights})
        load(second, {"optimizers": states})
        step(first, seed=2)
        step(second, seed=2)

        assert same_bits(first.model.state_dict(), second.model.state_dict())

    def test_order_of_parameters_does_not_matter(self, trained):
        """State is stored by name, not by index."""
        first = trained(OPTIMIZERS["Adam"])
        second = State(model=make_net())
        second.optimizers = torch.optim.Adam(reversed(list(second.model.parameters())), lr=0.5, amsgrad=True)

        load(second, {"optimizers": first.get_optim_state_dict()})

        for own, other in zip(first.model.parameters(), second.model.parameters(), strict=True):
            assert torch.equal(first.optimizers[0].state[own]["exp_avg"], second.optimizers[0].state[other]["exp_avg"])
        assert second.optimizers[0].param_groups[0]["lr"] == 0.01

    def test_several_optimizers(self):
        """Two optimizers of one class are distinguished by position."""
        model = make_net()
        one, other, third = (
            torch.optim.SGD(model[0].parameters(), lr=0.1),
            *(kind(model[2].parameters(), lr=0.2) for kind in (torch.optim.Adam, torch.optim.SGD)),
        )

        states = State(model=model, optimizers=[one, other, third]).get_optim_state_dict()

        assert {key: value["param_groups"][0]["params"] for key, value in states.items()} == {
            "SGD": ["0.weight", "0.bias"],
            "Adam": ["2.weight", "2.bias"],
            "SGD.1": ["2.weight", "2.bias"],
        }

    def test_values_of_other_types(self):
        """Types, devices, shapes and lists of tensors in groups and states, as of Kron, are saved and loaded."""

        class Preconditioned(torch.optim.SGD):
            def step(self, closure=None):
                super().step()
                for group in self.param_groups:
                    group.setdefault("factors", [torch.zeros(2)])[0].add_(1)
                    for weight in group["params"]:
                        held = self.state[weight]
                        held.setdefault("dtype", torch.bfloat16)
                        held.setdefault("factors", [torch.zeros(size, dtype=torch.float64) for size in weight.shape])[
                            0
                        ].add_(1)
                        held["rules"] = ("ab,b->a", [None, weight.shape])

        def make(dtype, device):
            model = make_net()
            group = {"params": list(model.parameters()), "dtype": dtype, "placed": [torch.device(device)]}
            return State(model=model, optimizers=Preconditioned([group], lr=0.1))

        first, second = make(torch.bfloat16, "meta"), make(None, "cpu")
        step(step(first))

        load(second, {"optimizers": first.get_optim_state_dict()})

        [saved], [loaded] = first.optimizers[0].param_groups, second.optimizers[0].param_groups
        assert (loaded["dtype"], loaded["placed"]) == (torch.bfloat16, [torch.device("meta")])
        assert torch.equal(loaded["factors"][0], saved["factors"][0])
        for own, other in zip(first.model.parameters(), second.model.parameters(), strict=True):
            expected, held = first.optimizers[0].state[own], second.optimizers[0].state[other]
            assert (held["dtype"], held["rules"]) == (torch.bfloat16, ("ab,b->a", [None, tuple(own.shape)]))
            assert all(map(torch.equal, held["factors"], expected["factors"]))
            assert {factor.dtype for factor in held["factors"]} == {torch.float64}  # and not that of the weight

    def test_nothing_changes_if_one_raises(self, trained):
        """A state with which ``load_state_dict`` of the second of two optimizers fails changes neither."""
        model = make_net()
        state = State(
            model=model, optimizers=[OPTIMIZERS["SGD"](model[0].parameters()), torch.optim.Adam(model[2].parameters())]
        )
        saved = copy.deepcopy(step(state).get_optim_state_dict())
        before = copy.deepcopy(step(state, seed=1).get_optim_state_dict())
        held = saved["Adam"]["state"]["2.bias"]
        held["st p"] = held.pop("step")

        with pytest.raises(
            StateMismatchError, match=r"optimizers\.Adam cannot load its saved state \(KeyError: 'step'\)"
        ):
            load(state, {"optimizers": saved})

        assert repr(state.get_optim_state_dict()) == repr(before)

    def test_state_within_a_dictionary(self):
        """A state that is saved in another form than it is held, as bitsandbytes does, resumes, also in float32."""

        class Wrapping(torch.optim.Adam):
            def state_dict(self):
                state = super().state_dict()
                for number, held in state["state"].items():
                    state["state"][number] = {"step": held["step"], "wrapped": {**held, "step": None}}
                return state

            def load_state_dict(self, state_dict):
                states = state_dict["state"].items()
                held = {number: {**one["wrapped"], "step": one["step"]} for number, one in states}
                super().load_state_dict({**state_dict, "state": held})

        def make():
            model = nn.Linear(2, 2).bfloat16()
            return State(model=model, optimizers=Wrapping(model.parameters()))

        first, second = make(), make()
        first.model(torch.ones(1, 2, dtype=torch.bfloat16)).sum().backward()
        first.optimizers[0].step()
        for held in first.optimizers[0].state.values():
            held["exp_avg"] = torch.full_like(held["exp_avg"], 1 / 3, dtype=torch.float32)

        load(second, {"optimizers": first.get_optim_state_dict()})

        assert repr(second.get_optim_state_dict()) == repr(first.get_optim_state_dict())
        assert second.optimizers[0].state[second.model.weight]["exp_avg"].dtype is torch.float32

    def test_state_dtype_is_preserved(self):
        """A 32-bit average of 16-bit weights stays in 32 bits."""
        model = nn.Linear(2, 2).bfloat16()
        state = State(model=model, optimizers=torch.optim.Adam(model.parameters()))
        model(torch.ones(1, 2, dtype=torch.bfloat16)).sum().backward()
        state.optimizers[0].step()
        param_state = state.optimizers[0].state[model.weight]
        param_state["exp_avg"] = param_state["exp_avg"].float() + 1e-6
        expected = param_state["exp_avg"].clone()

        load(state, {"optimizers": copy.deepcopy(state.get_optim_state_dict())})

        assert torch.equal(state.optimizers[0].state[model.weight]["exp_avg"], expected)

    def test_parameters_outside_the_model(self):
        """They are named by position and restored too."""
        model, extra = make_net(), nn.Parameter(torch.ones(1))

        def make():
            optimizer = torch.optim.SGD([*model.parameters(), extra], lr=0.1, momentum=0.9)
            return State(model=model, optimizers=optimizer)

        first, second = make(), make()
        extra.sum().backward()
        first.optimizers[0].step()

        states = first.get_optim_state_dict()
        load(second, {"optimizers": states})

        assert list(states["SGD"]["state"]) == ["group 0 parameter 6"]
        assert torch.equal(second.optimizers[0].state[extra]["momentum_buffer"], torch.ones(1))

    def test_differences(self, trained):
        """Names on one side only and changed groups are reported; nothing is loaded."""
        first = trained(OPTIMIZERS["SGD"], bias=False)
        second = State(model=make_net())
        groups = [{"params": list(second.model[0].parameters())}, {"params": list(second.model[1:].parameters())}]
        second.optimizers = torch.optim.SGD(groups, lr=0.7)

        with pytest.raises(StateMismatchError) as caught:
            load(second, {"optimizers": first.get_optim_state_dict() | {"SDG": {}}})

        assert "optimizers.SGD.0.bias is not saved." in caught.value.problems
        assert "optimizers.SGD.2.weight was saved in group 0, and is in group 1." in caught.value.problems
        assert "optimizers.SGD.param_groups: 1 groups are saved, and the optimizer has 2." in caught.value.problems
        assert "optimizers.SDG is saved, and the run has no such optimizer." in caught.value.problems
        assert second.optimizers[0].param_groups[0]["lr"] == 0.7

    def test_strict_false(self, trained):
        """Matching state is loaded; a parameter that was not saved keeps its state."""
        first, second = trained(OPTIMIZERS["SGD"], bias=False), trained(OPTIMIZERS["SGD"])
        own = second.optimizers[0].state[second.model[0].bias]["momentum_buffer"].clone()

        with pytest.warns(UserWarning, match=r"optimizers\.SGD\.0\.bias is not saved"):
            load(second, {"optimizers": first.get_optim_state_dict()}, strict=False)

        param_state = second.optimizers[0].state
        assert torch.equal(param_state[second.model[0].bias]["momentum_buffer"], own)
        assert torch.equal(
            param_state[second.model[0].weight]["momentum_buffer"],
            first.optimizers[0].state[first.model[0].weight]["momentum_buffer"],
        )
