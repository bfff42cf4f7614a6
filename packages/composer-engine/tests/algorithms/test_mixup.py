"""MixUp: inputs of the model, targets of the loss for any batch format, and draws."""

from collections import namedtuple

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from composer.algorithms import MixUp
from composer.core import Algorithm, Event, Stage

Pair = namedtuple("Pair", ["images", "labels"])
Losses = namedtuple("Losses", ["whole", "half"])


def mixing_of(mixed):
    """Return the mixing weight and partner of each sample, inferred from a mixed identity matrix."""
    own = mixed.diagonal()
    partners = torch.where(own == 1, torch.arange(len(mixed)), (mixed - torch.diag(own)).argmax(1))
    return 1 - own.min(), partners


class TestSamples:
    def test_samples_are_blended_with_partners(self, watch, make_engine, step, batch):
        """The model receives each sample blended with another one, all with the same weight."""
        model = watch()

        step(make_engine(model, MixUp(alpha=5.0)), batch)

        mixing, partners = mixing_of(model.seen.inputs[0])
        expected = (1 - mixing) * batch[0] + mixing * batch[0][partners]
        assert 0 < mixing <= 0.5
        assert sorted(partners.tolist()) == list(range(8))
        assert torch.allclose(model.seen.inputs[0], expected)

    def test_loader_batch_is_not_modified(self, watch, make_engine, step, batch):
        """Neither the loader's tensors nor its batch are modified."""
        inputs, targets = batch[0].clone(), batch[1].clone()

        step(make_engine(watch(), MixUp(alpha=5.0)), batch)

        assert torch.equal(batch[0], inputs)
        assert torch.equal(batch[1], targets)

    def test_integer_images_raise(self, watch, make_engine, step, batch):
        """Integer images raise an error that states the reason."""
        with pytest.raises(TypeError, match="floating point"):
            step(make_engine(watch(), MixUp()), (batch[0].byte(), batch[1]))

    def test_a_loop_without_before_forward_raises(self, watch, make_engine, batch):
        """A custom loop that does not run the event at which samples are mixed gets an error that names it."""
        engine = make_engine(watch(), MixUp())
        engine.state.batch, engine.state.outputs = batch, torch.zeros(8, 8)

        with pytest.raises(RuntimeError, match=r'call engine.run_event\("before_forward"\)'):
            engine.run_event("before_loss")


class TestTargets:
    def test_class_ids(self, watch, make_engine, step, batch, one_hot):
        """The loss receives class ids blended like the samples, as probabilities."""
        model = watch()

        step(make_engine(model, MixUp(alpha=5.0)), batch)

        assert torch.allclose(model.seen.targets[0], model.seen.inputs[0] @ one_hot(batch[1]))

    @pytest.mark.parametrize("layers", [nn.Linear(8, 1), nn.Sequential(nn.Linear(8, 1), nn.Flatten(0))])
    def test_class_ids_of_one_score(self, watch, make_engine, step, batch, layers):
        """The error states what fits one score per sample."""
        with pytest.raises(ValueError, match=r"set interpolate_loss=True, .* two scores, as nn.Linear\(\.\.\., 2\)"):
            step(make_engine(watch(layers), MixUp()), (batch[0], batch[1] % 2))

    def test_targets_changed_by_other_algorithms(self, watch, make_engine, step, batch, one_hot):
        """Changes of other algorithms to the targets before the loss also apply to the partners' targets."""

        class NextClass(Algorithm):
            runs_at = {Event.BEFORE_LOSS: Stage.RESHAPE}

            def apply(self, event, state, logger):
                state.batch = (state.batch[0], (state.batch[1] + 1) % 3)

        model = watch()

        step(make_engine(model, MixUp(alpha=5.0), NextClass()), batch)

        assert torch.allclose(model.seen.targets[0], model.seen.inputs[0] @ one_hot((batch[1] + 1) % 3))


