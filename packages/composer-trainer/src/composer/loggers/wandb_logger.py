"""Log metrics, images, tables, hyperparameters and files to Weights & Biases."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import attrs
from torch import Tensor

from composer.core import State
from composer.core.checks import is_flag, to_options, to_strings
from composer.core.saving.components import transient
from composer.loggers.images import to_masks
from composer.loggers.tracker_logger import Record, TrackerLogger


def _to_tags(given: Sequence[str] | None) -> list[str] | None:
    return None if given is None else to_strings("tags", given)


def _to_init_kwargs(given: Mapping[str, Any] | None) -> dict[str, Any]:
    return to_options("init_kwargs", given)


@attrs.define(eq=False)
class WandBLogger(TrackerLogger):
    """Log to Weights & Biases.

    Offline: ``init_kwargs={"mode": "offline"}``, or set ``WANDB_MODE=offline``; ``wandb sync`` uploads the run later. A
    resumed run continues the first run if name, project, group and entity are the same; a run started by
    ``wandb.init``, an ``id`` in ``init_kwargs`` and ``WANDB_RUN_ID`` take precedence over the checkpoint. Numbers of an
    earlier step than the last written one, which ``every`` can cause, appear at the last step.

    Args:
        project: The project.
        group: The group of the run.
        name: The run's name at Weights & Biases; the run's own name if None.
        entity: The user or team.
        tags: Tags of the run.
        log_artifacts: Whether to upload the run's files, such as checkpoints, as artifacts.
        rank_zero_only: Whether only the process of rank 0 logs, or all processes, each to its own run.
        init_kwargs: Further arguments of ``wandb.init``.
        every: How often metrics are logged: a time, a string or a number of epochs; always if None.
        flush_interval: Batches between two flushes; values are also written every ten seconds, at the end of each epoch
            and after evaluations.

    Raises:
        ModuleNotFoundError: wandb is not installed.
        ValueError: ``flush_interval`` is less than 1, or ``every`` is not a length of time.

    Attributes:
        run: The wandb run; None before it starts.

    Example:
        >>> WandBLogger("digits", init_kwargs={"mode": "offline"}).can_upload_files()
        False
    """

    shows_masks: ClassVar = True
    product: ClassVar = ("wandb", "wandb")

    project: str | None = None
    group: str | None = None
    name: str | None = None
    entity: str | None = None
    tags: list[str] | None = attrs.field(default=None, converter=_to_tags)
    log_artifacts: bool = attrs.field(default=False, validator=is_flag)
    rank_zero_only: bool = attrs.field(default=True, validator=is_flag)
    init_kwargs: dict[str, Any] = attrs.field(default=None, converter=_to_init_kwargs, repr=False)

    run: Any = transient(default=None)
    _owns_run: bool = transient(default=True)
    _last_step: int = transient(default=0)

    def open_run(self, state: State) -> None:
        """Start or continue a run."""
        wandb = self.module
        self._owns_run = wandb.run is None
        if not self._owns_run:
            self.run = wandb.run
        else:
            own = {
                "project": self.project,
                "group": self.group or (None if self.rank_zero_only else state.run_name),
                "name": self.name_of_run(state, self.name),
                "entity": self.entity,
            }
            settings: dict[str, Any] = {**own, "tags": self.tags}
            if "WANDB_RUN_ID" not in os.environ:
                settings["id"] = self.choose_run_id(*own.values())
                settings["resume"] = "allow" if settings["id"] == self._saved_id else None
            self.run = wandb.init(**settings | self.init_kwargs)
        self.run_id, self._last_step = self.run.id, 0

    def write_metrics(self, records: Sequence[Record]) -> None:
        """Write numbers."""
        for record in records:
            self._log(dict(record.metrics), record.step)

    def write_hyperparameters(self, hyperparameters: Mapping[str, Any]) -> None:
        """Write hyperparameters to the run's configuration."""
        self.run.config.update(hyperparameters, allow_val_change=True)

    def write_table(self, columns: Sequence[str], rows: Sequence[Sequence[Any]], name: str, step: int) -> None:
        """Write a table."""
        self.flush()  # earlier numbers first, because wandb ignores values of earlier steps
        table = self.module.Table(columns=columns, data=rows, allow_mixed_types=True)
        self._log({name: table}, step)

    def write_images(self, images: Sequence[Tensor], name: str, step: int, details: Mapping[str, Any]) -> None:
        """Write images, with their masks."""
        self.flush()
        masks = self._masks(len(images), details["masks"] or {}, details["mask_class_labels"])
        shown = [self.module.Image(image.numpy(), masks=mask) for image, mask in zip(images, masks, strict=True)]
        if details["use_table"]:
            self._log({name: self.module.Table(columns=["Image"], data=[[image] for image in shown])}, step)
        else:
            self._log({name: shown}, step)

    def can_upload_files(self) -> bool:
        """Return whether files are uploaded as artifacts."""
        return self.log_artifacts

    def write_file(self, remote_file_name: str, file_path: Path, *, overwrite: bool) -> None:
        """Upload a file or a folder as an artifact; an existing artifact gets a new version."""
        kind = "file" if file_path.is_file() else "folder"
        name = re.sub(r"[^\w.-]", "-", remote_file_name)  # W&B accepts letters, digits and these three
        artifact = self.module.Artifact(name=name, type=kind)
        artifact.add_file(str(file_path)) if file_path.is_file() else artifact.add_dir(str(file_path))
        self.run.log_artifact(artifact)

    def close_run(self) -> None:
        """Finish the run, if it was started here."""
        if self._owns_run:
            self.run.finish(exit_code=0 if sys.exception() is None else 1)

    def _log(self, values: dict[str, Any], step: int) -> None:
        # wandb ignores values of a step before its latest one.
        self._last_step = max(step, self._last_step)
        self.run.log(values, step=self._last_step)

    def _masks(
        self, count: int, masks: Mapping[str, Any], labels: Mapping[int, str] | None
    ) -> list[dict[str, dict[str, Any]] | None]:
        if not masks:
            return [None] * count
        named = {} if labels is None else {"class_labels": dict(labels)}
        by_name = {name: to_masks(classes) for name, classes in masks.items()}
        return [
            {name: {"mask_data": classes[place].numpy(), **named} for name, classes in by_name.items()}
            for place in range(count)
        ]
