"""The graphs that torch.compile makes of a language model with each method that changes its forward pass."""

import pytest
import torch
from torch.utils.data import DataLoader

import composer.algorithms as al
from composer import Trainer
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
