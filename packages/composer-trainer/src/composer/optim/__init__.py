"""Optimizers (Muon, and others with decoupled weight decay), and learning rate schedules in any unit of time."""

from composer.functional.former_names import serve_former_names
from composer.functional.signatures import unquote_annotations
from composer.optim.decoupled_weight_decay import DecoupledAdamW, DecoupledSGDW
from composer.optim.muon import Muon, muon_with_adamw
from composer.optim.plot import plot_schedule
from composer.optim.scheduler import (
    ComposerScheduler,
    ConstantScheduler,
    ConstantWithWarmupScheduler,
    CosineAnnealingScheduler,
    CosineAnnealingWarmRestartsScheduler,
    CosineAnnealingWithWarmupScheduler,
    ExponentialScheduler,
    InverseSquareRootScheduler,
    LinearScheduler,
    LinearWithWarmupScheduler,
    MultiStepScheduler,
    MultiStepWithWarmupScheduler,
    PolynomialScheduler,
    PolynomialWithWarmupScheduler,
    StepScheduler,
    WarmupStableDecayScheduler,
    compile_composer_scheduler,
)

__all__ = [
    "ComposerScheduler",
    "ConstantScheduler",
    "ConstantWithWarmupScheduler",
    "CosineAnnealingScheduler",
    "CosineAnnealingWarmRestartsScheduler",
    "CosineAnnealingWithWarmupScheduler",
    "DecoupledAdamW",
    "DecoupledSGDW",
    "ExponentialScheduler",
    "InverseSquareRootScheduler",
    "LinearScheduler",
    "LinearWithWarmupScheduler",
    "MultiStepScheduler",
    "MultiStepWithWarmupScheduler",
    "Muon",
    "PolynomialScheduler",
    "PolynomialWithWarmupScheduler",
    "StepScheduler",
    "WarmupStableDecayScheduler",
    "compile_composer_scheduler",
    "muon_with_adamw",
    "plot_schedule",
]

unquote_annotations(globals())
serve_former_names(__name__)
