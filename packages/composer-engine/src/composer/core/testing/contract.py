"""The contract of all algorithms, as checks that describe a violation in one sentence."""

from __future__ import annotations

import ast
import copy
import inspect
import warnings
from typing import TYPE_CHECKING, Any

import attrs
import torch
from torch import nn

from composer.core.base import Algorithm, NoEffectWarning
from composer.core.declarations import ALWAYS_SERVED, FIELDS, FieldsByEvent, fields_at, find_conflicts
from composer.core.engine import Engine
from composer.core.evaluator import evaluation_weights
from composer.core.event import CLOSING_EVENTS, Event, Stage
from composer.core.planning import build_plan, overrides_match
from composer.core.saving.codec import equal
from composer.core.testing.effects import Watch
from composer.core.testing.loop import Training, seeded, through_json
from composer.core.time import Timestamp

if TYPE_CHECKING:
    from collections.abc import Callable

    from composer.core.logger import Logger
    from composer.core.state import State
    from composer.core.testing.effects import Effects


@attrs.frozen
class Case:
    """An algorithm, and how to test it.

    Args:
        make: Returns a new algorithm, each time with the same settings.
        make_state: Returns a new state to which the algorithm applies: with a model, optimizers, a ``max_duration`` and
            a ``train_dataloader`` of at least two batches per epoch. It is called with the same seed each time; the
            tensors of its batches must not be shared.
        batches: The number of batches to train, so that all events of the algorithm occur.
        make_unfit_state: Returns a state in which the algorithm finds nothing to change, if there is such a state.
        same_results: Whether losses and weights are those of a training without the algorithm, which changes only how
            they are computed, or stores something.
        refused: Invalid settings, each combined with the other settings of ``make``: ``(("alpha", -1), ...)``.
    """

    make: Callable[[], Algorithm]
    make_state: Callable[[], State]
    batches: int = 6
    make_unfit_state: Callable[[], State] | None = None
    refused: tuple[tuple[str, Any], ...] = ()
    same_results: bool = attrs.field(default=False, kw_only=True)

    def new_state(self) -> State:
        """Return a new state, the same each time."""
        with seeded("state"):
            return self.make_state()

    def train(
        self, *algorithms: Algorithm, loaded: dict[str, Any] | None = None, watch: Watch | None = None
    ) -> Training:
        """Return a training of a new state that has not started."""
        return Training(self.new_state(), algorithms, loaded, Engine if watch is None else watch.make_engine)

    def watched(self, *before: Algorithm, after: tuple[Algorithm, ...] = ()) -> tuple[Watch, Training]:
        """Return the watch of an algorithm of the case after a training with others, and the training."""
        watch = Watch(self.make())
        training = self.train(*before, watch.algorithm, *after, watch=watch)
        training.run(self.batches)
        training.finish()
        return watch, training


def check_algorithm(case: Case) -> None:
    """Run all checks.

    Raises:
        AssertionError: A check failed; the message describes the violation and the fix.
    """
    for check in CHECKS:
        check(case)


def check_declarations(case: Case) -> None:
    """Events, stages and fields are declared by existing names, and repeated calls return the same."""
    algorithm = case.make()
    name, runs_at = type(algorithm).__name__, algorithm.runs_at_events()
    build_plan([algorithm])
    undeclared = sorted({*runs_at} - {*algorithm.runs_at})
    assert not undeclared, (
        f"{name}.runs_at_events() has {undeclared[0]!r}, which runs_at of the class does not; add it there."
    )
    assert runs_at == algorithm.runs_at_events() == case.make().runs_at_events(), (
        f"{name}.runs_at_events() returned different events in two calls."
    )
    if not overrides_match(algorithm):
        state: Any = None
        wrong = [event for event in Event if algorithm.match(event, state) != (event in runs_at)]
        assert not wrong, f"{name}.match contradicts {name}.runs_at_events() for {wrong[0]!r}."
    for declared in ("reads", "writes"):
        fields = getattr(algorithm, declared)
        unknown = {field for field in fields if not field.startswith("batch.")} - FIELDS - ALWAYS_SERVED
        assert not unknown, (
            f"{name}.{declared} has {sorted(unknown)[0]!r}, which is not a field of the state; use 'batch.<key>' or "
            f"one of {', '.join(sorted(FIELDS))}."
        )
        extra = {*fields.by_event} - {*algorithm.runs_at} if isinstance(fields, FieldsByEvent) else set()
        assert not extra, (
            f"{name}.{declared} has fields for {sorted(extra)[0]!r}, which runs_at of the class does not have."
        )


