"""Data loaders with functions that count, split and transform batches."""

import re

import pytest
import torch
from torch import distributed, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from composer.core import DataSpec, ensure_data_spec
from composer.core.data.batches import note_batch


class Endless(IterableDataset):
    def __iter__(self):
        yield torch.zeros(3)


class TestDataSpec:
    def test_custom_functions(self):
        """Custom functions are used."""
        spec = DataSpec(
            [],
            split_batch=lambda batch, size: [batch[size:], batch[:size]],
            get_num_samples_in_batch=lambda batch: 11 * len(batch),
            get_num_tokens_in_batch=lambda batch: 12,
        )

        assert spec.split_batch("abc", 2) == ["c", "ab"]
        assert spec.get_num_samples_in_batch("b") == 11
        assert spec.get_num_tokens_in_batch("b") == 12

    def test_tokens_by_type(self):
        """A counting function may return a dictionary, of which a type is selected."""
        spec = DataSpec([], get_num_tokens_in_batch=lambda batch: {"total": 12, "loss_generating": torch.tensor(9)})

        assert spec.get_num_tokens_in_batch(None) == spec.get_num_tokens_in_batch(None, token_type="total") == 12
        assert spec.get_num_tokens_in_batch(None, token_type="loss_generating") == 9
        assert spec.get_num_loss_tokens_in_batch(None) == 9
        assert DataSpec([]).get_num_loss_tokens_in_batch({"input_ids": torch.zeros(3, 5)}) == 15

    @pytest.mark.parametrize("count", [None, lambda batch: 12, lambda batch: {"total": 12}])
    def test_unknown_token_type_raises(self, count):
        """A type that the counting function does not distinguish raises."""
        with pytest.raises(ValueError, match="token_type='loss_generating' needs a DataSpec whose"):
            DataSpec([], get_num_tokens_in_batch=count).get_num_tokens_in_batch({}, token_type="loss_generating")

    def test_length_and_samples_of_a_loader(self):
        """Batches and samples per epoch are read from the loader and its dataset."""
        spec = DataSpec(DataLoader(TensorDataset(torch.zeros(10, 2)), batch_size=4))

        assert (spec.length, spec.num_samples) == (3, 10)

    @pytest.mark.parametrize("loader", [DataLoader(Endless()), iter([1])])
    def test_length_may_be_unknown(self, loader):
        """A stream has no length, which is allowed."""
        spec = DataSpec(loader)

        assert (spec.length, spec.num_samples) == (None, None)

    @pytest.mark.parametrize("name", ["TensorDataset", "Stream", "HuggingFace"])
    def test_dataset_raises(self, name):
        """Data sets of both kinds, and those of Hugging Face, raise an error that names DataLoader and the format."""

        class Stream(IterableDataset):
            def __iter__(self):
                return iter([])

        class HuggingFace(list):
            def with_format(self, kind):
                return self

        dataset = {"TensorDataset": TensorDataset(), "Stream": Stream(), "HuggingFace": HuggingFace()}[name]

        with pytest.raises(TypeError, match=rf"got {name}\. .*DataLoader\(dataset, .*dataset\.with_format\('torch'\)"):
            DataSpec(dataset)

    def test_lists_without_a_format(self):
        """An error of a model has a note on lists that a loader has transposed, but not on images of several sizes."""
        [batch] = DataLoader([{"input_ids": [1, 2, 3], "label": 0, "text": "a"}] * 4, batch_size=4)
        error, other = ValueError(), ValueError()

        note_batch(error, "before_forward", object(), "", batch)
        note_batch(other, "before_forward", object(), "", {"image": [torch.rand(3, 4, 4)], "label": torch.zeros(1)})

        assert re.search(
            r"'input_ids', 'text' the batch has lists .*dataset\.with_format\('torch'\)", error.__notes__[1]
        )
        assert len(other.__notes__) == 1

    def test_unused_parameters(self):
        """The error of DistributedDataParallel for parameters without a gradient has a note for a Trainer."""
        model = nn.ModuleDict({"used": nn.Linear(2, 2), "spare": nn.Linear(2, 2)})
        model.forward = model["used"].forward
        distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
        try:
            wrapped = nn.parallel.DistributedDataParallel(model)
            wrapped(torch.ones(1, 2)).sum().backward()
            with pytest.raises(RuntimeError) as raised:
                wrapped(torch.ones(1, 2))
        finally:
            distributed.destroy_process_group()

        note_batch(raised.value, "before_forward", model, "", torch.ones(1, 2))

        assert "parallelism_config={'ddp': {'find_unused_parameters': True}}" in raised.value.__notes__[1]

    def test_ensure_data_spec(self):
        """A spec is returned unchanged; a loader or a dictionary of arguments is converted."""
        spec = DataSpec([1])

        assert ensure_data_spec(spec) is spec
        assert ensure_data_spec([1]).dataloader == [1]
        assert ensure_data_spec({"dataloader": [1], "num_samples": 5}).num_samples == 5

    @pytest.mark.parametrize("loaders", [{}, {"first": [1], "second": [2]}, {"dataloader": [1], "label": "first"}])
    def test_other_dictionaries_raise(self, loaders):
        """A dictionary of several loaders raises with the way to evaluate on them."""
        with pytest.raises(
            TypeError, match=r"must have the arguments of DataSpec .* got the keys \[.*Evaluator\(label"
        ):
            ensure_data_spec(loaders)

    @pytest.mark.parametrize(
        ("options", "kind", "message"),
        [
            ({"num_samples": "4"}, TypeError, "num_samples must be an int, got '4'"),
            ({"num_samples": -1}, ValueError, "num_samples must be at least 1, got -1"),
            ({"num_samples": 0}, ValueError, "num_samples must be at least 1, got 0"),
            ({"num_tokens": 2.5}, TypeError, "num_tokens must be an int, got 2.5"),
            ({"num_tokens": -1}, ValueError, "num_tokens must be at least 0, got -1"),
            ({"split_batch": 2}, TypeError, "split_batch must be None or a function of a batch, got 2"),
            ({"batch_transforms": [abs]}, TypeError, "batch_transforms must be None or a function"),
            ({"microbatch_transforms": "x"}, TypeError, "microbatch_transforms must be None or a function"),
            ({"get_num_samples_in_batch": 4}, TypeError, "get_num_samples_in_batch must be None or a function"),
            ({"get_num_tokens_in_batch": 4}, TypeError, "get_num_tokens_in_batch must be None or a function"),
        ],
    )
    def test_bad_arguments(self, options, kind, message):
        """Values that are not a number or a function raise, with the parameter's name."""
        with pytest.raises(kind, match=message):
            DataSpec([], **options)


