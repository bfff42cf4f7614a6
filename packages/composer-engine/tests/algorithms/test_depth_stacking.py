"""DepthStacking: when the model grows, and what is added to the algorithms."""

from torch import nn

from composer.algorithms import DepthStacking
from fixtures.models import WithLoss
from fixtures.surgery import start


def blocks():
    """Return a model with a list of two equal blocks."""
    return WithLoss(nn.Sequential(nn.Flatten(), nn.Linear(192, 4), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))))


def test_grows_at_its_time():
    """Before the second batch, and once; the growth is an algorithm of its own, with which a checkpoint is loaded."""
    engine = start(blocks(), DepthStacking("1ba", 3, blocks="network.2"))
    depths = []
    for _ in range(3):
        engine.run_event("batch_start")
        depths.append(len(engine.state.model.network[2]))
        engine.state.timestamp = engine.state.timestamp.to_next_batch(4)

    assert depths == [2, 6, 6]
    assert [one.at is None for one in engine.state.algorithms] == [False, True]
    assert [one.required_on_load() for one in engine.state.algorithms] == [False, True]


def test_grows_at_construction():
    """With at=None it is like other surgery."""
    engine = start(blocks(), DepthStacking(None, blocks="network.2"))

    assert len(engine.state.model.network[2]) == 4
