"""Loading a checkpoint: all of it is checked, and only then anything of the run is changed."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
from torch import Tensor

from composer.checkpoint.errors import CheckpointError, CheckpointMismatchError
from composer.checkpoint.opening import OpenCheckpoint, is_weights_file, open_checkpoint
from composer.checkpoint.reading import read_state
from composer.checkpoint.remote import is_remote
from composer.checkpoint.snapshot import (
    EXTRA,
    MODEL,
    STATE,
    IgnoreKeys,
    environment,
    ignored_keys,
    module_classes,
    refuse_sharded,
)
from composer.checkpoint.tensor_file import read_tensors
from composer.checkpoint.torch_files import load_torch_weights
from composer.core import LoadReport, State, StateMismatchError, loading, model_state
from composer.core.checks import abridged, to_texts

if TYPE_CHECKING:
    import os
    from contextlib import AbstractContextManager

    from composer.checkpoint.manifest import Manifest
    from composer.core import Logger
    from composer.core.loading import Passes

__all__ = ["LoadedCheckpoint", "load_checkpoint"]

CheckExtra = Callable[[dict[str, Any], tuple[str, ...]], Iterable[str]]


@attrs.frozen
class LoadedCheckpoint:
    """What became of loading.

    Args:
        path: Where it came from.
        report: What was restored, and what differs.
        ignored: What was left out because it was said so, by path.
        extra: What was saved beside the state.
        manifest: What the checkpoint says of itself; None for a file of weights.

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

    def __str__(self) -> str:
        lines = [f"{self.path} was loaded.", str(self.report), f"ignored: {', '.join(self.ignored)}"]
        return "\n".join(line for line in lines if line and line != "ignored: ")


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

    The files are compared with the manifest, their contents with the run: names, shapes, dtypes, algorithms. Only if
    all of it fits is anything changed.

    Args:
        path: A checkpoint's folder or address, or a link to one; a folder of checkpoints, for its newest whole one;
            ``"latest"``, for the newest whole one in ``folder``; or, with ``weights_only``, a file of weights:
            safetensors, a ``state_dict``, a Composer ``.pt`` checkpoint.
        state: The run.
        folder: Where ``"latest"`` is looked for.
        weights_only: Whether to load the model's weights, and nothing of the training.
        strict_model_weights: Whether weights that only one side has are an error, or a warning; with ``weights_only``
            also those of another dtype.
        ignore_keys: What stays as the run has it: patterns of paths such as ``"model/head.*"``, ``"optimizers/*"``,
            ``"algorithms/EMA"``; or a function that takes it out of the dictionary that it is given.
        exclude_algorithms: Algorithms that are not to be made again, though the saved weights need them.
        algorithm_passes: Passes that order those that are.
        logger: What they log to.
        check_extra: ``f(extra, ignored)`` returns a sentence for each thing that does not fit in what was saved beside
            the state; also of that nothing is loaded then. ``ignored`` is what ``ignore_keys`` leaves out, by path.

    Returns:
        What was loaded, and with it what was saved beside the state.

    Raises:
        NotImplementedError: The model is sharded.
        CheckpointError: It is not whole, or not of ours.
        CheckpointMismatchError: It does not fit the run. All that does not is named, and nothing has been changed.

    Example:
        >>> import torch
        >>> from composer.checkpoint import save_checkpoint
        >>> path = save_checkpoint(State(torch.nn.Linear(2, 2), rank_zero_seed=17), tempfile.mkdtemp() + "/first")
        >>> later = State(torch.nn.Linear(2, 2))
        >>> loaded = load_checkpoint(path, later)
        >>> later.rank_zero_seed
        17
    """
    refuse_sharded(state.model)
    load = _Load(
        state,
        strict_model_weights,
        ignore_keys,
        tuple(to_texts("exclude_algorithms", exclude_algorithms)),
        algorithm_passes,
        logger,
        check_extra,
    )
    if is_weights_file(path):
        if not weights_only:
            raise CheckpointError(path, "is a file of weights, not a checkpoint; say weights_only (load_weights_only).")
        return load.weights_file(str(path))
    names = (MODEL, EXTRA, STATE) if weights_only else None
    with open_checkpoint(path, folder, names, check_tensors=False) as opened:
        return load.weights(opened) if weights_only else load.all(opened)


@attrs.frozen
class _Load:
    state: State
    strict: bool
    ignore_keys: IgnoreKeys
    excluded: tuple[str, ...]
    passes: Passes
    logger: Logger | None
    check_extra: CheckExtra | None

    def all(self, opened: OpenCheckpoint) -> LoadedCheckpoint:
        if opened.manifest.weights_only:
            raise CheckpointError(
                opened.path, "holds only weights, nothing to go on training with; say weights_only (load_weights_only)."
            )
        with self._read(opened) as saved:
            ignored = self._ignore(opened.path, saved)
            extra, modules = _dictionary(saved.pop("extra", {})), _dictionary(saved.pop("modules", {}))
            saved.pop("integrations", None)
            elsewhere = _elsewhere(_dictionary(saved.pop("environment", {})), environment(self.state))
            _match_neutral(self.state, saved)
            checked = self._check(opened.path, saved, extra, modules, ignored)
            _copy_for_new_modules(checked, saved)
        if elsewhere:
            warnings.warn(f"{opened.path} may not go on to the same bits: {elsewhere}", UserWarning, stacklevel=3)
        checked.load(self.logger)
        return LoadedCheckpoint(opened.path, checked.report, ignored, extra, opened.manifest)

    def weights(self, opened: OpenCheckpoint) -> LoadedCheckpoint:
        with self._read(opened, weights_only=True) as saved:
            modules = _dictionary(saved.pop("modules", {}))
            ignored = self._ignore(opened.path, saved)
            checked = self._check_weights(opened.path, saved, modules, ignored)
            _copy_for_new_modules(checked, saved)
        checked.load(self.logger)
        return LoadedCheckpoint(opened.path, checked.report, ignored, {}, opened.manifest)

    def _read(self, opened: OpenCheckpoint, *, weights_only: bool = False) -> AbstractContextManager[dict[str, Any]]:
        # A function wants values, and may keep what it is given.
        at_once = callable(self.ignore_keys)
        return read_state(
            opened, weights_only=weights_only, at_once=at_once, kept=model_state.not_copied(self.state.model)
        )

    def weights_file(self, path: str) -> LoadedCheckpoint:
        with tempfile.TemporaryDirectory(prefix="composer-") as here:
            file = _fetched(path, Path(here)) if is_remote(path) else Path(path.removeprefix("file://"))
            if not file.is_file():
                raise CheckpointError(path, "does not exist.")
            read = read_tensors if path.endswith(".safetensors") else load_torch_weights
            weights = _named_as(self.state.get_model_state_dict(), read(file))
            saved = {"model": weights}
            ignored = self._ignore(path, saved)
            checked = self._check_weights(path, saved, {}, ignored)
            checked.load(self.logger)
        return LoadedCheckpoint(path, checked.report, ignored)

    def _check_weights(
        self, path: str, saved: dict[str, Any], modules: dict[str, Any], ignored: tuple[str, ...]
    ) -> loading.CheckedState:
        if "model" in ignored:
            raise CheckpointError(path, "was to be loaded for its weights, and ignore_keys leaves all of them out.")
        if "model" not in saved:
            raise CheckpointError(path, "holds no weights: they were left out when it was saved.")
        with _told_of(path, lambda: _changed_modules(self.state.model, modules)):
            return loading.check_model(
                self.state, saved, strict=self.strict, excluded=self.excluded, passes=self.passes
            )

    def _ignore(self, path: str, saved: dict[str, Any]) -> tuple[str, ...]:
        ignored = ignored_keys(saved, self.ignore_keys)
        if self.ignore_keys and not callable(self.ignore_keys) and not ignored:
            warnings.warn(
                f"{path} holds nothing that ignore_keys={self.ignore_keys!r} would leave out. Its parts are "
                f"{', '.join(saved)}; a pattern is such as 'model/head.*', 'optimizers/*' or 'algorithms/EMA'.",
                UserWarning,
                stacklevel=4,
            )
        if ignored:
            _fill_in(self.state, saved, ignored)
        return ignored

    def _check(
        self,
        path: str,
        saved: dict[str, Any],
        extra: dict[str, Any],
        modules: dict[str, Any],
        ignored: tuple[str, ...],
    ) -> loading.CheckedState:
        problems: list[str] = []
        checked: loading.CheckedState | None = None
        try:
            checked = loading.check(self.state, saved, strict=False, excluded=self.excluded, passes=self.passes)
            problems += self._one_sided(checked.report)
        except StateMismatchError as error:
            problems += error.problems
        except Exception as error:
            what = f"{type(error).__name__}: {error}"
            raise CheckpointError(Path(path) / STATE, f"cannot be read as the state of a run: {what}") from error
        if self.check_extra is not None:
            problems += self.check_extra(extra, ignored)
        if any(problem.startswith("model.") for problem in problems):
            problems += _changed_modules(self.state.model, modules)
        if problems or checked is None:
            raise CheckpointMismatchError(path, problems)
        return checked

    def _one_sided(self, report: LoadReport) -> list[str]:
        """Return which weights only one side has, if that matters."""
        one_sided = (*report.missing, *report.unexpected)
        return [line for line in one_sided if line.startswith("model.")] if self.strict else []


def _copy_for_new_modules(checked: loading.CheckedState, saved: dict[str, Any]) -> None:
    """Give weights memory of their own where algorithms put modules into the model that nobody has looked at."""
    if checked.made:
        saved["model"] = {name: one.clone() if isinstance(one, Tensor) else one for name, one in saved["model"].items()}


def _dictionary(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _fill_in(state: State, saved: dict[str, Any], ignored: Iterable[str]) -> None:
    """Put the run's own values into the places of a saved state that are ignored, so that these stay as they are."""
    own = state.state_dict()
    parts: dict[str, Callable[[], dict[str, Any]]] = {
        "model": state.get_model_state_dict,
        "optimizers": state.get_optim_state_dict,
    }
    for path in ignored:
        name, _, inner = path.partition("/")
        if not inner:
            if name in own:
                saved[name] = own[name]
        elif isinstance(saved.get(name), list):
            saved[name] += [one for one in own.get(name, []) if one["key"] == inner]
        elif isinstance(saved.get(name), dict):
            held = parts[name]() if name in parts else _dictionary(own.get(name))
            if inner in held:
                saved[name][inner] = held[inner]


