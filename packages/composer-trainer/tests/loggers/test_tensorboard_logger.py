"""TensorBoard's files, read by TensorBoard."""

import time

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams import plugin_data_pb2

from composer.core import State
from composer.loggers import InMemoryLogger, TensorboardLogger
from fixtures import make_loader, small_run, trained


def train(*loggers, **options):
    """Train for two epochs of five batches with metrics, and close."""
    settings = {"eval_dataloader": make_loader(), "train_metrics": None, "seed": 3, "run_name": "the-run"}
    trained(max_duration="2ep", loggers=loggers, **settings | options)


def read(folder):
    """Return TensorBoard's content of a folder."""
    events = EventAccumulator(str(folder), size_guidance={"images": 0, "scalars": 0})
    events.Reload()
    return events


def scalars(events, name):
    return [(event.step, event.value) for event in events.Scalars(name)]


class TestScalars:
    def test_every_loss_and_metric(self, tmp_path):
        """TensorBoard has the same values and steps as InMemoryLogger, with the time of logging."""
        memory = InMemoryLogger()

        train(TensorboardLogger(str(tmp_path)), memory)

        events = read(tmp_path / "the-run")
        for name in ["loss/train/total", "metrics/train/MulticlassAccuracy", "metrics/eval/MulticlassAccuracy"]:
            expected = [(int(clock.batch), pytest.approx(value)) for clock, value in memory.data[name]]
            assert scalars(events, name) == expected
        times = [event.wall_time for event in events.Scalars("loss/train/total")]
        assert times == sorted(times)
        assert len(set(times)) == 10


class TestOtherThings:
    def test_hyperparameters(self, tmp_path):
        """TensorBoard's plugin reads them with flat names, in the run's one file."""
        logger = TensorboardLogger(str(tmp_path))
        train(logger)

        metadata = read(tmp_path / "the-run").summary_metadata["_hparams_/session_start_info"]
        content = plugin_data_pb2.HParamsPluginData.FromString(metadata.plugin_data.content)
        values = content.session_start_info.hparams
        assert values["rank_zero_seed"].number_value == 3
        assert values["max_duration"].string_value == "2ep"
        assert len(list(tmp_path.rglob("*tfevents*"))) == 1

    def test_images(self, make_loop, tmp_path):
        """Images of one size are shown together, others one by one; pixel values are preserved."""
        loop = make_loop(TensorboardLogger(str(tmp_path)), run_name="a")
        white = torch.ones(3, 8, 8)
        loop.logger.log_images(torch.stack([white, white]), name="same", step=4)
        loop.logger.log_images([white, torch.zeros(3, 4, 4)], name="different")
        loop.engine.close()

        events = read(tmp_path / "a")
        shapes = {
            tag: (image.step, image.height, image.width)
            for tag in events.Tags()["images"]
            for image in events.Images(tag)
        }
        assert shapes == {"same": (4, 8, 16), "different/0": (0, 8, 8), "different/1": (0, 4, 4)}

    def test_table(self, make_loop, tmp_path):
        """A table is Markdown text."""
        loop = make_loop(TensorboardLogger(str(tmp_path)), run_name="a")
        loop.logger.log_table(["id", "text"], [[1, "a|b"]], name="best", step=2)
        loop.engine.close()

        (event,) = read(tmp_path / "a").Tensors("best/text_summary")
        assert event.tensor_proto.string_val[0].decode() == "| id | text |\n| --- | --- |\n| 1 | a\\|b |"


class TestResuming:
    def test_resume(self, tmp_path):
        """A run with an earlier state of its name writes to the same folder."""
        first = TensorboardLogger(str(tmp_path / "first"))
        train(first)
        later = TensorboardLogger(str(tmp_path / "first"))
        later.load_state_dict(first.state_dict())

        train(later)

        assert len(list((tmp_path / "first" / "the-run").iterdir())) == 2

    def test_a_checkpoint_does_not_choose_the_folder(self, tmp_path):
        """A folder in a checkpoint that is not the logger's is not written to."""
        later = TensorboardLogger(str(tmp_path / "own"))
        later.load_state_dict({"folder": str(tmp_path / "elsewhere")})

        train(later)

        assert not (tmp_path / "elsewhere").exists()
        assert len(list((tmp_path / "own" / "the-run").iterdir())) == 1

    def test_values_after_the_checkpoint_are_hidden(self, make_loop, tmp_path):
        """Values of the first run after the checkpoint are removed from the curves."""
        first = TensorboardLogger(str(tmp_path))
        loop = make_loop(first, run_name="a")
        loop.fit(epochs=1)
        loop.engine.close()
        time.sleep(1.1)  # TensorBoard reads files in the order of their names, which begin with the second
        later = TensorboardLogger(str(tmp_path))
        state = State(model=None, run_name="a")
        later.load_state_dict(first.state_dict())
        state.timestamp = state.timestamp.to_next_batch()

        later.open_run(state)
        later.close_run()

        # A resumed run repeats the loss of batch 1, with the same value.
        assert scalars(read(tmp_path / "a"), "loss/train/total") == [(0, 0.0), (1, 1.0)]

    def test_resume_from_the_end_of_an_epoch(self, tmp_path):
        """The metrics of that epoch remain, although it is not evaluated again."""
        for stop in ("1ep", None):
            options = {"eval_dataloader": make_loader(), "train_metrics": None, "run_name": "a", "autoresume": True}
            logger = TensorboardLogger(str(tmp_path / "logs"))
            folder = str(tmp_path / "checkpoints")
            with small_run(loggers=logger, save_folder=folder, max_duration="2ep", **options) as trainer:
                trainer.fit(duration=stop) if stop else trainer.fit()
            time.sleep(1.1)  # see above

        events = read(tmp_path / "logs" / "a")
        for label in ("train", "eval"):
            assert [step for step, _ in scalars(events, f"metrics/{label}/MulticlassAccuracy")] == [5, 10]
