"""Find the lines of a program that have to change, by reading its syntax tree; nothing is run."""

import ast
import functools
import importlib
import inspect
import itertools
import json
import re
import tokenize
import warnings
from collections.abc import Iterator
from fnmatch import fnmatch
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
_NAME = re.compile(r"(?<![\w./-])composer(?:\.\w+)++(?![/-]|\s*[:=])")
_TARGET = re.compile(r"_target_[\"']?:\s*[\"']?(composer(?:\.\w+)+)")
_KEY = re.compile(r"([ -]*)[\"']?(\w+)[\"']?:(?=\s|$)")
_KEY_IN_BRACES = re.compile(r"[{,]\s*[\"']?([^\W_]\w*)[\"']?\s*:")
_OTHER_NUMBERS = {
    re.compile(r"composer\.optim\.(scheduler\.)?(?!WarmupStable)\w+Scheduler"): (
        "each batch has its own rate, not that of the one before; composer.compat.lag_schedules gives the former ones"
    ),
    re.compile(r"composer\.metrics\.Dice"): "0 to 1 over all classes, not 0 to 100 over those after the first",
    re.compile(r"composer\.metrics\.(CrossEntropy|LossMetric)"): "the mean over samples, not of the means of batches",
}
"""What works with other numbers, and with which."""
_INTERPOLATION = re.compile(r"\$\{[^{}]*\}")
"""A value of OmegaConf that is read elsewhere; it may contain others."""
_FILES = re.compile(
    r"torch\.load|open|(os\.path\.)?(isfile|getsize)|os\.(remove|unlink)|shutil\.copy(file|2)?|"
    r".+\.(is_file|unlink|read_bytes)",
    re.DOTALL,
)
_OF_CHECKPOINT = re.compile(r"latest-rank|ckpt|checkpoint", re.IGNORECASE)
_OTHER_FILES = (".bin", ".json", ".safetensors")
_FOLDER = "a checkpoint is a file only if its name ends in .pt: save_latest_filename='latest-rank{rank}.pt'"
_MAY_BE_FOLDER = f"works if it is a file; {_FOLDER}"
_IS_NAME = re.compile(r"(.*\W)?save_(latest_)?filename\W*")
"""The argument, key, attribute or variable that has the name of checkpoints."""
_TEMPLATE = re.compile(r"\S*\{(epoch|batch|rank)\}\S*\.pt")
"""A name of checkpoints that is a file; where the value is filled in by an f-string, it is none."""
_NAME_IN_YAML = re.compile(r"(\bsave_(latest_)?filename[\"']?:\s*|\{(epoch|batch|rank)\})\S*\.pt[\"']?\s*([,}]|$)")
_BRACES = re.compile(r"\{[^{}]*\}")
_OWN = re.compile(r"^\s*class (\w+)|\bregister\w*\(\s*[\"'](\w+)", re.MULTILINE)
"""A component that a program defines or registers, which configurations may name."""
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
        is_uncertain: Whether ``change`` states on what it depends that the line works, which then counts as working.

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
    is_uncertain: bool = False

    def __str__(self) -> str:
        kind = "other numbers" if self.has_other_numbers else "a warning"
        place = f"cell {self.cell}:{self.line}" if self.cell else f"{self.line}"
        works = f" (works, with {kind})" if self.works and not self.is_uncertain else ""
        return f"{place}: {self.former} -> {self.change}{works}"


