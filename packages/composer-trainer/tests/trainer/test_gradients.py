"""The gradients of a batch: precision, draws of several computations in a step, and microbatches that fit in memory."""

import functools

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from composer.algorithms import SAM, LabelSmoothing, MixUp
from composer.core import Callback, DataSpec
from composer.loggers import InMemoryLogger
from composer.loss import DiceLoss
from composer.models import (
    ComposerClassifier,
    ComposerModel,
    ComposerMultiTask,
    ComposerRegressor,
    ComposerSegmenter,
)
from composer.trainer.gradients import split_microbatches
from fixtures import make_classifier, make_loader, small_run, weights


class TestPrecision:
    def test_bf16_computes_in_bf16_and_keeps_weights_in_fp32(self):
        """Autocast covers the forward pass; weights stay in float32."""
        recorded = []

        class Observer(Callback):
            def after_forward(self, state, logger):
                recorded.append(state.outputs.dtype)

        trainer = small_run(precision="amp_bf16", callbacks=Observer(), max_duration="1ba")

        trainer.fit()

        assert recorded == [torch.bfloat16]
        assert {parameter.dtype for parameter in trainer.state.model.parameters()} == {torch.float32}

    def test_fp16_scales_the_loss_and_trains(self):
        """The loss is scaled, gradients are unscaled before algorithms run, and weights change."""
        sizes = []

        class Observer(Callback):
            def after_train_batch(self, state, logger):
                sizes.append(max(parameter.grad.abs().max().item() for parameter in state.model.parameters()))

        trainer = small_run(precision="amp_fp16", callbacks=Observer(), max_duration="1ba")
        before = weights(trainer)

        trainer.fit()

        assert trainer.state.scaler.get_scale() > 1
        assert sizes[0] < 10
        assert not torch.equal(before, weights(trainer))


def test_recomputed_batch_has_equal_draws():
    """A batch that an optimizer computes several times has equal draws, and its samples are counted once."""
    draws, counted = [], []

    class Draw(Callback):
        def before_forward(self, state, logger):
            draws.append(torch.rand((), generator=state.generator(self)).item())

        def batch_end(self, state, logger):
            counted.append(int(state.train_metrics["MulticlassAccuracy"]._update_count))

    model = make_classifier()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)

    small_run(model=model, optimizers=optimizer, callbacks=Draw(), max_duration="1ba").fit()

    assert len(draws) > 1
    assert len(set(draws)) == 1
    assert counted == [1]


class TestSAM:
    """SAM computes a step's gradients twice: at the weights, and at the worst weights nearby."""

    def test_dropout_is_equal_in_both_passes(self):
        """If both passes have equal weights, dropout gives equal outputs."""
        outputs = []

        class Note(Callback):
            def after_forward(self, state, logger):
                outputs.append(state.outputs.detach().clone())

        model = make_classifier()
        model.module.append(nn.Dropout(0.5))

        small_run(model=model, algorithms=SAM(rho=1e-30), callbacks=Note(), max_duration="2ba").fit()

        assert len(outputs) == 4
        assert torch.equal(outputs[0], outputs[1])
        assert torch.equal(outputs[2], outputs[3])
        assert not torch.equal(outputs[0] == 0, outputs[2] == 0)


class Tokens(ComposerModel):
    """Predicts a number for each token; the loss is the mean over the tokens that are not padding."""

    def __init__(self):
        """In float64, so that only rounding is left."""
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(10, 3, dtype=torch.float64)

    def forward(self, batch):
        """Return a score for each token."""
        return self.embedding(batch["input_ids"])

    def loss(self, outputs, batch):
        """Return the mean over tokens that are not 0."""
        ids = batch["input_ids"].flatten()
        return functional.cross_entropy(outputs.flatten(0, 1), torch.where(ids == 0, -100, ids % 3))


WEIGHT = torch.tensor([0.001, 0.3, 0.01])


class TestLossesWithWeights:
    @pytest.mark.parametrize(
        ("loss_fn", "soft"),
        [
            (nn.CrossEntropyLoss(weight=WEIGHT), False),
            (nn.CrossEntropyLoss(weight=WEIGHT), True),
            (nn.CrossEntropyLoss(ignore_index=1), False),
            (functools.partial(functional.cross_entropy, weight=WEIGHT, ignore_index=2), False),
            (nn.BCEWithLogitsLoss(weight=WEIGHT, pos_weight=WEIGHT), True),
        ],
    )
    @pytest.mark.parametrize("algorithms", [[], [LabelSmoothing(0.1)]])
    def test_microbatches_take_the_same_step(self, loss_fn, soft, algorithms):
        """Weights after an epoch and logged losses are those without microbatches."""
        generator = torch.Generator().manual_seed(1)
        inputs, labels = torch.randn(24, 4, generator=generator), torch.randint(3, (24,), generator=generator)
        targets = functional.one_hot(labels, 3).float() if soft else labels
        batches = list(DataLoader(TensorDataset(inputs, targets), batch_size=8))

        runs = []
        for size in (None, 3):
            log = InMemoryLogger()
            options = {"train_dataloader": batches, "device_train_microbatch_size": size, "loggers": log}
            model = make_classifier(loss_fn=loss_fn, train_metrics=[])
            trainer = small_run(model=model, algorithms=algorithms, max_duration="1ep", **options)
            trainer.fit()
            runs.append((weights(trainer), [float(loss) for _, loss in log.data["loss/train/total"]]))

        torch.testing.assert_close(*runs, rtol=1e-5, atol=1e-6)


