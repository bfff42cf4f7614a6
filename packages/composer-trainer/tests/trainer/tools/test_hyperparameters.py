"""Logged hyperparameters of a run."""

import importlib.metadata
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
from composer.trainer.tools.hyperparameters import commit, hardware, hyperparameters, plain_settings, versions
from fixtures import small_run


@pytest.fixture
def trainer():
    """Return a trainer with components of each kind."""
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
    """Return its hyperparameters."""
    return hyperparameters(
        trainer.state, loggers=trainer.logger.destinations, schedulers=[LinearWithWarmupScheduler("10ba")]
    )


class TestRun:
    def test_is_plain_data(self, described):
        """The result has a JSON round trip."""
        assert json.loads(json.dumps(described, allow_nan=False)) == described

    def test_run_settings(self, described):
        """Name, seed, device, precision and length are at the top level."""
        names = ("run_name", "rank_zero_seed", "device", "precision", "max_duration", "device_train_microbatch_size")

        assert [described[name] for name in names] == ["described", 17, "cpu", "fp32", "3ep", None]

    def test_algorithms_and_callbacks(self, described):
        """Each has its settings, including defaults."""
        assert described["algorithms"]["MixUp"] == {
            "alpha": 0.3,
            "interpolate_loss": False,
            "input_key": 0,
            "target_key": 1,
            "mask_key": None,
            "boxes_key": None,
            "labels_key": None,
            "box_format": "xyxy",
        }
        assert described["algorithms"]["LabelSmoothing"]["smoothing"] == 0.1
        assert described["callbacks"]["SpeedMonitor"]["window_size"] == 7
        assert described["callbacks"]["LRMonitor"] == {}

    def test_loggers(self, described):
        """A logger has its interval."""
        assert described["loggers"] == {"InMemoryLogger": {"every": "10ba"}}

    def test_optimizers(self, described):
        """An optimizer has its defaults, and each group's differences."""
        settings = described["optimizers"]["SGD"]

        assert (settings["lr"], settings["momentum"], settings["nesterov"]) == (0.1, 0, False)
        assert settings["groups"] == [{"num_parameters": 40, "lr": 0.5}, {"num_parameters": 27}]

    def test_schedulers(self, described):
        """A schedule has its settings, with times as strings."""
        assert described["schedulers"]["LinearWithWarmupScheduler"]["t_warmup"] == "10ba"

    def test_torch_schedulers_and_functions(self, trainer):
        """Torch schedulers have their arguments, a function its name."""
        ready = torch.optim.lr_scheduler.StepLR(trainer.state.optimizers[0], step_size=3, gamma=0.5)

        def halve(state, ssr):
            return 0.5

        schedulers = hyperparameters(trainer.state, schedulers=[ready, halve])["schedulers"]

        assert schedulers == {"StepLR": {"step_size": 3, "gamma": 0.5}, "halve": {}}

    def test_model_and_data(self, described):
        """The size of the model and the number of batches."""
        assert described["model"] == {
            "class": "composer.models.classifier.ComposerClassifier",
            "network": "torch.nn.modules.container.Sequential",
            "num_parameters": 40 + 27,
            "num_trainable_parameters": 32 + 27,
        }
        assert described["train_dataloader"]["batch_size"] == 5
        assert described["evaluators"]["test"]["eval_interval"] == "evaluate_periodically('2ep')"

    def test_extra(self, trainer):
        """Additional entries are under their own names."""
        described = hyperparameters(trainer.state, extra={"eval_interval": "1ep", "model": trainer.state.model})

        assert described["trainer"]["eval_interval"] == "1ep"
        assert described["trainer"]["model"].startswith("object of composer.models.classifier")

    def test_names_of_composer(self, described):
        """Dashboards of MosaicML Composer find the version, the number of processes and the algorithms."""
        assert described["composer_version"] == described["versions"]["composer"]
        assert (described["num_nodes"], described["num_gpus_per_node"]) == (1, 1)
        enabled = {name.partition("/")[2] for name in described if name.startswith("enabled_algorithms/")}
        assert enabled == {"MixUp", "LabelSmoothing"}

    def test_empty_state(self):
        """It works for an engine without a model or data."""
        described = hyperparameters(State(model=None))

        assert described["model"]["num_parameters"] == 0
        assert described["train_dataloader"] is None


