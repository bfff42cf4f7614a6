"""Masks, boxes and matrices are drawn, and pictures reach files and TensorBoard; MLflow has its own test."""

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassConfusionMatrix

from composer import DataSpec, Evaluator, Logger, State, Trainer
from composer.callbacks import ImageVisualizer, MatrixVisualizer
from composer.loggers import FileLogger, InMemoryLogger, TensorboardLogger
from composer.loggers.images import draw_boxes, draw_matrix, to_images, with_masks
from composer.models import ComposerClassifier, ComposerModel, count_detection_samples

MATRIX = torch.tensor([[8, 2, 0], [1, 9, 0], [0, 5, 5]])


def evaluated(metric, *components, labels=3):
    """Evaluate a classifier on images of three classes."""
    data = TensorDataset(torch.rand(12, 4), torch.arange(12) % labels)
    torch.manual_seed(0)
    model = ComposerClassifier(nn.Linear(4, labels), val_metrics=[metric], train_metrics=[], num_classes=labels)
    loggers = [one for one in components if not isinstance(one, MatrixVisualizer)]
    callbacks = [one for one in components if isinstance(one, MatrixVisualizer)]
    with Trainer(model=model, eval_dataloader=DataLoader(data, 6), loggers=loggers, callbacks=callbacks,
                 run_name="run", device="cpu", progress_bar=False) as trainer:  # fmt: skip
        return trainer.eval()["eval"]


