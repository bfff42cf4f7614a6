"""Composer's logger for its vendor's platform, which is disabled elsewhere."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from composer.core import LoggerDestination

MOSAICML_ACCESS_TOKEN_ENV_VAR = "MOSAICML_ACCESS_TOKEN_FILE"  # noqa: S105  (the name of a variable)
MOSAICML_GPU_LOG_FILE_PREFIX_ENV_VAR = "MOSAICML_GPU_LOG_FILE_PREFIX"
MOSAICML_LOG_DIR_ENV_VAR = "MOSAICML_LOG_DIR"
MOSAICML_PLATFORM_ENV_VAR = "MOSAICML_PLATFORM"
RUN_NAME_ENV_VAR = "RUN_NAME"
MLFLOW_EXPERIMENT_ID_FORMAT_KEY = "mlflow_experiment_id"
MLFLOW_RUN_ID_FORMAT_KEY = "mlflow_run_id"


class MosaicMLLogger(LoggerDestination):
    """A logger that is always disabled, as Composer's is outside of its vendor's platform.

    Args:
        log_interval: Ignored.
        ignore_keys: Ignored.
        ignore_exceptions: Ignored.

    Example:
        >>> MosaicMLLogger().log_metrics({"loss": 1.0})
    """

    def __init__(
        self, log_interval: int = 60, ignore_keys: Sequence[str] | None = None, ignore_exceptions: bool = True
    ) -> None:
        self.log_interval, self.ignore_keys, self.ignore_exceptions = log_interval, ignore_keys, ignore_exceptions
        logging.getLogger(__name__).warning("MosaicMLLogger is disabled: the vendor's platform is not supported.")

    def log_metadata(self, metadata: dict[str, Any], force_flush: bool = False) -> None:
        """Do nothing."""

    def log_exception(self, exception: BaseException) -> None:
        """Do nothing."""
