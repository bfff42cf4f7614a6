"""One of four processes that step Muon on sharded weights; each writes its results to ``<folder>/<rank>.json``."""

import copy
import json
import sys
from pathlib import Path

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from composer import functional as cf
from composer.functional.dtensors import local_parts, shard_like
from composer.optim import DecoupledAdamW, Muon, division, muon, muon_with_adamw

STEPS = 3
# With tensor parallelism, FSDP2 of torch 2.7 shards weights only evenly.
WIDTH = 16 if torch.torch_version.TorchVersion(torch.__version__) < "2.8" else 14


def network():
    """Return layers whose sizes four processes cannot share equally, and a convolution."""
    torch.manual_seed(5)
    layers = {
        "up": nn.Linear(6, WIDTH),
        "down": nn.Linear(WIDTH, 6),
        "odd": nn.Linear(6, 7),
        "convolution": nn.Conv2d(7, 6, 3),
        "head": nn.Linear(6, 3),
    }
    return nn.Sequential(nn.ModuleDict(layers))


def gradients(step):
    """Return the complete gradient of each parameter."""
    generator = torch.Generator().manual_seed(step)
    return {name: torch.randn(parameter.shape, generator=generator) for name, parameter in network().named_parameters()}


def train(model, **options):
    """Step from complete gradients; return the complete weights, and the elements of momentum here and in all."""
    optimizer = muon_with_adamw(model, lr=0.05, **options)
    for step in range(STEPS):
        for name, parameter in model.named_parameters():
            parameter.grad = shard_like(gradients(step)[name].to(parameter.dtype), parameter)
        optimizer.step()
        for weight, state in optimizer.state.items():
            if "row_exp_avg_sq" in state and isinstance(weight, DTensor):  # as a resumed run has them
                mesh, averages = weight.device_mesh, state["row_exp_avg_sq"]
                if not isinstance(averages, DTensor):
                    state["row_exp_avg_sq"] = DTensor.from_local(averages, mesh, [Replicate()] * mesh.ndim)
    momenta = [state["momentum_buffer"] for state in optimizer.state.values() if "momentum_buffer" in state]
    elements = [sum(one.numel() for one in tensors) for tensors in (local_parts(momenta), momenta)]
    weights = {name: one.detach() for name, one in model.named_parameters()}
    return {name: getattr(one, "full_tensor", lambda one=one: one)() for name, one in weights.items()}, elements


def sharded(kind):
    """Return a network that is sharded in one of the ways."""
    model = network()
    layers = model[0]
    if kind == "fsdp":
        fully_shard(model, mesh=init_device_mesh("cpu", (4,)))
    elif kind == "replicate x shard":
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        for name, weight in list(model.named_parameters()):
            owner = model.get_submodule(name.rpartition(".")[0])
            parts = distribute_tensor(weight.detach(), mesh, [Replicate(), Shard(0)])
            setattr(owner, name.rpartition(".")[2], nn.Parameter(parts))
    else:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tp"))
        parallelize_module(layers, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fully_shard(model, mesh=mesh["shard"])
    return model


def check_partial_sums():
    """Gradients that are partial sums give the step of their sum."""
    mesh = init_device_mesh("cpu", (4,))
    steps = []
    for is_partial in (False, True):
        torch.manual_seed(2)
        model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 2, bias=False))
        model[0].weight = nn.Parameter(distribute_tensor(model[0].weight.detach(), mesh, [Shard(0)]))
        gradient = torch.randn(8, 8, generator=torch.Generator().manual_seed(3))
        partial = DTensor.from_local(gradient / 4, mesh, [Partial()])
        model[0].weight.grad = partial if is_partial else distribute_tensor(gradient, mesh, [Shard(0)])
        muon_with_adamw(model, lr=0.05).step()
        steps.append(model[0].weight.full_tensor())
    return torch.equal(*steps)


def check_rounding(rank):
    """Compare the parts of two replicas in two shards, after a step in processes with different seeds."""
    torch.manual_seed(100 + rank)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    weight = nn.Parameter(distribute_tensor(torch.ones(16, 8, dtype=torch.bfloat16), mesh, [Replicate(), Shard(0)]))
    weight.grad = torch.ones_like(weight)
    DecoupledAdamW([weight], 2e-3, rounding="stochastic", weight_decay=0.0).step()
    part = weight.detach().to_local().float()
    parts = [torch.empty_like(part) for _ in range(4)]
    torch.distributed.all_gather(parts, part)
    return [[torch.equal(one, other) for other in parts] for one in parts]


class Conv1D(nn.Module):
    """A layer with the name of that of Transformers, whose weights have the shape ``(in, out)``."""

    def __init__(self, rows, columns):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(rows, columns))


def deep(dtype=torch.float32, *, transposed=False):
    """Return eight equal matrices, one of twice the size, and one for AdamW, and their names."""
    torch.manual_seed(3)
    if transposed:  # of a size at which the order of a sum makes a difference
        return nn.Sequential(*(Conv1D(32, 96) for _ in range(8)), Conv1D(96, 32), nn.Linear(12, 5)).to(dtype)
    layers = [nn.Linear(12, 12, bias=False) for _ in range(8)]
    return nn.Sequential(*layers, nn.Linear(12, 24, bias=False), nn.Linear(24, 5)).to(dtype)


