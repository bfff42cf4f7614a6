"""A real detector of MMDetection 3 learns to find drawn shapes.

MMDetection requires compiled operators, so no default session installs it: ``nox -s mmdet``
builds it and runs these tests.
"""

import pytest
import torch
from torch.utils.data import DataLoader

from composer import DataSpec, Trainer
from composer.loggers import InMemoryLogger
from composer.models import MMDetModel, count_detection_samples, split_detection_batch

mmdet = pytest.importorskip("mmdet", reason="the session mmdet of nox builds it")

SIZE = 96
# The specification's model, with an eighth of its channels and two classes; sizes of images are the batches' business
# since MMDetection 3.
YOLOX = {
    "type": "YOLOX",
    "data_preprocessor": {"type": "DetDataPreprocessor", "pad_size_divisor": 32},
    "backbone": {
        "type": "CSPDarknet",
        "deepen_factor": 0.33,
        "widen_factor": 0.125,
        "norm_cfg": {"type": "BN", "momentum": 0.1},
    },
    "neck": {"type": "YOLOXPAFPN", "in_channels": [32, 64, 128], "out_channels": 32, "num_csp_blocks": 1},
    "bbox_head": {"type": "YOLOXHead", "num_classes": 2, "in_channels": 32, "feat_channels": 32},
    "train_cfg": {"assigner": {"type": "SimOTAAssigner", "center_radius": 2.5}},
    "test_cfg": {"score_thr": 0.01, "nms": {"type": "nms", "iou_threshold": 0.65}},
}


class Shapes(torch.utils.data.Dataset):
    """Dark images with a red or a green rectangle each, in the form that MMDetection's own loaders have."""

    def __init__(self, count, seed):
        self.count, self.seed = count, seed

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        from mmdet.structures import DetDataSample
        from mmengine.structures import InstanceData

        generator = torch.Generator().manual_seed(1000 * self.seed + index)
        label = int(torch.randint(2, (), generator=generator))
        width, height = torch.randint(24, 64, (2,), generator=generator).tolist()
        x = int(torch.randint(0, SIZE - width, (), generator=generator))
        y = int(torch.randint(0, SIZE - height, (), generator=generator))
        image = 50 * torch.rand(3, SIZE, SIZE, generator=generator)
        image[label, y : y + height, x : x + width] = 255
        box = torch.tensor([[x, y, x + width, y + height]], dtype=torch.float)
        sample = DetDataSample(metainfo={"img_shape": (SIZE, SIZE), "ori_shape": (SIZE, SIZE), "scale_factor": (1, 1)})
        sample.gt_instances = InstanceData(bboxes=box, labels=torch.tensor([label]))
        return {"inputs": image, "data_samples": sample}


def make_spec(count, seed):
    """Return batches as the trainer wants them explained."""
    from mmengine.dataset import pseudo_collate

    loader = DataLoader(Shapes(count, seed), batch_size=8, shuffle=True, collate_fn=pseudo_collate)
    return DataSpec(loader, get_num_samples_in_batch=count_detection_samples, split_batch=split_detection_batch)


@pytest.fixture
def detector():
    """Return the model as the specification builds it."""
    from mmdet.registry import MODELS
    from mmdet.utils import register_all_modules
    from mmengine import ConfigDict

    register_all_modules()
    torch.manual_seed(0)
    yolox = MODELS.build(ConfigDict(YOLOX))
    yolox.init_weights()
    return yolox


@pytest.mark.filterwarnings("ignore:device_train_microbatch_size=4 does not give")  # losses of objects, BatchNorm
def test_precision_rises(detector):
    """A training in parts of batches lowers the loss, and raises mAP on drawings that it has not seen."""
    model, log = MMDetModel(detector), InMemoryLogger()
    trainer = Trainer(
        model=model,
        train_dataloader=make_spec(96, seed=1),
        eval_dataloader=make_spec(24, seed=2),
        optimizers=torch.optim.AdamW(model.parameters(), lr=2e-3),
        max_duration="12ep",
        eval_interval="6ep",
        device_train_microbatch_size=4,
        loggers=log,
        progress_bar=False,
        seed=0,
        device="cpu",
    )

    trainer.eval()
    before = trainer.state.eval_metric_values["MAP/map_50"].item()
    trainer.fit()

    losses = [float(value) for _, value in log.data["loss/train/total"]]
    after = trainer.state.eval_metric_values["MAP/map_50"].item()
    assert {"loss/train/loss_cls", "loss/train/loss_bbox", "loss/train/loss_obj"} <= log.data.keys()
    assert sum(losses[-12:]) < 0.6 * sum(losses[:12])
    assert before < 0.05
    assert after > 0.25


def test_predictions_are_those_of_mmdetection(detector):
    """In evaluation the boxes are what MMDetection's own test step returns for the batch."""
    model = MMDetModel(detector).eval()
    batch = next(iter(make_spec(8, seed=3).dataloader))

    with torch.no_grad():
        actual = model.eval_forward(batch)
        expected = [sample.pred_instances for sample in detector.test_step(batch)]

    assert len(actual) == 8
    for one, other in zip(actual, expected, strict=True):
        assert torch.equal(one["boxes"], other.bboxes)
        assert torch.equal(one["scores"], other.scores)
        assert torch.equal(one["labels"], other.labels)


def test_loss_is_that_of_mmdetection(detector):
    """The sum of the losses is what MMDetection's own training step would minimise."""
    model = MMDetModel(detector)
    batch = next(iter(make_spec(8, seed=3).dataloader))

    actual = sum(model.loss(model(batch), batch).values())

    data = detector.data_preprocessor(batch, training=True)
    expected, _ = detector.parse_losses(detector(**data, mode="loss"))
    torch.testing.assert_close(actual, expected)
