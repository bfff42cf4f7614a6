"""Arguments of the trainer: errors are reported at construction, with remedies."""

import inspect
import logging

import attrs
import pytest
import torch

from composer.algorithms import MixUp
from composer.core import Algorithm, Event, Stage
from composer.loggers import InMemoryLogger
from composer.trainer import Trainer
from composer.trainer.settings.groups import Settings
from fixtures import make_classifier, small_run


class TestComponents:
    @pytest.mark.parametrize(
        ("options", "call"),
        [
            ({"schedulers": "cosine"}, r"such as CosineAnnealingScheduler\(\), got 'cosine'"),
            ({"optimizers": "AdamW"}, r"such as AdamW\(model\.parameters\(\)\), got 'AdamW'"),
            ({"optimizers": torch.optim.SGD}, r"such as AdamW\(model\.parameters\(\)\), got <class"),
            ({"callbacks": MixUp()}, r"callbacks must be Callback objects, got MixUp"),
            ({"loggers": "console"}, r"loggers must be LoggerDestination objects, got 'console'"),
        ],
    )
    def test_wrong_components(self, options, call):
        """The error names the correct call."""
        with pytest.raises(TypeError, match=call):
            small_run(**options)

    def test_the_first_error_is_raised(self):
        """Of several wrong arguments one is reported, as it is."""
        with pytest.raises(ValueError, match=r"^max_duration must be more than 0.*[^-]*$"):
            small_run(seed=-1, max_duration="0ep")

    def test_errors_have_no_side_effects(self):
        """Wrong arguments do not change generators and model."""
        model = make_classifier().double()
        torch.manual_seed(3)
        expected = torch.rand(1)
        torch.manual_seed(3)

        with pytest.raises(ValueError, match="max_duration"):
            small_run(model=model, max_duration="0ep", seed=5)

        assert torch.equal(torch.rand(1), expected)

    def test_class_of_an_algorithm(self):
        """A class instead of an instance raises an error with its call."""

        class Nothing(Algorithm):
            runs_at = {Event.INIT: Stage.LOSS}

            def apply(self, event, state, logger):
                pass

        with pytest.raises(TypeError, match=r"write Nothing\(\)"):
            small_run(algorithms=Nothing)


GIVEN = {
    "train_dataloader_label": "digits",
    "train_subset_num_batches": 3,
    "spin_dataloaders": False,
    "max_duration": "7ep",
    "scale_schedule_ratio": 0.5,
    "step_schedulers_every_batch": True,
    "eval_interval": "5ba",
    "eval_subset_num_batches": 2,
    "run_name": "first",
    "log_to_console": True,
    "console_stream": "stdout",
    "console_log_interval": "9ba",
    "log_traces": True,
    "load_strict_model_weights": False,
    "load_ignore_keys": ["state/callbacks"],
    "load_exclude_algorithms": ["EMA"],
    "save_folder": "runs",
    "save_filename": "ba{batch}",
    "save_latest_filename": "newest",
    "save_overwrite": True,
    "save_interval": "4ba",
    "save_weights_only": True,
    "save_ignore_keys": ["state/loggers"],
    "save_num_checkpoints_to_keep": 6,
    "save_metrics": True,
    "precision": "amp_bf16",
    "device_train_microbatch_size": 2,
    "accumulate_train_batch_on_tokens": True,
    "seed": 8,
    "dist_timeout": 60.0,
    "ddp_sync_strategy": "single_auto_sync",
    "python_log_level": "ERROR",
    "compile_config": {"backend": "eager"},
}
"""A value for each argument that needs nothing else, other than its default."""


