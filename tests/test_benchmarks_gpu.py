"""The benchmark for a GPU: its arguments, each part with tiny sizes on the CPU, its tables and the page with them."""

import importlib
import json
import os
import subprocess
import sys
import time
from argparse import Namespace
from pathlib import Path

import pytest
import torch
import transformers  # noqa: F401  (before a package of the name "kernels" is found, which it would import)

FOLDER = Path(__file__).parents[1] / "benchmarks"
VARIANTS = {
    "packing": ["plain loop", "Trainer", "Trainer, packed by in_order", "Trainer, packed by best_fit"],
    "checkpoint": [
        "copy to pinned memory",
        "what training waits for",
        "torch.save, without waiting for the disk",
        "save, until it is on the disk",
    ],
    "kernels": ["cutout_batch, 128 of 32"] * 2,
}


@pytest.fixture
def load(monkeypatch, set_command):
    """Return a function that imports a program by name and sets its command line."""

    def load(name="gpu", *arguments):
        monkeypatch.syspath_prepend(FOLDER)
        set_command("gpu.py", *arguments)
        return importlib.import_module(name)

    return load


def options(**others):
    """Return tiny options for the CPU."""
    settings = {"device": "cpu", "size": "tiny", "precision": "fp32", "rounds": 1, "done": []}
    return Namespace(**settings | {"deadline": time.time() + 600} | others)


def fail():
    """Raise an error after a row."""
    yield {"ms": 1.0}
    raise ValueError("of two\nlines")


class TestArguments:
    """The command line."""

    @pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
    def test_without_a_gpu(self, load):
        """Without a GPU the error has the command that checks the program."""
        with pytest.raises(SystemExit, match="needs a GPU, and torch finds none"):
            load().main()

    def test_halves(self, load):
        """Each part is in one half, whose output is its own; the parts that follow get what the first leave."""
        gpu = load("gpu", "--half", "second", "--output", "build/gpu.jsonl")

        options = gpu.parse_arguments()

        assert sorted(gpu.HALVES["first"] + gpu.HALVES["second"]) == sorted(gpu.PARTS)
        assert (options.parts, str(options.output)) == (gpu.HALVES["second"], "build/gpu-second.jsonl")
        assert options.budget + gpu.OVERTIME < 480
        assert gpu.HALVES["first"][0] == "fastest"

    @pytest.mark.parametrize(("arguments", "expected"), [([], "amp_bf16"), (["--device", "cpu"], "fp32")])
    def test_precision(self, load, arguments, expected):
        """A rehearsal on a CPU does not compute in bfloat16, which is slow on many, unless it is required."""
        gpu = load("gpu", *arguments)

        assert gpu.parse_arguments().precision == expected

    def test_precision_that_is_required(self, load):
        """The argument is preferred."""
        assert load("gpu", "--device", "cpu", "--precision", "amp_bf16").parse_arguments().precision == "amp_bf16"


class TestParts:
    """What is measured."""

    @pytest.mark.parametrize("part", VARIANTS)
    def test_measures_on_the_cpu(self, load, part):
        """Each variant has a row with figures."""
        rows = [*load().measure(part, options())]

        assert [row["name"] for row in rows] == VARIANTS[part]
        assert not [row for row in rows if "error" in row or "skipped" in row]
        assert all(value > 0 for row in rows for value in row.values() if isinstance(value, float))

    def test_overhead(self, load, monkeypatch):
        """Each trainer has a process of its own; those that need other libraries are tested on a stand-in for a GPU."""
        gpu = load()
        monkeypatch.setattr(gpu.trainers, "ON_GPU", ["loop", "ours"])

        rows = [*gpu.measure("overhead", options())]

        assert [row["name"] for row in rows] == ["plain loop, compared with itself", "composer"]
        assert all(row["a step, µs"] > 0 and row["relative to the plain loop"] > 0 for row in rows)

    def test_losses(self, load):
        """The first variant is the reference."""
        rows = [*load().measure("loss", options())]

        names = ["all logits", "chunks", "chunks of 4", "chunks, compiled"]
        assert [row["name"] for row in rows[:4]] == names
        assert rows[0]["relative to all logits"] == 1
        assert all(row["relative to all logits"] > 0 for row in rows[1:4])

    @pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # which dynamo reads
    def test_fastest(self, load, monkeypatch):
        """The loop and the Trainer compile the network, in one graph without a mask, and rows fill its positions."""
        graphs = []

        def backend(graph, _):
            nodes = [node.kwargs for node in graph.graph.nodes if "scaled_dot_product" in str(node.target)]
            graphs.append([(one["attn_mask"], one["is_causal"]) for one in nodes])
            return graph

        monkeypatch.setattr(load("_gpu_training"), "REHEARSED", backend)

        rows = [*load().measure("fastest", options())]

        assert graphs == [[(None, True)] * 2] * len(graphs)
        assert len(graphs) >= 3

        assert [row["name"] for row in rows] == ["plain loop", "Trainer", "ChunkedCrossEntropy"]
        assert all(row["rows"] == 4 and row["relative to the plain loop"] > 0 for row in rows)

    def test_rows_that_fit(self, load, monkeypatch):
        """The loop has to fit beside what the Trainer keeps; fewer rows are tried until it does."""
        training, tried, kept = load("_gpu_training"), [], []

        class Loop:
            def __init__(self, task, options):
                self.rows = task

            def train(self, count):
                tried.append(self.rows)
                if self.rows > 40 or (self.rows > 24 and kept):
                    raise torch.OutOfMemoryError("CUDA out of memory.")

        monkeypatch.setattr(training, "PlainLoop", Loop)
        monkeypatch.setattr(training, "allocated", lambda options: 250 * len(tried))
        monkeypatch.setattr(torch, "empty", lambda size, **_: kept.append(size))

        assert [training.fits(rows, options()) for rows in (56, 40, 24)] == [False, False, True]
        assert tried == [56, 40, 40, 24, 24]
        assert kept == [250, 250]

    @pytest.mark.slow
    @pytest.mark.parametrize(("part", "methods"), [("resnet50", "FOR_IMAGES"), ("gpt", "FOR_TEXT")])
    def test_methods(self, load, monkeypatch, part, methods):
        """The plain loop, the Trainer and a method train; with ``RESUME_MATRIX=all`` in the environment each method."""
        training, names = load("_gpu_training"), sorted(getattr(load("_gpu_training"), methods))
        names = names if os.environ.get("RESUME_MATRIX") == "all" else names[:3]
        monkeypatch.setattr(training, methods, {name: getattr(training, methods)[name] for name in names})

        rows = [*load().measure(part, options())]

        assert [row["name"] for row in rows] == ["plain loop", "Trainer", *names]
        assert not [row for row in rows if "error" in row or "skipped" in row]
        assert all(row["relative to the plain loop"] > 0 for row in rows)