def _match_neutral(state: State, saved: dict[str, Any]) -> None:
    """Leave aside callbacks that only one side has, and on which nothing depends: without settings and state."""
    records = saved.get("callbacks")
    if not isinstance(records, list) or not all(
        isinstance(one, dict) and isinstance(one.get("key"), str) for one in records
    ):
        return
    own = state.state_dict()["callbacks"]
    keys, saved_keys = ({one.get("key") for one in held} for held in (own, records))
    kept = [one for one in records if one.get("key") in keys or one.get("settings") or one.get("state")]
    saved["callbacks"] = kept + [
        one for one in own if one["key"] not in saved_keys and not one["settings"] and not one["state"]
    ]


class _told_of:  # noqa: N801  (used as a statement)
    """Says in an error of the engine which checkpoint it is about, and which modules differ."""

    def __init__(self, path: str, more: Callable[[], list[str]]) -> None:
        self._path, self._more = path, more

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, StateMismatchError):
            raise CheckpointMismatchError(self._path, [*error.problems, *self._more()]) from None


def _changed_modules(model: Any, saved: Mapping[str, Any]) -> list[str]:
    """Return which modules are of another class than those saved: what surgery was done on one side only."""
    own = module_classes(model)
    if not saved:
        return []
    return [
        f"module {name!r} was {saved.get(name, 'not there')}, and is {own.get(name, 'not there')}."
        for name in dict.fromkeys((*own, *saved))
        if own.get(name) != saved.get(name)
    ]


def _elsewhere(saved: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Return what is other than where the checkpoint was saved, of all that bits depend on."""
    names = ("torch", "composer-trainer", "device", "machine")
    changes = [
        f"{name} was {saved[name]}, and is {now[name]}" for name in names if saved.get(name, now[name]) != now[name]
    ]
    return "; ".join(map(abridged, changes)) + "." if changes else ""


def _fetched(url: str, here: Path) -> Path:
    import fsspec  # noqa: PLC0415

    file = here / "weights"
    try:
        with fsspec.open(url, "rb") as source, file.open("wb") as target:
            while chunk := source.read(8 << 20):
                target.write(chunk)
    except Exception as error:
        raise CheckpointError(url, f"cannot be read: {type(error).__name__}: {error}") from error
    return file


def _named_as(own: Mapping[str, Any], weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return weights with or without ``module.`` before their names, whichever the model has."""
    bare = {name.removeprefix("module."): value for name, value in weights.items()}
    candidates = [weights, bare, {f"module.{name}": value for name, value in bare.items()}]
    return max(candidates, key=lambda one: len(one.keys() & own.keys()))
