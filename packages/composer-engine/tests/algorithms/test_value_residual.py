"""ValueResidual: values of the first attention in later ones."""

from composer.algorithms import ValueResidual
from composer.functional.layers.attention import MixedValues
from fixtures.models import WithLoss, make_transformer
from fixtures.surgery import TOKENS, Surgery


class TestValueResidual(Surgery):
    make = ValueResidual
    inserted = MixedValues
    batch = TOKENS
    unfit = (ValueError, "decoder like GPT-2")

    def make_model(self):
        return WithLoss(make_transformer("gpt2", layers=2))
