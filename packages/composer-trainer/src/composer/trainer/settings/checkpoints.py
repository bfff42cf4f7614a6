"""The checkpoint that a run starts from, and those that it saves."""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

import attrs
from attrs.validators import optional

from composer.checkpoint import CheckpointError, KeepBest, find_checkpoints
from composer.checkpoint.contents import IgnoreKeys, check_ignore_keys
from composer.checkpoint.errors import LaterCheckpointError, MissingCheckpointError, OtherReleaseError
from composer.checkpoint.finding import agreed_newest, clock_order, latest_in
from composer.checkpoint.folders import check_folder
from composer.checkpoint.loading import LoadRequest
from composer.checkpoint.manifest import Manifest
from composer.checkpoint.run_folder import check_keep_last
from composer.checkpoint.saver import CheckpointSaver, SaveInterval
from composer.core import Engine, State
from composer.core.checks import by_name, is_flag, to_path, to_strings
from composer.core.evaluator import more_is_better, unknown_metric
from composer.core.files import fill_in_run
from composer.core.passes import Passes
from composer.distributed import from_rank_zero, get_global_rank
from composer.distributed.collectives import failing_in_all_processes
from composer.foreign.files import agreed_source
from composer.foreign.pt_files import open_files
from composer.trainer.evaluation.metrics import metrics_of

if TYPE_CHECKING:
    from composer.trainer.resume.state import ResumeState

_log = logging.getLogger(__name__)


def _to_exclude_algorithms(given: str | Sequence[str] | None) -> list[str] | None:
    return None if given is None else to_strings("load_exclude_algorithms", given)


def _to_flag(given: bool | None) -> bool:
    return False if given is None else given


