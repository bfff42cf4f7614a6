"""Train models on padded batches with every kind of split; each process writes the weights to ``<folder>/<rank>.json``.

In float64, so that only rounding is left.
"""

import json
import os
import sys
import warnings
from pathlib import Path

import torch
import transformers
from torch import nn
from torch.utils.data import DataLoader

from composer import Trainer, distributed
from composer.algorithms import Distillation, LabelSmoothing, TokenSelection
from composer.models import ComposerClassifier, ComposerSegmenter, HuggingFaceModel

SPLITS = {
    "complete": {},
    "parts of 2": {"device_train_microbatch_size": 2},
    "parts of 1": {"device_train_microbatch_size": 1},
    "by tokens": {"device_train_microbatch_size": 1, "accumulate_train_batch_on_tokens": True},
}
WRAPPED = {"ddp": {}, "fsdp": {"parallelism_config": {"fsdp": {}}}}
SIZE, SAMPLES, LENGTH = 40, 8, 12

_BERT = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
_BERT |= {"vocab_size": SIZE, "pad_token_id": 0, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_DISTILBERT = {"vocab_size": SIZE, "dim": 16, "n_layers": 1, "n_heads": 2, "hidden_dim": 16, "pad_token_id": 0}
_DISTILBERT |= {"dropout": 0.0, "attention_dropout": 0.0}
_LLAMA = {"vocab_size": SIZE, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
_LLAMA |= {"num_attention_heads": 2, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
_GPT2 = {"vocab_size": SIZE, "n_positions": LENGTH, "n_embd": 16, "n_layer": 1, "n_head": 2, "bos_token_id": 1}
_GPT2 |= {"eos_token_id": 2, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
_T5 = {"vocab_size": SIZE, "d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2, "dropout_rate": 0.0}
_T5 |= {"decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 2}


class Blocks(nn.Module):
    """A segmentation network."""

    def __init__(self):
        super().__init__()
        self.head = nn.Conv2d(3, 4, 1)

    def forward(self, images):
        return self.head(images)


def make_model(kind):
    """Return a model of a kind, with the same weights each time."""
    torch.manual_seed(0)
    if kind == "segmentation":
        return ComposerSegmenter(Blocks(), num_classes=4, train_metrics=[], val_metrics=[]).double()
    if kind == "dense classification":
        return ComposerClassifier(Blocks(), num_classes=4, train_metrics=[], val_metrics=[]).double()
    if kind == "summed":
        loss_fn = nn.CrossEntropyLoss(weight=torch.tensor([0.1, 2.0, 0.4, 1.0]).double(), reduction="sum")
        return ComposerClassifier(Blocks(), 4, train_metrics=[], val_metrics=[], loss_fn=loss_fn).double()
    model = {
        "gpt2": lambda: transformers.GPT2LMHeadModel(transformers.GPT2Config(**_GPT2)),
        "one label": lambda: transformers.BertForSequenceClassification(transformers.BertConfig(**_BERT, num_labels=3)),
        "causal": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**_LLAMA)),
        "masked": lambda: transformers.DistilBertForMaskedLM(transformers.DistilBertConfig(**_DISTILBERT)),
        "tokens": lambda: transformers.BertForTokenClassification(transformers.BertConfig(**_BERT, num_labels=3)),
        "seq2seq": lambda: transformers.T5ForConditionalGeneration(transformers.T5Config(**_T5)),
    }[kind.partition(",")[0]]()
    return HuggingFaceModel(model.double())


KINDS = [
    *(
        "causal",
        "causal, smoothed",
        "causal, distilled",
        "causal, selected",
        "causal, soft",
        "gpt2",
        "masked",
        "tokens",
    ),
    *("one label", "seq2seq", "seq2seq, distilled", "segmentation", "dense classification", "summed"),
]
IMAGES = {"segmentation", "dense classification", "summed"}


def make_samples(kind):
    """Return samples with different numbers of labels; one has none."""
    generator = torch.Generator().manual_seed(1)
    lengths = [LENGTH, 2, 7, 3, LENGTH, 0, 4, 9]
    samples = []
    for length in lengths:
        real = torch.arange(LENGTH) < length
        if kind in IMAGES:
            images = torch.randn(3, 4, 3, generator=generator, dtype=torch.float64)
            masks = torch.randint(4, (LENGTH,), generator=generator)
            samples.append((images, masks.where(real, -1 if kind == "segmentation" else -100).view(4, 3)))
            continue
        ids = torch.randint(3, SIZE, (LENGTH,), generator=generator)
        labels = (ids % 3 if kind in {"tokens", "one label"} else ids).where(real, -100)
        if kind == "one label":
            labels = labels[2]  # which the samples with two and with no label ignore
        if kind == "causal, soft":
            labels = torch.rand(LENGTH, SIZE, generator=generator, dtype=torch.float64).softmax(1) * real.unsqueeze(1)
        samples.append({"input_ids": ids, "labels": labels})
        if kind.endswith("selected"):
            samples[-1]["reference_losses"] = 4 + torch.rand(LENGTH, generator=generator)
    return samples


def train(kind, **options):
    """Return the weights after two steps, and the losses."""
    model, samples = make_model(kind), make_samples(kind)
    loader = DataLoader(
        samples,
        batch_size=SAMPLES // distributed.get_world_size(),
        sampler=distributed.get_sampler(samples),
    )
    algorithms = [LabelSmoothing(0.1, target_key="labels")] if kind.endswith("smoothed") else []
    if kind.endswith("distilled"):
        teacher = make_model(kind)
        for parameter in teacher.parameters():
            parameter.data *= 1.5
        features = {"model.model.norm": "model.model.norm"} if kind.startswith("causal") else {}
        algorithms = [Distillation(teacher, features=features)]
    if kind.endswith("selected"):
        algorithms = [TokenSelection()]
    losses = []
    with Trainer(
        model=model,
        train_dataloader=loader,
        optimizers=torch.optim.SGD(model.parameters(), lr=0.5),
        max_duration="2ep",
        algorithms=algorithms,
        device="cpu",
        seed=3,
        progress_bar=False,
        **options,
    ) as trainer:
        losses = float(trainer.fit().metrics["loss/train/total"])
        weights = [getattr(one, "full_tensor", one.detach)() for one in model.parameters()]
    return {"weights": torch.cat([one.flatten() for one in weights]).tolist(), "loss": losses}


def main(folder):
    """Write the results of all kinds, splits and wrappers."""
    warnings.filterwarnings("ignore", message="device_train_microbatch_size=2 is larger")
    wrapped = WRAPPED if distributed.get_world_size() > 1 else {"ddp": {}}
    results = {
        f"{kind}, {name}, {split}": train(kind, **options, **parts)
        for kind in KINDS
        for name, options in wrapped.items()
        for split, parts in SPLITS.items()
        if split != "by tokens" or kind not in IMAGES
    }
    Path(folder, f"{distributed.get_global_rank()}.json").write_text(json.dumps(results))
    # Without the interpreter's shutdown, in which a thread of gloo now and then aborts a process.
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1])
