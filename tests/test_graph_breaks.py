"""The graphs that torch.compile makes of a language model with each method that changes its forward pass."""

import re
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader

import composer.algorithms as al
from composer import Trainer
from composer import functional as cf
from composer.core import pack_sequences
from composer.metrics import LanguageCrossEntropy
from composer.models import HuggingFaceModel

transformers = pytest.importorskip("transformers")

METHODS = {
    "none": lambda: None,
    "ActivationCheckpointing": al.ActivationCheckpointing,
    "Alibi": lambda: al.Alibi(16),
    "ChunkedCrossEntropy": lambda: al.ChunkedCrossEntropy(chunk_size=5, z_loss=1e-4),
    "GatedAttention": al.GatedAttention,
    "GatedLinearUnits": al.GatedLinearUnits,
    "GyroDropout": lambda: al.GyroDropout(sigma=4, tau=2),
    "LabelSmoothing": lambda: al.LabelSmoothing(0.1, target_key="labels"),
    "LowPrecisionLayerNorm": al.LowPrecisionLayerNorm,
    "NEFTune": al.NEFTune,
    "QKNorm": al.QKNorm,
    "ValueResidual": al.ValueResidual,
}
BREAKS = dict.fromkeys(METHODS, 0)
"""The breaks of the graph of the forward pass, which has the loss."""


pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # which dynamo reads


def trained(algorithms, backend=None, dropout=0.0, precision="fp32"):
    """Return the weights of GPT-2 after two batches."""
    torch.manual_seed(0)
    torch.compiler.reset()
    sizes = {"n_layer": 2, "n_embd": 16, "n_head": 2, "n_positions": 16, "vocab_size": 64}
    sizes |= {"bos_token_id": 0, "eos_token_id": 0} | dict.fromkeys(
        ("attn_pdrop", "embd_pdrop", "resid_pdrop"), dropout
    )
    network = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes))
    network.loss_type = "ForCausalLM"  # otherwise the model prints a warning, which is a break
    model = HuggingFaceModel(network, metrics=[LanguageCrossEntropy()])
    rows = [{"input_ids": ids, "labels": ids} for ids in torch.randint(64, (8, 8))]
    trainer = Trainer(
        model=model,
        train_dataloader=DataLoader(rows, batch_size=4),
        optimizers=torch.optim.SGD(model.parameters(), lr=0.1),
        algorithms=algorithms,
        max_duration="1ep",
        compile_config=backend and {"backend": backend},
        precision=precision,
        device="cpu",
        progress_bar=False,
    )
    trainer.fit()
    return [*model.parameters()]


@pytest.mark.parametrize("name", METHODS)
def test_breaks_of_a_language_model(name):
    """GPT-2 compiles to as many graphs more than one as the table states."""
    graphs = []

    trained(METHODS[name](), lambda graph, _: graphs.append(graph) or graph, 0.1, "amp_bf16")

    assert len(graphs) - 1 == BREAKS[name]


@pytest.mark.parametrize("names", [["ChunkedCrossEntropy"], ["ChunkedCrossEntropy", "LabelSmoothing"]])
def test_chunked_loss_of_a_compiled_model(names):
    """The weights are those without compilation, also with a metric and other labels, which use logits outside."""
    expected = trained([METHODS[name]() for name in names])

    weights = trained([METHODS[name]() for name in names], "aot_eager")

    torch.testing.assert_close(weights, expected)


GUIDE = Path(__file__).parents[1] / "docs/guides/train_a_language_model.md"


def made_by_the_guide(kind, config):
    """Return the model that the lines of the guide make of a class of Transformers and its configuration."""
    (code,) = re.findall(r"^```python\n((?:(?!```).)*?sdpa_without_mask.*?)^```$", GUIDE.read_text(), re.DOTALL | re.M)
    values = {"LlamaForCausalLM": kind, "config": config, "HuggingFaceModel": HuggingFaceModel, "tokenizer": None}
    exec(code, values)
    return values["model"]


def made_as_usual(kind, config):
    """Return a model with the attention that Transformers selects."""
    network = kind(config)
    network.loss_type = "ForCausalLM"
    return HuggingFaceModel(network, metrics=[])


def of_kind(kind, make):
    """Return a tiny language model with seeded weights."""
    torch.manual_seed(0)
    special = {"vocab_size": 64, "bos_token_id": 0, "eos_token_id": 0}
    if kind == "gpt2":
        sizes = {"n_layer": 2, "n_embd": 16, "n_head": 2, "n_positions": 32}
        sizes |= dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0)
        return make(transformers.GPT2LMHeadModel, transformers.GPT2Config(**sizes, **special))
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    return make(transformers.LlamaForCausalLM, transformers.LlamaConfig(**sizes, **special))


def attention_of(model, algorithms):
    """Train two steps, compiled; return the mask and ``is_causal`` of each attention in each graph, and the loss."""
    graphs = []

    def read(graph, _):
        found = [node for node in graph.graph.nodes if "scaled_dot_product" in str(node.target)]
        graphs.append([(node.kwargs["attn_mask"], node.kwargs["is_causal"]) for node in found])
        return graph

    torch.compiler.reset()
    rows = [{"input_ids": ids, "labels": ids} for ids in torch.randint(64, (8, 8))]
    trainer = Trainer(
        model=model,
        train_dataloader=DataLoader(rows, batch_size=4),
        optimizers=torch.optim.SGD(model.parameters(), lr=0.1),
        algorithms=algorithms,
        max_duration="1ep",
        compile_config={"backend": read},
        precision="amp_bf16",
        device="cpu",
        progress_bar=False,
    )
    trainer.fit()
    return graphs, trainer.state.total_loss


@pytest.mark.parametrize("algorithms", [None, al.ChunkedCrossEntropy], ids=["all logits", "in chunks"])
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_the_guide_has_attention_without_a_mask(kind, algorithms):
    """As flash attention needs it, in one graph; the loss is that with the mask that Transformers makes otherwise."""
    usual, expected = attention_of(of_kind(kind, made_as_usual), algorithms and algorithms())
    found, loss = attention_of(of_kind(kind, made_by_the_guide), algorithms and algorithms())

    assert found == [[(None, True)] * 2]
    # Once Transformers makes none, the guide needs these lines no longer.
    assert [(mask is None, is_causal) for mask, is_causal in usual[0]] == [(False, False)] * 2
    torch.testing.assert_close(loss, expected, rtol=5e-3, atol=0)


def test_packed_rows_without_a_mask_raise():
    """Documents would be mixed, which the first batch shows."""
    model = of_kind("llama", made_by_the_guide)
    packed = pack_sequences([torch.randint(64, (4,)) for _ in range(8)], length=8)
    loader = DataLoader(packed, batch_size=2, collate_fn=cf.collate_packed)
    trainer = Trainer(
        model=model,
        train_dataloader=loader,
        optimizers=torch.optim.SGD(model.parameters(), lr=0.1),
        max_duration="1ep",
        device="cpu",
        progress_bar=False,
    )

    with pytest.raises(ValueError, match="must not attend across documents"):
        trainer.fit()
