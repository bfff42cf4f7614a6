"""RandAugment, AugMix and ColOut in a dataset's pipeline, and on batches."""

import copy
import warnings

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, Subset
from torchvision import transforms
from torchvision.datasets import FakeData
from torchvision.transforms import v2

from composer.algorithms import AugMix, ColOut, RandAugment
from composer.core import Engine, Evaluator, NoEffectWarning, State

PIPELINES = {
    "none": None,
    "one": transforms.ToTensor(),
    "composed": transforms.Compose([transforms.RandomHorizontalFlip(), transforms.ToTensor()]),
    "composed v2": v2.Compose([v2.ToImage(), v2.ToDtype(torch.float32, scale=True)]),
}
ALGORITHMS = [RandAugment, AugMix, lambda **settings: ColOut(batch=False, **settings)]
IDS = ["RandAugment", "AugMix", "ColOut"]


def images(transform, size=8):
    """Random PIL images with labels."""
    return FakeData(size=size, image_size=(3, 16, 16), num_classes=3, transform=transform)


def fit_start(dataset, *algorithms, evaluators=(), **options):
    """Start a training on a dataset; return its state."""
    state = State(
        model=None, train_dataloader=DataLoader(dataset, batch_size=4, **options), evaluators=list(evaluators)
    )
    Engine(state, algorithms=list(algorithms)).run_event("fit_start")
    return state


def names_of(dataset):
    """Return the classes of a dataset's transforms."""
    steps = getattr(dataset.transform, "transforms", [dataset.transform])
    return [type(step).__name__ for step in steps]


@pytest.mark.parametrize("make", ALGORITHMS, ids=IDS)
class TestDataset:
    @pytest.mark.parametrize("pipeline", PIPELINES)
    def test_transform_precedes_tensor_conversion(self, make, pipeline):
        """The transform receives images, and is inserted in both attributes where torchvision stores a pipeline."""
        dataset = images(PIPELINES[pipeline])

        fit_start(dataset, make())

        names = names_of(dataset)
        place = next(number for number, name in enumerate(names) if name.endswith("Transform"))
        assert [name for name in names[:place] if "To" in name] == []
        assert dataset.transforms.transform is dataset.transform
        assert dataset[0][1] in range(3)

    def test_is_added_once(self, make):
        """A second fit adds nothing and does not warn; a second algorithm of the same class warns."""
        dataset, algorithm = images(transforms.ToTensor()), make()
        state = fit_start(dataset, algorithm)
        names = names_of(dataset)

        Engine(state).run_event("fit_start")
        with pytest.warns(NoEffectWarning, match="already"):
            fit_start(dataset, make())

        assert names_of(dataset) == names

    def test_shared_pipeline_is_not_modified(self, make):
        """A pipeline that is shared with other datasets is not modified."""
        shared = transforms.Compose([transforms.ToTensor()])

        fit_start(images(shared), make())

        assert [type(step).__name__ for step in shared.transforms] == ["ToTensor"]

    def test_other_subsets_are_not_augmented(self, make):
        """Of a split dataset, only the training subset is augmented."""
        complete = images(transforms.ToTensor())
        training, evaluation = Subset(complete, range(4)), Subset(complete, range(4, 8))

        fit_start(training, make(), evaluators=[Evaluator(label="eval", dataloader=DataLoader(evaluation))])

        assert any(name.endswith("Transform") for name in names_of(training.dataset))
        assert names_of(evaluation.dataset) == ["ToTensor"]

    def test_shared_evaluation_dataset_raises(self, make):
        """One dataset for training and evaluation raises, as the evaluation would be augmented."""
        dataset = images(transforms.ToTensor())

        with pytest.raises(ValueError, match="evaluation"):
            fit_start(dataset, make(), evaluators=[Evaluator(label="eval", dataloader=DataLoader(dataset))])

    def test_dataset_without_transform_raises(self, make):
        """A dataset without a transform attribute raises."""

        class Own(Dataset):
            def __len__(self):
                return 4

            def __getitem__(self, index):
                return index

        with pytest.raises(TypeError, match="Own"):
            fit_start(Own(), make())

    def test_joint_transform_raises(self, make):
        """A joint transform of images and targets raises."""
        dataset = images(None)
        dataset.transforms = lambda image, target: (image, target)

        with pytest.raises(TypeError, match="targets"):
            fit_start(dataset, make())

    def test_missing_dataset_raises(self, make):
        """Without training data an error is raised."""
        with pytest.raises(ValueError, match="train_dataloader"):
            Engine(State(model=None), algorithms=make()).run_event("fit_start")

    def test_running_persistent_workers_raise(self, make):
        """Persistent workers that already run have a copy of the dataset, which raises."""
        dataset = images(transforms.ToTensor())
        loader = DataLoader(dataset, batch_size=4, num_workers=1, persistent_workers=True)
        next(iter(loader))
        engine = Engine(State(model=None, train_dataloader=loader), algorithms=make())

        with pytest.raises(ValueError, match="workers"):
            engine.run_event("fit_start")


def test_workers_augment_each_sample():
    """Samples from worker processes are augmented, each with its own draws."""
    plain = images(transforms.ToTensor())
    augmented = copy.deepcopy(plain)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # forking beside torch's threads
        state = fit_start(augmented, RandAugment(severity=10), num_workers=1)
        batches = [batch for batch, _ in state.train_dataloader]

    before = torch.stack([image for image, _ in plain])
    assert torch.cat(batches).shape == before.shape
    assert not torch.equal(torch.cat(batches), before)


@pytest.mark.parametrize("make", [RandAugment, AugMix], ids=["RandAugment", "AugMix"])
def test_batch_mode(make):
    """With batch=True the loaded batch is augmented, with draws that depend on its number."""
    results = []
    for _ in range(2):
        state = State(model=None)
        engine = Engine(state, algorithms=make(batch=True))
        state.batch = (torch.rand(4, 3, 16, 16, generator=torch.Generator().manual_seed(0)), torch.arange(4))
        before = state.batch[0].clone()
        engine.run_event("fit_start")
        engine.run_event("after_dataloader")
        results.append(state.batch[0])

    assert not torch.equal(results[0], before)
    assert torch.equal(results[0], results[1])


def test_colout_shrinks_images_and_masks():
    """Rows and columns are dropped from images and from targets of their size; class ids do not change."""
    shapes = []
    for target in (torch.arange(4), torch.rand(4, 1, 20, 20)):
        state = State(model=None)
        engine = Engine(state, algorithms=ColOut(p_row=0.25, p_col=0.5))
        state.batch = [torch.rand(4, 3, 20, 20), target]
        engine.run_event("after_dataloader")
        shapes.append([tuple(each.shape) for each in state.batch])

    assert shapes == [[(4, 3, 15, 10), (4,)], [(4, 3, 15, 10), (4, 1, 15, 10)]]


@pytest.mark.parametrize(
    ("make", "settings"),
    [
        (RandAugment, {"severity": 11}),
        (RandAugment, {"depth": -1}),
        (RandAugment, {"augmentation_set": "best"}),
        (AugMix, {"severity": -1}),
        (AugMix, {"width": 0}),
        (AugMix, {"alpha": 0}),
        (AugMix, {"augmentation_set": "best"}),
        (ColOut, {"p_row": 1.0}),
        (ColOut, {"p_col": -0.1}),
        (ColOut, {"resize_target": "sometimes"}),
    ],
)
def test_bad_settings(make, settings):
    """Settings out of range raise at construction, with their names."""
    with pytest.raises((TypeError, ValueError), match=next(iter(settings))):
        make(**settings)