def scan(path: str | Path) -> Iterator[tuple[Path, Finding]]:
    r"""Yield the findings in a file, or in all Python and YAML files below a folder, sorted by file and line.

    In YAML these are full names (``_target_: composer.utils.dist``), arguments beside a ``_target_``, and names of
    algorithms, callbacks and loggers in blocks of these titles that are not available, unless a program of the folder
    defines or registers them; ``${...}`` is skipped. Functions of files are found for checkpoints, unless a file of the
    folder gives these names that end in ``.pt``: as ``save_filename``, ``save_latest_filename``, names of a
    ``CheckpointSaver``, or with ``{epoch}``, ``{batch}`` or ``{rank}``. Schedulers of ``composer.optim`` work, and are
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
    found: list[tuple[Path, list[Finding]]] = []
    names_files, own = False, set()
    for file in sorted(inside) if path.is_dir() else [path]:
        findings, names, source = _scan_file(file)
        found.append((file, findings))
        names_files |= names
        own |= {_short(name) for names in _OWN.findall(source) for name in names}
    for file, findings in found:
        yield from ((file, one) for one in findings if _remains(one, names_files=names_files, own=own))


def _short(name: str) -> str:
    """Return the last part of a name as configurations may write it."""
    return name.rpartition(".")[2].replace("_", "").lower()


def _remains(finding: Finding, *, names_files: bool, own: set[str]) -> bool:
    """Return whether a finding remains beside what the other files of a program name and define."""
    if finding.change in {_FOLDER, _MAY_BE_FOLDER}:
        return not names_files
    return not (finding.is_uncertain and _short(finding.former) in own)


def _scan_file(file: Path) -> tuple[list[Finding], bool, str]:
    """Return the findings in a file, whether it gives checkpoints names of files, and its content."""
    if not file.is_file() or file.stat().st_size > _LARGEST:
        return [] if file.suffix in _YAML else [_unreadable("it is no file of at most 1 MiB")], False, ""
    try:
        if file.suffix in _YAML:
            return *_scan_yaml(source := file.read_text("utf-8", "replace")), source
        if file.suffix == ".ipynb":
            return *_scan_notebook(json.loads(source := file.read_text("utf-8")), str(file)), source
        with tokenize.open(file) as opened:
            return *_scan_source(source := opened.read(), str(file)), source
    except (OSError, SyntaxError, ValueError, LookupError, TypeError, RecursionError, MemoryError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        return [_unreadable(reason, getattr(error, "lineno", None))], False, ""


def _scan_notebook(content: Any, filename: str) -> tuple[list[Finding], bool]:
    """Return what is found in the cells of a notebook, which are counted from 1; an invalid cell is a finding."""
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
    return sorted(set(visitor.findings), key=lambda finding: (finding.cell, finding)), visitor.names_files


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


def _scan_yaml(source: str) -> tuple[list[Finding], bool]:
    visitor, title, depth = _Visitor(), "", -1
    lines = [re.sub(r"(^|\s)#.*", "", line) for line in source.splitlines()]
    while lines != (lines := [_INTERPOLATION.sub("", line) for line in lines]):
        pass  # interpolations within interpolations
    for name, arguments in _targets(lines):
        visitor.check_arguments(name, arguments)
    for number, text in enumerate(lines, 1):
        for name in _NAME.findall(text):
            if name.count(".") > 1 or _TARGET.search(text):  # else it may be a file, composer.log
                visitor.check(number, name)
        indent = len(text) - len(text.lstrip(" "))
        if block := _BLOCK.match(text):
            title, depth = block[1], indent
        elif text.strip() and (indent < depth or (indent == depth and not text.lstrip().startswith("-"))):
            title = ""
        for word in re.findall(r"\w+", text) if title and "_target_" not in text else ():
            former = _missing_components().get((title, word.replace("_", "").lower()))
            if former is not None:
                change = f"works if the program defines it; in this library: {entries()[former].change}"
                visitor.findings.append(Finding(number, former, change, works=True, is_uncertain=True))
    return sorted(set(visitor.findings)), any(map(_NAME_IN_YAML.search, lines))


def _targets(lines: list[str]) -> Iterator[tuple[str, list[tuple[str, int]]]]:
    """Yield the name of each ``_target_`` in YAML, and the keys beside it with their lines."""
    keys = [_KEY.match(line) for line in lines]
    columns = [len(line) - len(line.lstrip(" -")) if line.strip() else len(line) + _LARGEST for line in lines]
    for number, line in enumerate(lines):
        rest = line
        while innermost := _BRACES.findall(rest):
            for braces in innermost:
                if target := _TARGET.search(braces):
                    yield target[1], [(key, number + 1) for key in _KEY_IN_BRACES.findall(braces)]
            rest = _BRACES.sub("", rest)
        key, target = keys[number], _TARGET.search(line)
        if key is None or target is None or key[2] != "_target_":
            continue
        column, first, last = len(key[1]), number, number + 1
        while "-" not in lines[first][:column] and first and columns[first - 1] >= column:
            first -= 1
        while last < len(lines) and columns[last] >= column and "-" not in lines[last][:column]:
            last += 1
        beside = [(one[2], at + 1) for at in range(first, last) if (one := keys[at]) and len(one[1]) == column]
        yield target[1], [(name, at) for name, at in beside if not name.startswith("_")]


@functools.cache
def _missing_components() -> dict[tuple[str, str], str]:
    """Return the former names of components that are not available, by package and name in small letters."""
    split = [(former, former.split(".")) for former, entry in entries().items() if not entry.works]
    return {(parts[1], _short(former)): former for former, parts in split if len(parts) == 3}


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
    findings, names_files = _scan_source(source, filename)
    return [one for one in findings if _remains(one, names_files=names_files, own=set())]


def _scan_source(source: str, filename: str) -> tuple[list[Finding], bool]:
    visitor = _Visitor()
    visitor.visit(ast.parse(source, filename))
    return sorted(set(visitor.findings)), visitor.names_files


class _Visitor(ast.NodeVisitor):
    def __init__(self) -> None:
        self.findings: list[Finding] = []
        self.names_files = False
        self.cell = 0
        self._imported: dict[str, str] = {}
        self._bases: dict[str, set[str]] = {}
        self._of_checkpoint: set[str] = set()

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

    def visit_Assign(self, node: ast.Assign | ast.AnnAssign | ast.NamedExpr) -> None:
        targets = {ast.unparse(one) for one in (node.targets if isinstance(node, ast.Assign) else [node.target])}
        if node.value is not None:
            others = self._of_checkpoint - targets
            self._of_checkpoint = others | targets if self._names_checkpoint(node.value) else others
            self._check_name(any(map(_IS_NAME.fullmatch, targets)), node.value)
        self.generic_visit(node)

    visit_AnnAssign = visit_NamedExpr = visit_Assign  # noqa: N815  (names of ast)

    def visit_Dict(self, node: ast.Dict) -> None:
        for key, value in zip(node.keys, node.values, strict=True):
            self._check_name(key is not None and _IS_NAME.fullmatch(ast.unparse(key)), value)
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        self.names_files |= isinstance(node.value, str) and bool(_TEMPLATE.fullmatch(node.value))

    def _check_name(self, is_name: object, value: ast.expr) -> None:
        """Note whether a value that may be the name of checkpoints ends in ``.pt``."""
        is_text = bool(is_name) and isinstance(value, ast.Constant | ast.JoinedStr)
        self.names_files |= is_text and ast.unparse(value).rstrip("\"'").endswith(".pt")

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        ours = [name for base in node.bases if (name := self._names(base)[1] or "").startswith("composer.")]
        own = [self._bases.get(ast.unparse(base), set()) for base in node.bases]
        self._bases[node.name] = {name.rpartition(".")[2] for name in ours}.union(*own)
        for member in node.body:
            names = [ast.unparse(one) for one in member.targets] if isinstance(member, ast.Assign) else []
            names += [member.name] if isinstance(member, ast.FunctionDef | ast.AsyncFunctionDef) else []
            for name, base in itertools.product(names, sorted(self._bases[node.name])):
                if (instead := OF_COMPOSER.get(base, {}).get(name)) is not None:
                    self._add(member.lineno, f"{base}.{name}", f"override {instead}, instead")
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        _, name = self._names(node.func)
        method = node.func.attr if isinstance(node.func, ast.Attribute) and name is None else None
        self.check_arguments(name or "", [(one.arg, one.value.lineno) for one in node.keywords if one.arg], method)
        function = ast.unparse(node.func)
        is_saver = function.endswith("CheckpointSaver") or "CheckpointSaver" in self._bases.get(function, ())
        for one in node.keywords:
            is_name = one.arg and (_IS_NAME.fullmatch(one.arg) or (is_saver and one.arg.endswith("filename")))
            self._check_name(is_name, one.value)
        self._check_file(node, function)
        is_of_device = isinstance(node.func, ast.Attribute) and ast.unparse(node.func.value).lower().endswith("device")
        if method is not None and method in ATTRIBUTES and is_of_device and self._uses_composer():
            self._add(node.func.lineno, f".{method}()", ATTRIBUTES[method], works=True)
        self.generic_visit(node)

    def check_arguments(self, name: str, given: list[tuple[str, int]], method: str | None = None) -> None:
        """Add a finding for each argument, with its line, that a class, function or method does not accept."""
        last, is_ours = method or name.rpartition(".")[2], name.startswith("composer.")
        former = ARGUMENTS.get(last, {}) if is_ours or (method and self._uses_composer()) else {}
        accepted = _arguments_of(name) if is_ours else None
        for argument, line in given:
            if accepted is None or argument not in accepted:
                advice = next((text for name, text in former.items() if fnmatch(argument, name)), None)
                if advice is not None or accepted is not None:
                    advice = advice or f"not an argument: see help({name})"
                    self._add(line, f"{last}({argument}=...)", advice)

    def _check_file(self, node: ast.Call, function: str) -> None:
        """Add a finding for a function of files that is called with the path of a checkpoint, or what may be one."""
        strings = [str(one.value) for one in ast.walk(node) if isinstance(one, ast.Constant)]
        is_text = function == "open" and "rb" not in strings
        if is_text or not _FILES.fullmatch(function) or any(one.endswith(_OTHER_FILES) for one in strings):
            return
        if self._names_checkpoint(node):
            self._add(node.lineno, f"{function}(...)", _FOLDER)
        elif self._uses_composer() and _OF_CHECKPOINT.search(ast.unparse(node)):
            self.findings.append(
                Finding(node.lineno, f"{function}(...)", _MAY_BE_FOLDER, True, cell=self.cell, is_uncertain=True)
            )

    def _names_checkpoint(self, node: ast.expr) -> bool:
        """Return whether an expression has Composer's name of the newest checkpoint, or a variable that has it."""
        parts = (one for one in ast.walk(node) if isinstance(one, ast.Constant | ast.Name | ast.Attribute))
        return any("latest-rank" in (text := ast.unparse(one)) or text in self._of_checkpoint for one in parts)

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
