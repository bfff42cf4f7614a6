"""What is shown of a training that a signal has stopped; ``tests/trainer/test_stopping.py`` has real processes."""

import sys
from types import SimpleNamespace

import pytest

from composer.core import State
from composer.loggers.interruption import report_interruption, without_traceback


def test_only_its_exception_is_hidden(monkeypatch):
    """The exception hook writes nothing for it, also after a second one, and calls the former hook for others."""
    shown = []
    monkeypatch.setattr(sys, "excepthook", lambda kind, error, traceback: shown.append(error))

    interrupts = []
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt) as raised, without_traceback():
            raise KeyboardInterrupt
        interrupts.append(raised.value)
    others = [KeyboardInterrupt(), ValueError("other")]
    for error in [*interrupts, *others]:
        sys.excepthook(type(error), error, None)

    assert shown == others
    assert interrupts[1]._render_traceback_() == ["KeyboardInterrupt"]


@pytest.mark.parametrize(
    ("is_interactive", "reason", "saver", "how"),
    [
        (True, "stopped by SIGINT", None, "fit() of this Trainer continues it."),
        (True, "stopped by SIGINT", False, "fit() of this Trainer continues it; the checkpoint is b."),
        (True, "stopped by SIGTERM", True, "The checkpoint is b; start the same program again to continue."),
        (False, "stopped by SIGINT", False, "to continue, start the program with load_path='b'."),
        (False, "stopped by SIGINT", None, "There is no checkpoint to continue from"),
    ],
)
def test_how_to_continue(monkeypatch, caplog, is_interactive, reason, saver, how):
    """Where input is awaited the same trainer continues after Ctrl-C; else the program does, from a checkpoint."""
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)
    if not is_interactive:
        monkeypatch.delattr(sys, "ps1")
    savers = [] if saver is None else [SimpleNamespace(saved_checkpoints=["a", "b"], continues=saver)]

    report_interruption(State(model=None), reason, savers)

    assert caplog.messages[0].startswith(f"The training was {reason} after batch 0. ")
    assert how in caplog.messages[0]
