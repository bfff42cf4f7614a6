"""TokenSelection in the Trainer: with other methods, and on data with noise."""

import contextlib

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from composer import functional as cf
from composer.algorithms import ChunkedCrossEntropy, InfoBatch, LabelSmoothing, TokenSelection, with_reference_losses
from composer.core import AlgorithmConflictError, explain, pack_sequences
from composer.loggers import InMemoryLogger
from composer.models import HuggingFaceModel
from fixtures import trained, weights

TOKENS = 24


def make_model(seed=0, length=16):
    """Return a small Llama in float64."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=TOKENS, max_position_embeddings=length, use_cache=False, **sizes)
    return HuggingFaceModel(LlamaForCausalLM(config).double())


def text(count=8, length=16):
    """Return rows of ids, of which some labels are ignored."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(TOKENS, (count, length), generator=generator)
    labels = ids.where(torch.rand(count, length, generator=generator) < 0.8, -100)
    return [{"input_ids": row, "labels": label} for row, label in zip(ids, labels, strict=True)]


def fit(samples, *algorithms, collate_fn=None, **options):
    """Train for two steps, and return the weights."""
    model = make_model()
    run = trained(
        model=model,
        train_dataloader=DataLoader(samples, 4, collate_fn=collate_fn),
        optimizers=torch.optim.SGD(model.parameters(), lr=0.5),
        algorithms=list(algorithms),
        **options,
    )
    return weights(run)


@pytest.mark.parametrize("smoothing", [None, {}, {"smoothing": 0.2}])
def test_chunks_of_logits_give_the_same_step(smoothing):
    """With the head in chunks, and with smoothed labels, the weights are the same up to rounding; smoothing matters."""
    samples = with_reference_losses(make_model(1), text())
    others = [] if smoothing is None else [LabelSmoothing(**smoothing, target_key="labels")]

    plain = fit(samples, TokenSelection(), *others)
    chunked = fit(samples, TokenSelection(), *others, ChunkedCrossEntropy(chunk_size=3), device_train_microbatch_size=1)

    torch.testing.assert_close(chunked, plain, rtol=1e-9, atol=1e-11)
    assert torch.equal(plain, fit(samples, TokenSelection())) == (smoothing is None)
    assert not torch.equal(plain, fit(samples, *others))


def test_compiled_head_in_chunks():
    """In a graph that is compiled, the head returns other logits, which give the same step."""
    samples = with_reference_losses(make_model(1), text())
    methods = TokenSelection(), ChunkedCrossEntropy(chunk_size=3)

    compiled = fit(samples, *methods, compile_config={"backend": "eager"})

    torch.testing.assert_close([*compiled], [*fit(samples, *methods)], rtol=1e-9, atol=1e-11)


def test_packed_rows():
    """Rows of packed documents have losses of a reference, which attends within documents as the model does."""
    documents = [row["input_ids"][:size] for row, size in zip(text(), [9, 5, 7, 12, 4, 3, 8, 6], strict=True)]
    packed = pack_sequences(documents, 16, "in_order")
    rows = with_reference_losses(make_model(1), packed, collate_fn=cf.collate_packed)
    alone = with_reference_losses(make_model(1), [{"input_ids": ids, "labels": ids} for ids in documents[:1]])

    torch.testing.assert_close(rows[0]["reference_losses"][:9], alone[0]["reference_losses"])
    found = fit(rows, TokenSelection(), collate_fn=cf.collate_packed)
    split = fit(rows, TokenSelection(), collate_fn=cf.collate_packed, device_train_microbatch_size=1)
    torch.testing.assert_close(split, found, rtol=1e-9, atol=1e-11)
    assert not torch.equal(found, fit(rows, collate_fn=cf.collate_packed))


