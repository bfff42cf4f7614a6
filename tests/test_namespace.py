"""Four distributions share the package ``composer``, for every way to install them.

Each test creates an environment and checks imports in a new process. The environments use the third-party packages of
the environment that runs the tests, except where these are tested. Some tests take more than 5 seconds because a new
process imports torch and torchvision.
"""

import importlib.metadata
import json
import os
import re
import shutil
import site
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
NOXFILE = (ROOT / "noxfile.py").read_text()
PACKAGES = ["functional", "engine", "models", "trainer"]
# The distributions that each one needs, including itself, and the sub-packages it adds.
NEEDS = {
    "functional": ["functional"],
    "engine": ["functional", "engine"],
    "models": ["functional", "models"],
    "trainer": PACKAGES,
}
ADDS = {
    "functional": ["composer.functional"],
    "engine": ["composer.core", "composer.algorithms", "composer.integrations"],
    "models": ["composer.models", "composer.metrics", "composer.loss"],
    "trainer": ["composer.trainer"],
}
EVERYTHING = [name for package in PACKAGES for name in ADDS[package]]
# Names that README and guides import from the top level.
TOP_LEVEL = "from composer import Algorithm, Engine, Event, State, Time, Trainer, functional"
LOCATE = """
import importlib.util, json, sys
specs = {name: importlib.util.find_spec(name) for name in sys.argv[1:]}
print(json.dumps({name: spec.origin for name, spec in specs.items() if spec}))
"""


def run(command, **settings):
    """Run a command and return its output."""
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, check=False, **settings)
    assert done.returncode == 0, done.stderr
    return done.stdout


def uv(*arguments):
    """Run uv in the repository and return its output."""
    return run([shutil.which("uv"), *arguments], cwd=ROOT)


def python(environment, *arguments, path=()):
    """Run an environment's Python in an empty folder and return its output."""
    settings = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, path))}
    return run([environment / "bin" / "python", *arguments], cwd=environment, env=settings)


def contents(wheel):
    """Return the files of a wheel, by name."""
    with zipfile.ZipFile(wheel) as files:
        return {name: files.read(name) for name in files.namelist()}


def located(environment, path=()):
    """Return the file of each sub-package of this project in an environment."""
    return json.loads(python(environment, "-c", LOCATE, *EVERYTHING, path=path))


@pytest.fixture(scope="module")
def wheels(tmp_path_factory):
    """Build the four wheels and return their paths by package."""
    folder = tmp_path_factory.mktemp("wheels")
    for package in PACKAGES:
        uv(
            "build",
            "--wheel",
            "--build-constraints",
            "constraints.txt",
            "--out-dir",
            folder,
            f"packages/composer-{package}",
        )
    return {package: next(folder.glob(f"composer_{package}-*.whl")) for package in PACKAGES}


@pytest.fixture(scope="module")
def distributions(tmp_path_factory):
    """Build an sdist of each package, and a wheel from it; return their folder."""
    folder = tmp_path_factory.mktemp("distributions")
    for package in PACKAGES:
        uv("build", "--build-constraints", "constraints.txt", "--out-dir", folder, f"packages/composer-{package}")
    return folder


@pytest.fixture
def environment(tmp_path):
    """Return a new environment with the third-party packages of this one and no package of this project."""
    place = tmp_path / "environment"
    uv("venv", "--python", sys.executable, place)
    (packages,) = place.glob("lib/python*/site-packages")
    for entry in (entry for folder in site.getsitepackages() for entry in Path(folder).iterdir()):
        if not entry.name.startswith(("composer", "_virtualenv", "__pycache__")) and entry.suffix != ".pth":
            if entry.suffix == ".dist-info":  # of which uv does not follow links
                shutil.copytree(entry, packages / entry.name)
            else:
                (packages / entry.name).symlink_to(entry)
    return place


def install(environment, *requirements):
    """Install without dependencies. A build uses what the wheels were built with, from the cache: no index is read."""
    options = ["--no-deps", "--offline", "--build-constraints", "constraints.txt"]
    uv("pip", "install", *options, "--python", environment / "bin" / "python", *requirements)


class TestWheels:
    def test_only_trainer_holds_the_top_level(self, wheels):
        """A second composer/__init__.py would hide the packages of the others."""
        contents = {package: set(zipfile.ZipFile(wheel).namelist()) for package, wheel in wheels.items()}

        assert [package for package, names in contents.items() if "composer/__init__.py" in names] == ["trainer"]

    def test_no_file_is_in_two_wheels(self, wheels):
        """Uninstalling one distribution removes no file of another."""
        names = [name for wheel in wheels.values() for name in zipfile.ZipFile(wheel).namelist()]

        assert len(names) == len(set(names))

    @pytest.mark.parametrize("package", PACKAGES)
    def test_types_and_licence_are_included(self, wheels, package):
        """Each sub-package is marked as typed, and each wheel carries the licence."""
        names = zipfile.ZipFile(wheels[package]).namelist()

        assert {f"{name.replace('.', '/')}/py.typed" for name in ADDS[package]} <= set(names)
        assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)

    @pytest.mark.parametrize("package", PACKAGES)
    def test_alone(self, wheels, environment, package):
        """With only the packages of this project that it declares, all its modules can be imported."""
        install(environment, *(wheels[needed] for needed in NEEDS[package]))

        assert list(located(environment)) == [name for needed in NEEDS[package] for name in ADDS[needed]]
        top_level = TOP_LEVEL if package == "trainer" else "from composer import functional"
        python(environment, "-W", "error", "-c", f"import {', '.join(ADDS[package])}; {top_level}")

    @pytest.mark.parametrize("order", [PACKAGES, PACKAGES[::-1]], ids=["trainer-last", "trainer-first"])
    def test_a_folder_each(self, wheels, environment, tmp_path, order):
        """In separate folders on the path, all are found in any order."""
        folders = [tmp_path / package for package in order]
        for package, folder in zip(order, folders, strict=True):
            uv("pip", "install", "--no-deps", "--python", sys.executable, "--target", folder, wheels[package])

        files = located(environment, path=folders)

        assert {name: Path(file).relative_to(tmp_path).parts[0] for name, file in files.items()} == {
            name: package for package in PACKAGES for name in ADDS[package]
        }
        python(environment, "-c", TOP_LEVEL, path=folders)


