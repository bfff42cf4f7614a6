"""Batches with shorter sequences."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import BatchEncoding, BertConfig, BertForMaskedLM, BertForSequenceClassification

from composer import functional as cf


def _batch(size: int = 3, length: int = 10, **more: Any) -> dict[str, Any]:
    """Output of a tokenizer with additions of a collator."""
    ids = torch.arange(1, size * length + 1).view(size, length)
    return {
        "input_ids": ids,
        "attention_mask": torch.ones(size, length, dtype=torch.long),
        "token_type_ids": ids % 2,
        "labels": torch.where(ids % 3 == 0, ids, -100),
        **more,
    }


def _assert_same(left: Any, right: Any) -> None:
    assert set(left) == set(right)
    for name, value in left.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(value, right[name]), name
        else:
            assert value == right[name], name


class TestTruncating:
    def test_keeps_first_tokens(self):
        """Every sequence is truncated to its first tokens."""
        batch = _batch()

        shorter = cf.set_batch_sequence_length(batch, 4)

        _assert_same(shorter, {name: value[:, :4] for name, value in batch.items()})

    def test_other_entries_are_unchanged(self):
        """Labels, numbers, lists and tensors of another length do not change."""
        others = {
            "label": torch.tensor([0, 1, 2]),
            "ids": ["a", "b", "c"],
            "scores": torch.rand(3, 7),
            "step": 5,
            "decoder_input_ids": torch.ones(3, 6),
            "scale": torch.tensor(2.0),
            "missing": None,
        }

        shorter = cf.set_batch_sequence_length(_batch(**others), 4)

        assert all(shorter[name] is value for name, value in others.items())

    @pytest.mark.parametrize(("truncate", "copies"), [(True, 1), (False, 2)])
    def test_as_many_labels_as_tokens(self, truncate: bool, copies: int):
        """Several labels of a sample are not cut if there are as many as tokens; a real model computes their loss."""
        sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
        config = BertConfig(vocab_size=50, num_labels=10, problem_type="multi_label_classification", **sizes)
        model = BertForSequenceClassification(config)
        labels = torch.rand(3, 10).round()

        shorter = cf.set_batch_sequence_length(_batch(labels=labels), 5, truncate)

        assert shorter["input_ids"].shape == (3 * copies, 5)
        assert torch.equal(shorter["labels"], labels.repeat_interleave(copies, 0))
        assert model(**shorter).loss.isfinite()

    @pytest.mark.parametrize("truncate", [True, False])
    @pytest.mark.parametrize("length", [10, 11, 1000])
    def test_short_sequences_are_unchanged(self, truncate: bool, length: int):
        """Short sequences do not change; a new dictionary is returned."""
        batch = _batch()

        same = cf.set_batch_sequence_length(batch, length, truncate)

        assert same is not batch
        assert all(same[name] is value for name, value in batch.items())

    def test_result_is_contiguous(self):
        """Losses that flatten labels require contiguous tensors."""
        sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
        model = BertForMaskedLM(BertConfig(vocab_size=50, **sizes))
        batch = _batch()

        for settings in ({}, {"truncate": False}, {"preserve_end_of_sequence": True}):
            shorter = cf.set_batch_sequence_length(batch, 4, **settings)

            assert all(value.is_contiguous() for value in shorter.values())
            assert model(**shorter).loss.isfinite()


class TestPreserveEnd:
    def test_last_tokens_are_moved_to_the_end(self):
        """The last token and its entries are moved to the end, unless only padding is cut off."""
        batch = _batch()
        for row, end in enumerate((10, 7, 3)):
            batch["attention_mask"][row, end:] = 0

        shorter = cf.set_batch_sequence_length(batch, 4, preserve_end_of_sequence=True)

        places = torch.tensor([[0, 1, 2, 9], [0, 1, 2, 6], [0, 1, 2, 3]])
        _assert_same(shorter, {name: value.gather(1, places) for name, value in batch.items()})

    def test_left_padding(self):
        """With left padding the last real token is at the end."""
        batch = _batch()
        batch["attention_mask"][1, :3] = 0

        shorter = cf.set_batch_sequence_length(batch, 5, preserve_end_of_sequence=True)

        assert shorter["input_ids"][1].tolist() == [11, 12, 13, 14, 20]
        assert shorter["attention_mask"][1].tolist() == [0, 0, 0, 1, 1]

    @given(
        ends=st.lists(st.integers(1, 9), min_size=1, max_size=4),
        length=st.integers(1, 8),
        dtype=st.sampled_from([torch.long, torch.bool, torch.float32]),
    )
    def test_last_real_token_is_preserved(self, ends: list[int], length: int, dtype: torch.dtype):
        """Each truncated sequence ends with its last real token, for any mask dtype."""
        batch = _batch(len(ends), 9)
        mask = torch.arange(9) < torch.tensor(ends)[:, None]
        batch["attention_mask"] = mask.to(dtype)

        shorter = cf.set_batch_sequence_length(batch, length, preserve_end_of_sequence=True)

        assert shorter["attention_mask"].dtype == dtype
        for row, end in enumerate(ends):
            real = shorter["input_ids"][row][shorter["attention_mask"][row].bool()].tolist()
            first = batch["input_ids"][row, : min(end, length)].tolist()
            assert real == [*first[:-1], batch["input_ids"][row, end - 1].item()]

    def test_positions_are_consecutive(self):
        """The last token has the position of its new place."""
        positions = torch.arange(10)[None]

        shorter = cf.set_batch_sequence_length(_batch(position_ids=positions), 4, preserve_end_of_sequence=True)

        assert shorter["position_ids"].tolist() == [[0, 1, 2, 3]]


class TestReshape:
    def test_segments_become_samples(self):
        """Segments of a sequence are consecutive samples, and a remainder is dropped."""
        batch = _batch(2, 7)

        shorter = cf.set_batch_sequence_length(batch, 3, truncate=False)

        assert shorter["input_ids"].tolist() == [[1, 2, 3], [4, 5, 6], [8, 9, 10], [11, 12, 13]]
        for name, value in batch.items():
            assert torch.equal(shorter[name], torch.stack([value[0, :3], value[0, 3:6], value[1, :3], value[1, 3:6]]))

    def test_per_sample_entries_are_repeated(self):
        """Each segment has its sample's label, id and features; other entries do not change."""
        others = {
            "label": torch.tensor([4, 7, 9]),
            "names": ["a", "b", "c"],
            "pair": (1, 2, 3),
            "scores": torch.arange(6.0).view(3, 2),
            "step": 5,
            "list": [1, 2],
            "scale": torch.tensor(2.0),
            "text": "abc",
        }

        shorter = cf.set_batch_sequence_length(_batch(**others), 5, truncate=False)

        assert shorter["label"].tolist() == [4, 4, 7, 7, 9, 9]
        assert shorter["names"] == ["a", "a", "b", "b", "c", "c"]
        assert shorter["pair"] == (1, 1, 2, 2, 3, 3)
        assert shorter["scores"].tolist() == [[0, 1], [0, 1], [2, 3], [2, 3], [4, 5], [4, 5]]
        assert all(shorter[name] is others[name] for name in ("step", "list", "scale", "text"))

    def test_positions_restart(self):
        """Positions of each segment start at 0, per sample or for all."""
        shared = cf.set_batch_sequence_length(_batch(2, position_ids=torch.arange(10)[None]), 5, truncate=False)
        padded = torch.tensor([[0, 0, 0, 0, 0, 0, 0, 1, 2, 3], [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]])
        each = cf.set_batch_sequence_length(_batch(2, position_ids=padded), 5, truncate=False)

        assert shared["position_ids"].tolist() == [[0, 1, 2, 3, 4]] * 4
        assert each["position_ids"].tolist() == [[0] * 5, [0, 0, 1, 2, 3], [0, 1, 2, 3, 4], [0, 1, 2, 3, 4]]

    @given(size=st.integers(1, 4), length=st.integers(1, 12), wanted=st.integers(1, 12))
    def test_complete_segments_are_preserved(self, size: int, length: int, wanted: int):
        """All tokens are preserved in order, except for less than one segment per sequence."""
        batch = _batch(size, length)

        shorter = cf.set_batch_sequence_length(batch, wanted, truncate=False)

        used_length = length if wanted >= length else length // wanted * wanted
        assert shorter["input_ids"].flatten().tolist() == batch["input_ids"][:, :used_length].flatten().tolist()
        assert length - used_length < wanted


