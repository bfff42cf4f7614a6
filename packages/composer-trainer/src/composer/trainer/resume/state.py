"""The data of an exact resume that is not in the state: the place in the data, metrics, generators, and given objects.

A checkpoint contains it as ``extra``: values of the run (``_Saved``), and what belongs to the process
(``_OfProcess``), which each process writes and reads itself. :class:`ResumeState` lives as long as the Trainer:

- a save calls ``data_to_save``, which returns all of it, by name;
- a load, in the constructor, calls ``compare`` of saved data with the run, and then ``restore_run`` of what ``fit``
  uses before ``begin``: evaluations that are due, the cool-down, what is trained, loggers; it keeps the rest;
- ``fit`` calls ``check_data`` with its training data, which the constructor may not have had, and, after ``FIT_START``,
  ``begin``, which restores the rest. A save before that contains the loaded data;
- the loop calls ``end``; ``fit(reset_time=True)`` calls ``forget``.

As many processes as saved it (``world_size``), of which as many have the same samples (``tensor_parallel``), resume
exactly. Others restore what does not depend on them: the place in an order that all processes share; draws differ.

To save something more, add a field to ``_Saved`` or ``_OfProcess``, by whose type it is checked, with a default for
earlier checkpoints, give it a value in ``values``, and restore it in ``restore_run`` or ``begin``.
"""

from __future__ import annotations

import inspect
import re
import warnings
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import attrs
import torch
from attrs.validators import ge, optional
from torch import Tensor, nn

from composer.checkpoint.contents import FIRST_PROCESS, OWN_PROCESS, SavedObjects, SavedPlace
from composer.checkpoint.errors import CheckpointMismatchError
from composer.checkpoint.saver import CheckpointSaver
from composer.core import Event, Timestamp
from composer.core.checks import bulleted, caller_level
from composer.core.optimizers import unwrapped
from composer.core.saving.codec import Record
from composer.core.saving.components import by_key
from composer.core.saving.model_state import bare_model, bare_name, named_parameters
from composer.core.saving.randomness import check_rng_state, derive_seed, load_rng_state, rng_state
from composer.core.saving.records import read
from composer.distributed import broadcast_buffers, get_data_rank, get_global_rank, get_world_size
from composer.distributed.collectives import failing_in_all_processes
from composer.distributed.environment import get_tensor_parallel_size
from composer.loggers.hyperparameters import plain_settings
from composer.trainer.cooldown import Cooldown  # noqa: TC001  (the type of a field, which read() needs)
from composer.trainer.data.objects import takes_position
from composer.trainer.evaluation.evaluate import due_evaluators
from composer.trainer.evaluation.metrics import SavedMetrics, check_metrics, load_metrics, reset_metrics, save_metrics
from composer.trainer.reproducibility import seed_all
from composer.trainer.resume import run_settings
from composer.trainer.resume.given_objects import GivenObjects

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from torch.optim import Optimizer

    from composer.checkpoint.loading import LoadExtra
    from composer.core import Logger, State
    from composer.trainer.data.batches import Batches
    from composer.trainer.data.settings import TrainingData


def _check_one_number(_: object, field: attrs.Attribute[Any], value: Tensor) -> None:
    if value.numel() != 1:
        raise ValueError(f"{field.name} must be one number, got a tensor of shape {tuple(value.shape)}.")


@attrs.frozen
class _OfProcess(Record):
    """What is saved of each process.

    Attributes:
        data: The place in the training data; None if there was none.
        loggers: What the destinations continue their runs by.
        metrics: The training metrics of the epoch so far.
        objects: The objects that the Trainer was given; see ``trainer/resume/given_objects.py``.
        rng: The global generators.
    """

    data: SavedPlace | None
    loggers: dict[str, dict[str, Any]]
    metrics: SavedMetrics
    objects: SavedObjects
    rng: dict[str, Any]

    def without(self, ignored: Collection[str]) -> _OfProcess:
        """Return what is loaded: no generators of ignored parts and, without the clock, no place in the run."""
        generators = {path: one for path, one in self.objects.generators.items() if not _is_ignored(path, ignored)}
        changes: dict[str, Any] = {"data": None, "metrics": {}} if "timestamp" in ignored else {}
        return attrs.evolve(self, objects=attrs.evolve(self.objects, generators=generators), **changes)


