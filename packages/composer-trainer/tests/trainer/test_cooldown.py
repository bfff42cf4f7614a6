"""fit(cooldown=...): trainings that branch off from a stable phase and decay to their ends."""

import math
import re
from functools import partial

import pytest
import torch

from composer.core import DataSpec
from composer.optim import ConstantScheduler, DecoupledSGDW, WarmupStableDecayScheduler
from fixtures import full_copy, make_classifier, make_loader, record, same_bits, small_run

STABLE = WarmupStableDecayScheduler("2ba", "0ba")


def make_run(**options):
    """Return a run with dropout and momentum, and the list of its learning rates."""
    torch.manual_seed(3)
    model = make_classifier(torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.Dropout(0.3), torch.nn.Linear(16, 3)))
    data = DataSpec(make_loader(shuffle=True), get_num_tokens_in_batch=lambda batch: 2 * len(batch[0]))
    optimizer = DecoupledSGDW(model.parameters(), lr=1.0, momentum=0.9)
    rates = record("before_forward", lambda state: float(state.optimizers[0].param_groups[0]["lr"]))
    options = {"schedulers": STABLE, "callbacks": rates} | options
    return small_run(model=model, optimizers=optimizer, train_dataloader=data, **options), rates.values


@pytest.fixture(scope="module")
def stable(tmp_path_factory):
    """Return the paths of checkpoints of a stable phase of two epochs, by the number of their batches."""
    folder = tmp_path_factory.mktemp("stable")
    trainer, _ = make_run(max_duration="2ep", save_folder=str(folder), save_interval="1ba", save_filename="ba{batch}")
    with trainer:
        trainer.fit()
    return {batch: str(folder / f"ba{batch}") for batch in (1, 8, 10)}


def stop_after(batch, state, logger):
    """End the training after so many batches in total."""
    if state.timestamp.batch == batch:
        state.stop_training()


def square_roots(length):
    """Return the factors of a decay in so many batches."""
    return [1 - math.sqrt(k / length) for k in range(length)]


class TestBranch:
    @pytest.mark.parametrize("length", [2, 5])
    @pytest.mark.parametrize(("unit", "per_batch"), [("ba", 1), ("sp", 4), ("tok", 8)])
    def test_equals_a_training_with_this_decay(self, stable, length, unit, per_batch):
        """From batch 8, in any unit, it trains bit for bit as a run from the beginning that ends with the decay."""
        planned, rates = make_run(
            max_duration=f"{8 + length}ba", schedulers=WarmupStableDecayScheduler("2ba", f"{length}ba")
        )
        planned.fit()
        branch, others = make_run(load_path=stable[8], max_duration="2ep")

        result = branch.fit(cooldown=f"{length * per_batch}{unit}")

        assert result.steps == length
        assert others == rates[8:] == pytest.approx(square_roots(length))
        assert same_bits(full_copy(branch.state.model), full_copy(planned.state.model))

    @pytest.mark.parametrize("cooldown", [2, "2ep", "2iter"])
    def test_in_epochs(self, stable, cooldown):
        """After an epoch it can have a length in epochs, also if the training was complete."""
        branch, rates = make_run(load_path=stable[10])

        branch.fit(cooldown=cooldown)

        assert len(rates) == 10
        assert rates == pytest.approx(square_roots(10) if cooldown != "2iter" else [1.0] * 5 + [1 - 0.5**0.5] * 5)

    def test_in_the_same_process(self, stable):
        """After a part of the training, fit decays without a checkpoint; a further call has nothing left to do."""
        trainer, rates = make_run()
        trainer.fit(duration="8ba")
        trainer.fit(cooldown="4ba")

        result = trainer.fit(cooldown="4ba")

        assert result.steps == 0
        assert rates == pytest.approx([0.0, 0.5] + [1.0] * 6 + square_roots(4))