class TestDrawing:
    def test_masks(self):
        """Each pixel is the mean of the image and its class's color; images without masks stay as they are."""
        images = to_images(torch.full((2, 1, 4, 4), 200, dtype=torch.uint8))
        mask = torch.tensor([[0, 1, 1, 2]] * 4).expand(2, 4, 4)

        drawn = with_masks(images, "scene", {"found": mask})

        assert list(drawn) == ["scene", "scene/found"]
        assert drawn["scene"] is images
        colors = [[*map(int, drawn["scene/found"][1][0, column])] for column in range(4)]
        assert colors[1] == colors[2]
        assert len({*map(tuple, colors)}) == 3
        assert all(100 <= value <= 228 for color in colors for value in color)

    def test_boxes(self):
        """True boxes are green and found ones red; an image without boxes is unchanged."""
        boxes = torch.tensor([[1.0, 1.0, 5.0, 5.0]]), torch.tensor([[8.0, 8.0, 12.0, 12.0]])

        pixels = draw_boxes(torch.zeros(3, 16, 16), *boxes)

        assert pixels[:, 1, 3].tolist() == [255, 0, 0]
        assert pixels[:, 8, 10].tolist() == [0, 255, 0]
        assert not draw_boxes(torch.zeros(3, 16, 16), torch.zeros(0, 4), torch.zeros(0, 4)).any()

    def test_matrix(self):
        """Cells are the darker, the larger their part of the row is."""
        picture = draw_matrix(torch.eye(2) * torch.tensor([[10], [1000]])).float()

        height, width = picture.shape[:2]
        cells = picture[height // 5, width // 3].mean(), picture[height // 5, 2 * width // 3].mean()
        assert cells[0] < 150 < cells[1]
        assert draw_matrix(MATRIX, ["a", "b", "c"]).shape == (*draw_matrix(MATRIX).shape[:2], 3)
        assert draw_matrix(torch.rand(100, 100)).shape[-1] == 3


class TestFiles:
    def test_png(self, tmp_path):
        """A FileLogger writes images, and those with masks, as PNG files, and a line with their paths."""
        logger = FileLogger(str(tmp_path / "log.txt"), capture_stdout=False, capture_stderr=False)
        images = torch.randint(256, (2, 3, 4, 4), dtype=torch.uint8)
        run = Logger(state := State(model=None), destinations=logger)
        logger.init(state, run)

        logger.log_images(images, "Images/Eval", step=7, masks={"found": torch.ones(2, 4, 4)})
        logger.close(state, run)

        files = sorted(str(one.relative_to(tmp_path)) for one in tmp_path.rglob("*.png"))
        names = [f"images/Images/Eval{kind}-ba7-{place}.png" for kind in ("", "/found") for place in (0, 1)]
        assert files == sorted(names)
        stored = np.asarray(Image.open(tmp_path / "images/Images/Eval-ba7-1.png"))
        assert np.array_equal(stored, images[1].permute(1, 2, 0))
        assert '"images": "Images/Eval", "files": ["images/Images/Eval-ba7-0.png"' in (tmp_path / "log.txt").read_text()

    def test_several_processes(self, tmp_path, monkeypatch):
        """Each process has its own pictures."""
        monkeypatch.setenv("WORLD_SIZE", "2")
        for rank in (0, 1):
            logger = FileLogger(str(tmp_path / "log{rank}.txt"), capture_stdout=False, capture_stderr=False)
            logger.init(state := State(model=None, rank=rank), run := Logger(state, destinations=logger))
            logger.log_images(torch.full((1, 3, 4, 4), rank, dtype=torch.uint8), "seen", step=7)
            logger.close(state, run)

        stored = {one.name: np.asarray(Image.open(one)).max() for one in tmp_path.rglob("*.png")}
        assert stored == {"seen-ba7-0-rank0.png": 0, "seen-ba7-0-rank1.png": 1}

    def test_tensorboard(self, tmp_path):
        """A confusion matrix is one picture in TensorBoard, and no chart."""
        pytest.importorskip("tensorboard")
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        evaluated(MulticlassConfusionMatrix(3), TensorboardLogger(str(tmp_path)), MatrixVisualizer())

        events = EventAccumulator(str(tmp_path / "run"))
        events.Reload()
        assert events.Tags()["images"] == ["Images/eval/MulticlassConfusionMatrix"]
        assert not [name for name in events.Tags()["scalars"] if "Confusion" in name]

    def test_masks_are_drawn_where_a_tracker_has_none(self, tmp_path):
        """TensorBoard gets images with the masks drawn over them."""
        pytest.importorskip("tensorboard")
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        logger = TensorboardLogger(str(tmp_path))
        state = State(model=None, run_name="run")
        run = Logger(state, destinations=logger)
        logger.init(state, run)
        logger.open(state)
        logger.log_images(torch.rand(2, 3, 4, 4), "scene", masks={"found": torch.ones(2, 4, 4)})
        logger.close(state, run)
        logger.post_close()

        events = EventAccumulator(str(tmp_path / "run"))
        events.Reload()
        assert sorted(events.Tags()["images"]) == ["scene", "scene/found"]


class TestDetection:
    def test_boxes_of_an_evaluation(self):
        """Boxes with a score of 0.5 or more are drawn in red, and true ones in green."""
        found = torch.tensor([[1.0, 1.0, 5.0, 5.0], [1.0, 8.0, 5.0, 12.0]])
        true = torch.tensor([[8.0, 8.0, 12.0, 12.0]])

        class Finds(ComposerModel):
            def forward(self, batch):
                return [{"boxes": found, "scores": torch.tensor([0.9, 0.2])} for _ in batch[0]]

            def loss(self, outputs, batch):
                raise NotImplementedError

            def get_metrics(self, is_train):
                return {}

        batch = [torch.zeros(3, 16, 16), torch.zeros(3, 20, 16)], [{"boxes": true}, {"boxes": true[:0]}]
        memory, data = InMemoryLogger(), DataSpec([batch], get_num_samples_in_batch=count_detection_samples)
        evaluator = Evaluator(label="eval", dataloader=data, metric_names=[])
        with Trainer(model=Finds(), eval_dataloader=evaluator, loggers=memory, device="cpu", progress_bar=False,
                     callbacks=ImageVisualizer(mode="detection")) as trainer:  # fmt: skip
            trainer.eval()

        ((_, (first, second)),) = memory.images["Images/Eval"]
        assert (first.shape, second.shape) == ((16, 16, 3), (20, 16, 3))
        assert first[1, 3].tolist() == [255, 0, 0]
        assert first[8, 10].tolist() == [0, 255, 0]
        assert not first[8, 3].any()
        assert second[1, 3].tolist() == [255, 0, 0]
        assert not second[8, 10].any()
