"""Every Python block in the documents runs, and every link and path within the repository is valid.

The blocks of a document run in order in one namespace, in a separate process and folder. The process is a fork of one
that has imported the modules that most documents import. A block that cannot run is preceded by a comment with the
reason: ``<!-- not run: it needs eight GPUs -->``.
"""

import multiprocessing
import pkgutil
import re
import struct
import subprocess
from functools import cache
from pathlib import Path

import pytest

import composer.algorithms
from composer.core import Algorithm
from fixtures.processes import run_processes

ROOT = Path(__file__).parents[1]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("packages/*/README.md")])
ANSWERS = [path for path in DOCUMENTS if path.parent.name == "how_do_i"]
CARDS = [path for path in DOCUMENTS if path.parent.name == "methods" and path.name != "README.md"]
GUIDES_TO_THE_CODE = [one for one in DOCUMENTS if one.parent == ROOT or one.parent.name == "decisions"]
GUIDES_TO_THE_CODE += ROOT.glob("packages/*/README.md")
PATH = re.compile(r"[\w.-]+/[\w./-]*|[\w-]+\.(py|md|toml|txt|yml)")
SECTIONS = ["Code", "When", "Settings", "Pitfalls", "Measured here", "Source"]
BLOCK = re.compile(
    r"^(?:<!-- not run: (?P<reason>.+?) -->\n+)?```(?:python|py)\b[^\n]*\n(?P<code>.*?)^```$", re.DOTALL | re.M
)
INCLUDE = re.compile(r"^```{literalinclude} \.\./\.\./(?P<file>\S+\.py)\n:end-before: (?P<end>.+)\n```$", re.M)
OUTPUT = re.compile(r"^```text\n(.*?)^```$", re.DOTALL | re.M)
PRELOADED = ["composer.algorithms", "composer.models", "composer.trainer", "torchmetrics", "torchvision"]
RUN = """
import atexit, os, warnings
os.chdir(folder)
os.environ["MPLBACKEND"] = "agg"
for stream in (1, 2):
    os.dup2(os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
warnings.simplefilter("error")
# The Trainer warns of it, on a CPU without AVX-512 only.
warnings.filterwarnings("ignore", "precision='amp_bf16' is many times slower", UserWarning)
for kind in (DeprecationWarning, SyntaxWarning):  # in torchao's sources, which Transformers imports
    warnings.filterwarnings("ignore", "invalid escape sequence", kind)
try:
    exec(compile(code, name, "exec"), {"__name__": "__main__"})
finally:
    atexit._run_exitfuncs()  # multiprocessing exits without running them
"""


def program(text):
    """Return a document's code, with that of files it includes, with the line numbers of the document."""
    lines = [""] * text.count("\n")
    for block in BLOCK.finditer(text):
        if not block["reason"]:
            start = text.count("\n", 0, block.start("code"))
            code = block["code"].splitlines()
            lines[start : start + len(code)] = code
    for one in INCLUDE.finditer(text):
        code = (ROOT / one["file"]).read_text().partition(one["end"])[0]
        lines[text.count("\n", 0, one.start())] = f"exec(compile({code!r}, {one['file']!r}, 'exec'))"
    return "\n".join(lines)


def run(text, name, folder):
    """Run a document's code in a folder, with warnings as errors; return its exit code and all its output."""
    output = folder / ".output"
    settings = {"code": program(text), "name": name, "folder": str(folder), "output": str(output)}
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    process = context.Process(target=exec, args=(RUN, settings))
    process.start()
    process.join()
    return subprocess.CompletedProcess(name, process.exitcode, stderr=output.read_text())


def not_printed(text, printed):
    """Return the lines of a document's outputs that its program did not print in this order."""
    lines = iter(printed.splitlines())
    shown = [line for output in OUTPUT.findall(text) for line in output.splitlines()]
    return [line for line in shown if not any(agree(line, other) for other in lines)]


def agree(shown, printed):
    """Whether two lines have the same words, and fractions that differ by less than half; integers may differ."""
    words = [" ".join(re.sub(r"\d+", "0", re.sub(r"\d+\.\d+", "0", line)).split()) for line in (shown, printed)]
    fractions = [[*map(float, re.findall(r"\d+\.\d+", line))] for line in (shown, printed)]
    return words[0] == words[1] and fractions[1] == pytest.approx(fractions[0], rel=0.5, abs=0.01)


@pytest.mark.parametrize("document", [path for path in DOCUMENTS if program(path.read_text()).strip()], ids=str)
def test_code_runs(document, tmp_path):
    """Running the blocks from top to bottom gives no error and no warning."""
    done = run(document.read_text(), str(document), tmp_path)

    assert done.returncode == 0, done.stderr
    if document in ANSWERS:
        assert not_printed(document.read_text(), done.stderr) == []


