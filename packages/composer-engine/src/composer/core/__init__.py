"""Events, state, order and conflicts: what algorithms need of a training loop, and a loop of algorithms."""

from composer.core.base import Algorithm, Callback, NoEffectWarning, algorithm_classes, rebuild_algorithm
from composer.core.data.batches import Batch, BatchKey, batch_get, batch_set
from composer.core.data.packing import pack_sequences
from composer.core.data.spec import DataSpec, ensure_data_spec
from composer.core.declarations import (
    AlgorithmConflictError,
    Conflict,
    ExclusiveResource,
    FieldsByEvent,
    ServedFields,
)
from composer.core.engine import Engine
from composer.core.evaluator import Evaluator, MetricValues, ensure_evaluator, evaluate_periodically, evaluation_weights
from composer.core.event import Event, Stage
from composer.core.hosts.adapter import Adapter, served_fields
from composer.core.interval import Interval
from composer.core.logger import Logger, LoggerDestination, Trace
from composer.core.passes import AlgorithmPass
from composer.core.plan import Plan, Subscription
from composer.core.planning import explain
from composer.core.precision import MemoryFormat, Precision, TrainerMode, get_precision_context
from composer.core.saving.codec import NotSerializableError, join_tensors, split_tensors, to_data
from composer.core.saving.components import Serializable, saved
from composer.core.saving.records import from_data
from composer.core.saving.saved_state import LoadReport, StateMismatchError
from composer.core.state import State, SupportsTraining
from composer.core.step import SplitStep
from composer.core.time import Time, Timestamp, TimeUnit, ensure_time
from composer.functional.former_names import serve_former_names
from composer.functional.signatures import unquote_annotations

__all__ = [
    "Adapter",
    "Algorithm",
    "AlgorithmConflictError",
    "AlgorithmPass",
    "Batch",
    "BatchKey",
    "Callback",
    "Conflict",
    "DataSpec",
    "Engine",
    "Evaluator",
    "Event",
    "ExclusiveResource",
    "FieldsByEvent",
    "Interval",
    "LoadReport",
    "Logger",
    "LoggerDestination",
    "MemoryFormat",
    "MetricValues",
    "NoEffectWarning",
    "NotSerializableError",
    "Plan",
    "Precision",
    "Serializable",
    "ServedFields",
    "SplitStep",
    "Stage",
    "State",
    "StateMismatchError",
    "Subscription",
    "SupportsTraining",
    "Time",
    "TimeUnit",
    "Timestamp",
    "Trace",
    "TrainerMode",
    "algorithm_classes",
    "batch_get",
    "batch_set",
    "ensure_data_spec",
    "ensure_evaluator",
    "ensure_time",
    "evaluate_periodically",
    "evaluation_weights",
    "explain",
    "from_data",
    "get_precision_context",
    "join_tensors",
    "pack_sequences",
    "rebuild_algorithm",
    "saved",
    "served_fields",
    "split_tensors",
    "to_data",
]

unquote_annotations(globals())
serve_former_names(__name__)
