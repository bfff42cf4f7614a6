"""FSDP2: sharded modules, dtypes and errors. Results of two processes are in test_parallelism."""

import json
from collections import OrderedDict

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy

from composer import distributed as cd
from composer.core import Precision, State
from composer.distributed.sharding import shard


@pytest.fixture(autouse=True)
def lone_group():
    """A process group of one process."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


class Block(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(3, 3), nn.ReLU())


class Tower(nn.Sequential):
    def __init__(self):
        super().__init__(Block(), Block())


class Model(nn.Module):
    """Blocks in towers, a head, and two lists that are not blocks."""

    def __init__(self):
        super().__init__()
        self.stem = Block()
        self.towers = nn.ModuleList([Tower(), Tower()])
        self.plain = nn.Sequential(nn.Sequential(nn.Linear(3, 3)), nn.Sequential(nn.Linear(3, 3)))
        self.acts = nn.ModuleList([nn.ReLU(), nn.ReLU()])


def sharded_names(model, auto_wrap=True):
    """Return the modules that torch sharded separately."""
    shard(model, (), cd.FSDPSettings(auto_wrap=auto_wrap), torch.device("cpu"))
    return [name for name, module in model.named_modules() if isinstance(module, FSDPModule)]


class TestWhatIsSharded:
    def test_repeated_blocks(self):
        """By default, the outermost repeated blocks and the root are sharded; nested lists are not blocks."""
        assert sharded_names(Model()) == ["", "stem", "towers.0", "towers.1"]

    def test_root_only(self):
        """False shards the root only."""
        assert sharded_names(Model(), auto_wrap=False) == [""]

    @pytest.mark.parametrize("auto_wrap", ["Block", Block, ["Block"], [Block]])
    def test_chosen_classes(self, auto_wrap):
        """Classes, or their names, at any depth."""
        result = sharded_names(Model(), auto_wrap)

        assert result == ["", "stem", "towers.0.0", "towers.0.1", "towers.1.0", "towers.1.1"]

    def test_nested_classes(self):
        """Both are sharded, the inner ones first, as torch requires."""
        result = sharded_names(Model(), ["Tower", "Block"])

        assert result == ["", "stem", *(f"towers.{i}{j}" for i in (0, 1) for j in ("", ".0", ".1"))]

    def test_model_function(self):
        """A model's own function takes precedence."""

        class Choosing(Model):
            def fsdp_wrap_fn(self, module):
                return module is self.stem or isinstance(module, nn.ReLU)

        assert sharded_names(Choosing()) == ["", "stem"]

    def test_model_attribute(self):
        """Transformers models list their blocks."""
        model = Model()
        model._no_split_modules = ["Block"]

        assert sharded_names(model)[1:3] == ["stem", "towers.0.0"]

    def test_unknown_classes_raise(self):
        """A name without matches raises."""
        with pytest.raises(
            ValueError, match=r"auto_wrap contains classes of which the model has no module: \['Blok'\]"
        ):
            sharded_names(Model(), ["Block", "Blok"])


class TestFormats:
    @pytest.mark.parametrize(
        ("precision", "mixed_precision", "expected"),
        [
            ("fp32", "PURE", (None, None)),
            ("amp_bf16", "DEFAULT", (torch.bfloat16, torch.float32)),
            ("amp_bf16", "PURE", (torch.bfloat16, torch.bfloat16)),
            ("amp_bf16", "FULL", (None, None)),
            ("amp_fp16", "DEFAULT", (torch.float16, torch.float32)),
        ],
    )
    def test_policies(self, precision, mixed_precision, expected):
        """Weights and gradients are communicated in the dtypes of the setting."""
        policy = cd.FSDPSettings(mixed_precision=mixed_precision).policy(Precision(precision))

        assert (policy.param_dtype, policy.reduce_dtype) == expected

    def test_torch_policy(self):
        """A MixedPrecisionPolicy is used unchanged."""
        own = MixedPrecisionPolicy(param_dtype=torch.float16, output_dtype=torch.float32)

        assert cd.FSDPSettings(mp_policy=own).policy(Precision.AMP_BF16) is own


