"""Save and load sharded models in groups of processes, and write what differs to ``<folder>/<world size>-<rank>.json``.

    python sharded_program.py FOLDER

Each group is forked from this process, so that torch is imported once.
"""

import hashlib
import json
import math
import os
import pickle
import shutil
import sys
import time
import traceback
import warnings
from collections import OrderedDict
from contextlib import ExitStack, contextmanager
from pathlib import Path
from unittest import mock

import torch
import torchmetrics.classification  # noqa: F401  (each fork of a process would import it again)
from fsspec.implementations.local import LocalFileSystem
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader, TensorDataset

from composer import Callback, Trainer, distributed
from composer.algorithms import EMA, SAM, SWA, LayerFreezing
from composer.callbacks import CheckpointSaver
from composer.checkpoint import (
    CheckpointError,
    find_checkpoints,
    load_checkpoint,
    manifest,
    merge_weights,
    reading,
    save_checkpoint,
    verify_checkpoint,
)
from composer.checkpoint.finding import agreed_newest, open_checkpoint
from composer.checkpoint.folders import LocalFolder
from composer.checkpoint.loading import SavedRun
from composer.checkpoint.remote import RemoteFolder
from composer.core import Engine, Event, State, Timestamp
from composer.models import ComposerClassifier

FAULTS = ("flipped", "cut", "swapped", "missing", "of another save", "layout.json", "state.json")
MESHES = {
    "1": {"shard": 1},
    "2": {"shard": 2},
    "4": {"shard": 4},
    "2x2": {"replicate": 2, "shard": 2},
    "4, second dimension": {"shard": 4},
    "2x2, second dimension": {"replicate": 2, "shard": 2},
    "2, tp": {"tp": 2},
    "4, tp": {"tp": 4},
    "2x2, tp": {"shard": 2, "tp": 2},
    "3x2, tp": {"shard": 3, "tp": 2},
}
WORLD_SIZES = (1, 2, 4, 6)
EVEN = {"even": ColwiseParallel()}
PLAN = {**EVEN, "uneven": ColwiseParallel(), "narrow": RowwiseParallel()}
# With tensor parallelism, FSDP2 of torch 2.7 shards weights only evenly.
FSDP_PLAN = EVEN if torch.torch_version.TorchVersion(torch.__version__) < "2.8" else PLAN


class Net(nn.Module):
    """Weights that four processes share evenly, unevenly, or with nothing for the last one; a buffer and a number.

    FSDP2 shards only dimension 0 unevenly. Tensor parallelism splits the 5 columns of ``narrow`` over four processes
    into 2, 2, 1 and 0, and does not split ``few``. It splits the 7 rows of ``uneven`` into 4 and 3, and FSDP2 these
    over three processes into 2, 2, 0 and 1, 1, 1.
    """

    def __init__(self):
        super().__init__()
        self.even, self.uneven, self.few = nn.Linear(8, 12), nn.Linear(4, 7), nn.Linear(8, 3, bias=False)
        self.narrow = nn.Linear(5, 4)
        self.register_buffer("mean", torch.zeros(5))

    def forward(self, batch):
        return self.even(batch)

    def loss(self, outputs, batch):
        return outputs.mean()


def numbers(name, shape, factor):
    """Return the tensor that belongs to a name."""
    seed = sum(map(ord, name)) * factor
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed))


