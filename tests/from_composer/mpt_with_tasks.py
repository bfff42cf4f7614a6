"""Train a small decoder of its own, and evaluate it in context: multiple choice and exact answers."""

import argparse
from collections import defaultdict
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset
from torchmetrics import Metric

from composer import Callback, ComposerModel, DataSpec, Evaluator, Logger, State, Time, Trainer
from composer.callbacks.lr_monitor import LRMonitor
from composer.core.data_spec import _split_list
from composer.loggers import InMemoryLogger, LoggerDestination
from composer.metrics.nlp import LanguageCrossEntropy
from composer.optim.scheduler import ComposerScheduler, _convert_time
from composer.utils import FSDPConfig, ParallelismConfig, dist, ensure_tuple, get_device, is_model_fsdp, reproducibility
from composer.utils.misc import create_interval_scheduler

parser = argparse.ArgumentParser()
parser.add_argument("--duration", default="30ba")
parser.add_argument("--interval", default="15ba")

VOCABULARY, LENGTH = 12, 12


class Attention(nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.register_buffer("slopes", 2.0 ** -torch.arange(1, heads + 1), persistent=False)

    def forward(self, x):
        length = x.shape[1]
        q, k, v = (one.unflatten(-1, (self.heads, -1)).transpose(1, 2) for one in self.qkv(x).chunk(3, dim=-1))
        distances = torch.arange(length, device=x.device)[None] - torch.arange(length, device=x.device)[:, None]
        bias = self.slopes[:, None, None] * distances.float()
        bias = bias.masked_fill(distances > 0, float("-inf"))
        return self.out(F.scaled_dot_product_attention(q, k, v, attn_mask=bias).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.norm_1, self.attention = nn.LayerNorm(width), Attention(width, heads)
        self.norm_2, self.ffn = (
            nn.LayerNorm(width),
            nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)),
        )

    def forward(self, x):
        x = x + self.attention(self.norm_1(x))
        return x + self.ffn(self.norm_2(x))


class TaskMetric(Metric):
    """A metric of tasks: its update takes the batch and returns what is shown of each answer."""

    full_state_update = False
    needs_batch = True

    def __init__(self, dist_sync_on_step: bool = False):
        super().__init__(dist_sync_on_step=dist_sync_on_step)
        self.add_state("correct", default=torch.tensor(0.0), dist_reduce_fx="sum")
        self.add_state("total", default=torch.tensor(0.0), dist_reduce_fx="sum")

    def _wrap_update(self, update):
        def run(*args: Any, **kwargs: Any):
            self._computed, self._update_count = None, self._update_count + 1
            return update(*args, **kwargs)

        return run

    def compute(self):
        return self.correct / self.total


class ChoiceAccuracy(TaskMetric):
    """The fraction of questions whose likeliest continuation is the right one."""

    def update(self, batch, outputs, labels):
        losses = F.cross_entropy(outputs[:, :-1].transpose(1, 2), labels[:, 1:], ignore_index=-100, reduction="none")
        shown = defaultdict(list)
        for (first, last), gold in zip(batch["choice_groupings"], batch["gold_indices"], strict=True):
            guess = int(losses[first:last].sum(dim=1).argmin())
            self.correct += guess == gold
            self.total += 1
            shown["guess"].append(guess)
            shown["gold"].append(gold)
        return dict(shown)


class ExactAnswer(TaskMetric):
    """The fraction of rows whose answer is predicted token by token."""

    def update(self, batch, outputs, labels):
        is_answer = labels[:, 1:] != -100
        is_right = (outputs[:, :-1].argmax(dim=-1) == labels[:, 1:]) | ~is_answer
        self.correct += is_right.all(dim=1).sum()
        self.total += len(labels)
        return {"result": is_right.all(dim=1).tolist(), "metric_name": [type(self).__name__] * len(labels)}


