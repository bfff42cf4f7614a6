"""Checkpoints are shown, verified, merged and compared, by functions and from the command line."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from composer.checkpoint import save_checkpoint
from composer.checkpoint.__main__ import main


class TestShow:
    def test_summary(self, saved, capsys):
        """Clock, optimizer, sizes and modules are printed."""
        code = main(["show", str(saved)])

        printed = capsys.readouterr().out
        assert code == 0
        assert "clock       1 epochs, 5 batches, 20 samples" in printed
        assert "optimizers  Adam" in printed
        assert "weights     67 numbers" in printed
        assert "0 40" in printed

    def test_metrics_and_algorithms(self, runs, tmp_path, capsys):
        """Algorithms are printed with settings, metrics with values."""
        from composer.algorithms import MixUp

        state = runs.make(algorithms=MixUp(alpha=0.4))
        state.eval_metric_values = {"Accuracy": torch.tensor(0.75)}

        main(["show", save_checkpoint(state, tmp_path / "one")])

        printed = capsys.readouterr().out
        assert "MixUp(alpha=0.4, " in printed
        assert "metrics/eval/Accuracy 0.75" in printed

    def test_control_characters_are_removed(self, runs, tmp_path, capsys):
        """Names are printed without control characters."""
        path = save_checkpoint(runs.make(), tmp_path / "one")
        runs.rename(path, "\x1b[2Jblur")

        main(["show", path])

        assert "run         ?[2Jblur" in capsys.readouterr().out

    def test_program(self, saved):
        """As a program it imports neither torchmetrics nor torchvision, and reports errors in one line."""
        code = (
            "import sys, runpy; sys.modules['torchmetrics'] = sys.modules['torchvision'] = None;"
            "sys.argv[0] = 'checkpoint'; runpy.run_module('composer.checkpoint', run_name='__main__')"
        )
        output = subprocess.run(
            [sys.executable, "-c", code, "show", saved], capture_output=True, text=True, check=False
        )
        wrong = subprocess.run(
            [sys.executable, "-c", code, "verify", f"{saved}x"], capture_output=True, text=True, check=False
        )

        assert (output.returncode, output.stderr) == (0, "")
        assert (wrong.returncode, wrong.stderr) == (1, f"{saved}x does not exist.\n")


class TestVerify:
    def test_complete(self, saved, capsys):
        """A complete checkpoint is reported as valid."""
        assert main(["verify", str(saved)]) == 0
        assert "is complete: 4 files" in capsys.readouterr().out

    @pytest.mark.filterwarnings("ignore:Skipped a checkpoint that is incomplete or damaged")
    def test_folder_of_checkpoints(self, runs, saved, capsys):
        """Of a folder of checkpoints, the newest undamaged one is verified and named."""
        later = save_checkpoint(runs.make(), saved.parent / "two")
        Path(later, "optimizers.safetensors").write_bytes(b"")

        assert main(["verify", str(saved.parent)]) == 0
        assert capsys.readouterr().out.startswith(f"{saved} is complete")

    def test_damaged(self, saved, capsys):
        """A damaged one is reported with the file's name."""
        (saved / "optimizers.safetensors").write_bytes(b"")

        assert main(["verify", str(saved)]) == 1
        assert "optimizers.safetensors has 0 bytes" in capsys.readouterr().err


class TestMerge:
    def test_one_file(self, saved, tmp_path, capsys):
        """The weights of a checkpoint are in one file, with their names."""
        file = tmp_path / "weights.safetensors"

        assert main(["merge", str(saved), str(file)]) == 0
        assert capsys.readouterr().out == f"{file} has the weights of {saved}.\n"
        expected = load_file(saved / "model.safetensors")
        torch.testing.assert_close(load_file(file), expected, rtol=0, atol=0)

    def test_missing(self, tmp_path, capsys):
        """Without a checkpoint, the error is one line, and no file is written."""
        assert main(["merge", str(tmp_path / "none"), str(tmp_path / "file")]) == 1
        assert capsys.readouterr().err == f"{tmp_path / 'none'} does not exist.\n"
        assert not (tmp_path / "file").exists()


