"""Errors of checkpoints, with their details as attributes; the sentences are without the secrets of URLs."""

from __future__ import annotations

from collections.abc import Iterable

from composer.core.checks import abridged, bulleted, printable
from composer.core.saving.secrets import without_secret_urls

NOT_SAVED = "was not saved"


class CheckpointError(ValueError):
    """A checkpoint cannot be used.

    Args:
        path: The checkpoint or file that is wrong.
        reason: What is wrong with it, as the rest of the sentence.

    Example:
        >>> str(CheckpointError("ep1-ba5/state.json", "is missing."))
        'ep1-ba5/state.json is missing.'
    """

    def __init__(self, path: object, reason: str) -> None:
        self.path, self.reason = str(path), abridged(reason)
        super().__init__(printable(without_secret_urls(f"{self.path} {self.reason}")))


class MissingCheckpointError(CheckpointError, FileNotFoundError):
    """There is no checkpoint of this path."""

    def __init__(self, path: object, reason: str = "does not exist.") -> None:
        super().__init__(path, reason)


class OtherReleaseError(CheckpointError):
    """Another release wrote the checkpoint, and this one cannot read it; it is neither replaced nor deleted.

    Args:
        path: Its manifest.
        reason: Why it cannot be read, as the rest of the sentence.
        run_name: The run that saved it; None if the manifest does not state it.
        release: The release that wrote it.

    Example:
        >>> str(OtherReleaseError("ep1-ba5/manifest.json", "is of format 2.", None, "0.9"))
        'ep1-ba5/manifest.json is of format 2. It was written by composer-trainer 0.9; load it with that release.'
    """

    def __init__(self, path: object, reason: str, run_name: str | None, release: str) -> None:
        self.run_name = run_name
        super().__init__(path, f"{reason} It was written by composer-trainer {release}; load it with that release.")


class CheckpointMismatchError(CheckpointError):
    """A checkpoint does not fit the run; nothing of it has been loaded. ``problems`` has a sentence for each mismatch.

    Example:
        >>> CheckpointMismatchError("ep1-ba5", ["model.bias is not saved."]).problems
        ('model.bias is not saved.',)
    """

    def __init__(self, path: object, problems: Iterable[str]) -> None:
        self.problems = tuple(map(abridged, problems))
        super().__init__(path, bulleted("does not fit this run, and nothing of it has been loaded:", self.problems))


class CheckpointSaveError(OSError):
    """A checkpoint could not be written. Others are unchanged; at a URL, one of the same name may have been deleted.

    Args:
        path: The checkpoint.
        reason: The cause, as the rest of the sentence.
        outcome: What is wrong.

    Example:
        >>> str(CheckpointSaveError("runs/ep1-ba5", "the disk is full."))
        'The checkpoint runs/ep1-ba5 was not saved: the disk is full.'
    """

    def __init__(self, path: object, reason: str, *, outcome: str = NOT_SAVED) -> None:
        self.path, self.reason, self.outcome = str(path), abridged(reason), outcome
        super().__init__(printable(without_secret_urls(f"The checkpoint {self.path} {outcome}: {self.reason}")))


class LaterCheckpointError(CheckpointSaveError):
    """A run that does not continue another one would save to its folder, which has the checkpoint ``name`` already.

    Example:
        >>> str(LaterCheckpointError("runs", "ep3-ba9", "first", batch=0)).partition(".")[0]
        "Nothing was trained: runs has ep3-ba9 of run 'first', and this run begins at batch 0"
    """

    def __init__(self, folder: object, name: str, run_name: str, batch: int) -> None:
        super().__init__(folder, f"it has {name} of run {run_name!r}, later than batch {batch}.")
        text = (
            f"Nothing {'more ' if batch else ''}was trained: {folder} has {name} of run {run_name!r}, and this run "
            f"begins at batch {batch}. To continue that run, set its run_name and autoresume=True, or "
            f"load_path='{folder}/latest'. To train again, set save_overwrite=True (overwrite=True of a "
            "CheckpointSaver), or a folder for each run: save_folder='runs/{run_name}'."
        )
        self.args = (without_secret_urls(text),)


class FolderInUseError(RuntimeError):
    """Another living process, ``holder``, saves to the same ``folder``.

    Example:
        >>> FolderInUseError("runs/blur", "process 17 on host").folder
        'runs/blur'
    """

    def __init__(self, folder: object, holder: str) -> None:
        self.folder, self.holder = str(folder), holder
        super().__init__(
            f"Another run saves its checkpoints to {self.folder}: {holder}. "
            "Choose another save_folder or run_name, or end that run first."
        )
