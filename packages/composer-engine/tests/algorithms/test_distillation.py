"""Distillation: the loss of a teacher beside the model's own."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from composer import functional as cf
from composer.algorithms import Distillation, MixUp
from fixtures.models import make_transformer

SAMPLES, CLASSES = 8, 3


def make_teacher(classes=CLASSES):
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(SAMPLES, 4), nn.Dropout(0.5), nn.Linear(4, classes))


class TestLoss:
    def test_formula(self, make_engine, watch, batch, step):
        """The loss of a step is that of the kernel, with the teacher in evaluation mode, and moves the model by it."""
        teacher, model = make_teacher().train(), watch()
        engine = make_engine(model, Distillation(teacher, temperature=2.0, weight=0.8))
        with torch.no_grad():
            expected = cf.distillation_loss(model(batch), copy.deepcopy(teacher).eval()(batch[0]), batch[1], 2.0, 0.8)

        state = step(engine, batch)

        torch.testing.assert_close(state.loss, expected)
        assert not teacher.training
        assert all(parameter.grad is None for parameter in teacher.parameters())

    @pytest.mark.parametrize("losses", ["total", "dictionary", "list"])
    def test_several_losses(self, make_engine, watch, batch, step, losses):
        """Of several losses each is scaled, and that of the teacher is one more of them."""
        make = {
            "total": lambda one: {"total": 3 * one, "part": one},
            "dictionary": lambda one: {"first": one, "second": 2 * one},
            "list": lambda one: [one, 2 * one],
        }[losses]
        model, teacher = watch(loss=lambda outputs, targets: make(F.cross_entropy(outputs, targets))), make_teacher()
        engine = make_engine(model, Distillation(teacher, weight=0.25))
        with torch.no_grad():
            outputs = model(batch)
            hard, soft = (cf.distillation_loss(outputs, teacher.eval()(batch[0]), batch[1], weight=w) for w in (0, 1))

        loss = step(engine, batch).loss

        parts = list(loss.values()) if isinstance(loss, dict) else loss
        total = loss["total"] if losses == "total" else sum(parts)
        torch.testing.assert_close(total, 0.75 * 3 * hard + 0.25 * soft)
        torch.testing.assert_close(parts[2], 0.25 * soft)

    def test_ignored_labels(self, make_engine, watch, step):
        """Samples with an ignored label count for neither loss."""
        model, teacher = watch(), make_teacher()
        inputs, labels = torch.randn(4, SAMPLES), torch.tensor([0, -100, 2, -100])
        engine = make_engine(model, Distillation(teacher))
        with torch.no_grad():
            expected = cf.distillation_loss(model((inputs, labels)), teacher.eval()(inputs), labels)

        torch.testing.assert_close(step(engine, (inputs, labels)).loss, expected)


class TestFeatures:
    def test_formula(self, make_engine, watch, batch, step):
        """The mean squared difference of the outputs of both modules is added, and no hooks remain."""
        teacher = make_teacher()
        layers = nn.Sequential(nn.Linear(SAMPLES, 4), nn.ReLU(), nn.Linear(4, CLASSES))
        model = watch(layers)
        engine = make_engine(model, Distillation(teacher, weight=0.0, features={"layers.0": "0"}, feature_weight=3.0))
        with torch.no_grad():
            hard = F.cross_entropy(layers(batch[0]), batch[1])
            expected = hard + 3 * F.mse_loss(layers[0](batch[0]), teacher[0](batch[0]))

        loss = step(engine, batch).loss

        torch.testing.assert_close(loss, expected)
        assert not any(module._forward_hooks for one in (model, teacher) for module in one.modules())

    def test_unknown_names_raise(self, make_engine, watch):
        """A name that the model or the teacher does not have raises an error at the start."""
        for features in ({"layers.7": "0"}, {"layers": "7"}):
            with pytest.raises(ValueError, match=r"features must name modules, got '.*7', which .* does not have"):
                make_engine(watch(), Distillation(make_teacher(), features=features))

    def test_other_shapes_raise(self, make_engine, watch, batch, step):
        """Features of other shapes raise an error that has both."""
        engine = make_engine(watch(), Distillation(make_teacher(), features={"layers": "0"}))

        with pytest.raises(ValueError, match=r"equal shapes, got \(8, 3\) of 'layers' and \(8, 4\) of the teacher"):
            step(engine, batch)


class TestTeacher:
    def test_other_classes_raise(self, make_engine, watch, batch, step):
        """A teacher of other classes raises an error at the first batch."""
        engine = make_engine(watch(), Distillation(make_teacher(classes=5)))

        with pytest.raises(
            ValueError, match=r"must have the shape .*\(8, 3\), got \(8, 5\). Choose a teacher of the same"
        ):
            step(engine, batch)

    def test_shared_parameters_raise(self, make_engine, watch):
        """The model itself cannot be its teacher."""
        model = watch()

        with pytest.raises(ValueError, match=r"must not share parameters .*: pass copy\.deepcopy\(model\)"):
            make_engine(model, Distillation(model))

    def test_it_is_not_saved(self):
        """Neither the state nor the settings contain weights."""
        algorithm = Distillation(make_teacher())

        assert algorithm.state_dict() == {}
        assert repr(algorithm).startswith("Distillation(teacher=<Sequential>, temperature=4.0")

    def test_language_models(self, make_engine):
        """Of language models, positions count whose next token is not ignored, and the gradients are the loss's."""
        student, teacher = make_transformer("gpt2"), make_transformer("gpt2")
        for parameter in teacher.parameters():
            nn.init.normal_(parameter, std=0.1)
        ids = torch.randint(32, (2, 8))
        batch = {"input_ids": ids, "labels": ids.masked_fill(torch.arange(8) < 5, -100)}
        engine = make_engine(student.eval(), Distillation(teacher, weight=1.0, temperature=1.0))
        engine.state.batch, engine.state.outputs = batch, student(ids)
        engine.state.loss = torch.zeros(())

        engine.run_event("after_forward")
        engine.run_event("after_loss")

        log_q, log_p = (one(ids).logits[:, 4:7].flatten(0, 1).log_softmax(1) for one in (student, teacher))
        expected = F.kl_div(log_q, log_p.detach(), log_target=True, reduction="batchmean")
        torch.testing.assert_close(engine.state.loss, expected)
        weight = student.get_input_embeddings().weight
        torch.testing.assert_close(*(torch.autograd.grad(loss, weight)[0] for loss in (engine.state.loss, expected)))


@pytest.mark.parametrize("order", [1, -1])
def test_with_blended_losses(make_engine, watch, batch, step, order):
    """Beside MixUp of losses, at any place in the list, the teacher's loss has its weight, for the mixed samples."""
    teacher, model = make_teacher().eval(), watch()
    algorithms = [Distillation(teacher, weight=0.5), MixUp(interpolate_loss=True)][::order]
    engine = make_engine(model, *algorithms)

    loss = step(engine, batch).loss

    (mixed,), (scores,) = model.seen.inputs, {id(one): one for one in model.seen.outputs[:1]}.values()
    hard = [F.cross_entropy(scores, targets) for targets in model.seen.targets]
    soft = cf.distillation_loss(scores, teacher(mixed).detach(), batch[1], weight=1.0)
    part = mixed[0, 0]  # the part of the first sample of the first one
    torch.testing.assert_close(loss, 0.5 * (part * hard[0] + (1 - part) * hard[1]) + 0.5 * soft)
