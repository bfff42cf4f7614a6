"""Pre-train a BERT: ``main(cfg)`` builds algorithms, callbacks, loggers, optimizers and schedules by their names."""

import copy
import sys
import warnings
from typing import Any

import torch
import transformers
from omegaconf import DictConfig
from omegaconf import OmegaConf as om
from torch.utils.data import DataLoader, Dataset

import composer
from composer import Evaluator, Trainer, algorithms
from composer.callbacks import (
    CheckpointSaver,
    EarlyStopper,
    Generate,
    LRMonitor,
    MemoryMonitor,
    NaNMonitor,
    OptimizerMonitor,
    RuntimeEstimator,
    SpeedMonitor,
    ThresholdStopper,
)
from composer.core import Callback, Event, Precision, State, Time, TimeUnit, get_precision_context
from composer.core.types import JSON
from composer.loggers import FileLogger, InMemoryLogger, Logger, LoggerDestination, TensorboardLogger, WandBLogger
from composer.metrics.nlp import LanguageCrossEntropy, LanguagePerplexity, MaskedAccuracy
from composer.models import HuggingFaceModel, write_huggingface_pretrained_from_composer_checkpoint
from composer.models.huggingface import maybe_get_underlying_model, peft_installed
from composer.optim import (
    ComposerScheduler,
    ConstantWithWarmupScheduler,
    CosineAnnealingWithWarmupScheduler,
    DecoupledAdamW,
    LinearWithWarmupScheduler,
)
from composer.utils import MissingConditionalImportError, VersionedDeprecationWarning, partial_format, retry
from composer.utils import dist, reproducibility
from composer.utils.checkpoint import safe_torch_load

CONFIG = """
seed: 3
run_name: ${oc.env:COMPOSER_RUN_NAME,bert}
global_train_batch_size: 16
device_train_microbatch_size: 4
device_eval_batch_size: 8
max_duration: 12ba
eval_interval: 4ba
eval_subset_num_batches: 2
precision: fp32
tokenizer: tokenizer
length: 16
optimizer: {name: decoupled_adamw, lr: 5.0e-3, betas: [0.9, 0.98], eps: 1.0e-6, weight_decay: 1.0e-5}
scheduler: {name: linear_decay_with_warmup, t_warmup: 0.25dur, alpha_f: 0.02}
algorithms:
  gradient_clipping: {clipping_type: norm, clipping_threshold: 1.0}
  low_precision_layernorm: {}
callbacks:
  speed_monitor: {window_size: 4}
  lr_monitor: {}
  nan_monitor: {}
  runtime_estimator: {time_unit: minutes}
  optimizer_monitor: {batch_log_interval: 4}
  threshold_stopper: {monitor: LanguageCrossEntropy, dataloader_label: mlm, threshold: 0.0, comp: less}
loggers:
  inmemory: {}
  file: {filename: "{run_name}/logs-rank{rank}.txt"}
save_interval: 4ba
save_num_checkpoints_to_keep: 1
save_folder: "{run_name}/ckpt"
save_filename: ba{batch}-rank{rank}.pt
load_path: null
autoresume: false
fsdp_config: null
"""


class Words(Dataset):
    def __init__(self, tokenizer, number: int, length: int, seed: int):
        words = torch.tensor([i for i in range(len(tokenizer)) if i not in set(tokenizer.all_special_ids)])
        starts = torch.randint(len(words), (number, 1), generator=torch.Generator().manual_seed(seed))
        self.rows = words[(starts + torch.arange(length - 2)) % len(words)]
        self.ends = tokenizer.cls_token_id, tokenizer.sep_token_id

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        ids = [self.ends[0], *self.rows[index].tolist(), self.ends[1]]
        return {"input_ids": ids, "attention_mask": [1] * len(ids)}


def build_algorithm(name: str, kwargs: dict[str, Any]):
    if name == "gradient_clipping":
        return algorithms.GradientClipping(**kwargs)
    if name == "alibi":
        return algorithms.Alibi(**kwargs)
    if name == "gated_linear_units":
        return algorithms.GatedLinearUnits(**kwargs)
    if name == "low_precision_layernorm":
        return algorithms.LowPrecisionLayerNorm(**kwargs)
    raise ValueError(f"Not sure how to build algorithm: {name}")