@attrs.frozen
class _Saved(Record):
    """The data of :meth:`ResumeState.values`, in the process that reads it.

    Attributes:
        clock_before: The clock before it was advanced last, by which intervals are due.
        interrupted: The labels of the evaluators of evaluations that are still due, by event.
        microbatch_size: The size that the search has found; None without a search.
        process: What is saved of the first process.
        skipped_steps: How many steps were skipped because the loss scale was too large.
        tensor_parallel: How many processes had the same samples.
        world_size: How many processes there were; 0 if processes of another number have loaded this and saved it again
            before :meth:`ResumeState.begin`, so that none takes it as its own.
        own: What is saved of this process; None if it is the first, or there were not as many processes.
        cooldown: The cool-down of the run; None before it.
        optimizers: The arguments of the optimizers, by key and group, as the program had set them.
        requires_grad: Which parameters of the model are trained, by name.
        training: Which modules of the model are in training mode, by name; None before the first batch, and while the
            model as a whole is in evaluation mode.
        settings: Other arguments that the results depend on, for a warning; see ``trainer/resume/run_settings.py``.
    """

    clock_before: Timestamp
    interrupted: dict[Event, list[str]]
    microbatch_size: int | None = attrs.field(validator=optional(ge(1)))
    process: _OfProcess
    skipped_steps: Tensor = attrs.field(validator=_check_one_number)
    tensor_parallel: int = attrs.field(validator=ge(1))
    world_size: int = attrs.field(validator=ge(0))
    own: _OfProcess | None = None
    cooldown: Cooldown | None = None
    optimizers: dict[str, list[dict[str, Any]]] = attrs.field(factory=dict)
    requires_grad: dict[str, bool] = attrs.field(factory=dict)
    training: dict[str, bool] | None = None
    settings: dict[str, Any] = attrs.field(factory=dict)

    def without(self, ignored: Collection[str], clock: Timestamp) -> _Saved:
        """Return what is loaded: with ``"timestamp"`` ignored, a run at the beginning of an epoch at this clock."""
        process, own = self.process.without(ignored), self.own and self.own.without(ignored)
        changes: dict[str, Any] = {}
        if "timestamp" in ignored:
            of_run = {name: one for name, one in self.settings.items() if not name.startswith("train_dataloader")}
            changes = {"clock_before": clock, "cooldown": None, "interrupted": {}, "settings": of_run}
        return attrs.evolve(self, process=process, own=own, **changes)

    def of_this_process(self) -> _OfProcess | None:
        """Return what this process has saved; None unless as many processes saved, with the same samples in each."""
        are_same = (self.world_size, self.tensor_parallel) == (get_world_size(), get_tensor_parallel_size())
        if not are_same:
            return None
        return self.own if get_global_rank() else self.process

    def place_to_continue(self, loader: Any = None) -> SavedPlace | None:
        """Return the place in the data to continue at; None if there is none.

        It is that of this process, or in another number of processes that of rank 0, without what belongs to a process:
        objects, and the state of a loader unless its data set takes its position, which counts the samples of all.
        """
        if (own := self.of_this_process()) is not None:
            return own.data
        place = self.process.data
        of_all = takes_position(getattr(loader, "dataset", None))
        return place and attrs.evolve(
            place, loader=place.loader if of_all else None, objects=SavedObjects(), has_ended=False
        )


class _Loaded(NamedTuple):
    """What was loaded and takes effect in ``fit``, and the path of its checkpoint."""

    record: _Saved
    path: str