def check_events(case: Case) -> None:
    """It runs at every event that it declares for its settings, and nowhere else."""
    watch, training = case.watched()
    name, places = type(watch.algorithm).__name__, {*watch.algorithm.runs_at_events()}
    ran = {event for _, event in watch.ran}
    assert ran, f"{name} never ran in {case.batches} batches: declare events in runs_at, or return True from match."
    assert not places or ran <= places, f"{name} ran at {sorted(ran - places)[0]!r}, where it does not declare to run."
    seen = {*training.engine.explain().entries}
    never = sorted(places - ran) if not overrides_match(watch.algorithm) else []
    assert not never, f"{name} declares {never[0]!r} and never ran there" + (
        "." if never[0] in seen else ", as a pass left it out."
    )


def check_acts(case: Case) -> None:
    """A training with it has other losses, weights or weights for evaluation than one without it."""
    results, others = [], []
    for algorithms in ([case.make()], []):
        training = case.train(*algorithms)
        training.run(case.batches)
        model = training.state.model
        modules = list(model.modules())
        with evaluation_weights(training.state):
            results.append(copy.deepcopy((training.losses, model.state_dict())))
        formats = [tensor.stride() for tensor in model.state_dict().values()]
        others.append(([type(module) for module in modules], formats, any(training.save()["algorithms"])))
    name, remedy = type(case.make()).__name__, f"with more than the {case.batches} batches, or with other settings."
    assert not equal(*results) or case.same_results, (
        f"{name} acted in none of {case.batches} batches: losses and weights are those of a training without it. Test "
        f"it {remedy} If it only computes the same in another way, pass same_results=True."
    )
    assert not equal(*results) or others[0] != others[1], (
        f"{name} has neither changed nor stored anything. Test it {remedy}"
    )


def effects_of(case: Case) -> Effects:
    """Return the fields that an algorithm reads and writes in a training."""
    return case.watched()[0].total()


def check_effects(case: Case) -> None:
    """It reads and writes only the fields that it declares."""
    watch, _ = case.watched()
    algorithm = watch.algorithm
    for event, effects in watch.effects.items():
        for attribute, observed in (("reads", effects.reads - ALWAYS_SERVED), ("writes", effects.writes)):
            declared = fields_at(getattr(algorithm, attribute), event)
            extra = {field for field in observed - declared if not (field.startswith("batch.") and "batch" in declared)}
            assert not extra, (
                f"{type(algorithm).__name__} {attribute} {sorted(extra)[0]!r} at {event.value!r} and does not declare "
                f"it. Declare {attribute} = {{{', '.join(map(repr, sorted({*declared, *extra})))}}}, or do not use it."
            )


def check_order(case: Case) -> None:
    """At each of its events it runs after lower stages and before higher ones, at any position in the list."""
    for event, stage in case.make().runs_at_events().items():
        marks = [_mark(event, one) for one in Stage if one not in (stage, Stage.UNDECLARED)]
        for place in (0, len(marks)):
            algorithm = case.make()
            listed = [*marks[:place], algorithm, *marks[place:]]
            entries = build_plan(listed).entries[event]
            order = [one.stage for one in entries if one.stage is not None]
            expected = sorted(order, reverse=event in CLOSING_EVENTS)
            assert order == expected, (
                f"{type(algorithm).__name__} runs at {event.value!r} among {[one.name for one in order]}; "
                f"its stage there, {stage.name}, belongs among {[one.name for one in expected]}."
            )


def _mark(event: Event, stage: Stage) -> Algorithm:
    def apply(self: Algorithm, event: Event, state: State, logger: Logger) -> None:
        """Do nothing."""

    mark: Algorithm = type(stage.name.title(), (Algorithm,), {"runs_at": {event: stage}, "apply": apply})()
    return mark


