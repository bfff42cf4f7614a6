"""The base classes of algorithms and callbacks, and how a saved algorithm is constructed again."""

from __future__ import annotations

import difflib
import inspect
import tomllib
import warnings
from abc import ABC, abstractmethod

# Imported at run time, as attrs and the codec resolve the annotations of a subclass and its bases.
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Set as AbstractSet
from functools import partial
from importlib.resources import files
from typing import TYPE_CHECKING, Any, ClassVar, cast

import attrs

from composer.core.checks import nearest
from composer.core.event import Event, Stage
from composer.core.interval import checked_interval
from composer.core.optimizers import Ownership
from composer.core.passes import apply_passes
from composer.core.saving.components import Serializable, is_unsaved
from composer.core.saving.randomness import seeded_draws
from composer.core.saving.records import field_types, read
from composer.functional import SurgeryReport

if TYPE_CHECKING:
    from collections.abc import Sequence
    from contextlib import AbstractContextManager

    from composer.core.interval import Call
    from composer.core.logger import Logger
    from composer.core.passes import AlgorithmPass
    from composer.core.state import State
    from composer.core.time import Time


class NoEffectWarning(UserWarning):
    """A method found nothing to change."""


class Algorithm(Serializable, ABC):
    """A change to training that composes with others.

    A subclass declares where it runs and implements :meth:`apply`. It may override :meth:`match` to decide at run time;
    ``match`` of an algorithm without declared events is called at every event.

    Attributes:
        runs_at: The events at which it may run and its stage there.
        reads: The fields that it reads: ``"batch.input"``, ``"batch.target"``, ``"outputs"``, ``"loss"``, ``"model"``,
            … A plain set applies to all its events; :class:`FieldsByEvent` declares the fields of each event.
        writes: The fields that it changes, in the same form.
        surgery_report: The layers that it has replaced in the model; None if it replaces none, or has not run.
        acted: How often it has changed something, if it counts that itself; otherwise the engine counts batches or
            layers.
        acted_unit: The unit of that number, such as ``"tokens"``.
        acts_in_training: Whether the layers that it has replaced act only in training; the engine then warns if none is
            called there.
        idle_reason: Why it may never have acted, and the remedy; the rest of a warning.
        owns: The exclusive resources that only one algorithm of a run may own: ``"the weights used for evaluation"``.
        interpolate_loss: Whether it blends losses instead of targets; two such algorithms cause a warning.
        trains_apart: Whether each of several processes trains its weights alone, without averages of gradients.
        of_process: An object with ``state_dict()`` and ``load_state_dict()`` of what differs by process; the Trainer
            saves it in each, from the start of a fit on.

    Example:
        >>> from composer.core import Event, Stage
        >>> class HalveTheLoss(Algorithm):
        ...     runs_at = {Event.AFTER_LOSS: Stage.LOSS}
        ...     reads = writes = {"loss"}
        ...     def apply(self, event, state, logger):
        ...         state.loss = state.loss / 2
        >>> HalveTheLoss().match(Event.AFTER_LOSS, state=None)
        True
    """

    runs_at: ClassVar[Mapping[Event, Stage]] = {}
    reads: ClassVar[AbstractSet[str]] = frozenset()
    writes: ClassVar[AbstractSet[str]] = frozenset()
    surgery_report: SurgeryReport | None = None
    acted: int | None = None
    acted_unit: str = "times"
    acts_in_training: bool = False
    idle_reason: str = "Train longer, choose other settings, or remove it."
    owns: ClassVar[AbstractSet[str]] = frozenset()
    interpolate_loss: bool = False
    trains_apart: bool = False
    of_process: Any = None

    def runs_at_events(self) -> Mapping[Event, Stage]:
        """Return the events at which it runs with its settings; ``runs_at`` by default."""
        return self.runs_at

    def match(self, event: Event, state: State) -> bool:
        """Return whether to run now; called at the declared events, or at every event if there are none."""
        return event in self.runs_at_events()

    @abstractmethod
    def apply(self, event: Event, state: State, logger: Logger) -> int | None:
        """Change the state. A returned number is the ``exit_code`` of the :class:`~composer.core.Trace`, if logged."""

    def evaluation_weights(self, state: State) -> AbstractContextManager[object] | None:
        """Return a context in which the model has this algorithm's weights for evaluation; None if it has none.

        Ask :func:`composer.core.evaluation_weights` instead, which takes the optimizers into account, too. An algorithm
        that returns a context should own the weights used for evaluation (``owns``), must allow nested contexts,
        and restores the training weights at the end, also after an error. While its averages are outside the model,
        its ``state_dict()`` has them by name under ``"averaged_weights"``, where readers of checkpoints find them.
        """
        return None

    def restore(self, state: State) -> None:
        """Restore what was changed temporarily, after an error in an evaluation or prediction."""

    def share_state(self, state: State) -> None:
        """Make the state the same in all processes, which call it before a checkpoint gets that of the first one."""

    @property
    def find_unused_parameters(self) -> bool:
        """Whether a step may leave some parameters without a gradient."""
        return False

    @property
    def draws_layers(self) -> bool:
        """Whether each process draws which layers a step uses; with FSDP2, all processes must use the same ones."""
        return False

    @property
    def backwards_create_graph(self) -> bool:
        """Whether the backward pass must itself be differentiable."""
        return False

    @staticmethod
    def required_on_load() -> bool:
        """Return whether weights saved with this algorithm only fit a model that it has changed."""
        return False


