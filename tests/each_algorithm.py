"""Train with algorithms in one process, and in groups of processes in each way; resume each run of a group.

python each_algorithm.py FOLDER CASE...

A case is ``ALGORITHM,WAY,WORKERS``. Each group is forked from this process, so that torch is imported once. Rank 0 of a
group of N processes writes the complete weights to ``<folder>/weights-N.pt`` and each writes what differs after a
resume to ``<folder>/N-<rank>.json``.
"""

import faulthandler
import functools
import itertools
import json
import os
import shutil
import sys
import traceback
import warnings
from pathlib import Path

import torch
from torch import nn
from torch.multiprocessing import start_processes
from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader, Dataset
from torchmetrics.classification import MulticlassAccuracy

from composer import Trainer, distributed
from composer.algorithms import InfoBatchDataset
from composer.core import NoEffectWarning
from composer.loggers import InMemoryLogger
from composer.models import ComposerClassifier
from fixtures.models import PatchEncoder, WrittenOutNorm
from test_resume import FOR_TEXT, SETTINGS, bits, made, text_model

WAYS = {
    "alone": (1, None),
    "DDP": (2, {"ddp": {}}),
    "FSDP2": (2, {"fsdp": {}}),
    "HSDP": (4, {"mesh": {"replicate": 2, "shard": 2}}),
}
SAMPLES, GLOBAL_BATCH = 22, 8  # the last of three global batches has 6 samples
SAVED = 4  # batches, in the middle of the second of three epochs
IN_16_BITS = ("LowPrecisionGroupNorm", "LowPrecisionLayerNorm")
# The model of these tests has no PatchEncoder.
SETTINGS["ChunkedCrossEntropy"] = {"head": "module.11", "chunk_size": 2, "z_loss": 0.01}
# The last epoch has 17 samples, of which one of two processes has one batch more than the other.
SETTINGS["InfoBatch"] = {"ratio": 0.3, "annealing": 0.1}
SETTINGS["SelectiveBackprop"] = {"start": 0.0, "scope": "global"}
SETTINGS["SWA"] = {"swa_start": "1ep", "swa_end": "1dur", "update_interval": "1ba"}


class Samples(Dataset):
    """Images or token ids, without random draws."""

    def __init__(self, name):
        generator = torch.Generator().manual_seed(0)
        dtype = torch.float32 if name in IN_16_BITS else torch.float64
        self.labels = torch.arange(SAMPLES) % 3
        self.images = torch.rand(SAMPLES, 3, 12, 12, generator=generator, dtype=dtype)
        self.texts = torch.randint(0, 20, (SAMPLES, 12), generator=generator)
        self.is_text, self.tokens = is_for_text(name), name == "TokenSelection"

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        if self.tokens:
            ids = self.texts[index]
            return {"input_ids": ids, "labels": ids % 3, "reference_losses": ids / 20}
        if self.is_text:
            return {"input_ids": self.texts[index], "labels": self.labels[index]}
        return self.images[index], self.labels[index]


def image_model(name):
    """Return a residual network that each surgery on images changes, and that treats samples separately."""
    from torchvision.models.resnet import Bottleneck

    torch.manual_seed(0)
    norm = nn.BatchNorm2d if name == "GhostBatchNorm" else functools.partial(nn.GroupNorm, 4)
    layers = [nn.Conv2d(3, 16, 3, padding=1), norm(16), nn.ReLU()]
    layers += [Bottleneck(16, 4, norm_layer=norm) for _ in range(2)]
    layers += [PatchEncoder(12)] if name == "PatchDropout" else []
    layers += [nn.Conv2d(16, 16, 3, stride=2), nn.AdaptiveAvgPool2d(2), nn.Flatten()]
    layers += [nn.Linear(64, 32), WrittenOutNorm(32) if name == "FusedLayerNorm" else nn.LayerNorm(32)]
    layers += [nn.Dropout(0.1), nn.Linear(32, 3)]
    # FSDP2 releases the weights of the head, before the metric would compute its logits.
    metrics = [] if name == "ChunkedCrossEntropy" else MulticlassAccuracy(3)
    return ComposerClassifier(nn.Sequential(*layers), num_classes=3, train_metrics=metrics)


def is_for_text(name):
    return name in FOR_TEXT and name != "FusedLayerNorm"


def make_model(name):
    model = text_model(name, tokens=name == "TokenSelection") if is_for_text(name) else image_model(name)
    for module in model.modules():
        if isinstance(module, nn.Dropout) and name != "GyroDropout":
            module.p = 0.0
    return model if name in IN_16_BITS else model.double()


