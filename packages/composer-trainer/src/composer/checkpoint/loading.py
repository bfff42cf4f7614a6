"""Loading a checkpoint: everything is read and checked before anything of the run changes.

:func:`load_checkpoint` and the Trainer make a :class:`LoadRequest` of their arguments, and call it. It returns in turn:

1. :class:`_ReadState`, what the checkpoint contains, without the data of the weights: ``_read_state`` reads it
   (:mod:`~composer.checkpoint.finding`). Each of its methods makes one change that the request asks for, such as
   ``ignore``. What remains in ``saved`` is a state as ``State.state_dict`` returns it, with ``"model"``.
2. :class:`CheckedCheckpoint`, which fits the run: ``_check_all`` compares the state with the run, ``_check_weights``
   only the weights, and ``_check_composer`` that of a file of MosaicML Composer. Every mismatch is reported in one
   error. The weights are read last, as only their names and shapes are compared.
3. :class:`LoadedCheckpoint`, after :meth:`CheckedCheckpoint.load` has changed the run.
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import attrs
from torch import Tensor
from torch.utils._pytree import tree_leaves

from composer.checkpoint.base import EXTRA, MODEL, OPTIMIZERS, STATE, dictionary
from composer.checkpoint.composer_files import ComposerFile, names_here
from composer.checkpoint.errors import CheckpointError, CheckpointMismatchError
from composer.checkpoint.finding import OpenCheckpoint, agreed_path, is_weights_file, open_checkpoint
from composer.checkpoint.ignoring import IgnoreKeys, ignored_keys
from composer.checkpoint.saving import environment, module_classes, reject_fsdp1
from composer.checkpoint.tensors import is_reference, sharded_likes
from composer.checkpoint.torch_files import read_weights_file
from composer.core import LoadReport, State, StateMismatchError, join_tensors, model_state, saved_state
from composer.core.checks import abridged, to_strings
from composer.core.randomness import rng_state
from composer.core.serialization import from_data
from composer.distributed import get_global_rank
from composer.distributed.collectives import all_agree, failing_in_all_processes
from composer.functional.dtensors import is_sharded, reshard

if TYPE_CHECKING:
    from composer.checkpoint.base import Manifest
    from composer.core import Logger
    from composer.core.passes import Passes

__all__ = ["CheckedCheckpoint", "LoadRequest", "LoadedCheckpoint", "load_checkpoint"]

_log = logging.getLogger(__name__)
_AVERAGES = "averaged_weights"
"""In the state of an algorithm, the weights for evaluation; see :meth:`composer.core.Algorithm.evaluation_weights`."""

CheckExtra = Callable[[dict[str, Any], tuple[str, ...]], Iterable[str]]


@attrs.frozen
class LoadedCheckpoint:
    """The result of loading a checkpoint.

    Args:
        path: The checkpoint or file.
        report: What was restored, and what differs.
        ignored: The paths of what ``ignore_keys`` left out.
        extra: What was saved beside the state.
        manifest: The checkpoint's manifest; None for a file of weights.
        averages_of: The algorithm whose averages were loaded as the weights; empty if the saved weights were.

    Example:
        >>> print(LoadedCheckpoint("runs/ep1-ba5", LoadReport(restored=("model",)), ("optimizers",)))
        runs/ep1-ba5 was loaded.
        restored: model
        ignored: optimizers
    """

    path: str
    report: LoadReport
    ignored: tuple[str, ...] = ()
    extra: dict[str, Any] = attrs.field(factory=dict, repr=False)
    manifest: Manifest | None = attrs.field(default=None, repr=False)
    averages_of: str = ""

    def __str__(self) -> str:
        lines = [f"{self.path} was loaded.", str(self.report)]
        lines += [f"weights: the averages of {self.averages_of}"] if self.averages_of else []
        lines += [f"ignored: {', '.join(self.ignored)}"] if self.ignored else []
        return "\n".join(filter(None, lines))


@attrs.frozen
class CheckedCheckpoint:
    """A checkpoint that was read and fits the run.

    Args:
        result: What loading it returns.
        fits: Its state.
        logger: The logger of the reconstructed algorithms.
        warning: What the user has to know when it is loaded.
    """

    result: LoadedCheckpoint
    fits: saved_state.CheckedState
    logger: Logger | None
    warning: str = ""

    def load(self) -> LoadedCheckpoint:
        """Load it; the run must not have changed since the check.

        Raises:
            CheckpointMismatchError: ``load_state_dict`` of an optimizer rejects its state.
        """
        if self.warning:
            warnings.warn(self.warning, UserWarning, stacklevel=3)
        path, averages_of = self.result.path, self.result.averages_of
        try:
            self.fits.load(self.logger)
        except StateMismatchError as error:
            raise CheckpointMismatchError(path, error.problems) from error
        if averages_of and get_global_rank() == 0:
            _log.warning(
                "The weights from %s are the averages of %s, with which the run was evaluated. To load its training "
                "weights, set ignore_keys (load_ignore_keys of a Trainer) to 'algorithms/%s'.",
                *(path, averages_of, averages_of),
            )
        return self.result


def load_checkpoint(
    path: str | os.PathLike[str],
    state: State,
    *,
    folder: str | os.PathLike[str] | None = None,
    weights_only: bool = False,
    strict_model_weights: bool = True,
    ignore_keys: IgnoreKeys = None,
    exclude_algorithms: str | Sequence[str] | None = None,
    algorithm_passes: Passes = None,
    logger: Logger | None = None,
    check_extra: CheckExtra | None = None,
) -> LoadedCheckpoint:
    """Load a checkpoint into a run.

    The files are compared with the manifest, and their contents with the run: names, shapes, dtypes, algorithms. The
    run changes only if everything fits.

    Args:
        path: A checkpoint's folder or URL, or a link to one; a folder of checkpoints, for its newest undamaged
            one; ``"latest"``, for the newest undamaged one in ``folder``; or, with ``weights_only``, a file of weights:
            safetensors, a ``state_dict``. A ``.pt`` checkpoint of MosaicML Composer is also loaded without
            ``weights_only``: the model, optimizers and clock; a warning names what is not restored.
        state: The run.
        folder: Where to look for ``"latest"``.
        weights_only: Whether to load only the model's weights: those that the run was evaluated with, such as the
            averages of EMA or SWA, also if this run has no such algorithm. ``ignore_keys="algorithms/EMA"`` leaves the
            averages out, and loads the training weights. Those of a schedule-free optimizer are loaded with a warning.
        strict_model_weights: Whether missing or unexpected weights raise an error, or a warning; with ``weights_only``
            also weights of another dtype.
        ignore_keys: What not to load: patterns of paths such as ``"model/head.*"``, ``"optimizers/*"``,
            ``"algorithms/EMA"``; or a function that removes it from the dictionary that it is called with.
        exclude_algorithms: Algorithms not to reconstruct, though the saved weights need them.
        algorithm_passes: Passes that order the reconstructed algorithms.
        logger: The logger of the reconstructed algorithms.
        check_extra: ``f(extra, ignored)`` returns a sentence for each value saved beside the state that does not fit,
            so that nothing is loaded. ``ignored`` are the paths of what ``ignore_keys`` leaves out.

    Returns:
        What was loaded, and what was saved beside the state.

    Raises:
        NotImplementedError: The model is wrapped by FSDP 1.
        CheckpointError: The checkpoint is incomplete, damaged, or of another library. If the model is sharded, all
            processes have to call this function, and raise an error before anything has been changed in any of them.
        CheckpointMismatchError: It does not fit the run. Every mismatch is named, and nothing has been changed.

    Example:
        >>> import tempfile, torch
        >>> from composer.checkpoint import save_checkpoint
        >>> path = save_checkpoint(State(torch.nn.Linear(2, 2), rank_zero_seed=17), tempfile.mkdtemp() + "/first")
        >>> later = State(torch.nn.Linear(2, 2))
        >>> loaded = load_checkpoint(path, later)
        >>> later.rank_zero_seed
        17
    """
    request = LoadRequest(
        state,
        folder=folder,
        weights_only=weights_only,
        strict_model_weights=strict_model_weights,
        ignore_keys=ignore_keys,
        exclude_algorithms=exclude_algorithms,
        algorithm_passes=algorithm_passes,
        logger=logger,
        check_extra=check_extra,
    )
    if not is_sharded(state.model):
        return request.check(path).load()
    # A link may change, or a file system be behind, between the reads of two processes.
    return request.load_in_all_processes(agreed_path(os.fspath(path), "path", folder) or path)


@attrs.frozen
class LoadRequest:
    """What is to be loaded into a run, and how; the fields are the arguments of :func:`load_checkpoint`."""

    state: State
    folder: str | os.PathLike[str] | None = None
    weights_only: bool = False
    strict_model_weights: bool = True
    ignore_keys: IgnoreKeys = None
    exclude_algorithms: str | Sequence[str] | None = None
    algorithm_passes: Passes = None
    logger: Logger | None = None
    check_extra: CheckExtra | None = None

    def load_in_all_processes(
        self, path: str | os.PathLike[str], load_extra: Callable[[LoadedCheckpoint], object] = lambda _: None
    ) -> LoadedCheckpoint:
        """Check and load a checkpoint in all processes; see :func:`load_checkpoint`.

        If it fails in one, it fails in all: with its own error there, and with one that names it in the others.

        Args:
            path: The checkpoint, on which all processes have agreed.
            load_extra: Called with the result.

        Raises:
            CheckpointError: Also if processes have read different checkpoints, as one was replaced in between.
        """

        def failed(reason: str) -> CheckpointError:
            return CheckpointError(path, f"was not loaded, and nothing has been changed: {reason}")

        with failing_in_all_processes("it", failed):
            checked = self.check(path)
        if not all_agree(checked.result.manifest):
            raise failed("it was replaced by another while the processes read it. Load it again.")
        with failing_in_all_processes("Loading a checkpoint"):
            loaded = checked.load()
            load_extra(loaded)
        return loaded

    def check(self, path: str | os.PathLike[str]) -> CheckedCheckpoint:
        """Read and check a checkpoint, change nothing, and return what loads it; see :func:`load_checkpoint`."""
        reject_fsdp1(self.state.model)
        if is_weights_file(path):
            return self._check_file(str(path))
        opened = open_checkpoint(path, self.folder)
        if opened.manifest.weights_only and not self.weights_only:
            raise CheckpointError(
                opened.path,
                "holds only weights, from which training cannot resume; set weights_only (load_weights_only of a "
                "Trainer).",
            )
        read = _read_state(opened, self.state, weights_only=self.weights_only)
        if callable(self.ignore_keys):  # it may use the values
            read.read_weights()
        checked = self._check_weights(read) if self.weights_only else self._check_all(read)
        read.read_weights()
        if ties := model_state.conflicting_ties(self.state.model, read.saved.get("model", {})):
            raise CheckpointMismatchError(opened.path, ties)
        return checked

    def _check_file(self, path: str) -> CheckedCheckpoint:
        """Read and check a file of weights or of MosaicML Composer."""
        weights, content = read_weights_file(path)
        composer = ComposerFile.of(content)
        if composer is None and not self.weights_only:
            raise CheckpointError(
                path, "is a file of weights, not a checkpoint; set weights_only (load_weights_only of a Trainer)."
            )
        own = self.state.get_model_state_dict()
        names = names_here(weights, own)
        if composer is None:
            return self._check_weights(_ReadState(path, {"model": {new: weights[name] for name, new in names.items()}}))
        read = _ReadState(path, composer.model(names, own, averaged=self.weights_only))
        return self._check_weights(read) if self.weights_only else self._check_composer(read, composer, names)

    def _compare(
        self, read: _ReadState, check: Callable[..., saved_state.CheckedState], *saved: Any, strict: bool = False
    ) -> saved_state.CheckedState:
        """Call a function that compares a saved state with the run, and name the checkpoint if it does not fit."""
        excluded = to_strings("exclude_algorithms", self.exclude_algorithms)
        try:
            return check(self.state, *saved, strict=strict, excluded=excluded, passes=self.algorithm_passes)
        except StateMismatchError as error:
            raise CheckpointMismatchError(read.path, error.problems) from error
        except Exception as error:
            what = f"{type(error).__name__}: {error}"
            raise CheckpointError(f"{read.path}/{STATE}", f"cannot be read as the state of a run: {what}") from error

    def _check_all(self, read: _ReadState) -> CheckedCheckpoint:
        """Check everything that a checkpoint has."""
        read.ignore(self.ignore_keys, self.state)
        extra, modules, was = map(read.pop, ("extra", "modules", "environment"))
        read.pop("integrations")
        read.match_neutral_callbacks(self.state)
        try:
            fits = self._compare(read, saved_state.check_state, read.saved)
            problems = self._weights_that_differ(fits.report)
        except CheckpointMismatchError as error:
            problems = [*error.problems]
        if self.check_extra is not None and "extra" not in read.ignored:
            problems += self.check_extra(extra, read.ignored)
        if any(problem.startswith("model.") for problem in problems):
            problems += _changed_modules(self.state.model, modules)
        if problems:
            raise CheckpointMismatchError(read.path, problems)
        changes = _changed_environment(was, environment(self.state.device))
        warning = f"Training that resumes from {read.path} may not be bit-identical: {changes}." if changes else ""
        return CheckedCheckpoint(read.result(fits.report, extra=extra), fits, self.logger, warning)

    def _check_weights(self, read: _ReadState) -> CheckedCheckpoint:
        """Check the weights to evaluate with, and the algorithms that they need."""
        modules, path = read.pop("modules"), read.path
        read.ignore(self.ignore_keys, self.state)
        if "model" in read.ignored:
            raise CheckpointError(path, "cannot be loaded for its weights: ignore_keys leaves all of them out.")
        if "model" not in read.saved:
            raise CheckpointError(path, "holds no weights: they were left out when it was saved.")
        averages_of, warning = read.use_averages(self.state.model), ""
        if read.saved.pop("is_schedule_free", False) and not averages_of:
            warning = (
                f"The weights from {path} are the training weights of a schedule-free optimizer, and the run was "
                "evaluated with others, which only that optimizer computes. Save these: save_weights_only=True of a "
                "Trainer, or trainer.save_checkpoint(..., weights_only=True)."
            )
        try:
            fits = self._compare(read, saved_state.check_part, "model", read.saved, strict=self.strict_model_weights)
        except CheckpointMismatchError as error:
            problems = [*error.problems, *_changed_modules(self.state.model, modules)]
            raise CheckpointMismatchError(path, problems) from None
        return CheckedCheckpoint(read.result(fits.report, averages_of=averages_of), fits, self.logger, warning)

    def _check_composer(self, read: _ReadState, file: ComposerFile, names: Mapping[str, str]) -> CheckedCheckpoint:
        """Check a checkpoint of MosaicML Composer; the run keeps what the file lacks."""
        own, rng = self.state.state_dict(), file.rng(self.state.device)
        read.saved |= file.progress(names, own)
        lacking = [*([] if rng else ["the generators of random numbers"]), *file.unread(read.saved)]
        extra = file.resume_data(rng, rng_state(self.state.device))
        read.ignore(self.ignore_keys, self.state)
        checked = self._compare(read, saved_state.check_state, own | read.saved)
        restored = tuple(name for name in read.saved if name not in read.ignored)
        report = attrs.evolve(checked.report, restored=restored)
        problems = self._weights_that_differ(report)
        if self.check_extra is not None:
            problems += self.check_extra(extra, read.ignored)
        if problems:
            raise CheckpointMismatchError(read.path, problems)

        def load_into(state: Any, state_dict: Mapping[str, Any]) -> None:
            checked.load_into(state, state_dict)
            state.previous_timestamp = state.timestamp  # the file has none

        warning = (
            f"{read.path} is a checkpoint of MosaicML Composer. The training continues from it, but not as it would "
            f"have there: not restored are {', '.join(lacking)}."
        )
        fits = attrs.evolve(checked, report=report, load_into=load_into)
        return CheckedCheckpoint(read.result(report, extra=extra), fits, self.logger, warning)

    def _weights_that_differ(self, report: LoadReport) -> list[str]:
        differences = (*report.missing, *report.unexpected) if self.strict_model_weights else ()
        return [line for line in differences if line.startswith("model.")]


@attrs.define
class _ReadState:
    """A saved state that was read; each method makes one change of it.

    The weights of a checkpoint are on the meta device, without data, until :meth:`read_weights`.

    Args:
        path: The checkpoint or file.
        saved: The state.
        opened: The checkpoint; None for a file, of which everything was read.
        likes: Like which tensors its weights are read; see :func:`sharded_likes`.

    Attributes:
        ignored: The paths of what was left out.
    """

    path: str
    saved: dict[str, Any]
    opened: OpenCheckpoint | None = None
    likes: Mapping[str, Tensor] | None = None
    ignored: tuple[str, ...] = attrs.field(default=(), init=False)

    def result(self, report: LoadReport, **more: Any) -> LoadedCheckpoint:
        """Return what loading it returns."""
        manifest = None if self.opened is None else self.opened.manifest
        return LoadedCheckpoint(self.path, report, self.ignored, manifest=manifest, **more)

    def read_weights(self) -> None:
        """Read those weights that have no data yet and are still part of the state."""
        model = self.saved.get("model", {})
        if self.opened is not None:
            names = {name for name, one in model.items() if isinstance(one, Tensor) and one.is_meta}
            model.update(self.opened.tensors(MODEL, self.likes, names))

    def pop(self, name: str) -> dict[str, Any]:
        """Remove what is not part of a run's state, and return it."""
        return dictionary(self.saved.pop(name, {}))

    def ignore(self, keys: IgnoreKeys, state: State) -> None:
        """Remove what is ignored, and put the run's own values there, so that they do not change."""
        saved = self.saved
        self.ignored = ignored_keys(saved, keys)
        if keys and not callable(keys) and not self.ignored:
            warnings.warn(
                f"{self.path} holds nothing that ignore_keys={keys!r} would leave out. Its parts are "
                f"{', '.join(saved)}; a pattern is such as 'model/head.*', 'optimizers/*' or 'algorithms/EMA'.",
                UserWarning,
                stacklevel=5,
            )
        own = state.state_dict() if self.ignored else {}
        if any(key.startswith("model/") for key in self.ignored):
            own["model"] = state.get_model_state_dict()
        if any(key.startswith("optimizers/") for key in self.ignored):
            own["optimizers"] = state.get_optim_state_dict()
        for name, _, inner in (key.partition("/") for key in self.ignored):
            if not inner:
                saved |= {name: own[name]} if name in own else {}
            elif isinstance(saved.get(name), list):
                saved[name] += [record for record in own.get(name, []) if record["key"] == inner]
            elif isinstance(saved.get(name), dict) and inner in dictionary(own.get(name)):
                saved[name][inner] = own[name][inner]

    def match_neutral_callbacks(self, state: State) -> None:
        """Ignore callbacks without settings and state that only the run or only the checkpoint has."""
        records = self.saved.get("callbacks")
        if not isinstance(records, list) or not all(isinstance(dictionary(one).get("key"), str) for one in records):
            return  # which the comparison with the run rejects
        own = {record["key"]: record for record in state.state_dict()["callbacks"]}
        saved = {record["key"] for record in records}
        kept = [one for one in records if one["key"] in own or one.get("settings") or one.get("state")]
        added = [one for key, one in own.items() if key not in saved and not one["settings"] and not one["state"]]
        self.saved["callbacks"] = kept + added

    def use_averages(self, model: Any) -> str:
        """Replace the weights by the averages of an algorithm, and return its key; an empty string without any.

        Raises:
            CheckpointError: Averages are no dictionary of tensors.
        """
        records, weights = self.saved.get("algorithms"), self.saved["model"]
        for record in filter(dictionary, records if isinstance(records, list) else []):
            key, averages = record.get("key"), dictionary(record.get("state")).get(_AVERAGES, {})
            try:
                from_data(averages, dict[str, Tensor], f"algorithms.{key}.{_AVERAGES}")
            except ValueError as error:
                raise CheckpointError(f"{self.path}/{STATE}", f"is not the state of a checkpoint: {error}") from None
            if averages and f"algorithms/{key}" not in self.ignored:
                first = model_state.first_names(model)
                for name, weight in weights.items():
                    average = averages.get(first.get(name, name))  # tied weights have one average
                    if average is not None and f"model/{name}" not in self.ignored:
                        # Averages of weights in bfloat16 are saved in float32.
                        weights[name] = average.to(weight.dtype) if isinstance(weight, Tensor) else average
                return str(key)
        return ""


