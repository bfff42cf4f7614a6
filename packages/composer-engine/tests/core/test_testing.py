"""The contract suite detects and describes violations."""

import random
import subprocess
import sys
import warnings
from collections import OrderedDict, namedtuple
from typing import Any, ClassVar

import attrs
import pytest
import torch
from torch import nn

from composer.core import Algorithm, Event, NoEffectWarning, Stage, State
from composer.core.testing import (
    CHECKS,
    Case,
    Effects,
    RecordingState,
    Training,
    Watch,
    check_algorithm,
    check_declarations,
    check_effects,
    check_events,
    check_no_effect,
    check_order,
    check_randomness,
    check_refusals,
    check_repr,
    check_resume,
    check_reuse,
    check_settings,
    effects_of,
    observe,
    seeded,
)


class Net(nn.Module):
    """A layer, a norm and dropout, for pairs of features and class ids."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.2), nn.Linear(6, 3))

    def forward(self, batch):
        return self.layers(batch[0])

    def loss(self, outputs, batch):
        return nn.functional.cross_entropy(outputs, batch[1])


def make_state():
    model, batches = Net(), [(torch.rand(6, 4), torch.randint(3, (6,))) for _ in range(3)]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return State(model, optimizers=optimizer, max_duration="2ep", train_dataloader=batches)


@attrs.define(eq=False)
class AddNoise(Algorithm):
    """Add decreasing noise: an algorithm that fulfils the contract."""

    size: float = attrs.field(default=0.1, validator=attrs.validators.ge(0))
    _fades: float = attrs.field(default=1.0, init=False, repr=False)

    runs_at: ClassVar = {Event.AFTER_DATALOADER: Stage.AUGMENT, Event.BATCH_END: Stage.WEIGHTS}
    reads: ClassVar = {"batch.input", "timestamp"}
    writes: ClassVar = {"batch.input"}

    def apply(self, event, state, logger):
        if event is Event.BATCH_END:
            self._fades *= 0.9
            return
        if state.timestamp.batch == 0:
            self._fades = 1.0
        input = state.batch_get_item(0)
        noise = torch.randn(input.shape, generator=state.generator(self))
        state.batch_set_item(0, input + self.size * self._fades * noise)

    def state_dict(self):
        return {"fades": self._fades}

    def load_state_dict(self, state):
        self._fades = state["fades"]


def changed(base=AddNoise, **attributes):
    """Return a case of the same algorithm with other attributes."""
    return Case(type("AddNoise", (base,), attributes), make_state)


GOOD = Case(AddNoise, make_state, refused=(("size", -1),))


class TestValidAlgorithms:
    @pytest.mark.parametrize("check", CHECKS)
    def test_each_check_passes(self, check):
        """An algorithm that fulfils the contract passes."""
        assert check(GOOD) is None

    def test_check_algorithm_passes(self):
        """check_algorithm runs all checks."""
        assert check_algorithm(GOOD) is None

    def test_check_algorithm_runs_the_last_check(self):
        """The last check runs too."""
        with pytest.raises(AssertionError, match="resumed after"):
            check_algorithm(changed(state_dict=lambda self: {}, load_state_dict=lambda self, state: None))

    def test_global_generators_are_restored(self):
        """The suite does not change later draws of a test."""
        torch.manual_seed(3)
        random.seed(3)
        expected = torch.rand(1), random.random()
        torch.manual_seed(3)
        random.seed(3)

        check_algorithm(GOOD)

        assert (torch.rand(1), random.random()) == expected

    def test_does_not_require_pytest(self):
        """It can be imported without pytest."""
        program = "import sys; sys.modules['pytest'] = None; import composer.core.testing"

        assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


class TestDeclarations:
    @pytest.mark.parametrize(
        ("attributes", "text"),
        [
            (
                {"runs_at_events": lambda self: {Event.BATCH_START: Stage.MIX}},
                r"runs_at_events\(\) has <Event.BATCH_START.*runs_at",
            ),
            (
                {"reads": {"batch.input", "los"}},
                "reads has 'los', which is not a field of the state; use 'batch.<key>' or one of",
            ),
            ({"writes": {"weights"}}, "writes has 'weights', which is not a field"),
        ],
    )
    def test_wrong_declarations_are_reported(self, attributes, text):
        """Unknown events and fields are detected without a training."""
        with pytest.raises(AssertionError, match=f"AddNoise.{text}"):
            check_declarations(changed(**attributes))

    def test_changing_events(self):
        """Events that differ between two calls are detected."""
        answers = iter([{Event.BATCH_END: stage} for stage in (Stage.MIX, Stage.LOSS)] * 200)

        with pytest.raises(AssertionError, match=r"AddNoise.runs_at_events\(\) returned different events"):
            check_declarations(changed(runs_at_events=lambda self: next(answers)))

    def test_overridden_match(self):
        """An overridden match may return anything."""
        assert check_declarations(changed(match=lambda self, event, state: event is Event.INIT)) is None


class TestEvents:
    def test_never_called(self):
        """An algorithm that is never called is reported as untested."""
        with pytest.raises(AssertionError, match="AddNoise never ran in 6 batches"):
            check_events(changed(match=lambda self, event, state: False))

    def test_match_may_decline(self):
        """An algorithm with its own match need not run at every event."""
        assert check_events(changed(match=lambda self, event, state: event is Event.BATCH_END)) is None

    def test_all_events_occur(self):
        """The training of the suite runs every event that an algorithm can declare."""
        watch, _ = changed(runs_at=dict.fromkeys(Event, Stage.MIX), apply=lambda *_: None).watched()

        standalone = {Event.EVAL_STANDALONE_START, Event.EVAL_STANDALONE_END}
        assert {event for _, event in watch.ran} == {*Event} - standalone

    def test_unused_declared_event(self):
        """A declared event at which it never runs is reported."""
        with pytest.raises(AssertionError, match=r"declares <Event.EVAL_STANDALONE_START.* and never ran there"):
            check_events(changed(runs_at={Event.EVAL_STANDALONE_START: Stage.MIX, Event.BATCH_END: Stage.MIX}))

    def test_return_values(self):
        """A return value that is ignored is reported."""
        with pytest.raises(AssertionError, match=r"AddNoise.apply returned .* at 'after_dataloader'"):
            check_events(changed(apply=lambda self, event, state, logger: state))


def touching(act, event=Event.AFTER_LOSS, **attributes):
    """Return a case of an algorithm without declarations."""
    nothing = {"runs_at": {event: Stage.LOSS}, "reads": set(), "writes": set()}

    def apply(self, event, state, logger):
        act(state)

    return changed(apply=apply, **{**nothing, **attributes})


def set_to(name, change):
    return lambda state: setattr(state, name, change(getattr(state, name)))


def add_hook(state):
    state.model.register_forward_hook(lambda *_: None)


def freeze(state):
    state.model.layers[0].requires_grad_(False)


def put_layer(state):
    state.model.layers[3] = nn.Linear(6, 3)


READS = {
    "loss": lambda state: state.loss,
    "outputs": lambda state: state.outputs,
    "model": lambda state: state.model,
    "optimizers": lambda state: state.optimizers,
    "timestamp": lambda state: state.timestamp,
    "max_duration": lambda state: state.get_elapsed_duration(),
    "dataloader_len": lambda state: state.dataloader_len,
    "train_dataloader": lambda state: state.train_data_spec,
    "batch.input": lambda state: state.batch_get_item(0),
    "batch.target": lambda state: state.batch[1].sum(),
}
WRITES = {
    "loss": set_to("loss", lambda loss: loss * 2),
    "outputs": set_to("outputs", lambda outputs: outputs + 1),
    "timestamp": set_to("timestamp", lambda clock: clock.to_next_batch()),
    "max_duration": lambda state: state.stop_training(),
    "dataloader_len": set_to("dataloader_len", lambda length: length + 1),
    "schedulers": set_to("schedulers", lambda _: [object()]),
    "scaler": set_to("scaler", lambda _: torch.amp.GradScaler("cpu", enabled=False)),
    "gradients": lambda state: [parameter.grad.zero_() for parameter in state.model.parameters()],
    "optimizers": lambda state: state.optimizers[0].param_groups[0].update(lr=0.2),
    "train_dataloader": set_to("train_dataloader", list),
    "batch.input": lambda state: state.batch_set_item(0, state.batch[0] + 1),
    "batch.target": lambda state: state.batch[1].add_(0),
}


ALL = {*READS, *WRITES, "model"}


class TestEffects:
    @pytest.mark.parametrize("word", READS)
    def test_undeclared_reads(self, word):
        """An undeclared read is reported with the event and the declaration to write."""
        with pytest.raises(
            AssertionError, match=rf"AddNoise reads '{word}' at 'after_loss' .* Declare reads = \{{.*'{word}'"
        ):
            check_effects(touching(READS[word], reads=ALL - {word}, writes=ALL))

    @pytest.mark.parametrize("word", WRITES)
    def test_undeclared_writes(self, word):
        """Undeclared writes are reported: by assignment, in place, and within a field's value."""
        case = touching(WRITES[word], Event.AFTER_TRAIN_BATCH, reads=ALL, writes=ALL - {word})
        with pytest.raises(AssertionError, match=rf"AddNoise writes '{word}' at 'after_train_batch' .* Declare writes"):
            check_effects(case)

    @pytest.mark.parametrize("word", [*READS, *WRITES])
    def test_declared_fields(self, word):
        """Declared fields are not reported."""
        act, event = (READS[word], Event.AFTER_LOSS) if word in READS else (WRITES[word], Event.AFTER_TRAIN_BATCH)

        assert check_effects(touching(act, event, reads=ALL, writes=ALL)) is None

    @pytest.mark.parametrize("act", [add_hook, freeze, put_layer, lambda state: state.model.eval()])
    @pytest.mark.filterwarnings("ignore:Surgery")
    def test_changes_of_the_model(self, act):
        """Layers, hooks, modes and frozen parameters belong to the model, like weights."""
        with pytest.raises(AssertionError, match="AddNoise writes 'model' at 'batch_end'"):
            check_effects(touching(act, Event.BATCH_END, reads=ALL, writes=ALL - {"model"}))

    def test_buffers_changed_by_a_forward_pass(self):
        """An extra forward pass changes running statistics, which is reported."""
        case = touching(lambda state: state.model(state.batch), reads=ALL, writes=set())

        with pytest.raises(AssertionError, match="AddNoise writes 'model'"):
            check_effects(case)

    def test_complete_batch(self):
        """The declaration of the batch includes its items."""
        case = touching(lambda state: state.batch[0].add_(1), Event.BATCH_START, reads={"batch"}, writes={"batch"})

        assert check_effects(case) is None

    def test_all_effects(self):
        """effects_of returns the effects at all events."""
        assert effects_of(GOOD) == Effects({"batch.input", "timestamp"}, {"batch.input"})


