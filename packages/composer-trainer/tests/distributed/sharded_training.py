"""One of two processes that train a sharded model, save it in every way and resume; prints what came out as JSON."""

import json
import sys
from pathlib import Path

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from composer import Trainer, distributed
from composer.algorithms import EMA, SAM, MixUp
from composer.callbacks import CheckpointSaver
from composer.checkpoint import find_checkpoints, load_checkpoint, save_checkpoint
from composer.core import State
from composer.models import ComposerClassifier


def make_trainer(**options):
    """Return a trainer of a sharded network with dropout, of a few samples for each process."""
    torch.manual_seed(5)
    network = nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.3), nn.ReLU(), nn.Linear(6, 3))
    model = ComposerClassifier(network, num_classes=3, train_metrics=[])
    inputs = torch.randn(24, 4, generator=torch.Generator().manual_seed(1))
    data = TensorDataset(inputs, inputs[:, :3].argmax(dim=1))
    return Trainer(
        model=model,
        train_dataloader=DataLoader(data, batch_size=3, sampler=distributed.get_sampler(data, shuffle=True)),
        eval_dataloader=DataLoader(data, batch_size=4, sampler=distributed.get_sampler(data)),
        optimizers=torch.optim.AdamW(model.parameters(), lr=0.01),
        max_duration="3ep",
        algorithms=[MixUp(0.3), EMA("2ba"), SAM()],
        parallelism_config={"fsdp": {"reshard_after_forward": False}},
        run_name="run",
        device="cpu",
        seed=17,
        progress_bar=False,
        **options,
    )


def tensors(state):
    """Return the complete weights, averages and state of the optimizer of a run."""
    [inner] = state.get_optim_state_dict().values()
    [ema] = [record["state"] for record in state.state_dict()["algorithms"] if record["name"] == "EMA"]
    found = {
        **state.get_model_state_dict(),
        **{f"average of {name}": one for name, one in ema["averaged_weights"].items()},
    }
    for name, held in inner["state"].items():
        found |= {f"{name}.{field}": value for field, value in held.items()}
    return {name: getattr(one, "full_tensor", lambda one=one: one)().tolist() for name, one in found.items()}


def error_of(call, *arguments, **options):
    """Return the error of a call as a string."""
    try:
        call(*arguments, **options)
    except Exception as error:  # noqa: BLE001  (whatever it is, it is printed)
        return f"{type(error).__name__}: {error}"
    return "nothing"


def main(folder):
    found = {}
    saver = CheckpointSaver(f"{folder}/callback", save_interval="3ba", num_checkpoints_to_keep=2)
    trainer = make_trainer(save_folder=f"{folder}/run", save_interval="3ba", callbacks=[saver])
    trainer.fit()
    uninterrupted = tensors(trainer.state)
    found["saved"] = [Path(path).name for path in trainer.saved_checkpoints]
    trainer.eval()  # after which the complete weights may be in the model
    weights = trainer.save_checkpoint(f"{folder}/weights", weights_only=True)
    trainer.close()
    distributed.barrier()

    for place in ("ep0-ba3", "ep1-ba6"):  # in the middle of an epoch
        resumed = make_trainer(load_path=f"{folder}/run/{place}")
        resumed.fit()
        now = tensors(resumed.state)
        found[place] = [name for name in uninterrupted if now[name] != uninterrupted[name]]
        resumed.close()
    again = make_trainer(save_folder=f"{folder}/run", autoresume=True)
    found["autoresume"] = int(again.state.timestamp.batch)
    again.close()

    alone = State(ComposerClassifier(nn.Sequential(*[nn.Linear(4, 6), nn.Dropout(), nn.ReLU(), nn.Linear(6, 3)])))
    load_checkpoint(weights, alone, weights_only=True)
    averages = {name.removeprefix("average of "): one for name, one in uninterrupted.items() if "average" in name}
    found["weights"] = [name for name, one in averages.items() if alone.model.state_dict()[name].tolist() != one]
    wrapped = State(nn.Sequential(FullyShardedDataParallel(nn.Linear(4, 3), device_id=torch.device("cpu"))))
    found["wrapper of FSDP 1"] = error_of(save_checkpoint, wrapped, f"{folder}/wrapped")
    distributed.barrier()
    found["left"] = [one.name for one in find_checkpoints(f"{folder}/callback")]
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
