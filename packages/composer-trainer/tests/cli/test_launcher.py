"""The launcher translates its options to torchrun's, prints the command and runs it, until a Ctrl-C."""

import os
import signal
import subprocess
import sys

import pytest

from composer.cli.launcher import torchrun_arguments

PROGRAM = """
import os, pathlib, sys
pathlib.Path(__file__).with_name(os.environ["RANK"]).write_text(os.environ["WORLD_SIZE"] + " " + " ".join(sys.argv[1:]))
assert os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] == "1"  # restarts on several hosts need it
sys.exit(int(os.environ["RANK"]) if "fail" in sys.argv else 0)
"""


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("-n 2 train.py", "--standalone --nproc-per-node=2 train.py"),
        ("--nproc 2 train.py -n 3 --seed=1", "--standalone --nproc-per-node=2 train.py -n 3 --seed=1"),
        ("-v -n 1 -m pkg.train a", "--standalone --nproc-per-node=1 --module pkg.train a"),
        ("-n 1 -c python -m this", "--standalone --nproc-per-node=1 --no-python python -m this"),
        ("-n 2 --master_port 29400 t.py", "--master-port=29400 --nproc-per-node=2 t.py"),
        (
            "-n 4 --world_size 8 --base_rank 4 --master_addr host --master_port 29400 t.py",
            "--nnodes=2 --node-rank=1 --master-addr=host --master-port=29400 --nproc-per-node=4 t.py",
        ),
    ],
)
def test_options(given, expected):
    """Each option has its equivalent; what follows the program belongs to the program."""
    assert torchrun_arguments(given.split()) == expected.split()


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ("-n 0 t.py", "at least 1"),
        ("-n 2", "program"),
        ("-n 3 --world_size 8 t.py", "--world_size must be a multiple of --nproc=3, got 8"),
        ("-n 2 --world_size 8 --base_rank 3 t.py", "--base_rank must be a multiple of --nproc=2, got 3"),
        ("-n 2 -m -c t.py", "not both"),
        ("-n 2 --stdout out.txt t.py", "torchrun with --redirects=3"),
    ],
)
def test_wrong_options(given, error, capsys):
    """A wrong option ends the program with status 2 and a reason."""
    with pytest.raises(SystemExit) as ending:
        torchrun_arguments(given.split())

    assert ending.value.code == 2
    assert error in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["--lr", "0.1"], ["fail"]])
def test_processes(tmp_path, arguments):
    """Two processes run with their ranks, the command is printed, and a failing process makes the launcher fail.

    It starts three processes, of which one imports torch.
    """
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)

    done = subprocess.run(
        [sys.executable, "-m", "composer.cli.launcher", "-n", "2", str(program), *arguments],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )

    assert done.stderr.startswith(f"torchrun --standalone --nproc-per-node=2 {program}")
    assert bool(done.returncode) == (arguments == ["fail"])
    assert done.returncode or [(tmp_path / rank).read_text() for rank in "01"] == ["2 --lr 0.1"] * 2


INTERRUPTED = """
import os, signal, time, torch
signal.signal(signal.SIGINT, signal.default_int_handler)  # whatever has started the tests
from composer import Trainer
from composer.models import ComposerClassifier

network = torch.nn.Linear(4, 2)
trainer = Trainer(
    model=ComposerClassifier(network), train_dataloader=[(torch.rand(4, 4), torch.zeros(4, dtype=torch.long))] * 2000,
    optimizers=torch.optim.SGD(network.parameters(), lr=0.1), max_duration="1ep", device="cpu", progress_bar=False,
)
trainer.engine.on("batch_end", lambda *_: time.sleep(0.02))
trainer.engine.on("batch_end", lambda *_: os.write(1, b"ready\\n"), every="5ba")  # in one piece
trainer.fit()
"""


@pytest.mark.slow
@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_interrupt_of_two_processes(tmp_path, number, status):
    """After Ctrl-C or SIGTERM both finish the batch, one sentence states it, and no process writes a traceback."""
    program = tmp_path / "program.py"
    program.write_text(INTERRUPTED)

    with subprocess.Popen(
        [sys.executable, "-m", "composer.cli.launcher", "-n", "2", str(program)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    ) as process:
        assert [process.stdout.readline() for _ in range(2)] == ["ready\n"] * 2
        process.send_signal(number)
        _, errors = process.communicate(timeout=240)

    assert process.returncode == status, errors
    assert "Traceback" not in errors
    assert errors.count(f"The training was stopped by {number.name} after batch") == 1