def train(name, way, workers, **options):
    """Train with an algorithm, and return the trainer and what was logged."""
    model, data = make_model(name), Samples(name)
    count, config = WAYS[way]
    if name == "ChunkedCrossEntropy" and count > 1 and way != "DDP":
        config = config | {"fsdp": {"reshard_after_forward": False}}  # the loss is computed after the forward pass
    SETTINGS["StochasticDepth"]["stochastic_method"] = "block" if way == "DDP" else "sample"  # FSDP2 raises for "block"
    SETTINGS["GhostBatchNorm"]["ghost_batch_size"] = min(2, GLOBAL_BATCH // count // 2)  # less than a process has
    sampler = distributed.get_sampler(data, shuffle=True)
    if name == "InfoBatch":
        data = InfoBatchDataset(data)
        sampler = data.sampler
    log = InMemoryLogger()
    trainer = Trainer(
        model=model,
        train_dataloader=DataLoader(data, GLOBAL_BATCH // count, sampler=sampler, num_workers=workers),
        optimizers=torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        algorithms=made([name], text=is_for_text(name)),
        loggers=log,
        max_duration="3ep",
        parallelism_config=config,
        precision="amp_bf16" if name in IN_16_BITS else "fp32",
        dist_timeout=60,
        device="cpu",
        seed=17,
        run_name="run",
        progress_bar=False,
        **options,
    )
    trainer.fit()
    trainer.close()
    return trainer, log


def full(tensor):
    """Return the complete tensor of a DTensor."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def compared(trainer, log):
    """Return the parts of a run's end: digests of the tensors of this process, and what was logged."""
    state = trainer.state
    saved = state.state_dict()
    saved.pop("callbacks")
    parts = {
        "model": state.get_model_state_dict(),
        "optimizers": state.get_optim_state_dict(),
        "state": saved,
        "logged": {
            name: [value for moment, value in entries if int(moment.batch) >= SAVED]
            for name, entries in log.data.items()
            if name.startswith(("loss/", "metrics/"))
        },
    }
    return {part: bits(tree_map(lambda one: getattr(one, "to_local", lambda: one)(), parts[part])) for part in parts}


def run_case(name, way, workers, folder):
    """Return the complete weights of a run, and what is different in one that was resumed."""
    path = folder / f"{name},{way},{workers}"
    first = train(name, way, workers, save_folder=str(path), save_interval=f"{SAVED}ba")
    weights = [full(parameter.detach()) for parameter in first[0].state.model.parameters()]
    if way == "alone":
        return weights, []
    # It saves as the first, because a save gives all processes the buffers of the first one, as of BatchNorm.
    options = {"load_path": f"{path}/ep1-ba{SAVED}", "save_folder": f"{path}/again", "save_interval": f"{SAVED}ba"}
    again = train(name, way, workers, **options)
    one, other = compared(*first), compared(*again)
    distributed.barrier()
    shutil.rmtree(path, ignore_errors=True)
    return weights, [part for part in one if one[part] != other[part]]


def run_group(rank, count, cases, folder):
    """Run the cases in one process of a group."""
    faulthandler.enable()
    if count > 1:
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(count), "LOCAL_RANK": str(rank)}
        os.environ |= {"LOCAL_WORLD_SIZE": str(count), "NODE_RANK": "0"}
        store = torch.distributed.FileStore(f"{folder}/store-{count}", count)
        torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=count)
    weights, found = {}, {}
    for case in cases:
        name, way, workers = case.split(",")
        print(case, file=sys.stderr, flush=True)  # the last one is the case of a process that dies
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            warnings.simplefilter("error", NoEffectWarning)
            warnings.filterwarnings("error", "train_dataloader has a length")
            try:
                weights[case], different = run_case(name, way, int(workers), folder)
            except Exception:  # noqa: BLE001  (reported by the test of this case)
                different = [traceback.format_exc()]
        found[case] = different
    (folder / f"{count}-{rank}.json").write_text(json.dumps(found))
    if rank == 0:
        torch.save(weights, folder / f"weights-{count}.pt")
    if count > 1:
        torch.distributed.destroy_process_group()


def main(folder, cases):
    cases = [*dict.fromkeys(f"{case.partition(',')[0]},alone,0" for case in cases), *cases]
    cases.sort(key=lambda case: WAYS[case.split(",")[1]][0])
    for count, group in itertools.groupby(cases, key=lambda case: WAYS[case.split(",")[1]][0]):
        start_processes(run_group, (count, [*group], folder), nprocs=count, start_method="fork")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