def make_state(mesh, *, factor):
    """Return a run with a model on a mesh, AdamW and EMA, all of whose tensors are given by name and factor."""
    torch.manual_seed(0)
    model = Net()
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        tensor.data = numbers(name, tensor.shape, factor)
    names = tuple(MESHES[mesh])
    device_mesh = init_device_mesh("cpu", tuple(MESHES[mesh].values()), mesh_dim_names=names)
    if "tp" in names:
        parallelize_module(model, device_mesh["tp"], FSDP_PLAN if "shard" in names else PLAN)
        device_mesh = device_mesh["shard"] if "shard" in names else None
    elif "second" in mesh:
        # FSDP2 shards other dimensions only evenly.
        parts = [model.even, model.few]
        fully_shard(parts, mesh=device_mesh, shard_placement_fn=lambda one: Shard(1 if one.ndim > 1 else 0))
        fully_shard(model.uneven, mesh=device_mesh)
    if device_mesh is not None:
        fully_shard(model, mesh=device_mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 * factor)
    ema = EMA(half_life=None, smoothing=0.5)
    state = State(
        model, optimizers=optimizer, algorithms=ema, rank_zero_seed=factor, rank=distributed.get_global_rank()
    )
    engine = Engine(state)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for name, parameter in model.named_parameters():
        held = optimizer.state[parameter]
        for field in ("exp_avg", "exp_avg_sq"):
            fill(held[field], f"{name}.{field}", factor)
        held["step"].fill_(factor)
    for name, parameter in model.named_parameters():
        fill(parameter, f"average of {name}", factor)
    ema.apply(Event.BATCH_END, state, engine.logger)
    for name, parameter in model.named_parameters():
        fill(parameter, name, factor)
    return state, ema


@torch.no_grad()
def fill(tensor, name, factor):
    """Set a sharded or complete tensor to the numbers of a name."""
    complete = numbers(name, tensor.shape, factor)
    if isinstance(tensor, DTensor):
        tensor.to_local().copy_(part_of(complete, tensor))
    else:
        tensor.copy_(complete)


def part_of(complete, like):
    """Return this process's part of a complete tensor, which the last dimension of the mesh, ``tp``, splits first."""
    for place in reversed(range(like.device_mesh.ndim)):
        if like.placements[place].is_replicate():
            continue
        dimension, rank = like.placements[place].dim, like.device_mesh.get_local_rank(place)
        parts = complete.chunk(like.device_mesh.size(place), dim=dimension)
        complete = parts[rank] if rank < len(parts) else complete.narrow(dimension, 0, 0)
    return complete


def differences(state, ema, factor):
    """Return which tensors of a run are not those of a factor."""
    found, model, [optimizer] = [], state.model, state.optimizers
    ema._averages.check(model, training=False)
    averages = ema._averages.state_dict()["averaged_weights"]
    for name, parameter in model.named_parameters():
        held = optimizer.state[parameter]
        compared = {
            name: parameter,
            f"{name}.exp_avg": held["exp_avg"],
            f"{name}.exp_avg_sq": held["exp_avg_sq"],
            f"average of {name}": averages[name],
        }
        for what, tensor in compared.items():
            expected, own = numbers(what, parameter.shape, factor), tensor
            if isinstance(parameter, DTensor):
                expected, own = part_of(expected, parameter), tensor.to_local()
            is_like = type(tensor.data) is type(parameter.data) and placements_of(tensor) == placements_of(parameter)
            if not is_like or not torch.equal(own, expected):
                found.append(what)
        if held["step"].item() != factor:
            found.append(f"{name}.step")
    if not torch.equal(model.mean, numbers("mean", (5,), factor)):
        found.append("mean")
    if (state.rank_zero_seed, optimizer.param_groups[0]["lr"]) != (factor, 0.1 * factor):
        found.append("settings")
    return found


def is_average(name, weight, factor):
    """Return whether a weight, or this process's part of it, is the average that was saved."""
    expected = numbers(f"average of {name}", weight.shape, factor)
    if not isinstance(weight, DTensor):
        return torch.equal(weight, expected)
    return torch.equal(weight.to_local(), part_of(expected, weight))


def placements_of(tensor):
    """Return the placements of a DTensor, and None for another tensor."""
    return tensor.placements if isinstance(tensor, DTensor) else None


def in_group(world_size, folder, run):
    """Run a function in a group of forked processes, and exit with an error if one fails."""
    children = []
    for rank in range(world_size):
        child = os.fork()
        if not child:
            code = 1
            try:
                os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world_size), "LOCAL_RANK": str(rank)}
                os.environ |= {"LOCAL_WORLD_SIZE": str(world_size), "NODE_RANK": "0"}
                store = torch.distributed.FileStore(f"{folder}/store-{run.__name__}-{world_size}", world_size)
                torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
                result = run(world_size, folder)
                Path(folder, f"{run.__name__}-{world_size}-{rank}.json").write_text(json.dumps(result))
                # The group is not destroyed: torch 2.7 waits for gloo's threads with the interpreter's lock, which
                # they need to release the last tensors.
                torch.distributed.barrier()
                code = 0
            except BaseException:  # noqa: BLE001  (the parent fails by the exit code)
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(code)
        children.append(child)
    if any(os.waitpid(child, 0)[1] for child in children):
        sys.exit(f"{run.__name__} failed in {world_size} processes")