@pytest.fixture
def batch_state():
    """Return a function that creates a state with a batch."""

    def make(batch):
        state = State(model=None)
        state.batch = batch
        return state

    return make


@attrs.define(eq=False)
class Keyed(AddNoise):
    input_key: Any = 0
    target_key: Any = 1


Pair = namedtuple("Pair", ["image", "label"])


class TestRecordingState:
    def test_unpacking_is_not_a_read(self, batch_state):
        """Passing the target on unchanged is not a read, and preserves the object."""
        target = torch.ones(2)
        state = batch_state((torch.ones(2), target))

        def act(view):
            input, kept = view.batch
            view.batch = (input + 1, kept)

        assert observe(state, None, act) == Effects({"batch.input"}, {"batch.input"})
        assert state.batch[1] is target
        assert type(state.batch[0]) is torch.Tensor

    @pytest.mark.parametrize(
        "look",
        [
            lambda target: target.shape,
            lambda target: torch.cat([target, target]),
            lambda target: target.tolist(),
            lambda target: target + 1,
            lambda target: nn.functional.relu(input=target),
        ],
    )
    def test_any_use_is_a_read(self, batch_state, look):
        """Shapes, functions, methods, operators and keyword arguments are reads; results are ordinary tensors."""
        view = RecordingState(batch_state((torch.ones(2), torch.ones(2))))

        result = look(view.batch[1])

        assert view.effects == Effects({"batch.target"})
        assert not isinstance(result, torch.Tensor) or type(result) is torch.Tensor

    def test_gradients_flow_through(self, batch_state):
        """Gradients flow through a batch of the view."""
        input = torch.ones(2, requires_grad=True)

        RecordingState(batch_state([input])).batch[0].sum().backward()

        assert torch.equal(input.grad, torch.ones(2))

    def test_writing_in_place(self, batch_state):
        """Writes in place are detected even with equal values, and change the batch."""
        state = batch_state((torch.ones(2), torch.zeros(2)))

        effects = observe(state, None, lambda view: view.batch[0].mul_(1))

        assert effects.writes == {"batch.input"}

    def test_equal_values(self, batch_state):
        """Replacing an item by an equal one is not a write."""
        effects = observe(batch_state((torch.ones(2),)), None, lambda view: view.batch_set_item(0, torch.ones(2)))

        assert effects == Effects()

    def test_unchanged_nan(self, batch_state):
        """NaN that is still NaN has not changed."""
        assert observe(batch_state((torch.tensor([float("nan")]),)), None, lambda view: None) == Effects()

    @pytest.mark.parametrize(
        ("batch", "keys", "words"),
        [
            (("x", "y", "w"), (), ["batch.input", "batch.target", "batch.2"]),
            (["x", "y"], (1, 0), ["batch.target", "batch.input"]),
            (("x", "y"), (-1, -2), ["batch.target", "batch.input"]),
            (Pair("x", "y"), ("label", "image"), ["batch.target", "batch.input"]),
            (Pair("x", "y"), (), ["batch.input", "batch.target"]),
            ({"a": "x", "b": "y", "c": "w"}, ("b", "a"), ["batch.target", "batch.input", "batch.c"]),
            ({"input_ids": "x", "labels": "y", "mask": "w"}, (), ["batch.input", "batch.target", "batch.input"]),
            (OrderedDict(image="x"), (), ["batch.input"]),
        ],
    )
    def test_names_of_items(self, batch_state, batch, keys, words):
        """The input and the target are found by the algorithm's keys or by convention."""
        values = {letter: torch.full((1,), float(place)) for place, letter in enumerate("xyw")}
        items = batch.items() if isinstance(batch, dict) else enumerate(batch)
        filled = {key: values[value] for key, value in items}
        if not isinstance(batch, dict):
            filled = type(batch)(*filled.values()) if isinstance(batch, Pair) else type(batch)(filled.values())
        algorithm = Keyed(input_key=keys[0], target_key=keys[1]) if keys else None

        for key, word in zip(range(len(words)) if not isinstance(batch, dict) else batch, words, strict=True):
            view = RecordingState(batch_state(filled), algorithm)
            view.batch[key].sum()
            assert view.effects.reads == {word}

    def test_item_by_key(self, batch_state):
        """Getting an item is a read."""
        view = RecordingState(
            batch_state({"x": torch.ones(1), "y": torch.ones(1)}), Keyed(input_key="x", target_key="y")
        )

        view.batch_get_item("y")

        assert view.effects.reads == {"batch.target"}

    def test_functions_as_keys(self, batch_state):
        """With functions as keys, getting the batch is a read of all items."""
        keys = [(lambda batch, name=name: getattr(batch, name), print) for name in ("image", "label")]
        state = batch_state(Pair(torch.ones(1), torch.zeros(1)))
        algorithm = Keyed(input_key=keys[0], target_key=keys[1])
        view = RecordingState(state, algorithm)

        assert view.batch is state.batch
        assert view.effects.reads == {"batch.input", "batch.target"}
        effects = observe(state, algorithm, lambda view: setattr(view, "batch", Pair(torch.ones(1), torch.ones(1))))
        assert effects.writes == {"batch.target"}

    def test_single_tensor(self, batch_state):
        """A single tensor is the input."""
        assert observe(batch_state(torch.ones(1)), None, lambda view: view.batch.add_(1)) == Effects(
            {"batch.input"}, {"batch.input"}
        )

    def test_undeclared_constants(self):
        """Constants of a run may be read without a declaration; a draw is not a read."""
        state = State(model=None, algorithms=[algorithm := AddNoise()])
        view = RecordingState(state)

        view.generator(algorithm).manual_seed(1)
        view.component_key(algorithm)

        assert view.effects.reads == {"component_key"}
        assert [owner for owner, _ in view.generators] == [algorithm]


