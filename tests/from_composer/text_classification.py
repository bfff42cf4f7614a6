"""Fine-tune a model of Transformers for classification, and write it for other programs."""

import argparse
from pathlib import Path

import torch
import transformers
from torch.utils.data import DataLoader, Dataset
from torchmetrics.classification import MulticlassAccuracy

from composer import Trainer
from composer.algorithms import GatedLinearUnits, GradientClipping, LowPrecisionLayerNorm, SeqLengthWarmup
from composer.algorithms.warnings import NoEffectWarning
from composer.callbacks import NaNMonitor, OptimizerMonitor, RuntimeEstimator
from composer.callbacks.utils import create_interval_scheduler
from composer.core.types import JSON, Batch
from composer.loggers import FileLogger
from composer.metrics.nlp import LanguageCrossEntropy
from composer.models import HuggingFaceModel, write_huggingface_pretrained_from_composer_checkpoint
from composer.optim import DecoupledAdamW, LinearWithWarmupScheduler
from composer.utils import dist, get_device
from composer.utils.misc import model_eval_mode
from composer.utils.reproducibility import seed_all
from composer.utils.string_enum import StringEnum

parser = argparse.ArgumentParser()
parser.add_argument("--model", default="bert-base-uncased")
parser.add_argument("--texts", help="A file of lines with a label, a tab and the text.")
parser.add_argument("--folder", type=Path, default=Path("finetuned"))
parser.add_argument("--max_length", type=int, default=32)
parser.add_argument("--epochs", type=int, default=1)


class Split(StringEnum):
    TRAIN = "train"
    EVAL = "eval"


class Texts(Dataset):
    def __init__(self, path, split, tokenizer, max_length):
        lines = Path(path).read_text().splitlines()
        edge = len(lines) * 3 // 4
        self.lines = lines[:edge] if split == Split.TRAIN else lines[edge:]
        self.tokenizer, self.max_length = tokenizer, max_length

    def __len__(self):
        return len(self.lines)

    def __getitem__(self, index) -> dict[str, JSON]:
        label, text = self.lines[index].split("\t")
        tokens = self.tokenizer(text, truncation=True, max_length=self.max_length, padding="max_length")
        return {**tokens, "labels": int(label)}


def loader(path, split, tokenizer, args):
    dataset = Texts(path, split, tokenizer, args.max_length)
    sampler = dist.get_sampler(dataset, shuffle=split == Split.TRAIN)
    return DataLoader(dataset, batch_size=8, sampler=sampler, collate_fn=transformers.default_data_collator)


def describe(batch: Batch) -> str:
    return ", ".join(f"{key}: {tuple(value.shape)}" for key, value in batch.items())


def main(args):
    seed_all(1)
    dist.initialize_dist(get_device(None), timeout=300.0)
    with dist.run_local_rank_zero_first():
        tokenizer = transformers.AutoTokenizer.from_pretrained(args.model)
        network = transformers.AutoModelForSequenceClassification.from_pretrained(args.model, num_labels=2)

    model = HuggingFaceModel(
        model=network,
        tokenizer=tokenizer,
        use_logits=True,
        metrics=[MulticlassAccuracy(num_classes=2, average="micro")],
        eval_metrics=[MulticlassAccuracy(num_classes=2, average="micro")],
    )
    train, evaluation = (loader(args.texts, split, tokenizer, args) for split in Split)
    print(describe(next(iter(train))), LanguageCrossEntropy().ignore_index, NoEffectWarning.__name__)

    optimizer = DecoupledAdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.98), eps=1e-6, weight_decay=3e-6)
    trainer = Trainer(
        model=model,
        train_dataloader=train,
        eval_dataloader=evaluation,
        max_duration=f"{args.epochs}ep",
        optimizers=optimizer,
        schedulers=LinearWithWarmupScheduler(t_warmup="0.1dur", alpha_f=0.02),
        step_schedulers_every_batch=True,
        algorithms=[
            GradientClipping(clipping_type="norm", clipping_threshold=1.0),
            SeqLengthWarmup(duration=0.5, min_seq_length=8, max_seq_length=args.max_length),
        ],
        callbacks=[OptimizerMonitor(batch_log_interval=1), RuntimeEstimator(), NaNMonitor()],
        loggers=FileLogger(filename=str(args.folder / "logs-rank{rank}.txt"), overwrite=True),
        run_name="finetuning",
        save_folder=str(args.folder / "{run_name}"),
        save_interval=create_interval_scheduler("1ep"),
        save_overwrite=True,
        device_train_microbatch_size=4,
        device="cpu",
        progress_bar=False,
        seed=1,
    )
    trainer.fit()
    metrics = trainer.eval(evaluation)
    print("evaluated:", metrics, trainer.state.eval_metric_values)

    with model_eval_mode(trainer.state.model), torch.no_grad():
        logits = trainer.state.model(next(iter(evaluation))).logits
    write_huggingface_pretrained_from_composer_checkpoint(
        str(args.folder / "finetuning" / "latest"), str(args.folder / "pretrained")
    )
    return trainer, logits


UNUSED = (GatedLinearUnits, LowPrecisionLayerNorm)

if __name__ == "__main__":
    trainer, logits = main(parser.parse_args())
