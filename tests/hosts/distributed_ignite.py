"""Trains with Ignite in each process that torchrun starts, and writes the weights into a folder: its argument."""

import json
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import ignite.distributed as idist
from comparison import SEED, weights_of
from ignite.engine import create_supervised_trainer
from small_training import make_loader, make_net, sgd
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from composer.algorithms import EMA, SAM
from composer.integrations.ignite import attach_algorithms


def train(rank, folder):
    """Train with every second batch, and write the weights and the clock."""
    net = make_net()
    model, optimizer = DistributedDataParallel(net), sgd(net)
    trainer = create_supervised_trainer(model, optimizer, cross_entropy)
    algorithms = attach_algorithms(trainer, model, optimizer, cross_entropy, [SAM(), EMA("2ba")], seed=SEED)
    trainer.run(list(make_loader())[rank::2], max_epochs=2)
    weights = {name: weight.flatten().tolist() for name, weight in weights_of(algorithms.state, net).items()}
    clock = [str(time) for time in (algorithms.state.timestamp.batch, algorithms.state.timestamp.sample)]
    (Path(folder) / f"{rank}.json").write_text(json.dumps({"weights": weights, "clock": clock}))
    # Gloo's threads release their last tensors with the interpreter's lock. One that does so while the interpreter
    # shuts down aborts the program; Ignite destroys the group at once.
    time.sleep(0.2)


with idist.Parallel(backend="gloo") as parallel:
    parallel.run(train, sys.argv[1])