class TestOrder:
    @pytest.mark.parametrize("event", [Event.BEFORE_LOSS, Event.AFTER_LOSS, Event.AFTER_DATALOADER, Event.INIT])
    def test_stages(self, event):
        """The order is correct also at events that reverse stages or the list."""
        assert check_order(changed(runs_at={event: Stage.LABEL})) is None

    def test_changing_stage(self):
        """A stage that differs between two calls causes a wrong order."""
        stages = iter([Stage.MIX, *[Stage.LOSS, Stage.AUGMENT] * 200])
        case = changed(
            runs_at={Event.BATCH_END: Stage.MIX}, runs_at_events=lambda self: {Event.BATCH_END: next(stages)}
        )

        with pytest.raises(AssertionError, match="AddNoise runs at 'batch_end' among"):
            check_order(case)


class TestNoEffect:
    @pytest.mark.parametrize(
        ("act", "text"),
        [
            (lambda: None, "and gave no warning: warnings.warn"),
            (lambda: warnings.warn("Nothing here", NoEffectWarning, stacklevel=1), "does not name it: Nothing here"),
            (lambda: warnings.warn("AddNoise has nothing", UserWarning, stacklevel=1), "gave no warning"),
        ],
    )
    def test_missing_warning(self, act, text):
        """A missing warning, a wrong category and a missing name are reported."""

        def apply(self, event, state, logger):
            if state.model is None:
                act()

        case = changed(runs_at={Event.INIT: Stage.MIX}, apply=apply)

        with pytest.raises(AssertionError, match=f"AddNoise found nothing to change.*{text}"):
            check_no_effect(attrs.evolve(case, make_unfit_state=lambda: State(model=None)))

    @pytest.mark.parametrize("error", [TypeError, ValueError])
    def test_error_instead_of_warning(self, error):
        """An error is accepted instead of a warning."""

        def refuse(self, event, state, logger):
            if not isinstance(state.model, Net):
                raise error("No net")

        case = changed(runs_at={Event.INIT: Stage.MIX}, apply=refuse)

        assert check_no_effect(attrs.evolve(case, make_unfit_state=lambda: State(model=None))) is None

    def test_false_alarm(self):
        """A warning is a violation if there was something to change."""

        def warn(self, event, state, logger):
            warnings.warn("AddNoise changed nothing", NoEffectWarning, stacklevel=1)

        with pytest.raises(AssertionError, match="AddNoise had something to change and warned all the same"):
            check_no_effect(changed(apply=warn))


