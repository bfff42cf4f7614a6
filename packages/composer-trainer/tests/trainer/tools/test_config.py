"""A trainer from plain data: names of registries, checked arguments, nothing else."""

import copy
import sys
from pathlib import Path

import pytest
import torch

import composer.algorithms
from composer.algorithms import EMA, LabelSmoothing, MixUp
from composer.callbacks import SpeedMonitor
from composer.loggers import InMemoryLogger
from composer.optim import (
    CosineAnnealingWithWarmupScheduler,
    DecoupledSGDW,
    InverseSquareRootScheduler,
    WarmupStableDecayScheduler,
)
from composer.trainer import Trainer
from composer.trainer.tools.config import read_config, registered, trainer_arguments
from fixtures import make_classifier, make_loader, small_run, weights

RECIPE = """
seed: 17
max_duration: 2ep
device: cpu
progress_bar: false
optimizers:
  DecoupledSGDW: {lr: 1e-1, momentum: 0.9}
schedulers:
  CosineAnnealingWithWarmupScheduler: {t_warmup: 0.1dur}
algorithms:
  - LabelSmoothing
  - MixUp: {alpha: 0.3}
  - EMA: {half_life: 5ba}
callbacks: SpeedMonitor
loggers: [InMemoryLogger: {every: 2ba}]
"""


@pytest.fixture
def from_config():
    """Return a function that builds a trainer of a small model from a configuration; it is closed at the end."""
    trainers = []

    def make(config, **arguments):
        given = {"train_dataloader": make_loader(), **arguments}
        if not isinstance(config, dict) or "model" not in config:
            given["model"] = make_classifier()
        trainers.append(Trainer.from_config(config, **given))
        return trainers[-1]

    yield make
    for trainer in trainers:
        trainer.close()


class TestComponents:
    def test_file(self, from_config, tmp_path):
        """A YAML file has the components with their settings, and the other arguments."""
        (tmp_path / "run.yaml").write_text(RECIPE)

        trainer = from_config(tmp_path / "run.yaml")

        state = trainer.state
        assert [type(one) for one in state.algorithms] == [LabelSmoothing, MixUp, EMA]
        assert (state.algorithms[1].alpha, state.algorithms[2].half_life.value) == (0.3, 5)
        assert [type(one) for one in state.callbacks] == [SpeedMonitor]
        assert [type(one) for one in trainer.logger.destinations] == [InMemoryLogger]
        assert (type(state.optimizers[0]), state.optimizers[0].param_groups[0]["lr"]) == (DecoupledSGDW, 0.1)
        assert (state.rank_zero_seed, str(state.max_duration)) == (17, "2ep")

    def test_trains_as_the_program_with_the_same_components(self, from_config, tmp_path):
        """The weights are bit-identical to those of a trainer that is built in Python."""
        (tmp_path / "run.yaml").write_text(RECIPE)
        model = make_classifier()
        written = small_run(
            model=model,
            seed=17,
            max_duration="2ep",
            optimizers=DecoupledSGDW(model.parameters(), lr=0.1, momentum=0.9),
            schedulers=CosineAnnealingWithWarmupScheduler("0.1dur"),
            algorithms=[LabelSmoothing(), MixUp(alpha=0.3), EMA("5ba")],
        )
        read = from_config(str(tmp_path / "run.yaml"))

        written.fit()
        read.fit()

        assert torch.equal(weights(read), weights(written))

    def test_schedules(self):
        """Every schedule has its name, and its arguments by theirs."""
        entry = {"WarmupStableDecayScheduler": {"t_warmup": "5ba", "t_decay": "0.1dur", "decay": "linear"}}

        built = trainer_arguments({"schedulers": [entry, {"InverseSquareRootScheduler": {"t_warmup": "1ep"}}]}, {})

        expected = [WarmupStableDecayScheduler("5ba", "0.1dur", "linear"), InverseSquareRootScheduler("1ep")]
        assert built["schedulers"] == expected

    @pytest.mark.parametrize(
        "algorithms",
        [
            ["LabelSmoothing", {"MixUp": {"alpha": 0.3}}],
            {"LabelSmoothing": None, "MixUp": {"alpha": 0.3}},
            [{"LabelSmoothing": {}, "MixUp": {"alpha": 0.3}}],
        ],
    )
    def test_forms(self, algorithms):
        """Components are a list or a dictionary, of names with or without arguments."""
        built = trainer_arguments({"algorithms": algorithms}, {})["algorithms"]

        assert [type(one) for one in built] == [LabelSmoothing, MixUp]

    def test_given_arguments_replace_those_of_the_file(self, from_config):
        """Arguments of the call take precedence, and those they replace are not built."""
        config = {
            "max_duration": "9ep",
            "algorithms": "NoSuchAlgorithm",
            "device": "cpu",
            "optimizers": {"SGD": {"lr": 1}},
        }

        trainer = from_config(config, max_duration="1ep", algorithms=[MixUp()], progress_bar=False)

        assert str(trainer.state.max_duration) == "1ep"

    def test_model(self):
        """A model of a library is built by name, with weights that depend on the seed alone."""
        config = {"model": {"composer_torchvision": {"model_name": "mobilenet_v3_small", "num_classes": 3}}, "seed": 3}

        first, second = (trainer_arguments(config, {})["model"] for _ in range(2))

        pairs = zip(first.parameters(), second.parameters(), strict=True)
        assert all(torch.equal(one, other) for one, other in pairs)

    @pytest.mark.parametrize("name", ["SGD", "AdamW", "DecoupledAdamW"])
    def test_optimizers_of_torch_and_of_this_library(self, from_config, name):
        """Optimizers of both are built with the model's parameters."""
        trainer = from_config({"optimizers": {name: {"lr": 0.01}}, "device": "cpu", "progress_bar": False})

        assert type(trainer.state.optimizers[0]).__name__ == name


