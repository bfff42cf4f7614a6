"""The scan finds the lines of a program that have to change, without running it."""

import json
import re
import subprocess
import sys

import pytest

from composer.compat import entries, scan, scan_source
from composer.compat.__main__ import main


def found(source):
    return [(finding.line, finding.former, finding.works) for finding in scan_source(source)]


@pytest.mark.parametrize("entry", entries().values(), ids=lambda entry: entry.former)
def test_each_entry_is_found(entry):
    """The import of each former name is found, with its change."""
    parent, _, name = entry.former.rpartition(".")

    (finding,) = scan_source(f"import os\n\nfrom {parent} import {name}\n")

    assert finding.line == 3
    assert entry.former.startswith(finding.former)
    assert finding.works == entry.works
    assert finding.change == entries()[finding.former].change


@pytest.mark.parametrize(
    "source",
    [
        "import composer\ncomposer.Trainer; composer.algorithms.MixUp; composer.__version__",
        "from composer import Trainer\nTrainer(model=None, load_path='a').state.model.anything",
        "from composer.core import State, Time\nTime.from_input('1ep')",
        "import composer.functional as cf\ncf.apply_blurpool(None)",
        "from composer.trainer import Trainer\nfrom composer.optim.scheduler import compile_composer_scheduler",
        "from . import utils\nfrom .utils import dist\nimport numpy\nnumpy.nothing",
        "class Device:\n    def batch_to_device(self, batch): ...\nDevice().batch_to_device(1)",
        "from composer.models import *",
    ],
)
def test_current_programs(source):
    """Nothing is found in a program that uses existing names."""
    assert found(source) == []


def test_full_names():
    """With ``import composer``, each use of a former name is reported."""
    source = "import composer\n\ncomposer.utils.dist.barrier()\ncomposer.callbacks.MLPerfCallback()\n"

    assert found(source) == [
        (3, "composer.utils.dist.barrier", True),
        (4, "composer.callbacks.MLPerfCallback", False),
    ]


def test_names_that_do_not_exist():
    """A name that neither library has, and a private one of Composer, are reported."""
    source = (
        "from composer.core.time import (\n    Time,\n    _nothing,\n)\n"
        "import composer.nothing\nfrom composer.utils import nothing\n"
    )

    assert found(source) == [
        (3, "composer.core.time._nothing", False),
        (5, "composer.nothing", False),
        (6, "composer.utils.nothing", False),
    ]


def test_arguments_and_methods():
    """Arguments that are not accepted, and methods of Composer's devices, are reported with their line."""
    source = (
        "from composer import Callback, Trainer\n"
        "trainer = Trainer(\n    model=None,\n    fsdp_config=None,\n    load_object_store=None,\n"
        "    load_progress_bar=False,\n)\n"
        "class Move(Callback):\n    def batch_start(self, state, logger):\n"
        "        state.batch = state.device.batch_to_device(state.batch)\n"
        "trainer.export_for_inference('onnx', 'a', save_object_store=store)\n"
    )

    assert found(source) == [
        (4, "Trainer(fsdp_config=...)", False),
        (5, "Trainer(load_object_store=...)", False),
        (6, "Trainer(load_progress_bar=...)", False),
        (10, ".batch_to_device()", True),
        (11, "export_for_inference(save_object_store=...)", False),
    ]


def test_discarded_batches():
    """A call of batch_set whose result is not used is reported: the batch is not changed in place."""
    source = (
        "from composer.core import batch_set\nimport composer\nbatch = batch_set({}, 'x', 1)\n"
        "batch_set(batch, 'x', 2)\n"
        "composer.core.batch_set(batch, 'x', 3)\nprint(batch_set(batch, 'x', 4))\n"
    )

    assert found(source) == [(4, "batch_set(...)", False), (5, "batch_set(...)", False)]


