"""The scan finds the lines of a program that have to change, without running it."""

import json
import os
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


def test_a_module_is_reported_once():
    """The import of a former module is reported, not each use; a use that is not available is."""
    source = (
        "from composer.utils import dist\n"
        "rank = dist.get_global_rank()\n"
        "dist.barrier()\n"
        "dist.all_gather_object_list_hpu('a')\n"
    )

    assert found(source) == [
        (1, "composer.utils.dist", True),
        (4, "composer.utils.dist.all_gather_object_list_hpu", False),
    ]


def test_full_names():
    """With ``import composer``, each use of a former name is reported."""
    source = "import composer\n\ncomposer.utils.dist.barrier()\ncomposer.callbacks.MLPerfCallback()\n"

    assert found(source) == [
        (3, "composer.utils.dist.barrier", True),
        (4, "composer.callbacks.MLPerfCallback", False),
    ]


def test_all_names_of_a_module():
    """The import of all names is reported where it is of a former module."""
    source = "from composer.utils import *\nfrom composer.algorithms import *\n"

    assert found(source) == [(1, "composer.utils.*", True)]


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


def test_folders(tmp_path):
    """All Python files below a folder are read, sorted."""
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "b.py").write_text("from composer.utils import dist\n")
    (tmp_path / "a.py").write_text("import os\nfrom composer.datasets.cifar import build\n")
    (tmp_path / "text.txt").write_text("from composer.utils import dist\n")

    result = [(path.name, finding.line) for path, finding in scan(tmp_path)]

    assert result == [("b.py", 1), ("a.py", 2)]


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
        ("train.yaml", 10, "composer.callbacks.MLPerfCallback", False),
        ("train.yaml", 14, "composer.callbacks.MLPerfCallback", False),
    ]
    assert len(list(scan(tmp_path / "train.yaml"))) == 4


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


def test_what_a_program_can_do_without():
    """A missing name is not reported if the program catches the error, or imports it for type checkers only."""
    source = (
        "from typing import TYPE_CHECKING\n"
        "try:\n    from composer.callbacks import MLPerfCallback\n    from composer.utils import dist\n"
        "except (ImportError, KeyError):\n    MLPerfCallback = None\n"
        "if TYPE_CHECKING:\n    from composer.callbacks import MLPerfCallback\n"
        "else:\n    from composer.datasets import cifar\n"
        "try:\n    import composer.datasets.cifar\nexcept ImportError as error:\n    raise ValueError from error\n"
        "try:\n    import composer.datasets.cifar\nexcept KeyError:\n    pass\n"
        "if not TYPE_CHECKING:\n    import composer.datasets.cifar\n"
    )

    assert found(source) == [
        (4, "composer.utils.dist", True),
        (10, "composer.datasets.cifar", False),
        (12, "composer.datasets.cifar", False),
        (16, "composer.datasets.cifar", False),
        (20, "composer.datasets.cifar", False),
    ]


def test_methods_of_other_objects():
    """Methods with the names of a device's are reported only of devices."""
    source = (
        "from composer import Callback\n"
        "self.mover.batch_to_device(batch)\nstate.device.batch_to_device(batch)\nself._device.module_to_device(m)\n"
    )

    assert found(source) == [(3, ".batch_to_device()", True), (4, ".module_to_device()", True)]


@pytest.mark.parametrize(
    ("source", "code", "expected"),
    [
        (
            "import os\n",
            0,
            "0 work, with a warning or other numbers; 0 have to change; 0 files cannot be read.\nThe program runs",
        ),
        (
            "from composer.utils import dist, get_file\n",
            0,
            "2 work, with a warning or other numbers; 0 have to change; 0 files cannot be read.\nThe program runs",
        ),
        (
            "import composer.datasets.cifar\n",
            1,
            (
                "0 work, with a warning or other numbers; 1 have to change; 0 files cannot be read.\n"
                "The program does not run"
            ),
        ),
        (
            "print 'a'\n",
            2,
            "0 work, with a warning or other numbers; 0 have to change; 1 files cannot be read.\nThe program runs",
        ),
    ],
)
def test_the_summary(tmp_path, capsys, source, code, expected):
    """The summary has the counts, and whether a line has to change; the status is that of the complete output."""
    (tmp_path / "train.py").write_text(source)

    assert main(["scan", "--summary", str(tmp_path)]) == code
    assert capsys.readouterr().out == f"{expected} unchanged, as far as names and arguments show.\n"


def test_nothing_is_run(tmp_path):
    """A program with an effect has none when it is read."""
    (tmp_path / "train.py").write_text(f"import pathlib\npathlib.Path({str(tmp_path / 'effect')!r}).touch()\n")

    assert list(scan(tmp_path)) == []
    assert not (tmp_path / "effect").exists()


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


@pytest.mark.parametrize("content", [None, b"x = (", b"# coding: ascii\n\xff"])
def test_files_that_cannot_be_read(tmp_path, capsys, content):
    """A missing or invalid file is reported, and the status is 2."""
    program = tmp_path / "train.py"
    if content is not None:
        program.write_bytes(content)

    assert main(["scan", str(program)]) == 2
    assert capsys.readouterr().err


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


@pytest.mark.parametrize(
    ("source", "lines"),
    [
        ("%%time\nfrom composer.datasets import cifar", [2]),
        ("\n%%timeit -n 3 x = 1\n%%capture out\n!ls\nfrom composer.datasets import cifar", [5]),
        ("%%capture\n%%bash\nfrom composer.datasets import cifar", []),
        ("%%writefile a.py\nfrom composer.datasets import cifar", []),
        ("text = ('%d'\n    % 3)\nassert (text\n!= 4)\nfrom composer.datasets import cifar", [5]),
        ("%cd /a\ntext = ('%d'\n    %x)\nassert (text\n!= 4)\n!ls it's\nfrom composer.datasets import cifar", [7]),
        ("!pip install \\\n  it's \\\n  composer\nfrom composer.datasets import cifar", [4]),
        ("if True:\n    %run a.py \\\n  -x 08 [\n    self.files = !ls\n    from composer.datasets import cifar", [5]),
    ],
)
def test_commands_in_cells(tmp_path, source, lines):
    """Cells of commands that run Python are read, commands end where IPython ends them, and Python is not replaced."""
    (tmp_path / "a.ipynb").write_text(json.dumps({"cells": [{"cell_type": "code", "source": source}]}))

    result = [(one.line, one.former) for _, one in scan(tmp_path)]

    assert result == [(line, "composer.datasets.cifar") for line in lines]


def test_pipes_and_devices_are_not_opened(tmp_path):
    """Folders, pipes and links to devices with names of Python files are not opened."""
    (tmp_path / "folder.py").mkdir()
    os.mkfifo(tmp_path / "pipe.py")
    (tmp_path / "device.py").symlink_to("/dev/zero")
    (tmp_path / "z.py").write_text("import composer.datasets.cifar\n")

    assert [path.name for path, _ in scan(tmp_path)] == ["z.py"]
    assert "no file of at most 1 MiB" in str(next(iter(scan(tmp_path / "pipe.py")))[1])


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