@pytest.mark.parametrize("change", ["base", "scale", "nothing"])
def test_fingerprint_of_adapters(tmp_path, change):
    """Other weights below adapters, of which alone the model saves the weights, and another scale are another model."""
    peft = pytest.importorskip("peft")

    def losses(alpha=8, *, changes_base=False):
        config = peft.LoraConfig(r=2, lora_alpha=alpha, target_modules=["q_proj"])
        model = HuggingFaceModel(make_model().model, peft_config=config)
        if changes_base:
            nn.init.zeros_(model.model.get_base_model().model.norm.weight)
        return with_reference_losses(model, text(), tmp_path / "losses")

    losses()
    expected = contextlib.nullcontext() if change == "nothing" else pytest.raises(ValueError, match="another model")
    with expected:
        losses(16 if change == "scale" else 8, changes_base=change == "base")


def test_counts_are_logged():
    """Each batch logs how many of its labelled tokens were selected, with microbatches together."""
    samples, log = with_reference_losses(make_model(1), text()), InMemoryLogger()
    fit(samples, TokenSelection(0.5), loggers=log, device_train_microbatch_size=1)

    counted = [int(value) for _, value in log.data["token_selection/counted"]]
    labels = [torch.stack([row["labels"] for row in samples[start : start + 4]])[:, 1:] != -100 for start in (0, 4)]
    assert counted == [int(one.sum()) for one in labels]
    selected = [int(value) for _, value in log.data["token_selection/selected"]]
    assert selected == [int((0.5 * one.sum(1)).ceil().sum()) for one in labels]


def test_conflict():
    """A second choice of samples raises an error."""
    with pytest.raises(AlgorithmConflictError, match="choice of samples"):
        explain([TokenSelection(), InfoBatch()])


class Bigrams(nn.Module):
    """Logits of the next token from the last one."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(TOKENS, TOKENS)
        nn.init.zeros_(self.table.weight)

    def forward(self, ids):
        return self.table(ids)


class OfBatches(Bigrams):
    """Takes batches with labels of the next position."""

    def forward(self, batch):
        return super().forward(batch["input_ids"])

    def loss(self, outputs, batch):
        return nn.functional.cross_entropy(outputs.flatten(0, -2), batch["labels"].flatten())


def sequences(rows, noise, seed):
    """Return samples of a chain in which each token has three successors; a share of the labels is random."""
    generator = torch.Generator().manual_seed(7)
    successors = torch.rand(TOKENS, TOKENS, generator=generator).argsort(1)[:, :3]
    generator.manual_seed(seed)
    ids = torch.randint(TOKENS, (rows, 1), generator=generator)
    for _ in range(32):
        drawn = torch.randint(3, (rows, 1), generator=generator)
        ids = torch.cat([ids, successors[ids[:, -1]].gather(1, drawn)], 1)
    labels = ids[:, 1:]
    random = torch.randint(TOKENS, labels.shape, generator=generator)
    labels = labels.where(torch.rand(labels.shape, generator=generator) >= noise, random)
    return [{"input_ids": row, "labels": label} for row, label in zip(ids[:, :-1], labels, strict=True)]


def end_loss(samples, *algorithms):
    """Train on the samples; return the loss on data without noise."""
    model, clean = OfBatches(), sequences(64, 0.0, seed=3)
    options = {"train_dataloader": DataLoader(samples, 32), "algorithms": list(algorithms), "max_duration": "4ep"}
    trained(model=model, optimizers=torch.optim.Adam(model.parameters(), lr=0.1), **options)
    with torch.no_grad():
        return sum(float(model.loss(model(row), row)) for row in clean) / len(clean)


def test_noise_is_left_out():
    """With 40 % of random labels, the loss on clean data is far lower than without the method after the same steps.

    The model itself at an earlier time is no reference: the tokens that it has learned least are the random ones.
    """
    reference, noisy = OfBatches(), sequences(256, 0.4, seed=2)
    clean = DataLoader(sequences(64, 0.0, seed=1), 32)
    trained(model=reference, train_dataloader=clean, optimizers=torch.optim.Adam(reference.parameters(), 0.1),
            max_duration="20ep")  # fmt: skip
    earlier = with_reference_losses(OfBatches(), noisy)

    usual = end_loss(noisy)
    selected = end_loss(with_reference_losses(reference, noisy), TokenSelection(0.6))
    without_reference = end_loss(earlier, TokenSelection(0.6))

    assert selected < usual - 0.2
    assert without_reference > usual