def test_arguments_in_the_table_are_not_accepted():
    """The listed arguments are those that the classes here reject."""
    import inspect

    from composer import functional as cf
    from composer.compat.table import ARGUMENTS
    from composer.profiler import JSONTraceHandler, Profiler
    from composer.trainer import Trainer

    current = {
        "Trainer": Trainer,
        "Profiler": Profiler,
        "JSONTraceHandler": JSONTraceHandler,
        "export_for_inference": Trainer.export_for_inference,
        "BlurPool2d": cf.BlurPool2d,
        "factorize_matrix": cf.factorize_matrix,
        "factorize_conv2d": cf.factorize_conv2d,
    }

    assert current.keys() == ARGUMENTS.keys()
    for name, arguments in ARGUMENTS.items():
        accepted = arguments.keys() & inspect.signature(current[name]).parameters.keys()
        assert not accepted


def test_arguments_of_the_profiler():
    """All former arguments of one prefix have the advice, and those that are left are not found."""
    source = "from composer.profiler import Profiler\n"
    source += "Profiler(torch_prof_with_stack=True, torch_prof_use_gzip=True, sys_prof_disk=True, x=1)"

    changes = {finding.former: finding.change for finding in scan_source(source)}

    assert {*changes} == {f"Profiler({name}=...)" for name in ("torch_prof_use_gzip", "sys_prof_disk", "x")}
    assert "JSONTraceHandler(folder)" in changes["Profiler(torch_prof_use_gzip=...)"]
    assert "SystemMetricsMonitor" in changes["Profiler(sys_prof_disk=...)"]


def test_yaml(tmp_path):
    """Full names in YAML are found as in Python, and names of components that are not available in their blocks."""
    (tmp_path / "train.yaml").write_text(
        "optimizer:\n  _target_: composer.optim.DecoupledAdamW  # composer.datasets\n"
        "download:\n  _target_: 'composer.utils.get_file'\n"
        "schedule: {_target_: composer.optim.NothingScheduler}\n"
        "image: mosaicml/composer.datasets/x\n"
        "callbacks:\n  speed_monitor:\n    window_size: 3\n  mlperf_callback: {}\n"
        "names: mlperf_callback\n"
        "callbacks:\n- wandb\n- MLPerfCallback\n"
        "algorithms: [blurpool]\n"
    )
    (tmp_path / "broken.yml").write_bytes(b"a: \xff [\n_target_: composer.datasets.cifar\n")
    (tmp_path / "large.yaml").write_bytes(b"#" * 2**20 + b"\n_target_: composer.datasets.cifar\n")

    result = [(path.name, finding.line, finding.former, finding.works) for path, finding in scan(tmp_path)]

    assert result == [
        ("broken.yml", 2, "composer.datasets.cifar", False),
        ("train.yaml", 4, "composer.utils.get_file", True),
        ("train.yaml", 5, "composer.optim.NothingScheduler", False),
        ("train.yaml", 10, "composer.callbacks.MLPerfCallback", True),
        ("train.yaml", 14, "composer.callbacks.MLPerfCallback", True),
    ]
    assert len(list(scan(tmp_path / "train.yaml"))) == 4


@pytest.mark.parametrize(
    "program", ["class MLPerf_Callback:\n    ...\n", "callbacks.register('mlperf_callback', func=f)\n"]
)
def test_components_of_the_program(tmp_path, capsys, program):
    """A component that YAML names works if the program defines it, and is not found if a file of the folder does."""
    (tmp_path / "train.yaml").write_text("callbacks:\n  mlperf_callback: {}\n  - _target_: src.MLPerfCallback\n")

    assert main(["scan", str(tmp_path)]) == 0
    assert "composer.callbacks.MLPerfCallback -> works if the program defines it; in th" in capsys.readouterr().out
    (tmp_path / "own.py").write_text(program)
    assert list(scan(tmp_path)) == []


def test_arguments_in_yaml(tmp_path):
    """Keys beside a ``_target_`` are checked as arguments of a call, and those of other mappings are not."""
    (tmp_path / "train.yaml").write_text(
        "trainer:\n  grad_accum: 2\n  _target_: composer.Trainer\n  _convert_: all\n  device: gpu\n\n"
        "  fsdp_config: {grad_accum: 1}\n  callbacks:\n  - _target_: composer.callbacks.SpeedMonitor\n"
        "    windows: 1\n  - windows: 2\n    _target_: composer.callbacks.MemoryMonitor\n  wrong: 1\nother: 1\n"
        "ema: {_target_: composer.algorithms.EMA, half_life: 1ba, wrong: 1}\n"
        "x: {_target_: composer.Trainer, run_name: {b: 1}, model: {_target_: composer.Trainer, c: 1}, wrong: 2}\n"
    )

    assert [(one.line, one.former) for _, one in scan(tmp_path)] == [
        (2, "Trainer(grad_accum=...)"),
        (7, "Trainer(fsdp_config=...)"),
        (10, "SpeedMonitor(windows=...)"),
        (11, "MemoryMonitor(windows=...)"),
        (13, "Trainer(wrong=...)"),
        (15, "EMA(wrong=...)"),
        (16, "Trainer(c=...)"),
        (16, "Trainer(wrong=...)"),
    ]


