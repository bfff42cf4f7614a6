"""Several files of the repository are consistent."""

import re
import runpy
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]
PINS = (ROOT / "constraints.txt").read_text()


@pytest.mark.parametrize("package", ["functional", "engine", "models", "trainer"])
def test_each_package_has_the_licence(package):
    """Each distribution contains the same licence text."""
    assert (ROOT / "packages" / f"composer-{package}" / "LICENSE").read_text() == (ROOT / "LICENSE").read_text()


def test_constraints_are_exact_and_portable():
    """Each line pins one version, without an index or a path."""
    lines = [line for line in PINS.splitlines() if not line.startswith("#")]

    assert [line for line in lines if not re.fullmatch(r"[a-z0-9-]+==[\w.+]+( ; .+)?", line)] == []


def test_the_commit_hook_uses_the_same_ruff():
    """The commit hook formats with the version of the lint session."""
    (pin,) = re.findall(r"^ruff==.+$", PINS, re.MULTILINE)

    hooks = (ROOT / ".pre-commit-config.yaml").read_text()

    assert set(re.findall(r"ruff==[\w.]+", hooks)) == {pin}


def test_words_are_found_across_lines_and_literals():
    """A phrase is found with its line, also where a line of a comment or a string literal ends within it."""
    find = runpy.run_path(str(ROOT / "tests" / "check_words.py"))["find"]
    text = 'one\n# green\n# house\nraise ValueError("Green " f"house")\n'

    result = find(text, {"green house": "conservatory"})

    assert [(line, better) for line, _, better in result] == [(2, "conservatory"), (4, "conservatory")]


def test_words_are_found_in_names_of_tests():
    """A phrase is found in the name of a function, between underscores, and of a class, between capitals."""
    find_names = runpy.run_path(str(ROOT / "tests" / "check_words.py"))["find_names"]
    text = "class TestGreenHouse:\n    def test_a_green_house(self): ...\n\n    def test_house(self): ...\n"

    result = find_names(text, {"green house": "conservatory"})

    assert [(line, phrase) for line, phrase, _ in result] == [
        (1, "TestGreenHouse: Green House"),
        (2, "test_a_green_house: green house"),
    ]


def test_names_are_found_only_if_they_are_equal():
    """A listed name of a function or class is found in all files, and not within another name."""
    find_exact_names = runpy.run_path(str(ROOT / "tests" / "check_words.py"))["find_exact_names"]
    text = "class {}:\n    def {}(self): ...\n\n    def _plain_number(self): ...\n".format("Meeting", "_plain")

    assert [(line, name) for line, name, _ in find_exact_names(text)] == [(1, "Meeting"), (2, "_plain")]


def test_workflows_run_the_sessions_with_every_python():
    """The workflows need no secret; the checks run with the versions of the noxfile."""
    workflows = {path.stem: path.read_text() for path in (ROOT / ".github" / "workflows").glob("*.yml")}
    (pythons,) = re.findall(r"^PYTHONS = (\[.+\])$", (ROOT / "noxfile.py").read_text(), re.MULTILINE)

    assert workflows.keys() == {"checks", "release", "site"}
    assert "secrets" not in "".join(workflows.values())
    assert f"python: {pythons}" in workflows["checks"]
    assert "run: nox -s site" in workflows["site"]


def test_a_release_publishes_the_files_that_were_tried():
    """One job builds, another tries these files with every Python; the third publishes them, and runs nothing else."""
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "release.yml").read_text())
    jobs = workflow["jobs"]
    uses, runs = (
        {name: [step[kind] for step in job["steps"] if kind in step] for name, job in jobs.items()}
        for kind in ("uses", "run")
    )
    (pythons,) = re.findall(r"^PYTHONS = \[(.+)\]$", (ROOT / "noxfile.py").read_text(), re.MULTILINE)

    assert workflow[True] == {"push": {"tags": ["v*"]}}  # YAML 1.1 reads `on` as true
    assert all(re.fullmatch(r"[\w/-]+@[0-9a-f]{40}", action) for job in uses.values() for action in job)
    assert workflow["permissions"] == {"contents": "read"}
    assert [name for name, job in jobs.items() if "permissions" in job] == ["publish"]
    assert jobs["publish"]["permissions"] == {"attestations": "write", "contents": "read", "id-token": "write"}
    assert jobs["publish"]["environment"] == "release"
    assert (jobs["test"]["needs"], jobs["publish"]["needs"]) == ("build", ["build", "test"])
    assert jobs["test"]["strategy"]["matrix"]["python"] == re.findall(r"[\d.]+", pythons)
    assert (runs["build"][-1], runs["test"][-1]) == ('nox -s build -- "$GITHUB_REF_NAME"', "nox -s installed")
    assert (runs["publish"], [action.partition("@")[0] for action in uses["publish"]]) == (
        [],
        ["actions/download-artifact", "actions/attest-build-provenance", "pypa/gh-action-pypi-publish"],
    )
    assert jobs["publish"]["steps"][-1]["with"] == {"attestations": True}