@attrs.define(eq=False)
class Converting(AddNoise):
    size: float = attrs.field(default=0.5, converter=lambda size: size / 2)


@attrs.define(eq=False)
class UnsavedCount(AddNoise):
    size: float = 0.1

    def __deepcopy__(self, memo):
        return UnsavedCount(0.7)


@attrs.define(eq=False, repr=False)
class ExtraSetting(AddNoise):
    text: str = "ExtraSetting()"

    def __repr__(self):
        return self.text


class TestSettings:
    def test_non_idempotent_converter(self):
        """Settings that create a different algorithm cannot be saved."""
        with pytest.raises(
            AssertionError, match=r"Converting\(\*\*settings\) has other settings than \{'size': 0.25\}"
        ):
            check_settings(Case(Converting, make_state))

    def test_copies(self):
        """A copy must have the same settings."""
        with pytest.raises(AssertionError, match="A copy of UnsavedCount has other settings"):
            check_settings(Case(UnsavedCount, make_state))

    def test_changing_setting(self):
        """Running must not change a setting."""

        def grow(self, event, state, logger):
            self.size += 1

        with pytest.raises(
            AssertionError, match="Running changed AddNoise's setting size; store changing values in a field"
        ):
            check_settings(changed(apply=grow))

    @pytest.mark.parametrize(
        ("text", "complaint"),
        [
            ("ExtraSetting(", "prints as ExtraSetting.*, which is not how it is made"),
            ("ExtraSetting", "not how it is made: it is not a call"),
            ("Even()", "not how it is made: it calls Even"),
            ("ExtraSetting(width=3)", "not how it is made: 'width'"),
            ("ExtraSetting(0.5, 'ExtraSetting()')", "makes one with other settings"),
            ("<ExtraSetting>", "prints as <ExtraSetting>, which is not how it is made"),
        ],
    )
    def test_repr(self, text, complaint):
        """The repr must create the algorithm."""
        with pytest.raises(AssertionError, match=complaint):
            check_repr(Case(lambda: ExtraSetting(text=text), make_state))

    def test_repr_of_a_function_among_the_settings(self):
        """The repr of a function cannot be parsed; the rest is checked."""
        assert check_repr(Case(lambda: Keyed(input_key=(min, lambda: 1)), make_state)) is None

    def test_repr_of_a_plain_class(self):
        """The repr of a plain class has no settings."""

        class Plain(Algorithm):
            def apply(self, event, state, logger):
                pass

        with pytest.raises(
            AssertionError, match=r"Plain prints as .* make it an attrs class, @attrs.define\(eq=False\)"
        ):
            check_repr(Case(Plain, make_state))

    @pytest.mark.parametrize(
        ("error", "complaint"),
        [
            (None, "takes size=-2, which makes no sense"),
            (ValueError("must be positive, got -2"), "does not name the setting"),
            (TypeError("size must be positive"), "refuses size=-2 without it"),
        ],
    )
    def test_errors_for_bad_settings(self, error, complaint):
        """The error must contain the setting's name and value."""

        @attrs.define(eq=False)
        class Picky(AddNoise):
            size: float = 0.1

            def __attrs_post_init__(self):
                if self.size < 0 and error:
                    raise error

        with pytest.raises(AssertionError, match=complaint):
            check_refusals(Case(Picky, make_state, refused=(("size", -2),)))


