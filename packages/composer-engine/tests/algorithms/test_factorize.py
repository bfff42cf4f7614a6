"""Factorize: layers as products of two."""

from composer import functional as cf
from composer.algorithms import Factorize
from fixtures.surgery import Surgery


class TestFactorize(Surgery):
    inserted = (cf.FactorizedConv2d, cf.FactorizedLinear)
    former_names = {
        "factorize/num_conv2d_replacements": cf.FactorizedConv2d,
        "factorize/num_linear_replacements": cf.FactorizedLinear,
    }

    def make(self):
        return Factorize(min_channels=16, min_features=16, latent_channels=0.25, latent_features=4)