class SmallMPT(ComposerModel):
    def __init__(self, width: int = 24, heads: int = 2, layers: int = 2):
        super().__init__()
        self.wte = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)), nn.LayerNorm(width))
        metrics = LanguageCrossEntropy(), ChoiceAccuracy(), ExactAnswer()
        self.eval_metrics = {type(metric).__name__: metric for metric in metrics}
        self.train_metrics = {"LanguageCrossEntropy": LanguageCrossEntropy()}

    def forward(self, batch):
        return self.blocks(self.wte(batch["input_ids"])) @ self.wte.weight.T

    def loss(self, outputs, batch):
        return F.cross_entropy(outputs[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten(), ignore_index=-100)

    def eval_forward(self, batch, outputs=None):
        return self.forward(batch) if outputs is None else outputs

    def get_metrics(self, is_train=False):
        return self.train_metrics if is_train else self.eval_metrics

    def update_metric(self, batch, outputs, metric):
        if getattr(metric, "needs_batch", False):
            return metric.update(batch=batch, outputs=outputs, labels=batch["labels"])
        metric.update(outputs[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())
        return None

    def flops_per_batch(self, batch):
        return 6 * sum(parameter.numel() for parameter in self.parameters()) * batch["input_ids"].numel()


class Counting(Dataset):
    """Rows that count up by one or two, modulo the size of the vocabulary."""

    def __init__(self, size: int):
        starts, steps = torch.arange(size) % VOCABULARY, 1 + torch.arange(size) % 2
        self.rows = (starts[:, None] + steps[:, None] * torch.arange(LENGTH)) % VOCABULARY

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


class Task:
    """Questions with several continuations; a batch has all of each question's."""

    def __init__(self, rows: torch.Tensor, choices: int, answer: int = 2):
        self.rows, self.choices, self.answer = rows, choices, answer

    def collate(self, indices):
        inputs, gold = [], []
        for index in indices:
            gold.append(index % self.choices)
            for choice in range(self.choices):
                row = self.rows[index].clone()
                if choice != gold[-1]:
                    row[-self.answer :] = (row[-self.answer :] + 1 + choice) % VOCABULARY
                inputs.append(row)
        labels = torch.stack(inputs)
        labels[:, : -self.answer] = -100
        groups = [(at * self.choices, (at + 1) * self.choices) for at in range(len(indices))]
        return {"input_ids": torch.stack(inputs), "labels": labels, "choice_groupings": groups, "gold_indices": gold}

    def split(self, batch, size: int):
        """Split by questions: tensors have several rows of each."""
        questions = _split_list(batch["gold_indices"], size)
        parts = {name: batch[name].split(size * self.choices) for name in ("input_ids", "labels")}
        groups = [[(at * self.choices, (at + 1) * self.choices) for at in range(len(part))] for part in questions]
        return [
            {"input_ids": ids, "labels": labels, "choice_groupings": group, "gold_indices": part}
            for ids, labels, group, part in zip(parts["input_ids"], parts["labels"], groups, questions, strict=True)
        ]

    def evaluator(self, label: str, metric: str) -> Evaluator:
        sampler = dist.get_sampler(range(len(self.rows)), drop_last=False, shuffle=False)
        loader = DataLoader(range(len(self.rows)), batch_size=4, sampler=sampler, collate_fn=self.collate)
        spec = DataSpec(
            loader,
            split_batch=self.split,
            get_num_samples_in_batch=lambda batch: len(batch["gold_indices"]),
            get_num_tokens_in_batch=lambda batch: batch["input_ids"].numel(),
        )
        return Evaluator(label=label, dataloader=spec, metric_names=[metric], device_eval_microbatch_size=4)


class EvalOutputLog(Callback):
    """Logs a table of what the metrics return for each batch."""

    def __init__(self, interval: str):
        self.is_due, self.rows = create_interval_scheduler(interval, checkpoint_events=False), []

    def eval_batch_end(self, state: State, logger: Logger) -> None:
        for name, values in state.metric_outputs.items():
            self.rows.append([str(state.dataloader_label), name, str(values)])

    def eval_end(self, state: State, logger: Logger) -> None:
        for destination in ensure_tuple(logger.destinations):
            if isinstance(destination, LoggerDestination):
                destination.log_table(columns=["task", "name", "values"], rows=self.rows, name="answers")


class InverseSquareRoot(ComposerScheduler):
    def __init__(self, t_warmup: str):
        self.t_warmup = t_warmup

    def __call__(self, state: State, ssr: float = 1.0) -> float:
        warmup = _convert_time(self.t_warmup, state, ssr=ssr)
        now = max(int(state.timestamp.get(warmup.unit)), 1)
        return min(now / int(warmup), (int(warmup) / now) ** 0.5)


def main(args, parallelism: ParallelismConfig | None = None, fsdp: FSDPConfig | None = None):
    reproducibility.seed_all(11)
    dist.initialize_dist(get_device("cpu"), timeout=60.0)
    data, memory = Counting(48), InMemoryLogger()
    model = SmallMPT()
    answers = EvalOutputLog(args.interval)
    trainer = Trainer(
        model=model,
        train_dataloader=DataSpec(
            DataLoader(data, batch_size=16, sampler=dist.get_sampler(data, shuffle=True)),
            get_num_tokens_in_batch=lambda batch: batch["input_ids"].numel(),
        ),
        eval_dataloader=[
            Task(data.rows[:12], choices=3).evaluator("choices/2-shot", "ChoiceAccuracy"),
            Task(data.rows[:12], choices=1).evaluator("answers/0-shot", "ExactAnswer"),
        ],
        eval_interval=Time.from_timestring(args.interval),
        max_duration=args.duration,
        optimizers=torch.optim.AdamW(model.parameters(), lr=3e-3),
        schedulers=[InverseSquareRoot(t_warmup="5ba")],
        callbacks=[answers, LRMonitor()],
        loggers=[memory],
        parallelism_config=parallelism if fsdp is None else {"fsdp": fsdp},
        device_train_microbatch_size=8,
        progress_bar=False,
        seed=11,
    )
    trainer.fit()
    assert not is_model_fsdp(trainer.state.model)
    for name, values in sorted(memory.data.items()):
        if name.startswith("metrics/"):
            print(name, float(values[-1][1]))
    return trainer, answers, memory


if __name__ == "__main__":
    trainer, answers, memory = main(parser.parse_args())
