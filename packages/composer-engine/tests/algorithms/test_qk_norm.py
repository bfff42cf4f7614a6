"""QKNorm: norms of queries and keys in attention."""

from composer.algorithms import QKNorm
from composer.functional.layers.attention import NormalizedHeads
from fixtures.surgery import TOKENS, Surgery, transformer


class TestQKNorm(Surgery):
    make = QKNorm
    inserted = NormalizedHeads
    batch = TOKENS
    unfit = (ValueError, "decoder like GPT-2")

    def make_model(self):
        return transformer("gpt2")
