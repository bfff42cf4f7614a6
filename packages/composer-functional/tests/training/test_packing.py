"""Several documents in a row."""

import collections
import contextlib
import itertools
import re
import sysconfig
from pathlib import Path

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from torch.torch_version import TorchVersion
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    BertConfig,
    BertForMaskedLM,
    BertLMHeadModel,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
)

from composer import functional as cf

LENGTH, WORDS = 24, 40
FROM_5 = pytest.mark.skipif(
    TorchVersion(transformers.__version__) < "5",
    reason="Transformers 4 reads no documents from positions in Llama 4, and takes no such masks in BERT",
)
METHODS = pytest.mark.parametrize("method", ["best_fit", "in_order"])
OUTPUTS = pytest.mark.parametrize("output", ["position_ids", "mask", "cu_seqlens"])


class Attention(nn.Module):
    """A layer of torch's attention, with a mask, with offsets of documents, or with neither."""

    def __init__(self, uses, uses_positions=True):
        super().__init__()
        self.uses, self.uses_positions = uses, uses_positions
        self.tokens, self.positions = nn.Embedding(WORDS, 16), nn.Embedding(LENGTH, 16)
        self.projections, self.head = nn.Linear(16, 48), nn.Linear(16, WORDS)

    def forward(self, input_ids, position_ids, attention_mask=None, cu_seq_lens_q=None):
        if not self.uses_positions:
            position_ids = torch.arange(input_ids.shape[1]).expand_as(input_ids)
        hidden = self.tokens(input_ids) + self.positions(position_ids)
        query, key, value = self.projections(hidden).chunk(3, -1)
        if self.uses == "mask":
            mixed = scaled_dot_product_attention(query[:, None], key[:, None], value[:, None], attention_mask)[:, 0]
        elif self.uses == "cu_seqlens":
            parts = zip(
                *(each.flatten(0, 1).split(cu_seq_lens_q.diff().tolist()) for each in (query, key, value)), strict=True
            )
            each = [scaled_dot_product_attention(*(part[None] for part in one), is_causal=True)[0] for one in parts]
            mixed = torch.cat(each).view_as(hidden)
        else:
            mixed = scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.head(hidden + mixed)


def gpt2(**settings):
    sizes = {"n_positions": LENGTH, "n_embd": 16, "n_layer": 2, "n_head": 2, "bos_token_id": 0, "eos_token_id": 0}
    return GPT2LMHeadModel(GPT2Config(vocab_size=WORDS, use_cache=False, **sizes, **settings)).eval()


def llama(**settings):
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=WORDS, use_cache=False, **sizes, **settings)).eval()


def windowed(kind, window):
    """Return a model of which at least one layer attends to as many tokens."""
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    sizes |= {"num_key_value_heads": 2, "head_dim": 8, "use_cache": False, "pad_token_id": 0, "initializer_range": 0.5}
    windows = {"sliding_window": window, "use_sliding_window": True, "max_window_layers": 1}
    windows = {"attention_chunk_size": window} if kind == "llama4_text" else windows
    if kind.startswith(("gemma", "llama4")):
        windows["layer_types"] = [f"{'chunked' if kind == 'llama4_text' else 'sliding'}_attention", "full_attention"]
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, vocab_size=WORDS, **sizes, **windows))


MODELS = {
    ("gpt2", "position_ids"): gpt2,
    ("gpt2", "mask"): gpt2,
    ("gpt2, eager", "position_ids"): lambda: gpt2(attn_implementation="eager"),
    ("llama", "position_ids"): llama,
    ("llama", "mask"): llama,
    ("torch", "mask"): lambda: Attention("mask"),
    ("torch", "cu_seqlens"): lambda: Attention("cu_seqlens"),
}
EACH_MODEL = pytest.mark.parametrize(("name", "output"), MODELS)


@pytest.fixture
def documents():
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(WORDS, (size,), generator=generator) for size in (9, 7, 5, 24, 1, 13, 8, 1)]


@pytest.fixture
def batch(documents):
    rows = cf.pack_lengths([*map(len, documents)], LENGTH)
    return cf.collate_packed([cf.pack_documents([documents[index] for index in row], LENGTH) for row in rows])


def call(model, batch):
    names = batch.keys() - {"labels", "document_lengths"}
    if isinstance(model, Attention):
        names &= {"input_ids", "position_ids", "attention_mask", "cu_seq_lens_q"}
    outputs = model(**{name: batch[name] for name in names})
    return outputs if isinstance(outputs, torch.Tensor) else outputs.logits