def meshes_of(world_size):
    return [name for name, mesh in MESHES.items() if math.prod(mesh.values()) == world_size]


def save(world_size, folder):
    """Save a run on each mesh of this size, and return its files."""
    files = {}
    for mesh in meshes_of(world_size):
        state, _ = make_state(mesh, factor=3)
        with torch.no_grad():
            state.model(torch.zeros(1, 8))  # as in an evaluation: now the complete weights are in the model
        path = save_checkpoint(state, f"{folder}/checkpoints/{mesh}")
        verify_checkpoint(path)
        files[mesh] = sorted(file.name for file in Path(path).iterdir())
    if world_size == 4:
        state, _ = make_state("4", factor=7)
        save_checkpoint(state, f"{folder}/other")
    return files


@contextmanager
def without_pickle():
    """Raise an error if anything is unpickled but what other processes have sent."""

    def fail(*_, **__):
        raise AssertionError("something was unpickled")

    with ExitStack() as stack:
        for owner, name in ((pickle, "load"), (pickle, "loads"), (torch, "load")):
            stack.enter_context(mock.patch.object(owner, name, fail))
        yield


def load(world_size, folder):
    """Load every checkpoint on each mesh of this size, and return what differs."""
    found = {}
    for mesh in meshes_of(world_size):
        for saved in (*MESHES, "plain"):
            state, ema = make_state(mesh, factor=5)
            with without_pickle():
                load_checkpoint(f"{folder}/checkpoints/{saved}", state)
            found[f"{saved} -> {mesh}"] = differences(state, ema, 3)
            load_checkpoint(f"{folder}/checkpoints/{saved}", state, weights_only=True)
            found["weights"] = found.get("weights", []) + [
                name for name, weight in state.model.named_parameters() if not is_average(name, weight, 3)
            ]
        found["complete"] = found.get("complete", []) + read_complete(f"{folder}/checkpoints/plain", state)
    return found


def read_complete(path, state):
    """Return which sharded tensors a process holds completely after reading a checkpoint that was not sharded."""
    own = state.get_model_state_dict()
    opened = open_checkpoint(path)
    found = SavedRun.of_checkpoint(opened, state, weights_only=False)
    found.read_weights()
    read = [*found.data["model"].items()]
    for name, held in found.data["optimizers"]["AdamW"]["state"].items():
        read += [(name, one) for one in held.values() if one.ndim]
    return [name for name, one in read if isinstance(own[name], DTensor) and not isinstance(one, DTensor)]


def fail(world_size, folder):
    """Save what one process cannot save, and load damaged parts; return the errors, and what is left and changed."""
    errors, changed = {}, {}
    state, ema = make_state("2", factor=3)
    if distributed.get_global_rank() == 1:
        state.optimizers[0].param_groups[0]["lr"] = print  # cannot be saved
    try:
        save_checkpoint(state, f"{folder}/failed/first")
    except Exception as error:  # noqa: BLE001  (compared by the test)
        errors["saving"] = f"{type(error).__name__}: {error}"
    left = [str(entry) for entry in Path(folder).glob("failed/*")]
    for fault in FAULTS:
        state, ema = make_state("2", factor=5)
        try:
            load_checkpoint(f"{folder}/checkpoints/{fault}", state)
        except CheckpointError as error:
            errors[fault] = str(error)
        changed[fault] = differences(state, ema, 5)
    state, _ = make_state("2", factor=5)
    if distributed.get_global_rank() == 1:
        state.optimizers[0].load_state_dict = reject
    try:
        load_checkpoint(f"{folder}/checkpoints/2", state)
    except Exception as error:  # noqa: BLE001  (compared by the test)
        errors["loading"] = f"{type(error).__name__}: {error}"
    return {"errors": errors, "left": left, "changed": changed, "newest": newest(folder)}


