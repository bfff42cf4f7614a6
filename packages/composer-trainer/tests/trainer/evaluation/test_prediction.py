"""Prediction: outputs of every batch, without effect on training."""

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from composer.core import Callback, DataSpec
from fixtures import make_loader, small_run, weights


class Seen(Callback):
    """Records the events and the state at them."""

    def __init__(self):
        """Nothing yet."""
        self.events, self.outputs, self.clock = [], [], []

    def predict_start(self, state, logger):
        """Record the label and length of the data."""
        self.events.append((state.dataloader_label, state.dataloader_len))

    def predict_batch_end(self, state, logger):
        """Record outputs and clock."""
        self.outputs.append(state.outputs)
        self.clock.append((int(state.predict_timestamp.batch), int(state.predict_timestamp.sample)))

    def predict_end(self, state, logger):
        """Record the event."""
        self.events.append("end")


class TestPredict:
    def test_returns_the_outputs_of_each_batch(self):
        """Outputs are computed in evaluation mode, without gradients, in order."""
        trainer, loader = small_run(), make_loader(samples=10, batch_size=4)

        outputs = trainer.predict(loader)

        with torch.no_grad():
            expected = [trainer.state.model.eval()(batch) for batch in loader]
        assert len(outputs) == 3
        assert all(torch.equal(one, other) for one, other in zip(outputs, expected, strict=True))
        assert not outputs[0].requires_grad

    def test_streams_to_callbacks(self):
        """Callbacks receive each batch's outputs and the clock, also with return_outputs=False."""
        recorder = Seen()
        trainer = small_run(callbacks=recorder)

        returned = trainer.predict(make_loader(samples=10, batch_size=4), 2, return_outputs=False)

        assert returned == []
        assert recorder.clock == [(1, 4), (2, 8)]
        assert len(recorder.outputs) == 2
        assert recorder.events == [("predict", 2), "end"]

    @pytest.mark.parametrize(("subset", "length"), [(-1, 3), (2, 2), (100, 3)])
    def test_length_of_the_data(self, subset, length):
        """The state has the number of batches, also if fewer are available than requested."""
        recorder = Seen()
        trainer = small_run(callbacks=recorder)

        trainer.predict(make_loader(samples=10, batch_size=4), subset)

        assert recorder.events == [("predict", length), "end"]
        assert len(recorder.outputs) == length

    def test_does_not_change_training(self):
        """Training continues with bit-identical results in the same mode."""
        plain, predicting = small_run(), small_run()

        for trainer in (plain, predicting):
            trainer.fit(duration="3ba")
            if trainer is predicting:
                trainer.predict(DataLoader(TensorDataset(torch.rand(6, 4), torch.zeros(6)), shuffle=True))
            trainer.fit(duration="7ba")

        assert torch.equal(weights(plain), weights(predicting))
        assert predicting.state.dataloader_label == "train"

    @pytest.mark.parametrize("name", ["batch_transforms", "microbatch_transforms"])
    def test_transforms_of_the_data(self, name):
        """A DataSpec's transforms are applied to each batch."""
        trainer = small_run()
        batches = [(torch.zeros(2, 4), torch.zeros(2))]
        spec = DataSpec(batches, **{name: lambda batch: (batch[0] + 1, batch[1])})

        (outputs,) = trainer.predict(spec)

        with torch.no_grad():
            assert torch.equal(outputs, trainer.state.model((torch.ones(2, 4), None)))

    def test_model_without_metrics(self):
        """Only forward is required."""

        class Line(torch.nn.Linear):
            def loss(self, outputs, batch):
                return outputs.mean()

        trainer = small_run(model=Line(4, 2), train_dataloader=None)

        (outputs,) = trainer.predict([torch.zeros(3, 4)])

        assert outputs.shape == (3, 2)

    @pytest.mark.parametrize(("loader", "subset", "kind"), [(5, -1, TypeError), ([], 0, ValueError)])
    def test_bad_input(self, loader, subset, kind):
        """A non-iterable and a number of batches out of range raise."""
        with pytest.raises(kind, match=r"iterable|subset_num_batches"):
            small_run().predict(loader, subset)