class TestArgumentsOfTheTrainer:
    def logged(self, **options):
        """Return the logged hyperparameters of a run."""
        log = InMemoryLogger()
        small_run(loggers=log, **options)
        return log.hyperparameters

    def test_arguments_that_differ_from_defaults_are_logged(self):
        """Defaults, and components that have an entry of their own, are left out."""
        logged = self.logged(max_duration="3ep", eval_interval="5ba", algorithms=MixUp())

        assert logged["trainer"] == {
            "max_duration": "3ep",
            "eval_interval": "5ba",
            "progress_bar": False,
            "device": "cpu",
            "seed": 7,
        }

    def test_can_be_left_out(self):
        """With auto_log_hparams=False only the settings of components are logged."""
        logged = self.logged(auto_log_hparams=False, algorithms=MixUp())

        assert "trainer" not in logged
        assert "MixUp" in logged["algorithms"]


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
        """Values with names like a secret's are hidden, at any depth."""
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
    def test_other_values_are_shown(self, name, value):
        """Numbers, None and names that only look similar are shown."""
        assert plain_settings({name: value}) == {name: value}

    def test_password_in_a_url(self):
        """Users and passwords in URLs are hidden."""
        plain = plain_settings({"tracking_uri": "postgresql://me:s3cr3t@host/db"})

        assert plain["tracking_uri"] == "postgresql://(hidden)@host/db"

    def test_values_of_many_types(self):
        """Times, intervals, types, tensors, sets and objects have readable forms."""

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

    def test_self_referencing_list(self):
        """The recursion is limited."""
        endless = []
        endless.append(endless)

        assert "list of 1" in str(plain_settings({"endless": endless}))


class TestEnvironment:
    def test_versions(self):
        """Versions are those of the packages."""
        said = subprocess.run([sys.executable, "-V"], capture_output=True, text=True, check=True).stdout.split()[1]

        assert versions()["python"] == said
        assert versions()["torch"] == torch.__version__
        assert versions()["composer"] == importlib.metadata.version("composer-trainer")

    def test_hardware(self):
        """The machine has processors, memory and a name."""
        result = hardware(torch.device("cpu"))

        assert result["num_cpus"] >= 1
        assert result["memory_gib"] > 0.1
        assert result["hostname"]

    @pytest.fixture
    def folder(self, tmp_path, monkeypatch):
        """Return the working directory, which has the program."""
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys.modules["__main__"], "__file__", str(tmp_path / "program.py"), raising=False)
        return tmp_path

    @pytest.fixture
    def repository(self, folder):
        """Return the working directory with a repository of one commit."""
        for command in ["init -q", "config user.email a@b", "config user.name n"]:
            subprocess.run(["git", *command.split()], cwd=folder, check=True)
        (folder / "program.py").write_text("print(1)\n")
        subprocess.run(["git", "add", "program.py"], cwd=folder, check=True)
        subprocess.run(["git", "commit", "-q", "-m", "first"], cwd=folder, check=True)
        return folder

    def test_commit(self, repository):
        """The commit is git's, and clean until a file changes."""
        head = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()

        (repository / "output.txt").write_text("git does not know this file")
        clean = commit()
        (repository / "program.py").write_text("print(2)\n")

        assert clean == {"commit": head, "is_dirty": False}
        assert commit() == {"commit": head, "is_dirty": True}

    def test_repository_of_the_program(self, repository, tmp_path_factory, monkeypatch):
        """The repository of the program's file precedes that of the working directory."""
        monkeypatch.chdir(tmp_path_factory.mktemp("elsewhere"))

        assert commit()["is_dirty"] is False

    @pytest.mark.usefixtures("folder")
    def test_no_repository(self):
        """Outside a repository there is no commit and no error."""
        assert commit() == {"commit": None, "is_dirty": None}

    def test_no_git(self, repository, monkeypatch):
        """Without git there is no commit and no error."""
        monkeypatch.setenv("PATH", "/nowhere")

        assert commit() == {"commit": None, "is_dirty": None}

    def test_slow_git(self, repository, monkeypatch):
        """Git has a timeout."""
        slow = repository / "git"
        slow.write_text("#!/bin/sh\nexec sleep 20\n")
        slow.chmod(0o755)
        monkeypatch.setenv("PATH", f"{repository}:/usr/bin:/bin")
        monkeypatch.setattr("composer.trainer.tools.hyperparameters._GIT_SECONDS", 0.05)

        assert commit() == {"commit": None, "is_dirty": None}
