"""A program for two processes of torchrun; each writes its results into ``<folder>/<rank>.json``."""

import contextlib
import json
import sys
import time
import warnings
from functools import partial
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import composer.functional as cf
from composer import distributed as cd
from composer.core import Algorithm, DataSpec, State
from composer.foreign import files
from composer.trainer.data.settings import TrainingData

warnings.simplefilter("error")
# torch says so where a model could have done without looking for unused parameters; one here does, at times.
warnings.filterwarnings("ignore", "find_unused_parameters=True was specified")

WORLD = 2
SIZES = (8, 8, 8, 5)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(6, 6)

    def forward(self, inputs):
        return inputs + torch.tanh(self.inner(inputs))


class Model(nn.Module):
    """A regression; the second block only runs for samples whose gate is open."""

    def __init__(self, seed=0, blocks=2):
        super().__init__()
        torch.manual_seed(seed)
        self.first = nn.Linear(3, 6)
        self.blocks = nn.ModuleList([Block() for _ in range(blocks)])
        self.last = nn.Linear(6, 2)
        self.double()

    def forward(self, batch):
        inputs, gates, _ = batch
        hidden = self.blocks[0](self.first(inputs))
        if gates.any():
            hidden = torch.lerp(hidden, self.blocks[1](hidden), gates[:, None])
        return self.last(hidden)

    def loss(self, outputs, batch):
        return (outputs - batch[2]).square().mean()


class SkipsBlocks(Algorithm):
    """An algorithm that declares unused parameters."""

    find_unused_parameters = True

    def match(self, event, state):
        return False

    def apply(self, event, state, logger):
        raise AssertionError("It is never asked to.")


def batches(gated=False):
    generator = torch.Generator().manual_seed(1)
    created = []
    for size in SIZES:
        inputs = torch.randn(size, 3, generator=generator, dtype=torch.float64)
        gates = torch.ones(size, dtype=torch.float64)
        if gated:
            gates[1::2] = 0  # those of the second process
            gates[4:] = 0  # and the first's second microbatch
        created.append((inputs, gates, torch.randn(size, 2, generator=generator, dtype=torch.float64)))
    return created


def make_optimizer(model, name):
    if name == "sam":
        return cf.SAMOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), rho=0.1)
    if name == "adam":
        return torch.optim.Adam(model.parameters(), lr=0.01)
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def freeze(model, number):
    """Freeze the first layer for the second and third batch."""
    model.first.requires_grad_(number not in {1, 2})


def train_alone(optimizer="sgd", gated=False, frozen=False, clip=None):
    """Train in one process on complete batches with plain torch, as the reference."""
    model = Model()
    stepping = make_optimizer(model, optimizer)
    for number, batch in enumerate([batches()[0], *batches(gated)]):
        if frozen:
            freeze(model, number)

        def closure(batch=batch, clips=clip is not None and number > 0):
            stepping.zero_grad()
            loss = model.loss(model(batch), batch)
            loss.backward()
            if clips:
                cf.apply_gradient_clipping(model, *clip)
            return loss

        loss = stepping.step(closure)
    return model, loss.item()


def train_together(
    config=None,
    strategy=None,
    size=None,
    optimizer="sgd",
    gated=False,
    frozen=False,
    clip=None,
    algorithms=(),
    usual=None,
):
    """Train on this process's part of each batch; the first batch is complete and before any preparation."""
    model = Model()
    stepping = make_optimizer(model, optimizer)
    state = State(model, optimizers=stepping, algorithms=algorithms)
    parallel, spec = cd.Parallelism(config, strategy), DataSpec([])
    for number, complete in enumerate([batches()[0], *batches(gated)]):
        if frozen:
            freeze(model, number)
        batch, parts, counted = complete, (), None
        if number > 0:
            parallel.prepare(state)
            batch = tuple(each[cd.get_global_rank() :: WORLD] for each in complete)
            count = len(batch[0])
            parts = [(part, len(part[0]) / count) for part in spec.split_batch(batch, size or count)]
            share = cd.BatchShare(count, 2 * count, microbatches=len(parts))
            counted = parallel.exchange_counts(share, usual_elements=usual)
            parts = parallel.padded(parts, counted)

        def closure(batch=batch, parts=parts, number=number, counted=counted):
            stepping.zero_grad()
            if number == 0:
                loss = model.loss(model(batch), batch)
                loss.backward()
                return loss
            total = 0
            for place, (part, weight) in enumerate(parts):
                parallel.begin_microbatch(is_last=place == len(parts) - 1)
                loss = model.loss(parallel.forward(part), part) * weight * counted.weight()
                loss.backward()
                total = total + loss.detach()
            total = total * parallel.complete_gradients(counted)
            if clip is not None:
                cf.apply_gradient_clipping(model, *clip)
            return parallel.reduce_mean({"total": total})["total"]

        loss = stepping.step(closure)
        if number > 0:
            assert counted.totals().samples == len(complete[0])
            assert counted.totals().tokens == 2 * len(complete[0])
    return model, loss.item()


