"""Selective backprop compared with sorted losses, and that the extra pass has no side effects."""

from __future__ import annotations

import copy
import math
from collections import UserDict
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, interpolate, mse_loss

from composer import functional as cf


class _Known(nn.Module):
    """A model that returns its input, so that the targets determine the losses."""

    def forward(self, input: Tensor) -> Tensor:
        return input


def _network() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Dropout(0.5), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 5)
    )


def _batch(size: int = 8) -> tuple[Tensor, Tensor]:
    return torch.randn(size, 3, 8, 8), torch.randint(5, (size,))


def _losses(values: list[float]) -> tuple[Tensor, Tensor]:
    """Numbered samples and targets with these squared errors."""
    numbers = torch.arange(len(values), dtype=torch.float64)[:, None]
    return numbers, numbers + torch.tensor(values, dtype=torch.float64).sqrt()[:, None]


class TestShouldSelectiveBackprop:
    @pytest.mark.parametrize(
        ("duration", "expected"), [(0.0, False), (0.49, False), (0.5, True), (0.89, True), (0.9, False), (1.0, False)]
    )
    def test_runs_between_start_and_end(self, duration: float, expected: bool):
        """The start is included, the end is not."""
        assert cf.should_selective_backprop(duration, batch_idx=0) is expected

    @pytest.mark.parametrize(
        ("interrupt", "expected"),
        [(0, [True] * 6), (1, [False] * 6), (2, [True, False] * 3), (3, [True, True, False] * 2)],
    )
    def test_interrupt_keeps_complete_batches(self, interrupt: int, expected: list[bool]):
        """Every `interrupt`-th batch is not pruned."""
        chosen = [cf.should_selective_backprop(0.6, index, interrupt=interrupt) for index in range(6)]

        assert chosen == expected


class TestSelection:
    @pytest.mark.parametrize(
        ("keep", "expected"),
        [(0.5, [1, 3]), (0.25, [3]), (0.75, [1, 3, 4]), (0.01, [3]), (1.0, [0, 1, 2, 3, 4]), (0.6, [1, 3, 4])],
    )
    def test_worked_example(self, keep: float, expected: list[int]):
        """The samples with the highest losses are selected in order, at least one."""
        numbers, targets = _losses([1.0, 5.0, 0.5, 9.0, 2.0])

        chosen, chosen_targets = cf.select_using_loss(numbers, targets, _Known(), mse_loss, keep=keep)

        assert chosen.flatten().tolist() == expected
        assert torch.equal(chosen_targets, targets[expected])

    def test_samples_without_labels_come_last(self):
        """Their loss is NaN, and they are selected only if there are too few others; infinite losses come first."""
        numbers = torch.arange(5.0)[:, None]
        targets = numbers + torch.tensor([math.nan, 1.0, math.nan, math.inf, 2.0])[:, None]

        for keep, expected in ((0.4, [3, 4]), (0.6, [1, 3, 4]), (0.8, [0, 1, 3, 4])):
            chosen, _ = cf.select_using_loss(numbers, targets, _Known(), mse_loss, keep=keep)
            assert chosen.flatten().tolist() == expected

    def test_number_is_exact(self):
        """Rounding drops no sample: 0.29 * 100 is slightly less than 29."""
        numbers, targets = _losses([1.0] * 100)

        chosen, _ = cf.select_using_loss(numbers, targets, _Known(), mse_loss, keep=0.29)

        assert len(chosen) == 29

    @given(values=st.lists(st.floats(0, 100), min_size=1, max_size=20), keep=st.floats(0.01, 1))
    def test_selected_losses_are_the_highest(self, values: list[float], keep: float):
        """Each selected loss is at least as high as each other one."""
        numbers, targets = _losses(values)
        losses = (numbers - targets).square().flatten()

        chosen = cf.select_using_loss(numbers, targets, _Known(), mse_loss, keep=keep)[0].flatten().long()

        left_out = sorted(set(range(len(values))) - set(chosen.tolist()))
        assert chosen.tolist() == sorted(chosen.tolist())
        assert not left_out or losses[chosen].min() >= losses[left_out].max()

    def test_dictionaries(self):
        """Each tensor is selected from; the model receives the dictionary."""
        numbers, targets = _losses([1.0, 5.0, 0.5, 9.0])
        batch = UserDict(numbers=numbers, mask=torch.arange(4), name="some")

        chosen, chosen_targets = cf.select_using_loss(
            batch,
            {"labels": targets},
            lambda value: value["numbers"],
            lambda output, target, reduction: mse_loss(output, target["labels"], reduction=reduction),
        )

        assert chosen.keys() == {"numbers", "mask", "name"}
        assert chosen["numbers"].flatten().tolist() == chosen["mask"].tolist() == [1, 3]
        assert chosen["name"] == "some"
        assert torch.equal(chosen_targets["labels"], targets[[1, 3]])