def steps(model, calls, state=None, **options):
    """Step three times, a matrix without a gradient in the second; return the optimizer, after counting its work."""
    torch.manual_seed(100)
    optimizer = muon_with_adamw(model, lr=0.05, **options)
    if state is not None:
        optimizer.load_state_dict(state)
    generator = torch.Generator().manual_seed(4)
    for step in range(STEPS):
        for number, weight in enumerate(model.parameters()):
            weight.grad = torch.randn(weight.shape, generator=generator).to(weight.dtype)
            if step == 1 and number == 2:
                weight.grad = None
        calls.clear()
        optimizer.step()
    return optimizer


def equal_states(one, other):
    """Return whether two states of optimizers are equal, bit for bit, with equal settings."""
    if one["param_groups"] != other["param_groups"] or one["state"].keys() != other["state"].keys():
        return False
    return all(
        values.keys() == other["state"][key].keys()
        and all(torch.equal(value, other["state"][key][name]) for name, value in values.items())
        for key, values in one["state"].items()
    )


def check_division(rank):
    """Compare divided steps with undivided ones, and count the matrices and the collectives of the last one."""
    calls, results = [], {}
    orthogonalize, all_gather = cf.orthogonalize, division.all_gather
    muon.orthogonalize = lambda matrices, *rest: calls.append(len(matrices)) or orthogonalize(matrices, *rest)
    division.all_gather = lambda *args: calls.append("all_gather") or all_gather(*args)
    kinds = {
        "plain": {},
        "rows and parts": {"row_beta": 0.9, "fused": {"3": 2, "8": [8, 16]}},
        "transposed": {"row_beta": 0.9, "fused": {"3": 3}},
        "cautious": {"cautious_update": True, "cautious_weight_decay": True},
        "stochastic": {"rounding": "stochastic", "dtype": torch.bfloat16},
        "small windows": {},
    }
    for kind, options in kinds.items():
        dtype = options.pop("dtype", torch.float32)
        muon._MOST_EXCHANGED = 300 if kind == "small windows" else 2**26
        muon._MOST_ELEMENTS["cpu"] = 300 if kind == "small windows" else 2**18
        models = [deep(dtype, transposed=kind == "transposed") for _ in range(2)]
        expected = steps(models[0], calls, **options)
        counts = [sum(each for each in calls if each != "all_gather")]
        optimizer = steps(models[1], calls, **options, divide_work=True)
        counts += [sum(each for each in calls if each != "all_gather"), calls.count("all_gather")]
        states = expected.state_dict(), optimizer.state_dict()
        results[kind] = {
            "weights": all(map(torch.equal, *(model.parameters() for model in models))),
            "state": equal_states(*states),
            "counts": counts,
        }
        for model, state, divides in zip(models, states, (True, False), strict=True):
            steps(model, calls, copy.deepcopy(state), **options, divide_work=divides)
        results[kind]["continued"] = all(map(torch.equal, *(model.parameters() for model in models)))
    muon.orthogonalize = orthogonalize
    torch.manual_seed(rank)
    for name, layer in {"shape": nn.Linear(8, 8 + rank, bias=False), "values": nn.Linear(8, 8, bias=False)}.items():
        layer.weight.grad = torch.zeros_like(layer.weight)
        try:
            Muon(layer.named_parameters(), divide_work=True).step()
        except ValueError as error:
            results[name] = str(error)
    return results


def main():
    torch.distributed.init_process_group("gloo")
    results = {"partial sums": check_partial_sums()}
    expected, _ = train(network())
    for kind in ("fsdp", "replicate x shard", "shard x tp"):
        weights, elements = train(sharded(kind))
        differing = [name for name, value in weights.items() if not torch.equal(value, expected[name])]
        results[kind] = {"differing": differing, "compared": len(weights), "elements": elements}
    cautious = {"cautious_update": True, "cautious_weight_decay": True}
    expected, _ = train(network(), **cautious)
    for kind in ("fsdp", "shard x tp"):
        weights, _ = train(sharded(kind), **cautious)
        distances = [float((value - expected[name]).abs().max()) for name, value in weights.items()]
        results[kind]["cautious"] = max(distances)
    rows = {"row_beta": 0.9, "fused": {"*.up": 2}}
    expected, _ = train(network(), **rows)
    for kind in ("fsdp", "shard x tp"):
        weights, _ = train(sharded(kind), **rows)
        results[kind]["rows"] = [name for name, value in weights.items() if not torch.equal(value, expected[name])]
    weights, _ = train(sharded("fsdp").bfloat16(), rounding="kahan")
    expected, _ = train(network().bfloat16(), rounding="kahan")
    results["kahan"] = all(torch.equal(value, expected[name]) for name, value in weights.items())
    for kind in ("fsdp", "replicate x shard", "shard x tp"):
        expected, _ = train(network(), **rows)
        weights, _ = train(sharded(kind), **rows, divide_work=True)
        results[kind]["divided"] = [name for name, value in weights.items() if not torch.equal(value, expected[name])]
    rank = torch.distributed.get_rank()
    results["divided"] = check_division(rank)
    results["stochastic"] = check_rounding(rank)
    (Path(sys.argv[1]) / f"{rank}.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main()