def build_callback(name: str, kwargs: dict[str, Any]) -> Callback:
    known = {
        "lr_monitor": LRMonitor,
        "memory_monitor": MemoryMonitor,
        "speed_monitor": SpeedMonitor,
        "nan_monitor": NaNMonitor,
        "runtime_estimator": RuntimeEstimator,
        "optimizer_monitor": OptimizerMonitor,
        "early_stopper": EarlyStopper,
        "threshold_stopper": ThresholdStopper,
        "checkpoint_saver": CheckpointSaver,
        "generate": Generate,
    }
    if name == "threshold_stopper" and kwargs.get("comp") == "less":
        kwargs["comp"] = torch.less
    return known[name](**kwargs)


def build_logger(name: str, kwargs: dict[str, Any]) -> LoggerDestination:
    known = {"wandb": WandBLogger, "tensorboard": TensorboardLogger, "inmemory": InMemoryLogger, "file": FileLogger}
    return known[name](**kwargs)


def build_scheduler(cfg: DictConfig) -> ComposerScheduler:
    if cfg.name == "constant_with_warmup":
        return ConstantWithWarmupScheduler(t_warmup=cfg.t_warmup)
    if cfg.name == "cosine_with_warmup":
        return CosineAnnealingWithWarmupScheduler(t_warmup=cfg.t_warmup, alpha_f=cfg.alpha_f)
    if cfg.name == "linear_decay_with_warmup":
        return LinearWithWarmupScheduler(t_warmup=cfg.t_warmup, alpha_f=cfg.alpha_f)
    raise ValueError(cfg.name)


def build_optimizer(cfg: DictConfig, model: torch.nn.Module) -> torch.optim.Optimizer:
    if cfg.name != "decoupled_adamw":
        raise ValueError(cfg.name)
    return DecoupledAdamW(model.parameters(), lr=cfg.lr, betas=cfg.betas, eps=cfg.eps, weight_decay=cfg.weight_decay)


def build_model(tokenizer, length: int) -> HuggingFaceModel:
    config = transformers.BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=length,
    )
    network = transformers.BertForMaskedLM(config)
    assert maybe_get_underlying_model(network) is network
    metrics = [LanguageCrossEntropy(), LanguagePerplexity(), MaskedAccuracy()]
    return HuggingFaceModel(
        model=network,
        tokenizer=tokenizer,
        use_logits=True,
        metrics=metrics,
        eval_metrics=copy.deepcopy(metrics[:1] + metrics[2:]),
        allow_embedding_resizing=True,
    )


def build_loader(cfg: DictConfig, tokenizer, *, train: bool, batch_size: int) -> DataLoader:
    data = Words(tokenizer, 64 if train else 32, cfg.length, seed=cfg.seed + train)
    collate = transformers.DataCollatorForLanguageModeling(tokenizer, mlm=True, mlm_probability=0.3)
    sampler = dist.get_sampler(data, shuffle=train, drop_last=train)
    return DataLoader(data, batch_size=batch_size, sampler=sampler, drop_last=train, collate_fn=collate, num_workers=0)


class MaskedTokens(Callback):
    """Count masked tokens on the way, and save the count."""

    def __init__(self):
        self.masked = 0
        self.events: list[str] = []

    def run_event(self, event: Event, state: State, logger: Logger):
        if event in (Event.FIT_START, Event.EVAL_START, Event.BATCH_CHECKPOINT, Event.FIT_END):
            self.events.append(event.value)
        return super().run_event(event, state, logger)

    def before_forward(self, state: State, logger: Logger) -> None:
        self.masked += int((state.batch_get_item("labels") != -100).sum())
        with get_precision_context(state.precision):
            assert state.batch_get_item("input_ids").shape[0] == 4

    def batch_end(self, state: State, logger: Logger) -> None:
        tokens = dist.all_gather_object(self.masked)
        total = torch.tensor([sum(tokens)])
        dist.all_reduce(total, reduce_operation="SUM")
        logger.log_metrics({"tokens/masked": total.item(), "loss/mean": state.total_loss_dict["loss/train/total"]})

    def epoch_end(self, state: State, logger: Logger) -> None:
        values = {name: metric.compute() for name, metric in state.train_metrics.items()}
        logger.log_metrics({f"epoch/{name}": value.item() for name, value in values.items()})

    def state_dict(self) -> dict[str, JSON]:
        return {"masked": self.masked}

    def load_state_dict(self, state: dict[str, JSON]) -> None:
        self.masked = state["masked"]


