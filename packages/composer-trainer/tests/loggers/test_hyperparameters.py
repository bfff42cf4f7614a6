"""Logged hyperparameters of a run."""

import importlib.metadata
import re
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
from composer.core import Callback, Evaluator
from composer.loggers import FileLogger, InMemoryLogger
from composer.loggers.hyperparameters import hyperparameters, plain_settings, versions
from composer.models import ComposerClassifier
from composer.optim import LinearWithWarmupScheduler
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

    def test_optimizers(self, described):
        """An optimizer has its defaults, and each group's differences."""
        settings = described["optimizers"]["SGD"]

        assert (settings["lr"], settings["momentum"], settings["nesterov"]) == (0.1, 0, False)
        assert settings["groups"] == [{"num_parameters": 40, "lr": 0.5}, {"num_parameters": 27}]

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

    def test_names_of_composer(self, described):
        """Dashboards of MosaicML Composer find the version, the number of processes and the algorithms."""
        assert described["composer_version"] == described["versions"]["composer"]
        assert (described["num_nodes"], described["num_gpus_per_node"]) == (1, 1)
        enabled = {name.partition("/")[2] for name in described if name.startswith("enabled_algorithms/")}
        assert enabled == {"MixUp", "LabelSmoothing"}


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
            "auth",
            "bearer",
            "pwd",
            "jwt",
            "headers",
            "hook",
            "X-Api-Key",
            "accessToken",
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
            ("input_key", "image"),
            ("load_ignore_keys", ["optimizers/*"]),
            ("author", "me"),
        ],
    )
    def test_other_values_are_shown(self, name, value):
        """Numbers, None and names that only look similar are shown."""
        assert plain_settings({name: value}) == {name: value}

    @pytest.mark.parametrize(
        ("text", "shown"),
        [
            ("postgresql://me:s3cr3t@host/db", "postgresql://(hidden)@host/db"),
            ("postgresql://me:s3/cr@3t@host/db", "postgresql://(hidden)@host/db"),
            ("https://a.b/c?X-Amz-Signature=s3cr3t&token=s3cr3t", "https://a.b/c?(hidden)"),
            ("https://hooks.slack.com/services/T0/s3cr3t", "https://hooks.slack.com/(hidden)"),
            ("host=db password=s3cr3t", "host=db password=(hidden)"),
            ("Authorization: Bearer s3cr3t", "Authorization: (hidden)"),
            ("s3://bucket/run@v1", "s3://bucket/run@v1"),
        ],
    )
    def test_secrets_within_texts(self, text, shown):
        """Of URLs the user, the query and the path of a webhook are hidden, and the values of pairs."""
        assert plain_settings({"place": text}) == {"place": shown}

    def test_pairs_of_a_name_and_a_value(self):
        """Headers may be a list of pairs, under any name."""
        plain = plain_settings({"more": [("X-Api-Key", "s3cr3t"), ("Accept", "text")]})

        assert "s3cr3t" not in str(plain)
        assert ["Accept", "text"] in plain["more"]


@attrs.define(eq=False)
class Upload(Callback):
    """A callback whose settings contain secrets."""

    auth: tuple = ("me", "SECRET1")
    headers: dict = attrs.Factory(lambda: {"X-Tenant": "SECRET2", "Authorization": "Bearer SECRET3"})
    hook: str = "https://hooks.example/services/T0/B0/SECRET4"
    url: str = "https://bucket.example/x?X-Amz-Signature=SECRET5"
    every: int = 3


class Undeclared(Callback):
    """A callback that is not an attrs class."""

    def __init__(self, account="SECRET6"):
        self.account = account


class TestDeclaredSettings:
    def test_secrets_do_not_reach_what_a_run_writes(self, tmp_path):
        """Neither the log nor a checkpoint has a secret of a callback or optimizer; numbers are logged."""
        network = nn.Linear(4, 3)
        optimizer = torch.optim.SGD([{"params": network.parameters(), "note": "SECRET7"}], lr=0.1)

        with small_run(
            model=ComposerClassifier(network, num_classes=3),
            optimizers=optimizer,
            callbacks=[Upload(), Undeclared()],
            loggers=FileLogger(str(tmp_path / "log.txt")),
        ) as trainer:
            trainer.save_checkpoint(str(tmp_path / "checkpoint"))

        texts = [path.read_text(errors="replace") for path in tmp_path.rglob("*") if path.is_file()]
        assert len(texts) > 3
        assert "SECRET1" not in "".join(texts)
        assert not re.findall(r"SECRET[2-6]", "".join(texts))
        log = (tmp_path / "log.txt").read_text()
        assert "SECRET7" not in log
        assert '"every": 3' in log
        assert '"Undeclared": {}' in log

    def test_arguments_of_a_scheduler_of_torch(self, trainer):
        """They are declared by its constructor."""
        scheduler = torch.optim.lr_scheduler.StepLR(trainer.state.optimizers[0], step_size=2)

        described = hyperparameters(trainer.state, schedulers=[scheduler])

        assert described["schedulers"]["StepLR"] == {"step_size": 2, "gamma": 0.1}


class TestEnvironment:
    def test_versions(self):
        """Versions are those of the packages."""
        said = subprocess.run([sys.executable, "-V"], capture_output=True, text=True, check=True).stdout.split()[1]

        assert versions()["python"] == said
        assert versions()["torch"] == torch.__version__
        assert versions()["composer"] == importlib.metadata.version("composer-trainer")