def check_no_effect(case: Case) -> None:
    """It warns or raises an error, with its name, if it finds nothing to change; otherwise it does not warn."""
    name = type(case.make()).__name__
    idle = _no_effect_warnings(case)
    assert not idle, f"{name} had something to change and warned all the same: {idle[0]}"
    if case.make_unfit_state is None:
        return
    try:
        idle = _no_effect_warnings(attrs.evolve(case, make_state=case.make_unfit_state, batches=0))
    except (TypeError, ValueError):
        return
    assert idle, (
        f"{name} found nothing to change and did not warn: warnings.warn(..., NoEffectWarning) with the reason."
    )
    assert name in idle[0], f"{name} found nothing to change, and its warning does not name it: {idle[0]}"


def _no_effect_warnings(case: Case) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        case.train(case.make()).run(case.batches)
    return [str(warning.message) for warning in caught if issubclass(warning.category, NoEffectWarning)]


def _equal_settings(one: Algorithm, other: Algorithm) -> bool:
    """Return whether two algorithms have equal settings; modules among them are compared by their repr."""
    both = [
        {name: repr(value) if isinstance(value, nn.Module) else value for name, value in algorithm.settings().items()}
        for algorithm in (one, other)
    ]
    return equal(*both)


def check_settings(case: Case) -> None:
    """An algorithm with its settings is equal, copies have the same settings, and running does not change them."""
    algorithm = case.make()
    name, settings = type(algorithm).__name__, algorithm.settings()
    assert not settings or _equal_settings(type(algorithm)(**settings), algorithm), (
        f"{name}(**settings) has other settings than {settings}; converters must not change converted values."
    )
    assert _equal_settings(copy.deepcopy(algorithm), algorithm), f"A copy of {name} has other settings."
    watch = Watch(algorithm)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NoEffectWarning)
        case.train(algorithm, watch=watch).run(2)
    changed = [key for key, value in algorithm.settings().items() if not equal(value, settings[key])]
    assert not changed, (
        f"Running changed {name}'s setting {changed[0]}; store changing values in a field with init=False."
    )


def check_repr(case: Case) -> None:
    """Its ``repr`` is the call that creates it; it is parsed, not evaluated."""
    algorithm = case.make()
    kind, text = type(algorithm), repr(algorithm)
    assert kind.__repr__ is not object.__repr__, (
        f"{kind.__name__} prints as {text}, which does not contain its settings: make it an attrs class, "
        "@attrs.define(eq=False)."
    )
    if "<" in text:  # the repr of a function among the settings cannot be parsed
        assert text.startswith(f"{kind.__name__}("), f"{kind.__name__} prints as {text}, which is not how it is made."
        return
    settings = algorithm.settings()
    try:
        call = ast.parse(text, mode="eval").body
        assert isinstance(call, ast.Call), "it is not a call"
        assert ast.unparse(call.func) == kind.__name__, f"it calls {ast.unparse(call.func)}"
        printed = dict(zip(inspect.signature(kind).parameters, call.args, strict=False))
        printed |= {str(argument.arg): argument.value for argument in call.keywords}
        again = kind(**{name: settings[name] for name in printed})
    except Exception as error:
        raise AssertionError(f"{kind.__name__} prints as {text}, which is not how it is made: {error}") from error
    texts = {name: ast.unparse(ast.parse(repr(settings[name]), mode="eval")) for name in printed}
    same = {name: ast.unparse(value) for name, value in printed.items()} == texts and _equal_settings(again, algorithm)
    assert same, f"{text} makes one with other settings."


def check_refusals(case: Case) -> None:
    """An invalid setting raises an error at construction, with its name and value."""
    algorithm = case.make()
    name, settings = type(algorithm).__name__, algorithm.settings()
    for setting, value in case.refused:
        try:
            type(algorithm)(**{**settings, setting: value})
        except (TypeError, ValueError) as error:
            text = str(error)
        else:
            raise AssertionError(f"{name} takes {setting}={value!r}, which makes no sense: raise an error.")
        assert setting in text, f"{name} rejects {setting}={value!r} and does not name the setting: {text}"
        assert repr(value) in text or str(value) in text, f"{name} rejects {setting}={value!r} without it: {text}"


