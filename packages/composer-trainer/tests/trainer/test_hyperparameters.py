"""What is logged of a run before it begins."""

import json
import subprocess
import sys

import attrs
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from composer import Trainer
from composer.algorithms import LabelSmoothing, MixUp
from composer.callbacks import LRMonitor, SpeedMonitor
from composer.core import Evaluator, Interval, State, Time
from composer.loggers import InMemoryLogger
from composer.models import ComposerClassifier
from composer.optim import LinearWithWarmupScheduler
from composer.trainer.hyperparameters import commit, hardware, hyperparameters, plain_settings, versions


@pytest.fixture
def trainer():
    """Return a trainer with something of everything."""
    model = ComposerClassifier(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 3)), num_classes=3)
    model.module[0].bias.requires_grad_(False)
    data = DataLoader(TensorDataset(torch.randn(20, 4), torch.randint(3, (20,))), batch_size=5)
    trainer = Trainer(
        model=model,
        train_dataloader=data,
        eval_dataloader=Evaluator(label="test", dataloader=data, eval_interval="2ep"),
        algorithms=[MixUp(alpha=0.3), LabelSmoothing()],
        callbacks=[SpeedMonitor(window_size=7), LRMonitor()],
        loggers=[InMemoryLogger(every="10ba")],
        optimizers=torch.optim.SGD(
            [{"params": model.module[0].parameters(), "lr": 0.5}, {"params": model.module[1].parameters()}], lr=0.1
        ),
        max_duration="3ep",
        progress_bar=False,
        device="cpu",
        seed=17,
        run_name="described",
    )
    yield trainer
    trainer.close()


@pytest.fixture
def described(trainer):
    """Return what is said of it."""
    return hyperparameters(
        trainer.state, loggers=trainer.logger.destinations, schedulers=[LinearWithWarmupScheduler("10ba")]
    )


class TestOfARun:
    def test_is_plain_data(self, described):
        """All of it can be written as JSON and read again."""
        assert json.loads(json.dumps(described, allow_nan=False)) == described

    def test_the_run(self, described):
        """Name, seed, device, precision and length stand at the top."""
        names = ("run_name", "rank_zero_seed", "device", "precision", "max_duration", "device_train_microbatch_size")

        assert [described[name] for name in names] == ["described", 17, "cpu", "fp32", "3ep", None]

    def test_algorithms_and_callbacks(self, described):
        """Each stands there with its settings, defaults included."""
        assert described["algorithms"]["MixUp"] == {
            "alpha": 0.3,
            "interpolate_loss": False,
            "input_key": 0,
            "target_key": 1,
        }
        assert described["algorithms"]["LabelSmoothing"]["smoothing"] == 0.1
        assert described["callbacks"]["SpeedMonitor"]["window_size"] == 7
        assert described["callbacks"]["LRMonitor"] == {}

    def test_loggers(self, described):
        """A logger says how often it is given metrics."""
        assert described["loggers"] == {"InMemoryLogger": {"every": "10ba"}}

    def test_optimizers(self, described):
        """The defaults of an optimizer, and of each group what differs."""
        settings = described["optimizers"]["SGD"]

        assert (settings["lr"], settings["momentum"], settings["nesterov"]) == (0.1, 0, False)
        assert settings["groups"] == [{"num_parameters": 40, "lr": 0.5}, {"num_parameters": 27}]

    def test_schedulers(self, described):
        """A schedule has its settings, times as text."""
        assert described["schedulers"]["LinearWithWarmupScheduler"]["t_warmup"] == "10ba"

    def test_torch_schedulers_and_functions(self, trainer):
        """Schedulers of torch have the arguments they were made with; a function its name."""
        ready = torch.optim.lr_scheduler.StepLR(trainer.state.optimizers[0], step_size=3, gamma=0.5)

        def halve(state, ssr):
            return 0.5

        schedulers = hyperparameters(trainer.state, schedulers=[ready, halve])["schedulers"]

        assert schedulers == {"StepLR": {"step_size": 3, "gamma": 0.5}, "halve": {}}

    def test_model_and_data(self, described):
        """How large the model is, and the batches."""
        assert described["model"] == {
            "class": "composer.models.classifier.ComposerClassifier",
            "num_parameters": 40 + 27,
            "num_trainable_parameters": 32 + 27,
        }
        assert described["train_dataloader"]["batch_size"] == 5
        assert described["evaluators"]["test"]["eval_interval"] == "evaluate_periodically('2ep')"

    def test_extra(self, trainer):
        """What the caller adds stands under its own name."""
        described = hyperparameters(trainer.state, extra={"eval_interval": "1ep", "model": trainer.state.model})

        assert described["trainer"]["eval_interval"] == "1ep"
        assert described["trainer"]["model"].startswith("object of composer.models.classifier")

    def test_a_state_with_nothing(self):
        """It works for an engine without a model or data, too."""
        described = hyperparameters(State(model=None))

        assert described["model"]["num_parameters"] == 0
        assert described["train_dataloader"] is None