class TestDiff:
    def test_equal(self, runs, saved, capsys):
        """Checkpoints of equal runs do not differ, for any time of writing."""
        assert (
            main(
                [
                    "diff",
                    str(saved),
                    save_checkpoint(runs.make(), saved.parent / "two", extra={"data": {"position": 7}}),
                ]
            )
            == 0
        )
        assert capsys.readouterr().out == "There is no difference.\n"

    def test_times_are_not_compared(self, runs, tmp_path, capsys):
        """The seconds of a training are no difference, neither of the clock nor of the one before the batch."""
        paths = [
            save_checkpoint(runs.make(), tmp_path / name, extra={"clock_before": {"batch": 4, "total_wct": seconds}})
            for name, seconds in [("one", 1.0), ("two", 2.0)]
        ]

        assert main(["diff", *paths]) == 0
        assert capsys.readouterr().out == "There is no difference.\n"

    def test_different(self, runs, saved, capsys):
        """Different weights, settings and clocks are reported, weights by their largest difference."""
        state = runs.make(batch=6)
        state.model[0].bias.data[3] += 0.25
        state.optimizers[0].param_groups[0]["lr"] = 0.5

        code = main(["diff", str(saved), save_checkpoint(state, saved.parent / "two", weights_only=False)])

        lines = capsys.readouterr().out.splitlines()
        assert code == 1
        assert "model.safetensors 0.bias: differs by at most 0.25" in lines
        assert "timestamp.batch: 5 and 6" in lines
        assert "optimizers.Adam.param_groups[0].lr: 0.01 and 0.5" in lines
        assert "extra.data: only in the first" in lines
        assert not any("0.weight" in line for line in lines)

    def test_equal_numbers_of_other_bits(self, runs, saved, capsys):
        """A signed zero is reported as a difference of bits, not as one of 0."""
        one, other = runs.make(), runs.make()
        one.model[0].bias.data[:] = 0.0
        other.model[0].bias.data[:] = -0.0
        paths = [save_checkpoint(state, saved.parent / name) for state, name in ((one, "one"), (other, "other"))]

        assert main(["diff", *paths]) == 1
        assert "model.safetensors 0.bias: differs in its bits" in capsys.readouterr().out

    def test_nan_is_compared_bitwise(self, runs, tmp_path):
        """Equal NaNs are equal."""
        state = runs.make()
        state.model[0].bias.data[0] = torch.nan
        paths = [save_checkpoint(state, tmp_path / name) for name in ("one", "two")]

        assert main(["diff", *paths]) == 0

    @pytest.mark.parametrize("arguments", [[], ["what"], ["show"], ["diff", "one"]])
    def test_usage_errors(self, arguments):
        """A wrong call has the exit code of usage errors."""
        with pytest.raises(SystemExit) as caught:
            main(arguments)

        assert caught.value.code == 2


class TestCraftedFiles:
    @pytest.mark.parametrize("command", ["show", "diff"])
    @pytest.mark.parametrize("state", ["nothing", "deep"])
    def test_crafted_files(self, runs, saved, capsys, command, state):
        """A crafted checkpoint, without a state or deeply nested, is shown or reported in one line."""
        path = saved / "state.json"
        if state == "deep":
            text = json.dumps({"algorithms": [{"key": "A", "settings": {"a": "DEEP"}}]})
            path.write_text(text.replace('"DEEP"', "[" * 900 + "]" * 900))
        else:
            path.unlink()
        runs.sign(saved)

        code = main([command, str(saved), *([str(saved)] * (command == "diff"))])

        printed = capsys.readouterr()
        is_refused = (code, printed.out, printed.err.count("\n")) == (1, "", 1) and "state.json is" in printed.err
        is_right = code == 0 and (command == "show" or printed.out == "There is no difference.\n")
        assert is_refused or (state == "deep" and is_right)  # how deep is too deep differs between releases of Python
