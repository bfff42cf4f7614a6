"""What a GPU would raise an error for: kernels, surgery, algorithms and training on a stand-in for the CUDA runtime.

Memory of the device is memory of the host, and kernels do nothing, so values are not checked, which ``test_gpu.py``
does on a device. Torch itself checks devices, dtypes, generators and synchronizations. Its ``FakeTensorMode`` and meta
device find less: neither reports what waits for the device, and the backward pass needs code of its own for them.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from on_fake_device.runtime import build, why_not

TESTS, PEAKS = Path(__file__).with_name("on_fake_device"), Path(__file__).with_name("peak_on_fake_device.py")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(why_not() is not None, reason=str(why_not()))]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Return a function that runs a program with the stand-in and returns what it prints."""
    library = build(tmp_path_factory.mktemp("standin"))

    def run(*command, **variables):
        # cuBLAS has new memory for each product, which is zero.
        added = {"LD_PRELOAD": str(library), "CUBLAS_WORKSPACE_CONFIG": ":16:8", "CUBLASLT_WORKSPACE_SIZE": "1"}
        command = [sys.executable, *map(str, command)]
        settings = {"env": os.environ | added | variables, "capture_output": True, "text": True, "timeout": 600}
        done = subprocess.run(command, check=False, **settings)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout.splitlines()[-1]

    return run


def test_on_fake_device(run):
    """The tests in ``on_fake_device`` pass in a process with the stand-in, about a minute for hundreds of cases."""
    options = ["-q", "--maxfail=20", "--tb=short", "-p", "no:cacheprovider", "-p", "no:xdist", "--durations=5"]
    # Without torch's cache of memory, each tensor has new memory, which is zero.
    assert "skipped" not in run("-m", "pytest", *options, TESTS, PYTEST_ADDOPTS="", PYTORCH_NO_CUDA_MEMORY_CACHING="1")


def test_peak_memory_is_that_of_a_plain_loop(run):
    """A step of the Trainer allocates at most 1 % more than the loop; more if a callback may read the outputs."""
    found = json.loads(run(PEAKS))

    for loop, ours in (found["images"], found["texts"]):
        assert 0.99 * loop < ours < 1.01 * loop
    assert found["texts that are read"] > 1.1 * found["texts"][0]
