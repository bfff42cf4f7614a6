"""Log metrics, images and hyperparameters to TensorBoard."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import attrs
import torch
from torch import Tensor

from composer.core import State, TimeUnit
from composer.core.checks import integer, is_flag, to_path
from composer.core.saving.components import transient
from composer.loggers.tracker_logger import Record, TrackerLogger
from composer.loggers.values import flat, markdown_table


def _to_log_dir(given: str | os.PathLike[str] | None) -> str:
    return "tensorboard_logs" if given is None else to_path("log_dir", given)


@attrs.define(eq=False)
class TensorboardLogger(TrackerLogger):
    """Log metrics, images, tables and hyperparameters to files for ``tensorboard --logdir <log_dir>``.

    Each run has a folder with its name in ``log_dir``, independent of the checkpoint. When a run is resumed,
    TensorBoard hides the values logged after the resumed step. Hyperparameters are on the HParams page, tables on the
    page of texts.

    Args:
        log_dir: The folder of the runs; ``tensorboard_logs`` if None.
        flush_interval: Batches between two flushes; values are also written every ten seconds, at the end of each epoch
            and after evaluations.
        rank_zero_only: Whether only the process of rank 0 logs, or all processes, each to its own folder.
        every: How often metrics are logged: a time, a string or a number of epochs; always if None.

    Raises:
        ModuleNotFoundError: TensorBoard is not installed.
        ValueError: ``flush_interval`` is less than 1, or ``every`` is not a length of time.

    Example:
        >>> TensorboardLogger("runs", every="10ba").log_dir
        'runs'
    """

    product: ClassVar = ("tensorboard", "tensorboard")
    saved_as: ClassVar = "folder"

    log_dir: str = attrs.field(default=None, converter=_to_log_dir)
    flush_interval: int = integer(100, 1, meaning="It counts batches.")
    rank_zero_only: bool = attrs.field(default=True, validator=is_flag)

    _writer: Any = transient(default=None)

    def open_run(self, state: State) -> None:
        """Open the run's event file."""
        # Imports TensorBoard.
        from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415

        rank = "" if self.rank_zero_only else f"rank{state.rank}"
        self.run_id = str(Path(self.log_dir, state.run_name, rank).absolute())
        reached = int(state.timestamp.count(TimeUnit.BATCH))
        # Metrics of the epochs and evaluations before the checkpoint have its step, and are not computed again.
        undone = reached + (reached > 0) if self.is_resumed else None
        self._writer = SummaryWriter(self.run_id, purge_step=undone)

    def write_metrics(self, records: Sequence[Record]) -> None:
        """Write numbers as scalars."""
        for record in records:
            for name, number in record.metrics.items():
                self._writer.add_scalar(name, number, record.step, walltime=record.seconds)
        self._writer.flush()

    def write_hyperparameters(self, hyperparameters: Mapping[str, Any]) -> None:
        """Write hyperparameters to the HParams page."""
        from torch.utils.tensorboard.summary import hparams  # noqa: PLC0415

        plain = {
            name: value if isinstance(value, (bool, int, float, str)) else str(value)
            for name, value in flat(hyperparameters).items()
        }
        # SummaryWriter.add_hparams would open another file, in a folder named after the time.
        for summary in hparams(plain, {}):  # type: ignore[no-untyped-call]
            self._writer.file_writer.add_summary(summary)
        self._writer.flush()

    def write_table(self, columns: Sequence[str], rows: Sequence[Sequence[Any]], name: str, step: int) -> None:
        """Write a table as text."""
        self._writer.add_text(name, markdown_table([columns, *rows]), step)

    def write_images(self, images: Sequence[Tensor], name: str, step: int, details: Mapping[str, Any]) -> None:
        """Write images: side by side if they have one size, else each by its number."""
        if len({image.shape for image in images}) == 1:
            self._writer.add_images(name, torch.stack(list(images)), step, dataformats="NHWC")
        else:
            super().write_images(images, name, step, details)

    def write_image(self, image: Tensor, name: str, step: int) -> None:
        """Write an image."""
        self._writer.add_image(name, image, step, dataformats="HWC")

    def close_run(self) -> None:
        """Close the file."""
        self._writer.close()