_HOOKS = tomllib.loads(files("composer.core").joinpath("hooks.toml").read_text("utf-8"))
"""Methods that nothing calls; the file describes the tables."""
_OF_OTHERS = {name: event for event, names in _HOOKS["of_others"].items() for name in names}
OF_COMPOSER = {
    cls: {name: instead for instead, names in table.items() for name in names}
    for cls, table in _HOOKS["of_composer"].items()
}
"""What to override instead of methods of MosaicML Composer that nothing calls, by class and method."""


class Callback(Serializable):
    """Observes a run at its events; some callbacks also stop, save or load it, or freeze layers.

    Each event has a method of its name, called with the state and the logger; only overridden methods are called. To
    observe every event, override :meth:`run_event` instead.

    Example:
        >>> class PrintEpoch(Callback):
        ...     def epoch_end(self, state, logger):
        ...         print(state.timestamp.epoch)
    """

    def __init__(self, *args: object, **kwargs: object) -> None:
        """Ignore arguments that the constructor of a subclass passes on, as in programs for MosaicML Composer."""
        if (args or kwargs) and type(self).__init__ is Callback.__init__:
            raise TypeError(f"{type(self).__name__} takes no arguments, got {args or kwargs}. Define __init__.")

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Warn of methods with the arguments of a hook and almost the name of an event: they would not be called.

        Also of hooks of Lightning, Transformers and Keras, with the name of the event.

        Raises:
            TypeError: A method overrides one of MosaicML Composer's class that nothing calls here.
        """
        super().__init_subclass__(**kwargs)
        ours = [base.__name__ for base in cls.__mro__[1:] if base.__module__.startswith("composer.")]
        for name, method in vars(cls).items():
            if instead := next((OF_COMPOSER[one][name] for one in ours if name in OF_COMPOSER.get(one, ())), None):
                raise TypeError(f"{cls.__name__}.{name} would be called by nothing: override {instead}, instead.")
            if (event := _OF_OTHERS.get(name)) is not None:
                warnings.warn(
                    f"{cls.__name__}.{name} is a hook of another trainer, and is called at no event here. Define "
                    f"{event}(self, state, logger) instead.",
                    stacklevel=2,
                )
            elif inspect.isfunction(method) and [*inspect.signature(method).parameters] == ["self", "state", "logger"]:
                close = difflib.get_close_matches(name, [*Event], n=1, cutoff=0.85)
                if close and not hasattr(Callback, name) and not name.startswith("_"):
                    warnings.warn(
                        f"{cls.__name__}.{name} is called at no event, as none has this name: did you mean "
                        f"{str(close[0])!r}? A method that is no hook can have other names of its arguments.",
                        stacklevel=2,
                    )

    def run_event(self, event: Event, state: State, logger: Logger) -> None:
        """Called at every event, if overridden; calls the event's method."""
        getattr(self, event.value)(state, logger)

    def intervals(self) -> Mapping[Event | str, Time | str | int]:
        """Return the intervals of hooks, ``{Event.BATCH_END: "10ba"}``; other hooks are called each time.

        Called when the plan is made. Whether a hook is due depends on the clock alone, so it is the same after a
        resume: ``"10ba"`` is due at the ``BATCH_END`` of the 10th, 20th, … batch. At events within a batch, which the
        clock has not counted yet, it is due in the batch after. 0 is never; a whole number counts epochs.
        """
        return {}

    def wrap_call(self, event: Event, key: str, kind: str, call: Call) -> Call:
        """Return a replacement of a call at an event: ``call`` itself, or a function that makes the call.

        If overridden, it is called for every call of an algorithm, callback, logger or subscription except its own,
        when the calls of an event are compiled. If several callbacks wrap, the first of the list is the innermost.

        Args:
            event: The event.
            key: The component that is called, by its name in the plan.
            kind: ``"algorithm"``, ``"callback"``, ``"subscription"`` or ``"logger"``.
            call: The call, without arguments.
        """
        return call

    def wrap_event(self, event: Event, call: Call) -> Call:
        """Return a replacement of all calls of an event, also if there are none; as :meth:`wrap_call`."""
        return call

    def close(self, state: State, logger: Logger) -> None:
        """Called once when the engine is closed, also after an error, to finish files and stop threads."""

    def post_close(self) -> None:
        """Called once after every callback was closed, to release what other callbacks may need until then."""

    def init(self, state: State, logger: Logger) -> None:
        """Called at :attr:`.Event.INIT`."""

    def before_load(self, state: State, logger: Logger) -> None:
        """Called at :attr:`.Event.BEFORE_LOAD`."""

    def after_load(self, state: State, logger: Logger) -> None:
        """Called at :attr:`.Event.AFTER_LOAD`."""

    def fit_start(self, state: State, logger: Logger) -> None:
        """Called at :attr:`.Event.FIT_START`."""

    def iteration_start(self, state: State, logger: Logger) -> None:
        """Called at :attr:`.Event.ITERATION_START`."""

    def epoch_start(self, state: State, logger: Logger) -> None:
        """Called at :attr:`.Event.EPOCH_START`."""

    def before_dataloader(self, state: State, logger: Logger) -> None:
        """Called at :attr:`.Event.BEFORE_DATALOADER`."""

    def after_dataloader(self, state: State, logger: Logger) -> None:
        """Called at :attr:`.Event.AFTER_DATALOADER`."""

    def batch_start(self, state: State, logger: Logger) -> None:
        """Called at :attr:`.Event.BATCH_START`."""

    def before_train_batch(self, state: State, logger: Logger) -> None:
        """Called at :attr:`.Event.BEFORE_TRAIN_BATCH`."""

    def before_forward(self, state: State, logger: Logger) -> None:
        """Called at :attr:`.Event.BEFORE_FORWARD`."""

    def after_forward(self, state: State, logger: Logger) -> None:
        """Called at :attr:`.Event.AFTER_FORWARD`."""

    def before_loss(self, state: State, logger: Logger) -> None:
        """Called at :attr:`.Event.BEFORE_LOSS`."""

    def after_loss(self, state: State, logger: Logger) -> None:
        """Called at :attr:`.Event.AFTER_LOSS`."""

    def before_backward(self, state: State, logger: Logger) -> None:
        """Called at :attr:`.Event.BEFORE_BACKWARD`."""

    def after_backward(self, state: State, logger: Logger) -> None:
        """Called at :attr:`.Event.AFTER_BACKWARD`."""

    def after_train_batch(self, state: State, logger: Logger) -> None:
        """Called at :attr:`.Event.AFTER_TRAIN_BATCH`."""

    def batch_end(self, state: State, logger: Logger) -> None:
        """Called at :attr:`.Event.BATCH_END`."""

    def batch_checkpoint(self, state: State, logger: Logger) -> None:
        """Called at :attr:`.Event.BATCH_CHECKPOINT`."""

    def epoch_end(self, state: State, logger: Logger) -> None:
        """Called at :attr:`.Event.EPOCH_END`."""

    def epoch_checkpoint(self, state: State, logger: Logger) -> None:
        """Called at :attr:`.Event.EPOCH_CHECKPOINT`."""

    def iteration_end(self, state: State, logger: Logger) -> None:
        """Called at :attr:`.Event.ITERATION_END`."""

    def iteration_checkpoint(self, state: State, logger: Logger) -> None:
        """Called at :attr:`.Event.ITERATION_CHECKPOINT`."""

    def fit_end(self, state: State, logger: Logger) -> None:
        """Called at :attr:`.Event.FIT_END`."""

    def eval_before_all(self, state: State, logger: Logger) -> None:
        """Called at :attr:`.Event.EVAL_BEFORE_ALL`."""

    def eval_start(self, state: State, logger: Logger) -> None:
        """Called at :attr:`.Event.EVAL_START`."""

    def eval_batch_start(self, state: State, logger: Logger) -> None:
        """Called at :attr:`.Event.EVAL_BATCH_START`."""

    def eval_before_forward(self, state: State, logger: Logger) -> None:
        """Called at :attr:`.Event.EVAL_BEFORE_FORWARD`."""

    def eval_after_forward(self, state: State, logger: Logger) -> None:
        """Called at :attr:`.Event.EVAL_AFTER_FORWARD`."""

    def eval_batch_end(self, state: State, logger: Logger) -> None:
        """Called at :attr:`.Event.EVAL_BATCH_END`."""

    def eval_end(self, state: State, logger: Logger) -> None:
        """Called at :attr:`.Event.EVAL_END`."""

    def eval_after_all(self, state: State, logger: Logger) -> None:
        """Called at :attr:`.Event.EVAL_AFTER_ALL`."""

    def eval_standalone_start(self, state: State, logger: Logger) -> None:
        """Called at :attr:`.Event.EVAL_STANDALONE_START`."""

    def eval_standalone_end(self, state: State, logger: Logger) -> None:
        """Called at :attr:`.Event.EVAL_STANDALONE_END`."""

    def predict_start(self, state: State, logger: Logger) -> None:
        """Called at :attr:`.Event.PREDICT_START`."""

    def predict_batch_start(self, state: State, logger: Logger) -> None:
        """Called at :attr:`.Event.PREDICT_BATCH_START`."""

    def predict_before_forward(self, state: State, logger: Logger) -> None:
        """Called at :attr:`.Event.PREDICT_BEFORE_FORWARD`."""

    def predict_after_forward(self, state: State, logger: Logger) -> None:
        """Called at :attr:`.Event.PREDICT_AFTER_FORWARD`."""

    def predict_batch_end(self, state: State, logger: Logger) -> None:
        """Called at :attr:`.Event.PREDICT_BATCH_END`."""

    def predict_end(self, state: State, logger: Logger) -> None:
        """Called at :attr:`.Event.PREDICT_END`."""