class TestSettings:
    @pytest.mark.parametrize(
        ("config", "error", "message"),
        [
            ({"sharding_strategy": "FULL_SHARD"}, ValueError, "takes auto_wrap, .* got 'sharding_strategy'"),
            ({"mixed_precision": "HALF"}, ValueError, "mixed_precision"),
            ({"auto_wrap": 3}, TypeError, "auto_wrap must be True, False, or classes of modules or their names, got 3"),
            ({"auto_wrap": [3]}, TypeError, r"auto_wrap must be .* got \(3,\)"),
            ({"reshard_after_forward": "yes"}, TypeError, "reshard_after_forward must be True, False or a number"),
            ({"cpu_offload": 1}, TypeError, "cpu_offload"),
        ],
    )
    def test_bad_settings_raise(self, config, error, message):
        """The error has the setting's name."""
        with pytest.raises(error, match=message):
            cd.Parallelism({"fsdp": config})

    def test_settings_are_passed_to_torch(self, monkeypatch):
        """Each setting is passed to torch; on a CPU, gradients are reduced in float64."""
        caught = []
        original = torch.distributed.fsdp.fully_shard

        def watch(module, **how):
            caught.append(how)
            return original(module, **how)

        monkeypatch.setattr(torch.distributed.fsdp, "fully_shard", watch)
        mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
        settings = cd.FSDPSettings(
            reshard_after_forward=False, cpu_offload=True, mixed_precision="PURE", device_mesh=mesh, auto_wrap=False
        )

        shard(nn.Linear(2, 2), (), settings, torch.device("cpu"), Precision.AMP_BF16)

        [how] = caught
        assert how["mesh"] is mesh
        assert how["reshard_after_forward"] is False
        assert isinstance(how["offload_policy"], CPUOffloadPolicy)
        assert how["mp_policy"] == MixedPrecisionPolicy(torch.bfloat16, torch.float64)


def test_other_layouts_become_contiguous():
    """Channels-last weights are sharded as contiguous ones, with a warning."""
    model = nn.Conv2d(3, 4, 3)
    expected = model.weight.detach().clone()
    model.to(memory_format=torch.channels_last)

    with pytest.warns(UserWarning, match="1 weights had another memory layout"):
        shard(model, (), cd.FSDPSettings(), torch.device("cpu"))

    assert torch.equal(model.weight.full_tensor(), expected)