class TestDistributions:
    @pytest.mark.parametrize("package", PACKAGES)
    def test_an_sdist_builds_the_same_wheel(self, wheels, distributions, package):
        """The wheel that is built from the sdist has the same files as the one built from the repository."""
        (from_sdist,) = distributions.glob(f"composer_{package}-*.whl")

        assert contents(from_sdist) == contents(wheels[package])

    @pytest.mark.parametrize("package", PACKAGES)
    def test_an_sdist_has_what_belongs_to_it(self, distributions, package):
        """An sdist has the sources, the tests, the licence and the README, and nothing else."""
        (sdist,) = distributions.glob(f"composer_{package}-*.tar.gz")

        with tarfile.open(sdist) as files:
            names = {Path(name).parts[1] for name in files.getnames()}

        files = {"LICENSE", "PKG-INFO", "README.md", "pyproject.toml", ".gitignore"}
        assert names == files | {"src", "tests"} | ({"examples"} if package == "engine" else set())

    @pytest.mark.parametrize("package", PACKAGES)
    def test_metadata(self, wheels, package):
        """The metadata describe the package, and the README has no link within the repository."""
        (folder,) = (path for path in zipfile.Path(wheels[package]).iterdir() if path.name.endswith(".dist-info"))
        data = importlib.metadata.PathDistribution(folder).metadata

        assert (data["License-Expression"], data["License-File"]) == ("Apache-2.0", "LICENSE")
        assert (data["Requires-Python"], data["Description-Content-Type"]) == (">=3.11", "text/markdown")
        assert {"Summary", "Keywords", "Author"} <= set(data)
        pythons = {re.search(r"3\.\d+$", name)[0] for name in data.get_all("Classifier") if "Python :: 3." in name}
        assert pythons == set(re.findall(r"\d\.\d+", re.search(r"^PYTHONS = .+", NOXFILE, re.MULTILINE)[0]))
        text = data.get_payload()
        assert text.startswith(f"# composer-{package}\n")
        assert re.findall(r"\]\((?!https?://|#)[^)]*\)", text) == []

    def test_they_are_used_outside_the_repository(self, distributions, environment):
        """Installed together from a folder, all modules can be imported, the command runs, and a model is trained."""
        options = ["--offline", "--no-index", "--find-links", distributions, "--python", environment / "bin" / "python"]
        uv("pip", "install", *options, "composer-trainer")

        output = python(environment, "-P", ROOT / "tests" / "installed.py")

        assert re.fullmatch(r"composer [\d.]+: \d+ modules, an accuracy of .+\n", output.splitlines(keepends=True)[-1])


class TestEditable:
    def test_all(self, wheels, environment):
        """Installed in editable mode, every module is the one in this repository."""
        install(environment, *(f"--editable=packages/composer-{package}" for package in PACKAGES))

        files = located(environment)

        assert list(files) == EVERYTHING
        assert all(Path(file).is_relative_to(ROOT / "packages") for file in files.values())
        python(environment, "-c", TOP_LEVEL)

    def test_one_beside_wheels(self, wheels, environment):
        """One editable package and three wheels are found in their own places."""
        install(
            environment,
            wheels["functional"],
            wheels["models"],
            wheels["trainer"],
            "--editable=packages/composer-engine",
        )

        files = located(environment)

        assert [name for name, file in files.items() if Path(file).is_relative_to(ROOT)] == ADDS["engine"]
        assert list(files) == EVERYTHING


def test_functional_installs_only_torch_and_kornia(wheels, tmp_path):
    """In an empty environment, composer-functional installs only torch, kornia and their dependencies, and works."""
    place, requirements = tmp_path / "environment", tmp_path / "wanted.in"
    requirements.write_text("torch\nkornia\n")
    uv("venv", "--python", sys.executable, place)

    uv("pip", "install", "--python", place / "bin" / "python", "--constraint", "constraints.txt", wheels["functional"])

    options = ["--no-header", "--no-annotate", "--python", sys.executable, "--constraint", "constraints.txt"]
    closure = {line.partition("==")[0] for line in uv("pip", "compile", "--quiet", *options, requirements).splitlines()}
    listed = json.loads(uv("pip", "list", "--format", "json", "--python", place / "bin" / "python"))
    assert {entry["name"] for entry in listed} == closure | {"composer-functional"}
    # torch warns without NumPy, although it does not require it.
    options = ["-W", "error", "-W", "ignore:Failed to initialize NumPy:UserWarning"]
    python(place, *options, "-c", "from composer import functional as cf; cf.soft_cross_entropy")
