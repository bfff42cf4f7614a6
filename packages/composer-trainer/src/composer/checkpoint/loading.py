"""Loading a checkpoint into a run.

:func:`load_checkpoint` and the Trainer make a :class:`LoadRequest` of their arguments. A load has five steps:

1. ``LoadRequest.read`` reads a :class:`SavedRun`: what the checkpoint or file contains, without what is ignored. Of the
   weights of a checkpoint, only names, dtypes and shapes, unless a function ``ignore_keys`` needs their data.
2. ``add_missing_algorithms`` lets algorithms that the weights need change the model, if all but weights and optimizers
   fits.
3. ``compare`` collects the mismatches with the run. One error has all of them, or those found before step 2; then
   nothing is loaded, but the model may have new layers.
4. ``SavedRun.read_weights`` reads the data of the weights.
5. ``LoadRequest.apply`` changes the run.

``LoadRequest.prepare`` is the first four, which find what is wrong with the checkpoint, and returns a
:class:`PreparedLoad`. In ``load_in_all_processes``, no process applies before all have prepared. What is ignored keeps
the run's own value: what ``ignore_keys`` names, now or when the checkpoint was saved.
"""

from __future__ import annotations

import contextlib
import logging
import os
import warnings
from abc import abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import attrs
from torch import Tensor

from composer.checkpoint.contents import (
    BESIDE_STATE,
    FIRST_PROCESS,
    OWN_PROCESS,
    IgnoreKeys,
    changed_environment,
    pop_not_needed,
    remove_ignored,
)
from composer.checkpoint.errors import CheckpointError, CheckpointMismatchError
from composer.checkpoint.finding import agreed_path, latest_in, open_checkpoint
from composer.checkpoint.manifest import EXTRA, MODEL, OPTIMIZERS, STATE, Manifest, dictionary
from composer.checkpoint.reading import OpenCheckpoint, references, sharded_like
from composer.core import LoadReport, Logger, State, StateMismatchError, join_tensors
from composer.core.checks import caller_level, to_strings
from composer.core.passes import Passes
from composer.core.saving import model_state, saved_state
from composer.core.saving.records import read
from composer.core.saving.secrets import without_secret_urls
from composer.distributed import get_global_rank
from composer.distributed.collectives import failing_in_all_processes
from composer.functional.dtensors import is_sharded, reshard

_log = logging.getLogger(__name__)

LoadExtra: TypeAlias = Callable[[], object] | None
CompareExtra: TypeAlias = Callable[[dict[str, Any], tuple[str, ...], str], tuple[Iterable[str], LoadExtra]]
"""Called with what was saved beside the state, the ignored paths and the checkpoint's path. It returns a sentence for
each value that does not fit the run, and the function that loads all of it, called after the state is loaded."""
ONLY_WEIGHTS = (
    "holds only weights, from which training cannot resume; set weights_only (load_weights_only of a Trainer)."
)
_AVERAGES = "averaged_weights"
"""In the state of an algorithm, the weights for evaluation; see :meth:`composer.core.Algorithm.evaluation_weights`."""


