"""``composer train`` trains by a configuration and a module with model and data."""

import pytest
import torch

from composer.cli import launcher, train
from composer.trainer import Trainer
from composer.trainer.reproducibility import seed_all

CONFIG = """
seed: 3
max_duration: 1ep
device: cpu
progress_bar: false
optimizers: {SGD: {lr: 0.1}}
"""
MODULE = """
import torch
from composer.core import Callback
from composer.models import ComposerClassifier

trained = []


class Keep(Callback):
    def fit_end(self, state, logger):
        trained.append((state.optimizers[0].param_groups[0]["lr"], state.model.module.weight.detach().clone()))


def arguments():
    model = ComposerClassifier(torch.nn.Linear(4, 2), num_classes=2)
    return {"model": model, "train_dataloader": [(torch.ones(8, 4), torch.ones(8).long())], "callbacks": Keep()}
"""


@pytest.fixture
def task(tmp_path, monkeypatch):
    """Return the path of a configuration, in whose folder is a module."""
    monkeypatch.syspath_prepend(tmp_path)  # what the command adds to the path is removed at the end
    (tmp_path / "run.yaml").write_text(CONFIG)
    return tmp_path / "run.yaml"


def write_module(folder, name, content=MODULE):
    (folder / f"{name}.py").write_text(content)
    return str(folder / f"{name}.py")


@pytest.mark.parametrize("form", ["file", "name"])
def test_trains(task, capsys, form):
    """It trains as a program with the same configuration, with the entries that are replaced."""
    file = write_module(task.parent, f"task_of_{form}")
    given = file if form == "file" else f"task_of_{form}"

    launcher.main(["train", str(task), "--module", given, "--set", "optimizers.SGD.lr=1e-3", "--set", "seed=4"])

    module = __import__(f"task_of_{form}")
    [(lr, weight)] = module.trained
    seed_all(4)
    overrides = {"optimizers.SGD.lr": 0.001, "seed": 4}
    Trainer.from_config(task, overrides=overrides, **module.arguments()).fit()
    assert lr == 0.001
    assert torch.equal(weight, module.trained[1][1])
    assert "max_duration='1ep' is reached" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--set", "lr"], "must be of the form path=value, got 'lr'"),
        (["--set", "optimizers.AdamW.lr=1"], "optimizers.AdamW.lr must lead to an entry of the configuration"),
        (["--set", "seed=["], "is not valid YAML"),
        ([], "--module"),
    ],
)
def test_wrong_options(task, capsys, options, message):
    """A wrong option ends the program with status 2 and a reason, before the module is imported."""
    module = ["--module", "no_such_module"] if options else []

    with pytest.raises(SystemExit) as ending:
        train.main([str(task), *module, *options])

    assert ending.value.code == 2
    assert message in capsys.readouterr().err


def test_missing_file(tmp_path, capsys):
    """A configuration that does not exist ends the program with its name."""
    with pytest.raises(SystemExit):
        train.main([str(tmp_path / "none.yaml"), "--module", "m"])

    assert "none.yaml" in capsys.readouterr().err


def test_name_of_another_module(task):
    """A file with the name of a module that is imported already raises an error, and that module is not taken."""
    file = write_module(task.parent, "random")

    with pytest.raises(ValueError, match=r"random\.py has the name of .*random\.py, which is imported in its place"):
        train.main([str(task), "--module", file])


@pytest.mark.parametrize(
    ("content", "message"),
    [("", r"must have a function arguments\(\)"), ("def arguments(): return 3", "must return a dictionary, got int")],
)
def test_wrong_module(task, content, message):
    """A module without the function, or with another result, raises an error that states what it must have."""
    file = write_module(task.parent, f"wrong_{len(content)}", content)

    with pytest.raises(TypeError, match=message):
        train.main([str(task), "--module", file])
