"""RandAugment in a dataset's pipeline, and on batches."""

from composer.algorithms import RandAugment
from fixtures.transforms import BatchTransform


class TestRandAugment(BatchTransform):
    make = RandAugment
    bad_settings = ({"severity": 11}, {"depth": -1}, {"augmentation_set": "best"})
