"""What a terminal and a notebook show of a training that Ctrl-C or SIGTERM has stopped: sentences, and no traceback."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Iterable, Iterator
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any

from composer.core.saving.secrets import without_secret_urls

if TYPE_CHECKING:
    from composer.core import State

_log = logging.getLogger(__name__)


def report_interruption(state: State, reason: str, savers: Iterable[Any]) -> None:
    """Log where an interrupted training can be continued: in this process, if Python or a notebook waits for input.

    Args:
        state: The run, at its end.
        reason: What has stopped it, ``"stopped by SIGINT"``.
        savers: What saves its checkpoints.
    """
    if state.rank:
        return
    path = next((path for saver in savers for path in reversed(saver.saved_checkpoints)), None)
    if hasattr(sys, "ps1") and reason.endswith("SIGINT"):  # IPython sets the prompt, too
        how = "fit() of this Trainer continues it" + ("" if path is None else f"; the checkpoint is {path}")
    elif path is None:
        how = "There is no checkpoint to continue from: save_folder, run_name and autoresume=True save one"
    elif any(saver.continues for saver in savers):
        how = f"The checkpoint is {path}; start the same program again to continue"
    else:
        how = f"The checkpoint is {path}; to continue, start the program with load_path={path!r}"
    batch = int(state.timestamp.batch)
    _log.warning("The training was %s after batch %d. %s.", reason, batch, without_secret_urls(how))


@contextlib.contextmanager
def without_traceback() -> Iterator[None]:
    """Show a ``KeyboardInterrupt`` of the block without a traceback, as sentences were logged before."""
    try:
        yield
    except KeyboardInterrupt as error:
        error._render_traceback_ = ["KeyboardInterrupt"].copy  # type: ignore[attr-defined]  # IPython calls it
        if getattr(sys.excepthook, "func", None) is not _hook:
            sys.excepthook = partial(_hook, sys.excepthook)
        raise


def _hook(before: Any, kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    if not hasattr(error, "_render_traceback_"):
        before(kind, error, traceback)
