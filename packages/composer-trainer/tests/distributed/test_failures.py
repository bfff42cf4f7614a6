"""Errors of lost connections describe the processes of this and other machines."""

import socket
import subprocess
import sys
import time

import attrs
import pytest

from composer.distributed import failures

CLOSED = "[gloo/transport/tcp/pair.cc:561] Connection closed by peer [127.0.0.1]:6541."


@pytest.fixture
def this_machine(monkeypatch, request):
    """This process is rank 0 of two; it waits 0.1 seconds for another to end, or as long as a test's parameter."""
    monkeypatch.setattr(failures, "_WAITING_SECONDS", getattr(request, "param", 0.1))
    own = failures.Peer.here()
    monkeypatch.setattr(failures, "_peers", [own, attrs.evolve(own, rank=1)])
    return own


def notes(error):
    return getattr(error, "__notes__", [])


class TestExplainLoss:
    @pytest.mark.skipif(sys.platform != "linux", reason="namespaces are read from /proc")
    def test_other_machines_are_mentioned(self, this_machine):
        """Processes on other machines cannot be checked, also if the machine has the same name."""
        name, _, pids = this_machine.pids
        failures._peers[1] = attrs.evolve(this_machine, rank=1, pid=2**22 + 1, pids=(name, "another start", pids))
        error = RuntimeError(CLOSED)

        has_lost = failures.explain_loss(error)

        assert not has_lost
        assert notes(error) == [
            (
                "Lost connection: no other process of this machine has ended. "
                f"Check process 1 (pid {2**22 + 1} on host {this_machine.host!r})."
            )
        ]

    @pytest.mark.skipif(sys.platform != "linux", reason="which processes run is read from /proc")
    def test_process_with_an_error_is_the_cause(self, this_machine, tmp_path):
        """Of two lost processes, the one with an error file is named, once."""
        ended = subprocess.Popen([sys.executable, "-c", ""])
        ended.wait()
        error_file = tmp_path / "error.json"
        error_file.touch()
        removed = attrs.evolve(this_machine, pid=ended.pid, output="/logs/1.txt")
        failures._peers[1:] = [attrs.evolve(removed, rank=1), attrs.evolve(removed, rank=2, error_file=str(error_file))]
        error = RuntimeError(CLOSED)

        answers = [failures.explain_loss(error) for _ in range(2)]

        assert answers == [True, True]
        [note] = notes(error)
        assert note.startswith(
            f"Lost connection: process 2 (pid {ended.pid} on host {socket.gethostname()!r}) has ended: "
        )
        assert note.endswith(f": its error is in {error_file}, its output is in /logs/1.txt.")

    @pytest.mark.parametrize(
        "error", [ValueError(CLOSED), RuntimeError("gloo: op.preamble.length <= op.nbytes. 8 vs 4"), RuntimeError("no")]
    )
    def test_other_errors_are_unchanged(self, this_machine, error):
        """Only lost connections are explained."""
        assert not failures.explain_loss(error)
        assert notes(error) == []

    @pytest.mark.parametrize(
        "text",
        [
            "[gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 15000ms for recv operation",
            "Application timeout caused pair closure",
        ],
    )
    @pytest.mark.parametrize("this_machine", [60.0], indirect=True)
    def test_timeout_is_explained_at_once(self, this_machine, text):
        """After a timeout all processes may still run, and none is about to end."""
        error, began = RuntimeError(text), time.monotonic()

        has_lost = failures.explain_loss(error)

        assert not has_lost
        assert time.monotonic() - began < 30.0
        assert notes(error) == [
            "Lost connection: all 2 processes still run, so that one may be stuck or need longer than dist_timeout."
        ]

    def test_single_process_has_no_note(self, this_machine):
        """Without other processes none can be lost."""
        failures._peers.clear()
        error = RuntimeError(CLOSED)

        assert not failures.explain_loss(error)
        assert notes(error) == []


class TestReportFailure:
    def test_existing_file_is_preserved(self, monkeypatch, tmp_path):
        """A file that torchrun's decorator has written is not overwritten."""
        path = tmp_path / "error.json"
        path.write_text("{}")
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))

        failures.report_failure(ValueError("wrong"))

        assert path.read_text() == "{}"

    def test_missing_folder_is_ignored(self, monkeypatch, tmp_path):
        """The original error is raised, also if the report fails."""
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "gone" / "error.json"))

        failures.report_failure(ValueError("wrong"))

        assert list(tmp_path.iterdir()) == []