@pytest.mark.parametrize(
    "source",
    [
        "from composer.optim.scheduler import CosineAnnealingScheduler\n",
        "import composer.optim as optim\nschedule = optim.CosineAnnealingScheduler()\n",
        "from composer.optim import ComposerScheduler\nclass Own(ComposerScheduler): ...\n",
        "schedule:\n  _target_: composer.optim.CosineAnnealingScheduler\n",
    ],
)
def test_schedulers_have_other_rates(source, tmp_path, capsys):
    """A scheduler of Composer is named with what differs, and the program runs unchanged."""
    path = tmp_path / ("train.yaml" if "_target_" in source else "train.py")
    path.write_text(source)

    assert main(["scan", str(path)]) == 0

    [line] = capsys.readouterr().out.splitlines()
    assert "each batch has its own rate" in line
    assert "composer.compat.lag_schedules" in line
    assert line.endswith("(works, with other numbers)")


def test_metrics_with_other_numbers():
    """Metrics whose values differ from Composer's are found."""
    found = scan_source("from composer.metrics import CrossEntropy, Dice, LossMetric, MIoU\n")

    assert [(one.former.rpartition(".")[2], one.has_other_numbers) for one in found] == [
        ("CrossEntropy", True),
        ("Dice", True),
        ("LossMetric", True),
    ]


@pytest.mark.parametrize(
    ("source", "code", "output"),
    [
        ("import os\n", 0, ""),
        ("from composer.utils import dist\n", 0, ":1: composer.utils.dist -> from composer import distributed as dist"),
        ("import composer.datasets.cifar\n", 1, ":1: composer.datasets.cifar -> Use torchvision.datasets"),
    ],
)
def test_the_command(tmp_path, capsys, source, code, output):
    """The command prints each finding with its file, and returns 1 only if a line does not work unchanged."""
    program = tmp_path / "train.py"
    program.write_text(source)

    result = main(["scan", str(program)])

    assert result == code
    assert capsys.readouterr().out.startswith(f"{program}{output}" if output else "")


@pytest.mark.parametrize(
    "content",
    [
        b"x = (",
        b"# coding: ascii\n\xff",
        b"# coding: none\n",
        b"x = " + b"-" * 100_000 + b"1",
        b"#" * 2**20 + b"\n",
        b"\0",
    ],
)
def test_one_unreadable_file_does_not_end_the_scan(tmp_path, capsys, content):
    """The file is reported with the reason, and the files after it are read."""
    (tmp_path / "a.py").write_bytes(content)
    (tmp_path / "b.py").write_text("import composer.datasets.cifar\n")

    assert main(["scan", str(tmp_path)]) == 2
    output = capsys.readouterr()
    assert re.match(rf"{tmp_path}/a\.py:\d+: the file -> cannot be read: .+", output.err)
    assert "b.py:1: composer.datasets.cifar" in output.out


