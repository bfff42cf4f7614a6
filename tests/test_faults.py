"""A training that is killed repeatedly at random moments produces bit-identical results to an uninterrupted one.

With ``FAULTS=all`` in the environment it is killed hundreds of times, otherwise a few dozen times, and each pipeline of
kornia is tested, otherwise one. Each test takes more than 5 seconds, because every kill is followed by another start of
the training.
"""

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("faults_program.py")
MANY = os.environ.get("FAULTS") == "all"
PIPELINES = ["drawn while applied"] + (["colours", "geometry", "one of", "policy"] if MANY else [])


def report_of(*options):
    """Return the report of the program that trains and kills."""
    command = [sys.executable, str(PROGRAM), *map(str, options)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=3000)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="there is no SIGKILL and no fork")
class TestKills:
    def test_resumes_exactly(self, record_property):
        """A run killed in steps, copies, writes and renames resumes exactly; no incomplete folder is a checkpoint."""
        kills = 200 if MANY else 12
        report = report_of("--runs", 40 if MANY else 4, "--kills", 8, "--at-least", kills)

        record_property("report", json.dumps(report))
        assert report["failed"] == []
        assert report["damaged"] == 0
        assert report["kills"] >= kills

    def test_resumes_from_complete_uploads(self, record_property):
        """A run killed in uploads resumes from the newest checkpoint that was uploaded completely."""
        kills = 30 if MANY else 4
        options = ["--runs", 10 if MANY else 2, "--kills", 6, "--at-least", kills, "--remote", "--seed", 1]
        report = report_of(*options)

        record_property("report", json.dumps(report))
        assert report["failed"] == []
        assert report["kills"] >= kills

    def test_sharded_model_resumes_exactly(self, record_property):
        """With one of two processes killed at any moment, the last or the new checkpoint is complete, and resumes."""
        report = report_of("--sharded", "--kills", 100 if MANY else 5)

        record_property("report", json.dumps(report))
        assert report["failed"] == []
        assert report["damaged"] == 0
        assert report["kills"] >= (100 if MANY else 5)
        assert all(newest in (latest, latest + 1) for _, newest, latest in report["after"])
        in_order = itertools.pairwise(report["after"])
        assert all(later >= newest for (run, newest, _), (next_run, later, _) in in_order if run == next_run)
        assert max(newest for _, newest, _ in report["after"]) > 0

    def test_a_signal_at_any_event_resumes_exactly(self, record_property):
        """After a SIGTERM at an event, weights, events, metrics and logs of both parts equal those without a stop.

        The evaluation that it interrupts, or that was due when it stopped, is the first thing after the resume.
        """
        report = report_of("--stops", 1 if MANY else 13)

        record_property("report", json.dumps(report))
        assert report["failed"] == []
        assert report["codes"] == [0, 0]
        assert report["stops"] >= report["events"] // 13 > 10

    @pytest.mark.parametrize("pipeline", PIPELINES)
    def test_augmentations_resume_exactly(self, pipeline):
        """A run with Augment, killed in its second epoch, resumes exactly with 0 and with 2 workers of the loader."""
        report = report_of("--pipeline", pipeline)

        assert report["failed"] == []
        assert set(report["resumed from"]) <= {"ep0-ba2", "ep1-ba4"}  # the newest that was complete