class ResumeState:
    """Saves and restores the data of an exact resume that is not in the state, in the phases that the module states.

    Each saver among the callbacks, also one that is added later, saves this data with the state.

    Args:
        state: The run.
        data: The training data.
        logger: Its destinations continue their runs in other products.
        seed: The seed that the program gives, if any.
        schedulers: Those that the Trainer was given, whose settings are compared.

    Attributes:
        interrupted: The labels of the evaluators that have not run in evaluations that a signal interrupted, by event.
            ``Evaluations.run_if_due`` adds them, and removes those of an evaluation that is completed.
        cooldown: The cool-down of the run; None before it.
        skipped_steps: How many steps were skipped because the loss scale was too large; ``Optimization`` counts them.
    """

    def __init__(
        self,
        state: State,
        data: TrainingData,
        logger: Logger,
        seed: int | None = None,
        schedulers: Iterable[Any] = (),
    ) -> None:
        self._state, self._data, self._logger, self._seed = state, data, logger, seed
        self._settings: dict[str, Any] = {}  # of the last training
        self._of_program = run_settings.settings_of_program(state.model, schedulers)
        self._objects = GivenObjects(state, data, logger)
        self._optimizers = _arguments_of(state.optimizers)
        self._num_frozen = sum(not parameter.requires_grad for _, parameter in named_parameters(state.model))
        self.skipped_steps = torch.zeros((), dtype=torch.int64, device=state.device)
        self.interrupted: dict[Event, list[str]] = {}
        self.cooldown: Cooldown | None = None
        self._loaded: _Loaded | None = None  # from restore_run() until begin()
        self._is_training = False  # from begin() until end()
        self._attach_to_savers()
        state.on_components_change(self._attach_to_savers)

    def _attach_to_savers(self) -> None:
        for callback in self._state.callbacks:
            if isinstance(callback, CheckpointSaver):
                callback.resume_data = self.data_to_save

    def data_to_save(self, *, weights_only: bool) -> dict[str, Any]:
        """Prepare all processes for a save, and return what it contains beside the state; all must call it.

        Args:
            weights_only: Whether only weights are saved. It then returns only what distinguishes two saves of a batch,
                by which a saver skips a second one; nothing of it is saved.
        """
        state = self._state
        if get_world_size() > 1:
            # A checkpoint contains the buffers of rank 0: without an interruption all must continue with these, too.
            broadcast_buffers(state.model)
            for algorithm in state.algorithms:
                algorithm.share_state(state)
        if weights_only:
            return {"interrupted": self._evaluations_due()}
        self._objects.report_changes()
        return self.values()

    def values(self) -> dict[str, Any]:
        """Return the values of ``_Saved`` by name; of what belongs to a process, that of this one, under its name.

        Before :meth:`begin` they are those that were loaded; of another number of processes, that of the first one.
        """
        key = OWN_PROCESS if get_global_rank() else FIRST_PROCESS
        if self._loaded is not None:
            return _values_again(self._loaded.record, key)
        state, batches = self._state, self._data.batches
        of_process = _OfProcess(
            data=None if batches is None else batches.save(),
            loggers=self._logger.state_dict(),
            metrics=save_metrics(state.train_metrics),
            objects=self._objects.save(),
            rng=rng_state(state.device),
        )
        return {
            "clock_before": state.previous_timestamp,
            "cooldown": self.cooldown,
            "interrupted": self._evaluations_due(),
            "microbatch_size": state.device_train_microbatch_size if state.auto_microbatching else None,
            "optimizers": self._optimizers,
            "requires_grad": {name: one.requires_grad for name, one in named_parameters(state.model)},
            "settings": self._settings or self._find_settings(),
            "skipped_steps": self.skipped_steps,
            "tensor_parallel": get_tensor_parallel_size(),
            "training": self._modes(),
            "world_size": get_world_size(),
            key: of_process,
        }

    def _find_settings(self) -> dict[str, Any]:
        batches, subset = self._data.batches, self._data.subset_num_batches
        loader, sizes = (None, {}) if batches is None else (batches.spec.dataloader, batches.place_reader.sizes)
        settings = run_settings.settings_of_run(self._state, loader, sizes, subset, frozen=self._num_frozen)
        return settings | self._of_program

    def _modes(self) -> dict[str, bool] | None:
        """Return which modules are in training mode; None before the training, and within an evaluation."""
        model = self._state.model
        if not (self._state.timestamp.batch and model.training):
            return None
        return {name: module.training for name, module in _modules(model)}

    def _evaluations_due(self) -> dict[Event, list[str]]:
        """Return the interrupted evaluations, and after the last batch that of the end, which is still ahead."""
        due: list[str] = []
        if self._is_training and self._is_at_end():
            due = [evaluator.label for evaluator in due_evaluators(self._state, Event.FIT_END)]
        return {**({Event.FIT_END: due} if due else {}), **self.interrupted}

    def _is_at_end(self) -> bool:
        end = self._state.max_duration
        return end is not None and self._state.has_reached(end)

    def compare(self, saved: Mapping[str, Any], ignored: Collection[str], path: str) -> tuple[list[str], LoadExtra]:
        """Return the problems of saved data, none if a run can continue from it; and :meth:`restore_run` with it.

        Args:
            saved: The data of :meth:`values`.
            ignored: The paths not to load, such as ``"callbacks/Mine"``. With ``"timestamp"``, the run starts at the
                beginning of an epoch, with metrics, evaluations and a cool-down of its own.
            path: The checkpoint, for warnings and errors.
        """
        try:
            record: _Saved = read(saved, _Saved, "extra").without(ignored, self._state.timestamp)
        except ValueError as error:
            parts = [path for path in ignored if path.startswith("extra/")]
            reason = f" Ignore {parts[0]!r} only together with all of 'extra'." if parts else ""
            return [f"{error}{reason} load_ignore_keys='extra' loads all else."], None
        problems = self._problems_of_process(record) or _problems_of_place(record, self._data.batches)
        return problems, partial(self.restore_run, record, path, ignored)

    def _problems_of_process(self, record: _Saved) -> list[str]:
        """Return the problems of loggers, generators and metrics: of this process, or of the first, if others saved."""
        own, problems = record.of_this_process(), list[str]()
        path, process = "extra.process", record.process if own is None else own
        try:
            self._logger.check_state_dict(process.loggers)
        except ValueError as error:
            problems.append(f"{path}.loggers: {error}")
        try:
            check_rng_state(process.rng, self._state.device, f"{path}.rng")
        except ValueError as error:
            problems.append(str(error))
        if own is not None:
            differences = check_metrics(self._state.train_metrics, own.metrics)
            problems += [f"{path}.metrics.{problem}" for problem in differences]
        return problems

    def restore_run(self, record: _Saved, path: str, ignored: Collection[str]) -> None:
        """Restore interrupted evaluations, the cool-down, which parameters are trained, and loggers; keep the rest.

        Args:
            record: The saved data that is loaded.
            path: The checkpoint, for warnings and errors.
            ignored: The paths not to load, of which those of the model count here.
        """
        self._loaded, self.cooldown, self.interrupted = _Loaded(record, path), record.cooldown, dict(record.interrupted)
        self._warn_of_optimizers(record.optimizers, _arguments_of(self._state.optimizers))
        for name, parameter in named_parameters(self._state.model):
            if name in record.requires_grad and not {"model", f"model/{name}"}.intersection(ignored):
                parameter.requires_grad_(record.requires_grad[name])
        here = record.of_this_process() or (None if get_global_rank() else record.process)
        self._logger.load_state_dict({} if here is None else here.loggers)  # each process has its own files and runs

    def _warn_of_optimizers(self, saved: Mapping[str, Any], loaded: Mapping[str, Any]) -> None:
        """Warn of arguments of optimizers that the program has changed, where the load has set the saved values."""
        lines = [
            f"optimizers.{key}.param_groups[{index}].{name}: {before[name]} was saved, {group[name]} is set."
            for key in self._optimizers.keys() & saved.keys()
            if loaded.get(key) != self._optimizers[key]
            for index, (group, before) in enumerate(zip(self._optimizers[key], saved[key], strict=False))
            for name in group
            if name in before and group[name] != before[name]
        ]
        if lines:
            title = (
                "The optimizers have the saved values, and the program sets others. To use those, assign them to "
                "optimizer.param_groups after the Trainer is constructed:"
            )
            warnings.warn(bulleted(title, sorted(lines)), stacklevel=caller_level())

    def check_data(self, batches: Batches | None) -> None:
        """Raise an error if the batches of a ``fit`` do not have the place of the loaded data.

        All processes must call it. None stands for batches that begin with an epoch.
        """
        with failing_in_all_processes("Comparing train_dataloader with the checkpoint", ValueError):
            loaded = self._loaded
            if loaded is not None and (problems := _problems_of_place(loaded.record, batches)):
                raise CheckpointMismatchError(loaded.path, problems)

    def begin(self) -> None:
        """Restore what :meth:`restore_run` has kept, the last of it draws; the epoch or its next batch follows."""
        if not self._is_at_end():  # it may be longer than when it was stopped at its end
            self.interrupted.pop(Event.FIT_END, None)
        loaded, self._loaded, self._is_training = self._loaded, None, True
        self._settings = self._find_settings()
        if loaded is not None:
            now = self._settings if self._seed is None else {**self._settings, "seed": self._seed}
            run_settings.report_settings(loaded.record.settings, now, loaded.path)
            self._restore_data(loaded.record)
        self._objects.watch()

    def _restore_data(self, record: _Saved) -> None:
        """Restore the counts, the place in the data and the metrics; then modes, the objects of the user, and draws."""
        state, batches, own = self._state, self._data.batches, record.of_this_process()
        objects = SavedObjects() if own is None else own.objects
        state.previous_timestamp = record.clock_before
        self.skipped_steps.copy_(record.skipped_steps)
        if record.microbatch_size is not None and state.auto_microbatching:
            state.device_train_microbatch_size = record.microbatch_size
        place = record.place_to_continue(getattr(self._data.spec, "dataloader", None))
        if batches is not None and place is not None:
            batches.load(place, objects.generators)
        if own is None:
            self._warn_of_other_processes(record)
            reset_metrics(state.train_metrics)
        else:
            load_metrics(state.train_metrics, own.metrics, state.device)
        for name, module in _modules(state.model):
            module.training = (record.training or {}).get(name, module.training)
        self._objects.load(objects)
        # The global generators are the last, as loading may draw from them.
        if own is None:  # not the seed of the beginning, whose draws the run has used
            seed_all(derive_seed(state.rank_zero_seed, "resume", get_data_rank(), state.timestamp.batch) % 2**32)
        else:
            load_rng_state(own.rng, state.device)

    def _warn_of_other_processes(self, record: _Saved) -> None:
        """Warn of what is not restored, as it depends on the number of processes."""
        batches, place = self._data.batches, record.process.data
        data = "the epoch continues with its next sample"
        if batches is not None and place is not None and not batches.place_reader.is_of_same_order(place):
            data = (
                "the current epoch may repeat samples and skip others, as not both runs split the data by get_sampler: "
                "for a map-style data set, use sampler=composer.distributed.get_sampler(data, shuffle=True) in every "
                "run, also in one of a single process"
            )
        had, have = record.tensor_parallel, get_tensor_parallel_size()
        of_which = "" if had == have == 1 else f", of which {had} had and {have} have the same samples"
        warnings.warn(
            f"The checkpoint was saved by {record.world_size or 'other'} processes, and {get_world_size()} resume from "
            f"it{of_which}: random draws differ, the states of data sets, samplers and other objects are not restored, "
            f"training metrics of the epoch start again, and {data}. "
            "An exact resume requires the same number of processes and the same mesh.",
            stacklevel=caller_level(),
        )

    def end(self) -> None:
        """Note that the training has ended, or was stopped."""
        self._is_training = False

    def forget(self) -> None:
        """Discard loaded data, interrupted evaluations, the cool-down, and the training metrics."""
        self._loaded, self.interrupted, self.cooldown = None, {}, None
        reset_metrics(self._state.train_metrics)