def test_notebooks(tmp_path, capsys):
    """Cells of code are read with their numbers, without the commands of IPython; an invalid cell is reported."""
    sources = [
        ("markdown", "from composer.utils import UCObjectStore"),
        ("code", ["%pip install mosaicml\n", "!ls\n", "import composer\n"]),
        ("code", "%%bash\nls *"),
        (
            "code",
            "if True:\n    !ls -l\nfiles = !ls\ncomposer.Trainer?\nfrom composer.utils import dist, UCObjectStore",
        ),
        ("code", "print 'a'"),
        ("code", "dist.barrier()\nfrom composer.datasets import cifar"),
    ]
    cells = [{"cell_type": kind, "source": source} for kind, source in sources]
    (tmp_path / "a.ipynb").write_text(json.dumps({"cells": cells}))
    (tmp_path / "b.ipynb").write_text("[]")

    result = [(path.name, one.cell, one.line, one.former, one.works) for path, one in scan(tmp_path)]

    assert result == [
        ("a.ipynb", 4, 5, "composer.utils.UCObjectStore", False),
        ("a.ipynb", 4, 5, "composer.utils.dist", True),
        ("a.ipynb", 5, 1, "the file", False),
        ("a.ipynb", 6, 2, "composer.datasets.cifar", False),
        ("b.ipynb", 0, 0, "the file", False),
    ]
    assert main(["scan", str(tmp_path)]) == 2
    assert "a.ipynb:cell 6:2: composer.datasets.cifar -> Use torchvision" in capsys.readouterr().out


def test_the_command_line(tmp_path):
    """``python -m composer.compat scan`` runs; it starts a process that imports torch."""
    program = tmp_path / "train.py"
    program.write_text("from composer.utils import UCObjectStore\n")

    done = subprocess.run(
        [sys.executable, "-m", "composer.compat", "scan", program], capture_output=True, text=True, check=False
    )

    assert done.returncode == 1
    assert "composer.utils.UCObjectStore -> Remote files are URLs" in done.stdout
    assert done.stderr == ""


def test_overrides_that_nothing_calls():
    """A method of a subclass that is called by nothing is found, and one that is called is not."""
    source = (
        "from composer.callbacks import CheckpointSaver as Saver\nclass Mine(Saver):\n"
        "    def _save_checkpoint(self, state, logger): ...\n    def _rotate_checkpoints(self): ...\n"
    )

    (finding,) = scan_source(source)

    assert (finding.line, finding.former, finding.works) == (4, "CheckpointSaver._rotate_checkpoints", False)
    indirect = (
        "class Second(Mine):\n    _rotate_checkpoints = lambda self: 0\n    async def _upload_checkpoint(self): ...\n"
    )
    assert [line for line, *_ in found(source + indirect)] == [4, 6, 7]
    theirs = "from mylib import FileLogger\nclass Mine(FileLogger):\n    def _flush_file(self): ...\n"
    assert found(theirs) == []
    trainer = "import composer\nclass Mine(composer.Trainer):\n    def _train_batch(self, use_grad_scaling): ...\n"
    assert [former for _, former, _ in found(trainer)] == ["Trainer._train_batch"]
    assert "override _save_checkpoint(self, state, logger)" in finding.change


def test_arguments_that_do_not_exist():
    """A keyword that a class or function does not accept is found, also under a former name."""
    source = (
        "from composer import Trainer\nfrom composer.utils import dist\nfrom composer.callbacks import SpeedMonitor\n"
        "Trainer(model=None, max_length='1ep')\ndist.initialize_dist(timeout=600)\ndist.get_sampler(data, seeds=1)\n"
        "SpeedMonitor(window_size=10, windows=2)\nSpeedMonitor(**options)\n"
    )

    assert [one for one in found(source) if one[1].endswith("=...)")] == [
        (4, "Trainer(max_length=...)", False),
        (6, "get_sampler(seeds=...)", False),
        (7, "SpeedMonitor(windows=...)", False),
    ]


def test_reading_checkpoints_as_files():
    """Functions of files are found for checkpoints, unless the program gives them names of files."""
    source = (
        "import os, torch\nfrom composer import Trainer\nif os.path.isfile('runs/latest-rank0.pt'):\n"
        "    torch.load(checkpoint_path)\ntorch.load('data.bin')\n"
    )

    assert found(source) == [(3, "os.path.isfile(...)", False), (4, "torch.load(...)", True)]
    assert str(scan_source(source)[1]).startswith(
        "4: torch.load(...) -> works if it is a file; a checkpoint is a file "
    )
    assert found(source + "Trainer(model=None, save_filename='model.pt')\n") == []