def overrides(component: object, base: type, method: str) -> bool:
    """Return whether a component overrides a method of ``base``.

    Example:
        >>> class Watch(Callback):
        ...     def fit_end(self, state, logger):
        ...         print("done")
        >>> overrides(Watch(), Callback, "fit_end"), overrides(Watch(), Callback, "fit_start")
        (True, False)
    """
    # The attribute of the object, not of its class: a method may have been set on the object.
    return getattr(getattr(component, method), "__func__", None) is not getattr(base, method)


def hook_of(callback: Callback, event: Event) -> Callable[..., object] | None:
    """Return the overridden hook of a callback for an event, as ``f(state, logger)``; None if there is none."""
    if overrides(callback, Callback, "run_event"):
        return partial(callback.run_event, event)
    return getattr(callback, event.value) if overrides(callback, Callback, event.value) else None


def intervals_of(callback: Callback) -> Mapping[Event, Time]:
    """Return the intervals of a callback's hooks by event.

    Raises:
        TypeError: An interval is no length of time.
        ValueError: An event does not exist, or an interval could never be due there.
    """
    events = {Event(event): every for event, every in callback.intervals().items()}
    return {event: checked_interval(every, event, type(callback).__name__) for event, every in events.items()}


def run_surgery(state: State, logger: Logger, passes: Sequence[AlgorithmPass]) -> None:
    """Run the state's algorithms at the events before weights are loaded, without callbacks and loggers."""
    ownership = Ownership(state)
    for event in (Event.INIT, Event.BEFORE_LOAD):
        ownership.begin()
        # Algorithms without declared events are called at each event, and decide by ``match``.
        listed = [one for one in state.algorithms if event in (runs_at := one.runs_at_events()) or not runs_at]
        for algorithm in apply_passes(listed, event, passes)[0]:
            key = state.component_key(algorithm)
            if algorithm.match(event, state):
                call_with_own_draws(state, key, event, partial(algorithm.apply, event, state, logger))
            ownership.check(key)