def gradients(model):
    return torch.cat([each.grad.flatten() for each in model.parameters()])


@pytest.fixture(scope="module")
def sizes_of_files():
    """The numbers of words and signs in the source files of the standard library, counted once."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    files = [path for path in folder.rglob("*.py") if "site-packages" not in path.parts]
    return [len(re.findall(r"\w+|[^\w\s]", path.read_text(errors="ignore"))) for path in files]


class TestLengths:
    @METHODS
    @given(st.lists(st.integers(1, 12), max_size=40))
    def test_each_document_is_in_one_row(self, method, lengths):
        """Rows hold each document once and are not longer than the limit."""
        rows = cf.pack_lengths(lengths, 12, method)

        assert sorted(itertools.chain(*rows)) == [*range(len(lengths))]
        assert all(0 < sum(lengths[index] for index in row) <= 12 for row in rows)

    @given(st.lists(st.integers(1, 30), max_size=60))
    def test_best_fit_is_that_of_a_search(self, lengths):
        """The rows are those of a search of all rows for the one with the least sufficient space."""
        spaces = []
        for size in sorted(lengths, reverse=True):
            fitting = [place for place, space in enumerate(spaces) if space >= size]
            if fitting:
                spaces[min(fitting, key=lambda place: spaces[place])] -= size
            else:
                spaces.append(30 - size)
        rows = cf.pack_lengths(lengths, 30)

        assert sorted(30 - sum(lengths[index] for index in row) for row in rows) == sorted(spaces)

    @given(st.lists(st.integers(1, 30), max_size=60), st.randoms())
    def test_number_of_rows_does_not_depend_on_the_order(self, lengths, random):
        """The same lengths in another order need the same rows."""
        shuffled = random.sample(lengths, len(lengths))

        first, second = (
            collections.Counter(tuple(sorted(each[index] for index in row)) for row in cf.pack_lengths(each, 30))
            for each in (lengths, shuffled)
        )
        assert first == second

    def test_order_is_preserved(self):
        """In order, concatenated rows are the documents."""
        assert [*itertools.chain(*cf.pack_lengths([3, 4, 5, 1, 2], 6, "in_order"))] == [0, 1, 2, 3, 4]

    @pytest.mark.parametrize("length", [512, 2048, 8192])
    def test_rows_of_real_texts_are_full(self, sizes_of_files, length):
        """On the standard library's source files, 99 % of the tokens of best-fit rows are no padding."""
        parts = [min(length, size - start) for size in sizes_of_files for start in range(0, size, length)]

        best, in_order = (sum(parts) / len(cf.pack_lengths(parts, length, each)) / length for each in METHODS.args[1])

        assert len(sizes_of_files) > 500
        assert in_order < 0.97 < 0.99 < best


class TestRow:
    def test_labels_and_positions_start_again(self):
        """Positions are those in each document, and the first label of each is ignored, also one given as a label."""
        labels = [torch.tensor([1, -100, 3]), torch.tensor([4, 5])]
        row = cf.pack_documents([torch.tensor([1, 2, 3]), torch.tensor([4, 5])], 7, labels=labels, pad_id=9)

        assert row["input_ids"].tolist() == [1, 2, 3, 4, 5, 9, 9]
        assert row["labels"].tolist() == [-100, -100, 3, -100, 5, -100, -100]
        assert row["position_ids"].tolist() == [0, 1, 2, 0, 1, 0, 1]
        assert row["num_tokens"] == 5
        assert labels[0].tolist() == [1, -100, 3]

    def test_a_batch_has_the_lengths_of_its_documents(self):
        """Documents of one token, full rows and padding are distinguished."""
        ids = torch.arange(4)
        rows = [[ids[:1], ids[:1], ids[:1]], [ids], [ids[:3], ids[:1]], [ids[:1]]]
        batch = cf.collate_packed([cf.pack_documents(row, 4) for row in rows])

        assert batch["document_lengths"] == [[1, 1, 1], [4], [3, 1], [1]]
        assert "num_tokens" not in batch


