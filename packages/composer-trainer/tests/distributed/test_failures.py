"""What an error of a lost connection says about the processes of this and other machines."""

import socket
import subprocess
import sys

import attrs
import pytest

from composer.distributed import failures

CLOSED = "[gloo/transport/tcp/pair.cc:561] Connection closed by peer [127.0.0.1]:6541."


@pytest.fixture
def here(monkeypatch):
    """This process is rank 0 of two, and does not wait for another to end."""
    monkeypatch.setattr(failures, "_WAITING_SECONDS", 0.1)
    own = failures.Peer.here()
    monkeypatch.setattr(failures, "_peers", [own, attrs.evolve(own, rank=1)])
    return own


def notes(error):
    return getattr(error, "__notes__", [])


class TestExplainLoss:
    def test_other_machines_are_named(self, here):
        """What runs there cannot be seen from here."""
        failures._peers[1] = attrs.evolve(here, rank=1, host="other", pid=17)
        error = RuntimeError(CLOSED)

        is_gone = failures.explain_loss(error)

        assert not is_gone
        assert notes(error) == [
            "Lost connection: no other process of this machine is gone. Look at process 1 (pid 17 on host 'other')."
        ]

    @pytest.mark.skipif(sys.platform != "linux", reason="which processes run is read from /proc")
    def test_the_cause_is_the_one_with_an_error(self, here, tmp_path):
        """Of two that are gone, the other may have ended as it lost that one; and it is said once."""
        ended = subprocess.Popen([sys.executable, "-c", ""])
        ended.wait()
        error_file = tmp_path / "error.json"
        error_file.touch()
        gone = attrs.evolve(here, pid=ended.pid, output="/logs/1.txt")
        failures._peers[1:] = [attrs.evolve(gone, rank=1), attrs.evolve(gone, rank=2, error_file=str(error_file))]
        error = RuntimeError(CLOSED)

        answers = [failures.explain_loss(error) for _ in range(2)]

        assert answers == [True, True]
        [note] = notes(error)
        assert note.startswith(
            f"Lost connection: process 2 (pid {ended.pid} on host {socket.gethostname()!r}) is gone: "
        )
        assert note.endswith(f": its error is in {error_file}, its output is in /logs/1.txt.")

    @pytest.mark.parametrize(
        "error", [ValueError(CLOSED), RuntimeError("gloo: op.preamble.length <= op.nbytes. 8 vs 4"), RuntimeError("no")]
    )
    def test_other_errors_stay_as_they_are(self, here, error):
        """Only a connection that is lost is explained."""
        assert not failures.explain_loss(error)
        assert notes(error) == []

    def test_alone_nothing_is_said(self, monkeypatch):
        """Without other processes none can be gone."""
        monkeypatch.setattr(failures, "_peers", [])
        error = RuntimeError(CLOSED)

        assert not failures.explain_loss(error)
        assert notes(error) == []


class TestReportFailure:
    def test_a_file_that_is_there_stays(self, monkeypatch, tmp_path):
        """A program that writes its error itself, by torchrun's decorator, has written it."""
        path = tmp_path / "error.json"
        path.write_text("{}")
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))

        failures.report_failure(ValueError("wrong"))

        assert path.read_text() == "{}"

    def test_a_folder_that_is_gone_is_no_error(self, monkeypatch, tmp_path):
        """The program ends by its own error, whatever becomes of the report."""
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "gone" / "error.json"))

        failures.report_failure(ValueError("wrong"))

        assert list(tmp_path.iterdir()) == []