class TestPlainSettings:
    @pytest.mark.parametrize(
        "name",
        [
            "api_key",
            "slack_logging_api_key",
            "apikey",
            "API_KEY",
            "token",
            "hf_token",
            "password",
            "aws_secret",
            "secret_access_key",
            "credentials",
            "private_key",
        ],
    )
    def test_secrets_are_hidden(self, name):
        """What is called like a secret is not logged, however deep it lies."""
        plain = plain_settings({name: "s3cr3t", "inner": {"list": [{name: "s3cr3t"}]}})

        assert "s3cr3t" not in str(plain)
        assert plain[name] == "(hidden)"

    @pytest.mark.parametrize(
        ("name", "value"),
        [
            ("num_tokens", 5),
            ("token", None),
            ("eos_token", "</s>"),
            ("tokenizer", "bert"),
            ("max_tokens", 7),
            ("monkey", "a"),
        ],
    )
    def test_what_is_no_secret_is_shown(self, name, value):
        """Numbers, what is missing, and words that only look alike are shown."""
        assert plain_settings({name: value}) == {name: value}

    def test_password_in_an_address(self):
        """Users and passwords in addresses are hidden."""
        plain = plain_settings({"tracking_uri": "postgresql://me:s3cr3t@host/db"})

        assert plain["tracking_uri"] == "postgresql://(hidden)@host/db"

    def test_values_of_many_kinds(self):
        """Times, intervals, types, tensors, sets and objects become what people would write."""

        @attrs.define
        class Inner:
            size: int = 3

        plain = plain_settings(
            {
                "time": Time(3, "ep"),
                "interval": Interval("2ba"),
                "dtype": torch.float16,
                "number": torch.tensor(0.5),
                "weights": torch.ones(2, 3),
                "names": {"b", "a"},
                "inner": Inner(),
                "function": print,
                "long": list(range(1000)),
            }
        )

        assert plain == {
            "time": "3ep",
            "interval": "2ba",
            "dtype": "torch.float16",
            "number": 0.5,
            "weights": "tensor (2, 3)",
            "names": ["a", "b"],
            "inner": {"class": "Inner", "size": 3},
            "function": "function builtins.print",
            "long": "list of 1000",
        }

    def test_endless_nesting(self):
        """A list that holds itself ends somewhere."""
        endless = []
        endless.append(endless)

        assert "list of 1" in str(plain_settings({"endless": endless}))


class TestSurroundings:
    def test_versions(self):
        """Versions are those that the programs themselves say."""
        said = subprocess.run([sys.executable, "-V"], capture_output=True, text=True, check=True).stdout.split()[1]

        assert versions()["python"] == said
        assert versions()["torch"] == torch.__version__
        assert versions()["composer"] == "0.1.0"

    def test_hardware(self):
        """The machine has processors, memory and a name."""
        found = hardware(torch.device("cpu"))

        assert found["num_cpus"] >= 1
        assert found["memory_gib"] > 0.1
        assert found["hostname"]

    @pytest.fixture
    def repository(self, tmp_path, monkeypatch):
        """Return a folder with a repository of one commit, which is the working folder."""
        for command in ["init -q", "config user.email a@b", "config user.name n"]:
            subprocess.run(["git", *command.split()], cwd=tmp_path, check=True)
        (tmp_path / "program.py").write_text("print(1)\n")
        subprocess.run(["git", "add", "program.py"], cwd=tmp_path, check=True)
        subprocess.run(["git", "commit", "-q", "-m", "first"], cwd=tmp_path, check=True)
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys.modules["__main__"], "__file__", str(tmp_path / "program.py"), raising=False)
        return tmp_path

    def test_commit(self, repository):
        """The commit is the one that git knows, and clean until a file changes."""
        head = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()

        (repository / "output.txt").write_text("git does not know this file")
        clean = commit()
        (repository / "program.py").write_text("print(2)\n")

        assert clean == {"commit": head, "is_dirty": False}
        assert commit() == {"commit": head, "is_dirty": True}

    def test_the_programs_folder_comes_before_the_working_folder(self, repository, tmp_path_factory, monkeypatch):
        """A program that is started from elsewhere is of its own repository."""
        monkeypatch.chdir(tmp_path_factory.mktemp("elsewhere"))

        assert commit()["is_dirty"] is False

    def test_no_repository(self, tmp_path, monkeypatch):
        """Outside of a repository there is no commit, and no error."""
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys.modules["__main__"], "__file__", str(tmp_path / "program.py"), raising=False)

        assert commit() == {"commit": None, "is_dirty": None}

    def test_no_git(self, repository, monkeypatch):
        """Where git is not installed there is no commit, and no error."""
        monkeypatch.setenv("PATH", "/nowhere")

        assert commit() == {"commit": None, "is_dirty": None}

    def test_slow_git(self, repository, monkeypatch):
        """A git that takes too long is given up."""
        slow = repository / "git"
        slow.write_text("#!/bin/sh\nexec sleep 20\n")
        slow.chmod(0o755)
        monkeypatch.setenv("PATH", f"{repository}:/usr/bin:/bin")
        monkeypatch.setattr("composer.trainer.hyperparameters._GIT_SECONDS", 0.05)

        assert commit() == {"commit": None, "is_dirty": None}
