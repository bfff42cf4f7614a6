"""Distillation: the loss of a student by a teacher's scores."""

import pytest
import torch
from torch.nn import functional as F

from composer import functional as cf
from composer.functional.training.distillation import soft_losses


@pytest.fixture
def logits():
    """Logits of a student and of a teacher, and class ids, for six samples of five classes in float64."""
    generator = torch.Generator().manual_seed(0)
    student, teacher = (2 * torch.randn(6, 5, dtype=torch.float64, generator=generator) for _ in range(2))
    return student.requires_grad_(), teacher.requires_grad_(), torch.randint(5, (6,), generator=generator)


def by_torch(student, teacher, targets, temperature, weight):
    """The loss as Hinton et al. state it, with torch's functions."""
    p = F.softmax(teacher / temperature, dim=1)
    log_q = F.log_softmax(student / temperature, dim=1)
    soft = F.kl_div(log_q, p, reduction="batchmean") * temperature**2
    return (1 - weight) * F.cross_entropy(student, targets) + weight * soft


class TestFormula:
    @pytest.mark.parametrize("temperature", [0.5, 1.0, 4.0])
    @pytest.mark.parametrize("weight", [0.0, 0.3, 1.0])
    def test_kl(self, logits, temperature, weight):
        """Loss and gradients are those of torch's functions in float64."""
        student, teacher, targets = logits
        expected = by_torch(student, teacher, targets, temperature, weight)

        loss = cf.distillation_loss(student, teacher, targets, temperature, weight)

        torch.testing.assert_close(loss, expected, rtol=1e-13, atol=1e-13)
        gradients = [torch.autograd.grad(one, student)[0] for one in (loss, expected)]
        torch.testing.assert_close(*gradients, rtol=1e-12, atol=1e-13)

    @pytest.mark.parametrize("shape", [(5, 1), (5, 1, 3, 2)])
    def test_one_logit_is_that_of_two_classes(self, shape):
        """The divergence of one logit is that of the Bernoulli distributions."""
        student, teacher = torch.randn(2, *shape, dtype=torch.float64)
        p, q = (torch.distributions.Bernoulli(logits=one.squeeze(1) / 2.0) for one in (teacher, student))

        losses = soft_losses(student, teacher, 2.0, "kl")

        torch.testing.assert_close(losses, 4 * torch.distributions.kl_divergence(p, q))

    def test_mse(self, logits):
        """The squared difference of the logits is that of torch, without a temperature."""
        student, teacher, targets = logits

        loss = cf.distillation_loss(student, teacher, targets, temperature=3.0, weight=0.7, kind="mse")

        expected = 0.3 * F.cross_entropy(student, targets) + 0.7 * F.mse_loss(student, teacher)
        torch.testing.assert_close(loss, expected)


class TestTargets:
    def test_ignored_targets(self, logits):
        """Ignored class ids count for neither loss."""
        student, teacher, targets = logits
        some = torch.tensor([0, 2, 3])
        ignored = torch.full_like(targets, -100)
        ignored[some] = targets[some]

        loss = cf.distillation_loss(student, teacher, ignored)

        torch.testing.assert_close(loss, cf.distillation_loss(student[some], teacher[some], targets[some]))
        assert cf.distillation_loss(student, teacher, torch.full_like(targets, -100)).isnan()

    def test_probabilities(self, logits):
        """Class probabilities give the loss of the ids that they encode, and rows of zeros do not count."""
        student, teacher, targets = logits
        encoded = cf.ensure_targets_one_hot(student, targets.index_fill(0, torch.tensor([1]), -100))
        some = torch.tensor([0, 2, 3, 4, 5])

        loss = cf.distillation_loss(student, teacher, encoded)

        torch.testing.assert_close(loss, cf.distillation_loss(student[some], teacher[some], targets[some]))

    def test_several_targets_per_sample(self):
        """Scores (N, C, H, W) are compared at each place."""
        student, teacher = torch.randn(2, 3, 4, 5), torch.randn(2, 3, 4, 5)
        targets = torch.randint(3, (2, 4, 5))
        rows = [one.movedim(1, -1).flatten(0, 2) for one in (student, teacher)]

        loss = cf.distillation_loss(student, teacher, targets)

        torch.testing.assert_close(loss, cf.distillation_loss(*rows, targets.flatten()))

    def test_bfloat16(self):
        """16-bit logits are compared in float32."""
        student, teacher = torch.randn(4, 3).bfloat16(), torch.randn(4, 3).bfloat16()
        targets = torch.tensor([0, 1, 2, 0])

        loss = cf.distillation_loss(student, teacher, targets)

        assert loss.dtype == torch.float32
        torch.testing.assert_close(loss, by_torch(student.float(), teacher.float(), targets, 4.0, 0.5))

    def test_other_classes_raise(self):
        """A teacher of other classes gives an error with both shapes."""
        with pytest.raises(ValueError, match=r"must have the shape .*\(2, 3\), got \(2, 4\)\. Choose a teacher of the"):
            cf.distillation_loss(torch.rand(2, 3), torch.rand(2, 4), torch.tensor([0, 1]))
