"""Training on packed sequences: exact resume, microbatches, processes, metrics, and algorithms beside it."""

import functools
import json
import sys
from pathlib import Path

import pytest
import torch
from torch.utils.data import ConcatDataset, DataLoader, IterableDataset, Subset
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    DataCollatorWithFlattening,
    GPT2Config,
    GPT2LMHeadModel,
    MistralConfig,
    MistralForCausalLM,
)

from composer import Trainer, distributed
from composer import functional as cf
from composer.algorithms import SelectiveBackprop, SeqLengthWarmup
from composer.core import DataSpec, pack_sequences
from composer.loggers import InMemoryLogger
from composer.metrics import LanguageCrossEntropy
from composer.models import HuggingFaceModel
from fixtures.processes import run_processes

LENGTH, WORDS = 16, 40
GENERATOR = torch.Generator().manual_seed(0)
SIZES = torch.randint(1, 25, (50,), generator=GENERATOR).tolist()
DOCUMENTS = [torch.randint(WORDS, (size,), generator=GENERATOR) for size in SIZES]


class Stream(IterableDataset):
    """Documents in order; a worker has every n-th."""

    def __iter__(self):
        worker = torch.utils.data.get_worker_info()
        return iter(DOCUMENTS if worker is None else DOCUMENTS[worker.id :: worker.num_workers])


def make_model(n_positions=LENGTH, attn_implementation="sdpa", **options):
    torch.manual_seed(0)
    sizes = {"n_embd": 16, "n_layer": 1, "n_head": 2, "bos_token_id": 0, "eos_token_id": 0}
    settings = {"n_positions": n_positions, "attn_implementation": attn_implementation}
    return HuggingFaceModel(GPT2LMHeadModel(GPT2Config(vocab_size=WORDS, **sizes, **settings)), **options)


def make_bloom():
    """Return a model that takes no positions, and whose attention implementation derives no documents."""
    sizes = {"hidden_size": 16, "n_layer": 1, "n_head": 2, "bos_token_id": 0, "eos_token_id": 0}
    return HuggingFaceModel(BloomForCausalLM(BloomConfig(vocab_size=WORDS, **sizes)))


class Counting(HuggingFaceModel):
    """A model with a buffer of the number of its forward passes, and a part in evaluation mode."""

    def __init__(self):
        super().__init__(make_model().model)
        self.register_buffer("calls", torch.zeros(()))
        self.modes = []
        self.model.transformer.drop.eval()

    def forward(self, batch):
        self.calls += 1
        self.modes.append((self.training, torch.is_grad_enabled()))
        return super().forward(batch)


def make_trainer(
    source=DOCUMENTS,
    output="position_ids",
    *,
    workers=0,
    shuffle=True,
    is_exact=True,
    model=None,
    check_model=True,
    wrap=lambda packed: packed,
    **options,
):
    """Return a trainer for two epochs; without dropout, in float64, if the data are split differently."""
    model = make_model() if model is None else model
    if not is_exact:
        model.double()
        model.model.apply(lambda module: setattr(module, "p", 0.0) if isinstance(module, torch.nn.Dropout) else None)
    packed = wrap(pack_sequences(source, LENGTH, buffer_size=12, check_model=check_model))
    sampler = None if source is not DOCUMENTS else distributed.get_sampler(packed, shuffle=shuffle)
    loader = DataLoader(
        packed,
        8 // distributed.get_world_size(),
        sampler=sampler,
        num_workers=workers,
        collate_fn=cf.collate_packed,
    )
    transforms = functools.partial(cf.add_document_mask, output=output)
    settings = {"max_duration": "2ep", "seed": 3, "run_name": "run", "device": "cpu", "progress_bar": False}
    return Trainer(
        model=model,
        train_dataloader=DataSpec(loader, microbatch_transforms=transforms),
        optimizers=torch.optim.AdamW(model.parameters(), lr=0.01)
        if is_exact
        else torch.optim.SGD(model.parameters(), 0.1),
        **(settings | options),
    )


def train(*args, **options):
    """Train for two epochs, and return the trainer."""
    with make_trainer(*args, **options) as trainer:
        trainer.fit()
    return trainer


def weights(trainer):
    return torch.cat([each.detach().flatten() for each in trainer.state.model.parameters()])