@pytest.mark.parametrize("settings", ["", 'parallelism_config={"fsdp": {}},'], ids=["DDP", "FSDP2"])
def test_the_language_model_trains_in_two_processes(settings, tmp_path):
    """The program of the guide does not change: both processes evaluate the same model, and one exports it."""
    code = program((ROOT / "docs/guides/train_a_language_model.md").read_text())
    code = code.replace('device="cpu",', f'device="cpu", {settings}')
    (tmp_path / "train.py").write_text(code)

    outputs = run_processes("train.py", 2, cwd=tmp_path)

    first, second = (re.findall(r"'LanguagePerplexity': tensor\(([\d.]+)\)", output) for output in outputs)
    assert first == second != []
    assert (tmp_path / "runs" / "exported" / "model.safetensors").exists()
    assert "train_dataloader has no sampler and is split over the 2 processes" in outputs[0]


@pytest.mark.parametrize("document", DOCUMENTS, ids=str)
def test_links_are_valid(document):
    """The targets of links within the repository exist."""
    targets = re.findall(r"\]\((?!https?:|#)([^)#\s]+)", document.read_text())

    assert [target for target in targets if not (document.parent / target).exists()] == []


@pytest.mark.parametrize("document", GUIDES_TO_THE_CODE, ids=str)
def test_named_paths_exist(document):
    """Paths in these documents are ends of paths of the repository, and names of ``composer`` can be imported."""
    text = re.sub(r"^```.*?^```$", "", document.read_text(), flags=re.DOTALL | re.M)
    spans = re.findall(r"`([^`\n]+)`", text)

    missing = [one for one in spans if PATH.fullmatch(one) and Path(one).parts not in path_parts()]
    for name in filter(re.compile(r"composer(\.\w+)+").fullmatch, spans):
        pkgutil.resolve_name(name)

    assert missing == []


@cache
def path_parts():
    """Return all sequences of neighbouring names in the paths of the repository."""
    files = subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    names = [Path(file).parts for file in files.splitlines()]
    return {one[start:end] for one in names for start in range(len(one)) for end in range(start + 1, len(one) + 1)}


def test_number_of_methods():
    """The first pages state how many algorithms there are; the site names four of them before."""
    exported = [getattr(composer.algorithms, name) for name in composer.algorithms.__all__]
    number = sum(isinstance(each, type) and issubclass(each, Algorithm) for each in exported)

    assert f"It has {number} methods" in (ROOT / "README.md").read_text()
    assert f"weight averaging and {number - 4} more" in (ROOT / "docs/index.md").read_text()


def test_measured_numbers():
    """The first pages have the same three measured numbers, each in a document that it links, and the same picture."""
    numbers, pictures = [], []
    for page in (ROOT / "README.md", ROOT / "docs/index.md"):
        found = re.findall(r"^- \*\*(.+?)\*\*(.+?): \[.+\]\((.+?)\)\.$", page.read_text(), re.M)
        numbers.append([(number, of_what, (page.parent / link).resolve()) for number, of_what, link in found])
        pictures.append({(page.parent / link).resolve() for link in re.findall(r"\]\((.+\.png)\)", page.read_text())})

    assert numbers[0] == numbers[1]
    assert len(numbers[0]) == 3
    for number, of_what, document in numbers[0]:
        assert re.search(rf"\b{re.escape(number)}", document.read_text())
        assert all(one in document.read_text() for one in re.findall(r"[\d.]+ \xd7", of_what))
    assert pictures[0] == pictures[1] == {ROOT / "docs/evidence/few_labels/quickstart.png"}


@pytest.mark.parametrize("card", CARDS, ids=lambda path: path.stem)
class TestCards:
    """All method cards have the same form."""

    def test_sections(self, card):
        """A card has the same sections in the same order, and each has text."""
        text = re.sub(r"^```.*?^```$", "code", card.read_text(), flags=re.DOTALL | re.M)
        parts = re.split(r"^## (.+)\n", text, flags=re.M)

        assert parts[1::2] == SECTIONS
        assert "<!-- table: defaults" in parts[6]
        assert all(part.strip() for part in parts[2::2])

    def test_three_depths(self, card):
        """The method is shown as a function, or in a plain loop, in an engine and in the trainer, each with code."""
        depths = re.findall(r"^### (\w+)\n\n```python\n(.+?)^```$", card.read_text(), re.S | re.M)
        first = {"Functional": "cf.", "Loop": "\nfor "}

        assert [name for name, _ in depths] in [[name, "Engine", "Trainer"] for name in first]
        for (name, code), needed in zip(depths, [None, "engine.run_event(", "trainer.fit("], strict=True):
            assert first.get(name, needed) in code


