"""8-bit precision and compiled models preserve the names of weights."""

import os
import platform
import subprocess
import sys

import pytest
import torch
from torch import nn

from composer.models import ComposerClassifier
from fixtures import small_run, weights


def wide_model():
    """Return a classifier whose first layer supports 8-bit products."""
    torch.manual_seed(0)
    return ComposerClassifier(nn.Sequential(nn.Linear(4, 16), nn.Linear(16, 16), nn.Linear(16, 3)), num_classes=3)


class TestFP8:
    def test_emulated(self):
        """Emulated, matching layers compute in 8 bits, train, and keep their names and weights."""
        pytest.importorskip("torchao", reason="the extra fp8 is not installed")
        model = wide_model()
        before = dict(model.named_parameters())
        trainer = small_run(
            model=model,
            optimizers=torch.optim.SGD(model.parameters(), lr=0.1),
            precision="amp_fp8",
            precision_config={"emulate": True},
            max_duration="2ba",
        )

        kinds = [type(layer).__name__ for layer in model.module]
        start = model.module[1].weight.detach().clone()
        trainer.fit()

        assert kinds == ["Linear", "Float8Linear", "Linear"]
        assert list(dict(model.named_parameters())) == list(before)
        assert not torch.equal(model.module[1].weight, start)


class TestCompile:
    def test_names_are_preserved(self):
        """A compiled model trains like the plain one, with equal names."""
        plain, compiled = (
            small_run(max_duration="3ba"),
            small_run(max_duration="3ba", compile_config={"backend": "eager"}),
        )

        plain.fit()
        compiled.fit()

        assert list(compiled.state.model.state_dict()) == list(plain.state.model.state_dict())
        assert compiled.state.model._compiled_call_impl is not None
        torch.testing.assert_close(weights(compiled), weights(plain))


@pytest.mark.parametrize("wrong", [0, -1, 1.5, True, "all"])
def test_invalid_microbatch_size_raises(wrong):
    """A size is None, "auto" or a positive integer."""
    with pytest.raises(ValueError, match="device_train_microbatch_size must be"):
        small_run(device_train_microbatch_size=wrong)


@pytest.mark.parametrize(("capability", "warned"), [("avx2", True), ("default", False)])
@pytest.mark.skipif(platform.machine() not in {"x86_64", "AMD64"}, reason="only these processors have AVX2")
def test_bfloat16_on_a_cpu_without_avx512_warns(capability, warned):
    """On a CPU with AVX2 only; the name ``DEFAULT`` does not state what the CPU has."""
    program = """
import torch
from composer import Trainer
from composer.models import ComposerClassifier
model = ComposerClassifier(torch.nn.Linear(1, 2), num_classes=2)
Trainer(model=model, max_duration="1ba", precision="amp_bf16", device="cpu")
"""
    environment = os.environ | {"ATEN_CPU_CAPABILITY": capability}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    assert ("precision='amp_bf16' is many times slower than 'fp32' on this CPU" in done.stderr) == warned, done.stderr
