"""Report which process ended when a connection is lost, and why this process failed.

The processes exchange their locations when they are connected (:func:`exchange_locations`). When a collective fails in
one of them, :func:`explain_loss` adds a note to the error: which process has ended, and where its error and output are.
:func:`report_failure` writes the error that ends a program for torchrun, unless the end of another process caused it.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import attrs
import torch

from composer.distributed.collectives import all_gather_object
from composer.distributed.environment import get_global_rank, namespace_here

_OF_GLOO = ("gloo", "application timeout caused pair closure")
_CLOSED = ("connection closed", "connection reset", "connection was likely", "broken pipe", "remote process exited")
_TIMED_OUT = ("timed out", "timeout")
_ANSWER = "_composer_process_has_ended"
"""The attribute of an explained error with the answer of :func:`explain_loss`."""
_ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
_WAITING_SECONDS = 3.0
_peers: list[Peer] = []


@attrs.frozen
class Peer:
    """The location of a process, and of its error and output.

    Args:
        rank: Its rank.
        host: The name of its machine.
        pid: Its process id on that machine.
        pids: Its machine and namespace of process ids, which containers may have of their own; None if unknown.
        error_file: The file in which torchrun expects its error.
        output: The file of its error output.
    """

    rank: int
    host: str
    pid: int
    pids: tuple[str, str, str] | None
    error_file: str | None
    output: str | None

    @classmethod
    def here(cls) -> Peer:
        """Return the description of this process."""
        error_file = os.environ.get(_ERROR_FILE)
        return cls(get_global_rank(), socket.gethostname(), os.getpid(), namespace_here("pid"), error_file, _output())

    def has_ended(self) -> bool:
        """Return whether a process of this machine has ended."""
        try:
            state = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return True
        return state in {"Z", "X"}  # ended, but not waited for by its parent

    def __str__(self) -> str:
        return f"process {self.rank} (pid {self.pid} on host {self.host!r})"

    def wrote_error(self) -> bool:
        """Return whether it wrote its error to the file of torchrun."""
        return self.error_file is not None and Path(self.error_file).exists()

    def where_to_look(self) -> str:
        """Return where to find the reason why it ended."""
        if self.wrote_error():
            error = f"its error is in {self.error_file}"
        elif self.error_file is not None:
            error = "it wrote no error, so it may have been killed, for instance for lack of memory"
        else:
            error = "look for its error in its output"
        return error if self.output is None else f"{error}, its output is in {self.output}"


def exchange_locations() -> None:
    """Exchange the locations of all processes; all must call it."""
    _peers[:] = all_gather_object(Peer.here())


def explain_loss(error: BaseException) -> bool:
    """Add to an error of a lost connection which processes have ended; return whether one of this machine has.

    If a connection was closed, waits up to three seconds for its process to end, which happens later. After a timeout
    there is nothing to wait for. Other errors are unchanged.
    """
    # An error may pass several callers of this function: the first one adds the note.
    answer: bool | None = vars(error).get(_ANSWER)
    if answer is not None:
        return answer
    waiting_seconds = _waiting_seconds(error)
    if waiting_seconds is None or not _peers:
        return False
    until = time.monotonic() + waiting_seconds
    while not (lost := lost_processes()) and time.monotonic() < until:
        time.sleep(0.05)
    error.add_note(f"Lost connection: {lost or _still_running()}.")
    vars(error)[_ANSWER] = bool(lost)
    return bool(lost)


def _waiting_seconds(error: BaseException) -> float | None:
    """Return how long the end of a process may follow an error of a connection; None for other errors."""
    # gloo raises RuntimeErrors of no class of their own, which only their messages distinguish from other errors.
    message = str(error).lower()
    is_of_gloo = isinstance(error, RuntimeError) and any(words in message for words in _OF_GLOO)
    if not is_of_gloo and not isinstance(error, torch.distributed.DistError):
        return None
    if any(words in message for words in _CLOSED):
        return _WAITING_SECONDS
    return 0.0 if any(words in message for words in _TIMED_OUT) else None


def _still_running() -> str:
    """Return what is known of the processes, if none of this machine has ended."""
    visible = _visible()
    elsewhere = [str(peer) for peer in _peers if peer not in visible]
    if elsewhere:
        return f"no other process of this machine has ended. Check {', '.join(elsewhere)}"
    return f"all {len(_peers)} processes still run, so that one may be stuck or need longer than dist_timeout"


def lost_processes() -> str:
    """Return which processes of this machine have ended, and where to find the reason; an empty string if all run."""
    ended = [peer for peer in _visible() if peer.has_ended()]
    # Processes without an error may have ended because they lost the one with an error.
    causes = [peer for peer in ended if peer.wrote_error()] or ended
    return "; ".join(f"{peer} has ended: {peer.where_to_look()}" for peer in causes)


def _visible() -> list[Peer]:
    """Return the processes of this machine, whose ends are visible; none before :func:`exchange_locations`."""
    own = next((peer for peer in _peers if peer.rank == get_global_rank()), None)
    if own is None or own.pids is None:
        return []
    return [peer for peer in _peers if peer.pids == own.pids]


@contextlib.contextmanager
def explaining_loss() -> Iterator[None]:
    """Add to an error of a lost connection in a block which processes have ended; see :func:`explain_loss`."""
    try:
        yield
    except BaseException as error:
        explain_loss(error)
        raise


def report_failure(error: BaseException) -> None:
    """Write the error that ends this program to the file of torchrun, unless the end of another process caused it."""
    num_printed = len(getattr(error, "__notes__", ()))  # with the traceback
    has_lost_another = explain_loss(error)
    for note in getattr(error, "__notes__", ())[num_printed:]:
        print(note, file=sys.stderr)  # noqa: T201
    path = os.environ.get(_ERROR_FILE)
    # torchrun reports the earliest error as the cause: this one must not hide that of the other process.
    if has_lost_another or not path or Path(path).exists() or not isinstance(error, Exception):
        return
    from torch.distributed.elastic.multiprocessing.errors import ErrorHandler  # noqa: PLC0415  (only here)

    try:
        raise error  # noqa: TRY301  (the handler writes the traceback of the error that is being handled)
    except Exception:  # noqa: BLE001
        with contextlib.suppress(OSError):
            ErrorHandler().record_exception(error)


def _output() -> str | None:
    try:
        path = Path("/proc/self/fd/2").readlink()
    except OSError:  # not Linux
        return None
    return str(path) if path.is_file() else None