class TestMask:
    def test_mask_is_that_of_pairs(self, batch):
        """A token attends to those before it in its document, by the definition for each pair."""
        mask = cf.add_document_mask(batch)["attention_mask"]

        for row, lengths in enumerate(batch["document_lengths"]):
            numbers = [number for number, size in enumerate([*lengths, LENGTH - sum(lengths)]) for _ in range(size)]
            expected = [[numbers[q] == numbers[k] and k <= q for k in range(LENGTH)] for q in range(LENGTH)]
            assert mask[row, 0].tolist() == expected

    def test_offsets_are_those_of_the_lengths(self, batch):
        """The offsets are the sums of the lengths of documents and padding, over all rows."""
        added = cf.add_document_mask(batch, "cu_seqlens")

        sizes = [size for row in batch["document_lengths"] for size in (*row, LENGTH - sum(row)) if size]
        assert added["cu_seq_lens_q"].tolist() == [0, *itertools.accumulate(sizes)]
        assert added["cu_seq_lens_q"].dtype == torch.int32
        assert added["cu_seq_lens_k"] is added["cu_seq_lens_q"]
        assert added["max_length_q"] == added["max_length_k"] == max(sizes)

    @EACH_MODEL
    def test_logits_and_gradients_are_those_of_separate_documents(self, name, output, batch, documents):
        """Packed, each document has its own logits, and the loss and gradients are those of all documents."""
        torch.manual_seed(0)
        model = MODELS[name, output]().eval()
        logits = call(model, cf.add_document_mask(batch, output))
        targets = batch["labels"][:, 1:].flatten()
        loss = cross_entropy(logits[:, :-1].flatten(0, 1), targets, reduction="sum")
        loss.backward()
        packed = gradients(model)
        model.zero_grad()

        losses = []
        starts = [[*itertools.accumulate(row, initial=0)] for row in batch["document_lengths"]]
        for row, places in enumerate(starts):
            for start, end in itertools.pairwise(places):
                alone = cf.collate_packed([cf.pack_documents([batch["input_ids"][row, start:end]], end - start)])
                separate = call(model, cf.add_document_mask(alone, output))[0]
                torch.testing.assert_close(logits[row, start:end], separate, rtol=1e-5, atol=1e-5)
                losses.append(cross_entropy(separate[:-1], alone["input_ids"][0, 1:], reduction="sum"))
        sum(losses).backward()

        assert len(losses) == len(documents)
        torch.testing.assert_close(loss, sum(losses), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(packed, gradients(model), rtol=1e-5, atol=1e-5)
        cf.check_packing(model, batch, output)


class TestCheck:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize("make", [gpt2, llama])
    def test_good_models_pass_in_each_precision(self, make, dtype, batch):
        """Rounding in 16 bits is no leak, and the model's mode does not change."""
        model = make().to(dtype).train()

        for output in ("position_ids", "mask"):
            cf.check_packing(model, batch, output)

        assert model.training

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize(
        ("make", "output", "error"),
        [
            (lambda: Attention("nothing"), "mask", "must not attend across documents.*'mask'"),
            (lambda: Attention("mask"), "position_ids", "must not attend across documents.*'position_ids'"),
            (lambda: Attention("mask", uses_positions=False), "mask", "must take position_ids"),
            (lambda: gpt2(attn_implementation="eager"), "mask", "must not attend across documents"),
        ],
    )
    def test_models_that_ignore_something_raise(self, make, output, error, dtype, batch):
        """Attention across documents and positions that do not start again are found, also in 16 bits."""
        torch.manual_seed(0)
        with pytest.raises(ValueError, match=error):
            cf.check_packing(make().to(dtype), batch, output)

    # torch 2.7 warns so about what it does itself under vmap, by which Transformers 4 makes masks.
    @pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
    def test_a_compiled_model_is_not_compiled_for_the_check(self, batch):
        """The check computes without compilation, which would be for the shapes of the check."""
        model, compiled = gpt2(), []
        model.compile(backend=lambda graph, _: compiled.append(graph) or graph.forward)

        cf.check_packing(model, batch)
        assert not compiled

        model(batch["input_ids"])
        assert compiled

    def test_buffers_do_not_change(self, batch):
        """What a forward pass writes into buffers is restored, also if it fails."""

        def count(module, _):
            module.calls += 1

        model = gpt2()
        model.register_buffer("calls", torch.zeros(()))
        model.register_forward_pre_hook(count)

        cf.check_packing(model, batch)
        assert model.calls == 0

        model.transformer.wpe = nn.Embedding(2, 16)
        with pytest.raises(ValueError, match=r"GPT2LMHeadModel must return logits .* IndexError: index out of range"):
            cf.check_packing(model, batch)
        assert model.calls == 0

    def test_a_cache_hides_the_mask(self, batch):
        """With a cache, Transformers does not derive the mask from positions, which the check finds."""
        model = llama()
        model.config.use_cache = True

        with pytest.raises(ValueError, match="use_cache=False"):
            cf.check_packing(model, batch)

    @pytest.mark.parametrize("window", [4, LENGTH])
    @pytest.mark.parametrize(
        "kind", ["mistral", "mixtral", "qwen2", "gemma3_text", pytest.param("llama4_text", marks=FROM_5)]
    )
    def test_a_mask_that_replaces_a_sliding_window_raises(self, kind, window, batch):
        """Positions that start again keep the window in each document; a mask raises an error where rows are longer."""
        torch.manual_seed(0)
        model = windowed(kind, window).eval()
        cf.check_packing(model, batch, "position_ids")

        ids = batch["input_ids"][:1]
        with torch.no_grad():
            mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()[None, None]
            own, masked = model(input_ids=ids).logits, model(input_ids=ids, attention_mask=mask).logits
        assert torch.allclose(own, masked, atol=1e-5) == (window == LENGTH)

        raises = pytest.raises(ValueError, match=r"sliding window of 4 tokens .* the rows of 24 tokens")
        with contextlib.nullcontext() if window == LENGTH else raises:
            cf.check_packing(model, batch, "mask")

    @FROM_5
    @pytest.mark.parametrize("is_decoder", [False, True])
    def test_a_causal_mask_for_a_model_that_is_not_causal_raises(self, is_decoder, batch):
        """BERT attends to later tokens, unless it is a decoder, and a mask would make it causal."""
        torch.manual_seed(0)
        sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
        config = BertConfig(vocab_size=50, is_decoder=is_decoder, use_cache=False, initializer_range=0.3, **sizes)
        model = (BertLMHeadModel if is_decoder else BertForMaskedLM)(config)

        raises = pytest.raises(ValueError, match=r"must take position_ids, .* and be causal, but with output='mask'")
        with contextlib.nullcontext() if is_decoder else raises:
            cf.check_packing(model, batch, "mask")

    def test_rows_of_one_document_cannot_show_it(self):
        """A batch without two documents in a row raises an error."""
        with pytest.raises(ValueError, match="two documents in a row"):
            cf.check_packing(llama(), cf.collate_packed([cf.pack_documents([torch.arange(4)], 8)]))


class TestShorter:
    """Packed batches with shorter sequences."""

    @OUTPUTS
    @pytest.mark.parametrize("truncate", [True, False])
    def test_rows_stay_packed(self, truncate, output, batch):
        """Positions, lengths and masks of shortened rows are those of rows packed from the parts of documents."""
        shorter = cf.set_batch_sequence_length(batch, 7, truncate)

        rows = []
        for row, lengths in enumerate(batch["document_lengths"]):
            places = [*itertools.accumulate(lengths, initial=0)]
            for begin in [0] if truncate else range(0, LENGTH - LENGTH % 7, 7):
                cuts = [(max(begin, start), min(begin + 7, end)) for start, end in itertools.pairwise(places)]
                parts = [batch["input_ids"][row, start:end] for start, end in cuts if start < end]
                rows.append(cf.pack_documents(parts, 7) if parts else None)
        kept = [place for place, row in enumerate(rows) if row is not None]  # the others are padding only
        expected = cf.add_document_mask(cf.collate_packed([rows[place] for place in kept]), output)
        assert [shorter["document_lengths"][place] for place in kept] == expected["document_lengths"]
        assert sum(map(len, shorter["document_lengths"])) == sum(map(len, expected["document_lengths"]))
        shorter = cf.add_document_mask(shorter, output)
        assert torch.equal(shorter["input_ids"][kept], expected["input_ids"])
        assert torch.equal(shorter["position_ids"][kept], expected["position_ids"])
        if output == "mask":
            assert torch.equal(shorter["attention_mask"][kept], expected["attention_mask"])
        assert all(sizes == [] for place, sizes in enumerate(shorter["document_lengths"]) if place not in kept)

    def test_offsets_raise(self, batch):
        """A batch that has offsets of documents already cannot be shortened."""
        with pytest.raises(ValueError, match=r"must not have cu_seq_lens_q.*microbatch_transforms"):
            cf.set_batch_sequence_length(cf.add_document_mask(batch, "cu_seqlens"), 4)
