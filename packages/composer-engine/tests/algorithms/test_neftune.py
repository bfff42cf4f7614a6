"""NEFTune in an engine."""

import pytest
import torch
from torch import nn

from composer import functional as cf
from composer.algorithms import NEFTune
from composer.core import Engine, Event, State

IDS = torch.arange(12).view(2, 6)
MASK = torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 0, 0, 0, 0]])


@pytest.fixture
def loop():
    """A model with an embedding, and an engine that has changed it."""
    model = nn.Sequential(nn.Embedding(12, 16))
    engine = Engine(State(model, rank_zero_seed=3), algorithms=NEFTune(alpha=2.0))
    engine.run_event(Event.INIT)
    return model, engine


class TestNEFTune:
    def test_each_forward_pass_has_new_noise(self, loop):
        """The noise of a batch is that of the kernel with the mask, another one for the next batch."""
        model, engine = loop
        outputs = []
        for _ in range(2):
            engine.state.batch = {"input_ids": IDS, "attention_mask": MASK}
            engine.run_event(Event.BEFORE_FORWARD)
            outputs.append(model(IDS) - model[0].weight[IDS])
            engine.state.timestamp = engine.state.timestamp.to_next_batch()

        sizes = 2.0 / (MASK.sum(1, keepdim=True) * 16).sqrt() * MASK
        assert all((one.abs() <= sizes[..., None] + 1e-6).all() for one in outputs)
        assert all((one.abs().amax(-1) > 0.5 * sizes).logical_or(MASK == 0).all() for one in outputs)
        assert not torch.equal(*outputs)

    @pytest.mark.parametrize("masks", [{}, {"attention_mask": torch.ones(2, 1, 6, 6, dtype=torch.bool).tril()}])
    def test_batch_without_mask(self, loop, masks):
        """Without a mask, or with one of pairs of tokens, as of packed documents, all tokens are real."""
        model, engine = loop
        engine.state.batch = {"input_ids": IDS, **masks}
        engine.run_event(Event.BEFORE_FORWARD)

        noise = model[0].noise
        assert torch.equal(model(IDS), model[0].weight[IDS] + noise)
        assert (noise.abs().amax(-1) > 0).all()

    def test_embedding_that_is_not_found_raises(self):
        """A model without an embedding raises at INIT."""
        engine = Engine(State(nn.Sequential(nn.Linear(4, 2))), algorithms=NEFTune())

        with pytest.raises(ValueError, match="embedding must be the name of a"):
            engine.run_event(Event.INIT)

    def test_layer_is_noisy(self, loop):
        """The embedding is replaced at INIT."""
        assert isinstance(loop[0][0], cf.NoisyEmbedding)


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")  # PEFT reads it
@pytest.mark.parametrize(
    "options",
    [{}, {"modules_to_save": ["embed_tokens"]}, {"trainable_token_indices": [1, 2]}],
    ids=["LoRA", "a trained copy", "trained rows"],
)
def test_embedding_within_peft(options):
    """Noise is added to an embedding that PEFT has wrapped, too, in training only; trained weights get gradients."""
    transformers, peft = pytest.importorskip("transformers"), pytest.importorskip("peft")
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    network = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=12, **sizes))
    model = peft.get_peft_model(network, peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"], **options))
    engine = Engine(State(model.train(), rank_zero_seed=3), algorithms=NEFTune(alpha=2.0))
    engine.run_event(Event.INIT)
    embedding, embedded = model.get_input_embeddings(), []
    embedding.register_forward_hook(lambda _, __, output: embedded.append(output))
    engine.state.batch = {"input_ids": IDS, "attention_mask": MASK}

    engine.run_event(Event.BEFORE_FORWARD)
    model(IDS, attention_mask=MASK, labels=IDS).loss.backward()
    model.eval()(IDS, attention_mask=MASK)

    noise = (embedded[0] - embedded[1]).detach()
    assert torch.equal((noise != 0).any(-1), MASK.bool())
    assert all(weight.grad is not None for weight in model.parameters() if weight.requires_grad)
