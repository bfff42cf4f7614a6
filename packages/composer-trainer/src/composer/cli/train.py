"""``composer train run.yaml --module task.py --set optimizers.AdamW.lr=1e-3``: train by a configuration.

The file has what :meth:`composer.Trainer.from_config` reads. What only code can make, such as the data, is returned by
the function ``arguments`` of a module of yours, which the command line names: no code is read from the file.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from composer.trainer import Trainer
from composer.trainer.reproducibility import seed_all
from composer.trainer.tools.config import read_config, read_value


def main(arguments: Sequence[str] | None = None) -> None:
    """Train, and print the result.

    Args:
        arguments: Those of the command line, without the name of the program; those of the process if None.

    Raises:
        SystemExit: An argument is missing or wrong; the reason is printed.
    """
    parser = _parser()
    chosen = parser.parse_args(arguments)
    try:
        overrides = {path: read_value(value) for path, value in chosen.overrides}
        settings = read_config(chosen.config, overrides)
    except (OSError, TypeError, ValueError) as error:
        parser.error(str(error))
    if isinstance(settings.get("seed"), int):
        seed_all(settings["seed"])  # before the module draws the weights of a model
    with Trainer.from_config(settings, **_arguments_of(chosen.module)) as trainer:
        result = trainer.fit()
    if trainer.state.rank == 0:
        print(result)  # noqa: T201


def _arguments_of(module: str) -> dict[str, Any]:
    """Return what the function ``arguments`` of a module returns, which is a file or has a name."""
    path = Path(module)
    sys.path.insert(0, str(path.parent.resolve() if path.suffix == ".py" else Path.cwd()))
    imported = importlib.import_module(path.stem if path.suffix == ".py" else module)
    found = getattr(imported, "__file__", None)
    if path.suffix == ".py" and (found is None or Path(found).resolve() != path.resolve()):
        raise ValueError(
            f"--module {module} has the name of {found or 'a module of Python'}, which is imported in its place: "
            "rename the file."
        )
    if not callable(getattr(imported, "arguments", None)):
        raise TypeError(
            f"{module} must have a function arguments() that returns further arguments of the Trainer by name, such as "
            "{'model': ..., 'train_dataloader': ...}."
        )
    given = imported.arguments()
    if not isinstance(given, dict):
        raise TypeError(f"arguments() of {module} must return a dictionary, got {type(given).__name__}.")
    return given


def _override(text: str) -> tuple[str, str]:
    path, separator, value = text.partition("=")
    if not separator or not path:
        raise argparse.ArgumentTypeError(f"must be of the form path=value, got {text!r}")
    return path, value


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="composer train",
        description="Train by a configuration. In several processes: composer -n 8 -m composer.cli.train run.yaml ...",
    )
    parser.add_argument("config", help="the YAML file with arguments of the Trainer")
    parser.add_argument(
        "--module", required=True, help="file or name of the module whose arguments() returns model and data"
    )
    parser.add_argument(
        "--set",
        dest="overrides",
        metavar="PATH=VALUE",
        type=_override,
        action="append",
        default=[],
        help="replace an entry of the file, such as optimizers.AdamW.lr=1e-3; may be given several times",
    )
    return parser


if __name__ == "__main__":
    main()
