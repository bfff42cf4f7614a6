"""Loggers: progress bar, console, memory, files and experiment trackers."""

from composer.core import Logger, LoggerDestination
from composer.functional.former_names import serve_former_names
from composer.functional.signatures import unquote_annotations
from composer.loggers.aim_logger import AimLogger
from composer.loggers.comet_ml_logger import CometMLLogger
from composer.loggers.console_logger import ConsoleLogger
from composer.loggers.csv_logger import CSVLogger
from composer.loggers.file_logger import FileLogger
from composer.loggers.in_memory_logger import InMemoryLogger
from composer.loggers.mlflow_logger import MLFlowLogger
from composer.loggers.neptune_logger import NeptuneLogger
from composer.loggers.progress_bar_logger import ProgressBarLogger
from composer.loggers.slack_logger import SlackLogger
from composer.loggers.swanlab_logger import SwanLabLogger
from composer.loggers.tensorboard_logger import TensorboardLogger
from composer.loggers.trackio_logger import TrackioLogger
from composer.loggers.wandb_logger import WandBLogger

__all__ = [
    "AimLogger",
    "CSVLogger",
    "CometMLLogger",
    "ConsoleLogger",
    "FileLogger",
    "InMemoryLogger",
    "Logger",
    "LoggerDestination",
    "MLFlowLogger",
    "NeptuneLogger",
    "ProgressBarLogger",
    "SlackLogger",
    "SwanLabLogger",
    "TensorboardLogger",
    "TrackioLogger",
    "WandBLogger",
]

unquote_annotations(globals())
serve_former_names(__name__)
