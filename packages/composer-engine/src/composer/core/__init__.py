"""Events, state, order and conflicts: what algorithms need of a training loop, and a loop of algorithms."""

from composer.core.algorithm import Algorithm, NoEffectWarning
from composer.core.batch import Batch, BatchKey, batch_get, batch_set
from composer.core.callback import Callback
from composer.core.data_spec import DataSpec, ensure_data_spec
from composer.core.engine import Engine
from composer.core.evaluator import Evaluator, ensure_evaluator, evaluate_periodically
from composer.core.event import Event
from composer.core.interval import Interval
from composer.core.logger import Logger, LoggerDestination, Trace
from composer.core.passes import AlgorithmPass
from composer.core.plan import AlgorithmConflictError, Plan, explain
from composer.core.precision import MemoryFormat, Precision, TrainerMode, get_precision_context
from composer.core.serializable import Serializable
from composer.core.stage import Stage
from composer.core.state import State, SupportsTraining
from composer.core.time import Time, Timestamp, TimeUnit, ensure_time

__all__ = [
    "Algorithm",
    "AlgorithmConflictError",
    "AlgorithmPass",
    "Batch",
    "BatchKey",
    "Callback",
    "DataSpec",
    "Engine",
    "Evaluator",
    "Event",
    "Interval",
    "Logger",
    "LoggerDestination",
    "MemoryFormat",
    "NoEffectWarning",
    "Plan",
    "Precision",
    "Serializable",
    "Stage",
    "State",
    "SupportsTraining",
    "Time",
    "TimeUnit",
    "Timestamp",
    "Trace",
    "TrainerMode",
    "batch_get",
    "batch_set",
    "ensure_data_spec",
    "ensure_evaluator",
    "ensure_time",
    "evaluate_periodically",
    "explain",
    "get_precision_context",
]