@attrs.frozen
class Loading:
    """The checkpoint that a run starts from.

    The arguments are those of a :class:`~composer.Trainer`; see there.
    """

    path: str | os.PathLike[str] | None = attrs.field(alias="load_path")
    weights_only: bool = attrs.field(alias="load_weights_only", validator=is_flag)
    strict: bool = attrs.field(alias="load_strict_model_weights", validator=is_flag)
    ignore_keys: IgnoreKeys = attrs.field(alias="load_ignore_keys")
    exclude_algorithms: list[str] | None = attrs.field(
        alias="load_exclude_algorithms", converter=_to_exclude_algorithms
    )
    autoresume: bool = attrs.field(converter=_to_flag, validator=is_flag)

    def __attrs_post_init__(self) -> None:
        check_ignore_keys(self.ignore_keys, "load_ignore_keys")
        if self.path is not None:
            to_path("load_path", self.path)
        if self.path is not None and (not str(self.path) or "\0" in str(self.path)):
            raise ValueError(f"load_path must be the path or URL of a checkpoint, got {str(self.path)!r}.")

    def check(self, save_folder: str | None, *, has_name: bool) -> None:
        """Raise a ValueError if what is to be loaded cannot be found without a folder to save to, or a name."""
        needed = {"save_folder": save_folder is not None, "run_name": has_name}
        if self.autoresume and not all(needed.values()):
            lacking = " and ".join(name for name, is_given in needed.items() if not is_given)
            raise ValueError(
                f"autoresume=True looks for checkpoints of this run, and needs {lacking}: the same ones at every start."
            )
        if self.path is not None and str(self.path) == "latest" and save_folder is None:
            raise ValueError("load_path='latest' is the newest checkpoint in save_folder: give that, too.")

    def is_given(self) -> bool:
        """Return whether a checkpoint may have to be loaded."""
        return self.path is not None or self.autoresume

    def load(self, engine: Engine, resume_state: ResumeState, passes: Passes, save_folder: str | None) -> None:
        """Load the checkpoint, if there is one: the newest of this run, or else that of ``load_path``.

        The newest is that in the folder, or among its copies if one of them is newer, and is loaded with all that it
        contains. All processes must call this.
        """
        state, newest = engine.state, None
        folder = None if save_folder is None else fill_in_run(save_folder, state)
        if self.autoresume:
            assert folder is not None
            # Also without a checkpoint: loggers continue an earlier start of this run.
            engine.logger.load_state_dict({})
            newest = self._find_newest(folder, state)
        # Rank 0 decides, as a program may know the path there only.
        path = from_rank_zero(newest or (None if self.path is None else str(self.path)))
        if path is None:
            return
        request = LoadRequest(state, algorithm_passes=passes, logger=engine.logger, compare_extra=resume_state.compare)
        if newest is None:
            path = path.replace("{run_name}", state.run_name).replace("{rank}", "0")
            request = attrs.evolve(
                request, weights_only=self.weights_only, strict_model_weights=self.strict,
                ignore_keys=self.ignore_keys, exclude_algorithms=self.exclude_algorithms,
            )  # fmt: skip
        request.load_in_all_processes(agreed_source(latest_in(folder, path)))
        if newest is not None:
            clock = state.timestamp.counts
            _log.warning("autoresume: resuming from %s (epoch %d, batch %d).", newest, clock.epoch, clock.batch)

    def _find_newest(self, folder: str, state: State) -> str | None:
        """Return the newest checkpoint of a run in its folder or among its copies; all processes must call this."""
        run_name, savers = state.run_name, [one for one in state.callbacks if isinstance(one, CheckpointSaver)]
        places = [folder, *(place for one in savers if one.continues for place in one.folders_of_copies(state))]
        with failing_in_all_processes("Looking for checkpoints"):
            newest_first = _newest_first(places, run_name) if get_global_rank() == 0 else []
        for place in from_rank_zero(newest_first):
            newest = agreed_newest(open_files(place), run_name)
            if newest is not None:
                return newest
        with failing_in_all_processes("Looking for checkpoints"):
            if get_global_rank() == 0:
                self._check_begins_anew(places, run_name)
        return None

    def _check_begins_anew(self, places: Sequence[str], run_name: str) -> None:
        """Raise an error if a run without a checkpoint to resume from has damaged ones, or those of other runs."""
        found = {place: find_checkpoints(open_files(place)) for place in places}
        for place, one in [(place, one) for place, in_place in found.items() for one in in_place]:
            manifest = one.manifest
            if isinstance(one.error, OtherReleaseError):
                raise one.error
            is_own = manifest is not None and manifest.run_name == run_name and not manifest.weights_only
            if is_own or (manifest is None and not isinstance(one.error, MissingCheckpointError)):
                raise CheckpointError(
                    place,
                    f"has checkpoints and none that run {run_name!r} can resume from: {one.name} is damaged. Move them "
                    "elsewhere to train from the beginning.",
                )
        for one in found[places[0]]:
            if one.manifest is not None and one.manifest.run_name != run_name and one.manifest.timestamp.batch > 0:
                raise LaterCheckpointError(places[0], one.name, one.manifest.run_name, 0)
        if any(_manifests(place, run_name) for place in places):
            _log.warning(
                "autoresume: there are only weights of %r, from which training cannot resume; starting from the "
                "beginning. Leave out save_weights_only.",
                run_name,
            )
        elif self.path is None:
            _log.warning("autoresume: there is no checkpoint of %r yet; starting from the beginning.", run_name)


def _newest_first(places: Sequence[str], run_name: str) -> list[str]:
    """Return a folder and those of its copies, those with newer checkpoints first; it is before copies as new."""
    if len(places) == 1:
        return [*places]
    clocks = [
        [clock_order(one.timestamp) for one in _manifests(place, run_name) if not one.weights_only] for place in places
    ]
    newest = dict(zip(places, (max(of_place, default=()) for of_place in clocks), strict=True))
    return sorted(newest, key=newest.__getitem__, reverse=True)


