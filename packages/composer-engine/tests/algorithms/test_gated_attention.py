"""GatedAttention: gates on the output of attention."""

from composer.algorithms import GatedAttention
from composer.functional.layers import attention
from fixtures.surgery import TOKENS, Surgery, transformer


class TestGatedAttention(Surgery):
    make = GatedAttention
    inserted = attention.GatedAttention
    batch = TOKENS
    unfit = (ValueError, "decoder like GPT-2")

    def make_model(self):
        return transformer("gpt2")