def drawing(draw):
    """Return a case of an algorithm with a function that draws."""

    def apply(self, event, state, logger):
        if event is Event.AFTER_DATALOADER:
            state.batch_set_item(0, state.batch_get_item(0) + draw(self, state))

    return changed(apply=apply)


class TestRandomness:
    @pytest.mark.parametrize(
        ("draw", "source"),
        [
            (lambda self, state: torch.rand(1), "torch"),
            (lambda self, state: random.random(), "random"),
            (lambda self, state: torch.rand(1, generator=state.generator("me")), r"state.generator\('me'\)"),
        ],
    )
    def test_foreign_generators(self, draw, source):
        """A draw from another generator depends on other draws."""
        with pytest.raises(
            AssertionError, match=f"AddNoise draws from {source}, so .*generator=state.generator\\(self\\)"
        ):
            check_randomness(drawing(draw))

    def test_numpy(self):
        """NumPy's global generator is checked, too."""
        numpy = pytest.importorskip("numpy")

        with pytest.raises(AssertionError, match=r"AddNoise draws from numpy\.random"):
            check_randomness(drawing(lambda self, state: numpy.random.rand()))

    def test_persistent_generator(self):
        """A generator that persists across runs makes two runs with one seed differ."""
        own_generator = torch.Generator()

        with pytest.raises(AssertionError, match="Two runs of AddNoise with the same seed have different losses"):
            check_randomness(drawing(lambda self, state: torch.rand(1, generator=own_generator)))

    def test_draws_that_depend_on_others(self):
        """Draws that depend on other algorithms are detected."""

        def draw(self, state):
            return torch.rand(len(state.algorithms), generator=state.generator(self)).sum()

        with pytest.raises(AssertionError, match="AddNoise draws something else beside another algorithm that draws"):
            check_randomness(drawing(draw))

    def test_identical_draws(self, monkeypatch):
        """Two algorithms of a class must not draw the same."""
        by_key = State.generator
        monkeypatch.setattr(State, "generator", lambda self, owner, *rest: by_key(self, type(owner).__name__, *rest))

        with pytest.raises(AssertionError, match="Two AddNoise draw the same"):
            check_randomness(GOOD)

    def test_new_layers_may_draw(self):
        """Before training, new layers may draw their weights from torch's generator."""
        case = changed(runs_at={Event.INIT: Stage.MIX}, apply=lambda *_: torch.rand(1) and None)

        assert check_randomness(case) is None


