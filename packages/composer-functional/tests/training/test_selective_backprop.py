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

    @pytest.mark.parametrize("name", ["current_duration", "start", "end"])
    @pytest.mark.parametrize("value", [-0.1, 1.1, math.nan])
    def test_fractions_out_of_range(self, name: str, value: float):
        """The error states the parameter, its range and the value."""
        settings = {"current_duration": 0.6, "batch_idx": 0, "start": 0.0, "end": 1.0} | {name: value}

        with pytest.raises(ValueError, match=rf"{name} must lie in \[0, 1\], got {value}"):
            cf.should_selective_backprop(**settings)

    def test_end_before_start(self):
        """Nothing would be selected."""
        with pytest.raises(ValueError, match=r"end must not come before start, got 0\.2 and 0\.5"):
            cf.should_selective_backprop(0.6, 0, start=0.5, end=0.2)

    @pytest.mark.parametrize("name", ["batch_idx", "interrupt"])
    def test_negative_numbers(self, name: str):
        """The error states the parameter and the value."""
        with pytest.raises(ValueError, match=f"{name} must be at least 0, got -1"):
            cf.should_selective_backprop(0.6, **({"batch_idx": 0} | {name: -1}))


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

    def test_ties_select_the_first(self):
        """Ties are resolved deterministically."""
        numbers, targets = _losses([4.0] * 40)

        chosen, _ = cf.select_using_loss(numbers, targets, _Known(), mse_loss, keep=0.25)

        assert chosen.flatten().tolist() == list(range(10))

    @given(values=st.lists(st.floats(0, 100), min_size=1, max_size=20), keep=st.floats(0.01, 1))
    def test_selected_losses_are_the_highest(self, values: list[float], keep: float):
        """Each selected loss is at least as high as each other one."""
        numbers, targets = _losses(values)
        losses = (numbers - targets).square().flatten()

        chosen = cf.select_using_loss(numbers, targets, _Known(), mse_loss, keep=keep)[0].flatten().long()

        left_out = sorted(set(range(len(values))) - set(chosen.tolist()))
        assert chosen.tolist() == sorted(chosen.tolist())
        assert not left_out or losses[chosen].min() >= losses[left_out].max()

    def test_agrees_with_an_evaluation(self, device: torch.device):
        """The losses are those in evaluation mode."""
        model, (images, labels) = _network().to(device), (each.to(device) for each in _batch())
        with torch.no_grad():
            losses = cross_entropy(copy.deepcopy(model).eval()(images), labels, reduction="none")
        worst = losses.topk(4).indices.sort().values

        chosen, chosen_labels = cf.select_using_loss(images, labels, model, cross_entropy)

        assert torch.equal(chosen, images[worst])
        assert torch.equal(chosen_labels, labels[worst])

    def test_losses_per_sample_are_averaged(self):
        """A sample may have several losses, such as one per pixel."""
        images, labels = torch.zeros(3, 2, 2, 2), torch.zeros(3, 2, 2, dtype=torch.long)
        images[0, 1], images[1, 1, 0], images[2, 1, 0, 0] = 1.0, 3.0, 4.0

        chosen, _ = cf.select_using_loss(images, labels, _Known(), cross_entropy, keep=0.34)

        assert torch.equal(chosen, images[1:2])

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

    def test_lists_are_selected_from(self):
        """A list with one item per sample is selected from like tensors."""
        numbers, targets = _losses([1.0, 5.0, 0.5, 9.0])

        chosen, _ = cf.select_using_loss(
            {"numbers": numbers, "name": ["a", "b", "c", "d"]},
            targets,
            lambda value: value["numbers"],
            mse_loss,
        )

        assert chosen["name"] == ["b", "d"]

    @pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
    def test_preserves_dtype_and_memory_format(self, dtype: torch.dtype):
        """The result has the input's dtype and memory format."""
        images = torch.randn(4, 3, 6, 6, dtype=dtype).to(memory_format=torch.channels_last)

        chosen, _ = cf.select_using_loss(images, images + images, _Known(), mse_loss)

        assert chosen.dtype == dtype
        assert chosen.is_contiguous(memory_format=torch.channels_last)

    def test_inputs_that_require_gradients(self):
        """The selection is differentiable."""
        numbers, targets = _losses([1.0, 5.0])
        numbers.requires_grad_()

        chosen, _ = cf.select_using_loss(numbers, targets, _Known(), mse_loss)
        chosen.sum().backward()

        assert numbers.grad.flatten().tolist() == [0.0, 1.0]

    def test_compiles_to_one_graph(self):
        """One graph is compiled, including the model."""
        compiled = torch.compile(cf.select_using_loss, fullgraph=True, backend="eager")
        model, (images, labels) = _network(), _batch()

        chosen, _ = compiled(images, labels, model, cross_entropy, scale_factor=0.5)

        assert torch.equal(chosen, cf.select_using_loss(images, labels, model, cross_entropy, scale_factor=0.5)[0])
        assert all(module.training for module in model.modules())


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

    @pytest.mark.parametrize("images", [torch.ones(4, 3, 8, 8, dtype=torch.uint8), {"images": torch.ones(4, 3, 8, 8)}])
    def test_integer_input_raises(self, images: object):
        """The error states the value and the remedy."""
        with pytest.raises(
            TypeError, match=r"input must be a floating-point tensor to be shrunk, got .*scale_factor=1"
        ):
            cf.select_using_loss(images, torch.ones(4), _Known(), mse_loss, scale_factor=0.5)

    def test_input_without_image_dimensions_raises(self):
        """Features are not images."""
        with pytest.raises(ValueError, match=r"to be shrunk, got shape \(4, 3\)"):
            cf.select_using_loss(torch.ones(4, 3), torch.ones(4), _Known(), mse_loss, scale_factor=0.5)


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

    def test_running_statistics_are_preserved_in_training(self):
        """The extra pass does not update running statistics."""
        model = _network().train()
        before = copy.deepcopy(model[1].state_dict())

        cf.select_using_loss(*_batch(), model, cross_entropy)

        assert all(torch.equal(value, before[name]) for name, value in model[1].state_dict().items())

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

    def test_inputs_are_not_modified(self):
        """Inputs are bit-identical."""
        images, labels = _batch()
        copies = images.clone(), labels.clone()

        cf.select_using_loss(images, labels, _network(), cross_entropy, scale_factor=0.5)

        assert torch.equal(images, copies[0])
        assert torch.equal(labels, copies[1])

    def test_training_in_the_same_autocast_region(self):
        """Weights cast without a graph are not reused: gradients are computed."""
        model, (images, labels) = _network(), _batch()

        with torch.autocast("cpu", torch.bfloat16):
            images, labels = cf.select_using_loss(images, labels, model, cross_entropy)
            loss = cross_entropy(model(images), labels)
        loss.backward()

        assert all(parameter.grad is not None for parameter in model.parameters())

    def test_gradients_are_enabled_afterwards(self):
        """Only the extra pass disables gradients."""
        grad_modes = []

        def model(images: Tensor) -> Tensor:
            grad_modes.append(torch.is_grad_enabled())
            return images.flatten(1)

        cf.select_using_loss(*_batch(), model, cross_entropy)

        assert grad_modes == [False]
        assert torch.is_grad_enabled()


