"""The calls of fit: their losses, their learning rates, what differs, and how notebooks show them."""

import re

import pytest
import torch

from composer.algorithms import LabelSmoothing
from composer.optim import CosineAnnealingScheduler, MultiStepScheduler
from fixtures import make_classifier, small_run


def fit(lr, optimizer=torch.optim.SGD, network=None, **options):
    """Return what a result has about the call of fit of a new trainer."""
    model = make_classifier(network)
    return (
        small_run(model=model, optimizers=optimizer(model.parameters(), lr=lr), max_duration="1ba", **options).fit().fit
    )


class TestChanges:
    @pytest.mark.parametrize("of_torch", [True, False])
    def test_schedule_is_no_change(self, of_torch):
        """Learning rates that a schedule has moved are those of the call, and nothing that was changed between two."""
        model = make_classifier()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [1]) if of_torch else MultiStepScheduler(["1ep"])
        trainer = small_run(model=model, optimizers=optimizer, max_duration="2ep", schedulers=schedule)

        first, second = trainer.fit(duration="1ep"), trainer.fit(duration="1ep")

        assert first.fit.lrs == [{"SGD": [0.1]}, {"SGD": [pytest.approx(0.01)]}]
        assert second.fit.lrs == [{"SGD": [pytest.approx(0.01)]}] * 2
        assert second.fit.changed == {}
        assert re.search(r"learning rate +SGD 0.1 → 0.01\n", str(first))

    def test_groups_and_schedulers(self):
        """A rate of one group, another setting and another schedule are named."""
        network = torch.nn.Linear(4, 3)
        groups = [{"params": [network.weight]}, {"params": [network.bias], "lr": 0.2}]
        optimizer = torch.optim.SGD(groups, lr=0.1)
        trainer = small_run(network=network, optimizers=optimizer, max_duration="1ep")
        trainer.fit()
        optimizer.param_groups[1] |= {"lr": 0.3, "momentum": 0.9}

        result = trainer.fit(duration="1ep", schedulers=CosineAnnealingScheduler(alpha_f=0.5))

        assert result.fit.changed == {
            "optimizers/SGD/lr/1": (0.2, 0.3),
            "optimizers/SGD/momentum": (0, None),
            "optimizers/SGD/momentum/0": (None, 0),
            "optimizers/SGD/momentum/1": (None, 0.9),
            "schedulers/CosineAnnealingScheduler/alpha_f": (None, 0.5),
            "schedulers/CosineAnnealingScheduler/t_max": (None, "1dur"),
        }

    def test_what_the_user_changed_is_first(self):
        """A rate, an algorithm and a precision come first; drawn seeds and the rest of an evaluator are left out."""
        fit(0.1, seed=None)

        names = list(
            fit(
                0.01,
                seed=None,
                network=torch.nn.Sequential(torch.nn.Linear(4, 3)),
                algorithms=LabelSmoothing(0.2),
                precision="amp_bf16",
                eval_dataloader=[(torch.rand(4, 4), torch.zeros(4, dtype=torch.long))],
            ).changed
        )

        last_wanted = names.index("precision")
        assert names[0] == "optimizers/SGD/lr"
        assert last_wanted < 5
        assert all(name.startswith("algorithms/LabelSmoothing/") for name in names[1:last_wanted])
        assert "model/num_parameters" in names
        assert not {"rank_zero_seed", "evaluators", "algorithms"} & {*names}
        assert sum(name.startswith("evaluators/") for name in names) == 1

    def test_other_optimizer(self):
        """An optimizer that replaces another is named once, with the rates of both; a given seed is named."""
        fit(0.1, seed=1)

        assert fit(0.01, torch.optim.AdamW, seed=2).changed == {
            "optimizers/SGD/lr": (0.1, None),
            "optimizers/AdamW/lr": (None, 0.01),
            "rank_zero_seed": (1, 2),
        }

    def test_losses(self):
        """They are those of all batches, also of an epoch that is not complete."""
        losses = []
        trainer = small_run(max_duration="7ba")
        trainer.engine.on("batch_end", lambda state, _: losses.append(state.loss.item()))

        result = trainer.fit()

        assert list(result.fit.losses) == pytest.approx(losses)
        assert len(losses) == 7

    def test_names_are_escaped(self):
        """Names of metrics, runs and stoppers are shown, and are no HTML."""
        evil = "<img src=x>"

        trainer = small_run(max_duration="2ep", run_name="a&b", algorithms=LabelSmoothing(0.1))
        trainer.fit()
        trainer.engine.on("batch_end", lambda state, _: state.stop_training(evil))
        trainer.state.train_metric_values = {evil: torch.tensor(0.5)}
        result = trainer.fit(duration="1ep")

        for html in (trainer._repr_html_(), result._repr_html_()):
            assert "&lt;img src=x&gt;" in html
            assert "a&amp;b" in html
            assert "<img" not in html

    def test_curve_of_few_or_bad_losses(self):
        """Without two finite losses there is no curve; NaN and infinity are left out of one."""
        trainer = small_run(max_duration="1ba")

        assert "<svg" not in trainer._repr_html_()
        assert "<svg" not in trainer.fit()._repr_html_()
        losses = trainer._fits.calls[0].losses
        losses.extend([float("nan"), float("inf"), 0.5, 0.25])
        html = trainer._repr_html_()
        assert "nan" not in html
        assert "inf" not in re.search("<figure>.*</figure>", html)[0]
        assert "batch 1 to 5" in html

    def test_error(self):
        """A call that an error has ended is listed as such."""
        trainer = small_run(max_duration="1ep")
        trainer.engine.on("batch_end", lambda *_: 1 / 0)

        with pytest.raises(ZeroDivisionError):
            trainer.fit()

        assert ">an error<" in trainer._repr_html_()