def newest(folder):
    """Choose the newest undamaged one of three; return it, the warnings, and the parts that this process has read."""
    if distributed.get_global_rank() == 0:
        for name in ("4", "flipped", "of another save"):
            shutil.copytree(f"{folder}/checkpoints/{name}", f"{folder}/newest/{name.replace(' ', '-')}")
    distributed.barrier()
    run_name = json.loads(Path(folder, "newest/4/manifest.json").read_text())["run_name"]
    checked, check = [], reading.OpenCheckpoint.check

    def note(checkpoint, files):
        checked.extend(f"{checkpoint.name}/{file}" for file in files if "-of-" in file)
        check(checkpoint, files)

    with warnings.catch_warnings(record=True) as caught, mock.patch.object(reading.OpenCheckpoint, "check", note):
        warnings.simplefilter("always")
        path = agreed_newest(f"{folder}/newest", run_name)
    return {"path": path, "warnings": [str(one.message) for one in caught], "checked": checked}


def reject(*_):
    raise ValueError("rejected")


def background(world_size, folder):
    """Save in the background while the weights change, and let a process fail; return what happened."""
    state, ema = make_state("2", factor=3)
    rank, logger, found = distributed.get_global_rank(), None, {}
    saver = CheckpointSaver(f"{folder}/background", "{batch}", save_interval="1ba")
    saver.fit_start(state, logger)
    put = LocalFolder.put

    def slow(*arguments):
        time.sleep(0.3)
        put(*arguments)

    LocalFolder.put = slow
    state.timestamp = Timestamp(batch=1)
    saver.save(state)
    found["goes on"] = saver._saving.is_busy
    for name, parameter in state.model.named_parameters():
        fill(parameter, name, 9)
    saver.wait()
    LocalFolder.put = put
    later, ema = make_state("2", factor=5)
    load_checkpoint(f"{folder}/background/latest", later)
    found["loaded"] = differences(later, ema, 3)

    def full(*_):
        raise OSError(28, "No space left on device")

    if rank == 1:
        LocalFolder.put = full
    state.timestamp = Timestamp(batch=2)
    saver.save(state)
    state.timestamp = Timestamp(batch=3)
    time.sleep(0.5 * rank)
    saver.batch_checkpoint(make_state("2", factor=3)[0], logger)  # raises nothing, though a save has failed
    try:
        saver.save(state)
    except OSError as error:
        found["error"] = f"{type(error).__name__}: {error}"
    LocalFolder.put = put
    saver.save(state)
    saver.wait()
    saver.fit_end(state, logger)
    saver.close(state, logger)
    found["left"] = sorted(entry.name for entry in Path(folder, "background").iterdir())
    return found


def remote(world_size, folder):
    """Save through fsspec, load again, and let a process fail; return what happened."""
    import fsspec

    url = f"sharedfile://{folder}/remote"

    class SharedFiles(LocalFileSystem):
        protocol = ("sharedfile",)

        def __init__(self, **options):
            super().__init__(**options | {"auto_mkdir": True})

        @classmethod
        def _strip_protocol(cls, path):
            return LocalFileSystem._strip_protocol(str(path).removeprefix("sharedfile://"))

    fsspec.register_implementation("sharedfile", SharedFiles, clobber=True)
    # So that these small files have many blocks, and are read directly to the memory of tensors.
    manifest.BLOCK_BYTES = reading.BLOCK_BYTES = 256
    state, ema = make_state("2", factor=3)
    path = save_checkpoint(state, f"{url}/one")
    later, ema = make_state("2", factor=5)
    load_checkpoint(path, later)
    distributed.barrier()
    found = {"differences": differences(later, ema, 3)}

    put = RemoteFolder.put
    if distributed.get_global_rank() == 1:
        RemoteFolder.put = reject
    try:
        save_checkpoint(state, f"{url}/two")
    except Exception as error:  # noqa: BLE001  (compared by the test)
        found["error"] = f"{type(error).__name__}: {error}"
    distributed.barrier()
    RemoteFolder.put = put
    return found | {"names": [one.name for one in find_checkpoints(url) if one.is_complete]}


