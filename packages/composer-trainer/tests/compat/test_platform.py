"""The logger of the vendor's platform is disabled."""

import logging

from composer.compat.platform import MosaicMLLogger
from fixtures import small_run


def test_the_logger_is_disabled(caplog):
    """It says so once, and takes part in a run."""
    with caplog.at_level(logging.WARNING):
        logger = MosaicMLLogger(log_interval=30)

    with small_run(loggers=logger, max_duration="2ba") as trainer:
        trainer.fit()
        logger.log_metadata({"a": 1})
        logger.log_exception(ValueError("a"))

    assert "is disabled" in caplog.text
    assert trainer.state.timestamp.batch == 2
