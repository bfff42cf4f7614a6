"""``composer train --config run.yaml --optimizers.lr 1e-3``: train by arguments that jsonargparse reads.

They are those of the :class:`~composer.Trainer`, in files and on the command line. A class or function is given by
its ``class_path`` and its ``init_args``, is imported and called. The command line is trusted. The files are not: they
name only what :data:`TRUSTED` contains, the modules in the working directory, and the packages that the command line
names, also by ``--trust``.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.util
import inspect
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
TRUSTED = (
    "composer",
    "torch.nn",
    "torch._C._nn",
    "torch.optim",
    "torch.utils.data",
    "torchvision",
    "torchaudio",
    "torchmetrics",
    "torchdata",
    "torchao",
    "timm",
    "transformers",
    "peft",
    "kornia",
)
"""What a configuration may name: packages, and modules of torch, that train. Each contains what is in it."""
DENIED = (
    "composer.ablation",
    "composer.cli",
    "composer.compat",
    "transformers.dynamic_module_utils",
    "transformers.models.auto",
    "transformers.pipelines",
    "transformers.utils",
)
"""Modules in these that import by name, run commands, or load code of others."""
_FUNCTION = (
    "name a function in a module of this folder, which calls it and states what it returns, such as "
    "`def make_model(name: str) -> HuggingFaceModel:`, by class_path: task.make_model, init_args: {name: ...}."
)
_NAME = re.compile(r"[^\W\d]\w*(?:\.[^\W\d]\w*)+")


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
    options = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    options.add_argument("--trust", action="append", default=[])
    chosen, others = options.parse_known_args(arguments)
    with _only_trusted([*TRUSTED, *_modules_here(), *_names_among(others), *chosen.trust]):
        return _make_trainer(others, given)


def _modules_here() -> Iterator[str]:
    """Yield the modules in the working directory, without those whose name leads to an installed one."""
    here = Path.cwd()
    for name in {path.stem for path in here.iterdir() if path.stem.isidentifier()}:
        with contextlib.suppress(ImportError, ValueError):
            if (spec := importlib.util.find_spec(name)) is not None:
                places = [spec.origin] if spec.has_location else spec.submodule_search_locations
                if {*(places or [None])} <= {str(here / path) for path in (f"{name}.py", f"{name}/__init__.py", name)}:
                    yield name


def _names_among(arguments: Iterable[str]) -> Iterator[str]:
    """Yield the classes and functions that the command line names, and packages other than those of ``TRUSTED``."""
    partly = {name.partition(".")[0] for name in TRUSTED}
    for argument in arguments:
        value = argument.partition("=")[2] if argument.startswith("--") else argument
        # Not those of files, whose name another person may have chosen.
        found = _NAME.findall(value) if value[:1] in {"{", "["} else [value] if _NAME.fullmatch(value) else []
        for name in found if not Path(value).exists() else []:
            yield from {name, name if (package := name.partition(".")[0]) in partly else package}


@contextlib.contextmanager
def _only_trusted(names: Iterable[str]) -> Iterator[None]:
    """Let jsonargparse import only these names, which it compares also with where an object is defined."""
    jsonargparse = import_product("jsonargparse", "config")
    settings = importlib.import_module("jsonargparse._common").parsing_settings  # of the process
    before = dict(settings)
    try:
        jsonargparse.set_parsing_settings(import_path_denylist=["*", *DENIED], import_path_allowlist=[*names])
        yield
    finally:
        settings.update(before)


def _error_of_trust(message: str, arguments: Sequence[str]) -> str:
    """Return an error of jsonargparse, replaced by a sentence if a name is not trusted, or a function has no type."""
    refused = re.findall(r"Importing '(.+?)' is not allowed", message)
    if not refused:
        function = re.search(r"Import path (\S*\.[a-z_]\w*) does not correspond to a subclass of (\S+)", message)
        return (
            message if function is None else f"{function[1]} does not state that it returns {function[2]}: {_FUNCTION}"
        )
    name = next((name for name in refused if not Path(name).exists()), refused[0])  # a nested file is no name
    key = re.search(r'key "(.+?)"', message)
    package, _, rest = name.partition(".")
    is_partly = any(one.partition(".")[0] == package for one in TRUSTED)
    files = [value for one in arguments if Path(value := one.rpartition("=")[2]).is_file()]
    reason = f"it is neither in a module of this folder nor in {', '.join(TRUSTED)}"
    remedy = (
        "If you trust who wrote this, add --trust "
        f"{name.rpartition('.')[0] if is_partly and rest else package} to the command line."
    )
    if denied := [one for one in DENIED if f"{name}.".startswith(f"{one}.")]:
        reason, remedy = f"{denied[0]} may load code of others", f"{_FUNCTION[0].upper()}{_FUNCTION[1:]}"
    return (
        f"{', '.join(files) or 'The configuration'}: {key[1] if key else 'a key'} leads to {name}, which is not "
        f"imported, because {reason}. {remedy}"
    )


def _make_trainer(arguments: Sequence[str], given: dict[str, Any]) -> Trainer:
    jsonargparse = import_product("jsonargparse", "config")
    # Strings such as "20ba", instead of the fields of the class.
    jsonargparse.set_parsing_settings(subclasses_enabled=[Time, Interval], instantiate_subclass_spec_in_any=False)
    jsonargparse.typing.register_type(Time, str, _to_time, fail_already_registered=False)
    jsonargparse.typing.register_type(Interval, str, Interval, fail_already_registered=False)
    parser = jsonargparse.ArgumentParser(
        prog="composer train",
        description="Train. In several processes: composer -n 8 -m composer.cli.train --config run.yaml ... "
        "A file names only what trains and modules of this folder; each --trust PACKAGE allows another package.",
        exit_on_error=False,
    )
    parser.add_argument("--config", action="config", help="a file in YAML with arguments of the Trainer")
    parser.add_class_arguments(Trainer, skip={*_TYPES})
    for name, kind in _TYPES.items():
        parser.add_argument(f"--{name}", type=kind, default=None)
    try:
        chosen = parser.parse_args(arguments)
    except argparse.ArgumentError as error:
        parser.exit_on_error = True
        parser.error(_error_of_trust(str(error), arguments))
    parser.exit_on_error = True
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
