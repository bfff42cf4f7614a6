"""Names of other trainers, and misspelled ones, are answered with suggestions."""

import re

import pytest

from composer.trainer import Trainer
from fixtures import make_classifier, small_run
from fixtures.processes import run_processes


class TestConstructor:
    @pytest.mark.parametrize(
        ("name", "answer"),
        [
            ("max_epochs", "use max_duration='10ep'"),  # Lightning
            ("accumulate_grad_batches", "use device_train_microbatch_size"),
            ("gradient_clip_val", "use algorithms=GradientClipping"),
            ("num_train_epochs", "use max_duration='10ep'"),  # Transformers
            ("max_steps", "use max_duration='1000ba'"),
            ("output_dir", "use save_folder"),
            ("mixed_precision", "use precision, which is 'amp_bf16'"),  # Accelerate
            ("grad_accum", "use device_train_microbatch_size"),  # MosaicML Composer, before
            ("fsdp_config", "use parallelism_config="),
            ("deepspeed_config", "use parallelism_config="),
            ("optimizer", "use optimizers."),
            ("args", "use arguments of the Trainer, such as max_duration"),
            ("metrics", "use the model, such as ComposerClassifier(..., val_metrics="),
            ("train_dataloder", "did you mean 'train_dataloader'?"),
            ("Max_Duration", "did you mean 'max_duration'?"),
            ("eval_subset_num_batch", "did you mean 'eval_subset_num_batches'?"),
            ("xyz", "see help(Trainer)."),
        ],
    )
    def test_unknown_name(self, name, answer):
        """The error states the argument and the alternative."""
        with pytest.raises(TypeError) as raised:
            small_run(**{name: 3})

        assert str(raised.value).startswith(f"Trainer has no argument '{name}': {answer}")

    def test_positional_arguments(self):
        """The error for Trainer(model) shows the correct call."""
        with pytest.raises(TypeError, match=r"Trainer takes its arguments by name, such as model=\.\.\., got 1"):
            Trainer(make_classifier())

    @pytest.mark.parametrize(
        ("name", "answer"),
        [("train", "use fit()."), ("validate", "use eval()."), ("predct", "did you mean 'predict'?")],
    )
    def test_methods(self, name, answer):
        """A missing method is answered with the one here."""
        with pytest.raises(AttributeError, match=re.escape(f"'Trainer' object has no attribute '{name}'; {answer}")):
            getattr(small_run(), name)


class TestMethods:
    @pytest.mark.parametrize(
        ("method", "name", "answer"),
        [
            ("fit", "epochs", "use max_duration='10ep' of the Trainer, or fit(duration='10ep')."),
            ("fit", "max_duration", "give it to the Trainer; did you mean 'duration'?"),
            ("fit", "save_folder", "give it to the Trainer."),
            ("fit", "durations", "did you mean 'duration'?"),
            ("fit", "xyz", "see help(Trainer.fit)."),
            ("eval", "dataloader", "did you mean 'eval_dataloader'?"),
            ("eval", "eval_interval", "give it to the Trainer."),
        ],
    )
    def test_unknown_name(self, method, name, answer):
        """The error suggests arguments of the method and of the constructor."""
        with pytest.raises(TypeError) as raised:
            getattr(small_run(), method)(**{name: 3})

        assert str(raised.value) == f"{method}() has no argument '{name}': {answer}"


class TestPrecision:
    @pytest.mark.parametrize(
        ("precision", "actual"),
        [
            ("bf16-mixed", "amp_bf16"),
            ("bf16", "amp_bf16"),
            ("16-mixed", "amp_fp16"),
            ("fp16", "amp_fp16"),
            (16, "amp_fp16"),
            ("32-true", "fp32"),
            (32, "fp32"),
            ("no", "fp32"),
            ("fp8", "amp_fp8"),
            ("amp_bf61", "amp_bf16"),
        ],
    )
    def test_name_of_another_library(self, precision, actual):
        """The constructor and fit() suggest the equivalent name."""
        for use in (lambda: small_run(precision=precision), lambda: small_run().fit(precision=precision)):
            with pytest.raises(ValueError, match=rf"precision must be one of .*; did you mean '{actual}'\?"):
                use()


ONLY_ONE = """
import os, sys
import torch
from composer import Trainer
from composer.models import ComposerClassifier

method, rank = sys.argv[1], int(os.environ["RANK"])
model = ComposerClassifier(torch.nn.Linear(4, 2), num_classes=2)
trainer = Trainer(model=model, device="cpu", progress_bar=False, dist_timeout=60)
batches = [(torch.ones(2, 4), torch.zeros(2, dtype=torch.long))]
if rank == 1:
    os._exit(0)
try:
    getattr(trainer, method)("checkpoint" if method == "save_checkpoint" else batches)
except RuntimeError as error:
    print(*error.__notes__)
"""


@pytest.mark.parametrize("method", ["save_checkpoint", "eval", "predict"])
def test_called_by_one_process(tmp_path, method):
    """The error of the connection, here as the other one has ended, has a note that all must call the method."""
    (tmp_path / "program.py").write_text(ONLY_ONE)

    first, second = run_processes(tmp_path / "program.py", 2, method, cwd=tmp_path)

    assert f"it has not called {method}(), which all processes must call, not only that of rank 0." in first
    assert not second
