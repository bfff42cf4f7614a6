"""MixUp, CutMix, CutOut and ColOut on batches with masks and boxes: they are read and replaced by their keys."""

import pytest
import torch

from composer import functional as cf
from composer.algorithms import ColOut, CutMix, CutOut, MixUp
from composer.core import Engine, Event, Stage, State, explain


def batch_of():
    """Return a batch for detection and segmentation."""
    generator = torch.Generator().manual_seed(5)
    return {
        "pixels": torch.rand(3, 3, 16, 16, generator=generator),
        "masks": torch.randint(4, (3, 16, 16), generator=generator),
        "boxes": [torch.tensor([[1.0, 2.0, 9.0, 6.0]]), torch.tensor([[8.0, 0.0, 15.0, 15.0]]), torch.zeros(0, 4)],
        "labels": [torch.tensor([3]), torch.tensor([4]), torch.zeros(0, dtype=torch.int64)],
        "names": ["a", "b", "c"],
    }


KEYS = {"input_key": "pixels", "mask_key": "masks", "boxes_key": "boxes", "labels_key": "labels"}


def as_batch(batch):
    return cf.AugmentedBatch(batch["pixels"], batch["masks"], batch["boxes"], None, batch["labels"])


def run(algorithm, batch):
    """Return the batch after AFTER_DATALOADER."""
    state = State(model=None, rank_zero_seed=7)
    engine = Engine(state, algorithms=algorithm)
    state.batch = dict(batch)
    engine.run_event("after_dataloader")
    return state.batch


def replayed(algorithm):
    """Return a generator that draws as the algorithm did."""
    state = State(model=None, rank_zero_seed=7)
    Engine(state, algorithms=algorithm)
    return state.generator(algorithm)


def assert_batch(found, expected):
    assert torch.equal(found["pixels"], expected.input)
    assert torch.equal(found["masks"], expected.masks)
    assert [one.tolist() for one in found["boxes"]] == [one.tolist() for one in expected.boxes]
    assert [one.tolist() for one in found["labels"]] == [one.tolist() for one in expected.labels]
    assert found["names"] == ["a", "b", "c"]


def test_cutmix():
    """Images, masks, boxes and labels are those of the kernel with the algorithm's draws."""
    batch, algorithm = batch_of(), CutMix(min_visible=0.1, **KEYS)

    found = run(algorithm, batch)

    generator = replayed(CutMix(**KEYS))
    partners = cf.draw_permutation(batch["pixels"], generator=generator)
    expected, *_ = cf.cutmix_batch(as_batch(batch), None, indices=partners, min_visible=0.1, generator=generator)
    assert_batch(found, expected)
    assert not torch.equal(found["masks"], batch["masks"])


def test_mixup():
    """Masks of probabilities are blended with the weight of the images; boxes and labels are joined."""
    batch = batch_of()
    batch["masks"] = torch.nn.functional.one_hot(batch["masks"], 4).movedim(-1, 1).float()

    found = run(MixUp(1.0, **KEYS), batch)

    generator = replayed(MixUp(1.0, **KEYS))
    mixing = cf.draw_mixing(1.0, generator=generator)
    partners = cf.draw_permutation(batch["pixels"], generator=generator)
    expected, *_ = cf.mixup_batch(as_batch(batch), None, mixing, indices=partners)
    assert_batch(found, expected)
    assert sum(map(len, found["boxes"])) == 4


def test_cutout():
    """The squares of the images are filled with the value in the masks."""
    batch = batch_of()

    found = run(CutOut(2, input_key="pixels", mask_key="masks", mask_value=255), batch)

    holes = (found["pixels"] == 0).all(1)
    assert torch.equal(found["masks"] == 255, holes)
    assert torch.equal(found["masks"][~holes], batch["masks"][~holes])


def test_colout():
    """Masks and boxes lose the rows and columns that the images lose."""
    batch = batch_of()

    found = run(ColOut(0.5, 0.25, target_key="names", **KEYS), batch)

    generator = replayed(ColOut(0.5, 0.25, target_key="names", **KEYS))
    assert_batch(found, cf.colout_batch(as_batch(batch), 0.5, 0.25, generator=generator))
    assert found["masks"].shape == (3, 8, 12)


@pytest.mark.parametrize("kind", [CutMix, MixUp])
def test_where_they_run(kind):
    """With masks or boxes the complete batch is mixed once; labels are neither blended nor losses."""
    entries = explain([kind(mask_key=1)]).entries

    assert {event: [one.stage for one in found] for event, found in entries.items() if found} == {
        Event.AFTER_DATALOADER: [Stage.MIX]
    }


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: CutMix(labels_key="labels"), "needs boxes_key"),
        (lambda: MixUp(labels_key="labels"), "needs boxes_key"),
        (lambda: ColOut(labels_key="labels"), "needs boxes_key"),
        (lambda: CutMix(mask_key=1, interpolate_loss=True), "interpolate_loss must be False with mask_key"),
        (lambda: MixUp(boxes_key=1, interpolate_loss=True), "interpolate_loss must be False with mask_key"),
        (lambda: CutMix(boxes_key=1, box_format="yxyx"), "box_format must be one of"),
        (lambda: CutMix(boxes_key=1, min_visible=2), "min_visible"),
        (lambda: ColOut(batch=False, boxes_key=1), "batch must be True to move masks"),
        (lambda: CutOut(mask_key=1), "mask_key and mask_value must be set together"),
        (lambda: CutOut(mask_value=255), "mask_key and mask_value must be set together"),
    ],
)
def test_bad_settings(make, text):
    """Settings that contradict each other raise an error at construction."""
    with pytest.raises(ValueError, match=text):
        make()
