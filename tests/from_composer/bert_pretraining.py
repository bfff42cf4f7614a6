"""Pre-train a small BERT on masked words, with a configuration and a schedule of the program's own."""

import dataclasses
import sys
from typing import Any

import torch
import transformers
from torch.utils.data import DataLoader, Dataset

from composer import Trainer
from composer.algorithms import Alibi, GatedLinearUnits, GradientClipping
from composer.callbacks import LRMonitor, MemoryMonitor, SpeedMonitor
from composer.core import Callback, Evaluator, State, Time, TimeUnit
from composer.core.types import Dataset as AnyDataset
from composer.loggers import InMemoryLogger
from composer.metrics.nlp import LanguageCrossEntropy, MaskedAccuracy
from composer.models.huggingface import HuggingFaceModel
from composer.optim import DecoupledAdamW
from composer.optim.scheduler import ComposerScheduler, LinearScheduler, _convert_time
from composer.utils import dist, ensure_tuple, reproducibility


@dataclasses.dataclass
class Config:
    """What ``main`` takes; arguments such as ``max_duration=8ba`` replace values."""

    tokenizer: str = "bert-base-uncased"
    max_duration: str = "16ba"
    warmup: str = "0.25dur"
    hold: str = "2ba"
    batch_size: int = 8
    length: int = 16
    masked: float = 0.3
    save_folder: str = "bert"
    algorithms: tuple[str, ...] = ("gradient_clipping",)


def read_config(arguments: list[str]) -> Config:
    given = dict(argument.split("=", 1) for argument in arguments)
    kinds = {field.name: field.type for field in dataclasses.fields(Config)}
    return Config(**{
        name: tuple(value.split(",")) if name == "algorithms" else kinds[name](value) for name, value in given.items()
    })  # fmt: skip


class WarmupHoldInverseSquare(ComposerScheduler):
    """Rise, hold, and then fall with the inverse square root of the time that has passed since."""

    def __init__(self, t_warmup: str | Time, t_hold: str | Time, alpha_f: float = 0.1):
        self.t_warmup, self.t_hold, self.alpha_f = t_warmup, t_hold, alpha_f
        self.rise = LinearScheduler(alpha_i=0.0, alpha_f=1.0, t_max=t_warmup)

    def __call__(self, state: State, ssr: float = 1.0) -> float:
        t_warmup = _convert_time(self.t_warmup, state, ssr=ssr)
        t_hold = _convert_time(self.t_hold, state, ssr=ssr)
        now = state.timestamp.get(t_warmup.unit)
        if now < t_warmup:
            return self.rise(state, ssr)
        if t_hold.unit == t_warmup.unit and now < t_warmup + t_hold:
            return 1.0
        passed = (now - t_warmup - t_hold).value + 1
        return max(self.alpha_f, passed**-0.5)


class Sentences(Dataset):
    """Words that follow from the word before."""

    def __init__(self, tokenizer: Any, number: int, length: int, seed: int):
        special = set(tokenizer.all_special_ids)
        words = torch.tensor([number for number in range(len(tokenizer)) if number not in special])
        starts = torch.randint(len(words), (number, 1), generator=torch.Generator().manual_seed(seed))
        self.ids = words[(starts + torch.arange(length - 2)) % len(words)]
        self.first, self.last = tokenizer.cls_token_id, tokenizer.sep_token_id

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, index):
        ids = [self.first, *self.ids[index].tolist(), self.last]
        return {"input_ids": ids, "attention_mask": [1] * len(ids)}


def build_loader(cfg: Config, tokenizer: Any, number: int, *, train: bool) -> DataLoader:
    dataset: AnyDataset = Sentences(tokenizer, number, cfg.length, seed=int(train))
    collator = transformers.DataCollatorForLanguageModeling(tokenizer=tokenizer, mlm=True, mlm_probability=cfg.masked)
    sampler = dist.get_sampler(dataset, shuffle=train, drop_last=train)
    return DataLoader(dataset, batch_size=cfg.batch_size, sampler=sampler, collate_fn=collator, drop_last=train)


def build_model(cfg: Config, tokenizer: Any) -> HuggingFaceModel:
    config = transformers.BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=cfg.length,
    )
    metrics = [LanguageCrossEntropy(ignore_index=-100), MaskedAccuracy(ignore_index=-100)]
    network = transformers.BertForMaskedLM(config)
    return HuggingFaceModel(model=network, tokenizer=tokenizer, use_logits=True, metrics=metrics)


def build_algorithm(name: str, cfg: Config):
    if name == "gradient_clipping":
        return GradientClipping(clipping_type="norm", clipping_threshold=1.0)
    if name == "alibi":
        return Alibi(max_sequence_length=cfg.length)
    if name == "gated_linear_units":
        return GatedLinearUnits()
    raise ValueError(f"Unknown algorithm: {name}")


def build_optimizer(model: torch.nn.Module) -> DecoupledAdamW:
    plain = [value for name, value in model.named_parameters() if name.endswith("bias") or "LayerNorm" in name]
    chosen = {id(value) for value in plain}
    decayed = [value for value in model.parameters() if id(value) not in chosen]
    groups = [{"params": decayed, "weight_decay": 1e-5}, {"params": plain, "weight_decay": 0.0}]
    return DecoupledAdamW(groups, lr=5e-3, betas=(0.9, 0.98), eps=1e-6)


class TokensSeen(Callback):
    """Count tokens, and log those that were masked."""

    def __init__(self):
        self.masked = 0

    def after_dataloader(self, state: State, logger) -> None:
        self.masked += int((state.batch["labels"] != -100).sum())

    def batch_end(self, state: State, logger) -> None:
        logger.log_metrics({"tokens/masked": self.masked, "tokens/all": state.timestamp.get(TimeUnit.TOKEN).value})

    def state_dict(self) -> dict[str, Any]:
        return {"masked": self.masked}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.masked = state["masked"]


def main(cfg: Config, return_trainer: bool = False) -> Trainer | None:
    reproducibility.seed_all(7)
    tokenizer = transformers.AutoTokenizer.from_pretrained(cfg.tokenizer)
    model = build_model(cfg, tokenizer)
    evaluator = Evaluator(
        label="eval",
        dataloader=build_loader(cfg, tokenizer, 32, train=False),
        metric_names=["LanguageCrossEntropy", "MaskedAccuracy"],
        device_eval_microbatch_size=4,
    )
    trainer = Trainer(
        run_name="bert",
        model=model,
        train_dataloader=build_loader(cfg, tokenizer, 64, train=True),
        eval_dataloader=evaluator,
        eval_interval=8,
        optimizers=build_optimizer(model),
        schedulers=WarmupHoldInverseSquare(cfg.warmup, cfg.hold),
        max_duration=cfg.max_duration,
        algorithms=[build_algorithm(name, cfg) for name in ensure_tuple(cfg.algorithms)],
        callbacks=[LRMonitor(), SpeedMonitor(window_size=4), TokensSeen()]
        + ([MemoryMonitor()] if torch.cuda.is_available() else []),
        loggers=[InMemoryLogger()],
        device="cpu",
        device_train_microbatch_size=cfg.batch_size // 2,
        save_folder=cfg.save_folder,
        save_interval="8ba",
        save_num_checkpoints_to_keep=1,
        save_overwrite=True,
        load_path=None,
        autoresume=False,
        python_log_level=None,
        progress_bar=False,
        log_to_console=False,
        seed=7,
    )
    trainer.fit()
    return trainer if return_trainer else None


if __name__ == "__main__":
    trainer = main(read_config(sys.argv[1:]), return_trainer=True)
