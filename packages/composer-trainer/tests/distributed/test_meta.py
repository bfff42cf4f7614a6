"""Models on the meta device, which have no data before they are sharded."""

from collections import OrderedDict

import pytest
import torch
from torch import nn

from composer import distributed as cd
from composer.core import State


@pytest.fixture(autouse=True, scope="module")
def closed_group():
    """Destroy the group of one process that sharding has created, which other tests would use."""
    yield
    cd.close_dist()


def named(**modules):
    return nn.Sequential(OrderedDict(modules))


def on_meta(build, seed=3):
    """Return a model that is built on the meta device, sharded and initialized."""
    with torch.device("meta"):
        model = build()
    cd.Parallelism({"fsdp": {}}).prepare(State(model, rank_zero_seed=seed))
    return {name: getattr(one, "full_tensor", lambda one=one: one)() for name, one in model.state_dict().items()}


class TestMeta:
    """Models on the meta device, which have no data before they are sharded."""

    def test_draws_depend_on_seed_and_name(self):
        """Equal seeds and names give equal weights, whatever is before them; others differ."""
        first = on_meta(lambda: named(a=nn.Linear(4, 3), b=nn.Linear(4, 3)))
        second = on_meta(lambda: named(c=nn.Linear(9, 9), b=nn.Linear(4, 3)))
        other_seed = on_meta(lambda: named(a=nn.Linear(4, 3)), seed=4)

        assert torch.equal(first["b.weight"], second["b.weight"])
        assert not torch.equal(first["a.weight"], first["b.weight"])
        assert not torch.equal(first["a.weight"], other_seed["a.weight"])

    def test_distribution_is_that_of_the_module(self):
        """Weights and buffers are initialized as the modules do it."""
        weights = on_meta(lambda: nn.Sequential(nn.Linear(400, 50), nn.BatchNorm1d(50), nn.MultiheadAttention(8, 2)))

        assert 0.045 < weights["0.weight"].abs().max() <= 0.05
        assert weights["0.weight"].std() == pytest.approx(0.05 / 3**0.5, rel=0.05)
        assert torch.equal(weights["1.running_var"], torch.ones(50))
        assert torch.equal(weights["2.out_proj.bias"], torch.zeros(8))

    def test_shared_weights(self):
        """A weight of two modules is initialized by the first, and stays one."""

        def build():
            model = named(embedding=nn.Embedding(600, 40), head=nn.Linear(40, 600, bias=False))
            model.head.weight = model.embedding.weight
            return model

        weights = on_meta(build)

        assert weights["embedding.weight"].std() == pytest.approx(1.0, rel=0.05)
        assert torch.equal(weights["embedding.weight"], weights["head.weight"])

    def test_generator_is_not_used(self):
        """The draws of the program afterwards do not depend on the model."""
        torch.manual_seed(0)
        expected = torch.rand(3)
        torch.manual_seed(0)

        on_meta(lambda: nn.Linear(4, 3))

        assert torch.equal(torch.rand(3), expected)

    @pytest.mark.parametrize(
        ("name", "add"),
        [
            ("gain", lambda module: setattr(module, "gain", nn.Parameter(torch.ones(4)))),
            ("scale", lambda module: module.register_buffer("scale", torch.ones(4))),
        ],
    )
    def test_a_tensor_that_is_not_initialized(self, name, add):
        """A tensor that an inherited reset_parameters() does not set is named, instead of having any values."""

        class Extended(nn.Linear):
            def __init__(self):
                super().__init__(4, 4)
                add(self)

        with pytest.raises(TypeError, match=rf"no reset_parameters\(\) sets a\.{name}: extend that of Extended"):
            on_meta(lambda: named(a=Extended(), b=nn.Linear(4, 4)))

    def test_a_part_that_an_outer_module_initializes(self):
        """A module may set tensors of its parts that these leave as they are."""

        class Inner(nn.Linear):
            def __init__(self):
                super().__init__(4, 4)
                self.gain = nn.Parameter(torch.ones(4))

        class Outer(nn.Module):
            def __init__(self):
                super().__init__()
                self.inner, self.bias = Inner(), nn.Parameter(torch.zeros(3))

            def reset_parameters(self):
                nn.init.zeros_(self.bias)
                nn.init.constant_(self.inner.gain, 3.0)

        weights = on_meta(lambda: named(a=Outer(), b=nn.Linear(4, 4)))

        assert torch.equal(weights["a.inner.gain"], torch.full((4,), 3.0))

    def test_an_outer_module_that_reads_its_parts(self):
        """They have been initialized, and may be scaled."""

        class Outer(nn.Module):
            def __init__(self):
                super().__init__()
                self.out = nn.Embedding(600, 40)

            def reset_parameters(self):
                self.scale = self.out.weight.norm()
                self.out.weight.mul_(0.5)

        weights = on_meta(lambda: named(a=Outer()))

        assert weights["a.out.weight"].std() == pytest.approx(0.5, rel=0.05)

    def test_tensors_of_any_dtype(self):
        """Numbers and booleans that the method sets have its values."""

        class Counter(nn.Module):
            def __init__(self):
                super().__init__()
                self.register_buffer("steps", torch.empty((), dtype=torch.int64))
                self.register_buffer("mask", torch.empty(3, dtype=torch.bool))
                self.register_buffer("phases", torch.empty(3, dtype=torch.complex64))
                self.reset_parameters()

            def reset_parameters(self):
                self.steps.zero_()
                self.mask.copy_(torch.rand(3) < 2)
                self.phases.fill_(1j)

        weights = on_meta(lambda: named(a=Counter(), b=nn.Linear(4, 4)))

        assert weights["a.steps"] == 0
        assert weights["a.mask"].all()
        assert (weights["a.phases"] == 1j).all()

    def test_a_module_that_cannot_be_initialized(self):
        """A module with weights that has no reset_parameters() is named."""

        class Scale(nn.Module):
            def __init__(self):
                super().__init__()
                self.factor = nn.Parameter(torch.ones(3))

        with pytest.raises(TypeError, match=r"its module '1' \(FSDPScale|Scale\) has no method reset_parameters"):
            on_meta(lambda: nn.Sequential(nn.Linear(3, 3), Scale()))

    def test_without_sharding(self):
        """A model without data cannot be trained if it is not sharded."""
        with pytest.raises(ValueError, match="The model is on the meta device and has no weights"):
            cd.Parallelism().config.check_has_data(nn.Linear(2, 2, device="meta"))