class TestFlops:
    """Model FLOPs utilization."""

    def test_of_resnet50(self, load):
        """Three times the 4.09 billion multiplications and additions of a forward pass, less the images' gradient."""
        training = load("_gpu_training")
        task = training.images(options())
        task.batches[:] = [(torch.rand(2, 3, 224, 224), torch.zeros(2, dtype=torch.long))]
        with torch.device("meta"):
            network = training.make_resnet("full")

        flops = training.count_flops(task, network, "meta")

        first = 2 * 3 * 64 * 49 * 112**2
        assert flops / 2 == pytest.approx(3 * 2 * 4.09e9 - first, rel=0.005)

    @pytest.mark.parametrize(
        ("precision", "name", "expected"),
        [
            ("amp_bf16", "NVIDIA A100-SXM4-80GB", 0.5),
            ("amp_bf16", "Unknown", None),
            ("fp32", "NVIDIA A100-SXM4-80GB", None),
        ],
    )
    def test_mfu(self, load, set_gpu_name, precision, name, expected):
        """The part of the peak of 312 TFLOP/s; neither an unknown device nor full precision has one peak."""
        training, task = load("_gpu_training"), Namespace(unit="images", amount=1)
        loop = Namespace(task=task, device="cuda", options=options(precision=precision), flops=312e12)
        set_gpu_name(name)

        assert training.figures(loop, task, 2.0, 1.0, None)["MFU"] == expected
        assert training.figures(loop, task, 2.0, 1.0, None, is_plain=False)["MFU"] is None


class TestFailures:
    """What is not measured."""

    def attempted(self, load, call, **others):
        return [*load("_gpu_training").attempt("one", call, options(**others))]

    def test_error(self, load):
        """An error is a row after those before it, in one line."""
        rows = self.attempted(load, fail)

        assert rows == [{"name": "one", "ms": 1.0}, {"name": "one", "error": "ValueError: of two lines"}]

    def test_one_of_several_calls(self, load):
        """A call that raises an error, also the one that others are compared with, does not prevent the others."""
        calls = {"one": lambda: None, "two": lambda: 1 / 0, "three": lambda: None}

        rows = [*load().in_turns(calls, options())]
        others = [*load().in_turns({"two": calls["two"], "one": calls["one"]}, options())]

        assert rows[0]["relative to one"] == 1
        assert rows[1] == {"name": "two", "error": "ZeroDivisionError: division by zero"}
        assert rows[2]["relative to one"] > 0
        assert [row.get("error", "")[:4] for row in others] == ["Zero", ""]
        assert others[1]["ms"] > 0
        assert others[1]["relative to two"] is None


PROGRAM = """
import json, sys, time
for name in "abcd":
    if name not in sys.argv[1:]:
        if name == "c" and {dies}:
            sys.exit(3)
        print(json.dumps({{"part": "loss", "name": name}}), flush=True)
        if name == "b":
            sys.exit(1)
"""


