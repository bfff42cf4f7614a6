"""Trains with Ignite in each process that torchrun starts, and writes the weights into a folder: its argument."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import ignite.distributed as idist
from comparison import SEED, weights_of
from ignite.engine import create_supervised_trainer
from small_training import make_loader, make_net, sgd, write_and_exit
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
    write_and_exit(folder, rank, {"weights": weights, "clock": clock})


with idist.Parallel(backend="gloo") as parallel:
    parallel.run(train, sys.argv[1])