@retry(OSError, num_attempts=2, initial_backoff=0.0, max_jitter=0.0)
def load_tokenizer(path: str):
    try:
        return transformers.AutoTokenizer.from_pretrained(path)
    except ImportError as error:
        raise MissingConditionalImportError(extra_deps_group="nlp", conda_package="transformers") from error


def main(cfg: DictConfig, return_trainer: bool = False, do_train: bool = True) -> Trainer | None:
    warnings.filterwarnings("ignore", category=VersionedDeprecationWarning)
    reproducibility.seed_all(cfg.seed)
    size = dist.get_world_size()
    tokenizer = load_tokenizer(cfg.tokenizer)
    model = build_model(tokenizer, cfg.length)
    parameters = sum(p.numel() for p in model.parameters())
    train_loader = build_loader(cfg, tokenizer, train=True, batch_size=cfg.global_train_batch_size // size)
    eval_loader = build_loader(cfg, tokenizer, train=False, batch_size=cfg.device_eval_batch_size)
    evaluators = [
        Evaluator(
            label=label,
            dataloader=eval_loader,
            metric_names=list(model.get_metrics(is_train=False)),
            subset_num_batches=cfg.eval_subset_num_batches,
            device_eval_microbatch_size=4,
        )
        for label in ("mlm", "again")
    ]
    counter = MaskedTokens()
    trainer = Trainer(
        run_name=cfg.run_name,
        seed=cfg.seed,
        model=model,
        algorithms=[build_algorithm(name, kwargs) for name, kwargs in cfg.get("algorithms", {}).items()],
        train_dataloader=train_loader,
        eval_dataloader=evaluators,
        optimizers=build_optimizer(cfg.optimizer, model),
        schedulers=build_scheduler(cfg.scheduler),
        max_duration=cfg.max_duration,
        eval_interval=cfg.eval_interval,
        progress_bar=cfg.get("progress_bar", False),
        log_to_console=cfg.get("log_to_console", False),
        console_log_interval=cfg.get("console_log_interval", "1ba"),
        loggers=[build_logger(name, kwargs) for name, kwargs in cfg.get("loggers", {}).items()],
        callbacks=[build_callback(name, dict(kwargs)) for name, kwargs in cfg.get("callbacks", {}).items()] + [counter],
        precision=Precision(cfg.precision),
        device=cfg.get("device", "cpu"),
        device_train_microbatch_size=cfg.get("device_train_microbatch_size", "auto"),
        save_folder=cfg.get("save_folder"),
        save_filename=cfg.save_filename,
        save_latest_filename="latest-rank{rank}.pt",
        save_interval=cfg.get("save_interval", "1000ba"),
        save_num_checkpoints_to_keep=cfg.get("save_num_checkpoints_to_keep", -1),
        save_overwrite=cfg.get("save_overwrite", False),
        save_ignore_keys=["state/callbacks/SpeedMonitor"],
        load_path=cfg.get("load_path"),
        load_weights_only=cfg.get("load_weights_only", False),
        load_ignore_keys=cfg.get("load_ignore_keys"),
        load_strict_model_weights=cfg.get("load_strict_model_weights", True),
        parallelism_config={"fsdp": om.to_container(cfg.fsdp_config)} if cfg.fsdp_config else None,
        python_log_level=cfg.get("python_log_level"),
        autoresume=cfg.autoresume,
        dist_timeout=cfg.get("dist_timeout", 600.0),
    )
    trainer.logger.log_hyperparameters({"parameters": parameters, "version": composer.__version__})
    if do_train:
        trainer.fit()
    if return_trainer:
        return trainer
    return None


if __name__ == "__main__":
    assert isinstance(peft_installed, bool)
    cfg = om.merge(om.create(CONFIG), om.from_cli(sys.argv[1:]))
    first = main(cfg, return_trainer=True)
    assert first is not None
    first.close()
    folder = partial_format(cfg.save_folder, run_name=cfg.run_name)
    path = f"{folder}/ba12-rank0.pt"
    content = safe_torch_load(path)
    assert content["state"]["timestamp"]["Timestamp"]["batch"] == 12
    write_huggingface_pretrained_from_composer_checkpoint(path, "pretrained")
    longer = om.merge(
        cfg,
        {"max_duration": "20ba", "load_path": path, "run_name": "longer", "load_ignore_keys": ["state/callbacks/NaN*"]},
    )
    second = main(longer, return_trainer=True)
    assert second is not None
    assert Time(second.state.timestamp.batch.value, TimeUnit.BATCH) == Time.from_timestring("20ba")