def test_optimizers_are_updated():
    """Groups have the shards at the old positions; momenta are sharded, step counts are not."""
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    groups = [{"params": [model[1].weight], "lr": 0.5}, {"params": [model[0].bias, model[0].weight]}]
    optimizer = torch.optim.Adam(groups, lr=0.1)
    model(torch.ones(4, 2)).sum().backward()
    optimizer.step()
    averages = {name: optimizer.state[parameter] for name, parameter in model.named_parameters() if name != "1.bias"}
    before = {
        name: (param_state["exp_avg"].clone(), param_state["step"].clone()) for name, param_state in averages.items()
    }

    cd.Parallelism({"fsdp": {}}).prepare(State(model, optimizers=optimizer))

    first, second = (group["params"] for group in optimizer.param_groups)
    assert [
        one is other
        for one, other in zip([*first, *second], [model[1].weight, model[0].bias, model[0].weight], strict=True)
    ] == [True] * 3
    assert optimizer.param_groups[0]["lr"] == 0.5
    assert len(optimizer.state) == 3
    for name, (average, step) in before.items():
        param_state = optimizer.state[model.get_parameter(name)]
        assert torch.equal(param_state["exp_avg"].full_tensor(), average)
        assert type(param_state["step"]) is torch.Tensor
        assert torch.equal(param_state["step"], step)


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
            ("steps", lambda module: module.register_buffer("steps", torch.zeros((), dtype=torch.int64))),
            ("mask", lambda module: module.register_buffer("mask", torch.ones(4, dtype=torch.bool))),
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

    @pytest.mark.parametrize(
        "change",
        [
            nn.init.xavier_uniform_,
            lambda weight: weight.data.normal_(),
            lambda weight: weight[0].fill_(3),
            nn.init.trunc_normal_,
        ],
    )
    def test_an_outer_module_that_draws_for_its_parts(self, change):
        """Draws for a part would depend on the number of processes, and writing to its rows may be lost."""

        class Outer(nn.Module):
            def __init__(self):
                super().__init__()
                self.part = nn.Linear(4, 4)

            def reset_parameters(self):
                change(self.part.weight)

        with pytest.raises(
            TypeError, match=r"reset_parameters\(\) of 'a' \((FSDP)?Outer\) draws into tensors of the modules"
        ):
            on_meta(lambda: named(a=Outer()))

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

    def test_what_else_a_method_sets(self):
        """It may set attributes, and whether tensors are trained, of the module and of its parts."""

        class Outer(nn.Linear):
            def __init__(self):
                super().__init__(4, 4)
                self.part = nn.Linear(4, 4)

            def reset_parameters(self):
                super().reset_parameters()
                self.gain = 2.0
                self.bias.requires_grad_(False)
                if hasattr(self, "part"):
                    self.part.bias.requires_grad = False

        with torch.device("meta"):
            model = named(a=Outer(), b=nn.Linear(4, 4))
        cd.Parallelism({"fsdp": {}}).prepare(State(model, rank_zero_seed=3))

        trained = {name for name, one in model.named_parameters() if one.requires_grad}
        assert trained == {"a.weight", "a.part.weight", "b.weight", "b.bias"}
        assert model.a.gain == 2.0

    @pytest.mark.parametrize(
        "change",
        [
            lambda part: setattr(part, "weight", nn.Parameter(torch.ones(4, 4))),
            lambda part: setattr(part.weight, "data", torch.ones(4, 1)),
        ],
    )
    def test_a_part_with_another_parameter(self, change):
        """A parameter that FSDP2 does not have would not be trained."""

        class Outer(nn.Module):
            def __init__(self):
                super().__init__()
                self.part = nn.Linear(4, 4)

            def reset_parameters(self):
                change(self.part)

        with pytest.raises(TypeError, match=r"replaces the parameter 'a\.part\.weight' of a part"):
            on_meta(lambda: named(a=Outer()))

    def test_another_shape(self):
        """A method keeps the shapes of its tensors."""

        class Wider(nn.Linear):
            def reset_parameters(self):
                nn.init.zeros_(self.bias)
                self.weight.data = torch.ones(4, 4 if self.weight.is_meta else 5)

        with pytest.raises(TypeError, match=r"of 'a' gives 'weight' the shape \(4, 5\)"):
            on_meta(lambda: named(a=Wider(4, 4)))

    def test_values_that_look_unset(self):
        """A method may set values that are no numbers, and the largest ones."""

        class Extreme(nn.Module):
            def __init__(self):
                super().__init__()
                self.register_buffer("last", torch.empty(2, dtype=torch.uint8))
                self.register_buffer("none", torch.empty(2))
                self.reset_parameters()

            def reset_parameters(self):
                self.last.fill_(255)
                self.none.fill_(torch.nan)

        weights = on_meta(lambda: named(a=Extreme(), b=nn.Linear(4, 4)))

        assert (weights["a.last"] == 255).all()
        assert weights["a.none"].isnan().all()

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
            cd.Parallelism().check_has_data(nn.Linear(2, 2, device="meta"))


def test_sharded_training_is_saved_and_resumed(start_pair, tmp_path):
    """Two processes save a sharded run in every way, and a resumed run has the bits of an uninterrupted one."""
    pair = start_pair("sharded_training.py", str(tmp_path))
    try:
        ends = [process.communicate(timeout=240) for process in pair]
    finally:
        for process in pair:
            process.kill()

    assert [process.returncode for process in pair] == [0, 0], ends
    first, second = (json.loads(output) for output, _ in ends)
    assert first["saved"] == ["ep2-ba9", "ep3-ba12", "ep0-ba3", "ep1-ba6", "ep2-ba9", "ep3-ba12"]
    assert first["left"] == ["ep2-ba9", "ep3-ba12"]
    for result in (first, second):
        assert (result["ep0-ba3"], result["ep1-ba6"], result["weights"], result["autoresume"]) == ([], [], [], 12)
        assert result["wrapper of FSDP 1"].startswith("NotImplementedError: Checkpoints of models that are wrapped by")


def test_summary_of_a_sharded_model(make_trainer):
    """A summary raises an error with the remedy: the weights outside of the blocks are not gathered for it."""
    trainer = make_trainer(parallelism_config={"fsdp": {}}, max_duration="1ba")
    trainer.summary()
    trainer.fit()

    with pytest.raises(ValueError, match=r"cannot be summarized, .* Call summary\(\) before fit\(\)"):
        trainer.summary()
