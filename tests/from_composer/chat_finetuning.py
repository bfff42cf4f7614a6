"""Fine-tune a language model on chats that are packed into rows, with token counts, and continue from a file."""

import argparse
import warnings
from pathlib import Path

import torch
import transformers
from torch.utils.data import DataLoader, Dataset

from composer import Callback, DataSpec, Logger, State, Trainer
from composer.algorithms import GradientClipping
from composer.callbacks import MemoryMonitor, RuntimeEstimator, SpeedMonitor
from composer.core import Batch, Evaluator, Precision, ensure_time
from composer.core.data_spec import _default_split_batch
from composer.core.time import TimeUnit
from composer.loggers import InMemoryLogger, MosaicMLLogger
from composer.loggers.mosaicml_logger import MOSAICML_PLATFORM_ENV_VAR
from composer.metrics.nlp import LanguageCrossEntropy, LanguagePerplexity
from composer.models import HuggingFaceModel
from composer.models.huggingface import get_hf_config_from_composer_state_dict
from composer.optim import DecoupledAdamW, LinearWithWarmupScheduler
from composer.utils import FSDPConfig, MissingConditionalImportError, TPConfig, VersionedDeprecationWarning
from composer.utils import dist, get_device, get_file, parse_uri, reproducibility, safe_torch_load

IGNORED, PADDING = -100, 0

parser = argparse.ArgumentParser()
parser.add_argument("--folder", type=Path, default=Path("chats"))
parser.add_argument("--fsdp", action="store_true")


class Chats(Dataset):
    """Conversations of a question and an answer; only the answer is learned."""

    def __init__(self, size: int, seed: int):
        generator = torch.Generator().manual_seed(seed)
        lengths = torch.randint(2, 6, (size, 2), generator=generator).tolist()
        self.chats = [(torch.full((question,), 5), torch.arange(6, 6 + answer)) for question, answer in lengths]

    def __len__(self):
        return len(self.chats)

    def __getitem__(self, index):
        return self.chats[index]


class Packer:
    """Puts chats into rows of a length, one after the other, as long as they fit."""

    def __init__(self, length: int):
        self.length = length

    def __call__(self, chats) -> dict[str, torch.Tensor]:
        rows = [[]]
        for chat in chats:
            if sum(len(part) for one in (*rows[-1], chat) for part in one) > self.length:
                rows.append([])
            rows[-1].append(chat)
        return torch.utils.data.default_collate([self.row(row) for row in rows])

    def row(self, chats):
        ids = torch.cat([part for chat in chats for part in chat])
        labels = torch.cat(
            [part for question, answer in chats for part in (torch.full_like(question, IGNORED), answer)]
        )
        missing = self.length - len(ids)
        return {
            "input_ids": torch.nn.functional.pad(ids, (0, missing), value=PADDING),
            "labels": torch.nn.functional.pad(labels, (0, missing), value=IGNORED),
            "attention_mask": torch.nn.functional.pad(torch.ones_like(ids), (0, missing)),
        }


def count_tokens(batch: Batch) -> dict[str, int]:
    generating = batch["labels"][:, 1:] != IGNORED
    return {"total": int(batch["attention_mask"].sum()), "loss_generating": int(generating.sum())}


def build_loader(size: int, seed: int, length: int) -> DataSpec:
    data = Chats(size, seed)
    sampler = dist.get_sampler(data, shuffle=False)
    return DataSpec(
        dataloader=DataLoader(data, batch_size=8, sampler=sampler, collate_fn=Packer(length), drop_last=True),
        get_num_samples_in_batch=lambda batch: len(batch["input_ids"]),
        get_num_tokens_in_batch=count_tokens,
        split_batch=_default_split_batch,
    )


class TokenBudget(Callback):
    """Counts the tokens of the loader's batches and compares them with the clock."""

    def __init__(self, budget: str):
        self.budget = ensure_time(budget, TimeUnit.TOKEN)
        self.seen = self.generating = 0

    def after_dataloader(self, state: State, logger: Logger) -> None:
        batch = state.device.batch_to_device(state.batch)
        counts = count_tokens(batch)
        self.seen, self.generating = self.seen + counts["total"], self.generating + counts["loss_generating"]

    def batch_end(self, state: State, logger: Logger) -> None:
        logger.log_metrics({"tokens/generating": self.generating})
        if state.timestamp.token >= self.budget:
            state.stop_training()


def build_model() -> HuggingFaceModel:
    config = transformers.GPT2Config(
        vocab_size=16, n_embd=16, n_layer=1, n_head=2, n_positions=32, bos_token_id=1, eos_token_id=1
    )
    metrics = [LanguageCrossEntropy(), LanguagePerplexity()]
    return HuggingFaceModel(transformers.GPT2LMHeadModel(config), metrics=metrics, use_logits=True, shift_labels=True)


def train(
    args, duration: str, load_path: str | None = None, fsdp: FSDPConfig | None = None, tp: TPConfig | None = None
):
    model = build_model()
    loader = build_loader(64, seed=1, length=16)
    budget, speed, memory = TokenBudget("100000tok"), SpeedMonitor(window_size=2), InMemoryLogger()
    trainer = Trainer(
        model=model,
        train_dataloader=loader,
        eval_dataloader=[Evaluator(label="held_out", dataloader=build_loader(16, seed=2, length=16))],
        max_duration=duration,
        optimizers=DecoupledAdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.95)),
        schedulers=LinearWithWarmupScheduler(t_warmup="1ba", alpha_f=0.1),
        algorithms=[GradientClipping(clipping_type="norm", clipping_threshold=1.0)],
        callbacks=[
            budget,
            speed,
            RuntimeEstimator(time_unit="minutes"),
            MemoryMonitor(dist_aggregate_batch_interval=2),
        ],
        loggers=[memory, MosaicMLLogger(log_interval=30)],
        run_name="chats",
        save_folder=str(args.folder),
        save_filename="ep{epoch}.pt",
        save_latest_filename="newest.pt",
        save_overwrite=True,
        load_path=load_path,
        parallelism_config={"fsdp": fsdp, "tp": tp} if args.fsdp else None,
        device=get_device("cpu"),
        precision=Precision.FP32,
        device_train_microbatch_size=2,
        accumulate_train_batch_on_tokens=True,
        progress_bar=False,
        seed=7,
    )
    trainer.fit()
    trainer.close()
    return trainer, loader, budget, speed, memory


def main(args):
    reproducibility.seed_all(7)
    try:
        import a_package_that_is_not_installed  # noqa: F401
    except ImportError as error:
        message = str(MissingConditionalImportError(extra_deps_group="all", conda_package="a_package"))
        warnings.warn(VersionedDeprecationWarning(f"{message} {error}", remove_version="2.0"), stacklevel=1)
    first = train(args, "1ep")
    saved = args.folder / "ep1.pt"
    assert saved.exists(), MOSAICML_PLATFORM_ENV_VAR
    assert not parse_uri(str(saved))[0]
    get_file(str(saved), str(args.folder / "copy.pt"), overwrite=True)
    state = safe_torch_load(saved)["state"]
    print(
        "clock:",
        state["timestamp"]["Timestamp"]["batch"],
        get_hf_config_from_composer_state_dict({"state": state}).n_embd,
    )
    return first, train(args, "2ep", load_path=str(saved))


if __name__ == "__main__":
    first, second = main(parser.parse_args())
