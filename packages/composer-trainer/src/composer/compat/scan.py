"""Find the lines of a program that have to change, by reading its syntax tree; nothing is run."""

import ast
import functools
import importlib
import inspect
import json
import re
import tokenize
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import composer
from composer.compat.table import ARGUMENTS, ATTRIBUTES, entries, former_modules
from composer.core.base import OF_COMPOSER

UNREADABLE = "the file"
"""What a finding names instead of a former name if a file could not be read."""
_LARGEST = 2**20
"""Bytes of a program; longer files are data, and take minutes."""
_MAGIC = re.compile(r"(\s*)(?:[%!?]|[\w.]+\?|[\w.]+\s*=\s*[%!])")
"""The beginning of a line of a notebook that is a command of IPython, if it is no Python."""
_CELL_MAGIC = re.compile(r"\s*%%(\w*).*")
"""The beginning of a cell that is given to a command of IPython."""
_RUNS_PYTHON = {"capture", "prun", "time", "timeit"}
"""Those commands that run the cell as Python."""
_YAML = (".yaml", ".yml")
_NAME = re.compile(r"(?<![\w./-])composer(?:\.\w+)+(?![\w/-])")
_OTHER_NUMBERS = {
    re.compile(r"composer\.optim\.(scheduler\.)?(?!WarmupStable)\w+Scheduler"): (
        "each batch has its own rate, not that of the one before; composer.compat.lag_schedules gives the former ones"
    ),
    re.compile(r"composer\.metrics\.Dice"): "0 to 1 over all classes, not 0 to 100 over those after the first",
    re.compile(r"composer\.metrics\.(CrossEntropy|LossMetric)"): "the mean over samples, not of the means of batches",
}
"""What works with other numbers, and with which."""
_INTERPOLATION = re.compile(r"\$\{[^}]*\}")
"""A value of OmegaConf that is read elsewhere."""
_FILES = re.compile(r"torch\.load|(os\.path\.)?(isfile|getsize)|os\.(remove|unlink)|shutil\.copy\w*")
_OF_CHECKPOINT = re.compile(r"latest-rank|ckpt|checkpoint", re.IGNORECASE)
_FOLDER = (
    "a checkpoint is a file only if its name ends in .pt: save_filename='ep{epoch}-ba{batch}.pt', "
    "save_latest_filename='latest-rank{rank}.pt'"
)
_NOTHING = "not available here, and without a known replacement"
_BLOCK = re.compile(r"[\s-]*[\"']?(algorithms|callbacks|loggers)[\"']?:")


class Finding(NamedTuple):
    """A line to change.

    Attributes:
        line: Its number, from 1.
        former: The name or argument in it.
        change: What to write instead.
        works: Whether the line works unchanged, with a ``DeprecationWarning``.
        has_other_numbers: Whether it works without a warning, and the training has other numbers.
        cell: The number of the cell of a notebook, from 1; 0 in other files.

    Example:
        >>> print(Finding(3, "composer.utils.dist", "from composer import distributed as dist", works=True))
        3: composer.utils.dist -> from composer import distributed as dist (works, with a warning)
    """

    line: int
    former: str
    change: str
    works: bool
    has_other_numbers: bool = False
    cell: int = 0

    def __str__(self) -> str:
        kind = "other numbers" if self.has_other_numbers else "a warning"
        place = f"cell {self.cell}:{self.line}" if self.cell else f"{self.line}"
        return f"{place}: {self.former} -> {self.change}{f' (works, with {kind})' if self.works else ''}"


def scan(path: str | Path) -> Iterator[tuple[Path, Finding]]:
    r"""Yield the findings in a file, or in all Python and YAML files below a folder, sorted by file and line.

    In YAML these are full names (``_target_: composer.utils.dist``), and names of algorithms, callbacks and loggers in
    blocks of these titles that are not available; ``${...}`` is skipped. Schedulers of ``composer.optim`` work, and are
    found because of other learning rates: see :func:`composer.compat.lag_schedules`; so are metrics with other numbers.
    Findings in a notebook have the number of the cell; commands of IPython are skipped, also cells that are given to
    one that does not run them as Python. A Python file that cannot be read (it is no valid Python, or longer than 1
    MiB) has one finding with the reason, and the others are read. Folders, pipes and devices with names of files are no
    files. What a program imports only for type checkers, or can do without (``except ImportError``), is found only if
    it works.

    Raises:
        FileNotFoundError: There is no such file or folder.

    Example:
        >>> import pathlib, tempfile
        >>> program = pathlib.Path(tempfile.mkdtemp()) / "train.py"
        >>> _ = program.write_text("from composer.utils import dist\n")
        >>> [str(finding) for _, finding in scan(program)]
        ['1: composer.utils.dist -> from composer import distributed as dist (works, with a warning)']
    """
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist.")
    inside = (one for one in path.rglob("*") if one.suffix in {".py", ".ipynb", *_YAML} and one.is_file())
    for file in sorted(inside) if path.is_dir() else [path]:
        yield from ((file, finding) for finding in _scan_file(file))


