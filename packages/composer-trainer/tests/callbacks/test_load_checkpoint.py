"""Checkpoints are loaded before training."""

import pytest
import torch

from composer.callbacks import LoadCheckpoint
from composer.checkpoint import CheckpointError, CheckpointMismatchError, save_checkpoint
from composer.core import Engine, State, Timestamp


def make_state(seed, size=3, **options):
    torch.manual_seed(seed)
    return State(torch.nn.Linear(4, size), run_name="blur", **options)


@pytest.fixture
def saved(tmp_path):
    """Return the path of a checkpoint."""
    state = make_state(0)
    state.timestamp = Timestamp(batch=5)
    return save_checkpoint(state, tmp_path / "blur")


class TestLoadCheckpoint:
    @pytest.mark.parametrize("event", ["init", "before_load", "after_load", "fit_start"])
    def test_loads_at_its_event(self, saved, event):
        """It loads at the given event only."""
        state = make_state(1, callbacks=LoadCheckpoint(saved, event=event))
        engine, batches = Engine(state), {}

        for one in ("init", "before_load", "after_load", "fit_start"):
            engine.run_event(one)
            batches[one] = int(state.timestamp.batch)

        order = list(batches)
        assert [batches[one] for one in order] == [0 if order.index(one) < order.index(event) else 5 for one in order]
        assert torch.equal(state.model.weight, make_state(0).model.weight)

    def test_run_name_is_filled_in(self, saved, tmp_path):
        """The path may contain the run's name."""
        state = make_state(1, callbacks=LoadCheckpoint(tmp_path / "{run_name}", load_weights_only=True))

        Engine(state).run_event("before_load")

        assert torch.equal(state.model.weight, make_state(0).model.weight)
        assert int(state.timestamp.batch) == 0

    def test_settings_are_passed_on(self, saved):
        """Ignored keys and strictness are passed to loading."""
        bare = torch.nn.Linear(4, 3, bias=False)
        strict = State(bare, callbacks=LoadCheckpoint(saved, load_weights_only=True))
        lax = State(bare, callbacks=LoadCheckpoint(saved, True, strict_model_weights=False))
        ignoring = State(bare, callbacks=LoadCheckpoint(saved, True, ignore_keys="model/bias"))

        with pytest.raises(CheckpointMismatchError, match=r"model\.bias is saved"):
            Engine(strict).run_event("before_load")
        with pytest.warns(UserWarning, match=r"model\.bias is saved"):
            Engine(lax).run_event("before_load")
        Engine(ignoring).run_event("before_load")

        assert ignoring.callbacks[0].loaded.ignored == ("model/bias",)

    def test_missing_checkpoint_raises(self):
        """A path without a checkpoint raises."""
        with pytest.raises(CheckpointError, match="no/such/run does not exist"):
            Engine(make_state(0, callbacks=LoadCheckpoint("no/such/run"))).run_event("before_load")
