"""SqueezeExcite: channel attention after convolutions."""

import torch

from composer import functional as cf
from composer.algorithms import GyroDropout, SqueezeExcite
from fixtures.surgery import Surgery, convolutions, start


class TestSqueezeExcite(Surgery):
    inserted = cf.SqueezeExciteConv2d
    former_names = {"squeeze_excite/num_squeeze_excite_layers": cf.SqueezeExciteConv2d}

    def make(self):
        return SqueezeExcite(latent_channels=4, min_channels=16)

    def test_new_weights_do_not_depend_on_other_surgery(self):
        """A surgery's draws do not depend on other surgery, and do not advance torch's generator."""
        weights = []
        for algorithms in ([], [GyroDropout(sigma=4, tau=2)]):
            torch.manual_seed(3)
            model = convolutions()
            before = torch.get_rng_state()
            start(model, *algorithms, SqueezeExcite(latent_channels=4, min_channels=16))
            assert torch.equal(torch.get_rng_state(), before)
            weights.append(torch.cat([each.flatten() for each in model.parameters()]))

        assert torch.equal(*weights)