@pytest.mark.filterwarnings("ignore:train_dataloader cannot begin in the middle:UserWarning")  # of a stream
@pytest.mark.parametrize("source", [DOCUMENTS, Stream()], ids=["dataset", "stream"])
@pytest.mark.parametrize(("stop", "workers"), [("2ba", 0), ("1ep", 0), ("7ba", 0), ("7ba", 2)])
def test_resumed_equals_uninterrupted(source, stop, workers, tmp_path):
    """Stopped in and after an epoch, a run continues with the same rows, bit for bit."""
    options = {"workers": workers, "save_folder": str(tmp_path), "autoresume": True, "save_interval": "1ba"}
    uninterrupted = train(source, workers=workers)
    stopped = train(source, **options, max_duration=stop)
    resumed = train(source, **options)

    assert stopped.state.timestamp.batch < resumed.state.timestamp.batch == uninterrupted.state.timestamp.batch
    assert torch.equal(weights(resumed), weights(uninterrupted))


def test_resumed_evaluations_read_the_same_rows(tmp_path):
    """An evaluation of some batches of a stream starts at its beginning, also in a resumed run."""

    def evaluated(**options):
        packed = pack_sequences(Stream(), LENGTH, buffer_size=12)
        model = make_model(metrics=[LanguageCrossEntropy()])
        loader = DataLoader(packed, 2, collate_fn=cf.collate_packed)
        logger = InMemoryLogger()
        train(model=model, loggers=logger, eval_dataloader=loader, eval_subset_num_batches=2, **options)
        return [float(value) for _, value in logger.data["metrics/eval/LanguageCrossEntropy"]]

    uninterrupted = evaluated()
    options = {"save_folder": str(tmp_path), "autoresume": True, "save_interval": "1ba"}

    assert evaluated(max_duration="1ep", **options) + evaluated(**options) == uninterrupted


@pytest.mark.parametrize("output", ["position_ids", "mask", "cu_seqlens"])
@pytest.mark.parametrize("microbatch_size", [1, 3])
def test_microbatches_do_not_change_the_step(output, microbatch_size):
    """Weights and counted tokens are those without microbatches, though parts have different numbers of labels."""
    expected = train(is_exact=False)
    trainer = train(output=output, device_train_microbatch_size=microbatch_size, is_exact=False)

    # Transformers computes the loss in float32.
    torch.testing.assert_close(weights(trainer), weights(expected), rtol=1e-6, atol=1e-7)
    assert trainer.state.timestamp.token == expected.state.timestamp.token == 2 * sum(SIZES)


def test_processes_do_not_change_the_step(tmp_path):
    """Two processes with half of each batch take the steps of one, copied and sharded, and each checks the model.

    Takes more than 5 seconds, as it starts them.
    """
    run_processes(__file__, 2, tmp_path)
    expected = train(is_exact=False)

    for rank in range(2):
        result = json.loads((tmp_path / f"{rank}.json").read_text())
        assert result["tokens"] == 2 * sum(SIZES)
        assert result["weights"] == pytest.approx(weights(expected).tolist(), rel=1e-6, abs=1e-7)
        assert result["sharded"] == pytest.approx(weights(expected).tolist(), rel=1e-6, abs=1e-7)
        assert result["error"].startswith("HuggingFaceModel of BloomForCausalLM must not attend across documents")