def _manifests(place: str, run_name: str) -> list[Manifest]:
    manifests = [one.manifest for one in find_checkpoints(open_files(place))]
    return [one for one in manifests if one is not None and one.run_name == run_name]


@attrs.frozen
class Saving:
    """The arguments of a :class:`~composer.Trainer` about the checkpoints that it saves; see there."""

    save_folder: str | None = attrs.field(validator=optional(by_name(check_folder)))
    save_filename: str
    save_latest_filename: str | None
    save_overwrite: bool = attrs.field(validator=is_flag)
    save_interval: SaveInterval
    save_weights_only: bool = attrs.field(validator=is_flag)
    save_ignore_keys: IgnoreKeys
    save_num_checkpoints_to_keep: int = attrs.field(validator=by_name(check_keep_last))
    save_best: str | KeepBest | None
    save_metrics: bool = attrs.field(validator=is_flag)

    def make_savers(self, model: object, labels: Collection[str], *, autoresume: bool) -> list[CheckpointSaver]:
        """Return the callbacks that save: one, or none without a folder.

        Args:
            model: Its metrics are those that ``save_best`` may name.
            labels: The labels of the data sets that it is evaluated on.
            autoresume: Whether the run resumes from the newest undamaged checkpoint of the folder.

        Raises:
            TypeError: A setting is of the wrong type.
            ValueError: A setting is out of range.
        """
        keep_best = best_by(self.save_best, model, labels)
        if self.save_folder is None and keep_best is not None:
            raise ValueError("save_best chooses among the checkpoints in save_folder: give that, too.")
        if self.save_folder is None:
            return []
        saver = CheckpointSaver(
            self.save_folder,
            self.save_filename,
            # The name at uploaders; with "file://" it would be the URL of a copy, that of the checkpoint itself.
            f"{str(self.save_folder).removeprefix('file://')}/{self.save_filename}",
            self.save_latest_filename,
            save_interval=self.save_interval,
            overwrite=self.save_overwrite,
            num_checkpoints_to_keep=self.save_num_checkpoints_to_keep,
            keep_best=keep_best,
            weights_only=self.save_weights_only,
            ignore_keys=self.save_ignore_keys,
        )
        saver.continues = autoresume
        return [saver]


def best_by(save_best: str | KeepBest | None, model: Any, labels: Collection[str]) -> KeepBest | None:
    """Return by which metric the best checkpoint is chosen.

    Args:
        save_best: ``"label/metric"``, or a :class:`~composer.checkpoint.KeepBest`; None chooses none.
        model: Its metrics declare whether more is better.
        labels: The labels of the data sets that have metrics, if they are known.

    Raises:
        TypeError: ``save_best`` is something else.
        ValueError: There is no such label or metric, or the metric does not declare whether more is better.
    """
    if save_best is None or isinstance(save_best, KeepBest):
        return save_best
    if not isinstance(save_best, str):
        raise TypeError(
            f"save_best must be a metric such as 'eval/MulticlassAccuracy' or a KeepBest, got {save_best!r}."
        )
    label, _, name = save_best.removeprefix("metrics/").partition("/")
    metrics = dict(metrics_of(model, is_train=False).items()) if hasattr(model, "get_metrics") else {}
    choices = [one for one in metrics if more_is_better(metrics, one) is not None]  # not a matrix
    known = [f"{one}/{metric}" for one in labels or [label if name else "eval"] for metric in choices]
    metric = metrics.get(name) or metrics.get(name.partition("/")[0])
    if metric is None or (labels and label not in labels):
        raise unknown_metric("save_best", save_best, known)
    if (declared := more_is_better(metrics, name)) is None:
        raise ValueError(
            f"save_best: {type(metric).__name__} does not declare whether more is better: give "
            f"save_best=KeepBest('metrics/{label}/{name}', mode='max') of composer.checkpoint, or mode='min'."
        )
    return KeepBest(f"metrics/{label}/{name}", mode="max" if declared else "min")