@pytest.mark.parametrize(
    ("line", "works"),
    [
        ("p = os.path.join(folder, 'latest-rank0.pt'); q = p; os.remove(q)", False),
        ("self.path = 'latest-rank0.pt'; torch.load(f=self.path)", False),
        ("Path('a/latest-rank0.pt').is_file()", False),
        ("open('latest-rank0.pt', 'rb')", False),
        ("import composer; open(ckpt, 'rb')", True),
        ("import composer; shutil.copy(checkpoint, 'b')", True),
        ("import composer; torch.load(args.sam_pretrained_checkpoint)", True),
        ("import composer; open(checkpoint_log)", None),
        ("import composer; shutil.copytree(args.checkpoint, 'b')", None),
        ("import composer; os.path.isfile(os.path.join(hf_checkpoint, 'config.json'))", None),
        ("p = 'latest-rank0.pt'; p = 'data.pt'; torch.load(p)", None),
        ("p = 'latest-rank0.pt'; p = Path(p); torch.load(p)", False),
        ("p: str = 'latest-rank0.pt'; p: Path; os.remove(p)", False),
        ("if p := folder + '/latest-rank0.pt': os.remove(p)", False),
        ("torch.load(f'{folder}/latest-rank0.pt')", False),
        ("torch.load(checkpoint)", None),
    ],
)
def test_paths_of_checkpoints(line, works):
    """A path that certainly is a checkpoint's has to change, one that may be works if it is a file."""
    assert [works for *_, works in found(line)] == ([] if works is None else [works])


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("train.py", "Trainer(save_latest_filename='latest-rank{rank}.pt')"),
        ("train.py", "options = {'save_filename': 'model.pt'}"),
        ("train.py", "Trainer(save_filename=f'{run}.pt')"),
        ("train.py", "args.save_filename = 'model.pt'"),
        ("train.py", "name = 'ep{epoch}.pt'"),
        ("train.py", "from composer.callbacks import CheckpointSaver\nCheckpointSaver(folder, filename='model.pt')"),
        ("train.yaml", "save_filename: ep{epoch}-ba{batch}-rank{rank}.pt\n"),
        ("train.yaml", "trainer: {save_latest_filename: 'latest.pt', seed: 1}\n"),
        ("train.yaml", "_target_: composer.callbacks.CheckpointSaver\nfilename: ep{epoch}.pt\n"),
    ],
)
def test_names_of_files_count_in_the_folder(tmp_path, name, content):
    """One file of a program gives checkpoints names of files, and another one reads these."""
    (tmp_path / "convert.py").write_text("torch.load('latest-rank0.pt')\n")

    assert [one.former for _, one in scan(tmp_path)] == ["torch.load(...)"]
    (tmp_path / name).write_text(content)
    assert list(scan(tmp_path)) == []


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("other.py", "torch.save(outputs, f'{out}/embeddings.pt')"),
        ("other.py", "print('{x}.pt')"),
        ("other.py", "filename = 'resnet.pt'"),
        ("other.py", "Trainer(save_filename=args.pt)"),
        ("other.py", "download(url, filename='resnet.pt')"),
        ("other.py", "# save_filename='model.pt'"),
        ("other.yaml", "filename: resnet.pt\n# save_filename: model.pt\nsave_filename: null\nload_path: a.pt\n"),
    ],
)
def test_other_names_of_files(tmp_path, name, content):
    """What ends in ``.pt`` and is no name of checkpoints hides no finding."""
    (tmp_path / "convert.py").write_text("torch.load(f'{folder}/latest-rank0.pt')\n")
    (tmp_path / name).write_text(content)

    assert [(one.former, one.works) for _, one in scan(tmp_path)] == [("torch.load(...)", False)]


def test_interpolations_in_yaml(tmp_path):
    """A value that OmegaConf reads from elsewhere is no name of this library."""
    (tmp_path / "a.yaml").write_text("save: ${composer.trainer.save_filename}\nother: composer.trainer.save_filename\n")

    assert [finding.line for _, finding in scan(tmp_path)] == [2]


def test_what_looks_like_names_in_yaml(tmp_path):
    """Keys, settings of a command line, files and nested interpolations are no imports."""
    (tmp_path / "a.yaml").write_text(
        "composer.trainer.max_duration: 1ep,2ep\n- composer.trainer.max_duration=${max}\nlog: composer.log\n"
        "load_path: composer.pt\nsecond: ${if:${a},composer.trainer.foo}\nx: '_target_: composer.nothing'\n"
    )

    assert [finding.line for _, finding in scan(tmp_path)] == [6]
