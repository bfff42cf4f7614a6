"""AugMix in a dataset's pipeline, and on batches."""

from composer.algorithms import AugMix
from fixtures.transforms import BatchTransform


class TestAugMix(BatchTransform):
    make = AugMix
    bad_settings = ({"severity": -1}, {"width": 0}, {"alpha": 0}, {"augmentation_set": "best"})