class TestCheck:
    """The Trainer checks the model with the first packed batch."""

    @pytest.mark.parametrize("source", [DOCUMENTS, Stream()], ids=["dataset", "stream"])
    def test_it_changes_nothing(self, source):
        """With dropout, weights, generators, modes and buffers are those of a run without the check, bit for bit."""
        runs = []
        for check_model in (True, False):
            model = Counting()
            trainer = train(source, model=model, check_model=check_model, device_train_microbatch_size=3)
            modes = [module.training for module in model.modules()]
            runs.append((weights(trainer).tolist(), torch.get_rng_state().tolist(), modes, model.calls.item()))

        assert runs[0] == runs[1]

    def test_it_runs_once(self):
        """Three forward passes in evaluation mode and without gradients come before the first of the training."""
        model = Counting()
        with make_trainer(model=model) as trainer:
            trainer.fit(duration="1ba")
            trainer.fit(duration="1ba")

        assert model.modes == [(False, False)] * 3 + [(True, True)] * 2

    @pytest.mark.parametrize("source", [DOCUMENTS, Stream()], ids=["dataset", "stream"])
    @pytest.mark.parametrize(
        ("make", "output", "error"),
        [
            (make_bloom, "position_ids", "of BloomForCausalLM must not attend across documents.*attn_implementation"),
            (lambda: make_model(attn_implementation="eager"), "mask", "of GPT2LMHeadModel must not attend.*'mask'"),
            (lambda: make_model(n_positions=LENGTH // 4), "position_ids", "of GPT2LMHeadModel must return.*IndexError"),
        ],
        ids=["architecture", "attention", "failing"],
    )
    def test_a_model_that_ignores_the_mask_is_rejected(self, source, make, output, error):
        """The error names the model and the remedy, before any weight has changed."""
        model = make()
        before = torch.cat([each.detach().flatten() for each in model.parameters()])

        with pytest.raises(ValueError, match=error) as raised:
            train(source, output, model=model)

        assert "check_model=False" in raised.value.__notes__[0]
        assert torch.equal(before, torch.cat([each.detach().flatten() for each in model.parameters()]))

    def test_flattened_documents(self):
        """A batch of Transformers' collator for training without padding is checked, too, in each form of the call."""
        lists = [{"input_ids": list(document)} for document in DOCUMENTS[:8]]
        flatten = DataCollatorWithFlattening()

        for collate in (flatten, lambda samples: dict(flatten(samples))):
            loader = DataLoader(lists, batch_size=8, collate_fn=collate)
            with pytest.warns(UserWarning, match="BloomForCausalLM must not attend across documents") as warned:
                trainer = self.fit(make_bloom(), loader)
            trainer.fit(duration="1ba")
            self.fit(make_model(n_positions=512), loader)
            assert len(warned) == 1

    def test_a_padded_row_is_not_flattened(self):
        """A row with a mask and positions of 0 at padding trains a model that ignores positions, without a warning."""
        mask = torch.tensor([[0, 0, 1, 1, 1]])
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        labels = mask.where(mask == 1, -100)
        batch = {"input_ids": mask, "attention_mask": mask, "position_ids": positions, "labels": labels}

        self.fit(make_bloom(), [batch])

    @pytest.mark.parametrize(("others", "calls"), [(3, 4), (1, 1), (0, 1)])
    def test_all_processes_check_a_flattened_row(self, others, calls, monkeypatch):
        """With one document here, the model is checked if another process has several and all have such rows."""
        row = {"input_ids": DOCUMENTS[0][None, :LENGTH], "position_ids": torch.arange(LENGTH)[None]}
        monkeypatch.setattr("composer.trainer.gradients.all_gather_object", lambda number: [number, others])
        model = Counting()

        self.fit(model, [row | {"labels": row["input_ids"]}])

        assert len(model.modes) == calls

    def fit(self, model, loader):
        """Train for a batch, and return the trainer."""
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        options = {"max_duration": "1ba", "device": "cpu", "progress_bar": False}
        trainer = Trainer(model=model, train_dataloader=loader, optimizers=optimizer, **options)
        trainer.fit()
        return trainer

    @pytest.mark.parametrize(
        "wrap",
        [
            lambda packed: ConcatDataset([[], packed]),
            lambda packed: Subset(ConcatDataset([packed, packed]), range(len(packed))),
        ],
    )
    def test_rows_in_other_data_sets(self, wrap):
        """A model is also checked for rows in a ConcatDataset or a Subset."""
        with pytest.raises(ValueError, match="of BloomForCausalLM must not attend across documents"):
            train(model=make_bloom(), wrap=wrap)

    def test_it_can_be_left_out(self):
        """With ``check_model=False`` such a model is trained."""
        assert train(model=make_bloom(), check_model=False, max_duration="1ba").state.timestamp.batch == 1


@pytest.mark.parametrize("output", ["position_ids", "mask"])
def test_metrics_are_those_of_separate_documents(output):
    """An evaluation of packed data has the mean loss over all tokens that a document predicts."""
    model = make_model(metrics=[LanguageCrossEntropy()], use_logits=True)
    packed = pack_sequences(DOCUMENTS, LENGTH, too_long="truncate")
    loader = DataLoader(packed, 4, collate_fn=cf.collate_packed)
    spec = DataSpec(loader, microbatch_transforms=functools.partial(cf.add_document_mask, output=output))

    found = Trainer(model=model, eval_dataloader=spec, device="cpu", progress_bar=False).eval()

    model.eval()
    texts = [document[None, :LENGTH] for document in DOCUMENTS if len(document) > 1]
    losses = [model.model(input_ids=text, labels=text).loss * (text.shape[1] - 1) for text in texts]
    expected = sum(losses).item() / sum(text.shape[1] - 1 for text in texts)
    assert float(found["eval"]["LanguageCrossEntropy"]) == pytest.approx(expected, rel=1e-5)


@pytest.mark.filterwarnings("ignore:SeqLengthWarmup.* cuts sequences of 16 tokens")
@pytest.mark.parametrize("output", ["position_ids", "mask", "cu_seqlens"])
@pytest.mark.parametrize("truncate", [True, False])
def test_shorter_sequences_keep_the_documents_apart(output, truncate):
    """Beside SeqLengthWarmup, masks and offsets are made of the shortened rows, whose tokens are counted."""
    warmup = functools.partial(SeqLengthWarmup, 1.0, 4, 12, 4, truncate)
    expected = train(algorithms=warmup(), is_exact=False)
    trainer = train(output=output, algorithms=warmup(), device_train_microbatch_size=2, is_exact=False)

    torch.testing.assert_close(weights(trainer), weights(expected), rtol=1e-6, atol=1e-7)
    assert trainer.state.timestamp.token == expected.state.timestamp.token
    # Split by 4 and 8 tokens, rows of 16 lose none.
    assert (trainer.state.timestamp.token < 2 * sum(SIZES)) == truncate


@pytest.mark.parametrize("output", ["position_ids", "mask", "cu_seqlens"])
def test_selected_rows_keep_their_documents(output):
    """Beside SelectiveBackprop, the documents of the selected rows are counted and masked."""
    algorithm = SelectiveBackprop(0.0, 1.0, input_key="input_ids", target_key="labels")
    trainer = train(output=output, algorithms=algorithm, is_exact=False)

    assert 0 < trainer.state.timestamp.token < 2 * sum(SIZES)


def test_sliding_windows_are_compared_with_complete_rows():
    """The check of the trainer computes few tokens, but raises for a mask if rows are longer than a window."""
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    settings = {"num_key_value_heads": 2, "sliding_window": 150, "pad_token_id": 0}
    model = HuggingFaceModel(MistralForCausalLM(MistralConfig(vocab_size=WORDS, **sizes, **settings)))
    loader = DataLoader(pack_sequences(DOCUMENTS, 160), 2, collate_fn=cf.collate_packed)

    def fit(data):
        Trainer(
            model=model,
            train_dataloader=data,
            optimizers=torch.optim.SGD(model.parameters(), 0.1),
            max_duration="1ba",
            device="cpu",
            progress_bar=False,
        ).fit()

    fit(loader)
    with pytest.raises(ValueError, match=r"sliding window of 150 tokens .* the rows of 160 tokens"):
        fit(DataSpec(loader, microbatch_transforms=functools.partial(cf.add_document_mask, output="mask")))


def test_alibi_passes_the_check():
    """The bias of Alibi depends on distances within a document: logits packed are those of the document alone."""
    model = make_model()
    cf.apply_alibi(model.model, LENGTH)
    documents = [DOCUMENTS[0][:6], DOCUMENTS[1][:8]]
    batch = cf.collate_packed([cf.pack_documents(documents, LENGTH)])

    cf.check_packing(model, batch)

    with torch.no_grad():
        network = model.model.eval()
        packed = network(input_ids=batch["input_ids"], position_ids=batch["position_ids"], use_cache=False).logits
        alone = network(input_ids=documents[1][None], use_cache=False).logits
    torch.testing.assert_close(packed[:, 6:14], alone)


if __name__ == "__main__":
    trainer = train(is_exact=False)
    result = {"weights": weights(trainer).tolist(), "tokens": int(trainer.state.timestamp.token)}
    sharded = train(is_exact=False, parallelism_config={"fsdp": {}})
    complete = [each.detach().full_tensor().flatten() for each in sharded.state.model.parameters()]
    result["sharded"] = torch.cat(complete).tolist()
    # One of the sharded processes has a flattened row of two documents, the other of one.
    ids, first = torch.cat(DOCUMENTS[:2])[None], len(DOCUMENTS[0])
    positions = torch.arange(ids.numel())
    if distributed.get_global_rank():
        positions = torch.cat([positions[:first], positions[:-first]])
    flattened = make_model(n_positions=512)
    Trainer(
        model=flattened,
        train_dataloader=[{"input_ids": ids, "labels": ids, "position_ids": positions[None]}],
        optimizers=torch.optim.SGD(flattened.parameters(), 0.1),
        max_duration="1ba",
        device="cpu",
        progress_bar=False,
        parallelism_config={"fsdp": {}},
    ).fit()
    try:
        train(model=make_bloom())
    except ValueError as error:
        result["error"] = str(error)
    (Path(sys.argv[1]) / f"{distributed.get_global_rank()}.json").write_text(json.dumps(result))