PICTURES = sorted(ROOT.glob("docs/**/*.png"))


@pytest.mark.parametrize("picture", sorted(ROOT.glob("docs/methods/pictures/*.png")), ids=lambda path: path.stem)
def test_pictures_are_large_enough_and_small_files(picture):
    """A method's picture has at least 320 pixels in height and a file of less than 120 kB."""
    content = picture.read_bytes()
    (height,) = struct.unpack(">I", content[20:24])  # in the first chunk of a PNG

    assert height >= 320
    assert len(content) < 120_000


def test_pictures_have_descriptions_and_are_shown():
    """Every picture is shown in a document, with an alternative text of several words."""
    shown = {}
    for document in DOCUMENTS:
        for text, target in re.findall(r"!\[(.*?)\]\((?!https?:)(.+?\.png)\)", document.read_text(), re.DOTALL):
            shown[(document.parent / target).resolve()] = text

    assert [picture for picture in PICTURES if len(shown.get(picture, "").split()) < 4] == []
    assert sum(picture.parent.parent.name == "methods" for picture in shown) >= 20


GUIDES = [path for path in DOCUMENTS if path.parent.name in {"guides", "how_it_works", "tutorials"}]


@pytest.mark.parametrize("document", [path for path in GUIDES if path.name != "index.md"], ids=str)
def test_guides_have_a_beginning_and_an_end(document):
    """After its title a guide states whom it is for; its last section has links to at least two other pages."""
    title, whom, *_ = document.read_text().split("\n\n")
    heading, links = document.read_text().rsplit("\n## ", 1)[1].split("\n", 1)

    assert re.fullmatch(r"# .+", title)
    assert re.fullmatch(r"\*For .+\*", whom, re.DOTALL)
    assert heading == "Where next"
    assert len(re.findall(r"^- .*\]\(", links, re.MULTILINE)) >= 2


class TestRunner:
    """The checks above can fail."""

    def test_an_error_names_its_line(self, tmp_path):
        """A failing block is reported with the document's name and the line in it."""
        done = run("# Title\n\n```python\nx = 1\n```\n\ntext\n\n```python\nassert x == 2\n```\n", "guide.md", tmp_path)

        assert done.returncode == 1
        assert 'File "guide.md", line 10' in done.stderr

    def test_only_a_reason_exempts(self, tmp_path):
        """A block with a reason before it is skipped; one with an empty reason is not."""
        block = "```python\nraise SystemExit(3)\n```\n"

        codes = [
            run(f"<!-- not run:{reason} -->\n{block}", "guide.md", tmp_path).returncode for reason in (" slow", " ")
        ]

        assert codes == [0, 3]

    @pytest.mark.parametrize("line", ["accuracy 0.312", "accuracy", "error 0.901"])
    def test_another_output_is_found(self, line):
        """A line that the program did not print is returned, also one with another number."""
        page = "```text\n3 steps\naccuracy 0.902\n```\n"

        assert not_printed(page, "a warning\n4 steps\naccuracy 0.894\n") == []
        assert not_printed(page, f"4 steps\n{line}\n") == ["accuracy 0.902"]


@pytest.mark.parametrize("page", ANSWERS, ids=lambda path: path.stem)
def test_answers_have_one_form(page):
    """A title, a program and its output, and links to at least two other pages; the index has a link to it."""
    title, *_, last = page.read_text().strip().split("\n\n")
    index = (ROOT / "docs" / "guides" / "how_do_i.md").read_text()

    assert re.fullmatch(r"# .+", title)
    assert re.search(r"^(```python|```{literalinclude} \S+\.py)\n.+^```text\n.+^```\n", page.read_text(), re.S | re.M)
    assert last.startswith("More: ")
    assert len(re.findall(r"\]\((?!https?:)", last)) >= 2
    assert f"](../how_do_i/{page.name})" in index
    assert f"\n../how_do_i/{page.stem}\n" in index


def test_answers_in_two_processes(tmp_path):
    """The answers are programs for several processes, too, but for the search of a learning rate."""
    texts = [page.read_text() for page in ANSWERS if "find_lr" not in page.read_text()]
    programs = [re.sub(r"^results = main\(\).*", "main()\n", program(text), flags=re.S | re.M) for text in texts]
    (tmp_path / "program.py").write_text("".join(programs))  # without uses of a process's part of the predictions

    printed = run_processes(tmp_path / "program.py", 2, cwd=tmp_path, timeout=300)

    assert len(texts) > 20
    assert [re.findall(r"process \d of \d", output) for output in printed] == [["process 0 of 2"], ["process 1 of 2"]]