class TestResume:
    @pytest.mark.parametrize("batches", [9, 10, 11, 14])
    def test_is_exact(self, stable, tmp_path, batches):
        """A branch that is resumed with the same arguments equals one that is not interrupted, bit for bit."""
        options = {"max_duration": "2ep", "save_interval": "1ba", "save_filename": "ba{batch}"}
        complete, rates = make_run(load_path=stable[8], save_folder=str(tmp_path), **options)
        complete.fit(cooldown="6ba")

        resumed, others = make_run(load_path=str(tmp_path / f"ba{batches}"), **options)
        resumed.fit(cooldown="6ba")

        assert others == rates[batches - 8 :]
        assert resumed.state.timestamp.batch == complete.state.timestamp.batch == 14
        assert same_bits(full_copy(resumed.state.model), full_copy(complete.state.model))

    def test_same_program_again(self, stable, tmp_path):
        """With autoresume, the first start branches off and the next ones complete the same cool-down."""
        options = {"load_path": stable[8], "autoresume": True, "run_name": "branch", "save_interval": "1ba"}
        complete, _ = make_run(load_path=stable[8])
        complete.fit(cooldown="6ba")
        rates = []
        for stop in (10, 13, 100):
            trainer, some = make_run(save_folder=str(tmp_path), **options)
            trainer.engine.on("batch_end", partial(stop_after, stop))
            with trainer:
                trainer.fit(cooldown="6ba")
            rates += some

        assert rates == pytest.approx(square_roots(6))
        assert same_bits(full_copy(trainer.state.model), full_copy(complete.state.model))


class TestBadInput:
    @pytest.mark.parametrize(
        ("schedulers", "got"),
        [
            (None, r"schedulers=\[\]"),
            (ConstantScheduler(), r"schedulers=\[ConstantScheduler\("),
            (lambda state, ssr=1.0: 1.0, r"schedulers=\[<function"),
        ],
    )
    def test_no_stable_phase(self, schedulers, got):
        """Other schedules raise."""
        trainer, _ = make_run(schedulers=schedulers)

        with pytest.raises(ValueError, match=f"cooldown requires a schedule with a stable phase, .* got {got}"):
            trainer.fit(cooldown="4ba")

    @pytest.mark.parametrize(
        ("batch", "options", "factor"),
        [
            (1, {}, "0.5"),
            (8, {"max_duration": "9ba", "schedulers": WarmupStableDecayScheduler("2ba", "4ba", "linear")}, "0.25"),
            (10, {"schedulers": WarmupStableDecayScheduler("2ba", "4ba")}, "0"),
        ],
    )
    def test_outside_of_the_stable_phase(self, stable, batch, options, factor):
        """A checkpoint of the warm-up, of the decay, and of the end raise."""
        trainer, _ = make_run(load_path=stable[batch], **options)

        with pytest.raises(
            ValueError, match=rf"cooldown must begin in the stable phase, .* got a factor of {factor} from"
        ):
            trainer.fit(cooldown="4ba")

    @pytest.mark.parametrize(
        ("arguments", "error", "message"),
        [
            ({"cooldown": "0ba"}, ValueError, "cooldown must be more than 0"),
            ({"cooldown": "0.1dur"}, ValueError, "cooldown cannot be a fraction of itself, got 0.1dur"),
            ({"cooldown": "soon"}, ValueError, "cooldown must be .*'soon'"),
            ({"cooldown": "4ba", "duration": "5ba"}, ValueError, "cooldown and duration both set the end"),
            (
                {"cooldown": "4ba", "scale_schedule_ratio": 0.5},
                ValueError,
                "scale_schedule_ratio=0.5 scales the duration",
            ),
        ],
    )
    def test_arguments(self, stable, arguments, error, message):
        """Invalid lengths raise before anything changes."""
        trainer, _ = make_run(load_path=stable[8])

        with pytest.raises(error, match=message):
            trainer.fit(**arguments)


class TestPhases:
    @pytest.mark.parametrize("given", ["trainer", "fit"])
    def test_longer_than_the_training_raise(self, given):
        """A warm-up and a decay that overlap raise as soon as the length of the training and the data are known."""
        schedule = WarmupStableDecayScheduler("4ba", "5ba")
        message = re.escape("t_warmup and t_decay together must not be longer than the training, got t_warmup=4ba")

        with pytest.raises(ValueError, match=message):
            small_run(schedulers=schedule, max_duration="8ba") if given == "trainer" else small_run(
                schedulers=schedule
            ).fit(duration="8ba")
