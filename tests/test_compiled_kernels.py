"""Every kernel whose draws are passed in compiles to one graph with dynamic shapes, the most used ones also to C++."""

import shutil

import pytest
import torch
from torch.utils._pytree import tree_leaves

from fixtures.kernels import LAYERS, ON_FLOATS, ON_PIXELS, ON_TEXT, backward, kernel_inputs

# Those two take a minute; tests of composer-functional compile them.
KERNELS = {
    name: kernel
    for name, kernel in (ON_PIXELS | ON_FLOATS | ON_TEXT).items()
    if name not in ("augmix_batch", "randaugment_batch")
}
# These layers draw within their call, and the head computes its logits outside of the graph.
NOT_COMPILED = {"ChunkedHead", "GyroDropout", "PatchDropout", "StochasticDepthBlock"}
# What most recipes use, of each kind: these are also compiled to C++, in one graph.
MOST_USED = [
    "alternating_flip_batch",
    "blur_2d",
    "colout_batch",
    "cutmix_batch",
    "cutout_batch",
    "distillation_loss",
    "linear_cross_entropy",
    "mixup_batch",
    "resize_batch",
    "select_using_loss",
    "smooth_labels",
    "soft_cross_entropy",
    "standardize_weight",
    "take_samples",
    "update_averages",
]
MOST_USED_LAYERS = ["AlibiBias", "FactorizedLinear", "GatedLinearUnit", "GhostBatchNorm2d", "SqueezeExcite2d"]


def results(call, x):
    """Return the outputs of a kernel, and the gradients of its inputs."""
    output = call(x)
    backward(output)
    gradients = [one.grad for one in (x.images, x.logits, x.tokens, x.weight)]
    return [one.detach() for one in (*tree_leaves(output), *gradients) if torch.is_tensor(one)]


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch._inductor compiles its C++ with g++, which is not here")
def test_cpp():
    """Outputs and gradients of C++ by torch._inductor are those without; one compilation, which takes most of the time.

    Its kernels share their inputs, so that gradients are compared as sums.
    """
    torch.manual_seed(0)
    layers = {name: (LAYERS[name][0](), LAYERS[name][1]) for name in MOST_USED_LAYERS}

    def compute(x):
        outputs = {name: KERNELS[name](x) for name in MOST_USED}
        return outputs | {name: call(layer, x) for name, (layer, call) in layers.items()}

    assert len(MOST_USED) + len(MOST_USED_LAYERS) == 20
    assert_compiled_equals_eager(compute, dynamic=False, backend="inductor")


def assert_compiled_equals_eager(call, **options):
    """Compare outputs and gradients."""
    torch.compiler.reset()

    expected = results(call, kernel_inputs(torch.float32, "cpu"))

    found = results(torch.compile(call, fullgraph=True, **options), kernel_inputs(torch.float32, "cpu"))
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("name", KERNELS)
def test_kernel(name):
    """Outputs and gradients are those without compilation, which generates no code here, for speed."""
    assert_compiled_equals_eager(KERNELS[name], dynamic=True, backend="aot_eager")


@pytest.mark.parametrize("name", sorted(set(LAYERS) - NOT_COMPILED))
def test_layer(name):
    """So are those of layers."""
    make, call = LAYERS[name]
    torch.manual_seed(0)
    layer = make()

    assert_compiled_equals_eager(lambda x: call(layer, x), dynamic=True, backend="aot_eager")
