"""ColOut in a dataset's pipeline, and on batches."""

import torch

from composer.algorithms import ColOut
from composer.core import Engine, State
from fixtures.transforms import DatasetTransform


class TestColOut(DatasetTransform):
    bad_settings = ({"p_row": 1.0}, {"p_col": -0.1}, {"resize_target": "sometimes"})

    def make(self, **settings):
        return ColOut(batch=False, **settings)


def test_images_and_masks():
    """Rows and columns are dropped from images and from targets of their size; class ids do not change."""
    shapes = []
    for target in (torch.arange(4), torch.rand(4, 1, 20, 20)):
        state = State(model=None)
        engine = Engine(state, algorithms=ColOut(p_row=0.25, p_col=0.5))
        state.batch = [torch.rand(4, 3, 20, 20), target]
        engine.run_event("after_dataloader")
        shapes.append([tuple(each.shape) for each in state.batch])

    assert shapes == [[(4, 3, 15, 10), (4,)], [(4, 3, 15, 10), (4, 1, 15, 10)]]
