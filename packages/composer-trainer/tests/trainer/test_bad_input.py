"""Errors for invalid data, models, losses and schedules."""

import inspect
import re

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from composer.core import DataSpec, Evaluator
from composer.models import ComposerClassifier
from composer.trainer import Trainer
from fixtures import make_classifier, make_loader, small_run, trained


class WithLoss(ComposerClassifier):
    """A classifier whose loss is changed by a function."""

    def __init__(self, change):
        """With ``change(loss, outputs)``."""
        super().__init__(nn.Linear(4, 3), num_classes=3)
        self.change = change

    def loss(self, outputs, batch, *args):
        """Return the changed loss."""
        return self.change(super().loss(outputs, batch, *args), outputs)


class TestLoss:
    @pytest.mark.parametrize(
        ("change", "kind", "message"),
        [
            (lambda loss, outputs: outputs.sum(1), ValueError, r"loss of WithLoss must be one number.*\[4\]"),
            (lambda loss, outputs: {"a": outputs.sum(1)}, ValueError, r"loss of WithLoss must be one number.*\[4\]"),
            (lambda loss, outputs: loss.detach(), ValueError, "loss of WithLoss does not depend on any weight"),
            (lambda loss, outputs: torch.tensor(3), ValueError, "loss of WithLoss does not depend on any weight"),
            (lambda loss, outputs: None, TypeError, "loss must be a tensor.*got None"),
            (lambda loss, outputs: loss.item(), TypeError, "loss must be a tensor"),
            (lambda loss, outputs: {}, TypeError, "loss must be a tensor"),
        ],
    )
    def test_loss_without_gradient(self, change, kind, message):
        """A loss that is not a scalar, or does not depend on the weights, raises with the model's name."""
        trainer = small_run(model=WithLoss(change), max_duration="1ba")

        with pytest.raises(kind, match=message):
            trainer.fit()


class TestErrorsOfTheModel:
    @pytest.mark.parametrize(
        ("batch", "output"),
        [
            ((torch.zeros(4, 5), torch.zeros(4).long()), "(float32[4, 5], int64[4])"),
            (["a", "b"], "[str, str]"),
        ],
    )
    def test_in_training(self, batch, output):
        """An error of the forward pass has a note with the event, the model's class and the batch."""
        trainer = small_run(train_dataloader=[batch], max_duration="1ba")

        with pytest.raises((RuntimeError, TypeError)) as raised:
            trainer.fit()

        note = f"ComposerClassifier was called after the event 'before_forward', with the batch {output}."
        assert raised.value.__notes__ == [note]

    @pytest.mark.parametrize("dtype", [torch.float64, torch.uint8])
    @pytest.mark.parametrize(
        "layer", [nn.Linear(4, 3), nn.Sequential(nn.Unflatten(1, (1, 4)), nn.Conv1d(1, 3, 4), nn.Flatten())]
    )
    def test_other_dtypes(self, layer, dtype):
        """For inputs of another dtype than the parameters, a further note has theirs, and how to convert the inputs."""
        batch = torch.zeros(4, 4, dtype=dtype), torch.zeros(4).long()

        with pytest.raises(RuntimeError) as raised:
            small_run(network=layer, train_dataloader=[batch], max_duration="1ba").fit()

        shapes, advice = raised.value.__notes__
        assert f"({str(dtype).removeprefix('torch.')}[4, 4], int64[4])" in shapes
        assert re.match(r"The parameters of ComposerClassifier are float32\. Convert .* by x\.float\(\)", advice)

    def test_batch_of_one_sample(self):
        """An error of BatchNorm in the last batch, of one sample, has a note that names drop_last."""
        network = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))

        with pytest.raises(ValueError, match="more than 1 value per channel") as raised:
            trained(network=network, train_dataloader=make_loader(samples=9, batch_size=4))

        assert "drop_last=True" in raised.value.__notes__[1]

    def test_in_evaluation(self):
        """An evaluation during a training has its own batch in the note, once."""
        trainer = small_run(eval_dataloader=[(torch.zeros(4, 5), torch.zeros(4).long())], max_duration="1ep")

        with pytest.raises(RuntimeError) as raised:
            trainer.fit()

        (note,) = raised.value.__notes__
        assert "eval_forward was called after the event 'eval_before_forward'" in note
        assert "float32[4, 5]" in note


class TestMetrics:
    @pytest.mark.parametrize("metrics", [None, [], "accuracy"])
    @pytest.mark.parametrize("data", ["train_dataloader", "eval_dataloader"])
    def test_metrics_without_names_raise(self, metrics, data):
        """A model's metrics that are no dictionary raise with the method's name."""
        model = make_classifier()
        model.get_metrics = lambda is_train=False: metrics

        with pytest.raises(TypeError, match=r"ComposerClassifier.get_metrics must return a dictionary .* got"):
            small_run(**{"model": model, "train_dataloader": None, data: make_loader()})


class TestIgnoreKeys:
    @pytest.mark.parametrize("name", ["save_ignore_keys", "load_ignore_keys"])
    def test_invalid_keys_raise_before_training(self, tmp_path, name):
        """Ignored keys that are no strings raise at construction, not at the first save or load."""
        with pytest.raises(
            TypeError, match=rf"{name}\)? must be strings such as 'optimizers/\*', or a function, got 5"
        ):
            small_run(save_folder=str(tmp_path), **{name: 5})


def nothing_for(number):
    """Return a function that returns its input, but None for one call."""
    calls = iter(range(1000))
    return lambda batch: None if next(calls) == number else batch