class TestProcesses:
    """The processes of the parts."""

    def measured(self, load, monkeypatch, program, seconds=60.0):
        """Return the rows of a part, which a small program measures."""
        gpu = load()

        def start(part, options, deadline, done):
            return subprocess.Popen([sys.executable, "-S", "-c", program, *done], stdout=subprocess.PIPE, text=True)

        monkeypatch.setattr(gpu, "start", start)
        return [*gpu.run_part("loss", options(), time.time() + seconds, 1)]

    def test_continues_in_another_process(self, load, monkeypatch):
        """What a process has not measured when it ended is measured by another one."""
        rows = self.measured(load, monkeypatch, PROGRAM.format(dies=False))

        assert [row["name"] for row in rows] == ["a", "b", "c", "d"]
        assert not [row for row in rows if "error" in row]

    def test_is_killed_at_its_exit(self, load, monkeypatch):
        """A process that has written all its rows has no error, however it ends, and no other one begins."""
        program = 'import os; print(\'{"part": "loss", "name": "a"}\\n{}\', flush=True); os.kill(os.getpid(), 9)'

        assert self.measured(load, monkeypatch, program) == [{"part": "loss", "name": "a"}]

    def test_is_killed(self, load, monkeypatch):
        """A process that does not end in time is killed, which is an error."""
        gpu = load()
        monkeypatch.setattr(gpu, "OVERTIME", 0)

        rows = [*gpu.run_part("loss", options(), time.time() + 0.2, 1)]

        assert rows == [
            {"part": "loss", "name": "loss", "error": "the process has ended with -9, what follows is missing"}
        ]


class TestRuns:
    """The complete program."""

    def run(self, load, output, *arguments):
        """Run it, and return its exit code and its rows."""
        tiny = ["--device", "cpu", "--size", "tiny", "--output", output]
        with pytest.raises(SystemExit) as caught:
            load("gpu", *tiny, *arguments).main()
        return caught.value.code, [json.loads(line) for line in output.read_text().splitlines()]

    def test_writes_lines_and_tables(self, load, tmp_path, capsys):
        """The lines have what the figures depend on, and the tables are printed and written."""
        output = tmp_path / "new" / "gpu.jsonl"

        code, rows = self.run(load, output, "--parts", "loss", "--rounds", "2")

        assert code == 0
        assert [row["part"] for row in rows[:3]] == ["environment", "loss", "loss"]
        assert (rows[0]["size"], rows[0]["rounds"]) == ("tiny", 2)
        assert torch.__version__.startswith(rows[0]["torch"])
        tables = output.with_suffix(".md").read_text()
        assert "| all logits |" in tables
        assert tables in capsys.readouterr().out

    def test_errors(self, load, tmp_path):
        """An error of a part is in its rows, the next part begins, and the exit code is 1."""
        code, rows = self.run(load, tmp_path / "gpu.jsonl", "--parts", "loss", "kernels", "--rounds", "0")

        assert code == 1
        assert ["StatisticsError" in row["error"] for row in rows[1:]] == [True, True]
        assert [row["name"] for row in rows[1:]] == ["loss", "cutout_batch, 128 of 32"]


class TestTables:
    """Markdown."""

    def test_rows(self, load):
        """Figures have three digits, an error replaces them, and a part without rows is not measured yet."""
        rows = [
            {"part": "environment", "name": "NVIDIA X", "size": "full", "torch": "2.15"},
            {"part": "gpt", "name": "plain loop", "tokens/s": 123456.7, "MFU": 0.4567},
            {"part": "gpt", "name": "Trainer", "tokens/s": 123456.7, "MFU": None},
            {"part": "gpt", "name": "SAM", "error": "ValueError: a | b"},
        ]

        tables = load().render(rows)

        assert tables.startswith("NVIDIA X: size full, torch 2.15.\n")
        expected = ["|  | tokens/s | MFU |", "|---|---|---|", "| plain loop | 123,457 | 0.457 |"]
        expected += ["| Trainer | 123,457 |  |", "| SAM | ValueError: a   b |"]
        assert "\n".join(expected) in tables
        assert tables.count("Not measured yet.") == len(load().PARTS) - 1

    def test_publish(self, load, tmp_path):
        """The lines are written beside the page, and the tables into it, in place of earlier ones."""
        page = tmp_path / "README.md"
        page.write_text("before\n<!-- gpu -->\nold\n<!-- end -->\nafter\n")
        lines = '{"part": "loss", "name": "chunks", "ms": 1.5}\n'

        load().publish(lines, tmp_path)

        assert page.read_text().startswith("before\n<!-- gpu -->\n### loss\n")
        assert "| chunks | 1.5 |\n" in page.read_text()
        assert page.read_text().endswith("<!-- end -->\nafter\n")
        assert (tmp_path / "gpu.jsonl").read_text() == lines

    def test_page(self, load, tmp_path):
        """The page has the tables of the published lines."""
        published, page = FOLDER / "gpu.jsonl", (FOLDER / "README.md").read_text()
        (tmp_path / "README.md").write_text(page)

        load().publish(published.read_text() if published.exists() else "", tmp_path)

        assert (tmp_path / "README.md").read_text() == page
