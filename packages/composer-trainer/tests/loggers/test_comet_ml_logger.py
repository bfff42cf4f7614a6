"""Experiments of Comet without a network, read back from their archives."""

import json
import zipfile

import pytest

PROGRAM = """
import logging
import torch

logging.getLogger("comet_ml").setLevel(logging.ERROR)
quiet = {"log_git_metadata": False, "log_env_details": False, "display_summary_level": 0, "auto_output_logging": False}
offline = {"online": False, "offline_directory": "comet", **quiet}
first = CometMLLogger(workspace="w", project_name="p", exp_kwargs=offline)
loaded_late = "comet_ml" not in sys.modules
trainer, memory = make_trainer(first)
trainer.fit()
trainer.logger.log_table(["id", "x"], [[1, 0.5]], name="best")
trainer.logger.log_images(torch.rand(2, 3, 8, 8), name="pair")
trainer.close()

later = CometMLLogger(workspace="w", project_name="p", exp_kwargs=offline, every="0ba")
later.load_state_dict(first.state_dict())
again, _ = make_trainer(later, epochs=1)
again.fit()
try:
    raise OSError("failed")
except OSError:
    again.close()

other = CometMLLogger(exp_kwargs=offline, name="its-own")
other.load_state_dict(first.state_dict())
make_trainer(other, epochs=1)[0].close()

report_facts(
    losses=series(memory, "loss/train/total"),
    key=first.state_dict()["experiment_key"],
    later=later.state_dict()["experiment_key"],
    other=other.state_dict()["experiment_key"],
    loaded_late=loaded_late,
)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("comet")


@pytest.fixture(scope="module")
def facts(run_in_subprocess, folder):
    """Return the facts from a program with two trainings."""
    return run_in_subprocess(PROGRAM, folder, COMET_LOGGING_CONSOLE="ERROR")


@pytest.fixture(scope="module")
def archives(facts, folder):
    """Return the archives of both trainings: name, messages and summary."""
    result = []
    for path in sorted((folder / "comet").glob("*.zip"), key=lambda path: path.stat().st_mtime):
        with zipfile.ZipFile(path) as archive:
            messages = [json.loads(line) for line in archive.read("messages.json").splitlines()]
            about = json.loads(archive.read("experiment.json"))
            result.append((path.name, [message["payload"] for message in messages], about))
    return result


def metrics(payloads, name):
    return [
        [payload["metric"]["step"], payload["metric"]["metricValue"]]
        for payload in payloads
        if payload.get("metric", {}).get("metricName") == name
    ]


def test_every_loss_with_its_step(facts, archives):
    """Comet has the same values as InMemoryLogger."""
    _, payloads, _ = archives[0]

    assert metrics(payloads, "loss/train/total") == facts["losses"]
    assert [step for step, _ in metrics(payloads, "metrics/eval/MulticlassAccuracy")] == [5, 10]


def test_settings_and_name(archives):
    """Hyperparameters are parameters, and the experiment has the run's name."""
    texts = json.dumps(archives[0][1])

    assert '"max_duration"' in texts
    assert '"the-run"' in texts


def test_images_and_tables(archives):
    """Images and tables are assets."""
    _, payloads, _ = archives[0]
    files = [payload["additional_params"] for payload in payloads if "additional_params" in payload]
    names = {file.get("fileName") or file.get("figName") for file in files}

    assert {"pair_0", "pair_1", "best_10.csv"} <= names


def test_resume(facts, archives):
    """With the state of an earlier run, a later one uses the same experiment."""
    assert facts["key"] == facts["later"]
    assert [name.removesuffix(".zip").partition("-")[0] for name, *_ in archives] == [
        facts["key"],
        facts["key"],
        facts["other"],
    ]


def test_a_checkpoint_does_not_choose_the_experiment(facts):
    """The key of an experiment of another name, workspace or project is not used."""
    assert facts["other"] != facts["key"]