class TestReuse:
    def test_state_of_an_earlier_training(self):
        """State that persists from an earlier training is detected."""

        def apply(self, event, state, logger):
            fades = self._fades
            AddNoise.apply(self, event, state, logger)
            self._fades = fades * 0.9

        with pytest.raises(AssertionError, match="AddNoise was used before, and a training that begins again with it"):
            check_reuse(changed(apply=apply))

    def test_state_reset_for_the_same_model_only(self):
        """State that is reset only for the same model is detected."""
        models = {}

        def apply(self, event, state, logger):
            AddNoise.apply(self, event, state, logger)
            if models.setdefault(self, state.model) is not state.model and state.timestamp.batch == 0:
                self._fades = 0.5

        with pytest.raises(AssertionError, match="AddNoise was used before, and a second training with it ends"):
            check_reuse(changed(apply=apply))

    @pytest.mark.parametrize("text", ["AddNoise has been used. Make a new one.", "Make a new one."])
    def test_error_on_reuse(self, text):
        """Raising an error with its name is allowed."""

        def apply(self, event, state, logger):
            if state.timestamp.batch == 0 and self._fades < 0.9:
                raise RuntimeError(text)
            AddNoise.apply(self, event, state, logger)

        if text.startswith("AddNoise"):
            assert check_reuse(changed(apply=apply)) is None
        else:
            with pytest.raises(AssertionError, match=r"AddNoise refuses .* and does not name itself: Make a new one"):
                check_reuse(changed(apply=apply))