ALGORITHMS = {
    "EMA": lambda: EMA("2ba"),
    "SWA": lambda: SWA("1ep", "1dur", update_interval="1ba"),
    "SAM": lambda: SAM(interval=2),
    "LayerFreezing": lambda: LayerFreezing(0.0, 1.0),
}


class Offset(nn.Module):
    """Adds a buffer that is drawn."""

    def __init__(self):
        super().__init__()
        self.register_buffer("offset", torch.empty(8))
        self.reset_parameters()

    def reset_parameters(self):
        nn.init.uniform_(self.offset)

    def forward(self, inputs):
        return inputs + self.offset


def make_trainer(name, device="cpu", **options):
    """Return a trainer of a sharded model with an algorithm."""
    torch.manual_seed(0)
    with torch.device(device):
        network = nn.Sequential(nn.Linear(4, 8), Offset(), nn.ReLU(), nn.Linear(8, 7), nn.ReLU(), nn.Linear(7, 3))
    model = ComposerClassifier(network, num_classes=3)
    inputs = torch.rand(8, 4, generator=torch.Generator().manual_seed(1))
    data = TensorDataset(inputs, inputs[:, :3].argmax(dim=1))
    size = 4 // distributed.get_world_size()
    return Trainer(
        model=model,
        train_dataloader=DataLoader(data, batch_size=size, sampler=distributed.get_sampler(data)),
        optimizers=torch.optim.AdamW(model.parameters(), lr=0.01),
        algorithms=ALGORITHMS[name](),
        parallelism_config={"fsdp": {}},
        max_duration="4ep",
        progress_bar=False,
        device="cpu",
        seed=3,
        **options,
    )


def digests(state):
    """Return a digest of each complete tensor of a run by its place."""
    found = {}

    def add(value, path):
        if isinstance(value, torch.Tensor):
            whole = value.full_tensor() if isinstance(value, DTensor) else value
            found[path] = hashlib.sha256(whole.detach().contiguous().numpy().tobytes()).hexdigest()
        elif isinstance(value, (dict, list, tuple)):
            for key, item in value.items() if isinstance(value, dict) else enumerate(value):
                add(item, f"{path}/{key}")

    add([state.get_model_state_dict(), state.get_optim_state_dict(), state.state_dict()["algorithms"]], "")
    return found


def trained(world_size, folder):
    """Train with each algorithm and save; return the digests."""
    found = {}
    for name in ALGORITHMS:
        trainer = make_trainer(name)
        trainer.fit(duration="2ep")
        trainer.save_checkpoint(f"{folder}/others/{name}")
        found[name] = digests(trainer.state)
        trainer.close()
    return found


def others(world_size, folder):
    """Load what was trained into sharded models; return the digests."""
    warnings.simplefilter("ignore")
    found = {}
    for name in ALGORITHMS:
        trainer = make_trainer(name)
        state = trainer.state
        distributed.Parallelism({"fsdp": {}}).prepare(state)
        load_checkpoint(f"{folder}/others/{name}", state, ignore_keys=["callbacks", "extra"])
        found[name] = digests(state)
        trainer.close()
    return found


def meta(world_size, folder):
    """Build a model on the meta device, and resume one; return the digests, and how many elements a process has."""
    warnings.simplefilter("ignore")
    first = make_trainer("EMA", "meta")
    found = {"initial": {path: digest for path, digest in digests(first.state).items() if path.startswith("/0/")}}
    found["elements"] = sum(one.to_local().numel() for one in first.state.model.parameters())
    first.close()
    trainer = make_trainer("EMA", "meta", load_path=f"{folder}/others/EMA")
    found["resumed"] = digests(trainer.state)
    trainer.fit()
    found["end"] = float(trainer.state.model.module[0].weight.full_tensor().sum())
    trainer.close()
    return found


class Holder(Callback):
    """Holds a tensor that is no DTensor, under the name and with the shape of a weight."""

    def __init__(self, rows):
        self.held = {"even.weight": torch.zeros(rows, 8)}

    def state_dict(self):
        return {"best": self.held}

    def load_state_dict(self, state):
        self.held = state["best"]


