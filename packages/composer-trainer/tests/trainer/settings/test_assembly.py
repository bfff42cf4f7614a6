"""The parts of a trainer are closed once, also after an error."""

import pytest

from composer.core import Callback
from fixtures import small_run


def test_error_at_init_closes_callbacks():
    """Callbacks are closed after an error at INIT."""
    closed = []

    class Fails(Callback):
        def init(self, state, logger):
            raise LookupError("on purpose")

        def close(self, state, logger):
            closed.append(True)

    with pytest.raises(LookupError, match="on purpose"):
        small_run(callbacks=Fails())

    assert closed == [True]


def test_text_of_a_trainer():
    """The text of a trainer names model, run and device, and how far it has trained."""
    trainer = small_run(max_duration="2ep", run_name="first")
    trainer.fit(duration="3ba")

    assert repr(trainer) == (
        "Trainer(ComposerClassifier with 67 parameters, run_name='first', device='cpu', "
        "at epoch 0, batch 3 of max_duration='3ba')"
    )