class TestOverrides:
    @pytest.mark.parametrize(
        ("config", "path", "expected"),
        [
            ({"seed": 1}, "seed", {"seed": 5}),
            ({}, "seed", {"seed": 5}),
            ({"optimizers": {"AdamW": {"lr": 1}}}, "optimizers.AdamW.lr", {"optimizers": {"AdamW": {"lr": 5}}}),
            ({"optimizers": "AdamW"}, "optimizers.AdamW.lr", {"optimizers": {"AdamW": {"lr": 5}}}),
            (
                {"algorithms": ["A", {"B": {"x": 1, "y": 2}}]},
                "algorithms.B.x",
                {"algorithms": ["A", {"B": {"x": 5, "y": 2}}]},
            ),
            ({"algorithms": ["A", "B"]}, "algorithms.A.x", {"algorithms": [{"A": {"x": 5}}, "B"]}),
            ({"algorithms": {"A": None}}, "algorithms.A.x", {"algorithms": {"A": {"x": 5}}}),
            ({"callbacks": {"A": {"x": {"z": 1}}}}, "callbacks.A.x.z", {"callbacks": {"A": {"x": {"z": 5}}}}),
        ],
    )
    def test_entries(self, config, path, expected):
        """The entry is replaced in all forms of components, and the configuration is not changed."""
        before = copy.deepcopy(config)

        assert read_config(config, {path: 5}) == expected
        assert config == before

    def test_trainer(self, from_config, tmp_path):
        """A trainer has the new values, and the others of the file."""
        (tmp_path / "run.yaml").write_text(RECIPE)

        trainer = from_config(
            tmp_path / "run.yaml", overrides={"optimizers.DecoupledSGDW.lr": 0.5, "max_duration": "3ep"}
        )

        group = trainer.state.optimizers[0].param_groups[0]
        assert (group["lr"], group["momentum"], str(trainer.state.max_duration)) == (0.5, 0.9, "3ep")

    @pytest.mark.parametrize(
        ("path", "message"),
        [
            ("optimizers.SGD.lr", r"optimizers\.SGD\.lr must lead to an entry .* no 'SGD' there, but \['AdamW'\]"),
            ("schedulers.A.lr", r"no 'schedulers' there, but \['algorithms', 'optimizers'\]"),
            ("algorithms.C.x", r"no 'C' there, but \['A', 'B'\]"),
            ("optimizers.AdamW.lr.x", r"no 'x' there, but 1"),
        ],
    )
    def test_missing_entries(self, path, message):
        """A path that leads nowhere raises an error, as it would add a second optimizer or nothing."""
        with pytest.raises(ValueError, match=message):
            read_config({"optimizers": {"AdamW": {"lr": 1}}, "algorithms": ["A", "B"]}, {path: 5})