class TestCustomFunctions:
    @pytest.mark.parametrize("count", [4, 4.0, torch.tensor(4), torch.tensor(4.0)])
    def test_tensor_counts_are_converted(self, count):
        """A tensor, such as the sum of a mask, is a valid count."""
        assert type(DataSpec([], get_num_tokens_in_batch=lambda batch: count).get_num_tokens_in_batch(None)) is int

    @pytest.mark.parametrize(
        ("split", "kind", "message"),
        [
            (lambda batch, size: None, TypeError, "must return a list of microbatches, got NoneType"),
            (lambda batch, size: batch, TypeError, "must return a list of microbatches, got Tensor"),
            (lambda batch, size: [], ValueError, r"each sample of a batch once, but of 4 .* 0 microbatches"),
            (lambda batch, size: [batch[:size]], ValueError, r"of 4 samples .* 1 microbatches with \[2\] samples"),
            (lambda batch, size: [batch, batch], ValueError, r"of 4 samples .* 2 microbatches with \[4, 4\] samples"),
        ],
    )
    def test_lost_or_repeated_samples_raise(self, split, kind, message):
        """The error states how many samples a split lost or repeated."""
        with pytest.raises(kind, match=f"DataSpec's split_batch .*{message}"):
            DataSpec([], split_batch=split).split_batch(torch.zeros(4), 2)