@attrs.frozen
class LoadedCheckpoint:
    """The result of loading a checkpoint.

    Args:
        path: The checkpoint or file.
        report: What was restored, and what differs.
        ignored: The paths of what is not loaded: what ``ignore_keys`` leaves out, now or when it was saved.
        extra: What was saved beside the state.
        manifest: The checkpoint's manifest; None for a file.
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
        lines = [f"{without_secret_urls(self.path)} was loaded.", str(self.report)]
        lines += [f"weights: the averages of {self.averages_of}"] if self.averages_of else []
        lines += [f"ignored: {', '.join(self.ignored)}"] if self.ignored else []
        return "\n".join(filter(None, lines))


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
    check_extra: Callable[[dict[str, Any], tuple[str, ...]], Iterable[str]] | None = None,
) -> LoadedCheckpoint:
    """Load a checkpoint into a run.

    The files are compared with the manifest, and their contents with the run: names, shapes, dtypes, algorithms. If
    anything does not fit, nothing is loaded. Algorithms that the weights need and the run lacks change the model before
    the weights are compared, when all else fits.

    Args:
        path: A checkpoint's folder or URL, or a link to one; a folder of checkpoints, for its newest undamaged
            one; ``"latest"``, for the newest undamaged one in ``folder``; or a file, as
            :class:`composer.foreign.ForeignFile`.
        state: The run.
        folder: Where to look for ``"latest"``.
        weights_only: Whether to load only the model's weights: those that the run was evaluated with, such as the
            averages of EMA or SWA, also if this run has no such algorithm. ``ignore_keys="algorithms/EMA"`` leaves the
            averages out, and loads the training weights, as always with a schedule-free optimizer.
        strict_model_weights: Whether missing or unexpected weights raise an error, or a warning; with ``weights_only``
            also weights of another dtype.
        ignore_keys: What not to load: patterns of paths such as ``"model/head.*"``, ``"optimizers/*"``,
            ``"algorithms/EMA"``; or a function that removes it from the dictionary that it is called with. A part that
            ``ignore_keys`` left out when the checkpoint was saved is not loaded, either, with a warning.
        exclude_algorithms: Algorithms not to reconstruct, though the saved weights need them.
        algorithm_passes: Passes that order the reconstructed algorithms.
        logger: The logger of the reconstructed algorithms.
        check_extra: ``f(extra, ignored)`` returns a sentence for each value saved beside the state that does not fit,
            so that nothing is loaded. ``ignored`` are the paths of what is not loaded.

    Returns:
        What was loaded, and what was saved beside the state.

    Raises:
        CheckpointError: The checkpoint is incomplete, damaged, or of another library. If the model is sharded, all
            processes have to call this function, and raise an error before anything is loaded in any of them.
        CheckpointMismatchError: It does not fit the run. Every mismatch is named, and nothing of it has been loaded.

    Example:
        >>> import tempfile, torch
        >>> from composer.checkpoint import save_checkpoint
        >>> path = save_checkpoint(State(torch.nn.Linear(2, 2), rank_zero_seed=17), tempfile.mkdtemp() + "/first")
        >>> later = State(torch.nn.Linear(2, 2))
        >>> loaded = load_checkpoint(path, later)
        >>> later.rank_zero_seed
        17
    """
    compare_extra: CompareExtra | None = None
    if check_extra is not None:
        compare_extra = lambda extra, ignored, _: (check_extra(extra, ignored), None)  # noqa: E731
    request = LoadRequest(
        state, weights_only, strict_model_weights, ignore_keys, exclude_algorithms, algorithm_passes, logger,
        compare_extra,
    )  # fmt: skip
    path = latest_in(folder, path)
    if not is_sharded(state.model):
        return request.apply(request.prepare(path))
    # A link may change, or a file system be behind, between the reads of two processes.
    source = path if isinstance(path, Source) else agreed_path(os.fspath(path))
    return request.load_in_all_processes(source)


@attrs.frozen
class LoadRequest:
    """What is to be loaded into a run, and how; the fields are the arguments of :func:`load_checkpoint`."""

    state: State
    weights_only: bool = False
    strict_model_weights: bool = True
    ignore_keys: IgnoreKeys = None
    exclude_algorithms: str | Sequence[str] | None = None
    algorithm_passes: Passes = None
    logger: Logger | None = None
    compare_extra: CompareExtra | None = None

    def load_in_all_processes(self, path: str | os.PathLike[str]) -> LoadedCheckpoint:
        """Load a checkpoint in all processes; see :func:`load_checkpoint`.

        If it fails in one, it fails in all: with its own error there, and with one that names it in the others.

        Args:
            path: The checkpoint, on which all processes have agreed.
        """

        def failed(reason: str) -> CheckpointError:
            return CheckpointError(path, f"was not loaded: {reason}")

        with failing_in_all_processes("it", failed):
            prepared = self.prepare(path)
        with failing_in_all_processes("Loading a checkpoint"):
            return self.apply(prepared)

    def prepare(self, path: str | os.PathLike[str]) -> PreparedLoad:
        """Return what :meth:`apply` loads, after the four steps before it; of these, only the second changes the run.

        Raises:
            CheckpointMismatchError: It does not fit.
        """
        saved, problems, load_extra = self.read(path), list[str](), None
        excluded = to_strings("exclude_algorithms", self.exclude_algorithms)
        options: dict[str, Any] = {"weights_only": self.weights_only, "ignored": saved.ignored}
        if self.compare_extra is not None and not self.weights_only and "extra" not in saved.ignored:
            problems_of_extra, load_extra = self.compare_extra(saved.beside("extra"), saved.ignored, saved.path)
            problems += problems_of_extra
        try:
            added = () if problems else saved_state.add_missing_algorithms(
                self.state, saved.state, excluded=excluded, passes=self.algorithm_passes, logger=self.logger, **options
            )  # fmt: skip
            report = saved_state.compare(
                self.state, saved.state, strict_weights=self.strict_model_weights, added=added, **options
            )
        except StateMismatchError as error:
            problems += error.problems
        except Exception as error:
            what = f"{type(error).__name__}: {error}"
            raise CheckpointError(f"{saved.path}/{STATE}", f"cannot be read as the state of a run: {what}") from error
        if problems:
            raise CheckpointMismatchError(saved.path, problems)
        saved.read_weights()
        return PreparedLoad(saved, report, load_extra)

    def read(self, path: str | os.PathLike[str]) -> SavedRun:
        """Read what is to be loaded of a checkpoint or file; of a checkpoint's weights, only the shapes."""
        if isinstance(path, Source):
            saved = path.read(self.state, weights_only=self.weights_only)
        else:
            opened = open_checkpoint(path)
            if opened.manifest.weights_only and not self.weights_only:
                raise CheckpointError(opened.path, ONLY_WEIGHTS)
            saved = SavedRun.of_checkpoint(opened, self.state, weights_only=self.weights_only)
        saved.ignore(self.ignore_keys, [*self.state.serialized_attributes, "extra"], weights_only=self.weights_only)
        if self.weights_only:
            saved.use_averages(model_state.first_names(self.state.model))
        return saved

    def apply(self, prepared: PreparedLoad) -> LoadedCheckpoint:
        """Load what fits the run, which must not have changed since :meth:`prepare`.

        Raises:
            CheckpointMismatchError: ``load_state_dict`` of an optimizer rejects its state.
        """
        saved, report = prepared.saved, prepared.report
        changes = "" if self.weights_only else changed_environment(saved.beside("environment"), self.state.device)
        if changes:
            saved.warnings.append(f"Training that resumes from {saved.path} may not be bit-identical: {changes}.")
        if saved.warnings:
            text = without_secret_urls("\n".join(saved.warnings))
            warnings.warn(text, UserWarning, stacklevel=caller_level())
        try:
            parts = {"model": saved.data["model"]} if self.weights_only else saved.state
            saved_state.apply(self.state, parts, report)
        except StateMismatchError as error:
            raise CheckpointMismatchError(saved.path, error.problems) from error
        if prepared.load_extra is not None:
            prepared.load_extra()
        if saved.averages_of and get_global_rank() == 0:
            _log.warning(
                "The weights from %s are the averages of %s, with which the run was evaluated. To load its training "
                "weights, set ignore_keys (load_ignore_keys of a Trainer) to 'algorithms/%s'.",
                *(without_secret_urls(saved.path), saved.averages_of, saved.averages_of),
            )
        extra = {} if self.weights_only else saved.beside("extra")
        manifest = None if saved.opened is None else saved.opened.manifest
        return LoadedCheckpoint(saved.path, report, saved.ignored, extra, manifest, saved.averages_of)


