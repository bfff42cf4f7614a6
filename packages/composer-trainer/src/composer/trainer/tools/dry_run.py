"""``fast_dev_run``: a few batches of each kind, to find errors before a long training does."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs

from composer.core import Evaluator, evaluate_periodically
from composer.core.checks import as_list
from composer.trainer.evaluation.evaluate import EvalData, to_evaluators

if TYPE_CHECKING:
    from composer.trainer.settings.groups import Settings


def check_dry_run(fast_dev_run: int) -> int:
    """Return the number of batches of each kind; 0 for a usual run.

    Raises:
        ValueError: It is neither a flag nor a number of batches.

    Example:
        >>> check_dry_run(True), check_dry_run(3), check_dry_run(False)
        (1, 3, 0)
    """
    if not isinstance(fast_dev_run, int) or fast_dev_run < 0:
        raise ValueError(f"fast_dev_run must be False, True or a number of batches, got {fast_dev_run!r}.")
    return int(fast_dev_run)


def dry_run_settings(settings: Settings, batches: int) -> Settings:
    """Return the settings of a run of a few batches without checkpoints, saved models and files of loggers."""
    components, data, loading = settings.components, settings.evaluations.data, settings.loading
    callbacks = [one for one in as_list(components.callbacks) if not getattr(one, "saves_model", False)]
    return attrs.evolve(
        settings,
        components=attrs.evolve(components, callbacks=callbacks, loggers=None, profiler=None),
        data=attrs.evolve(settings.data, train_subset_num_batches=batches),
        evaluations=attrs.evolve(
            settings.evaluations, eval_dataloader=None if data is None else short_evaluators(data, batches)
        ),
        saving=attrs.evolve(settings.saving, save_folder=None, save_best=None),
        loading=attrs.evolve(
            loading,
            # A complete run would have nothing left to train.
            load_path=None if loading.path == "latest" else loading.path,
            load_weights_only=True,
            autoresume=False,
        ),
    )


def short_evaluators(data: EvalData, batches: int) -> list[Evaluator]:
    """Return the evaluators of one or several data sets, each for a few batches after every epoch."""
    every_epoch = evaluate_periodically("1ep")
    return [attrs.evolve(one, subset_num_batches=batches, eval_interval=every_epoch) for one in to_evaluators(data)]
