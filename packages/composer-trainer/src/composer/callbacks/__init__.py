"""What watches a run and changes nothing of what is learnt."""

from composer.callbacks.lr_monitor import LRMonitor
from composer.callbacks.speed_monitor import SpeedMonitor
from composer.core import Callback

__all__ = ["Callback", "LRMonitor", "SpeedMonitor"]
