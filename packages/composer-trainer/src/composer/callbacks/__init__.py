"""Callbacks: observe a run without changing what is learned."""

from composer.callbacks.activation_monitor import ActivationMonitor
from composer.callbacks.cost_monitor import Cost, CostMonitor
from composer.callbacks.export_for_inference import ExportForInferenceCallback
from composer.callbacks.free_outputs import FreeOutputs
from composer.callbacks.garbage_collector import GarbageCollector
from composer.callbacks.generate import Generate
from composer.callbacks.gradient_noise_scale import GradientNoiseScale
from composer.callbacks.gradual_unfreezing import GradualUnfreezing
from composer.callbacks.image_visualizer import ImageVisualizer
from composer.callbacks.load_checkpoint import LoadCheckpoint
from composer.callbacks.lr_monitor import LRMonitor
from composer.callbacks.matrix_visualizer import MatrixVisualizer
from composer.callbacks.memory_monitor import MemoryMonitor
from composer.callbacks.memory_snapshot import MemorySnapshot, OOMObserver
from composer.callbacks.nan_monitor import NaNMonitor
from composer.callbacks.optimizer_monitor import OptimizerMonitor
from composer.callbacks.reduce_lr_on_plateau import ReduceLROnPlateau
from composer.callbacks.runtime_estimator import RuntimeEstimator
from composer.callbacks.save_pretrained import SavePretrained
from composer.callbacks.speed_monitor import SpeedMonitor
from composer.callbacks.stoppers import EarlyStopper, ThresholdStopper
from composer.callbacks.system_metrics_monitor import SystemMetricsMonitor
from composer.checkpoint.saver import CheckpointSaver
from composer.core import Callback
from composer.functional.former_names import serve_former_names
from composer.functional.signatures import unquote_annotations

__all__ = [
    "ActivationMonitor",
    "Callback",
    "CheckpointSaver",
    "Cost",
    "CostMonitor",
    "EarlyStopper",
    "ExportForInferenceCallback",
    "FreeOutputs",
    "GarbageCollector",
    "Generate",
    "GradientNoiseScale",
    "GradualUnfreezing",
    "ImageVisualizer",
    "LRMonitor",
    "LoadCheckpoint",
    "MatrixVisualizer",
    "MemoryMonitor",
    "MemorySnapshot",
    "NaNMonitor",
    "OOMObserver",
    "OptimizerMonitor",
    "ReduceLROnPlateau",
    "RuntimeEstimator",
    "SavePretrained",
    "SpeedMonitor",
    "SystemMetricsMonitor",
    "ThresholdStopper",
]

unquote_annotations(globals())
serve_former_names(__name__)
