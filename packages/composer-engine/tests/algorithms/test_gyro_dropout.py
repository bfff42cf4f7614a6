"""GyroDropout: masks that are drawn once and used in turn."""

import pytest
from torch.utils.data import DataLoader, IterableDataset

from composer import functional as cf
from composer.algorithms import GyroDropout
from composer.core import Engine, State
from fixtures.surgery import Surgery, convolutions, start


class TestGyroDropout(Surgery):
    inserted = cf.GyroDropout

    def make(self):
        return GyroDropout(sigma=4, tau=2)

    def test_period_is_derived_from_max_duration(self):
        """The masks evenly divide two epochs of two batches of two microbatches."""
        engine = start(convolutions(), GyroDropout(sigma=4, tau=1), device_train_microbatch_size=1)
        layer = next(each for each in engine.state.model.modules() if isinstance(each, cf.GyroDropout))

        assert layer.period == 2 * 2 * 2 * 1 / 4

    def test_longer_training_has_longer_periods(self):
        """A longer fit, or one with a subset of batches, is divided evenly among the masks."""
        engine = start(convolutions(), GyroDropout(sigma=4, tau=1))
        layer = next(each for each in engine.state.model.modules() if isinstance(each, cf.GyroDropout))
        periods = [layer.period]
        engine.state.max_duration = "8ep"
        engine.run_event("fit_start")
        periods.append(layer.period)
        engine.state.set_dataloader(engine.state.train_dataloader, "train", 1)
        engine.run_event("fit_start")
        periods.append(layer.period)

        assert periods == [1, 4, 2]

    def test_replaced_at_init_if_the_length_is_known(self):
        """Layers are replaced at INIT, before masks are loaded; without a known length, at FIT_START."""
        model = convolutions()
        state = State(model=model, train_dataloader=DataLoader([0, 1], batch_size=1))
        engine = Engine(state, algorithms=GyroDropout(sigma=4, tau=2))

        engine.run_event("init")
        early = cf.count_module_instances(model, cf.GyroDropout)
        state.max_duration = "2ep"
        engine.run_event("fit_start")

        assert early == 0
        assert cf.count_module_instances(model, cf.GyroDropout) == 1

    def test_stream_without_a_length(self):
        """A duration in batches is enough for a stream; one in epochs raises an error that states what is missing."""

        class Stream(IterableDataset):
            def __iter__(self):
                yield 0

        model = convolutions()
        state = State(model=model, train_dataloader=DataLoader(Stream()), max_duration="8ba")
        Engine(state, algorithms=GyroDropout(sigma=4, tau=2)).run_event("init")
        [layer] = [each for each in model.modules() if isinstance(each, cf.GyroDropout)]
        unknown = State(model=convolutions(), train_dataloader=DataLoader(Stream()), max_duration="8ep")

        assert layer.period == 4
        with pytest.raises(
            ValueError, match=r"set State\.max_duration in epochs or batches, and train on a loader that"
        ):
            Engine(unknown, algorithms=GyroDropout()).run_event("fit_start")
