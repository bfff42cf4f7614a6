"""The check whether microbatches give the gradients of the batch."""

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, default_collate
from transformers import BertConfig, BertForMaskedLM, CLIPConfig, CLIPModel, MixtralConfig, MixtralForCausalLM

from composer.diagnostics import check_microbatches
from composer.models import ComposerClassifier, ComposerModel, HuggingFaceModel
from fixtures import make_loader, small_run

SIZES = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}


def classifier(*layers, **options):
    """Return a trainer of a small network for batches of eight."""
    torch.manual_seed(0)
    model = ComposerClassifier(nn.Sequential(nn.Linear(4, 8), *layers, nn.Linear(8, 3)), num_classes=3)
    return small_run(model=model, train_dataloader=make_loader(samples=16, batch_size=8), **options)


def of_transformers(network, samples, **options):
    """Return a trainer of a model of Transformers for one batch."""
    more = {"return_loss": True} if isinstance(network, CLIPModel) else {}
    loader = DataLoader(samples, len(samples), collate_fn=lambda samples: default_collate(samples) | more)
    options |= {"train_dataloader": loader, "max_duration": "1ba"}
    return small_run(model=HuggingFaceModel(network), **options)


def texts():
    """Return texts of which half are padded, so that means over samples and tokens differ."""
    ids = torch.randint(1, 50, (8, 12), generator=torch.Generator().manual_seed(0))
    labels = torch.where((torch.arange(12) >= 3) & (torch.arange(8) < 4)[:, None], -100, ids)
    return [{"input_ids": one, "labels": other} for one, other in zip(ids, labels, strict=True)]


def mixtral(**settings):
    """Return a mixture of experts whose balance has an own loss."""
    torch.manual_seed(0)
    routers = {"num_key_value_heads": 2, "num_local_experts": 4, "output_router_logits": True}
    return MixtralForCausalLM(MixtralConfig(vocab_size=50, **SIZES, **(routers | settings)))


def clip():
    """Return a model that compares texts and images, and pairs of these."""
    torch.manual_seed(0)
    text = {"vocab_size": 50, "max_position_embeddings": 12, "eos_token_id": 49, "bos_token_id": 0, "pad_token_id": 0}
    config = CLIPConfig(
        text_config=SIZES | text, vision_config=SIZES | {"image_size": 8, "patch_size": 4}, projection_dim=8
    )
    pairs = [{"input_ids": one["input_ids"], "pixel_values": torch.randn(3, 8, 8)} for one in texts()]
    return CLIPModel(config), pairs


class Averages(ComposerModel):
    """A mean over the elements that are not 0."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, batch):
        return self.layer(batch[0])

    def loss(self, outputs, batch):
        return functional.cross_entropy(outputs, torch.where(batch[1] == 0, -100, batch[1]))


class Counts(Averages):
    """It counts these elements."""

    def count_loss_terms(self, batch):
        return batch[1].ne(0).sum()


class Sums(Averages):
    """A sum over samples."""

    loss_is_sum = True

    def loss(self, outputs, batch):
        return functional.cross_entropy(outputs, batch[1], reduction="sum")


class TestTheSame:
    def test_dropout_is_left_out(self):
        """Microbatches without dropout have the gradients of the batch, also with an unequal one."""
        assert check_microbatches(classifier(nn.Dropout(0.5)), 3) < 1e-5

    def test_dropout_within_functions_is_left_out(self):
        """Attention and other functions that draw in training mode compute without dropout; labels are counted."""
        torch.manual_seed(0)
        network = BertForMaskedLM(BertConfig(vocab_size=50, **SIZES))
        assert check_microbatches(of_transformers(network, texts()), 3) < 1e-5

    @pytest.mark.parametrize("make", [Counts, Sums])
    def test_the_weights_are_those_of_the_trainer(self, make):
        """Counts and sums of a model have their weights."""
        assert check_microbatches(small_run(model=make()), 3) < 1e-5

    def test_a_mixture_of_experts_without_balance(self):
        """Without a loss of the routers the loss is a mean over labels."""
        trainer = of_transformers(mixtral(output_router_logits=False), texts(), device_train_microbatch_size=3)

        assert not trainer.state.model.loss_needs_whole_batch
        assert check_microbatches(trainer) < 1e-5
        trainer.fit()

    def test_the_run_does_not_change(self):
        """Weights, gradients, buffers, modes and generators are those before the check."""
        trainer = classifier(nn.BatchNorm1d(8), nn.Dropout(0.5))
        before = [tensor.clone() for tensor in trainer.state.model.state_dict().values()], torch.get_rng_state()

        with pytest.raises(ValueError, match="do not give the step"):
            check_microbatches(trainer)

        after = [*trainer.state.model.state_dict().values()]
        assert all(torch.equal(one, other) for one, other in zip(before[0], after, strict=True))
        assert torch.equal(torch.get_rng_state(), before[1])
        assert all(parameter.grad is None for parameter in trainer.state.model.parameters())


class TestOthers:
    def test_batch_norm(self):
        """The error names the size and a parameter."""
        with pytest.raises(ValueError, match=r"of 4 samples do not give the step of the batch of 8: the gradient of m"):
            check_microbatches(classifier(nn.BatchNorm1d(8)))

    def test_a_mean_that_is_not_counted(self):
        """A mean over other elements is not that of samples."""
        with pytest.raises(ValueError, match="count_loss_terms"):
            check_microbatches(small_run(model=Averages()), 3)

    @pytest.mark.parametrize("make", [lambda: (mixtral(router_aux_loss_coef=1.0), texts()), clip], ids=["MoE", "CLIP"])
    def test_models_of_transformers_warn(self, make):
        """The gradients of routers and contrastive losses differ, and a trainer warns before it splits a batch."""
        network, samples = make()
        trainer = of_transformers(network, samples, device_train_microbatch_size=4)

        with pytest.raises(ValueError, match="do not give the step of the batch"):
            check_microbatches(trainer)
        with pytest.warns(UserWarning, match="the loss of HuggingFaceModel is no mean over samples"):
            trainer.fit()

    def test_other_draws(self):
        """A model that draws otherwise cannot be compared."""

        class Noise(nn.Module):
            def forward(self, inputs):
                return inputs + torch.randn_like(inputs)

        with pytest.raises(ValueError, match="must not draw random numbers"):
            check_microbatches(classifier(Noise()))

    def test_wrong_arguments(self):
        """Errors name what is missing."""
        with pytest.raises(TypeError, match="must be a Trainer"):
            check_microbatches(nn.Linear(1, 1))
        with pytest.raises(ValueError, match="at least 1, got 0"):
            check_microbatches(classifier(), 0)
        with pytest.raises(ValueError, match="less than the 8 samples"):
            check_microbatches(classifier(), 8)
        with pytest.raises(ValueError, match="needs a train_dataloader"):
            check_microbatches(small_run(train_dataloader=None, max_duration=None))
