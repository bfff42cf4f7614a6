"""Save a model of Transformers in its own layout during training, and upload it."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Protocol, runtime_checkable

from composer.callbacks._exporting import is_interrupted
from composer.core import Callback, Event, Interval, Logger, State, Time, TimeUnit, evaluation_weights
from composer.core.background import Background
from composer.core.checks import to_path
from composer.core.files import check_template, fill_in_run
from composer.core.interval import at_checkpoints
from composer.distributed.collectives import failing_in_all_processes
from composer.loggers.products import require_product


@runtime_checkable
class _SupportsPretrained(Protocol):
    def save_pretrained(self, save_directory: str) -> None: ...

    def get_metadata(self) -> dict[str, Any]: ...


@runtime_checkable
class _SupportsGathering(Protocol):
    def pretrained_writer(self) -> Callable[[str], None]: ...


def _writer_of(model: Any) -> Callable[[str], None]:
    """Return what writes a model, after the collectives of a sharded one; a model's own ``save_pretrained`` is used."""
    home = next((one for one in type(model).__mro__ if "save_pretrained" in vars(one)), object)
    if isinstance(model, _SupportsGathering) and "pretrained_writer" in vars(home):
        return model.pretrained_writer()
    writer: Callable[[str], None] = model.save_pretrained
    return writer


class SavePretrained(Callback):
    """Save weights, configuration and tokenizer every ``interval`` and at the end of each fit, as Transformers does.

    Nothing is saved at the end of a fit that Ctrl-C or SIGTERM has stopped: the training is not complete.

    ``from_pretrained`` and servers such as vLLM read the folder. The weights are those that the model is evaluated
    with, such as the averages of EMA. Of a model with adapters, these alone are saved. In several processes the first
    one writes, also for a model that is sharded: it holds the complete weights for the time of the save. The method
    ``save_pretrained`` of another model than :class:`~composer.models.HuggingFaceModel` must not communicate.

    Training does not resume from this folder; ``save_folder`` of the Trainer saves checkpoints for that.

    Args:
        folder: A local folder. ``{run_name}``, ``{epoch}``, ``{batch}`` and so on are filled in; files of an earlier
            save in the same folder are replaced.
        interval: How often: a time, a string (``"500ba"``), or a number of epochs; 0 is at the end only.
        push_to_hub: The repository (``"user/model"``) on the Hugging Face Hub to upload each save to, in the background
            and with the token of ``hf auth login`` or ``HF_TOKEN``. A new repository is private. An upload that fails
            gives a warning; the folder is complete then.

    Raises:
        ModuleNotFoundError: ``huggingface_hub`` is not installed, and ``push_to_hub`` is given.
        TypeError: At ``FIT_START``: the model has no ``save_pretrained``, as
            :class:`~composer.models.HuggingFaceModel` has; or an argument is of another type.
        ValueError: ``interval`` is not a length of time, ``folder`` is a URL or has an unknown field in braces; or at
            ``FIT_START``: algorithms have changed layers in a way that Transformers cannot represent.
        Exception: During training: the first process cannot create the repository or write; all processes raise it.

    Example:
        >>> SavePretrained("runs/{run_name}/pretrained", "1ep").interval
        Time(1, TimeUnit.EPOCH)
    """

    saves_model = True
    """Whether ``fast_dev_run`` leaves the callback out."""

    def __init__(
        self,
        folder: str | os.PathLike[str] = "{run_name}/pretrained",
        interval: Time | str | int = "1ep",
        push_to_hub: str | None = None,
    ) -> None:
        self.folder = check_template(to_path("folder", folder), "folder")
        if "://" in self.folder:
            raise ValueError(f"folder must be local, got {self.folder!r}. For the Hugging Face Hub pass push_to_hub.")
        self.interval = Interval.named("interval", interval).every
        if push_to_hub is not None:
            if not isinstance(push_to_hub, str):
                raise TypeError(f"push_to_hub must be the name of a repository, 'user/model', got {push_to_hub!r}.")
            require_product("huggingface_hub", "hub")
        self.push_to_hub = push_to_hub
        self._saved_at = -1
        self._uploading = Background()

    def intervals(self) -> Mapping[Event | str, Time | str | int]:
        """Save every ``interval``, after a batch, an epoch or an iteration, depending on its unit."""
        return at_checkpoints(self.interval)

    def fit_start(self, state: State, logger: Logger) -> None:
        """Raise an error if the model cannot be saved so; create the repository."""
        self._saved_at = -1
        if not isinstance(state.model, _SupportsPretrained):
            raise TypeError(
                "SavePretrained needs a model with the methods save_pretrained and get_metadata, and "
                f"{type(state.model).__name__} lacks one of them. Wrap a model of Transformers in HuggingFaceModel."
            )
        if changed := state.model.get_metadata().get("huggingface", {}).get("model", {}).get("changed"):
            raise ValueError(
                f"SavePretrained cannot save a model with {', '.join(changed)}, which a model of Transformers cannot "
                "represent. Leave out the callback, or the algorithm that has changed the layers."
            )
        if self.push_to_hub is None:
            return
        with failing_in_all_processes(f"Creating the repository {self.push_to_hub}"):
            if state.rank == 0:
                from huggingface_hub import HfApi  # noqa: PLC0415  (an extra)

                HfApi().create_repo(self.push_to_hub, exist_ok=True, private=True)

    def batch_checkpoint(self, state: State, logger: Logger) -> None:
        """Save, at the event that :meth:`intervals` selects."""
        self._save(state)

    epoch_checkpoint = iteration_checkpoint = batch_checkpoint

    def fit_end(self, state: State, logger: Logger) -> None:
        """Save, unless this batch is saved already or a signal has stopped the training; wait for the upload."""
        if self._saved_at != state.timestamp.count(TimeUnit.BATCH) and not is_interrupted(state, "SavePretrained"):
            self._save(state)
        self._wait()

    def close(self, state: State, logger: Logger) -> None:
        """Wait for the upload."""
        self._wait()

    def _save(self, state: State) -> None:
        self._wait()  # its folder may be this one
        self._saved_at = int(state.timestamp.count(TimeUnit.BATCH))
        folder = fill_in_run(self.folder, state, "folder")
        model = state.model
        with evaluation_weights(state):
            # The collectives of a sharded model come before what only the first process does.
            write = _writer_of(model)
            with failing_in_all_processes(f"Saving the model to {folder}"):
                write(folder)
                self._upload(state, folder)

    def _upload(self, state: State, folder: str) -> None:
        if self.push_to_hub is not None and state.rank == 0:
            from huggingface_hub import HfApi  # noqa: PLC0415  (an extra)

            message = f"{state.run_name}, batch {self._saved_at}"
            upload = partial(HfApi().upload_folder, repo_id=self.push_to_hub, folder_path=folder)
            self._uploading.start(partial(upload, commit_message=message))

    def _wait(self) -> None:
        try:
            self._uploading.wait()
        except Exception as error:  # noqa: BLE001  (of the network; it must not end a training)
            warnings.warn(
                f"The upload to {self.push_to_hub} has failed ({type(error).__name__}: {error}). The folder is "
                "complete: upload it with `hf upload`.",
                stacklevel=2,
            )
