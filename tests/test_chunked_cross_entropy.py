"""ChunkedCrossEntropy in the Trainer and in Transformers' Trainer: the loss of a language model and of a classifier."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from composer.algorithms import ChunkedCrossEntropy, LabelSmoothing, MixUp, SelectiveBackprop
from composer.models import ComposerClassifier, HuggingFaceModel
from fixtures import trained, weights
from fixtures.models import make_transformer


def texts():
    """Return twelve texts with different numbers of labels that count."""
    ids = torch.randint(32, (12, 16), generator=torch.Generator().manual_seed(0))
    labels = ids.clone()
    for index, row in enumerate(labels):
        row[index : index + index % 5] = -100
    return [{"input_ids": one, "labels": label} for one, label in zip(ids, labels, strict=True)]


def language_model():
    torch.manual_seed(0)
    model = make_transformer("gpt2").double()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model


def end_of_language_model(*algorithms, size=None):
    """Return the weights after six steps in float64."""
    model = HuggingFaceModel(language_model())
    options = {
        "train_dataloader": DataLoader(texts(), batch_size=4),
        "optimizers": torch.optim.SGD(model.parameters(), lr=0.1),
        "device_train_microbatch_size": size,
    }
    return weights(trained(model=model, algorithms=list(algorithms), max_duration="2ep", seed=1, **options))


def end_of_classifier(*algorithms):
    """Return the weights after six steps in float64."""
    torch.manual_seed(0)
    model = ComposerClassifier(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 5)).double(), num_classes=5)
    data = [(torch.rand(4).double(), torch.tensor(index % 5)) for index in range(12)]
    options = {
        "train_dataloader": DataLoader(data, batch_size=4),
        "optimizers": torch.optim.SGD(model.parameters(), lr=0.1),
    }
    return weights(trained(model=model, algorithms=list(algorithms), max_duration="2ep", seed=1, **options))


class TestTrainer:
    @pytest.mark.parametrize("others", [(), (LabelSmoothing(0.1, target_key="labels"),)], ids=["alone", "smoothed"])
    def test_language_model(self, others):
        """A language model has the weights of the usual head, also with smoothed labels."""
        changed = end_of_language_model(ChunkedCrossEntropy(chunk_size=5), *others)

        # The usual loss is computed in float32.
        torch.testing.assert_close(changed, end_of_language_model(*others), rtol=1e-5, atol=1e-7)

    @pytest.mark.parametrize("others", [(), (LabelSmoothing(0.1, target_key="labels"),)], ids=["alone", "smoothed"])
    def test_microbatches(self, others):
        """Microbatches with different numbers of tokens that count give the weights of complete batches."""
        ends = [
            end_of_language_model(ChunkedCrossEntropy(chunk_size=5, z_loss=0.1, softcap=3.0), *others, size=size)
            for size in (3, None)
        ]

        torch.testing.assert_close(*ends, rtol=1e-5, atol=1e-8)  # GPT-2 computes parts in float32

    @pytest.mark.parametrize(
        "make",
        [
            lambda: LabelSmoothing(0.1),
            MixUp,
            lambda: MixUp(interpolate_loss=True),
            lambda: SelectiveBackprop(start=0.0),
        ],
        ids=["LabelSmoothing", "MixUp", "MixUp of losses", "SelectiveBackprop"],
    )
    def test_with_other_algorithms(self, make):
        """Smoothed and mixed labels and losses of samples are computed in chunks, with the same weights."""
        changed = end_of_classifier(ChunkedCrossEntropy("module.2", chunk_size=3), make())

        torch.testing.assert_close(changed, end_of_classifier(make()), rtol=1e-9, atol=1e-12)

    def test_head_that_is_not_found_raises_at_construction(self):
        """A model without a head that can be found raises when the Trainer is constructed."""
        with pytest.raises(ValueError, match="head must be the name of a plain"):
            end_of_classifier(ChunkedCrossEntropy())


@pytest.mark.parametrize("others", [(), (LabelSmoothing(0.1, target_key="labels"),)], ids=["alone", "smoothed"])
def test_transformers_trainer(tmp_path, others):
    """In Transformers' Trainer, with accumulation, the weights are those of the usual head."""
    from transformers import TrainingArguments

    from composer.integrations.transformers import ComposerTrainer

    def end(*algorithms):
        arguments = TrainingArguments(
            str(tmp_path),
            max_steps=3,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=2,
            learning_rate=0.01,
            optim="sgd",
            use_cpu=True,
            report_to=[],
            save_strategy="no",
        )
        model = language_model().float()
        trainer = ComposerTrainer(model=model, args=arguments, train_dataset=texts(), algorithms=algorithms)
        trainer.train()
        return nn.utils.parameters_to_vector(model.parameters())

    changed = end(ChunkedCrossEntropy(chunk_size=5), *others)

    torch.testing.assert_close(changed, end(*others), rtol=1e-4, atol=1e-6)
    assert not torch.equal(changed, nn.utils.parameters_to_vector(language_model().float().parameters()))
