"""The data to train on: endless loaders, and models without weights to train."""

import pytest
import torch
from torch import nn

from composer.core import DataSpec
from composer.models import ComposerClassifier
from composer.trainer import Trainer
from fixtures import make_classifier, make_loader, small_run


class TestNothingToTrain:
    def test_frozen_model(self):
        """A model without trainable weights raises when the trainer is created."""
        with pytest.raises(ValueError, match=r"model has nothing to train: .*all of its 4 parameters are frozen"):
            small_run(model=make_classifier().requires_grad_(requires_grad=False))

    def test_evaluation_without_weights(self):
        """A model without parameters can be evaluated, without a warning on optimizers."""
        model = ComposerClassifier(nn.Identity(), num_classes=3)
        batch = (torch.eye(3), torch.arange(3))

        with Trainer(model=model, eval_dataloader=[batch], device="cpu", progress_bar=False) as trainer:
            results = trainer.eval()

        assert results["eval"]["MulticlassAccuracy"] == 1


class Counting:
    """A transform that counts batches, and saves how many."""

    def __init__(self):
        self.count = 0

    def __call__(self, batch):
        self.count += 1
        return batch

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state):
        self.count = state["count"]


class TestOtherTransforms:
    def test_state_of_the_transforms_in_use_is_saved(self, tmp_path):
        """If the same loader is given to fit() with other transforms, their state is saved, and not that of former."""
        loader, path = make_loader(), str(tmp_path / "one")
        trainer = small_run(train_dataloader=DataSpec(loader, batch_transforms=Counting()))
        trainer.fit(duration="1ba")
        trainer.fit(train_dataloader=DataSpec(loader, batch_transforms=Counting()), duration="2ba")
        trainer.save_checkpoint(path)

        resumed = Counting()
        data = DataSpec(make_loader(), batch_transforms=resumed)
        small_run(train_dataloader=data, load_path=path).fit(duration="1ba")

        assert resumed.count == 3


@pytest.mark.parametrize("model", ["gpt2", nn.Linear(2, 2)])
def test_models_without_a_loss_raise(model):
    """The error names the wrappers, also that for a model or a name of Transformers."""
    with pytest.raises(TypeError, match=r"ComposerClassifier and a model of Transformers in HuggingFaceModel"):
        Trainer(model=model)


def test_data_that_are_rejected_change_nothing():
    """After new data are rejected, fit trains on the data before."""
    trainer = small_run(max_duration="2ba")
    before = trainer.state.train_dataloader

    with pytest.raises(ValueError, match="train_dataloader has no batches"):
        trainer.fit(train_dataloader=[])

    assert trainer.state.train_dataloader is before
    assert trainer.fit().steps == 2
    assert trainer.state.train_dataloader is before
