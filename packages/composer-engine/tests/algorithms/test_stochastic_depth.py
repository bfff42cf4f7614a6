"""StochasticDepth: residual blocks are skipped at random."""

import pytest
from torch import nn

from composer import functional as cf
from composer.algorithms import StochasticDepth
from composer.core import Time, Timestamp
from fixtures.surgery import Surgery, bottlenecks, start


class TestStochasticDepth(Surgery):
    make_model = staticmethod(bottlenecks)
    inserted = cf.StochasticDepthBlock
    former_names = {"stochastic_depth/num_stochastic_layers": cf.StochasticDepthBlock}

    def make(self):
        return StochasticDepth("ResNetBottleneck", "sample")

    @pytest.mark.parametrize("warmup", [0.5, "0.5dur", Time(0.5, "dur")])
    def test_rates_warm_up(self, warmup):
        """Over the first half of the training the rates grow in proportion from zero."""
        engine = start(bottlenecks(), StochasticDepth("ResNetBottleneck", drop_rate=0.4, drop_warmup=warmup))
        engine.state.max_duration = "8ba"
        rates = []
        for _ in range(6):
            engine.run_event("batch_start")
            blocks = [each for each in engine.state.model.modules() if isinstance(each, cf.StochasticDepthBlock)]
            rates.append(blocks[-1].drop_rate)
            engine.state.timestamp = engine.state.timestamp.to_next_batch(samples=4)

        assert rates == pytest.approx([0, 0.1, 0.2, 0.3, 0.4, 0.4])

    def test_the_model_is_searched_only_while_rates_change(self):
        """Steps after the warm-up do not iterate over the modules."""

        class Counting(nn.Sequential):
            searches = 0

            def modules(self):
                self.searches += 1
                return super().modules()

        model = Counting(bottlenecks())
        engine, searches = start(model, StochasticDepth("ResNetBottleneck", drop_rate=0.4, drop_warmup=0.5)), []
        engine.state.max_duration = "8ba"
        for _ in range(8):
            model.searches = 0
            engine.run_event("batch_start")
            searches.append(model.searches)
            engine.state.timestamp = engine.state.timestamp.to_next_batch(samples=4)

        assert [count > 0 for count in searches] == [False] + 4 * [True] + 3 * [False]  # of batch 0 after the load

    def test_rates_follow_the_clock_after_loading_and_restarting(self):
        """After loading, an evaluation uses the saved moment's rates; a restarted training warms up again."""
        engine = start(bottlenecks(), StochasticDepth("ResNetBottleneck", drop_rate=0.4, drop_warmup=0.5))
        blocks = [each for each in engine.state.model.modules() if isinstance(each, cf.StochasticDepthBlock)]
        engine.state.max_duration = "8ba"
        rates = []
        for batches in (2, 4, 0):
            engine.state.timestamp = Timestamp(batch=batches)
            engine.run_event("after_load")
            rates.append(blocks[-1].drop_rate)

        assert rates == pytest.approx([0.2, 0.4, 0.0])

    def test_reports_unused_parameters(self):
        """find_unused_parameters and draws_layers are set where complete blocks are skipped, not where samples are."""
        block, sample = StochasticDepth("ResNetBottleneck"), StochasticDepth("ResNetBottleneck", "sample")

        assert (block.find_unused_parameters, block.draws_layers) == (True, True)
        assert (sample.find_unused_parameters, sample.draws_layers) == (False, False)