def test_there_is_one_version():
    """The packages, their requirements on each other, the citation and the changelog state the same version."""
    projects = [tomllib.loads(path.read_text())["project"] for path in ROOT.glob("packages/*/pyproject.toml")]
    needed = [one for project in projects for one in project["dependencies"] if one.startswith("composer-")]
    module = (ROOT / "packages/composer-trainer/src/composer/__init__.py").read_text()
    changelog = (ROOT / "CHANGELOG.md").read_text()

    stated = {
        *(project["version"] for project in projects),
        *(one.partition("==")[2] for one in needed),
        *re.findall(r'^__version__ = "(.+)"$', module, re.MULTILINE),
        yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"],
        re.findall(r"^## (\S+) - (?:Unreleased|\d{4}-\d\d-\d\d)$", changelog, re.MULTILINE)[0],
    }

    assert (len(projects), len(needed), len(stated)) == (4, 5, 1), stated


def test_each_module_has_its_test_file():
    """The tests of ``composer/core/plan.py`` are in ``tests/core/test_plan.py`` of the same package.

    Those of the integrations need other hosts, and are in ``tests/hosts`` beside their shared programs.
    """
    missing = set()
    for package in ("functional", "engine", "models", "trainer"):
        tests = ROOT / "packages" / f"composer-{package}" / "tests"
        sources = ROOT / "packages" / f"composer-{package}" / "src" / "composer"
        sources = sources / "functional" if package == "functional" else sources
        for path in sources.rglob("[!_]*.py"):
            module = path.relative_to(sources)
            folder = ROOT / "tests" / "hosts" if module.parts[0] == "integrations" else tests / module.parent
            if not (folder / f"test_{path.name}").exists():
                missing.add(f"{package}: {module}")

    assert missing == set()


def test_sizes_are_counted():
    """Docstrings, comments and blank lines are no code; a string in an expression is."""
    size = runpy.run_path(str(ROOT / "tests" / "check_size.py"))
    lines = ['"""Module."""', "", "X = 1  # why", '"""The attribute."""', "", "", "def f():", '    """Do it."""']
    source = "\n".join([*lines, "    # reason", "    return (", '        "a"', "    )", ""])

    assert size["code_lines"](source) == {3, 7, 10, 11, 12}
    assert size["longest_body"](source) == ("f", 3)
    assert size["circles"]({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}, "e": set()}) == [["a", "b", "c"]]


def test_gpu_tests_need_no_library_of_other_tests(tmp_path):
    """With ``-m gpu`` only files with such tests are imported; one whose libraries are missing is skipped."""
    shutil.copy(ROOT / "conftest.py", tmp_path)
    (tmp_path / "test_other.py").write_text("import no_such_library")
    (tmp_path / "test_needs_a_library.py").write_text("import no_such_library\nmark = pytest.mark.gpu")
    (tmp_path / "test_here.py").write_text(
        "import pytest\n\n@pytest.mark.gpu\ndef test_here(): ...\n\ndef test_cpu(): ..."
    )
    options = ["-p", "no:cacheprovider", "-o", "markers=gpu", "-m", "gpu", "-rs"]

    command = [sys.executable, "-m", "pytest", *options, f"--rootdir={tmp_path}", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stdout + done.stderr
    assert "needs no_such_library" in done.stdout
    assert "1 deselected" in done.stdout
