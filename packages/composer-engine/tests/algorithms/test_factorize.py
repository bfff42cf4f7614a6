"""Factorize: layers as products of two."""

import pytest

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

    @pytest.mark.parametrize(
        ("settings", "name"),
        [
            ({"latent_features": -1}, "latent_features"),
            ({"latent_channels": 2.5}, "latent_channels must be a whole number of at least 1, or a fraction"),
            ({"factorize_convs": False, "factorize_linears": False}, "factorize_convs"),
        ],
    )
    def test_bad_settings(self, settings, name):
        """Settings out of range raise at construction, with their names."""
        with pytest.raises((TypeError, ValueError), match=name):
            Factorize(**settings)