@attrs.define
class SavedRun:
    """What was read of a checkpoint or another source, without what is not loaded.

    Args:
        path: The checkpoint or file.
        data: What was read, by the names of :mod:`~composer.checkpoint.contents`; of the model, its weights and what
            else its state has. Until :meth:`read_weights`, those of a checkpoint are on the meta device.
        opened: The checkpoint; None for a file, of which everything was read.
        dtensors: DTensors with the placements that weights get; see :func:`~composer.checkpoint.reading.sharded_like`.
        not_needed: What the checkpoint contains besides, if only the weights are wanted.
        warnings: What the user has to know when it is loaded.
        ignored: The paths of what is not loaded.
        averages_of: The algorithm whose averages are the weights; empty if the saved weights are.
    """

    path: str
    data: dict[str, Any]
    opened: OpenCheckpoint | None = None
    dtensors: Mapping[str, Tensor] | None = None
    not_needed: Mapping[str, Any] = attrs.field(factory=dict)
    warnings: list[str] = attrs.field(factory=list)
    ignored: tuple[str, ...] = ()
    averages_of: str = ""

    @classmethod
    def of_checkpoint(cls, opened: OpenCheckpoint, run: State, *, weights_only: bool) -> SavedRun:
        """Read what a checkpoint contains, or only what the model's weights need; of the weights, only the shapes.

        What is read is compared with its checksums, so that nothing depends on the files afterwards. Of tensors that
        are sharded in this run, only the own region is read.

        Raises:
            CheckpointError: A file is missing, or its content is not the one that was written.
        """
        reshard(run.model)
        data = opened.data()
        with _naming_state(opened.path):
            dtensors = sharded_like(opened, run.get_model_state_dict(), data) if is_sharded(run.model) else {}
            not_needed = pop_not_needed(data, weights_only=weights_only)
            saved = _with_tensors(data, opened, dtensors, weights_only=weights_only)
            if not isinstance(saved.get("model", {}), dict):
                raise TypeError("'model' must be a dictionary.")
            if get_global_rank() and FIRST_PROCESS in (extra := dictionary(saved.get("extra"))):
                extra[OWN_PROCESS] = opened.own_process()
        if MODEL in opened.layout.tensors:
            saved["model"] = opened.shapes(MODEL) | saved.get("model", {})
        else:
            saved.pop("model", None)
        return cls(opened.path, saved, opened, dtensors.get(MODEL), not_needed)

    @property
    def state(self) -> dict[str, Any]:
        """The state of the run, as ``state_to_save`` returned it, with ``"model"`` and ``"optimizers"``."""
        return {name: value for name, value in self.data.items() if name not in BESIDE_STATE}

    def beside(self, name: str) -> dict[str, Any]:
        """Return what was saved beside the state: ``"extra"`` or ``"environment"``."""
        return dictionary(self.data.get(name))

    def ignore(self, keys: IgnoreKeys, parts: Collection[str], *, weights_only: bool) -> None:
        """Remove what is ignored, and add its paths, and those of parts that were not saved, to :attr:`ignored`.

        Args:
            keys: What is ignored. A function is called with the data of the weights, too.
            parts: The names of all parts of a run.
            weights_only: Whether only the weights are wanted, so that other parts may be missing.
        """
        not_saved = [name for name in parts if name not in {*self.data, *self.not_needed}]
        if callable(keys):
            self.read_weights()
            ignored = remove_ignored(self.data, keys)
        else:
            ignored = (*remove_ignored(self.data, keys), *remove_ignored(dict.fromkeys(not_saved), keys))
            if keys and not ignored and not remove_ignored({**self.not_needed}, keys):
                warnings.warn(
                    f"{without_secret_urls(self.path)} holds nothing that ignore_keys={keys!r} would leave out. Its "
                    f"parts are {', '.join((*self.data, *self.not_needed))}; a pattern is such as 'model/head.*', "
                    "'optimizers/*' or 'algorithms/EMA'.",
                    stacklevel=caller_level(),
                )
        not_saved = [name for name in not_saved if name not in ignored and not weights_only]
        self.ignored += (*ignored, *not_saved)
        if not_saved and not self.warnings:  # of a file of MosaicML Composer, there is a warning already
            without = f"{self.path} was saved without {', '.join(not_saved)}"
            self.warnings.append(f"{without}, so that this run keeps its own values.")

    def use_averages(self, first_names: Mapping[str, str]) -> None:
        """Replace the weights by the averages of an algorithm, if there are any.

        Args:
            first_names: For each name of a tied parameter the first one, as tied weights have one average.

        Raises:
            CheckpointError: There are no weights, or averages are no dictionary of tensors.
        """
        if "model" in self.ignored:
            raise CheckpointError(self.path, "cannot be loaded for its weights: ignore_keys leaves all of them out.")
        if "model" not in self.data:
            raise CheckpointError(self.path, "holds no weights: they were left out when it was saved.")
        records, weights = self.data.get("algorithms"), self.data["model"]
        for record in (one for one in (records if isinstance(records, list) else ()) if dictionary(one)):
            key, averages = record.get("key"), dictionary(record.get("state")).get(_AVERAGES, {})
            with _naming_state(self.path):
                read(averages, dict[str, Tensor], f"algorithms.{key}.{_AVERAGES}")  # which checks them
            if not averages:
                continue
            for name, weight in weights.items():
                average = averages.get(first_names.get(name, name))
                if average is not None:
                    # Averages of weights in bfloat16 are saved in float32.
                    weights[name] = average.to(weight.dtype) if isinstance(weight, Tensor) else average
            self.averages_of = str(key)
            break

    def read_weights(self) -> None:
        """Read those weights that have no data yet and are still part of the state.

        Raises:
            CheckpointError: The content of a file is not the one that was written.
        """
        if self.opened is not None and "model" in self.data:
            model = self.data["model"]
            names = {name for name, one in model.items() if isinstance(one, Tensor) and one.is_meta}
            self.data["model"] = model | self.opened.tensors(MODEL, self.dtensors, names)


