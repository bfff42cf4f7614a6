"""Runs of Aim on this machine, read back from its store."""

import pytest

pytest.importorskip("aim", reason="it is an optional product; nox -s trackers installs it")

PROGRAM = """
import aim
from aim.storage.context import Context


def numbers(run, name):
    steps, (values, *_) = run.get_metric(name, Context({})).data.numpy()
    return [[int(step), float(value)] for step, value in zip(steps, values)]


options = {"experiment": "digits", "system_tracking_interval": None}
first = AimLogger("store", **options)
trainer, memory = make_trainer(first)
trainer.fit()
trainer.logger.log_images(torch.rand(2, 3, 8, 8), name="pair")
trainer.close()

later = AimLogger("store", **options)
later.load_state_dict(first.state_dict())
again, _ = make_trainer(later, epochs=1)
again.logger.log_metrics({"later": 1.5})
again.close()

other = AimLogger("store", name="its-own", **options)
other.load_state_dict(first.state_dict())
last, _ = make_trainer(other, epochs=1)
last.close()

run = aim.Run(first.run_id, repo="store", capture_terminal_logs=False, **options)
_, pair = next(run.get_image_sequence("pair", Context({})).data.items())
report_facts(
    losses=series(memory, "loss/train/total"),
    stored=numbers(run, "loss/train/total"),
    later=numbers(run, "later"),
    accuracy=numbers(run, "metrics/eval/MulticlassAccuracy"),
    shapes=[[image.width, image.height] for image in pair[0]],
    names=[run.name, run.experiment],
    hparams={name: run["hparams"][name] for name in ("rank_zero_seed", "max_duration")},
    ids=[first.state_dict(), later.state_dict(), other.state_dict()],
)
"""


@pytest.fixture(scope="module")
def facts(run_in_subprocess, tmp_path_factory):
    """Return the facts from a program with three runs."""
    return run_in_subprocess(PROGRAM, tmp_path_factory.mktemp("aim"))


class TestRun:
    def test_numbers(self, facts):
        """Aim has each loss with its batch, and the metrics of the evaluations."""
        assert len(facts["losses"]) == 10
        assert facts["stored"] == facts["losses"]
        assert [step for step, _ in facts["accuracy"]] == [5, 10]

    def test_settings_and_images(self, facts):
        """The hyperparameters, last those of the resumed run, are parameters; two images are one item of a sequence."""
        assert facts["hparams"] == {"rank_zero_seed": 3, "max_duration": "1ep"}
        assert facts["shapes"] == [[8, 8], [8, 8]]
        assert facts["names"] == ["the-run", "digits"]

    def test_a_resumed_run_continues(self, facts):
        """A run with the same name continues the first; a checkpoint does not select the run of another name."""
        first, later, other = facts["ids"]
        assert first == later
        assert facts["later"] == [[0, 1.5]]
        assert first.keys() == {"run_hash"}
        assert other != first
