"""The files of ``examples/several_hosts`` are valid, and train here as far as one machine allows."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from safetensors.torch import load_file
from torch.distributed.run import get_args_parser

from composer.checkpoint import newest_checkpoint

FOLDER = Path(__file__).parents[1] / "examples" / "several_hosts"
VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")
ENVIRONMENT = {name: value for name, value in os.environ.items() if name not in VARIABLES} | {"OMP_NUM_THREADS": "1"}
RECORD = '#!/bin/bash\nprintf "%s\\n" "$@" > "$CALLS/$(basename "$0")"\nexit ${EXIT_CODE:-0}\n'


@pytest.fixture
def parse(monkeypatch):
    """Return a function that parses the arguments of torchrun, and those of the program."""
    monkeypatch.syspath_prepend(FOLDER)
    monkeypatch.delitem(sys.modules, "train", raising=False)
    from train import parse_arguments

    def parsed(arguments):
        launcher = get_args_parser().parse_args(arguments)
        return launcher, parse_arguments(launcher.training_script_args)

    yield parsed
    sys.modules.pop("train", None)


class Slurm:
    """Runs the script with programs in place of SLURM's, which record their arguments."""

    def __init__(self, folder):
        self.folder, self.programs = folder, folder / "bin"
        self.programs.mkdir()
        self.write("srun", RECORD)
        self.write("scontrol", RECORD.replace("exit", "echo host1; exit").replace("${EXIT_CODE:-0}", "0"))

    def write(self, name, text):
        (self.programs / name).write_text(text)
        (self.programs / name).chmod(0o755)

    def start(self, seconds_left, **variables):
        settings = {
            "PATH": f"{self.programs}:{os.environ['PATH']}",
            "CALLS": str(self.folder),
            "SLURM_JOB_ID": "7",
            "SLURM_JOB_NODELIST": "host[1-2]",
            "SLURM_NNODES": "2",
            "SLURM_GPUS_ON_NODE": "4",
            "SLURM_JOB_END_TIME": str(int(time.time()) + seconds_left),
        }
        return subprocess.Popen(["bash", str(FOLDER / "slurm.sh")], env=ENVIRONMENT | settings | variables)

    def arguments(self, program):
        return (self.folder / program).read_text().splitlines()


@pytest.fixture
def slurm(tmp_path):
    """The script of SLURM, with programs in place of SLURM's."""
    return Slurm(tmp_path)


class TestSlurm:
    def test_options_of_the_job(self):
        """Each option has a value, a signal is sent before the time limit, and the job may be queued again."""
        text = (FOLDER / "slurm.sh").read_text()
        options = dict(re.findall(r"^#SBATCH --([a-z-]+)(?:=(\S+))?$", text, re.MULTILINE))

        assert len(options) == text.count("#SBATCH")
        assert (options["signal"], options["requeue"]) == ("TERM@120", "")
        assert [name for name, value in options.items() if not value] == ["requeue"]

    def test_command(self, slurm, parse):
        """It starts one torchrun per host, which meet on the first host."""
        code = slurm.start(40_000).wait()

        step, torchrun, *arguments = slurm.arguments("srun")
        launcher, program = parse(arguments)
        assert (code, step, torchrun) == (0, "--kill-on-bad-exit=1", "torchrun")
        assert (launcher.nnodes, launcher.nproc_per_node, launcher.rdzv_endpoint) == ("2", "4", "host1:29500")
        assert (launcher.rdzv_id, program.save_folder) == ("7-0", "runs/digits")

    @pytest.mark.parametrize(
        ("exit_code", "seconds_left", "is_queued"), [(0, 60, False), (1, 60, True), (1, 40_000, False)]
    )
    def test_queues_again_at_the_time_limit(self, slurm, exit_code, seconds_left, is_queued):
        """A job that is stopped by its time limit is queued again, one that ends or fails earlier is not."""
        code = slurm.start(seconds_left, EXIT_CODE=str(exit_code)).wait()

        assert code == exit_code
        assert (slurm.arguments("scontrol") == ["requeue", "7"]) == is_queued

    def test_a_signal_stops_the_training(self, slurm, tmp_path):
        """After the SIGTERM of SLURM the training stops with a checkpoint. Starts processes, more than 5 seconds."""
        slurm.write("srun", '#!/bin/bash\nshift\necho $$ > "$CALLS/pid"\nexec "$@"\n')
        command = f"{sys.executable} -m torch.distributed.run --standalone --nproc-per-node=2 {FOLDER}/train.py"
        slurm.write("torchrun", f'#!/bin/bash\nexec {command} --save-folder="$SAVE_FOLDER" --max-duration=100000ep\n')
        folder = tmp_path / "run"
        job = slurm.start(60, SAVE_FOLDER=str(folder))
        until = time.monotonic() + 120
        while not (folder / "latest").exists():
            assert time.monotonic() < until
            time.sleep(0.05)

        os.kill(int((tmp_path / "pid").read_text()), signal.SIGTERM)

        assert job.wait(60) != 0
        assert newest_checkpoint(folder).is_complete
        assert slurm.arguments("scontrol") == ["requeue", "7"]


def test_jobset(parse):
    """The pods start as many torchruns as these expect, meet in the first pod, and save where storage is mounted."""
    job = yaml.safe_load((FOLDER / "jobset.yaml").read_text())
    [workers] = job["spec"]["replicatedJobs"]
    pods = workers["template"]["spec"]
    [container] = pods["template"]["spec"]["containers"]

    launcher, program = parse(container["command"][1:])

    name = job["metadata"]["name"]
    assert (job["apiVersion"], job["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    assert container["command"][0] == "torchrun"
    assert pods["completions"] == pods["parallelism"] == int(launcher.nnodes)
    assert container["resources"]["limits"]["nvidia.com/gpu"] == int(launcher.nproc_per_node)
    assert launcher.rdzv_endpoint == f"{name}-{workers['name']}-0-0.{name}:29500"
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert program.save_folder.startswith(f"{mounts['checkpoints']}/")
    assert mounts.keys() == {volume["name"] for volume in pods["template"]["spec"]["volumes"]}


@pytest.mark.skipif(os.environ.get("FAULTS") != "all", reason="takes a minute; set FAULTS=all")
def test_ray(tmp_path):
    """Two workers of Ray train as two processes of torchrun, bit for bit. Starts Ray, more than 5 seconds."""
    pytest.importorskip("ray.train", reason='Ray Train is optional: pip install "ray[train]"')
    arguments = ["--max-duration=2ep", f"--save-folder={tmp_path}"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    commands = {
        "torchrun": [*torchrun, str(FOLDER / "train.py"), f"{arguments[1]}/torchrun", arguments[0]],
        "ray": [sys.executable, str(FOLDER / "ray_train.py"), f"{arguments[1]}/ray", arguments[0]],
    }

    ended = {
        name: subprocess.run(
            command, env=ENVIRONMENT | {"HOME": str(tmp_path)}, capture_output=True, text=True, timeout=300, check=False
        )
        for name, command in commands.items()
    }

    assert [one.stderr for one in ended.values() if one.returncode] == []
    newest = [newest_checkpoint(tmp_path / name) for name in commands]
    assert [one.name for one in newest] == ["ep2-ba16", "ep2-ba16"]
    expected, weights = (load_file(f"{one.path}/model.safetensors") for one in newest)
    assert all(weights[name].equal(expected[name]) for name in expected)
