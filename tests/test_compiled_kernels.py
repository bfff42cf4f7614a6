"""Every kernel whose draws are passed in compiles to one graph, with fixed and with dynamic shapes."""

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


def results(call, x):
    """Return the outputs of a kernel, and the gradients of its inputs."""
    output = call(x)
    backward(output)
    gradients = [one.grad for one in (x.images, x.logits, x.tokens, x.weight)]
    return [one.detach() for one in (*tree_leaves(output), *gradients) if torch.is_tensor(one)]


def assert_compiled_equals_eager(call, **options):
    """Compare outputs and gradients."""
    torch.compiler.reset()

    expected = results(call, kernel_inputs(torch.float32, "cpu"))

    found = results(torch.compile(call, fullgraph=True, **options), kernel_inputs(torch.float32, "cpu"))
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("dynamic", [False, True], ids=["fixed", "dynamic"])
@pytest.mark.parametrize("name", KERNELS)
def test_kernel(name, dynamic):
    """Outputs and gradients are those without compilation, which generates no code here, for speed."""
    assert_compiled_equals_eager(KERNELS[name], dynamic=dynamic, backend="aot_eager")


@pytest.mark.parametrize("dynamic", [False, True], ids=["fixed", "dynamic"])
@pytest.mark.parametrize("name", sorted(set(LAYERS) - NOT_COMPILED))
def test_layer(name, dynamic):
    """So are those of layers."""
    make, call = LAYERS[name]
    torch.manual_seed(0)
    layer = make()

    assert_compiled_equals_eager(lambda x: call(layer, x), dynamic=dynamic, backend="aot_eager")
