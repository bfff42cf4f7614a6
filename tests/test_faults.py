"""A training that is killed at random moments, again and again, always comes to the bits of one that was not.

``FAULTS=all`` in the environment kills some hundreds of times, else a few dozen.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("faults_program.py")
MANY = os.environ.get("FAULTS") == "all"


def killed(*options):
    """Return the report of the program that trains and kills."""
    command = [sys.executable, str(PROGRAM), *map(str, options)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=3000)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.skipif(sys.platform == "win32", reason="there is no SIGKILL and no fork")
class TestKills:
    def test_goes_on_to_the_same_bits(self, record_property):
        """Killed in steps, snapshots, writes and renames, a run goes on, and no folder only looks like a checkpoint."""
        report = killed("--runs", 40 if MANY else 4, "--kills", 8)

        record_property("report", json.dumps(report))
        assert report["failed"] == []
        assert report["damaged"] == 0
        assert report["kills"] >= (200 if MANY else 12)

    def test_goes_on_from_what_was_uploaded(self, record_property):
        """Killed in uploads, a run goes on from the newest checkpoint of which everything has arrived."""
        report = killed("--runs", 10 if MANY else 2, "--kills", 6, "--remote", "--seed", 1)

        record_property("report", json.dumps(report))
        assert report["failed"] == []
        assert report["kills"] >= (30 if MANY else 4)
