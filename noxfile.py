"""The tasks of this project as sessions: ``nox --list`` describes them, ``nox`` runs all checks.

Each session creates an environment with uv, with the versions in ``constraints.txt``. The packages of this repository
are built into wheels and installed from these files, so that no index is searched for them.
"""

from __future__ import annotations

import functools
import os
import re
import shutil
import sys
import tempfile
import tomllib
from pathlib import Path

import nox

nox.needs_version = ">=2025.5.1"
nox.options.default_venv_backend = "uv"
nox.options.download_python = "never"
nox.options.error_on_missing_interpreters = False
nox.options.sessions = ["tests", "integration", "streaming", "lint", "types", "imports", "docs"]

ROOT = Path(__file__).parent
PACKAGES = ["functional", "engine", "models", "trainer"]
PYTHONS = ["3.11", "3.12", "3.13"]
CONSTRAINTS = "constraints.txt"
EXAMPLES = ["cloudpickle", "matplotlib", "optuna", "rich", "scikit-learn", "scipy"]
LOADERS = ["datasets", "webdataset"]
TOOLS = {
    "tests": ["pytest-xdist>=3.8"],
    "hosts": ["jsonargparse[signatures]", "trl"],
    "ray": ["ray[train]"],
    # hatchling builds editable installations with editables; tests build offline, from the cache.
    "together": ["accelerate", "editables", "import-linter", "lightning", "pytorch-ignite", "uv", *LOADERS],
    "site": ["myst-parser", "pydata-sphinx-theme", "selenium", "sphinx", "sphinx-copybutton", "sphinx-design"],
    "lint": ["ruff"],
    "types": ["mypy", "types-tqdm"],
    "build": ["twine"],
}
# Compatible versions. The operators of mmcv are built from source, which requires an older setuptools.
MMDET = {
    "builders": ["torch==2.7.0", "torchvision==0.22.0", "setuptools<75", "wheel", "ninja"],
    "operators": ["mmcv==2.1.0"],
    "detectors": ["mmdet==3.3.0", "mmengine==0.10.7", "pytest>=8.3"],
}
# One thread of torch in each of pytest's two processes. Without cached bytecode, every process that a test starts
# compiles torch's modules again, which takes five seconds.
TEST_ENV = {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": None}
# conftest.py has the order of the files; xdist would put those with the most tests first.
PYTEST = ["pytest", "--numprocesses=2", "--dist=loadfile", "--no-loadscope-reorder", "--durations=20"]

DOCUMENT_TESTS = ["tests/test_documents.py", "tests/test_site.py"]

each_package = nox.parametrize("package", PACKAGES, ids=PACKAGES)


@nox.session
def quickstart(session: nox.Session) -> None:
    """Compare a recipe with a baseline on few labels, and plot both; pass options after --, for example -- --help."""
    install(session, *wheels(session, *PACKAGES), *EXAMPLES)
    session.run("python", "examples/digits.py", *session.posargs)


@nox.session
@each_package
def tests(session: nox.Session, package: str) -> None:
    """Test a package with only its declared dependencies; pass options for pytest after --."""
    install(session, *wheels(session, *closure(package)), *test_group(package))
    session.run(*PYTEST, f"packages/composer-{package}/tests", *session.posargs, env=TEST_ENV)


for python in PYTHONS:
    nox.session(tests, name=f"tests-{python}", python=python)


@nox.session
def integration(session: nox.Session) -> None:
    """Test all packages together: the namespace, the examples, training end to end."""
    python = together(session)
    ignored = [f"--ignore={test}" for test in DOCUMENT_TESTS]
    command = [python, "-m", *PYTEST, "tests", *ignored, *session.posargs]
    session.run(*command, env=TEST_ENV, external=True)


@nox.session
def resume_matrix(session: nox.Session) -> None:
    """Test what other sessions test by pairs or samples: resumes, splits, methods of examples; takes an hour."""
    hosts = ["accelerate", "lightning", "pytorch-ignite"]
    install(session, *wheels(session, *PACKAGES), *test_group(*PACKAGES), *EXAMPLES, *hosts)
    env = TEST_ENV | {"RESUME_MATRIX": "all", "FAULTS": "all"}
    names = ["resume", "each_algorithm", "faults", "split_batches", "benchmarks_gpu", "fake_device"]
    names += ["tables_example", "fashion_mnist", "few_labels", "language_model"]
    tests = ["tests/laws", *(f"tests/test_{name}.py" for name in names)]
    tests += [f"packages/composer-trainer/tests/distributed/test_{name}.py" for name in ("torchrun", "hosts")]
    tests += ["packages/composer-trainer/tests/trainer/resume/test_given_objects.py"]
    session.run(*PYTEST, *tests, *session.posargs, env=env)


@nox.session
def ray(session: nox.Session) -> None:
    """Train in two workers of Ray, and compare the weights with those of torchrun."""
    install(session, *wheels(session, *PACKAGES), *test_group(*PACKAGES), *EXAMPLES, *TOOLS["ray"])
    command = [*PYTEST, "tests/test_several_hosts.py", "-k", "ray", *session.posargs]
    session.run(*command, env=TEST_ENV | {"FAULTS": "all"})


@nox.session
@nox.parametrize("product", ["aim", "swanlab", "trackio"], ids=["aim", "swanlab", "trackio"])
def trackers(session: nox.Session, product: str) -> None:
    """Test the loggers for Aim, SwanLab and Trackio, whose dependencies differ from those in constraints.txt."""
    needed = project("trainer")["project"]["optional-dependencies"][product]
    install(session, *wheels(session, *PACKAGES), *test_group(*PACKAGES), *needed, pins=only_torch(session))
    test = f"packages/composer-trainer/tests/loggers/test_{product}_logger.py"
    session.run(*PYTEST, test, *session.posargs, env=TEST_ENV)


@nox.session(python=PYTHONS[0])
def streaming(session: nox.Session) -> None:
    """Stop and resume with data of mosaicml-streaming."""
    # It allows only older versions of other libraries than those pinned.
    pins = only_torch(session)
    install(session, *wheels(session, *PACKAGES), *test_group(*PACKAGES), "mosaicml-streaming", pins=pins)
    tests = ["packages/composer-trainer/tests/trainer/data/test_streaming.py", "tests/laws"]
    # Its data sets share memory of the machine by numbers, which clash between two processes of pytest.
    session.run(*PYTEST, "--numprocesses=0", *tests, "-k", "streaming", *session.posargs, env=TEST_ENV)


@nox.session(python=PYTHONS[0])
@nox.parametrize("releases", ["newest", "oldest"], ids=["newest", "oldest"])
def hosts(session: nox.Session, releases: str) -> None:
    """Compare Lightning, Transformers, Accelerate and Ignite with our Trainer, in their newest and oldest releases."""
    extras = project("engine")["project"]["optional-dependencies"].values()
    wanted = [*test_group(*PACKAGES), *sorted({requirement for extra in extras for requirement in extra})]
    if releases == "newest":  # the newest TRL does not work with the oldest Accelerate
        wanted += TOOLS["hosts"]
    pins = lowest(session, "hosts", *theirs(*PACKAGES), *wanted) if releases == "oldest" else only_torch(session)
    install(session, *wheels(session, *PACKAGES), *wanted, pins=pins)
    session.run(*PYTEST, "tests/hosts", *session.posargs, env=TEST_ENV)


@nox.session(python=PYTHONS[0])
@each_package
def minimums(session: nox.Session, package: str) -> None:
    """Test a package with the lowest versions that it allows, on the oldest Python."""
    pins = lowest(session, package, *theirs(*closure(package)), *test_group(package))
    install(session, *wheels(session, *closure(package)), *test_group(package), pins=pins)
    session.run(*PYTEST, f"packages/composer-{package}/tests", *session.posargs, env=TEST_ENV)


@nox.session(python=PYTHONS[0])
def mmdet(session: nox.Session) -> None:
    """Build MMDetection (15 minutes or more, once) and train one of its detectors; not run by default."""
    session.install(*MMDET["builders"])
    # The operators are compiled against the installed torch; uv caches the wheel.
    session.install("--no-build-isolation", *MMDET["operators"], env={"MMCV_WITH_OPS": "1", "FORCE_CUDA": "0"})
    session.install(*wheels(session, *PACKAGES), *MMDET["builders"], *MMDET["detectors"])
    # MMDetection gives warnings of its own.
    session.run("pytest", "-W", "default", "--durations=20", "tests/mmdetection", *session.posargs, env=TEST_ENV)


@nox.session
def lint(session: nox.Session) -> None:
    """Check style with ruff, the wording of docstrings, comments, errors and pages, and the size of the packages."""
    install(session, *TOOLS["lint"])
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    session.run("python", "tests/check_words.py")
    session.run("python", "tests/check_size.py")


@nox.session
def types(session: nox.Session) -> None:
    """Check the types of all packages with mypy, strictly."""
    install(session, *theirs(*PACKAGES), *TOOLS["types"])
    # In one call, mypy treats all sources as one namespace; on a search path it would stop at trainer's __init__.py.
    sources = [f"packages/composer-{package}/src" for package in PACKAGES]
    session.run("mypy", *sources, env={"MYPYPATH": os.pathsep.join(sources)})


@nox.session
def imports(session: nox.Session) -> None:
    """Check the direction of imports, and that importing loads no heavy dependency."""
    python = together(session)
    session.run(str(Path(python).with_name("lint-imports")), "--no-cache", external=True)
    ours = ["functional", "core", "algorithms", "integrations", "models"]
    for module in ["composer", *(f"composer.{name}" for name in ours)]:
        session.run(python, "-c", LIGHT.format(module=module), external=True)


# Exits with the names of modules that should not have been imported, or with success.
LIGHT = """
import sys, {module}
sys.exit(", ".join({{"accelerate", "kornia", "lightning", "torchmetrics", "torchvision"}} & set(sys.modules)) or None)
"""


@nox.session
def docs(session: nox.Session) -> None:
    """Run every Python block in the pages and the READMEs, build the site, and check its links in a browser."""
    python = together(session)
    session.run(python, "-m", *PYTEST, *DOCUMENT_TESTS, *session.posargs, env=TEST_ENV, external=True)


@nox.session
def site(session: nox.Session) -> None:
    """Build the site in build/site, offline; an unknown reference or a page without a link to it is an error."""
    python = together(session)
    options = ["--nitpicky", "--fail-on-warning", "--keep-going", "--quiet", "--jobs=2", *session.posargs]
    session.run(python, "-m", "sphinx", *options, "docs", "build/site", env={"OMP_NUM_THREADS": "1"}, external=True)
    session.log("Open it with: python -m http.server --directory build/site")


@nox.session
def bench(session: nox.Session) -> None:
    """Run the benchmarks; pass the name of one and its options after --."""
    known = sorted(path.stem for path in (ROOT / "benchmarks").glob("[!_]*.py"))
    name, *options = session.posargs or ["all"]
    if name not in [*known, "all"]:
        session.error(f"Unknown benchmark {name!r}. Choose one of {', '.join(known)}, or pass no name to run all.")
    install(session, *wheels(session, *PACKAGES), *test_group(*PACKAGES))
    for chosen in sorted({*known} - {"gpu"}) if name == "all" else [name]:
        session.run("python", f"benchmarks/{chosen}.py", *options)


@nox.session
def gpu(session: nox.Session) -> None:
    """Run the tests and benchmarks that need a CUDA device; CONTRIBUTING.md has the commands without nox."""
    others = [*EXAMPLES, "accelerate", "lightning"]
    install(session, *wheels(session, *PACKAGES), *test_group(*PACKAGES), *others)
    session.run("pytest", "-m", "gpu", "--durations=20", "packages", "tests", *session.posargs, env=TEST_ENV)
    if shutil.which("nvidia-smi"):  # elsewhere the tests were skipped with the reason
        for half in ("first", "second"):
            session.run("python", "benchmarks/gpu.py", "--half", half, env=TEST_ENV)


@nox.session
def build(session: nox.Session) -> None:
    """Build the sdists and wheels of a release in dist/, and check them; pass its tag after --, as in -- v0.2.0."""
    number = project("trainer")["project"]["version"]
    if session.posargs not in ([], [f"v{number}"]):
        session.error(f"The packages have version {number}, which needs the tag v{number}, got {session.posargs[0]}")
    if session.posargs and f"## {number} - Unreleased" in (ROOT / "CHANGELOG.md").read_text():
        session.error(f"CHANGELOG.md has no date for {number}")
    shutil.rmtree("dist", ignore_errors=True)
    for package in PACKAGES:  # an sdist, from which the wheel is built
        options = ["--quiet", f"--build-constraints={CONSTRAINTS}", "--out-dir=dist"]
        session.run("uv", "build", *options, f"packages/composer-{package}")
    install(session, *TOOLS["build"])
    session.run("twine", "check", "--strict", *map(str, sorted(Path("dist").glob("composer_*"))))


@nox.session
def installed(session: nox.Session) -> None:
    """Install the wheels that are in dist/, and use them together outside the repository."""
    install(session, *map(str, sorted((ROOT / "dist").glob("*.whl"))))
    session.chdir(session.create_tmp())
    session.run("python", "-P", "-W", "error", str(ROOT / "tests" / "installed.py"), env=TEST_ENV)


@nox.session(venv_backend="none")
def version(session: nox.Session) -> None:
    """Set the version wherever it is stated, and begin its section of the changelog, as in -- 0.3.0."""
    (new,) = session.posargs
    module = ROOT / "packages" / "composer-trainer" / "src" / "composer" / "__init__.py"
    for path in [ROOT / "CITATION.cff", module, *ROOT.glob("packages/*/pyproject.toml")]:
        stated = r'(?m)(^version = "|^__version__ = "|^version: |"composer-\w+==)[\d.]+'
        path.write_text(re.sub(stated, rf"\g<1>{new}", path.read_text()))
    changelog = ROOT / "CHANGELOG.md"
    changelog.write_text(changelog.read_text().replace("\n## ", f"\n## {new} - Unreleased\n\n## ", 1))


@nox.session
def constraints(session: nox.Session) -> None:
    """Write the newest versions of everything that the sessions install to constraints.txt."""
    wanted = session.cache_dir / "wanted.in"
    builders = [requirement for package in PACKAGES for requirement in project(package)["build-system"]["requires"]]
    tools = [tool for group in TOOLS.values() for tool in group]
    wanted.write_text("\n".join([*theirs(*PACKAGES), *test_group(*PACKAGES), *EXAMPLES, *tools, *builders]))
    options = ["--universal", f"--python-version={PYTHONS[0]}", "--upgrade", "--no-header", "--no-annotate"]
    session.run("uv", "pip", "compile", "--quiet", *options, f"--output-file={CONSTRAINTS}", str(wanted))
    head = "# Exact versions of everything that the sessions in noxfile.py install, written by `nox -s constraints`.\n"
    Path(CONSTRAINTS).write_text(head + Path(CONSTRAINTS).read_text())


def install(session: nox.Session, *what: str, pins: str = CONSTRAINTS) -> None:
    """Install wheels of this repository and other requirements, at the pinned versions."""
    session.install("--constraint", pins, *what)


def lowest(session: nox.Session, name: str, *what: str) -> str:
    """Return a file of pins with the lowest versions that the requirements allow."""
    floors = session.cache_dir / f"floors-{name}.txt"
    direct = floors.with_suffix(".in")
    direct.write_text("\n".join(what))
    session.run("uv", "pip", "compile", "--quiet", "--resolution=lowest-direct", f"--output-file={floors}", str(direct))
    return str(floors)


def only_torch(session: nox.Session) -> str:
    """Return a file of pins for torch and its libraries alone, so that everything else is the newest there is."""
    pins = session.cache_dir / "only-torch.txt"
    lines = Path(CONSTRAINTS).read_text().splitlines()
    pins.write_text("\n".join(line for line in lines if line.startswith(("torch", "triton", "nvidia"))))
    return str(pins)


def together(session: nox.Session) -> str:
    """Return the Python of one environment for all packages, tests and examples, created once per run of nox."""
    environment = ROOT / ".nox" / "together"
    python = str(environment / "bin" / "python")
    if python not in _made:
        session.run("uv", "venv", "--quiet", "--clear", f"--python={sys.executable}", str(environment))
        what = [*wheels(session, *PACKAGES), *test_group(*PACKAGES), *EXAMPLES, *TOOLS["together"], *TOOLS["site"]]
        session.run("uv", "pip", "install", "--quiet", f"--python={python}", f"--constraint={CONSTRAINTS}", *what)
        _made.add(python)
    return python


def wheels(session: nox.Session, *packages: str) -> list[str]:
    """Build the packages and return the paths of the wheels."""
    return [_wheel(session, package) for package in packages]


def closure(package: str) -> list[str]:
    """Return the packages of this repository that a package depends on, directly or not, followed by itself."""
    declared = [requirement.partition("==")[0] for requirement in project(package)["project"]["dependencies"]]
    needed = [name for ours in PACKAGES if f"composer-{ours}" in declared for name in closure(ours)]
    return list(dict.fromkeys([*needed, package]))


def theirs(*packages: str) -> list[str]:
    """Return the requirements of the packages on other projects."""
    declared = {requirement for package in packages for requirement in project(package)["project"]["dependencies"]}
    return sorted(requirement for requirement in declared if not requirement.startswith("composer-"))


def test_group(*packages: str) -> list[str]:
    """Return the additional requirements of the packages' tests."""
    needed = {tool for package in packages for tool in project(package)["dependency-groups"]["test"]}
    return sorted({*needed, *TOOLS["tests"]})


@functools.cache
def project(package: str) -> dict[str, dict]:
    """Return the contents of a package's pyproject.toml."""
    return tomllib.loads((ROOT / "packages" / f"composer-{package}" / "pyproject.toml").read_text())


_built = tempfile.TemporaryDirectory(prefix="composer-wheels-")
_wheel_of: dict[str, str] = {}
_made: set[str] = set()


def _wheel(session: nox.Session, package: str) -> str:
    """Build a package once per run of nox; uv's own cache of local folders does not detect changed sources."""
    if package not in _wheel_of:
        options = ["--wheel", "--quiet", f"--build-constraints={CONSTRAINTS}", f"--out-dir={_built.name}"]
        session.run("uv", "build", *options, f"packages/composer-{package}")
        (file,) = Path(_built.name).glob(f"composer_{package}-*.whl")
        _wheel_of[package] = str(file)
    return _wheel_of[package]
