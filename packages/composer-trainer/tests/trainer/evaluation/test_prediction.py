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


class Line(torch.nn.Linear):
    """A model without metrics."""

    def forward(self, batch):
        """Return the outputs for a tensor, alone or in a dictionary."""
        return super().forward(batch["x"] if isinstance(batch, dict) else batch)

    def loss(self, outputs, batch):
        """Return a mean."""
        return outputs.mean()


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

    def test_joins_the_outputs(self):
        """The outputs of all batches are one tensor, and so are the targets, row by row."""
        trainer, loader = small_run(), make_loader(samples=10, batch_size=4)

        outputs, targets = trainer.predict(loader, join=True, with_targets=True)
        pairs = trainer.predict(loader, with_targets=True)

        batches = [*loader]
        assert torch.equal(outputs, torch.cat(trainer.predict(loader)))
        assert torch.equal(targets, torch.cat([labels for _, labels in batches]))
        assert torch.equal(trainer.predict(loader, join=True), outputs)
        assert torch.equal(torch.cat([labels for _, labels in pairs]), targets)
        assert trainer.predict(loader, join=True, return_outputs=False) == []

    @pytest.mark.parametrize(
        ("batch", "error", "message"),
        [(torch.zeros(3, 4), TypeError, "needs batches"), ({"x": torch.zeros(3, 4)}, KeyError, "has no item 1")],
    )
    def test_targets_that_do_not_exist(self, batch, error, message):
        """Batches without targets raise an error that names their items."""
        trainer = small_run(model=Line(4, 2), train_dataloader=None)

        with pytest.raises(error, match=message):
            trainer.predict([batch], with_targets=True)

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ({"dataloaders": []}, r"predict\(\) has no argument 'dataloaders': did you mean 'dataloader'"),
            ({"test_dataloader": []}, r"predict\(\) has no argument 'test_dataloader': did you mean 'dataloader'"),
            ({"model": None, "dataloader": []}, r"predict\(\) has no argument 'model': give it to the Trainer"),
        ],
    )
    def test_names_of_other_trainers(self, arguments, message):
        """The error suggests the right name."""
        with pytest.raises(TypeError, match=message):
            small_run().predict(**arguments)

    def test_streams_to_callbacks(self):
        """Callbacks receive each batch's outputs and the clock, also with return_outputs=False."""
        recorder = Seen()
        trainer = small_run(callbacks=recorder)

        returned = trainer.predict(make_loader(samples=10, batch_size=4), 2, return_outputs=False)

        assert returned == []
        assert recorder.clock == [(1, 4), (2, 8)]
        assert len(recorder.outputs) == 2
        assert recorder.events == [("predict", 2), "end"]

    def test_does_not_change_training(self):
        """Training continues with bit-identical results in the same mode."""
        plain, predicting = small_run(), small_run()

        for trainer in (plain, predicting):
            trainer.fit(duration="3ba")
            if trainer is predicting:
                trainer.predict(
                    DataLoader(TensorDataset(torch.rand(6, 4), torch.zeros(6)), shuffle=True), with_targets=True
                )
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

    def test_shuffled_outputs_warn(self):
        """Outputs in an unknown order give a warning; with targets, or only for callbacks, they do not."""
        loader = DataLoader(TensorDataset(torch.rand(6, 4), torch.zeros(6)), shuffle=True)

        with pytest.warns(UserWarning, match="shuffle=False, or give with_targets=True") as caught:
            small_run().predict(loader)
        assert caught[0].filename == __file__
        small_run().predict(loader, with_targets=True)
        small_run().predict(loader, return_outputs=False)
