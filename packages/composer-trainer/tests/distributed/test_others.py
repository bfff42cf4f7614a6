"""Optimizers of other libraries on weights that FSDP2 shards over two processes."""

import json
from pathlib import Path

import pytest
import torch

from fixtures.processes import run_processes

ERRORS = {"Kron", "MARS", "Prodigy", "SOAP"}
"""Those that combine plain tensors with sharded ones, as the guide states."""


@pytest.mark.slow
def test_steps_are_those_of_one_process():
    """Weights are bit-identical with one process, or a step raises an error."""
    for library in ("pytorch_optimizer", "schedulefree", "torchao"):
        pytest.importorskip(library, reason="it is an optional optimizer")

    for printed in run_processes(Path(__file__).with_name("others_program.py"), 2):
        distances = json.loads(printed.splitlines()[-1])
        failed = {path.rpartition(".")[2] for path, distance in distances.items() if isinstance(distance, str)}

        is_old = torch.torch_version.TorchVersion(torch.__version__) < "2.8"
        assert failed == (ERRORS | {"Lion"} if is_old else ERRORS)
        assert {distance for distance in distances.values() if not isinstance(distance, str)} == {0.0}
        assert len(distances) == 12