class TestErrors:
    @pytest.mark.parametrize(
        ("config", "message"),
        [
            ({"algorithms": ["MixUpp"]}, r"algorithms must be of .*, got 'MixUpp'; did you mean 'MixUp'\?"),
            (
                {"algorithms": {"MixUp": {"alhpa": 1}}},
                r"algorithms\.MixUp has no argument 'alhpa'; did you mean 'alpha'\?",
            ),
            ({"algorithms": {"MixUp": {"alpha": -1}}}, r"algorithms\.MixUp: alpha must"),
            ({"algorithms": {"MixUp": 0.2}}, r"algorithms\.MixUp must be a dictionary of arguments, got 0\.2"),
            ({"algorithms": 3}, r"algorithms must contain names, or names with arguments"),
            ({"optimizers": {"SGD": {"params": []}}}, r"optimizers\.SGD: params is set"),
            ({"optimizers": {"SGD": {"lr": "fast"}}}, r"optimizers\.SGD\.lr: must be like 0\.001, got 'fast'"),
            ({"optimizers": {"AdamW": {"betas": 0.9}}}, r"AdamW\.betas: must be like \(0\.9, 0\.999\), got 0\.9"),
            ({"algorithms": ["Augment"]}, r"algorithms\.Augment needs augmentation, got no arguments"),
            (
                {"model": {"composer_timm": {"model_name": "hf-hub:a/b"}}},
                r"composer_timm\.model_name must be the name of",
            ),
            (
                {"model": {"composer_timm": {"model_name": "resnet18", "checkpoint_path": "x"}}},
                r"no argument 'checkpoint_p",
            ),
            ({"max_durration": "1ep"}, r"Trainer has no argument 'max_durration'"),
            ({"eval_dataloader": [1]}, r"eval_dataloader cannot be in a configuration"),
            ({"seed": print}, r"seed must be a number, a string, a list or a dictionary"),
            ({"compile_config": {"options": [print]}}, r"compile_config\.options\[0\] must be a number"),
            ([1], r"config must be a dictionary or the path of a YAML file, got \[1\]"),
        ],
    )
    def test_bad_entry(self, from_config, config, message):
        """The error names the entry."""
        with pytest.raises((TypeError, ValueError), match=message):
            from_config(config)

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("algorithms: [", "is not valid YAML: "),
            ("- MixUp", r"must contain arguments of the Trainer by name, got a list"),
            (
                "seed: !!python/object/apply:os.system ['touch hacked']",
                "is not valid YAML: could not determine a constructor",
            ),
            ("seed: 1\nseed: 2", "is not valid YAML: 'seed' is set twice"),
            ("seed: " + "[" * 5_000 + "]" * 5_000, "is not valid YAML: "),
        ],
    )
    def test_bad_file(self, from_config, tmp_path, monkeypatch, text, message):
        """The error names the file; tags of YAML that would run code raise, and so do repeated keys."""
        monkeypatch.chdir(tmp_path)
        Path("run.yaml").write_text(text)

        with pytest.raises((TypeError, ValueError), match=f"run.yaml {message}"):
            from_config("run.yaml")

        assert not Path("hacked").exists()

    @pytest.mark.parametrize("depth", [9, 0])
    def test_data_that_repeat_themselves(self, from_config, tmp_path, depth):
        """Nested aliases and a list that contains itself raise at once."""
        nested = "\n".join(f"  - &a{level + 1} [{', '.join([f'*a{level}'] * 9)}]" for level in range(depth))
        text = f"seed:\n  - &a0 [1]\n{nested}" if depth else "seed: &a [*a]"
        (tmp_path / "run.yaml").write_text(text)

        with pytest.raises(ValueError, match=r"seed has more than 10,000 entries, or contains itself"):
            from_config(tmp_path / "run.yaml")

    def test_without_pyyaml(self, from_config, tmp_path, monkeypatch):
        """The error names the extra to install."""
        monkeypatch.setitem(sys.modules, "yaml", None)
        (tmp_path / "run.yaml").write_text("seed: 1")

        with pytest.raises(ModuleNotFoundError, match=r"composer-trainer\[config\]"):
            from_config(tmp_path / "run.yaml")


class TestRegistry:
    @pytest.mark.parametrize(
        "name", ["os.system", "torch.optim.SGD", "builtins.eval", "print", "Algorithm", "__import__"]
    )
    @pytest.mark.parametrize("argument", ["model", "algorithms", "callbacks", "loggers", "optimizers", "schedulers"])
    def test_only_public_names(self, name, argument):
        """Paths of modules and other functions are not registered."""
        assert name not in registered(argument)

    def test_all_algorithms(self):
        """All public algorithms are registered, and nothing else of their module."""
        names = registered("algorithms")

        assert {"MixUp", "SAM"} < names.keys() < {*composer.algorithms.__all__}
        assert "SqueezeExcite2d" not in names

    def test_nothing_is_imported_by_a_name(self, from_config, tmp_path, monkeypatch):
        """A module whose name is in the file is not imported."""
        (tmp_path / "evil.py").write_text("raise SystemExit('imported')")
        monkeypatch.syspath_prepend(tmp_path)

        with pytest.raises(ValueError, match="callbacks must be of"):
            from_config({"callbacks": "evil"})

        assert "evil" not in sys.modules
