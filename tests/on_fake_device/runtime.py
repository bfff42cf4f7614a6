"""Builds the stand-in for the CUDA runtime, from ``runtime.c`` and the names of the functions that torch calls."""

import functools
import importlib.util
import re
import shutil
import subprocess
import sys
from pathlib import Path

import torch

__all__ = ["build", "why_not"]

LIBRARIES = ["torch_cuda", "c10_cuda", "torch_python", "torch_nvshmem", "caffe2_nvrtc"]
OF_CUDA = re.compile(r"(?:cu[A-Z]|(?:__)?cuda[A-Z]|cublas|cusparse|cufft)\w+")


def why_not():
    """Return why the stand-in cannot be built here, or None."""
    if sys.platform != "linux":
        return "the stand-in for the CUDA runtime is preloaded, which is written for Linux"
    if torch.version.cuda is None or int(torch.version.cuda.split(".")[0]) < 13:
        return f"needs a build of torch for CUDA 13 or later, got {torch.version.cuda or 'one without CUDA'}"
    missing = [name for name in ("gcc", "nm") if shutil.which(name) is None]
    missing += [name for name in ("cuda_runtime_api.h", "crt/host_defines.h") if not any(_folders_with(name))]
    return f"needs {' and '.join(missing)}" if missing else None


def build(folder):
    """Compile the stand-in in a folder, and return the path of the shared library to preload."""
    library, stubs, unit = folder / "libstandin.so", folder / "stubs.c", folder / "runtime.o"
    headers = [f"-I{path}" for name in ("cuda_runtime_api.h", "crt/host_defines.h") for path in _folders_with(name)]
    _run("gcc", "-c", "-fPIC", "-O1", *headers, Path(__file__).with_name("runtime.c"), "-o", unit)
    theirs = [Path(torch.__file__).parent / "lib" / f"lib{name}.so" for name in LIBRARIES]
    called = set().union(*(_symbols("--dynamic", "--undefined-only", path) for path in theirs))
    others = sorted(name for name in called - _symbols("--defined-only", unit) if OF_CUDA.fullmatch(name))
    stubs.write_text("".join(f"long {name}() {{ return 0; }}\n" for name in others))
    # Under the name of the driver, so that the loader finds that library to be there already.
    _run("gcc", "-shared", "-fPIC", "-w", "-Wl,-soname,libcuda.so.1", stubs, unit, "-o", library, "-lpthread")
    return library


def _symbols(*arguments):
    """Return the names of a library's symbols, without their versions."""
    return {line.split()[-1].partition("@")[0] for line in _run("nm", *arguments).splitlines()}


@functools.cache
def _folders_with(name):
    """Return the folders of headers, in the wheels of CUDA and of Triton, that have a header."""
    specs = [importlib.util.find_spec(package) for package in ("nvidia", "triton")]
    roots = [Path(root) for spec in specs if spec for root in spec.submodule_search_locations or ()]
    found = [path for root in roots for path in [*root.glob("*/include"), *root.glob("backends/nvidia/include")]]
    return [path for path in found if (path / name).exists()]


def _run(*command):
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{command[0]} failed: {done.stderr}"
    return done.stdout