class TestErrors:
    @pytest.mark.parametrize("name", ["keep", "scale_factor"])
    @pytest.mark.parametrize("value", [0, -0.5, 1.1, math.nan])
    def test_fractions_of_samples_out_of_range(self, name: str, value: float):
        """The error states the parameter, its range and the value."""
        with pytest.raises(ValueError, match=rf"{name} must lie in \(0, 1\], got {value}"):
            cf.select_using_loss(*_batch(), _network(), cross_entropy, **{name: value})

    def test_empty_batch(self):
        """At least one sample is required."""
        with pytest.raises(ValueError, match=r"input must have the samples, at least one, .* got \(0, 3, 8, 8\)"):
            cf.select_using_loss(*_batch(0), _network(), cross_entropy)

    def test_zero_dimensional_tensor(self):
        """Samples need a first dimension."""
        with pytest.raises(ValueError, match=r"input must have the samples, .* got \(\)"):
            cf.select_using_loss(torch.tensor(1.0), torch.tensor(1.0), _Known(), mse_loss)

    def test_dictionary_without_matching_tensors(self):
        """A dictionary without tensors, or with tensors of different lengths, raises."""
        for batch in ({}, {"a": torch.ones(2), "b": torch.ones(3)}):
            with pytest.raises(ValueError, match="input must have the samples"):
                cf.select_using_loss(batch, torch.ones(2), _Known(), mse_loss)

    def test_invalid_input_type(self):
        """The error states the type of the value."""
        with pytest.raises(TypeError, match="target must be a tensor or a dictionary of tensors, got list"):
            cf.select_using_loss(torch.ones(2), [1, 2], _Known(), mse_loss)

    def test_mismatched_targets(self):
        """The error states both lengths."""
        with pytest.raises(ValueError, match="target must have the input's 8 samples in its first dimension, got 7"):
            cf.select_using_loss(torch.ones(8, 3), torch.ones(7), _Known(), mse_loss)

    @pytest.mark.parametrize("shape", [(), (3,), (1, 8)])
    def test_loss_without_sample_dimension(self, shape: tuple[int, ...]):
        """The error states the call and its result."""
        with pytest.raises(ValueError, match=r"loss_fun must return a loss for each of the 8 samples when called with"):
            cf.select_using_loss(torch.ones(8, 3), torch.ones(8), _Known(), lambda *_, reduction: torch.ones(shape))

    def test_non_tensor_loss(self):
        """The error states the type of the value."""
        with pytest.raises(TypeError, match="loss_fun must return a tensor, got float"):
            cf.select_using_loss(torch.ones(8, 3), torch.ones(8), _Known(), lambda *_, reduction: 1.0)


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