def weights(model):
    """Return a model's weights, unsharded."""
    return {
        name: value.full_tensor() if hasattr(value, "full_tensor") else value
        for name, value in model.state_dict().items()
    }


def compare(**options):
    """Return the differences of weights and last loss to one process, and whether both are bit-identical."""
    model, loss = train_together(**options)
    own = weights(model)
    alone, expected_loss = train_alone(
        **{name: options[name] for name in ("optimizer", "gated", "frozen", "clip") if name in options}
    )
    expected = alone.state_dict()
    return {
        "distance": max(float((own[name] - expected[name]).abs().max()) for name in expected),
        "loss": [loss, expected_loss],
        "same bits": cd.all_agree([value.tolist() for value in own.values()]),
    }


FSDP = {"fsdp": {}}
UNUSED = {"ddp": {"find_unused_parameters": True}}
LAWS = {
    "ddp": {},
    "ddp, microbatches": {"size": 2},
    "ddp, a sample at a time": {"size": 1, "optimizer": "adam"},
    "ddp, multi": {"size": 2, "strategy": "multi_auto_sync"},
    "ddp, forced": {"size": 2, "strategy": "FORCED_SYNC"},
    "ddp, sam": {"optimizer": "sam", "size": 2},
    "ddp, clipped": {"clip": ("norm", 0.1)},
    "ddp, unused": {"config": UNUSED, "gated": True, "size": 2},
    "ddp, unused by an algorithm": {"algorithms": SkipsBlocks(), "gated": True, "size": 2},
    "ddp, unused, multi": {"config": UNUSED, "gated": True, "size": 2, "strategy": "multi_auto_sync"},
    "ddp, unused, forced": {"gated": True, "size": 2, "strategy": "forced_sync"},
    "ddp, frozen": {"frozen": True, "size": 2},
    "ddp, frozen, forced": {"frozen": True, "size": 2, "strategy": "forced_sync"},
    "ddp, usual number": {"usual": 3, "size": 2},
    "ddp, usual number, forced": {"usual": 4, "strategy": "forced_sync"},
    "ddp, usual number, sam": {"usual": 3, "optimizer": "sam"},
    "ddp, usual number, clipped": {"usual": 3, "clip": ("norm", 0.1)},
    "fsdp": {"config": FSDP},
    "fsdp, usual number": {"config": FSDP, "usual": 3, "size": 2},
    "fsdp, microbatches": {"config": FSDP, "size": 2},
    "fsdp, multi": {"config": FSDP, "size": 2, "strategy": "multi_auto_sync"},
    "fsdp, adam": {"config": {"fsdp": {"reshard_after_forward": False}}, "optimizer": "adam"},
    "fsdp, only the whole": {"config": {"fsdp": {"auto_wrap": False}}},
    "fsdp, chosen blocks": {"config": {"fsdp": {"auto_wrap": ["Block", nn.Linear]}}, "size": 2},
    "fsdp, sam": {"config": FSDP, "optimizer": "sam"},
    "fsdp, norm": {"config": FSDP, "clip": ("norm", 0.1), "size": 2},
    "fsdp, value": {"config": FSDP, "clip": ("value", 0.01)},
    "fsdp, adaptive": {"config": FSDP, "clip": ("adaptive", 0.01)},
    "fsdp, frozen": {"config": FSDP, "frozen": True, "size": 2},
}


