"""GatedLinearUnits: feed-forward layers with a gate."""

from torch import nn

from composer import functional as cf
from composer.algorithms import GatedLinearUnits
from fixtures.models import WithLoss
from fixtures.surgery import TOKENS, Surgery, start, transformer


class OwnBlock(nn.Module):
    """A custom feed-forward block."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(4, 4)
        self.act = nn.ReLU()

    def forward(self, hidden):
        return self.act(self.up(hidden))


class TestGatedLinearUnits(Surgery):
    make = GatedLinearUnits
    inserted = cf.GatedLinearUnit
    batch = TOKENS
    unfit = (ValueError, "GPT-2")

    def make_model(self):
        return transformer("bert")

    def test_own_block(self):
        """Settings describe the feed-forward block of the user's own model."""
        model = WithLoss(nn.Sequential(nn.Embedding(9, 4), OwnBlock()))
        units = GatedLinearUnits(feed_forward_module=OwnBlock, first_layer_attribute="up", activation_attribute="act")

        start(model, units)

        assert isinstance(model.network[1].up, cf.GatedLinearUnit)
        assert isinstance(model.network[1].act, nn.Identity)