class Factored(torch.optim.Optimizer):
    """Divides gradients by the root of a mean square of each row, as optimizers with factored moments do."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            square = parameter.grad.square()
            mean = square.mean(dim=-1) if parameter.ndim > 1 else square
            moment = self.state[parameter].setdefault("moment", torch.zeros_like(mean))
            moment.mul_(0.9).add_(mean, alpha=0.1)
            self.state[parameter]["steps"] = replicated(self.state[parameter].get("steps", 0) + 1, parameter)
            root = moment.sqrt().add(1e-3)
            parameter.sub_(parameter.grad / (root.unsqueeze(-1) if parameter.ndim > 1 else root), alpha=0.1)


def replicated(number, parameter):
    """Return a number as a tensor; on the mesh of a parameter as a DTensor that all processes have."""
    if not isinstance(parameter, DTensor) or isinstance(number, DTensor):
        return torch.as_tensor(number)
    mesh = parameter.device_mesh
    return DTensor.from_local(torch.as_tensor(number), mesh, [Replicate()] * mesh.ndim, run_check=False)


FSDP = {"fsdp": {}}
FSDP_TP = {"mesh": {"shard": 2, "tp": 2}, "tp": {"plan": {"even": "colwise"}}, "fsdp": {}}
KINDS = {
    "fsdp": (2, 12, FSDP),
    "fsdp and tp": (4, 12, FSDP_TP),
    # torch 2.7 cannot split 7 rows, see Net
    "uneven": (6, 7 if FSDP_PLAN is PLAN else 12, {**FSDP_TP, "mesh": {"shard": 3, "tp": 2}}),
}
"""The number of processes that save, the rows of the weight, and the parallelism."""


def make_factored(config, rows=12):
    """Return a run with such an optimizer, and weights that torch's operations on DTensors support in each mesh."""
    torch.manual_seed(0)
    model = nn.Sequential(OrderedDict(even=nn.Linear(8, rows)))
    optimizer = Factored(model.parameters())
    state = State(model, optimizers=optimizer, callbacks=Holder(rows), rank=distributed.get_global_rank())
    if config is not None:
        distributed.Parallelism(config).prepare(state)
    return state


def step(state, count):
    """Take steps with gradients that depend on the weights, and return the digests of the run."""
    for _ in range(count):
        for parameter in state.model.parameters():
            parameter.grad = parameter.detach() * 2 + 1
        state.optimizers[0].step()
    return digests(state)


def save_factored(config, rows, path):
    """Save after two steps; return the placements of a moment, and the digests after two more steps."""
    state = make_factored(config, rows)
    step(state, 2)
    save_checkpoint(state, path)
    found = placements_of_moment(state)
    return {"placements": found, "end": step(state, 2)}


def placements_of_moment(state):
    return str(state.optimizers[0].state[state.model.even.weight]["moment"].placements)


def load_factored(config, rows, path):
    """Load before and after the model is sharded, and take two steps; return the digests."""
    later, before = make_factored(config, rows), make_factored(None, rows)
    load_checkpoint(path, later)
    load_checkpoint(path, before)
    distributed.Parallelism(config).prepare(before)
    return {
        "held": type(later.callbacks[0].held["even.weight"]).__name__,
        "placements": placements_of_moment(later),
        "later": step(later, 2),
        "before": step(before, 2),
    }


def kinds(world_size, folder):
    """Load what has another shape than its weight, or was not sharded, and from two paths; return what differs."""
    found = {}
    for name, (processes, rows, config) in KINDS.items():
        if world_size == processes:
            found[f"{name}, saved"] = save_factored(config, rows, f"{folder}/factored {name}")
        if world_size == processes or name == "fsdp":
            found[name] = load_factored(config, rows, f"{folder}/factored {name}")
    state, ema = make_state("3x2, tp" if world_size == 6 else str(world_size), factor=5)
    place = "checkpoints/2" if distributed.get_global_rank() == 0 else "other"
    load_checkpoint(f"{folder}/{place}", state)  # as a link that changes between the reads of two processes
    missing = None
    try:
        load_checkpoint(f"{folder}/missing", state)
    except CheckpointError as error:
        missing = str(error)
    return {**found, "paths": differences(state, ema, 3), "missing": missing}


