"""The benchmarks that also run on a GPU: their arguments, and their code on the CPU."""

import importlib
from pathlib import Path

import pytest
import torch

FOLDER = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture
def benchmark(monkeypatch, set_command):
    """Return a function that imports a benchmark by name and sets its command line."""

    def load(name, *arguments):
        monkeypatch.syspath_prepend(FOLDER)
        set_command(name, *arguments)
        return importlib.import_module(name)

    return load


@pytest.mark.parametrize("name", ["trainer_overhead", "trainers", "kernels"])
class TestArguments:
    """The options that all have."""

    def test_device(self, benchmark, name):
        """A benchmark runs on the CPU by default and on a GPU on request."""
        assert benchmark(name).parse_arguments().device == "cpu"
        assert benchmark(name, "--device", "cuda").parse_arguments().device == "cuda"


class TestTrainerOverhead:
    """The overhead of a step."""

    @pytest.mark.parametrize("variant", ["loop", "trainer"])
    def test_measures_on_the_cpu(self, benchmark, variant):
        """Each variant has a time, a peak of memory, and on a CPU no synchronization with a device."""
        figures = benchmark("trainer_overhead").measure(variant, 20, "cpu")

        assert figures["us"] > 0
        assert figures["mib"] > 0
        assert figures["synchronizations"] == 0

    def test_reports_differences_from_the_loop(self, benchmark, capsys):
        """Times and memory are compared within a round, and the largest number of synchronizations counts."""
        loop = [{"us": 100, "synchronizations": 0, "mib": 10}, {"us": 200, "synchronizations": 0, "mib": 10}]
        ours = [{"us": 130, "synchronizations": 0, "mib": 12}, {"us": 240, "synchronizations": 1, "mib": 12}]

        rows = benchmark("trainer_overhead").report({"loop": loop, "trainer": ours})["rows"]

        assert (rows[1]["us_above_loop"], rows[1]["synchronizations"], rows[1]["mib_above_loop"]) == (35, 1, 2)
        assert "trainer" in capsys.readouterr().out


class TestKernels:
    """Kernels compared with their reference."""

    def test_measures_on_the_cpu(self, benchmark, capsys):
        """A case gives a ratio for each variant except the reference."""
        kernels = benchmark("kernels")
        (case,) = [case for case in kernels.CASES if case.name == "cutout_batch, 128 of 32"]

        figures = kernels.measure(case, rounds=1, block=0.001, device="cpu")

        assert [figure["variant"] for figure in figures] == ["ours", "ours with its draws, clipped at the border"]
        assert all(figure["ratio"] > 0 for figure in figures)

    def test_operations_of_three_libraries(self, benchmark):
        """An operation of this library, kornia's and torchvision's are timed after their results were compared."""
        kernels = benchmark("kernels")
        (case,) = [case for case in kernels.CASES if case.name == "operation rotate, 128 of 32"]

        figures = kernels.measure(case, rounds=1, block=0.001, device="cpu")

        assert [figure["variant"] for figure in figures] == ["kornia", "torchvision v2, one magnitude for the batch"]

    def test_other_results_raise(self, benchmark):
        """A variant whose result differs by more than the tolerance is not timed."""
        kernels, cases = benchmark("kernels"), benchmark("_kernel_cases")
        one = torch.ones(2)
        case = cases.Case("case", lambda: [("one", lambda: one), ("two", lambda: one + 0.1)], None, tolerance=0.05)

        with pytest.raises(AssertionError, match="Tensor-likes are not close"):
            kernels.measure(case, rounds=1, block=0.001, device="cpu")


class TestMuon:
    """Muon compared with torch's."""

    @pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch.optim.Muon exists from torch 2.9 on")
    def test_measures_on_the_cpu(self, benchmark):
        """Both have a time, and the weights of both are compared before."""
        figures = benchmark("muon").compare(1, 16, "cpu", 3)

        assert figures["low"] <= figures["ratio"] <= figures["high"]
        assert min(figures["composer"], figures["torch"]) > 0

    def test_divided_work(self, benchmark, capsys):
        """With two processes, each orthogonalizes half of the matrices; the weights are compared before."""
        benchmark("muon", "--processes", "2", "--layers", "1", "--width", "16", "--rounds", "1").main()

        rows = [line.split() for line in capsys.readouterr().out.splitlines()]
        assert [(row[0], row[3]) for row in rows] == [("undivided", "6"), ("divided", "3")]


def test_plan_of_many_processes(benchmark, capsys):
    """It is measured for one process and for many, in which only the manifest is longer."""
    benchmark("many_processes", "--processes", "4", "--tensors", "20").main()

    rows = {line[:24].strip(): line[24:].split() for line in capsys.readouterr().out.splitlines()[1:]}
    assert int(float(rows["manifest, bytes"][0])) < int(float(rows["manifest, bytes"][1]))
    assert rows["own file, bytes"][0] == rows["own file, bytes"][1]