def _read_state(opened: OpenCheckpoint, state: State, *, weights_only: bool) -> _ReadState:
    """Read the saved state of a checkpoint, or only what the model's weights need.

    What is read is compared with its checksums, so that nothing depends on the files afterwards. Of tensors that are
    sharded in this run, only the own region is read.

    Raises:
        CheckpointError: A file is missing, or its content is not the one that was written.
    """
    data = opened.data()
    likes: dict[str, dict[str, Tensor]] = {}
    try:
        reshard(state.model)
        own = state.get_model_state_dict()
        opened.check_layout(len(own) + len(_referenced(data)))
        if is_sharded(state.model):
            likes = sharded_likes(opened.layout, own, data, opened.path)
        if weights_only:
            groups = tree_leaves(data.get("optimizers"), is_leaf=lambda one: "train_mode" in dictionary(one))
            data = {name: data[name] for name in ("model", "algorithms", "modules") if name in data}
            # Such an optimizer records whether the model has its weights for training.
            data["is_schedule_free"] = any(dictionary(one).get("train_mode") is True for one in groups)
        listed = opened.shapes(EXTRA) | opened.shapes(OPTIMIZERS)
        names = listed.keys() & _referenced(data) if weights_only else listed.keys()
        join_tensors(data, {name: listed[name] for name in names})  # the names are checked before anything is read
        extra, optimizers = (opened.tensors(kind, likes.get(kind), names) for kind in (EXTRA, OPTIMIZERS))
        saved = dict(join_tensors(data, extra | optimizers))
    except (ValueError, TypeError, RecursionError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{opened.path}/{STATE}", f"is not the state of a checkpoint: {error}") from None
    if not isinstance(saved.get("model", {}), dict):
        raise CheckpointError(f"{opened.path}/{STATE}", "must hold a dictionary 'model'.")
    if MODEL in opened.layout.tensors:
        saved["model"] = opened.shapes(MODEL) | saved.get("model", {})
    else:
        saved.pop("model", None)
    return _ReadState(opened.path, saved, opened, likes.get(MODEL))


def _referenced(data: Any) -> set[str]:
    """Return the names of the tensors that saved data refers to."""
    return {one["$tensor"] for one in tree_leaves(data, is_leaf=is_reference) if is_reference(one)}


def _changed_modules(model: Any, saved: Mapping[str, Any]) -> list[str]:
    """Return which modules are of another class than those saved, as after surgery on one side only."""
    own = module_classes(model)
    return [
        f"module {name!r} was {saved.get(name, 'not there')}, and is {own.get(name, 'not there')}."
        for name in (dict.fromkeys((*own, *saved)) if saved else ())
        if own.get(name) != saved.get(name)
    ]


def _changed_environment(saved: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Return which software and hardware differs that the bits of a training depend on."""
    names = ("torch", "composer-trainer", "device", "machine")
    return "; ".join(
        abridged(f"{name} was {saved[name]}, and is {now[name]}")
        for name in names
        if saved.get(name, now[name]) != now[name]
    )