@attrs.frozen
class PreparedLoad:
    """What :meth:`LoadRequest.apply` loads.

    Args:
        saved: What was read, with the data of the weights.
        report: The result of comparing it with the run.
        load_extra: Loads what was saved beside the state; None if that is not loaded.
    """

    saved: SavedRun
    report: LoadReport
    load_extra: LoadExtra


class Source(os.PathLike[str]):
    """What is loaded in place of a checkpoint of this library, such as a file of another one.

    Attributes:
        path: Where it is, for messages.
    """

    path: str

    def __fspath__(self) -> str:
        return self.path

    @abstractmethod
    def read(self, run: State, *, weights_only: bool) -> SavedRun:
        """Return what it contains, or only what the weights of a run need; called in each process."""


def _with_tensors(
    data: dict[str, Any], opened: OpenCheckpoint, dtensors: Mapping[str, Mapping[str, Tensor]], *, weights_only: bool
) -> dict[str, Any]:
    """Return data with the tensors that it refers to, other than weights; all of the checkpoint, or of a part of it."""
    listed = opened.shapes(EXTRA) | opened.shapes(OPTIMIZERS)
    names = listed.keys() & references(data).keys() if weights_only else listed.keys()
    join_tensors(data, {name: listed[name] for name in names})  # the names are checked before anything is read
    extra, optimizers = (opened.tensors(kind, dtensors.get(kind), names) for kind in (EXTRA, OPTIMIZERS))
    return dict(join_tensors(data, extra | optimizers))


@contextlib.contextmanager
def _naming_state(path: str) -> Iterator[None]:
    """Raise what is wrong with data within this context as an error that names their file."""
    try:
        yield
    except CheckpointError:
        raise
    except (ValueError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{path}/{STATE}", f"is not the state of a checkpoint: {error}") from None