def call_with_own_draws(state: State, key: str, event: Event, call: Call) -> None:
    """Make a call of a component that may draw new weights, with torch's generator seeded for the component and event.

    So the weights do not depend on what other components draw, and other draws not on the component.
    """
    with seeded_draws(state.generator(f"{key}/{event}").initial_seed()):
        call()


def algorithm_classes() -> dict[str, list[type[Algorithm]]]:
    """Return the classes of algorithms that can be constructed from saved settings, by name.

    These are all classes that have been defined, such as those of imported modules; a class that was defined a second
    time, as in a notebook, replaces the first.

    Returns:
        For each name the classes that have it: several only if different modules define one each.

    Example:
        >>> class Halve(Algorithm):
        ...     def apply(self, event, state, logger):
        ...         state.loss = state.loss / 2
        >>> algorithm_classes()["Halve"]
        [<class 'composer.core.base.Halve'>]
    """
    # Subclasses are listed in the order of their definition, so the last class of a name is the present one.
    latest = {(kind.__module__, kind.__qualname__): kind for kind in _subclasses(Algorithm)}
    known: dict[str, list[type[Algorithm]]] = {}
    for kind in latest.values():
        if not inspect.isabstract(kind):
            known.setdefault(kind.__name__, []).append(kind)
    return known


