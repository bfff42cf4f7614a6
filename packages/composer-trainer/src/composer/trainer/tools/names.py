"""Suggestions for arguments that have another name in other trainers."""

from __future__ import annotations

import difflib
import functools
import inspect
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

__all__ = ["suggests_names"]

P = ParamSpec("P")
R = TypeVar("R")

_THEIRS = {
    # How long
    "max_duration='10ep' of the Trainer, or fit(duration='10ep')": (
        "max_epochs max_epoch num_train_epochs num_epochs n_epochs epochs"
    ),
    "max_duration='1000ba' of the Trainer, or fit(duration='1000ba')": (
        "max_steps max_iters num_steps num_training_steps train_steps"
    ),
    "max_duration='3600sec'": "max_time",
    # Data
    "train_dataloader": "train_dataloaders train_loader trainloader dataloader",
    "eval_dataloader": (
        "val_dataloader val_dataloaders valid_dataloader val_loader valid_loader test_dataloader eval_loader "
        "validation_data"
    ),
    "DataLoaders as train_dataloader and eval_dataloader": "train_dataset eval_dataset data_collator datamodule",
    "the DataLoader that is given as train_dataloader": (
        "batch_size train_batch_size per_device_train_batch_size dataloader_num_workers"
    ),
    "the DataLoader that is given as eval_dataloader": "eval_batch_size per_device_eval_batch_size",
    "train_subset_num_batches": "limit_train_batches overfit_batches",
    "eval_subset_num_batches": "limit_val_batches",
    # Optimization
    "device_train_microbatch_size, the samples of a part of the batch, or 'auto'": (
        "grad_accum accumulate_grad_batches gradient_accumulation_steps microbatch_size"
    ),
    "optimizers": "optimizer optim",
    "optimizers, such as torch.optim.AdamW(model.parameters(), lr=0.001)": "learning_rate lr weight_decay",
    "schedulers": "scheduler lr_scheduler",
    "schedulers, such as CosineAnnealingWithWarmupScheduler('0.1dur')": "lr_scheduler_type warmup_steps warmup_ratio",
    "algorithms=GradientClipping(clipping_type='norm', clipping_threshold=1.0)": (
        "gradient_clip_val gradient_clip_algorithm max_grad_norm grad_clip_norm"
    ),
    "algorithms=LabelSmoothing(0.1)": "label_smoothing_factor",
    "the model's method loss(outputs, batch)": "loss_fn criterion loss",
    "the model's method get_metrics(is_train)": "metrics compute_metrics",
    # Evaluation and logging
    "eval_interval, such as '1ep'": (
        "check_val_every_n_epoch val_check_interval eval_steps eval_strategy evaluation_strategy "
        "validate_every_n_batches validate_every_n_epochs"
    ),
    "loggers": "logger log_with report_to",
    "console_log_interval, such as '10ba'": "log_every_n_steps logging_steps log_interval",
    "progress_bar": "enable_progress_bar",
    # Checkpoints
    "save_folder": "output_dir default_root_dir project_dir enable_checkpointing",
    "save_interval, such as '1ep'": "save_steps save_strategy",
    "save_num_checkpoints_to_keep": "save_total_limit",
    "save_overwrite": "overwrite_output_dir",
    "load_path of the Trainer, or autoresume=True with run_name and save_folder": "ckpt_path resume_from_checkpoint",
    "load_path with a URL, such as 's3://bucket/run/latest'": "load_object_store load_logger_destination",
    # Machines and number formats
    "device, which is 'cpu', 'gpu' or 'mps'": "accelerator cpu no_cuda",
    "torchrun --nproc_per_node, which starts the processes": "devices num_nodes gpus n_gpus",
    "parallelism_config={'fsdp': {...}} or {'ddp': {...}}": (
        "strategy fsdp fsdp_config deepspeed deepspeed_config deepspeed_plugin"
    ),
    "precision, which is 'amp_bf16' or 'amp_fp16'": "mixed_precision bf16 fp16 amp",
    "compile_config={}": "torch_compile",
    "deterministic_mode": "deterministic",
    "seed": "data_seed",
}
"""What to use here, and its names in Lightning, Transformers, Accelerate, Keras or MosaicML Composer."""

_OURS = {name: ours for ours, names in _THEIRS.items() for name in names.split()}


def suggests_names(function: Callable[P, R]) -> Callable[P, R]:
    """Make a method of the trainer raise errors for unknown arguments that suggest the right ones.

    The signature does not change for :mod:`inspect` and type checkers.

    Example:
        >>> class Trainer:
        ...     @suggests_names
        ...     def __init__(self, *, optimizers=None): ...
        >>> Trainer(optimizer=3)
        Traceback (most recent call last):
        TypeError: Trainer has no argument 'optimizer': use optimizers.
    """
    parameters = inspect.signature(function).parameters
    most = sum(one.kind is not inspect.Parameter.KEYWORD_ONLY for one in parameters.values())

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if not kwargs.keys() <= parameters.keys() or len(args) > most:
            _raise_call_error(function.__name__, args, kwargs, list(parameters)[1:], most)
        return function(*args, **kwargs)

    return call


def _raise_call_error(name: str, args: tuple[Any, ...], kwargs: Iterable[str], own: list[str], most: int) -> None:
    trainer = type(args[0])
    called = trainer.__name__ if name == "__init__" else f"{name}()"
    if len(args) > most:
        raise TypeError(
            f"{called} takes its arguments by name, such as {own[most - 1]}=..., got {len(args) - most} without a name."
        )
    of_trainer = [] if name == "__init__" else list(inspect.signature(trainer).parameters)
    see = f"see help({trainer.__name__ if name == '__init__' else f'{trainer.__name__}.{name}'})."
    unknown = [f"{one!r}: {_hint(one, own, of_trainer) or see}" for one in kwargs if one not in own]
    raise TypeError(f"{called} has no argument {' It has no argument '.join(unknown)}")


def _hint(unknown: str, own: list[str], of_trainer: list[str]) -> str | None:
    ours = _OURS.get(unknown)
    close = next(iter(difflib.get_close_matches(unknown.lower(), own, n=1, cutoff=0.7)), None)
    if unknown in of_trainer:
        return "give it to the Trainer." if close is None else f"give it to the Trainer, or did you mean {close!r}?"
    if ours is not None and (close is None or ours.split(",")[0] in own):
        return f"use {ours}."
    return None if close is None else f"did you mean {close!r}?"