class TestResume:
    @pytest.mark.parametrize(
        "attributes",
        [
            {"state_dict": lambda self: {}, "load_state_dict": lambda self, state: None},
            {"load_state_dict": lambda self, state: None},
        ],
    )
    def test_unsaved_state(self, attributes):
        """State that is not saved or not loaded changes the results."""
        with pytest.raises(
            AssertionError, match=r"AddNoise, a training that is resumed after 1 of 6 batches ends with"
        ):
            check_resume(changed(**attributes))

    @pytest.mark.parametrize("value", [(1, 2), {1, 2}, object(), {3: 4}, Event.INIT])
    def test_unserializable_state(self, value):
        """Only plain data and tensors can be saved; the error names the path."""
        with pytest.raises(AssertionError, match=r"^state_dict\(\)\['fades'\]\[0\] (is|has the key)"):
            check_resume(changed(state_dict=lambda self: {"fades": [value]}))

    @pytest.mark.parametrize(
        ("event", "act", "what"),
        [
            (Event.AFTER_LOSS, lambda state, count: setattr(state, "loss", state.loss + count), "losses"),
            (
                Event.BATCH_END,
                lambda state, count: state.model.layers[3].weight.data.add_(count),
                "model and optimizers and losses",
            ),
            (Event.FIT_START, lambda state, count: None, "algorithms"),
        ],
    )
    def test_differences_are_reported(self, event, act, what):
        """The error states what differs: losses, weights, or the algorithm's state."""

        @attrs.define(eq=False)
        class Counting(Algorithm):
            count: int = attrs.field(default=0, init=False)
            runs_at: ClassVar = {event: Stage.LOSS}

            def apply(self, event, state, logger):
                self.count += 1
                act(state, self.count)

            def state_dict(self):
                return {"count": self.count} if event is Event.FIT_START else {}

            def load_state_dict(self, state):
                self.count = state.get("count", 0)

        with pytest.raises(AssertionError, match=f"resumed after 1 of 6 batches ends with other {what} than"):
            check_resume(Case(Counting, make_state))

    def test_state_lost_within_an_epoch(self):
        """State that is only correct at the end of an epoch is detected."""

        def save(self):
            return {"fades": round(self._fades, 1)}

        with pytest.raises(AssertionError, match="resumed after"):
            check_resume(changed(state_dict=save))