class TestGroups:
    @pytest.mark.parametrize("name", GIVEN)
    def test_each_argument_arrives_under_its_name(self, tmp_path, monkeypatch, name):
        """What is given to an argument is logged for it and for no other: no group mixes up two of them."""
        monkeypatch.chdir(tmp_path)
        history, usual = InMemoryLogger(), {"progress_bar": False, "device": "cpu", "seed": 7}

        small_run(loggers=history, **{name: GIVEN[name]})

        assert history.hyperparameters["trainer"] == usual | {name: GIVEN[name]}

    @pytest.mark.parametrize(
        ("options", "words"),
        [
            ({"autoresume": True}, "autoresume=True looks for checkpoints"),
            ({"save_best": "eval/MulticlassAccuracy"}, "save_best chooses among the checkpoints in save_folder"),
        ],
    )
    def test_arguments_that_contradict_each_other(self, options, words):
        """Arguments that are valid by themselves, but not together, raise at construction."""
        with pytest.raises(ValueError, match=words):
            small_run(**options)

    def test_each_argument_belongs_to_one_group(self):
        """Each argument of the signature is used by one group, and shown with its type; one is of the dry run."""
        declared = inspect.signature(Trainer).parameters
        defaults = {name: one.default for name, one in declared.items()}

        groups = attrs.asdict(Settings.of(defaults | {"model": make_classifier()}), recurse=False).values()
        used = [field.alias for group in groups for field in attrs.fields(type(group)) if field.init]

        assert sorted([*used, "fast_dev_run"]) == sorted(declared)
        assert all(one.annotation is not inspect.Parameter.empty for one in declared.values())


class TestNames:
    @pytest.mark.parametrize(
        ("options", "begin"),
        [
            ({"max_duration": "ten epochs"}, "max_duration must be a number followed by a unit"),
            ({"max_duration": "1.5ep"}, "max_duration: value must be a whole number of epochs"),
            ({"max_duration": "10lightyears"}, "max_duration must be a number .*; got '10lightyears'"),
            ({"max_duration": 1.5}, "max_duration must be a Time or a string"),
            ({"eval_interval": "often"}, "eval_interval must be a number followed by a unit"),
            ({"eval_interval": "-1ep"}, r"eval_interval must be 0 \(never\) or more"),
            ({"save_interval": "often", "save_folder": "runs"}, "save_interval must be a number followed by a unit"),
            ({"save_interval": "-1ep", "save_folder": "runs"}, r"save_interval must be 0 \(never\) or more"),
            ({"save_num_checkpoints_to_keep": -5}, "save_num_checkpoints_to_keep must be -1"),
            ({"console_log_interval": "often"}, "console_log_interval must be a number followed by a unit"),
        ],
    )
    def test_constructor_parameters(self, options, begin):
        """An error has the constructor's parameter name, also if the value is used later."""
        with pytest.raises((TypeError, ValueError), match=f"^{begin}"):
            small_run(**options)

    @pytest.mark.parametrize(
        ("options", "begin"),
        [
            ({"duration": "soon"}, "duration must be a number followed by a unit"),
            ({"duration": "0ep"}, "duration must be more than 0"),
            ({"duration": "0.5dur"}, "duration cannot be a fraction of itself"),
            ({"eval_interval": "often", "eval_dataloader": []}, "eval_interval must be a number followed by a unit"),
        ],
    )
    def test_fit_parameters(self, options, begin):
        """Errors of fit() have its parameter names."""
        with pytest.raises(ValueError, match=f"^{begin}"):
            small_run().fit(**options)


class TestTypes:
    @pytest.mark.parametrize(
        ("options", "begin"),
        [
            ({"load_path": 5}, "load_path must be a string or a path, got 5"),
            ({"load_exclude_algorithms": 5}, "load_exclude_algorithms must be a string or a list of strings, got 5"),
            ({"profiler": 5}, "profiler must be a callback such as composer.profiler.Profiler, got 5"),
            ({"parallelism_config": "fsdp"}, "parallelism_config must be None or a dictionary, got str"),
            (
                {"parallelism_config": "fsdp", "save_folder": "runs"},
                "parallelism_config must be None or a dictionary, got str",
            ),
        ],
    )
    def test_wrong_types_raise(self, options, begin):
        """A value of the wrong type raises with the parameter's name."""
        with pytest.raises(TypeError, match=f"^{begin}"):
            small_run(**options)


class TestLogLevel:
    def test_messages_are_printed(self, capsys):
        """Messages from the level on are printed."""
        log = logging.getLogger("composer")
        try:
            small_run(python_log_level="info")

            logging.getLogger("composer.trainer").info("something happened")

            assert log.level == logging.INFO
        finally:
            log.setLevel(logging.NOTSET)
            log.handlers.clear()
