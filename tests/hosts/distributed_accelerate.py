"""Trains with Accelerate in each process that torchrun starts, and writes the weights into a folder: its argument."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from small_training import write_and_exit
from test_accelerate import Run

from composer.algorithms import EMA, SAM, BlurPool

run = Run([BlurPool(min_channels=8), SAM(), EMA("2ba")], lr_steps=99)
weights = {name: weight.flatten().tolist() for name, weight in run.train().items()}
clock = [str(run.clock.batch), str(run.clock.sample), str(run.clock.epoch)]
write_and_exit(sys.argv[1], run.accelerator.process_index, {"weights": weights, "clock": clock})