class TestInterpolateLoss:
    def test_blends_the_losses(self, watch, make_engine, step, batch):
        """The loss blends that of the labels and that of the partners' labels."""
        model = watch()

        state = step(make_engine(model, MixUp(alpha=5.0, interpolate_loss=True)), batch)

        mixing, partners = mixing_of(model.seen.inputs[0])
        outputs, ids = model.seen.outputs[0], batch[1]
        expected = (1 - mixing) * cross_entropy(outputs, ids) + mixing * cross_entropy(outputs, ids[partners])
        assert torch.allclose(state.loss, expected)

    def test_class_ids_stay_class_ids(self, watch, make_engine, step, batch):
        """The loss receives the batch's ids, then the partners'; afterwards the batch contains its own ids."""
        model = watch()

        state = step(make_engine(model, MixUp(alpha=5.0, interpolate_loss=True)), batch)

        _, partners = mixing_of(model.seen.inputs[0])
        assert torch.equal(model.seen.targets[0], batch[1])
        assert torch.equal(model.seen.targets[1], batch[1][partners])
        assert torch.equal(state.batch[1], batch[1])

    @pytest.mark.parametrize(
        "pack",
        [lambda a, b: {"whole": a, "half": b}, lambda a, b: [a, b], lambda a, b: (a, b), Losses],
        ids=["dict", "list", "tuple", "namedtuple"],
    )
    def test_several_losses(self, watch, make_engine, step, batch, pack):
        """Each of several losses is blended, and the container type is preserved."""

        def losses(outputs, targets):
            loss = cross_entropy(outputs, targets)
            return pack(loss, loss / 2)

        model = watch(loss=losses)

        state = step(make_engine(model, MixUp(alpha=5.0, interpolate_loss=True)), batch)

        mixing, partners = mixing_of(model.seen.inputs[0])
        own, partner = (losses(model.seen.outputs[0], ids) for ids in (batch[1], batch[1][partners]))
        names = own if isinstance(own, dict) else range(2)
        assert type(state.loss) is type(own)
        for name in names:
            assert torch.allclose(state.loss[name], (1 - mixing) * own[name] + mixing * partner[name])

    def test_uses_the_runs_precision(self, watch, make_engine, step, batch):
        """The partner's loss is computed in the run's precision."""
        formats = []

        def loss(outputs, targets):
            formats.append((outputs @ outputs.T).dtype)
            return cross_entropy(outputs, targets)

        step(make_engine(watch(loss=loss), MixUp(interpolate_loss=True), precision="amp_bf16"), batch)

        assert formats == [torch.float32, torch.bfloat16]  # the loop above calls its own loss without autocast


class TestBatchKeys:
    @pytest.mark.parametrize("interpolate", [False, True])
    @pytest.mark.parametrize(
        ("pack", "keys"),
        [
            (lambda x, y: (x, y), (0, 1)),
            (lambda x, y: [x, y], (0, 1)),
            (lambda x, y: (y, x), (1, 0)),
            (lambda x, y: {"x": x, "y": y}, ("x", "y")),
            (Pair, ("images", "labels")),
            (Pair, (0, 1)),
            (
                lambda x, y: {"data": (x, y)},
                (
                    (lambda b: b["data"][0], lambda b, x: {"data": (x, b["data"][1])}),
                    (lambda b: b["data"][1], lambda b, y: {"data": (b["data"][0], y)}),
                ),
            ),
        ],
        ids=["tuple", "list", "swapped", "dict", "namedtuple", "namedtuple by index", "functions"],
    )
    def test_keys_and_functions(self, watch, make_engine, step, batch, one_hot, soft_loss, pack, keys, interpolate):
        """Samples and labels are read and written by their keys, and the batch keeps its type."""
        model = watch(input=keys[0], target=keys[1])
        algorithm = MixUp(alpha=5.0, interpolate_loss=interpolate, input_key=keys[0], target_key=keys[1])

        state = step(make_engine(model, algorithm), pack(*batch))

        mixed = model.seen.inputs[0]
        assert type(state.batch) is type(pack(*batch))
        assert mixing_of(mixed)[0] > 0
        assert torch.allclose(state.loss, soft_loss(model.seen.outputs[0], mixed @ one_hot(batch[1])))