class TestPurity:
    @pytest.mark.parametrize("settings", [{}, {"preserve_end_of_sequence": True}, {"truncate": False}])
    def test_input_is_not_modified(self, settings: dict[str, bool]):
        """Neither the dictionary nor its tensors are modified."""
        batch = _batch(position_ids=torch.arange(10)[None])
        before = {name: value.clone() for name, value in batch.items()}
        values = dict(batch)

        cf.set_batch_sequence_length(batch, 4, **settings)["input_ids"].zero_()

        _assert_same(batch, before)
        assert all(batch[name] is value for name, value in values.items())

    @pytest.mark.parametrize("settings", [{}, {"preserve_end_of_sequence": True}, {"truncate": False}])
    @pytest.mark.parametrize("make", [dict, BatchEncoding, OrderedDict])
    def test_batch_class_is_preserved(self, make: Any, settings: dict[str, bool]):
        """A BatchEncoding is returned as one."""
        batch = make(_batch())

        shorter = cf.set_batch_sequence_length(batch, 4, **settings)

        assert type(shorter) is make
        assert shorter["input_ids"].shape[1] == 4
        assert batch["input_ids"].shape == (3, 10)


class TestErrors:
    @pytest.mark.parametrize(
        ("ids", "value"),
        [
            (torch.ones(5), r"a tensor of shape \(5,\)"),
            ([[1, 2, 3]], "list"),
            (None, "NoneType"),
        ],
    )
    def test_batch_without_sequences_raises(self, ids: object, value: str):
        """The error states the tokenizer setting to use."""
        with pytest.raises(ValueError, match=rf"as input_ids, .* got {value}\. Let the tokenizer"):
            cf.set_batch_sequence_length({"input_ids": ids, "labels": torch.ones(2)}, 4)

    def test_preserve_end_without_mask_raises(self):
        """The ends of sequences are not known without a mask."""
        batch = _batch()
        del batch["attention_mask"]

        with pytest.raises(ValueError, match="batch must have an attention_mask to preserve the end"):
            cf.set_batch_sequence_length(batch, 4, preserve_end_of_sequence=True)