def _scan_file(file: Path) -> list[Finding]:
    if file.suffix in _YAML and file.is_file():
        return _scan_yaml(file.read_text("utf-8", "replace")) if file.stat().st_size <= _LARGEST else []
    if not file.is_file() or file.stat().st_size > _LARGEST:
        return [_unreadable("it is no file of at most 1 MiB")]
    try:
        if file.suffix == ".ipynb":
            return _scan_notebook(json.loads(file.read_text("utf-8")), str(file))
        with tokenize.open(file) as source:
            return scan_source(source.read(), str(file))
    except (OSError, SyntaxError, ValueError, LookupError, TypeError, RecursionError, MemoryError) as error:
        return [_unreadable(" ".join(str(error).split()) or type(error).__name__, getattr(error, "lineno", None))]


def _scan_notebook(content: Any, filename: str) -> list[Finding]:
    """Return the findings in the cells of a notebook, which are counted from 1; an invalid cell is one of them."""
    visitor = _Visitor()
    for number, cell in enumerate(content["cells"], 1):
        source = "".join(cell["source"])
        while (magic := _CELL_MAGIC.match(source)) and magic[1] in _RUNS_PYTHON:
            source = "\n" * magic[0].count("\n") + source[magic.end() :]
        if cell["cell_type"] != "code" or magic:
            continue
        visitor.cell = number
        try:
            visitor.visit(_parse_cell(source, filename))
        except (SyntaxError, ValueError) as error:
            line = getattr(error, "lineno", None)
            visitor.findings.append(_unreadable(str(error), line)._replace(cell=number))
    return sorted(visitor.all_findings(), key=lambda finding: (finding.cell, finding))


def _parse_cell(source: str, filename: str) -> ast.Module:
    """Parse a cell of a notebook with ``pass`` in place of commands of IPython, which are errors of the syntax."""
    lines = source.split("\n")
    while True:
        try:
            return ast.parse("\n".join(lines), filename)
        except SyntaxError as error:
            at = min(error.lineno or 1, len(lines)) - 1
            while at and lines[at - 1].endswith("\\"):
                at -= 1
            magic = _MAGIC.match(lines[at])
            if magic is None:
                raise
            while lines[at].endswith("\\") and at + 1 < len(lines):
                lines[at] = ""
                at += 1
            lines[at] = f"{magic[1]}pass"


def _scan_yaml(source: str) -> list[Finding]:
    visitor, title, depth = _Visitor(), "", -1
    for number, line in enumerate(source.splitlines(), 1):
        text = _INTERPOLATION.sub("", re.sub(r"(^|\s)#.*", "", line))
        for name in _NAME.findall(text):
            visitor.check(number, name)
        indent = len(text) - len(text.lstrip(" "))
        if block := _BLOCK.match(text):
            title, depth = block[1], indent
        elif text.strip() and (indent < depth or (indent == depth and not text.lstrip().startswith("-"))):
            title = ""
        for word in re.findall(r"\w+", text) if title else ():
            former = _missing_components().get((title, word.replace("_", "").lower()))
            if former is not None:
                visitor.check(number, former)
    return sorted(visitor.all_findings())


@functools.cache
def _missing_components() -> dict[tuple[str, str], str]:
    """Return the former names of components that are not available, by package and name in small letters."""
    split = [(former, former.split(".")) for former, entry in entries().items() if not entry.works]
    return {(parts[1], parts[2].replace("_", "").lower()): former for former, parts in split if len(parts) == 3}


def _unreadable(reason: str, line: int | None = None) -> Finding:
    return Finding(line or 0, UNREADABLE, f"cannot be read: {reason}", works=False)


