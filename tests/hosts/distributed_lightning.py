"""Trains with Lightning in each process that torchrun starts, and writes the weights into a folder: its argument."""

import logging
import os
import sys
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import lightning
from comparison import SEED, weights_of
from small_training import make_loader, make_net, sgd, write_and_exit
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from composer.algorithms import EMA, SAM, GradientClipping
from composer.integrations.lightning import ComposerCallback


class Module(lightning.LightningModule):
    """A module that computes forward pass and loss in one function."""

    def __init__(self):
        super().__init__()
        self.network = make_net()

    def training_step(self, batch, batch_idx):
        images, labels = batch
        return cross_entropy(self.network(images), labels)

    def configure_optimizers(self):
        return sgd(self)


def train(loader, **options):
    """Train for two epochs, and return the weights and averages by name, and the clock."""
    module, callback = Module(), ComposerCallback([SAM(), GradientClipping("norm", 0.5), EMA("2ba")], seed=SEED)
    trainer = lightning.Trainer(
        callbacks=[callback],
        max_epochs=2,
        accelerator="cpu",
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )
    trainer.fit(module, loader)
    state = callback.adapter.state
    weights = {name: weight.flatten().tolist() for name, weight in weights_of(state, module).items()}
    return {"weights": weights, "clock": [str(state.timestamp.batch), str(state.timestamp.sample)]}


def main(folder):
    """Train with every second batch of the loader."""
    rank = int(os.environ["RANK"])
    result = train(DataLoader(list(make_loader())[rank::2], batch_size=None), devices=2, strategy="ddp")
    write_and_exit(folder, rank, result)


if __name__ == "__main__":
    warnings.simplefilter("ignore")  # Lightning's hints about loaders
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    main(sys.argv[1])