def save_plain(folder):
    """Save the same run without sharding, and merge the parts of a sharded one."""
    state = make_plain(factor=3)
    save_checkpoint(state, f"{folder}/checkpoints/plain")
    merge_weights(f"{folder}/checkpoints/2x2", f"{folder}/merged.safetensors")


def make_plain(factor):
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 * factor)
    ema = EMA(half_life=None, smoothing=0.5)
    state = State(model, optimizers=optimizer, algorithms=ema, rank_zero_seed=factor)
    engine = Engine(state)
    for name, parameter in model.named_parameters():
        parameter.data = numbers(f"average of {name}", parameter.shape, factor)
    model.mean.copy_(numbers("mean", (5,), factor))
    ema.apply(Event.BATCH_END, state, engine.logger)
    for name, parameter in model.named_parameters():
        parameter.grad = torch.zeros_like(parameter)
        parameter.data.copy_(numbers(name, parameter.shape, factor))
    optimizer.step()
    for name, parameter in model.named_parameters():
        parameter.data.copy_(numbers(name, parameter.shape, factor))
        held = optimizer.state[parameter]
        for field in ("exp_avg", "exp_avg_sq"):
            held[field].copy_(numbers(f"{name}.{field}", parameter.shape, factor))
        held["step"].fill_(factor)
    return state


def load_alone(folder):
    """Load every sharded checkpoint in one process without sharding, and return the names of what differs."""
    found = {}
    for saved in MESHES:
        state, expected = make_plain(factor=5), make_plain(factor=3)
        load_checkpoint(f"{folder}/checkpoints/{saved}", state)
        own, other = (
            {**one.get_model_state_dict(), **one.state_dict()["algorithms"][0]["state"]["averaged_weights"]}
            for one in (state, expected)
        )
        found[saved] = [name for name in other if not torch.equal(own[name], other[name])]
        for name, held in expected.get_optim_state_dict()["AdamW"]["state"].items():
            loaded = state.get_optim_state_dict()["AdamW"]["state"][name]
            found[saved] += [f"{name}.{field}" for field in held if not torch.equal(loaded[field], held[field])]
    return found


def main(folder):
    for world_size in WORLD_SIZES:
        in_group(world_size, folder, save)
    save_plain(folder)
    Path(folder, "alone.json").write_text(json.dumps(load_alone(folder)))
    for world_size in WORLD_SIZES:
        in_group(world_size, folder, load)
    for fault in FAULTS:
        damage(Path(folder, "checkpoints"), fault)
    in_group(2, folder, fail)
    in_group(2, folder, background)
    in_group(2, folder, remote)
    for world_size in (2, 4, 6):
        in_group(world_size, folder, kinds)
    in_group(2, folder, trained)
    for world_size in (1, 2, 4):
        in_group(world_size, folder, others)
        in_group(world_size, folder, meta)


def damage(folder, fault):
    """Copy a checkpoint of four processes with one fault in what the second of two processes reads."""
    target = folder / fault
    shutil.copytree(folder / "4", target)
    third, fourth = (target / f"model-0000{place}-of-00004.safetensors" for place in (3, 4))
    content = bytearray(third.read_bytes())
    if fault == "flipped":
        content[-1] ^= 1
        third.write_bytes(content)
    elif fault == "cut":
        third.write_bytes(content[:-1])
    elif fault == "swapped":
        second = target / "optimizers-00002-of-00004.safetensors"
        third = target / "optimizers-00003-of-00004.safetensors"
        content, other = third.read_bytes(), second.read_bytes()
        assert len(content) == len(other)
        third.write_bytes(other)
        second.write_bytes(content)
    elif fault == "missing":
        third.unlink()
    elif fault == "of another save":
        shutil.copy(folder.parent / "other" / fourth.name, fourth)
    elif fault == "layout.json":  # that of another mesh
        shutil.copy(folder / "2" / fault, target / fault)
    elif fault == "state.json":
        shutil.copy(folder.parent / "other" / fault, target / fault)


if __name__ == "__main__":
    main(sys.argv[1])
