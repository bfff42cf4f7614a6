"""What a GPU would raise an error for: kernels, surgery, algorithms and training on a stand-in for the CUDA runtime.

Memory of the device is memory of the host, and kernels do nothing, so values are not checked, which ``test_gpu.py``
does on a device. Torch itself checks devices, dtypes, generators and synchronizations. Its ``FakeTensorMode`` and meta
device find less: neither reports what waits for the device, and the backward pass needs code of its own for them.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from on_fake_device.runtime import build, why_not

TESTS = Path(__file__).with_name("on_fake_device")


@pytest.mark.slow
@pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
def test_on_fake_device(tmp_path):
    """The tests in ``on_fake_device`` pass in a process with the stand-in, about a minute for hundreds of cases."""
    # Without torch's cache of memory, each tensor has new memory, which is zero; so has cuBLAS for each product.
    memory = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "CUBLAS_WORKSPACE_CONFIG": ":16:8", "CUBLASLT_WORKSPACE_SIZE": "1"}
    added = {"LD_PRELOAD": str(build(tmp_path)), "PYTEST_ADDOPTS": "", **memory}
    options = ["-q", "--maxfail=20", "--tb=short", "-p", "no:cacheprovider", "-p", "no:xdist", "--durations=5"]

    command = [sys.executable, "-m", "pytest", *options, str(TESTS)]
    done = subprocess.run(command, env=os.environ | added, capture_output=True, text=True, check=False, timeout=600)

    assert done.returncode == 0, done.stdout + done.stderr
    assert "skipped" not in done.stdout.splitlines()[-1]
