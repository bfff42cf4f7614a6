"""The contract suite detects and describes violations."""

import random
import warnings
from typing import ClassVar

import attrs
import pytest
import torch
from torch import nn

from composer.core import Algorithm, Event, NoEffectWarning, Stage, State
from composer.core.testing import (
    CHECKS,
    Case,
    check_acts,
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
)
from fixtures.models import WithLoss
from fixtures.noise import AddNoise, changed, make_state

GOOD = Case(AddNoise, make_state, refused=(("size", -1),))


class TestValidAlgorithms:
    @pytest.mark.parametrize("check", CHECKS)
    def test_each_check_passes(self, check):
        """An algorithm that fulfils the contract passes."""
        assert check(GOOD) is None

    def test_check_algorithm_passes(self):
        """check_algorithm runs all checks."""
        assert check_algorithm(GOOD) is None


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

    def test_overridden_match(self):
        """An overridden match may return anything."""
        assert check_declarations(changed(match=lambda self, event, state: event is Event.INIT)) is None


class TestEvents:
    def test_never_called(self):
        """An algorithm that is never called is reported as untested."""
        with pytest.raises(AssertionError, match="AddNoise never ran in 6 batches"):
            check_events(changed(match=lambda self, event, state: False))

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
    state.model.network[0].requires_grad_(False)


def put_layer(state):
    state.model.network[3] = nn.Linear(6, 3)


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


class TestOrder:
    @pytest.mark.parametrize("event", [Event.BEFORE_LOSS, Event.AFTER_LOSS, Event.AFTER_DATALOADER, Event.INIT])
    def test_stages(self, event):
        """The order is correct also at events that reverse stages or the list."""
        assert check_order(changed(runs_at={event: Stage.LABEL})) is None

    def test_changing_stage(self):
        """A stage that differs between two calls causes a wrong order."""
        stages = iter([Stage.MIX, *[Stage.LOSS, Stage.AUGMENT, Stage.AUGMENT] * 200])
        case = changed(
            runs_at={Event.BATCH_END: Stage.MIX}, runs_at_events=lambda self: {Event.BATCH_END: next(stages)}
        )

        with pytest.raises(AssertionError, match="AddNoise runs at 'batch_end' among"):
            check_order(case)


class TestNoEffect:
    @pytest.mark.parametrize(
        ("act", "text"),
        [
            (lambda: None, "and did not warn: warnings.warn"),
            (lambda: warnings.warn("Nothing here", NoEffectWarning, stacklevel=1), "does not name it: Nothing here"),
            (lambda: warnings.warn("AddNoise has nothing", UserWarning, stacklevel=1), "did not warn"),
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

        def fail(self, event, state, logger):
            if not isinstance(state.model, WithLoss):
                raise error("No net")

        case = changed(runs_at={Event.INIT: Stage.MIX}, apply=fail)

        assert check_no_effect(attrs.evolve(case, make_unfit_state=lambda: State(model=None))) is None

    def test_false_alarm(self):
        """A warning is a violation if there was something to change."""

        def warn(self, event, state, logger):
            warnings.warn("AddNoise changed nothing", NoEffectWarning, stacklevel=1)

        with pytest.raises(AssertionError, match="AddNoise had something to change and warned all the same"):
            check_no_effect(changed(apply=warn))


class TestActs:
    def test_no_difference(self):
        """An algorithm that runs and changes nothing is reported, unless its results are declared to be the same."""
        idle = changed(apply=lambda self, event, state, logger: None, state_dict=lambda self: {})

        with pytest.raises(AssertionError, match="AddNoise acted in none of 6 batches"):
            check_acts(idle)
        with pytest.raises(AssertionError, match="AddNoise has neither changed nor stored anything"):
            check_acts(attrs.evolve(idle, same_results=True))

    def test_stored_only(self):
        """An algorithm that only stores something acts, if its results are declared to be the same."""
        stores = changed(apply=lambda self, event, state, logger: None)

        assert check_acts(attrs.evolve(stores, same_results=True)) is None


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

    @pytest.mark.parametrize(
        ("error", "complaint"),
        [
            (None, "takes size=-2, which makes no sense"),
            (ValueError("must be positive, got -2"), "does not name the setting"),
            (TypeError("size must be positive"), "rejects size=-2 without it"),
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
            with pytest.raises(AssertionError, match=r"AddNoise rejects .* and does not name itself: Make a new one"):
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

    @pytest.mark.parametrize("value", [object(), print, b"x"])
    def test_unserializable_state(self, value):
        """Only data and tensors can be saved; the error names the path."""
        with pytest.raises(AssertionError, match=r"^state_dict\(\): fades\[0\]: .* cannot be saved"):
            check_resume(changed(state_dict=lambda self: {"fades": [value]}))

    @pytest.mark.parametrize(
        ("event", "act", "what"),
        [
            (Event.AFTER_LOSS, lambda state, count: setattr(state, "loss", state.loss + count), "losses"),
            (
                Event.BATCH_END,
                lambda state, count: state.model.network[3].weight.data.add_(count),
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