def error_of(call):
    try:
        call()
    except (OSError, RuntimeError, TypeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def check_equalised():
    """Models of different seeds become rank 0's; a different model raises."""
    rank = cd.get_global_rank()
    state = State(nn.Sequential(Model(seed=rank), nn.BatchNorm1d(2).double()))
    state.model[1].running_mean += rank
    state.model[0].last.weight.data = state.model[0].last.weight.data.t().contiguous().t()  # not contiguous
    cd.Parallelism().prepare(state)
    expected = nn.Sequential(Model(seed=0), nn.BatchNorm1d(2).double()).state_dict()
    equal = all(torch.equal(value, expected[name]) for name, value in state.model.state_dict().items())
    other = State(Model(blocks=2 + rank))
    return {"equal": equal, "refused": error_of(lambda: cd.Parallelism().prepare(other))}


def check_when_gradients_are_added_up():
    """After each of two microbatches and the batch, whether all have equal gradients; the second batch is a trial."""
    result = {}
    for strategy in ("single_auto_sync", "multi_auto_sync"):
        model, parallel = nn.Linear(2, 1), cd.Parallelism(ddp_sync_strategy=strategy)
        parallel.prepare(State(model))
        agree = result[strategy] = []
        for context in (contextlib.nullcontext(), parallel.trial(), contextlib.nullcontext()):
            with context:
                batch = parallel.exchange_counts(cd.BatchShare(4))
                for is_last in (False, True):
                    parallel.begin_microbatch(is_last)
                    parallel.forward(torch.ones(2, 2) + cd.get_global_rank()).sum().backward()
                    agree.append(cd.all_agree(model.weight.grad.tolist()))
                parallel.complete_gradients(batch)
            agree.append(cd.all_agree(model.weight.grad.tolist()))
            model.zero_grad()
    return result


def check_buffers():
    """Each process has its running means until rank 0's are broadcast."""
    model = nn.BatchNorm1d(2)
    model.running_mean += 5 + cd.get_global_rank()
    model.num_batches_tracked += 3 + cd.get_global_rank()
    cd.broadcast_buffers(model)
    return model.running_mean.tolist(), model.num_batches_tracked.item()


def check_sharding():
    """Each process has half of every weight and optimizer state; computation is in 16 bits."""
    model = Model().float()
    optimizer = make_optimizer(model, "sgd")
    inputs = torch.ones(4, 3), torch.ones(4), torch.ones(4, 2)
    model.loss(model(inputs), inputs).backward()
    optimizer.step()
    optimizer.zero_grad()
    parallel = cd.Parallelism({"fsdp": {}})
    state = State(model, optimizers=optimizer, precision="amp_bf16")
    parallel.prepare(state)
    parallel.prepare(state)  # a second time, nothing is done
    shard_sizes = [parameter.to_local().numel() for parameter in model.parameters()]
    momenta = [optimizer.state[parameter]["momentum_buffer"].to_local().numel() for parameter in model.parameters()]
    parallel.exchange_counts(cd.BatchShare(4))
    parallel.begin_microbatch(is_last=True)
    outputs = parallel.forward(inputs)
    model.loss(outputs, inputs).backward()
    optimizer.step()
    totals = [sum(counts) for counts in zip(*cd.all_gather_object(shard_sizes), strict=True)]
    return {
        "held": shard_sizes,
        "momenta": momenta,
        "totals": totals,
        "sizes": [parameter.numel() for parameter in model.parameters()],
        "outputs": str(outputs.dtype),
        "gradients": str(model.last.weight.grad.dtype),
    }


def check_own_sharding():
    """A model sharded by its user is not wrapped, and reduces gradients with the last microbatch."""
    from torch.distributed.fsdp import fully_shard

    model, complete = Model(), batches()[0]
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    parallel = cd.Parallelism()
    parallel.prepare(State(model, optimizers=optimizer))
    own = tuple(each[cd.get_global_rank() :: WORLD] for each in complete)
    for place, part in enumerate(DataSpec([]).split_batch(own, 2)):
        parallel.begin_microbatch(is_last=place == 1)
        (model.loss(parallel.forward(part), part) / 2).backward()
    optimizer.step()
    alone = Model()
    alone.loss(alone(complete), complete).backward()
    torch.optim.SGD(alone.parameters(), lr=0.1).step()
    return max(float((weights(model)[name] - value).abs().max()) for name, value in alone.state_dict().items())


def check_collectives():
    rank = cd.get_global_rank()
    results = {}
    for operation in ("SUM", "avg", "MIN", "MAX", "PRODUCT"):
        tensor = torch.tensor([2.0 + rank])
        cd.all_reduce(tensor, operation)
        results[operation] = tensor.item()
    sent = torch.tensor([rank])
    cd.broadcast(sent, src=1)
    names = [f"name of {rank}"]
    cd.broadcast_object_list(names, src=1)
    gathered = [part.tolist() for part in cd.all_gather(torch.tensor([[rank, 7], [0, 0]]).t())]
    alone = [torch.distributed.new_group([one]) for one in range(2)][rank]
    own, objects = torch.tensor([4.0]), [rank]
    cd.all_reduce(own, "AVG", alone)
    cd.broadcast(own, rank, alone)
    cd.broadcast_object_list(objects, rank, alone)
    cd.barrier(alone)
    in_group = [own.item(), objects, cd.all_gather(own, alone)[0].item(), cd.all_gather_object(rank, alone)]
    return results | {
        "sent": sent.item(),
        "names": names,
        "gathered": gathered,
        "in_group": in_group,
        "objects": cd.all_gather_object({"rank": rank}),
        "from_rank_zero": cd.from_rank_zero(f"name of {rank}"),
        "any_rank": [cd.any_rank(rank == 1), cd.any_rank(flag=False), cd.any_rank(flag=True)],
        "all_reduce_min": cd.all_reduce_min(16 - rank),
        "all_agree": [cd.all_agree("same"), cd.all_agree(rank)],
        "ranks": [rank, cd.get_local_rank(), cd.get_node_rank(), cd.get_world_size(), cd.get_local_world_size()],
        "unknown": error_of(lambda: cd.all_reduce(torch.ones(1), "MEDIAN")),
    }


def check_order(folder):
    """The first process runs first; if it fails, the other raises."""
    rank, times = cd.get_global_rank(), []
    with cd.run_local_rank_zero_first():
        if rank == 0:
            time.sleep(0.2)
        times.append(time.time())
        times.append((folder / "download").exists())
        (folder / "download").touch()

    def fail():
        with cd.run_local_rank_zero_first():
            raise RuntimeError(f"the download of {cd.get_global_rank()}")

    return {"times": times, "failed": error_of(fail)}


def check_totals():
    rank = cd.get_global_rank()
    parallel = cd.Parallelism()
    parallel.prepare(State(nn.Linear(2, 2)))
    own = cd.BatchShare(3 + 2 * rank, 10 + rank, 1 + 2 * rank, 1 + rank, 1.0 + rank, stop=rank == 1)
    batch = parallel.exchange_counts(own, usual_elements=4)
    early_weight = batch.weight()
    totals, weight = batch.totals(), early_weight * batch.correction()
    means = parallel.reduce_mean({"a": torch.tensor(1.0 + rank), "b": torch.tensor([4.0], dtype=torch.bfloat16)})
    nothing = parallel.exchange_counts(cd.BatchShare(0))
    return {
        "totals": [totals.samples, totals.tokens, totals.seconds, totals.microbatches, weight, totals.stop],
        "counted": totals.elements,
        "early weight": early_weight,
        "means": {name: value.tolist() for name, value in means.items()},
        "nothing": error_of(nothing.totals),
    }


def check_source(folder):
    path = folder / "one.pt"
    if cd.get_global_rank() == 0:
        files.source_of = error_source
    return error_of(partial(files.agreed_source, path))


def error_source(path):
    raise PermissionError(path)


def check_samplers():
    dataset = TensorDataset(torch.arange(7.0))
    rank, spec = cd.get_global_rank(), DataSpec([])
    counted = {}
    for batch_size in (1, 2, 3, 5):
        loader = DataLoader(dataset, batch_size=batch_size, sampler=cd.get_sampler(dataset, shuffle=True))
        cd.check_sampler(loader)
        cd.check_lengths(len(loader))
        cd.set_epoch(loader, 3)
        num_real, recorded, done = cd.num_real_samples_in_loader(loader), 0, []
        for (batch,) in loader:
            left = None if num_real is None else max(0, num_real - recorded)
            done += [x for part, counts in cd.real_parts(batch.split(2), left, spec) if counts for x in part.tolist()]
            recorded += len(batch)
        counted[batch_size] = sorted(sample for part in cd.all_gather_object(done) for sample in part)
    wrong = cd.get_sampler(dataset, num_replicas=3, rank=0)
    return {
        "counted": counted,
        "plain": error_of(lambda: cd.check_sampler(DataLoader(dataset), "eval_dataloader")),
        "shuffled": error_of(lambda: cd.check_sampler(DataLoader(dataset, shuffle=True))),
        "wrong": error_of(lambda: cd.check_sampler(DataLoader(dataset, sampler=wrong))),
        "own": error_of(lambda: cd.check_sampler(DataLoader(dataset, batch_sampler=[[0], [1]]))),
        "lengths": error_of(lambda: cd.check_lengths(5 + rank)),
        "empty": error_of(lambda: prepare([] if rank else [torch.ones(2, 3)])),
        "kinds": error_of(lambda: prepare(DataLoader(range(4), 2, sampler=[rank, 2]) if rank else [torch.ones(2, 3)])),
    }


def prepare(loader):
    TrainingData(train_dataloader=loader).prepare(State(model=None))


def main(folder):
    folder = Path(folder)
    not_connected = error_of(cd.barrier)
    cd.initialize_dist("cpu", timeout=60)
    cd.initialize_dist("cpu")  # the second time, it is there
    results = {
        "not connected": not_connected,
        "laws": {name: compare(**options) for name, options in LAWS.items()},
        "equalised": check_equalised(),
        "when": check_when_gradients_are_added_up(),
        "buffers": check_buffers(),
        "sharding": check_sharding(),
        "own sharding": check_own_sharding(),
        "collectives": check_collectives(),
        "order": check_order(folder),
        "totals": check_totals(),
        "samplers": check_samplers(),
        "source": check_source(folder),
    }
    cd.barrier()
    cd.close_dist()
    results["closed"] = [cd.is_initialized(), error_of(partial(cd.initialize_dist, "cpu"))]
    (folder / f"{cd.get_global_rank()}.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main(sys.argv[1])