class TestBlendedLabels:
    @pytest.mark.parametrize("size", [None, 3])
    @pytest.mark.parametrize(
        "loss_fn",
        [
            nn.CrossEntropyLoss(weight=WEIGHT.double(), label_smoothing=0.1),
            nn.CrossEntropyLoss(ignore_index=1),
            functools.partial(functional.cross_entropy, weight=WEIGHT.double(), ignore_index=0),
        ],
    )
    def test_blended_ids_have_the_blended_loss(self, loss_fn, size):
        """MixUp blends labels with the same step as losses, whose means are over the labels before they are blended."""
        generator = torch.Generator().manual_seed(1)
        inputs, labels = torch.randn(24, 4, generator=generator), torch.randint(3, (24,), generator=generator)
        batches = list(DataLoader(TensorDataset(inputs.double(), labels), batch_size=8))

        runs = []
        for blends_losses in (False, True):
            model = make_classifier(loss_fn=loss_fn, train_metrics=[]).double()
            algorithms = [MixUp(0.5, interpolate_loss=blends_losses)]
            options = {"train_dataloader": batches, "device_train_microbatch_size": size, "max_duration": "1ep"}
            trainer = small_run(model=model, algorithms=algorithms, **options)
            trainer.fit()
            runs.append(weights(trainer))

        torch.testing.assert_close(*runs, rtol=1e-12, atol=1e-12)


class Pairs(Tokens):
    """A contrastive loss: each sample is compared with all others of the batch."""

    loss_needs_whole_batch = True

    def loss(self, outputs, batch):
        """Return the cross entropy of the similarities of two parts of each sample."""
        first, second = outputs[:, 0], outputs[:, 1]
        return functional.cross_entropy(first @ second.T, torch.arange(len(first)))


class TestLossesOfWholeBatches:
    BATCH = {"input_ids": torch.randint(10, (8, 2), generator=torch.Generator().manual_seed(0))}

    @pytest.mark.parametrize(
        ("make", "reason"),
        [
            (Pairs, "the loss of Pairs is no mean over samples"),
            (lambda: make_classifier(loss_fn=DiceLoss(softmax=True, batch=True)), "the loss of ComposerClassifier"),
            (lambda: ComposerClassifier(nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)), num_classes=3), "1 of its"),
        ],
    )
    def test_a_warning_before_they_are_split(self, make, reason):
        """A number is taken, with one warning; complete batches are trained without."""
        batches = [self.BATCH] * 2 if make is Pairs else list(make_loader(samples=16, batch_size=8))
        for size in (8, None):
            small_run(
                model=make(), train_dataloader=batches, device_train_microbatch_size=size, max_duration="2ba"
            ).fit()

        with pytest.warns(UserWarning, match=rf"microbatch_size=4 does not give the step .* {reason}") as warned:
            small_run(model=make(), train_dataloader=batches, device_train_microbatch_size=4, max_duration="2ba").fit()
        assert len(warned) == 1

    def test_normalization_that_does_not_train_is_split(self):
        """A frozen layer in evaluation mode normalizes by its buffers, so that microbatches are the same step."""
        model = ComposerClassifier(nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)), num_classes=3)
        model.module[1].eval().requires_grad_(False)

        assert small_run(model=model, device_train_microbatch_size=1, max_duration="1ba").fit().steps == 1