def check_randomness(case: Case) -> None:
    """It draws only from ``state.generator(self)``, so that other algorithms do not change its draws."""
    watch, alone = case.watched()
    name = type(watch.algorithm).__name__
    assert not watch.strangers, (
        f"{name} draws from {watch.strangers[0]}, so what it draws depends on what others have drawn, and a resumed "
        "run draws something else. Draw by generator=state.generator(self)."
    )
    beside, _ = case.watched(_Drawer(), after=(_Drawer(),))
    assert watch.draws == beside.draws, f"{name} draws something else beside another algorithm that draws."
    again = case.train(case.make())
    again.run(case.batches)
    assert equal(alone.losses, again.losses), f"Two runs of {name} with the same seed have different losses."
    if watch.draws and not find_conflicts([case.make(), case.make()]):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # both may interpolate the loss
            second, _ = case.watched(case.make())
        seeds, others = ({seed for taken in one.draws.values() for seed, _ in taken} for one in (watch, second))
        assert not seeds & others, f"Two {name} draw the same."


class _Drawer(Algorithm):
    """Draws from its own generator at every event, and changes nothing."""

    def match(self, event: Event, state: State) -> bool:
        """Return True."""
        return True

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        """Draw."""
        torch.rand(3, generator=state.generator(self))


def check_resume(case: Case) -> None:
    """A training that is stopped and resumed, within an epoch or at its end, produces bit-identical results."""
    whole = case.train(case.make())
    name = type(whole.algorithms[0]).__name__
    per_epoch = whole.state.dataloader_len or 2
    saved = {}
    for done in sorted({1, per_epoch, per_epoch + 1, case.batches - 1} & {*range(1, case.batches)}):
        whole.run(done)
        saved[done] = whole.save()
    whole.run(case.batches)
    end = whole.save()
    for done, loaded in saved.items():
        resumed = case.train(case.make(), loaded=loaded)
        resumed.run(case.batches)
        losses = {batch: loss for batch, loss in whole.losses.items() if batch >= done}
        differs = _differences(resumed, end | {"losses": losses})
        assert not differs, (
            f"With {name}, a training that is resumed after {done} of {case.batches} batches ends with other "
            f"{differs} than one that is not. What it keeps from batch to batch has to be in state_dict() and come "
            "back by load_state_dict()."
        )


def _differences(training: Training, expected: dict[str, Any]) -> str:
    """Return what a training saves, and its losses, where they are other than expected."""
    end = training.save() | {"losses": training.losses}
    return " and ".join(what for what, one in end.items() if not equal(one, expected[what]))


def check_reuse(case: Case) -> None:
    """In a second training, or one that restarts at the beginning, it behaves like a new one, or raises an error."""
    used, new = case.make(), case.make()
    first = case.train(used)
    first.run(case.batches)
    trained = first.save()
    first.engine.run_event(Event.FIT_END)

    states = [through_json(new.state_dict()), *trained["algorithms"][1:]]
    at_the_start = {"timestamp": Timestamp().state_dict(), "algorithms": states}
    expected = case.train(new, loaded=trained | at_the_start)
    _check_as_new(case, "a training that begins again", first.begin_again, expected)
    first.engine.close()
    _check_as_new(case, "a second training", lambda: case.train(used), case.train(case.make()))


def _check_as_new(case: Case, what: str, begin: Callable[[], Training], expected: Training) -> None:
    name = type(expected.algorithms[0]).__name__
    expected.run(case.batches)
    try:
        second = begin()
        second.run(case.batches)
    except (RuntimeError, ValueError) as error:
        complaint = str(error)
    else:
        differs = _differences(second, expected.save() | {"losses": expected.losses})
        assert not differs, (
            f"{name} was used before, and {what} with it ends with other {differs} than with a new one. "
            "At FIT_START with the clock at 0, reset what it keeps from batch to batch, or raise a RuntimeError."
        )
        return
    assert name in complaint, f"{name} rejects {what} and does not name itself: {complaint}"


CHECKS = (
    check_declarations,
    check_events,
    check_effects,
    check_acts,
    check_order,
    check_no_effect,
    check_settings,
    check_repr,
    check_refusals,
    check_randomness,
    check_resume,
    check_reuse,
)
"""All checks, each a function of a :class:`Case`."""
