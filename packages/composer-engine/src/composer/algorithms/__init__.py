"""Algorithms: each a thin file that says where a kernel of :mod:`composer.functional` runs."""

from composer.algorithms.blurpool import BlurPool
from composer.algorithms.channels_last import ChannelsLast
from composer.algorithms.ema import EMA
from composer.algorithms.label_smoothing import LabelSmoothing
from composer.algorithms.mixup import MixUp

__all__ = ["EMA", "BlurPool", "ChannelsLast", "LabelSmoothing", "MixUp"]