class TestIgnoredTargets:
    """Microbatches of 2 of a batch in which targets of some samples are ignored."""

    INPUT = torch.randn(8, 3, 4, 4, generator=torch.Generator().manual_seed(2))

    def after(self, make_model, targets, size):
        torch.manual_seed(0)
        model = make_model()
        options = {"train_dataloader": [(self.INPUT, targets)], "device_train_microbatch_size": size}
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        trainer = small_run(model=model, optimizers=optimizer, max_duration="1ba", **options)
        loss = trainer.fit().metrics["loss/train/total"]
        return loss, weights(trainer)

    @pytest.mark.parametrize(
        ("classes", "loss_fn", "is_ids"),
        [
            (1, DiceLoss(softmax=True), True),
            (1, DiceLoss(sigmoid=True), True),
            (2, DiceLoss(sigmoid=True), True),
            (2, DiceLoss(softmax=True), False),
        ],
    )
    def test_dice_of_samples_without_a_pixel(self, classes, loss_fn, is_ids):
        """A sample whose pixels are all ignored does not count in the mean, of a batch and of microbatches."""
        masks = (self.INPUT[:, 0] > 0).long()
        masks[:3] = masks[5, :2] = -1
        targets = masks if is_ids else torch.stack([masks == 0, masks == 1], dim=1).float()

        def make_model():
            return ComposerSegmenter(nn.Conv2d(3, classes, 3, padding=1), loss_fn=loss_fn)

        whole, parts = (self.after(make_model, targets, size) for size in (None, 2))

        torch.testing.assert_close(parts, whole)
        model = make_model()
        scores = model(self.INPUT)
        torch.testing.assert_close(
            model.loss(scores, (self.INPUT, targets)), model.loss(scores[3:], (self.INPUT[3:], targets[3:]))
        )

    @pytest.mark.parametrize("reduction", ["mean", "sum"])
    def test_several_tasks(self, reduction):
        """A task with ignored targets is warned of once; of sums, microbatches give the step of the batch."""
        targets = {"age": torch.arange(8.0), "kind": torch.tensor([0, 1, -100, -100, 2, 0, -100, 1])}

        def make_model():
            tasks = {
                "age": ComposerRegressor(nn.Linear(48, 1), loss_fn=nn.MSELoss(reduction=reduction)),
                "kind": ComposerClassifier(nn.Linear(48, 3), loss_fn=nn.CrossEntropyLoss(reduction=reduction)),
            }
            return ComposerMultiTask(nn.Flatten(), tasks, weights={"age": 1e-3})

        whole = self.after(make_model, targets, None)
        if reduction == "mean":
            with pytest.warns(UserWarning, match="task 'kind' is no mean over samples") as warned:
                self.after(make_model, targets, 2)
            assert len(warned) == 1
        else:
            torch.testing.assert_close(self.after(make_model, targets, 2), whole)


class TestSums:
    @pytest.mark.parametrize("size", [3, 1])
    def test_a_model_that_sums_its_losses(self, size):
        """The sums of microbatches are added, also by their parts."""

        class Sums(Tokens):
            loss_is_sum = True

            def loss(self, outputs, batch):
                return {"a": outputs.square().sum(), "b": outputs.abs().sum()}

        ids = torch.randint(10, (8, 5), generator=torch.Generator().manual_seed(1))
        runs = []
        for each in (None, size):
            model = Sums()
            options = {"train_dataloader": [{"input_ids": ids}], "device_train_microbatch_size": each}
            trainer = small_run(model=model, optimizers=torch.optim.SGD(model.parameters(), lr=0.01), **options)
            runs.append((trainer.fit(duration="2ba").metrics["loss/train/total"], model.embedding.weight.detach()))

        torch.testing.assert_close(*runs, rtol=1e-12, atol=1e-12)


class TestByTokens:
    @pytest.mark.parametrize("count", [int, lambda number: {"total": 5, "loss_generating": int(number)}])
    def test_weighted_by_tokens(self, count):
        """Weighted by the tokens of the loss, microbatches give the complete batch's gradients, for any padding."""
        generator = torch.Generator().manual_seed(1)
        ids = torch.randint(1, 10, (6, 5), generator=generator)
        ids[0, 1:] = ids[1, 2:] = 0

        def after(size, by_tokens):
            model = Tokens()
            spec = {
                "dataloader": [{"input_ids": ids}],
                "get_num_tokens_in_batch": lambda batch: count((batch["input_ids"] != 0).sum()),
            }
            trainer = small_run(
                model=model,
                train_dataloader=spec,
                optimizers=torch.optim.SGD(model.parameters(), lr=1.0),
                device_train_microbatch_size=size,
                accumulate_train_batch_on_tokens=by_tokens,
                max_duration="1ba",
            )
            trainer.fit()
            return model.embedding.weight.detach()

        torch.testing.assert_close(after(2, True), after(None, False), rtol=1e-12, atol=1e-12)
        assert (after(2, False) - after(None, False)).abs().max() > 1e-3

    def test_no_token_of_the_loss(self, monkeypatch):
        """A share whose labels are all ignored is split by its samples; without any token, one process raises."""
        spec = DataSpec([], get_num_tokens_in_batch=lambda batch: {"total": len(batch), "loss_generating": 0})

        found = split_microbatches(torch.zeros(5, 2), spec, 2, spec.get_num_loss_tokens_in_batch)

        assert [weight for _, weight in found] == [0.4, 0.4, 0.2]
        with pytest.raises(ValueError, match="a batch has no token"):
            split_microbatches(torch.zeros(5, 2), DataSpec([]), 2, lambda batch: 0)
        monkeypatch.setenv("WORLD_SIZE", "2")  # the other one may have tokens
        assert len(split_microbatches(torch.zeros(5, 2), DataSpec([]), 2, lambda batch: 0)) == 3
