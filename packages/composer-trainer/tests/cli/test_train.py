"""``composer train`` constructs a trainer from a configuration and the command line, and trains."""

import re
import sys

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from composer.algorithms import LabelSmoothing, MixUp
from composer.callbacks import SpeedMonitor
from composer.cli import launcher, train
from composer.models import ComposerClassifier
from composer.optim import LinearWithWarmupScheduler, Muon
from composer.trainer import Trainer
from composer.trainer.reproducibility import seed_all
from fixtures import make_classifier, make_loader

CONFIG = """
seed: 3
max_duration: 2ep
device: cpu
progress_bar: false
model: {class_path: MODULE.make_model, init_args: {width: 4}}
train_dataloader: {class_path: MODULE.make_data}
optimizers: {class_path: torch.optim.SGD, init_args: {lr: 0.1}}
schedulers: {class_path: composer.optim.LinearWithWarmupScheduler, init_args: {t_warmup: 1ba, alpha_f: 0.5}}
algorithms:
  - {class_path: composer.algorithms.LabelSmoothing, init_args: {smoothing: 0.2}}
  - class_path: composer.algorithms.MixUp
callbacks: [{class_path: composer.callbacks.SpeedMonitor}]
"""
MODULE = """
import torch
from torch.utils.data import DataLoader, TensorDataset
from composer.models import ComposerClassifier
from composer.optim import muon_with_adamw


def make_model(width: int = 4) -> ComposerClassifier:
    return ComposerClassifier(torch.nn.Sequential(torch.nn.Linear(width, 8), torch.nn.Linear(8, 2)), num_classes=2)


def make_data() -> DataLoader:
    return DataLoader(TensorDataset(torch.ones(16, 4), torch.ones(16).long()), 8)


def make_muon(model: torch.nn.Module) -> torch.optim.Optimizer:
    return muon_with_adamw(model, lr=0.03)
"""


@pytest.fixture
def run(tmp_path, monkeypatch, request):
    """Return the path of a configuration in the working directory, which has its module."""
    name = "task_of_" + "".join(letter if letter.isalnum() else "_" for letter in request.node.name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / f"{name}.py").write_text(MODULE)
    (tmp_path / "run.yaml").write_text(CONFIG.replace("MODULE", name))
    return "run.yaml"


def trained_by_a_program(lr):
    """Return the weights that a program with the same components trains."""
    seed_all(3)
    network = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 2))
    model = ComposerClassifier(network, num_classes=2)
    trainer = Trainer(
        model=model,
        train_dataloader=DataLoader(TensorDataset(torch.ones(16, 4), torch.ones(16).long()), 8),
        optimizers=torch.optim.SGD(model.parameters(), lr=lr),
        schedulers=LinearWithWarmupScheduler("1ba", alpha_f=0.5),
        algorithms=[LabelSmoothing(smoothing=0.2), MixUp()],
        callbacks=[SpeedMonitor()],
        max_duration="2ep",
        seed=3,
        device="cpu",
        progress_bar=False,
    )
    trainer.fit()
    return model.state_dict()


