"""The learning rate range test: its steps, its result, and that nothing stays changed."""

import math
import random

import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from composer.diagnostics import LRSearch, find_lr
from composer.models import ComposerClassifier
from composer.optim import DecoupledSGDW
from fixtures import make_classifier, make_loader, small_run


class Noisy(nn.Module):
    """A network with everything that a step changes: buffers, global draws, and a generator of its own."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 3))
        self.generator = torch.Generator().manual_seed(3)

    def forward(self, inputs):
        noise = torch.randn(inputs.shape, generator=self.generator)
        return self.layers(inputs + 0.01 * noise) * (1 + 0.01 * random.random() + 0.01 * np.random.rand())  # noqa: NPY002  (the global generator)


def make_noisy(make_optimizer, **options):
    """Return a trainer of the noisy network with shuffled data."""
    torch.manual_seed(0)
    model = ComposerClassifier(Noisy(), num_classes=3)
    inputs = torch.randn(40, 4)
    data = TensorDataset(inputs, inputs[:, :3].argmax(dim=1))
    return small_run(
        model=model,
        train_dataloader=DataLoader(data, batch_size=4, shuffle=True),
        optimizers=make_optimizer(model.parameters()),
        **{"max_duration": "2ep", **options},
    )


def everything(trainer):
    """Return all that a step may change, as plain lists and bytes that can be compared."""
    state, model = trainer.state, trainer.state.model
    return {
        "weights": {name: tensor.clone().numpy().tobytes() for name, tensor in model.state_dict().items()},
        "gradients": [None if one.grad is None else one.grad.numpy().tobytes() for one in model.parameters()],
        "modes": [module.training for module in model.modules()],
        "optimizers": repr([optimizer.state_dict() for optimizer in state.optimizers]),
        "generators": [
            torch.get_rng_state().tolist(),
            random.getstate(),
            np.random.get_state()[1].tolist(),  # noqa: NPY002
            model.module.generator.get_state().tolist(),
        ],
        "clock": state.timestamp,
    }


OPTIMIZERS = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "Adam with a tensor as its rate": lambda parameters: torch.optim.Adam(
        parameters, lr=torch.tensor(0.01), capturable=False, foreach=False
    ),
    "decoupled": lambda parameters: DecoupledSGDW(parameters, lr=0.1, weight_decay=1e-4),
    "LBFGS": lambda parameters: torch.optim.LBFGS(parameters, lr=0.1, max_iter=2),
}


class TestNothingStaysChanged:
    @pytest.mark.parametrize("make_optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
    @pytest.mark.parametrize("trained", [0, 7])
    def test_state_is_bit_identical(self, make_optimizer, trained):
        """Weights, buffers, gradients, optimizers, generators and the clock are those of before, also mid-epoch."""
        trainer = make_noisy(make_optimizer)
        if trained:
            trainer.fit(duration=f"{trained}ba")
        before = everything(trainer)

        find_lr(trainer, num_batches=15)

        after = everything(trainer)
        assert {name for name in before if before[name] != after[name]} == set()

    def test_training_is_bit_identical(self):
        """A run with a search before and in the middle of it computes the weights of a run without one."""
        weights = []
        for searches in (False, True):
            trainer = make_noisy(OPTIMIZERS["SGD"])  # which seeds the global generators
            for duration in ("7ba", "6ba"):
                if searches:
                    find_lr(trainer, num_batches=15)
                trainer.fit(duration=duration)
            weights.append(everything(trainer)["weights"])

        assert weights[0] == weights[1]

    def test_error_restores_everything(self):
        """An error of the model in a step leaves weights and optimizers as they were."""
        trainer = make_noisy(OPTIMIZERS["SGD"])
        model, before, calls = trainer.state.model, everything(trainer), []
        loss = model.loss

        def failing(outputs, batch):
            calls.append(1)
            if len(calls) == 4:
                raise RuntimeError("on purpose")
            return loss(outputs, batch)

        model.loss = failing
        with pytest.raises(RuntimeError, match="on purpose"):
            find_lr(trainer, num_batches=15)
        del model.loss

        assert everything(trainer) == before


class TestSearch:
    def test_losses_are_those_of_a_plain_loop(self):
        """The losses equal those of a plain loop over the same batches, with rates in proportion in each group."""

        def make():
            model = make_classifier()
            first, *_, last = model.module
            groups = [{"params": first.parameters(), "lr": 0.1}, {"params": last.parameters(), "lr": 0.02}]
            return model, torch.optim.SGD(groups, lr=0.1)

        data = list(make_loader())
        model, optimizer = make()
        expected = []
        for lr, (inputs, targets) in zip(np.geomspace(1e-3, 1.0, 5), data, strict=True):
            for group, part in zip(optimizer.param_groups, (1.0, 0.2), strict=True):
                group["lr"] = lr * part
            loss = nn.functional.cross_entropy(model.module(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            expected.append(loss.item())
        model, optimizer = make()

        search = find_lr(
            small_run(model=model, optimizers=optimizer, train_dataloader=data),
            start_lr=1e-3,
            end_lr=1.0,
            num_batches=5,
            stop_factor=100.0,
        )

        assert search.losses == pytest.approx(expected)

    @pytest.mark.parametrize("kind", ["counted", "summed"])
    def test_microbatches_of_other_losses(self, kind):
        """Losses that are a mean over labels, or a sum, have the weights of a training."""
        inputs, labels = torch.randn(8, 4), torch.tensor([0, 1, 2, -100, -100, -100, 1, -100])
        losses = []
        for size in (None, 3):
            torch.manual_seed(0)
            loss_fn = torch.nn.CrossEntropyLoss(reduction="sum" if kind == "summed" else "mean")
            trainer = small_run(
                model=make_classifier(loss_fn=loss_fn, train_metrics=[]),
                train_dataloader=[(inputs, labels)],
                device_train_microbatch_size=size,
            )
            losses.append(find_lr(trainer, num_batches=4, end_lr=0.1).losses)

        assert losses[1] == pytest.approx(losses[0], rel=1e-4)

    def test_ends_where_the_loss_explodes(self):
        """Steps end when the loss is several times the lowest; no loss that is infinite or NaN is in the result."""
        search = find_lr(small_run(), end_lr=1e9, num_batches=60)

        assert len(search.losses) < 60
        assert all(map(math.isfinite, search.losses))

    def test_suggestion_trains(self):
        """A training with the suggested rate reduces the loss more than one with a hundredth of it."""
        final = {}
        lr = find_lr(small_run(), num_batches=60).suggestion
        for rate in (lr, lr / 100):
            model = make_classifier()
            optimizer = torch.optim.SGD(model.parameters(), lr=rate)
            result = small_run(model=model, optimizers=optimizer, max_duration="10ep").fit()
            final[rate] = result.metrics["loss/train/total"]

        assert final[lr] < 0.9 * final[lr / 100]


class TestResult:
    def test_suggestion(self):
        """Smoothed, the losses are 2, 2, 1.97, 1.77, 1.4, 1.05, 0.87, 1.57 and 1.93: the fifth is below the middle."""
        losses = (2.0, 2.0, 2.0, 1.9, 1.4, 0.9, 0.85, 0.85, 3.0)

        search = LRSearch(tuple(10.0**n for n in range(-9, 0)), losses)

        assert search.suggestion == 1e-5

    @pytest.mark.parametrize("losses", [(), (1.0,), (1.0, 2.0, 3.0, 4.0)])
    def test_no_suggestion(self, losses):
        """Losses that never decrease suggest nothing."""
        assert LRSearch((0.1, 0.2, 0.3, 0.4)[: len(losses)], losses).suggestion is None

    def test_plot(self):
        """The plot has both curves on a logarithmic axis, and a line at the suggestion."""
        search = find_lr(small_run(train_dataloader=make_loader(batch_size=20)), num_batches=30)

        ax = search.plot(plt.figure().gca())

        assert ax.get_xscale() == "log"
        assert [len(line.get_xdata()) for line in ax.lines[:2]] == [len(search.lrs)] * 2
        assert [line.get_xdata()[0] for line in ax.lines[2:]] == [search.suggestion]
        plt.close(ax.figure)


class TestBadInput:
    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"start_lr": 0.0}, "start_lr must be more than 0"),
            ({"start_lr": 1.0, "end_lr": 0.1}, "end_lr must be more than 1.0"),
            ({"num_batches": 1}, "num_batches must be at least 2, got 1"),
            ({"stop_factor": 0.5}, "stop_factor must lie in"),
            ({"lr": 0.5}, "unexpected keyword argument 'lr'"),
        ],
    )
    def test_arguments(self, options, message):
        """Each argument out of range raises an error with its name."""
        with pytest.raises((TypeError, ValueError), match=message):
            find_lr(small_run(), **options)

    def test_data_that_can_be_read_once(self):
        """An iterator raises, as its batches would be missing in the training."""
        with pytest.raises(ValueError, match="that can be iterated over again, got an iterator"):
            find_lr(small_run(train_dataloader=iter(list(make_loader()))))

    def test_first_loss_is_not_finite(self):
        """A first loss that is NaN raises."""
        with pytest.raises(ValueError, match="the loss of the first batch is not a finite number"):
            find_lr(small_run(train_dataloader=[(torch.full((4, 4), math.nan), torch.zeros(4, dtype=torch.long))]))
