"""``composer train --config run.yaml --optimizers.lr 1e-3``: train by arguments that jsonargparse reads.

They are those of the :class:`~composer.Trainer`, in files and on the command line. A class or function is given by
its ``class_path`` and its ``init_args``, is imported and called: a configuration is code.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch.nn import Module
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from composer.core import DataSpec, Evaluator, Interval, Time
from composer.loggers.products import import_product
from composer.trainer import Trainer
from composer.trainer.reproducibility import seed_all

_TYPES = {
    "model": Module | None,
    "train_dataloader": DataLoader | DataSpec | None,
    "eval_dataloader": DataLoader | DataSpec | Evaluator | list[Evaluator] | None,
    "optimizers": Callable[[Iterable], Optimizer] | None,
}
"""The types of what a configuration constructs, or the caller passes as objects."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Train, and print the result.

    Args:
        arguments: Those of the command line, without the name of the program; those of the process if None.

    Raises:
        SystemExit: An argument is missing or wrong; the reason is printed.
    """
    with make_trainer(arguments) as trainer:
        result = trainer.fit()
    if trainer.state.rank == 0:
        print(result)  # noqa: T201


def _to_time(value: Any) -> Time:
    # jsonargparse passes on a default as the dictionary of its fields.
    return Time(**value) if isinstance(value, Mapping) else Time.from_timestring(value)


def make_trainer(arguments: Sequence[str] | None = None, **given: Any) -> Trainer:
    """Return a trainer from the arguments of a command line.

    Args:
        arguments: Those of the command line, without the name of the program; those of the process if None.
        given: Arguments of the Trainer as objects, which replace those of the command line.

    Raises:
        ModuleNotFoundError: jsonargparse is not installed, ``pip install "composer-trainer[config]"``.
        SystemExit: An argument is missing or wrong; the reason is printed.

    Example:
        >>> import torch
        >>> from composer.models import ComposerClassifier
        >>> model = ComposerClassifier(torch.nn.Linear(4, 2), num_classes=2)
        >>> data = [(torch.rand(8, 4), torch.zeros(8, dtype=torch.long))]
        >>> options = ["--max_duration=2ep", "--optimizers=torch.optim.SGD", "--optimizers.lr=0.1"]
        >>> make_trainer(options, model=model, train_dataloader=data, progress_bar=False).fit().steps
        2
    """
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, here)  # as python -m does, so that a configuration may name the modules there
    jsonargparse = import_product("jsonargparse", "config")
    # Strings such as "20ba", instead of the fields of the class.
    jsonargparse.set_parsing_settings(subclasses_enabled=[Time, Interval])
    jsonargparse.typing.register_type(Time, str, _to_time, fail_already_registered=False)
    jsonargparse.typing.register_type(Interval, str, Interval, fail_already_registered=False)
    parser = jsonargparse.ArgumentParser(
        prog="composer train",
        description="Train. In several processes: composer -n 8 -m composer.cli.train --config run.yaml ...",
    )
    parser.add_argument("--config", action="config", help="a file in YAML with arguments of the Trainer")
    parser.add_class_arguments(Trainer, skip={*_TYPES})
    for name, kind in _TYPES.items():
        parser.add_argument(f"--{name}", type=kind, default=None)
    chosen = parser.parse_args(arguments)
    if chosen.model is None and "model" not in given:
        parser.error("model must be given, such as --model task.make_model.")
    for name in given:
        chosen.pop(name, None)
    if chosen.get("seed") is not None:
        seed_all(chosen.seed)  # the Trainer seeds when the model exists, and its weights are drawn here
    built = {**vars(parser.instantiate(chosen)), **given}
    del built["config"]
    if chosen.get("optimizers") is not None:
        make, model = built["optimizers"], built["model"]
        # A function may take the model, as muon_with_adamw does.
        built["optimizers"] = make(model if "model" in inspect.signature(make).parameters else model.parameters())
    return Trainer(**built)


if __name__ == "__main__":
    main()