class TestMakeTrainer:
    @pytest.mark.parametrize(
        ("argument", "component", "settings"),
        [
            ("algorithms", "composer.algorithms.EMA", {"half_life": "20ba", "update_interval": "2ba"}),
            ("callbacks", "composer.callbacks.EarlyStopper", {"monitor": "Accuracy", "patience": "2ep"}),
            ("loggers", "composer.loggers.InMemoryLogger", {"every": "10ba"}),
            ("schedulers", "composer.optim.CosineAnnealingWithWarmupScheduler", {"t_warmup": "0.1dur"}),
        ],
    )
    def test_times_are_strings(self, run, argument, component, settings):
        """Times and intervals of a component are given as strings."""
        options = [f"--{argument}.{name}={value}" for name, value in settings.items()]

        trainer = train.make_trainer(["--config", run, f"--{argument}={component}", *options, "--max_duration=3ba"])

        assert trainer.state.max_duration == "3ba"

    @pytest.mark.parametrize("lr", [0.1, 0.01])
    def test_trains_as_a_program(self, run, lr):
        """The weights are those of a program with the same components; the command line replaces one argument."""
        options = [] if lr == 0.1 else ["--optimizers.lr", str(lr)]

        trainer = train.make_trainer(["--config", run, *options])
        trainer.fit()

        torch.testing.assert_close(trainer.state.model.state_dict(), trained_by_a_program(lr), rtol=0, atol=0)

    def test_given_objects(self, run):
        """They replace those of the configuration, and need none there."""
        model = make_classifier()

        trainer = train.make_trainer(["--config", run], model=model, train_dataloader=make_loader(), algorithms=MixUp())

        assert trainer.state.model is model
        assert [type(one).__name__ for one in trainer.state.algorithms] == ["MixUp"]
        bare = train.make_trainer(["--max_duration=1ep"], model=model, train_dataloader=make_loader(), device="cpu")
        assert bare.state.max_duration == "1ep"

    def test_a_function_of_the_model(self, run, tmp_path):
        """A function that makes the optimizer gets the model if it has an argument of this name."""
        (module,) = (path.stem for path in tmp_path.glob("task_of_*.py"))

        trainer = train.make_trainer(["--config", run, "--optimizers", f"{module}.make_muon"])

        assert isinstance(trainer.state.optimizers[0], Muon)

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            (["--model=null"], "model must be given"),
            (["--optimizers.lrr=1"], "'lrr' is not accepted"),
            (["--seed=x"], "Expected a <class 'int'>"),
            (["--algorithms=composer.callbacks.SpeedMonitor"], "is not a subclass|does not correspond to a subclass"),
            (["--config=none.yaml"], "none.yaml"),
        ],
    )
    def test_wrong_arguments(self, run, capsys, options, message):
        """A wrong argument ends the program with status 2 and a reason."""
        with pytest.raises(SystemExit) as ending:
            train.make_trainer(["--config", run, *options])

        assert ending.value.code == 2
        assert re.search(message, capsys.readouterr().err)

    @pytest.mark.parametrize(
        "entries",
        [
            "model: os.system",
            "model: {class_path: subprocess.Popen, init_args: {args: [touch, ran]}}",
            "optimizers: builtins.eval",
            "optimizers: torch.os.system",
            "optimizers: MODULE.os.system",
            "optimizers: torch.nn.modules.module.torch.load",
            "optimizers: composer.cli.launcher.main",
            "optimizers: functools.partial",
            "algorithms: [{class_path: runpy.run_path, init_args: {path_name: task.py}}]",
            "callbacks: {class_path: hostile.Callback}",
            "model: {class_path: composer.models.ComposerClassifier, init_args: {module: torch.hub.load}}",
            "train_dataloader: {class_path: torch.utils.data.DataLoader, init_args: {collate_fn: os.system}}",
            "config: nested.yaml",
            "trust: [os]",
        ],
    )
    def test_a_file_names_only_what_is_trusted(self, run, tmp_path, capsys, entries):
        """Other names, wherever they are, end the program before they are imported."""
        (module,) = (path.stem for path in tmp_path.glob("task_of_*.py"))
        (tmp_path / f"{module}.py").write_text(f"import os\n{MODULE}")
        (tmp_path / "nested.yaml").write_text("model: os.system")
        yaml = pytest.importorskip("yaml", reason="it comes with jsonargparse")
        config = yaml.safe_dump(yaml.safe_load(CONFIG) | yaml.safe_load(entries))
        (tmp_path / run).write_text(config.replace("MODULE", module))
        installed = tmp_path / "elsewhere"
        installed.mkdir()
        (installed / "hostile.py").write_text("raise RuntimeError('imported')")
        sys.path.append(str(installed))

        with pytest.raises(SystemExit) as ending:
            train.make_trainer(["--config", run])

        error = capsys.readouterr().err
        assert ending.value.code == 2
        if "trust" in entries:
            assert "Option 'trust' is not accepted" in error
        else:
            assert re.search(r"run.yaml: \w+ leads to [\w.]+, which is not imported", error)
            is_denied = "composer.cli" in entries
            assert bool(re.search(r"--trust \w+", error)) != is_denied
            assert ("may load code of others. Name a function in a module of this folder" in error) == is_denied
        assert not (tmp_path / "ran").exists()

    @pytest.mark.parametrize("kind", ["Bert", "AutoModel"])
    @pytest.mark.parametrize("trust", [[], ["--trust=transformers.models.auto.auto_factory._BaseAutoModelClass"]])
    def test_pretrained_models(self, run, tmp_path, capsys, kind, trust):
        """``from_pretrained`` may load code, and states no type: the error shows the function that calls it."""
        pytest.importorskip("transformers")
        name = f"transformers.{kind}ForSequenceClassification.from_pretrained"
        inner = f"{{class_path: {name}, init_args: {{pretrained_model_name_or_path: bert}}}}"
        entry = f"{{class_path: composer.models.HuggingFaceModel, init_args: {{model: {inner}}}}}"
        config = (tmp_path / run).read_text()
        (tmp_path / run).write_text(re.sub("(?m)^model: .*", f"model: {entry}", config))

        with pytest.raises(SystemExit):
            train.make_trainer(["--config", run, *trust])

        error = capsys.readouterr().err.rpartition("error: ")[2]
        assert "ame a function in a module of this folder, which calls it and states what it returns" in error
        assert "`def make_model(name: str) -> HuggingFaceModel:`" in error
        assert "--trust" not in error

    def test_values_without_a_type_are_not_called(self, run, tmp_path):
        """A class that is not trusted stays a dictionary where any value may be."""
        entry = "compile_config: {disable: {class_path: subprocess.Popen, init_args: {args: [touch, ran]}}}"
        (tmp_path / run).write_text(f"{(tmp_path / run).read_text()}\n{entry}")

        trainer = train.make_trainer(["--config", run])

        assert trainer.state.model.training
        assert not (tmp_path / "ran").exists()

    @pytest.mark.parametrize("options", [["--trust", "MODULE"], ["--trust=MODULE"], ["--model=MODULE.make_model"]])
    def test_what_the_command_line_names_is_trusted(self, run, tmp_path, options):
        """A module of another folder is imported if the command line names it, and only by this call."""
        (module,) = (path.stem for path in tmp_path.glob("task_of_*.py"))
        installed = tmp_path / "elsewhere"
        installed.mkdir()
        (tmp_path / f"{module}.py").rename(installed / f"{module}.py")
        sys.path.append(str(installed))

        trainer = train.make_trainer(["--config", run, *(option.replace("MODULE", module) for option in options)])

        assert trainer.state.max_duration == "2ep"
        with pytest.raises(SystemExit):
            train.make_trainer(["--config", run])

    def test_names_of_files_are_not_trusted(self, run, tmp_path):
        """A file whose name is that of a module does not allow the module."""
        (tmp_path / "subprocess.yaml").write_text("optimizers: subprocess.Popen")

        with pytest.raises(SystemExit):
            train.make_trainer(["--config", run, "--config", "subprocess.yaml"])

    def test_without_jsonargparse(self, monkeypatch):
        """The error names the extra."""
        monkeypatch.setitem(sys.modules, "jsonargparse", None)

        with pytest.raises(ModuleNotFoundError, match=r"composer-trainer\[config\]"):
            train.make_trainer([])


def test_command(run, capsys):
    """``composer train`` prints the result."""
    launcher.main(["train", "--config", run, "--max_duration", "1ep"])

    assert "max_duration='1ep' is reached" in capsys.readouterr().out


def test_help(capsys):
    """All arguments of the Trainer are options."""
    with pytest.raises(SystemExit):
        train.main(["--help"])

    text = capsys.readouterr().out
    assert all(f"--{name}" in text for name in ("max_duration", "algorithms", "save_folder", "eval_dataloader"))
