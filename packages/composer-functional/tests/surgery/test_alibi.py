"""ALiBi applied to models of Transformers."""

from __future__ import annotations

import copy
import pickle
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
import torch
import transformers
from torch import nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertLMHeadModel,
    GPT2Config,
    GPT2LMHeadModel,
    GPT2Model,
    LlamaConfig,
    LlamaForCausalLM,
)

from composer import functional as cf

if TYPE_CHECKING:
    from collections.abc import Callable

HEADS = 4
WIDTH = 32
TRAINED = 16
"""The longest sequence that the plain models know."""

TOKENS = {"vocab_size": 50, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


def _gpt2(**settings: Any) -> GPT2LMHeadModel:
    sizes = {"n_positions": TRAINED, "n_embd": WIDTH, "n_layer": 2, "n_head": HEADS}
    return GPT2LMHeadModel(GPT2Config(**TOKENS, **sizes, **settings))


def _bert(**settings: Any) -> BertForMaskedLM:
    sizes = {"hidden_size": WIDTH, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": HEADS}
    return BertForMaskedLM(BertConfig(**TOKENS, **sizes, max_position_embeddings=TRAINED, **settings))


def _bert_decoder(**settings: Any) -> BertLMHeadModel:
    encoder = _bert(**settings).config
    encoder.is_decoder = True
    return BertLMHeadModel(encoder)


def _llama(**settings: Any) -> LlamaForCausalLM:
    sizes = {"hidden_size": WIDTH, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": HEADS}
    shared = {"num_key_value_heads": 2, "max_position_embeddings": TRAINED}
    return LlamaForCausalLM(LlamaConfig(**TOKENS, **sizes, **shared, **settings))


@dataclass(frozen=True)
class Family:
    """How to create a small model, and the names of the parts of its first attention."""

    make: Callable[..., Any]
    causal: bool
    replaced: str
    attentions: tuple[str, str]
    projection: str
    values: Callable[[Any, torch.Tensor], torch.Tensor]
    queries: Callable[[Any], list[torch.Tensor]]

    def attention(self, model: nn.Module) -> nn.Module:
        return model.get_submodule(self.attentions[0])


def _biased(*linears: nn.Linear) -> list[torch.Tensor]:
    return [tensor for linear in linears for tensor in (linear.weight, linear.bias) if tensor is not None]


FAMILIES = {
    "gpt2": Family(
        _gpt2,
        causal=True,
        replaced="transformer.wpe",
        attentions=("transformer.h.0.attn", "transformer.h.1.attn"),
        projection="transformer.h.0.attn.c_proj",
        values=lambda attention, hidden: attention.c_attn(hidden)[..., 2 * WIDTH :],
        queries=lambda attention: [attention.c_attn.weight[:, :WIDTH], attention.c_attn.bias[:WIDTH]],
    ),
    "bert": Family(
        _bert,
        causal=False,
        replaced="bert.embeddings.position_embeddings",
        attentions=("bert.encoder.layer.0.attention.self", "bert.encoder.layer.1.attention.self"),
        projection="bert.encoder.layer.0.attention.output.dense",
        values=lambda attention, hidden: attention.value(hidden),
        queries=lambda attention: _biased(attention.query),
    ),
    "llama": Family(
        _llama,
        causal=True,
        replaced="model.rotary_emb",
        attentions=("model.layers.0.self_attn", "model.layers.1.self_attn"),
        projection="model.layers.0.self_attn.o_proj",
        values=lambda attention, hidden: (
            attention.v_proj(hidden).unflatten(-1, (2, 1, WIDTH // HEADS)).expand(-1, -1, 2, 2, -1).flatten(2)
        ),
        queries=lambda attention: _biased(attention.q_proj),
    ),
}


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> Family:
    """Each family of models."""
    return FAMILIES[request.param]


@pytest.fixture(params=["gpt2", "llama"])
def decoder(request: pytest.FixtureRequest) -> Family:
    """Each family of generative models."""
    return FAMILIES[request.param]


@pytest.fixture(params=["eager", "sdpa"])
def implementation(request: pytest.FixtureRequest) -> str:
    """Each attention implementation with bias support."""
    return request.param


def _ids(count: int = 2, length: int = 12) -> torch.Tensor:
    return torch.randint(3, 50, (count, length))


def _padded(ids: torch.Tensor, count: int, *, left: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Pad the last sequence; return ids and mask."""
    ids, mask = ids.clone(), torch.ones_like(ids)
    place = slice(None, count) if left else slice(-count, None)
    ids[-1, place] = mask[-1, place] = 0
    return ids, mask


def _expected_probabilities(length: int, causal: bool) -> torch.Tensor:
    """``softmax(-slope * distance)`` for zero queries, element by element."""
    slopes = [2.0 ** (-2 * (head + 1)) for head in range(HEADS)]
    rows = torch.zeros(HEADS, length, length)
    for head, slope in enumerate(slopes):
        for i in range(length):
            called = i + 1 if causal else length
            rows[head, i, :called] = torch.tensor([-slope * abs(i - j) for j in range(called)]).softmax(0)
    return rows


class TestSlopes:
    @pytest.mark.parametrize("length", [12, 40])
    def test_zero_queries_give_softmax_of_bias(self, family: Family, implementation: str, length: int):
        """With zero queries attention is the softmax of slope times distance, at any length."""
        model = family.make(attn_implementation=implementation).eval()
        cf.apply_alibi(model, 64)
        attention = family.attention(model)
        called: dict[str, torch.Tensor] = {}
        attention.register_forward_pre_hook(
            lambda module, args, kwargs: called.update(hidden=args[0] if args else kwargs["hidden_states"]),
            with_kwargs=True,
        )
        model.get_submodule(family.projection).register_forward_pre_hook(
            lambda module, args: called.update(context=args[0])
        )

        with torch.no_grad():
            for tensor in family.queries(attention):
                tensor.zero_()
            model(_ids(length=length))
            values = family.values(attention, called["hidden"]).unflatten(-1, (HEADS, -1)).transpose(1, 2)

        expected = (_expected_probabilities(length, family.causal) @ values).transpose(1, 2).flatten(2)
        torch.testing.assert_close(called["context"], expected)

    def test_eager_probabilities_match_the_formula(self, family: Family):
        """The probabilities of eager attention match the formula in every layer."""
        model = family.make(attn_implementation="eager").eval()
        cf.apply_alibi(model, 64)

        with torch.no_grad():
            for path in family.attentions:
                for tensor in family.queries(model.get_submodule(path)):
                    tensor.zero_()
            attentions = model(_ids(), output_attentions=True).attentions

        assert len(attentions) == 2
        for probabilities in attentions:
            expected = _expected_probabilities(12, family.causal).expand(2, -1, -1, -1)
            torch.testing.assert_close(probabilities, expected)

    def test_any_number_of_heads(self):
        """Six heads have the slopes of four, and two of eight in between."""
        model = GPT2Model(GPT2Config(**TOKENS, n_embd=24, n_layer=1, n_head=6, attn_implementation="eager")).eval()
        cf.apply_alibi(model, 64)

        with torch.no_grad():
            model.h[0].attn.c_attn.weight[:, :24] = 0
            probabilities = model(_ids(1, 2), output_attentions=True).attentions[0]

        ratio = (probabilities[0, :, 1, 1] / probabilities[0, :, 1, 0]).log()
        torch.testing.assert_close(ratio, torch.tensor([2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8, 2.0**-1, 2.0**-3]))


class TestPositions:
    def test_report(self, family: Family):
        """The report has the embedding and each self-attention."""
        report = cf.apply_alibi(family.make(), 64)

        assert [entry.paths for entry in report] == [(family.replaced,), *((path,) for path in family.attentions)]
        assert all(entry.new == f"{entry.old} (ALiBi)" for entry in list(report)[1:])

    def test_position_embeddings_are_removed(self, family: Family):
        """A constant sequence gives the same output at each position."""
        model = family.make().eval()
        cf.apply_alibi(model, 64)

        logits = model(torch.full((1, 9), 7)).logits

        torch.testing.assert_close(logits, logits[:, :1].expand_as(logits))

    def test_longer_sequences(self, family: Family, implementation: str):
        """Outputs do not depend on later tokens, for any sequence length."""
        model = family.make(attn_implementation=implementation).eval()
        cf.apply_alibi(model, 2 * TRAINED)
        ids = _ids(1, 3 * TRAINED)

        # GPT-2 of Transformers 4 stores its causal mask for its maximum length.
        stored = hasattr(family.attention(model), "masked_bias") and implementation == "eager"
        ids = ids[:, : 2 * TRAINED] if stored else ids
        logits = model(ids).logits

        assert logits.shape == (1, ids.shape[1], 50)
        assert logits.isfinite().all()
        if family.causal:
            torch.testing.assert_close(logits[:, :10], model(ids[:, :10]).logits)


class TestMasks:
    def test_implementations_agree(self, family: Family):
        """Eager and SDPA attention agree, with and without padding."""
        models = []
        for name in ("eager", "sdpa"):
            torch.manual_seed(5)
            models.append(family.make(attn_implementation=name).eval())
            cf.apply_alibi(models[-1], 64)
        ids, mask = _padded(_ids(), 4, left=False)

        with torch.no_grad():
            plain = [model(ids).logits for model in models]
            padded = [model(ids, attention_mask=mask).logits[mask.bool()] for model in models]

        torch.testing.assert_close(*plain)
        torch.testing.assert_close(*padded)

    @pytest.mark.parametrize("left", [True, False])
    def test_padding_has_no_effect(self, family: Family, implementation: str, left: bool):
        """A padded sequence gives the same outputs as alone, for left and right padding."""
        model = family.make(attn_implementation=implementation).eval()
        cf.apply_alibi(model, 64)
        ids, mask = _padded(_ids(), 4, left=left)

        with torch.no_grad():
            padded = model(ids, attention_mask=mask).logits
            alone = model(ids[1:][mask[1:].bool()][None]).logits

        assert padded.isfinite().all()
        torch.testing.assert_close(padded[1][mask[1].bool()], alone[0])

    def test_packed_sequences_are_separate(self, decoder: Family, implementation: str):
        """Restarting positions separate sequences, as in Transformers."""
        model = decoder.make(attn_implementation=implementation).eval()
        cf.apply_alibi(model, 64)
        ids = _ids(1, 10)
        positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4, 5]])

        with torch.no_grad():
            packed = model(ids, position_ids=positions, use_cache=False).logits
            apart = torch.cat([model(ids[:, :4]).logits, model(ids[:, 4:]).logits], 1)

        torch.testing.assert_close(packed, apart)

    def test_cross_attention_is_unchanged(self):
        """Cross attention has no distances."""
        for make, path in ((_gpt2, "transformer.h.0.crossattention"), (_bert, "bert.encoder.layer.0.crossattention")):
            model = make(add_cross_attention=True, is_decoder=True).eval()

            report = cf.apply_alibi(model, 64)
            out = model(_ids(), encoder_hidden_states=torch.randn(2, 20, WIDTH)).logits

            assert not any("crossattention" in path for entry in report for path in entry.paths)
            assert not any(isinstance(each, cf.AlibiBias) for each in model.get_submodule(path).modules())
            assert out.isfinite().all()

    def test_bert_decoder_is_causal(self, implementation: str):
        """Later tokens do not change earlier outputs."""
        model = _bert(is_decoder=True, attn_implementation=implementation).eval()
        cf.apply_alibi(model, 64)
        ids = _ids()

        torch.testing.assert_close(model(ids).logits[:, :5], model(ids[:, :5]).logits)


class TestGeneration:
    @pytest.mark.parametrize("kind", ["dynamic", "static"])
    def test_cache_does_not_change_tokens(self, decoder: Family, implementation: str, kind: str):
        """With a dynamic or static cache the same tokens are generated, beyond the trained length."""
        model = decoder.make(attn_implementation=implementation).eval()
        cf.apply_alibi(model, 64)
        ids, mask = _padded(_ids(2, 8), 3, left=True)
        settings = {"attention_mask": mask, "max_new_tokens": 24, "do_sample": False, "eos_token_id": None}

        without = model.generate(ids, use_cache=False, **settings)
        static = {"cache_implementation": "static"} if kind == "static" else {}
        with_cache = model.generate(ids, use_cache=True, **static, **settings)

        assert without.shape == (2, 32)
        assert torch.equal(without, with_cache)

    @pytest.mark.parametrize("name", ["gpt2", "llama", "bert"])
    def test_cached_logits(self, name: str, implementation: str):
        """Several tokens after a cache give the logits of one complete pass, also with BERT as a decoder."""
        make = _bert_decoder if name == "bert" else FAMILIES[name].make
        model = make(attn_implementation=implementation).eval()
        cf.apply_alibi(model, 64)
        ids = _ids(2, 30)

        with torch.no_grad():
            first = model(ids[:, :11], use_cache=True)
            cache = "cache" if "cache" in first else "past_key_values"  # renamed in Transformers 5.24
            second = model(ids[:, 11:], **{cache: first[cache]})
            complete = model(ids).logits

        torch.testing.assert_close(torch.cat([first.logits, second.logits], 1), complete)


class TestTraining:
    def test_other_parts_are_unchanged(self, family: Family):
        """Names, parameters, modes and hooks do not change, except for position embeddings."""
        model = family.make().eval()
        names = [name for name in model.state_dict() if not name.startswith(family.replaced)]
        called: list[str] = []
        family.attention(model).register_forward_hook(lambda *_: called.append("attention"))
        model.get_submodule(family.replaced).register_forward_hook(lambda *_: called.append("positions"))
        first = next(model.parameters()).requires_grad_(False)

        cf.apply_alibi(model, 64)
        model(_ids())

        assert list(model.state_dict()) == names
        assert next(model.parameters()) is first
        assert not first.requires_grad
        assert not any(module.training for module in model.modules())
        assert called == ["positions", "attention"]

    @pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
    def test_dtypes(self, family: Family, implementation: str, dtype: torch.dtype, device: torch.device):
        """Models of every dtype run with padding, and return that dtype."""
        model = family.make(attn_implementation=implementation).to(device=device, dtype=dtype).eval()
        cf.apply_alibi(model, 64)
        ids, mask = (each.to(device) for each in _padded(_ids(2, 20), 4, left=True))

        logits = model(ids, attention_mask=mask).logits

        assert logits.dtype == dtype
        assert logits.isfinite().all()

    def test_gradient_checkpointing(self, family: Family):
        """Recomputed layers add the bias again."""
        model = family.make().double().train()
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
            if hasattr(module, "dropout_prob"):
                module.dropout_prob = 0.0
        cf.apply_alibi(model, 64)
        ids = _ids()
        gradients = []

        for turn in (False, True):
            if turn:
                # Its name since Transformers 5.
                enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
                enable({"use_reentrant": False})
            model.zero_grad()
            model(ids, **({"use_cache": False} if family.causal else {})).logits.square().mean().backward()
            gradients.append([parameter.grad.clone() for parameter in model.parameters()])

        torch.testing.assert_close(*gradients)

    def test_copies(self, family: Family):
        """A copied or pickled model has its own biases."""
        model = family.make().eval()
        cf.apply_alibi(model, 64)
        ids = _ids(2, 30)

        copies = copy.deepcopy(model), pickle.loads(pickle.dumps(model))

        for each in copies:
            assert family.attention(each).alibi is not family.attention(model).alibi
            assert torch.equal(each(ids).logits, model(ids).logits)


class TestTools:
    # torch 2.7 warns so about what it does itself under vmap, by which Transformers 4 makes masks.
    @pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
    def test_compiles_to_one_graph(self, family: Family):
        """The model compiles to one graph."""
        model = family.make(attn_implementation="sdpa").eval()
        cf.apply_alibi(model, 64)
        ids = _ids()
        settings = {"use_cache": False} if family.causal else {}

        with torch.no_grad():
            compiled = torch.compile(model, fullgraph=True, backend="eager")(ids, **settings).logits
            torch.testing.assert_close(compiled, model(ids, **settings).logits)

    # torch 2.7 warns so about constants.
    @pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node:UserWarning")
    @pytest.mark.filterwarnings("ignore:Node bert_lifted_tensor:UserWarning")
    def test_exports(self, family: Family):
        """The model can be exported, for sequences longer than in training."""
        if family.causal and int(transformers.__version__.partition(".")[0]) < 5:
            pytest.skip("Transformers 4 makes causal masks by what torch 2.7 cannot export, with ALiBi or without")
        model = family.make(attn_implementation="sdpa").eval()
        cf.apply_alibi(model, 64)
        settings = {"use_cache": False} if family.causal else {}

        with torch.no_grad():
            exported = torch.export.export(model, (_ids(2, 40),), settings, strict=False).module()
            ids = _ids(2, 40)

            torch.testing.assert_close(exported(ids, **settings).logits, model(ids, **settings).logits)


class TestErrors:
    def test_unknown_architecture_raises(self):
        """The error lists the supported architectures and the alternative."""
        model = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, batch_first=True), 1)

        with pytest.raises(ValueError, match=r"GPT-2, BERT, Llama .*, got a TransformerEncoder .*alibi_attention"):
            cf.apply_alibi(model, 64)

    @pytest.mark.parametrize("late", [True, False])
    def test_flash_attention_raises(self, decoder: Family, late: bool):
        """A kernel without bias support raises, selected before or after surgery."""
        model = decoder.make()
        if late:
            cf.apply_alibi(model, 64)
        model.config._attn_implementation = "flash_attention_2"

        with pytest.raises(ValueError, match=r'"eager" or "sdpa" for ALiBi, got \'flash_attention_2\''):
            model(_ids()) if late else cf.apply_alibi(model, 64)

        assert late or not any(isinstance(module, cf.AlibiBias) for module in model.modules())
