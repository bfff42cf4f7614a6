"""A run that trains adapters, and parts that no base model has, is resumed from a checkpoint of these alone."""

import pytest
import torch

from composer.algorithms import EMA, GatedAttention, GatedLinearUnits, QKNorm, ValueResidual
from composer.models import HuggingFaceModel
from fixtures import small_run

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

# PEFT asks Transformers by a former name whether activations are kept.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
ROWS = torch.arange(24).view(4, 6) % 9
SIZES = {"vocab_size": 9, "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 8}


def make_run(algorithm=None, seed=7, **options):
    """Return a trainer of a Llama with LoRA, or of BERT for gated linear units, that can be resumed."""
    torch.manual_seed(0)
    if isinstance(algorithm, GatedLinearUnits):
        config = transformers.BertConfig(**SIZES, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
        network, names = transformers.BertForMaskedLM(config), ["query", "output.dense"]
    else:
        network, names = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)), ["q_proj", "v_proj"]
    lora = peft.LoraConfig(r=2, target_modules=names)
    model = HuggingFaceModel(network, peft_config=lora)
    if algorithm is None:  # the program trains another layer, too
        model.model.get_output_embeddings().requires_grad_(True)
    batch = {"input_ids": ROWS, "labels": ROWS}
    return small_run(
        model=model,
        train_dataloader=[batch, {name: one.flip(0) for name, one in batch.items()}] * 2,
        optimizers=torch.optim.SGD([one for one in model.parameters() if one.requires_grad], lr=0.5, momentum=0.9),
        algorithms=[algorithm] if algorithm else [],
        max_duration="4ba",
        seed=seed,
        **options,
    )


@pytest.mark.filterwarnings("ignore:The run resumes from .* with other settings")  # another seed, for new layers
@pytest.mark.parametrize(
    "make", [QKNorm, GatedAttention, ValueResidual, GatedLinearUnits, lambda: None], ids=lambda make: make.__name__
)
def test_resume_is_exact(tmp_path, make):
    """Norms, gates and mixed values, and other trained layers, go on with their values, also those that are frozen."""
    expected = make_run(make(), save_folder=tmp_path, save_interval="2ba")
    expected.fit()
    [path] = tmp_path.glob("*-ba2")

    resumed = make_run(make(), seed=8, load_path=path)
    resumed.fit()

    assert int(resumed.state.timestamp.batch) == 4
    pairs = zip(expected.state.model.model.named_parameters(), resumed.state.model.model.parameters(), strict=True)
    assert [name for (name, one), other in pairs if not torch.equal(one, other)] == []
    saved = expected.state.model.state_dict()
    assert 0 < len(saved) < len(expected.state.model.model.state_dict())


def test_only_adapters_have_averages(tmp_path):
    """EMA averages and saves what is trained, and continues with it bit for bit."""
    expected = make_run(EMA("2ba"), save_folder=tmp_path, save_interval="2ba")
    expected.fit()
    [path] = tmp_path.glob("*-ba2")
    resumed = make_run(EMA("2ba"), load_path=path)
    resumed.fit()

    averages, others = (one.state.algorithms[0].state_dict()["averaged_weights"] for one in (expected, resumed))
    trained = {name for name, one in expected.state.model.named_parameters() if one.requires_grad}
    assert averages.keys() == others.keys()
    assert averages.keys() & dict(expected.state.model.named_parameters()).keys() == trained
    assert all(torch.equal(average, others[name]) for name, average in averages.items())