class TestScaleFactor:
    @pytest.mark.parametrize(
        ("shape", "mode"), [((4, 2, 8), "linear"), ((4, 2, 8, 8), "bilinear"), ((4, 2, 4, 8, 8), "trilinear")]
    )
    def test_model_receives_a_smaller_input(self, shape: tuple[int, ...], mode: str):
        """Only the model's input is scaled; the result has the original size."""
        images, recorded = torch.randn(shape), []

        def model(images: Tensor) -> Tensor:
            recorded.append(images)
            return images.flatten(1)[:, :5]

        chosen, _ = cf.select_using_loss(images, torch.randint(5, (4,)), model, cross_entropy, scale_factor=0.5)

        torch.testing.assert_close(recorded[0], interpolate(images, scale_factor=0.5, mode=mode, align_corners=False))
        assert chosen.shape == (2, *shape[1:])


class TestNoSideEffects:
    def test_statistics_and_modes_are_preserved(self):
        """BatchNorm buffers, module modes and gradients do not change, also with modules in evaluation mode."""
        model = _network()
        model[1].eval()
        before = copy.deepcopy(model.state_dict())
        modes = [module.training for module in model.modules()]

        cf.select_using_loss(*_batch(), model, cross_entropy)

        assert [module.training for module in model.modules()] == modes
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
        assert all(parameter.grad is None for parameter in model.parameters())

    def test_draws_no_random_numbers(self):
        """Later draws of dropout do not change."""
        model, (images, labels) = _network(), _batch()
        state = torch.get_rng_state()

        cf.select_using_loss(images, labels, model, cross_entropy)

        assert torch.equal(torch.get_rng_state(), state)

    def test_modes_are_restored_after_an_error(self):
        """An error of the model or loss restores the modes."""
        model = _network()

        with pytest.raises(ZeroDivisionError):
            cf.select_using_loss(*_batch(), model, lambda *_, reduction: 1 / 0)

        assert all(module.training for module in model.modules())

    def test_training_in_the_same_autocast_region(self):
        """Weights cast without a graph are not reused: gradients are computed."""
        model, (images, labels) = _network(), _batch()

        with torch.autocast("cpu", torch.bfloat16):
            images, labels = cf.select_using_loss(images, labels, model, cross_entropy)
            loss = cross_entropy(model(images), labels)
        loss.backward()

        assert all(parameter.grad is not None for parameter in model.parameters())


class TestErrors:
    @pytest.mark.parametrize("shape", [(), (3,), (1, 8)])
    def test_loss_without_sample_dimension(self, shape: tuple[int, ...]):
        """The error states the call and its result."""
        with pytest.raises(ValueError, match=r"loss_fun must return a loss for each of the 8 samples when called with"):
            cf.select_using_loss(torch.ones(8, 3), torch.ones(8), _Known(), lambda *_, reduction: torch.ones(shape))


class Pair(NamedTuple):
    """A batch with two fields."""

    x: Any
    y: Any


class TestTakeSamples:
    @pytest.mark.parametrize(
        ("part", "expected"),
        [
            (["a", "b", "c"], ["a", "c"]),
            (("a", "b", "c"), ("a", "c")),
            ([["a", "b", "c"], ["d", "e", "f"]], [["a", "c"], ["d", "f"]]),
            ([["a"], ["b", "c"], []], [["a"], []]),
            ([{"box": 1}, {"box": 2}, {"box": 3}], [{"box": 1}, {"box": 3}]),
            ({"deep": ({"names": ["a", "b", "c"]},)}, {"deep": ({"names": ["a", "c"]},)}),
            (Pair(["a", "b", "c"], 5), Pair(["a", "c"], 5)),
            (Pair("p", "q"), Pair("p", "q")),
            ("abc", "abc"),
            (["a", "b"], ["a", "b"]),
            ({1, 2, 3}, {1, 2, 3}),
        ],
    )
    def test_containers_with_one_entry_per_sample(self, part: Any, expected: Any):
        """Lists and tuples with one item per sample are selected from, at any depth; others do not change."""
        selected = cf.take_samples({"x": torch.arange(3), "part": part}, torch.tensor([0, 2]), 3)

        assert selected["x"].tolist() == [0, 2]
        assert selected["part"] == expected
        assert type(selected["part"]) is type(expected)

    def test_boxes_of_each_image(self):
        """Dictionaries of tensors are samples, even if an image has as many boxes as there are images."""
        boxes = [{"boxes": torch.full((count, 4), float(count))} for count in (3, 1, 2)]

        _, selected = cf.take_samples((torch.rand(3, 8), boxes), torch.tensor([0, 1]), 3)

        assert [len(one["boxes"]) for one in selected] == [3, 1]

    def test_tensors_of_other_lengths(self):
        """A list of one tensor per sample is selected from; each tensor does not change."""
        sounds = [torch.rand(5), torch.rand(3), torch.rand(7)]

        _, selected = cf.take_samples((torch.rand(3, 8), sounds), torch.tensor([1, 2]), 3)

        assert [len(sound) for sound in selected] == [3, 7]

    def test_as_many_fields_as_samples(self):
        """A pair of two images and two names is a batch, not two samples."""
        images, names = cf.take_samples((torch.arange(2), ["a", "b"]), torch.tensor([1]), 2)

        assert images.tolist() == [1]
        assert names == ["b"]

    def test_arrays(self):
        """NumPy arrays are selected from."""
        selected = cf.take_samples({"x": torch.arange(3), "name": np.array(["a", "b", "c"])}, torch.tensor([2, 0]), 3)

        assert selected["name"].tolist() == ["c", "a"]