def loaders_with_none():
    """Return loaders of several kinds whose batch 2 is None."""
    batch = torch.randn(4, 4), torch.randint(3, (4,))
    samples, collate = [(torch.randn(4), 1)] * 20, torch.utils.data.default_collate
    dropping = nothing_for(2)
    return {
        "list": [batch, batch, None, batch],
        "collate_fn": DataLoader(samples, batch_size=4, collate_fn=lambda samples: dropping(collate(samples))),
    }


class TestBatchesThatAreNone:
    """A batch that is None raises, and does not end the epoch."""

    @pytest.mark.parametrize("kind", loaders_with_none())
    def test_in_training(self, kind):
        """Training raises at the batch, after earlier ones."""
        trainer = small_run(train_dataloader=loaders_with_none()[kind], max_duration="8ba")

        with pytest.raises(ValueError, match=r"^train_dataloader returned None as batch 2 of the epoch"):
            trainer.fit()

        assert trainer.state.timestamp.batch == "2ba"

    @pytest.mark.parametrize("kind", loaders_with_none())
    def test_in_evaluation(self, kind):
        """The error has the evaluator's label."""
        evaluator = Evaluator(label="held out", dataloader=loaders_with_none()[kind])

        with pytest.raises(ValueError, match=r"^eval_dataloader 'held out' returned None as batch 2 of the epoch"):
            small_run(max_duration="1ep").eval(evaluator)

    @pytest.mark.parametrize(
        ("do", "whose"),
        [("fit", "train_dataloader"), ("eval", "eval_dataloader 'eval'"), ("predict", "dataloader")],
    )
    def test_in_transforms(self, do, whose):
        """A ``batch_transforms`` that returns nothing raises with its name."""
        spec = DataSpec(make_loader(), batch_transforms=nothing_for(2))
        trainer = small_run(max_duration="1ep", train_dataloader=spec)

        with pytest.raises(ValueError, match=f"^batch_transforms of {whose} returned None as batch 2 of"):
            getattr(trainer, do)(*[] if do == "fit" else [spec])


def flags(function):
    """Return the names of a function's Boolean arguments."""
    return [name for name, one in inspect.signature(function).parameters.items() if "bool" in str(one.annotation)]


class TestFlags:
    @pytest.mark.parametrize("name", flags(Trainer))
    @pytest.mark.parametrize("value", ["yes", "False", 1])
    def test_constructor_flags(self, name, value):
        """Every flag of the trainer rejects strings with its name."""
        with pytest.raises(TypeError, match=f"{name} must be True or False.*, got {value!r}"):
            small_run(**{name: value})


class TestArguments:
    @pytest.mark.parametrize(
        ("options", "kind", "message"),
        [
            ({"save_folder": 5}, TypeError, "save_folder must be a path or a URL, got 5"),
            ({"run_name": ""}, ValueError, "run_name must not be empty"),
            ({"run_name": 5}, TypeError, "run_name must be a string, got 5"),
            ({"train_dataloader_label": ""}, ValueError, "train_dataloader_label must not be empty"),
            ({"train_dataloader_label": 5}, TypeError, "train_dataloader_label must be a string, got 5"),
        ],
    )
    def test_strings_and_paths(self, options, kind, message):
        """A number or an empty string for a string parameter raises."""
        with pytest.raises(kind, match=message):
            small_run(**options)

    @pytest.mark.parametrize("second", [torch.optim.Adam, torch.optim.SGD])
    def test_shared_parameters_of_optimizers(self, second):
        """Two optimizers with common parameters raise."""
        model = make_classifier()
        both = [torch.optim.SGD(model.parameters(), lr=0.1), second(list(model.parameters())[1:2], lr=0.1)]

        with pytest.raises(ValueError, match=f"{second.__name__} holds 1 parameters that SGD holds, too"):
            small_run(model=model, optimizers=both)

    @pytest.mark.parametrize("label", ["train", "mine"])
    def test_evaluator_with_training_label(self, label):
        """Its metrics would have the names of the training metrics, wherever it is passed."""
        evaluator = Evaluator(label=label, dataloader=make_loader())
        options = {"train_dataloader_label": label, "max_duration": "1ep"}

        with pytest.raises(ValueError, match=f"must not have the label of the training data, got '{label}'"):
            small_run(eval_dataloader=evaluator, **options)
        with pytest.raises(ValueError, match=f"must not have the label of the training data, got '{label}'"):
            small_run(**options).fit(eval_dataloader=evaluator)
        with pytest.raises(ValueError, match=f"must not have the label of the training data, got '{label}'"):
            small_run(**options).eval(evaluator)


class TestWarnings:
    def test_microbatches_larger_than_the_batch(self):
        """A microbatch size that splits nothing gives one warning."""
        trainer = small_run(device_train_microbatch_size=8, max_duration="2ep")

        with pytest.warns(UserWarning, match="device_train_microbatch_size=8 is larger than the batch of 4") as caught:
            trainer.fit()

        assert len(caught) == 1

    @pytest.mark.parametrize("size", [4, 3, "auto", None])
    def test_microbatches_of_a_smaller_last_batch(self, size):
        """A last batch that is smaller than a microbatch gives no warning."""
        trainer = small_run(
            train_dataloader=make_loader(samples=5), device_train_microbatch_size=size, max_duration="1ep"
        )

        trainer.fit()

        assert trainer.state.timestamp.sample == 5
