"""FSDP2: sharded modules, dtypes and errors. Results of two processes are in test_parallelism."""

import json
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from composer import distributed as cd
from composer import functional as cf
from composer.core import Precision, State
from composer.diagnostics import summary
from composer.distributed.sharding import shard
from fixtures import small_run
from fixtures.processes import run_processes


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

    @pytest.mark.parametrize("auto_wrap", [True, "Tower"])
    def test_blocks_after_surgery(self, auto_wrap):
        """Blocks whose class surgery has derived from theirs are found by the names of the plain classes."""
        model = Model()
        model._no_split_modules = ["Tower"]
        cf.apply_stochastic_depth(model, Tower, "sample")
        cf.apply_activation_checkpointing(model, Tower)

        assert sharded_names(model, auto_wrap) == ["", "towers.0", "towers.1"]
        assert type(model.towers[0]).__name__ == "FSDPCheckpointedStochasticTower"

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


class TestSettings:
    @pytest.mark.parametrize(
        ("config", "error", "message"),
        [
            ({"nothing": 3}, ValueError, "takes auto_wrap, .* got 'nothing'"),
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


def test_sharded_training_is_saved_and_resumed(tmp_path):
    """Two processes save a sharded run in every way, and a resumed run has the bits of an uninterrupted one."""
    printed = run_processes(Path(__file__).with_name("sharded_training.py"), 2, tmp_path)

    first, second = (json.loads(text.splitlines()[-1]) for text in printed)
    assert first["saved"] == ["ep2-ba9", "ep3-ba12", "ep0-ba3", "ep1-ba6", "ep2-ba9", "ep3-ba12"]
    assert first["left"] == ["ep2-ba9", "ep3-ba12"]
    for result in (first, second):
        assert (result["ep0-ba3"], result["ep1-ba6"], result["weights"], result["autoresume"]) == ([], [], [], 12)
        assert result["wrapper of FSDP 1"].startswith("NotImplementedError: Checkpoints of models that are wrapped by")


def test_summary_of_a_sharded_model():
    """A summary raises an error with the remedy: the weights outside of the blocks are not gathered for it."""
    trainer = small_run(parallelism_config={"fsdp": {}}, max_duration="1ba")
    summary(trainer)
    trainer.fit()

    with pytest.raises(ValueError, match=r"cannot be summarized, .* Call summary\(trainer\) before fit\(\)"):
        summary(trainer)


@pytest.mark.parametrize("mixed_precision", ["DEFAULT", "PURE"])
def test_batchnorm_in_16_bits(mixed_precision):
    """Layers with running statistics are gathered in 32 bits; weights and statistics are those without FSDP2."""

    def train(**options):
        torch.manual_seed(0)
        network = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
        trainer = small_run(network=network, precision="amp_bf16", max_duration="2ep", **options)
        trainer.fit()
        state = trainer.state.model.state_dict()
        return {name: one.full_tensor() if hasattr(one, "full_tensor") else one for name, one in state.items()}

    sharded = train(parallelism_config={"fsdp": {"mixed_precision": mixed_precision}})

    torch.testing.assert_close(sharded, train(), rtol=0, atol=1e-6)