def _subclasses(kind: Any) -> Iterable[type[Algorithm]]:
    for subclass in kind.__subclasses__():
        yield subclass
        yield from _subclasses(subclass)


def rebuild_algorithm(record: Mapping[str, Any]) -> Algorithm:
    """Return a new algorithm from its saved name and settings.

    Args:
        record: ``{"name": "BlurPool", "settings": {"min_channels": 8}}``; other keys are ignored.

    Raises:
        ValueError: No class has the name, or more than one; a setting does not exist, does not fit or was not data.

    Example:
        >>> @attrs.define(eq=False)
        ... class Amplify(Algorithm):
        ...     factor: float = 2.0
        ...     def apply(self, event, state, logger):
        ...         state.loss = self.factor * state.loss
        >>> rebuild_algorithm({"name": "Amplify", "settings": {"factor": 3.0}})
        Amplify(factor=3.0)
    """
    name, settings = record.get("name"), record.get("settings")
    if not isinstance(name, str) or not isinstance(settings, dict):
        raise ValueError(f"A saved algorithm must have a name and a dictionary of settings, got {record!r:.200}.")  # noqa: TRY004
    kind: Any = _find(name)
    if not attrs.has(kind):
        if settings or (kind.__init__ is not object.__init__ and inspect.signature(kind).parameters):
            raise ValueError(
                f"{name} cannot be constructed again: it is no attrs class, so its settings are unknown. Decorate it "
                f"by @attrs.define(eq=False), or pass the object by algorithms=[{name}(...)]."
            )
        return cast("Algorithm", kind())
    problems, values = _read_settings(kind, settings)
    if problems:
        raise ValueError(f"{name} cannot be constructed again: {' '.join(problems)}")
    try:
        algorithm = kind(**values)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name} cannot be constructed again from its saved settings: {error}") from error
    return cast("Algorithm", algorithm)


def _find(name: str) -> type[Algorithm]:
    known = algorithm_classes()
    candidates = known.get(name, [])
    if not candidates:
        raise ValueError(
            f"No algorithm is named {name!r}{nearest(name, known)} Import the module that defines it (ours are in "
            "composer.algorithms), or pass the object itself to the run."
        )
    if len(candidates) > 1:
        modules = " and ".join(sorted(f"{kind.__module__}.{kind.__qualname__}" for kind in candidates))
        raise ValueError(f"{name!r} may be {modules}; pass the algorithm itself to the run.")
    return candidates[0]


def _read_settings(kind: Any, settings: Mapping[str, Any]) -> tuple[list[str], dict[str, Any]]:
    types = field_types(kind)
    fields = {str(field.alias): field for field in attrs.fields(kind) if field.init}
    problems, values = [], {}
    for name, data in settings.items():
        if name not in fields:
            problems.append(f"It has no setting {name!r}{nearest(name, fields)}")
        elif is_unsaved(data):
            problems.append(
                f"Its setting {name} was not data but {data['unsaved']}, which is not saved; pass the object by "
                f"algorithms=[{kind.__name__}({name}=...)]."
            )
        else:
            try:
                values[name] = read(data, types[fields[name].name], f"Its setting {name}")
            except ValueError as error:
                problems.append(str(error))
    return problems, values