class TestTraining:
    def test_events_in_the_order_of_the_diagram(self):
        """A training runs every event, in the order of Event's docstring."""

        class Everything(Algorithm):
            ran: ClassVar = []

            def match(self, event, state):
                return True

            def apply(self, event, state, logger):
                self.ran.append(event)

        training = Training(make_state(), [Everything()])
        training.run(3)
        training.finish()

        first = [*dict.fromkeys(Everything.ran)]
        evaluated = [event for event in first if not event.startswith(("eval", "predict"))]
        assert evaluated == [event for event in Event if not event.startswith(("eval", "predict"))]
        assert Everything.ran.count(Event.BATCH_END) == 3
        assert Everything.ran.count(Event.EPOCH_END) == 1

    def test_trains(self):
        """It takes the same steps as a plain loop."""
        state, expected = (Case(AddNoise, make_state).new_state() for _ in range(2))
        for module in (state.model, expected.model):
            module.layers[2].p = 0.0
        optimizer = expected.optimizers[0]
        for batch in expected.train_dataloader:
            optimizer.zero_grad()
            expected.model.loss(expected.model(batch), batch).backward()
            optimizer.step()

        Training(state, []).run(3)

        pairs = zip(state.model.parameters(), expected.model.parameters(), strict=True)
        assert all(torch.equal(one, other) for one, other in pairs)

    @pytest.mark.parametrize("parts", [1, 4])
    def test_stopping_does_not_change_results(self, parts):
        """Results do not depend on where the training is stopped."""
        training = Case(AddNoise, make_state).train(AddNoise())
        complete = Case(AddNoise, make_state).train(AddNoise())
        complete.run(4)

        for until in [4] if parts == 1 else range(1, 5):
            training.run(until)

        assert {**training.losses} == {**complete.losses}
        assert training.state.timestamp == complete.state.timestamp

    def test_several_optimizers(self):
        """Several optimizers step without a closure."""
        state = make_state()
        parameters = [*state.model.parameters()]
        state.optimizers = [torch.optim.SGD(part, lr=0.1) for part in (parameters[:2], parameters[2:])]
        before = [parameter.detach().clone() for parameter in parameters]

        Training(state, []).run(1)

        assert not any(torch.equal(one, other) for one, other in zip(before, parameters, strict=True))

    def test_optimizer_with_closure(self):
        """Each call of the closure has the same draws and batch."""
        recorded = []

        class Twice(torch.optim.SGD):
            def step(self, closure):
                with torch.enable_grad():
                    closure()
                return super().step(closure)

        def look(self, event, state, logger):
            if event is Event.BEFORE_FORWARD:
                state.batch_set_item(0, torch.rand(6, 4, generator=state.generator(self)))
                recorded.append(state.batch[0])

        state = make_state()
        state.optimizers = Twice(state.model.parameters(), lr=0.1)
        algorithm = changed(runs_at={Event.BEFORE_FORWARD: Stage.MIX}, apply=look).make()

        Training(state, [algorithm]).run(2)

        assert [torch.equal(recorded[0], one) for one in recorded] == [True, True, False, False]

    def test_several_losses(self):
        """A dictionary of losses is summed."""

        class Double(Net):
            def loss(self, outputs, batch):
                loss = super().loss(outputs, batch)
                return {"one": loss, "two": loss}

        state, single = (Case(AddNoise, make_state).new_state() for _ in range(2))
        state.model.__class__ = Double

        trainings = [Training(one, []) for one in (state, single)]
        for training in trainings:
            training.run(1)

        assert trainings[0].losses[0] == 2 * trainings[1].losses[0]


class TestSeeded:
    def test_seeded_by_arguments(self):
        """The arguments determine the draws of torch and Python."""

        def draw(*words):
            with seeded(*words):
                return torch.rand(1).item(), random.random()

        assert draw("a", 1) == draw("a", 1)
        assert len({draw("a", 1), draw("a", 2), draw("b", 1)}) == 3


class TestWatch:
    def test_other_algorithms_are_not_wrapped(self):
        """Only the watched algorithm receives a view of the state."""
        states = []

        def look(self, event, state, logger):
            states.append(type(state))

        other, watched = (changed(apply=look).make() for _ in range(2))
        state = make_state()

        Watch(watched).make_engine(state, algorithms=[watched, other]).run_event(Event.BATCH_END)

        assert states == [RecordingState, State]
