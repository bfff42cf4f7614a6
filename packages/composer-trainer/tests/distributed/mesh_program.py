"""Train in processes that form a mesh; each writes its results to ``<folder>/<mesh>-<rank>.json``.

torchrun ... mesh_program.py MESH FOLDER
"""

import json
import sys
import warnings
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

from composer import Callback, Trainer, distributed
from composer.algorithms import EMA, GradientClipping, MixUp
from composer.core import State
from composer.loggers import InMemoryLogger
from composer.models import ComposerClassifier

PLAN = {
    "module.blocks.*.query": "colwise",
    "module.blocks.*.out": "rowwise",
    "module.blocks.*.up": "colwise",
    "module.blocks.*.down": "rowwise",
}
MESHES = {
    "alone": None,
    "tp": {"mesh": {"tp": 2}, "tp": {"plan": PLAN}},
    "replicate": {"mesh": {"replicate": 2}},
    "shard x tp": {"mesh": {"shard": 2, "tp": 2}, "tp": {"plan": PLAN}, "fsdp": {"auto_wrap": "Block"}},
    "replicate x tp": {"mesh": {"replicate": 2, "tp": 2}, "tp": {"plan": PLAN}},
    "replicate x shard": {"mesh": {"replicate": 2, "shard": 2}},
}
COMPILED = ("tp", "shard x tp")
SAMPLES, GLOBAL_BATCH = 22, 8  # the last of three global batches has 6 samples


class Block(nn.Module):
    """A gated layer and an MLP, with residuals; no draws."""

    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.query, self.out = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, inputs):
        inputs = inputs + self.out(torch.sigmoid(self.query(self.norm(inputs))))
        return inputs + self.down(torch.tanh(self.up(inputs)))


class Network(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(2))
        self.head = nn.Linear(width, 4)

    def forward(self, inputs):
        for block in self.blocks:
            inputs = block(inputs)
        return self.head(inputs)


class Outer(nn.Module):
    """Its reset_parameters() also sets and scales tensors of its parts."""

    def __init__(self):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.empty(6, 4)), nn.Parameter(torch.empty(3))
        self.register_buffer("mask", torch.empty(3, dtype=torch.bool))  # False may also be what was not set
        self.scaled, self.norm = nn.Linear(4, 4), nn.LayerNorm(4)
        self.embedding, self.head = nn.Embedding(8, 4), nn.Linear(4, 8)
        self.head.weight = self.embedding.weight
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def reset_parameters(self):
        nn.init.trunc_normal_(self.weight)
        nn.init.zeros_(self.bias)
        self.mask.zero_()
        self.norm.weight.mul_(3)
        for weight in self.scaled.parameters():
            weight.mul_(0.5)
        nn.init.constant_(self.up.bias, 2.0)
        nn.init.constant_(self.down.bias, 2.0)


class Recorder(Callback):
    """Records the samples of each batch, and a random draw."""

    def __init__(self):
        self.seen = []

    def batch_start(self, state, logger):
        drawn = torch.rand(1, generator=state.generator("test")).item(), torch.rand(1).item()
        self.seen.append([state.batch[0][:, 0].tolist(), *drawn])


def make_trainer(config, algorithms=(), duration="2ep", on="cpu", **options):
    torch.manual_seed(5)
    with torch.device(on):
        network = Network().double()
    model = ComposerClassifier(network, num_classes=4, train_metrics=MulticlassAccuracy(4, average="micro"))
    inputs = torch.randn(SAMPLES, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    data = TensorDataset(inputs, inputs.argmax(dim=1))
    mesh = (config or {}).get("mesh", {})
    of_process = GLOBAL_BATCH // (mesh.get("replicate", 1) * mesh.get("shard", 1))
    return Trainer(
        model=model,
        train_dataloader=DataLoader(data, of_process, sampler=distributed.get_sampler(data, shuffle=True)),
        eval_dataloader=DataLoader(data, of_process, sampler=distributed.get_sampler(data)),
        optimizers=torch.optim.AdamW(model.parameters(), lr=0.01),
        max_duration=duration,
        algorithms=[GradientClipping("norm", 0.2), EMA("2ba"), *algorithms],
        callbacks=Recorder(),
        loggers=InMemoryLogger(),
        parallelism_config=config,
        run_name="run",
        seed=17,
        dist_timeout=120,
        device="cpu",
        progress_bar=False,
        **options,
    )


def result_of(trainer):
    """Train, and return weights, clock, metrics, data and draws."""
    trainer.fit()
    state = trainer.state
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch mentions two collectives for one tensor
        weights = [getattr(one, "full_tensor", lambda one=one: one)() for one in state.model.parameters()]
    [recorder] = [one for one in state.callbacks if isinstance(one, Recorder)]
    logged = trainer.logger.destinations[0].data
    result = {
        "weights": [number for weight in weights for number in weight.flatten().tolist()],
        "clock": [int(state.timestamp.batch), int(state.timestamp.sample)],
        "losses": [float(value) for _, value in logged["loss/train/total"]],
        "metrics": [float(value) for _, value in logged["metrics/train/MulticlassAccuracy"]],
        "eval": {name: float(value) for name, value in state.eval_metric_values["eval"].items()},
        "seen": recorder.seen,
        "compiled": [name for name, one in state.model.named_modules() if one._compiled_call_impl is not None],
        "local": sum(getattr(one, "to_local", lambda one=one: one)().numel() for one in state.model.parameters()),
    }
    trainer.close()
    return result


def initial_weights(config):
    """Build a model on the meta device, and return the weights that it gets."""
    with torch.device("meta"):
        model = nn.Sequential(Outer(), Outer())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    distributed.Parallelism(config).prepare(State(model, optimizers=optimizer, rank_zero_seed=3))
    assert {*optimizer.param_groups[0]["params"]} == {*model.parameters()}
    return {
        name: getattr(one, "full_tensor", lambda one=one: one)().tolist() for name, one in model.state_dict().items()
    }


def main(name, folder):
    distributed.initialize_dist("cpu", timeout=120)
    config = MESHES[name]
    results = {"train": result_of(make_trainer(config))}
    if name in COMPILED:
        results["compiled"] = result_of(make_trainer(config, compile_config={"backend": "aot_eager"}))
    if config is None or name in COMPILED:
        saved = str(folder / "saved" / name)
        saving = {"save_folder": saved, "save_interval": "2ba"}
        results["draws"] = result_of(make_trainer(config, [MixUp(0.4)], **saving))
        results["resumed"] = result_of(make_trainer(config, [MixUp(0.4)], load_path=f"{saved}/ep0-ba2"))
        if config is not None:
            resumed = make_trainer(config, [MixUp(0.4)], on="meta", load_path=f"{saved}/ep0-ba2")
            results["resumed on meta"] = result_of(resumed)
            plan = {"*.up": "colwise", "*.down": "rowwise"}
            results["initial"] = initial_weights({"mesh": config["mesh"], "tp": {"plan": plan}})
    results["initial, fsdp"] = initial_weights({"fsdp": {}})
    (folder / f"{name}-{distributed.get_global_rank()}.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