def _values_again(loaded: _Saved, key: str) -> dict[str, Any]:
    """Return loaded values to save once more; without a number of processes if it is not the present one."""
    values = {field.name: getattr(loaded, field.name) for field in attrs.fields(_Saved)}
    own, first = values.pop(OWN_PROCESS), values.pop(FIRST_PROCESS)
    return values | ({} if loaded.of_this_process() else {"world_size": 0}) | {key: own or first}


_NOT_COMPARED = {"params", "foreach", "fused", "capturable", "differentiable"}
"""Arguments of optimizers that are not compared: the parameters, and what does not change the results."""


def _arguments_of(optimizers: Iterable[Optimizer]) -> dict[str, list[dict[str, Any]]]:
    """Return the arguments of optimizers by group, as plain data; a learning rate is the one before its schedule."""
    found = {}
    for key, optimizer in by_key(map(unwrapped, optimizers)).items():
        names = inspect.signature(type(optimizer)).parameters.keys() - _NOT_COMPARED
        groups = [group | {"lr": group.get("initial_lr", group.get("lr"))} for group in optimizer.param_groups]
        plain = plain_settings({"groups": [{name: group[name] for name in group if name in names} for group in groups]})
        found[key] = plain["groups"]
    return found


def _modules(model: nn.Module) -> list[tuple[str, nn.Module]]:
    return [(bare_name(name), module) for name, module in bare_model(model).named_modules()]


def _problems_of_place(record: _Saved, batches: Batches | None) -> list[str]:
    """Return why training cannot continue at the saved place in these batches."""
    place = record.place_to_continue()
    return [] if place is None or batches is None else batches.place_reader.problems(place, batches.position)


def _is_ignored(path: str, ignored: Collection[str]) -> bool:
    """Return whether a generator, such as ``"callbacks.Mine.1.generator"``, is of a part or component not to load."""
    part, _, rest = path.partition(".")
    key = re.match(r"[^.]*(\.\d+)?", rest)
    return key is not None and not {part, f"{part}/{key[0]}"}.isdisjoint(ignored)
