"""Train a denoiser of discrete sequences from a configuration, with an algorithm, callback and saver of its own."""

import argparse
import enum
import logging
from pathlib import Path

import torch
import torch.nn.functional as F
from omegaconf import OmegaConf
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric

from composer import Algorithm, Callback, ComposerModel, Event, Logger, State, Time, Trainer
from composer.core import Precision
from composer.utils import PartialFilePath, checkpoint, create_interval_scheduler, create_symlink_file, dist
from composer.utils import ensure_folder_has_no_conflicting_files, format_name_with_dist, get_device
from composer.utils import reproducibility
from composer.utils.import_helpers import import_object

log = logging.getLogger(__name__)

parser = argparse.ArgumentParser()
parser.add_argument("--config", type=Path)
parser.add_argument("overrides", nargs="*")


class Phase(enum.Enum):
    NOISY = "noisy"
    CLEAN = "clean"


class Denoiser(ComposerModel):
    """Predicts the tokens that were masked."""

    def __init__(self, vocab_size: int, width: int, layers: int):
        super().__init__()
        self.mask = vocab_size
        self.embed = nn.Embedding(vocab_size + 1, width)
        layer = nn.TransformerEncoderLayer(width, 2, 2 * width, dropout=0.0, batch_first=True)
        self.blocks = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, vocab_size)
        self.perplexity = MeanMetric()

    def forward(self, batch):
        return self.head(self.blocks(self.embed(batch["noisy"])))

    def loss(self, outputs, batch):
        hidden = batch["noisy"] == self.mask
        losses = F.cross_entropy(outputs.transpose(1, 2), batch["tokens"], reduction="none")
        return (losses * hidden).sum() / hidden.sum().clamp(min=1)

    def get_metrics(self, is_train=False):
        return {} if is_train else {"MaskedLoss": self.perplexity}

    def update_metric(self, batch, outputs, metric):
        metric.update(self.loss(outputs, batch))


class MaskTokens(Algorithm):
    """Mask a part of the tokens, less and less of them until a time."""

    def __init__(self, first: float, last: float, until: str):
        self.first, self.last, self.until = first, last, Time.from_timestring(until)

    def match(self, event: Event, state: State) -> bool:
        return event in (Event.AFTER_DATALOADER, Event.EVAL_BATCH_START)

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        done = min(float(state.timestamp.get(self.until.unit) / self.until), 1.0)
        rate = self.first + (self.last - self.first) * done
        (tokens,) = state.batch
        noisy = torch.where(torch.rand(tokens.shape, device=tokens.device) < rate, state.model.mask, tokens)
        state.batch = state.device.batch_to_device({"tokens": tokens, "noisy": noisy})
        if event == Event.AFTER_DATALOADER:
            logger.log_metrics({"mask/rate": rate})


class PhaseMonitor(Callback):
    """Remembers whether tokens are still masked as at the start."""

    def __init__(self, boundary: Time):
        self.boundary, self.phase = boundary, Phase.NOISY

    def batch_end(self, state: State, logger: Logger) -> None:
        if state.timestamp.get(self.boundary.unit) >= self.boundary:
            self.phase = Phase.CLEAN

    def state_dict(self):
        return {"phase": self.phase}

    def load_state_dict(self, state):
        self.phase = state["phase"]


class OwnSaver(Callback):
    """Saves the run with a name of its own, and writes the name of the latest checkpoint to a file."""

    def __init__(self, folder: str, filename: str, interval: str):
        self.folder, self.path = folder, PartialFilePath(filename, folder)
        self.is_due = create_interval_scheduler(interval)
        self.saved: list[str] = []

    def fit_start(self, state: State, logger: Logger) -> None:
        folder = format_name_with_dist(self.folder, state.run_name)
        Path(folder).mkdir(parents=True, exist_ok=True)
        ensure_folder_has_no_conflicting_files(folder, self.path.filename, state.timestamp)

    def batch_checkpoint(self, state: State, logger: Logger) -> None:
        if self.is_due(state, Event.BATCH_CHECKPOINT):
            saved = checkpoint.save_checkpoint(state, self.path.format(state))
            if saved and dist.get_global_rank() == 0:
                newest = Path(saved).with_name("newest.symlink")
                newest.unlink(missing_ok=True)
                create_symlink_file(saved, newest)
                self.saved.append(saved)


def instantiate(config, **arguments):
    module, _, name = config["_target_"].rpartition(".")
    settings = {key: value for key, value in config.items() if key != "_target_"}
    return import_object(f"{module}:{name}")(**settings, **arguments)


OWN = {"mask_tokens": MaskTokens, "saver": OwnSaver}


def main(config):
    reproducibility.seed_all(config.seed)
    dist.initialize_dist(get_device(None), timeout=config.get("dist_timeout", 60.0))
    tokens = torch.randint(4, (config.samples, 1)).expand(-1, 12) * 2 + torch.arange(12) % 2
    loader = DataLoader(TensorDataset(tokens), batch_size=config.batch_size, shuffle=True, drop_last=True)
    model = Denoiser(**config.model)
    parts = OmegaConf.create({"algorithms": [], "callbacks": []}, flags={"allow_objects": True})
    parts.boundary = Time.from_timestring(config.boundary)
    parts.callbacks.append(PhaseMonitor(parts.boundary))
    for group in ("algorithms", "callbacks"):
        for name, settings in config[group].items():
            parts[group].append(OWN[name](**settings) if name in OWN else instantiate(settings))
    optimizer = instantiate(config.optimizer, params=model.parameters())
    trainer = Trainer(
        model=model,
        train_dataloader=loader,
        eval_dataloader=loader,
        optimizers=optimizer,
        schedulers=instantiate(config.scheduler),
        algorithms=parts.algorithms,
        callbacks=parts.callbacks,
        loggers=[instantiate(one) for one in config.loggers.values()],
        precision=Precision(config.precision),
        progress_bar=False,
        **config.trainer,
    )
    log.info("settings: %s", sorted(getattr(trainer, "local_hparams", {})))
    trainer.fit()
    return trainer


if __name__ == "__main__":
    args = parser.parse_args()
    trainer = main(OmegaConf.merge(OmegaConf.load(args.config), OmegaConf.from_dotlist(args.overrides)))