def scan_source(source: str, filename: str = "<source>") -> list[Finding]:
    r"""Return the findings in the source of a program, sorted by line.

    Args:
        source: The program.
        filename: Its name in errors.

    Raises:
        SyntaxError: It is not valid Python.

    Example:
        >>> for finding in scan_source("from composer import Trainer\nTrainer(grad_accum=2)"):
        ...     print(finding)
        2: Trainer(grad_accum=...) -> device_train_microbatch_size=..., the samples of a part of the batch
    """
    visitor = _Visitor()
    visitor.visit(ast.parse(source, filename))
    return sorted(visitor.all_findings())


class _Visitor(ast.NodeVisitor):
    def __init__(self) -> None:
        self.findings: list[Finding] = []
        self.cell = 0
        self._imported: dict[str, str] = {}
        self._of_files: list[Finding] = []
        self._names_files = False

    def all_findings(self) -> set[Finding]:
        """Return the findings; those of files only if the program gives checkpoints no names of files."""
        return {*self.findings, *(() if self._names_files else self._of_files)}

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            local = alias.asname or alias.name.partition(".")[0]
            self._imported[local] = alias.name if alias.asname else local
            self.check(alias.lineno, alias.name)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        if node.level or node.module is None:
            return
        for alias in node.names:
            name = node.module if alias.name == "*" else f"{node.module}.{alias.name}"
            self._imported[alias.asname or alias.name] = name
            self.check(alias.lineno, name)
            if alias.name == "*" and name in former_modules():
                self._add(alias.lineno, f"{name}.*", "import the names that are used, one by one", works=True)

    def visit_Try(self, node: ast.Try) -> None:
        start = len(self.findings)
        for statement in node.body:
            self.visit(statement)
        handlers = [each for each in node.handlers if not any(isinstance(one, ast.Raise) for one in ast.walk(each))]
        types = [one for each in handlers for one in ast.walk(each.type or ast.Name("Exception"))]
        if {getattr(one, "id", "") for one in types} & {"ImportError", "ModuleNotFoundError", "Exception"}:
            self._forget_missing(start)
        for part in (*node.handlers, *node.orelse, *node.finalbody):
            self.visit(part)

    def visit_If(self, node: ast.If) -> None:
        self.visit(node.test)
        start = len(self.findings)
        for statement in node.body:
            self.visit(statement)
        if re.fullmatch(r"(\w+\.)?TYPE_CHECKING", ast.unparse(node.test)):
            self._forget_missing(start)
        for statement in node.orelse:
            self.visit(statement)

    def _forget_missing(self, start: int) -> None:
        """Remove findings that the program handles: names that it can do without."""
        self.findings[start:] = [finding for finding in self.findings[start:] if finding.works]

    def visit_Attribute(self, node: ast.Attribute) -> None:
        base, name = self._names(node)
        if name is None:
            self.generic_visit(node)
        else:
            self.check(node.lineno, name, base)

    def visit_Constant(self, node: ast.Constant) -> None:
        self._names_files |= isinstance(node.value, str) and re.search(r"\{.*\.pt$", node.value) is not None

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        for base in node.bases:
            name = (self._names(base)[1] or "").rpartition(".")[2]
            uncalled = OF_COMPOSER.get(name, {})
            for method in node.body:
                if isinstance(method, ast.FunctionDef) and method.name in uncalled:
                    self._add(method.lineno, f"{name}.{method.name}", f"override {uncalled[method.name]}, instead")
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        _, name = self._names(node.func)
        method = node.func.attr if isinstance(node.func, ast.Attribute) and name is None else None
        last = method or (name or "").rpartition(".")[2]
        is_ours = name is not None and name.startswith("composer.")
        arguments = ARGUMENTS.get(last, {}) if is_ours or (method and self._uses_composer()) else {}
        for keyword in node.keywords:
            if keyword.arg is None or keyword.arg not in arguments:
                continue
            self._add(keyword.value.lineno, f"{last}({keyword.arg}=...)", arguments[keyword.arg], works=False)
        accepted = _arguments_of(name) if is_ours and name is not None else None
        for keyword in node.keywords:
            if accepted is not None and keyword.arg and keyword.arg not in accepted | arguments.keys():
                self._add(keyword.value.lineno, f"{last}({keyword.arg}=...)", f"not an argument: see help({name})")
        function, arguments_text = ast.unparse(node.func), " ".join(map(ast.unparse, node.args))
        if _OF_CHECKPOINT.search(arguments_text) and _FILES.fullmatch(function) and self._uses_composer():
            self._of_files.append(Finding(node.lineno, f"{function}(...)", _FOLDER, works=False, cell=self.cell))
        is_of_device = isinstance(node.func, ast.Attribute) and ast.unparse(node.func.value).lower().endswith("device")
        if method is not None and method in ATTRIBUTES and is_of_device and self._uses_composer():
            self._add(node.func.lineno, f".{method}()", ATTRIBUTES[method], works=True)
        self.generic_visit(node)

    def visit_Expr(self, node: ast.Expr) -> None:
        name = self._names(node.value.func)[1] if isinstance(node.value, ast.Call) else None
        if name is not None and name.startswith("composer.") and name.endswith(".batch_set"):
            self._add(node.lineno, "batch_set(...)", "state.batch = batch_set(...), which returns a changed copy")
        self.generic_visit(node)

    def _uses_composer(self) -> bool:
        return any(name.partition(".")[0] == "composer" for name in self._imported.values())

    def _names(self, node: ast.expr) -> tuple[str, str | None]:
        """Return the imported name that an expression begins with, and the full name; None if it is not imported."""
        parts: list[str] = []
        while isinstance(node, ast.Attribute):
            parts.append(node.attr)
            node = node.value
        if not isinstance(node, ast.Name) or node.id not in self._imported:
            return "", None
        base = self._imported[node.id]
        return base, ".".join([base, *reversed(parts)])

    def check(self, line: int, name: str, base: str = "") -> None:
        """Add a finding if a name below ``composer``, or its beginning, is a former one or does not exist.

        What the import of ``base`` reported already is not reported again.
        """
        if name != "composer" and not name.startswith("composer."):
            return
        parts = name.split(".")
        beginnings = [".".join(parts[:length]) for length in range(2, len(parts) + 1)]
        known = [entries()[beginning] for beginning in beginnings if beginning in entries()]
        entry = next((one for one in known if not one.works), known[-1] if known else None)
        if entry is None:
            missing = _first_missing(name)
            for pattern, numbers in _OTHER_NUMBERS.items() if missing is None else ():
                if pattern.fullmatch(name):
                    self.findings.append(Finding(line, name, numbers, True, has_other_numbers=True, cell=self.cell))
            if missing is not None and not f"{base}.".startswith(f"{missing}."):
                self._add(line, missing, _NOTHING)
            return
        if entry.name is None and entry.module is not None and _first_missing(name.replace(entry.former, entry.module)):
            self._add(line, name, _NOTHING)
            return
        imported = entries().get(base)
        is_covered = f"{base}.".startswith(f"{entry.former}.") or (
            imported is not None and imported.name is None and imported.module == entry.module
        )
        if not is_covered:
            self._add(line, entry.former, entry.change, works=entry.works)

    def _add(self, line: int, former: str, change: str, *, works: bool = False) -> None:
        self.findings.append(Finding(line, former, change, works, cell=self.cell))


@functools.cache
def _arguments_of(name: str) -> frozenset[str] | None:
    """Return the arguments of a class or function of this library; None if they are unknown, or any are accepted."""
    entry = entries().get(name)
    if entry is not None and not (entry.works and entry.name):
        return None
    module, _, last = name.rpartition(".") if entry is None else (entry.module or "", "", entry.name or "")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            parameters = inspect.signature(getattr(importlib.import_module(module), last)).parameters
    except (AttributeError, ImportError, TypeError, ValueError):
        return None
    is_open = any(one.kind is one.VAR_KEYWORD for one in parameters.values())
    return None if is_open else frozenset(parameters)


def _first_missing(name: str) -> str | None:
    """Return the beginning of a name that does not exist in this library; None if it exists."""
    found: Any = composer
    path, *parts = name.split(".")
    for part in parts:
        if not isinstance(found, ModuleType):
            return None  # attributes of classes and functions are not checked
        path = f"{path}.{part}"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                found = getattr(found, part)
            except (AttributeError, ImportError):
                try:
                    found = importlib.import_module(path)
                except ImportError:
                    return path
    return None
