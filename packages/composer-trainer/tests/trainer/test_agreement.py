"""When processes exchange the counts of a batch, and the clock on which they agree."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from composer.algorithms import MixUp, SelectiveBackprop
from composer.core import DataSpec, State
from composer.distributed import Parallelism
from composer.trainer.agreement import Agreement
from composer.trainer.data.batches import Batches


class Recording(Parallelism):
    """Parallelism of one process that counts its exchanges."""

    exchanges = 0

    def begin_batch(self, *counts, **options):
        """Count the exchange."""
        self.exchanges += 1
        super().begin_batch(*counts, **options)


class Run:
    """The batches of a process whose sampler distributes the samples over processes, each of 4 samples."""

    def __init__(self, samples=4000, algorithms=(), *, weighs_tokens=False, collate_fn=None, batch_size=4, **functions):
        data = TensorDataset(torch.zeros(samples, 2))
        sampler = DistributedSampler(data, num_replicas=1, rank=0, shuffle=False)
        spec = DataSpec(DataLoader(data, batch_size, sampler=sampler, collate_fn=collate_fn), **functions)
        self.state = State(nn.Linear(2, 2), algorithms=algorithms)
        self.parallel = Recording()
        self.parallel.prepare(self.state)
        self.batches = Batches(spec, -1, torch.device("cpu"))
        self.batches.agree_on_length()
        self.since_exchange = 0.0
        self.agreement = Agreement(self.state, self.batches, self.parallel, self.elapsed, weighs_tokens)

    def elapsed(self):
        """Return the microseconds since the last call."""
        seconds, self.since_exchange = self.since_exchange, 0.0
        return seconds * 1e6

    def step(self, seconds=0.001, *, tokens=0, counted=None, logs=False, microbatches=1, counts=True):
        """Take a step; return whether its counts were exchanged, its totals and the seconds to count."""
        before = self.parallel.exchanges
        count = len(self.batches.next()[0])
        self.since_exchange += seconds
        self.agreement.begin_batch(counts)
        self.agreement.begin_gradients(
            count, tokens, count if counted is None else counted, microbatches=microbatches, stop=False, logs=logs
        )
        totals = self.agreement.finish_batch()
        return self.parallel.exchanges > before, totals, self.agreement.seconds

    def exchanged(self, steps, *seconds, **counts):
        """Return the numbers of the steps in which counts were exchanged."""
        return [number for number in range(steps) if self.step(*seconds, **counts)[0]]


class TestExchanges:
    def test_certain_counts_are_exchanged_rarely(self):
        """The number of batches between two exchanges doubles, up to 128."""
        assert Run().exchanged(400) == [0, 2, 5, 10, 19, 36, 69, 134, 263, 392]

    def test_number_of_microbatches_stays(self):
        """Between exchanges a process pads its microbatches to the number that another had in the last exchange."""
        run = Run()

        steps = [run.step(microbatches=2), *(run.step(microbatches=1) for _ in range(2))]

        assert [exchanged for exchanged, _, _ in steps] == [True, False, True]
        assert [totals.microbatches for _, totals, _ in steps] == [2, 2, 1]

    def test_slow_steps_exchange_in_time(self):
        """At most a quarter of a second passes between exchanges; slower steps exchange always."""
        assert Run().exchanged(9, 0.1) == [0, 2, 4, 6, 8]
        assert Run().exchanged(4, 0.2) == [0, 1, 2, 3]

    def test_a_few_fast_steps(self):
        """Three fast steps among slow ones do not let many slow ones follow without an exchange."""
        run, steps = Run(), [0.5] * 20 + [0.002] * 3 + [0.5] * 7
        exchanged = [number for number, seconds in enumerate(steps) if run.step(seconds)[0]]

        assert exchanged == [*range(21), 22, *range(25, 30)]

    def test_samples_that_others_count(self):
        """A batch that only keeps the processes in step adds nothing to the totals."""
        _, totals, _ = Run().step(counted=0.5, counts=False)

        assert (totals.samples, totals.tokens, totals.is_certain) == (0, 0, False)

    def test_partial_batches_are_exchanged(self):
        """The last batches of an epoch, in which processes may differ."""
        run = Run(samples=4 * 100 + 2)
        run.exchanged(70)

        assert [run.step()[0] for _ in range(70, 101)][-1]

    @pytest.mark.parametrize(
        "options",
        [
            {"algorithms": [SelectiveBackprop()]},
            {"weighs_tokens": True},
            {"collate_fn": lambda samples: [torch.stack([sample for (sample,) in samples])]},
            {"batch_transforms": lambda batch: batch},
            {"get_num_samples_in_batch": lambda batch: len(batch[0])},
            {"get_num_tokens_in_batch": lambda _: 0},
            {"split_batch": lambda batch, _: [batch]},
        ],
        ids=lambda options: next(iter(options)),
    )
    def test_uncertain_counts_are_always_exchanged(self, options):
        """Where algorithms or functions of the user may change what is counted."""
        assert Run(samples=8000, **options).exchanged(3) == [0, 1, 2]

    def test_tokens_are_always_exchanged(self):
        """Each process has its own number of tokens."""
        assert Run().exchanged(5, tokens=7) == [0, 1, 2, 3, 4]

    def test_other_algorithms_change_nothing(self):
        """MixUp keeps the number of samples."""
        assert Run(algorithms=[MixUp()]).exchanged(6) == [0, 2, 5]

    def test_totals_are_those_of_an_exchange(self):
        """With and without an exchange they are the same, but for the time."""
        run = Run()
        (first, totals, _), (second, expected, _) = run.step(logs=True), run.step(logs=True)

        assert (first, second) == (True, False)
        for name in ("samples", "tokens", "microbatches", "weight", "stop", "logs", "counted"):
            assert getattr(expected, name) == getattr(totals, name), name

    @pytest.mark.parametrize(("counts", "found"), [({"counted": 3}, "and 3 remain"), ({"tokens": 5}, "5 tokens")])
    def test_unexpected_counts_raise(self, counts, found):
        """An algorithm that removes samples without saying so, after processes have agreed that none does."""
        run = Run()
        run.step()

        with pytest.raises(RuntimeError, match=f"{found}.* selects_samples of an algorithm that removes samples"):
            run.step(**counts)


class TestClock:
    @given(st.lists(st.tuples(st.floats(1e-5, 0.1) | st.floats(0.1, 2.0), st.integers(1, 80)), min_size=1, max_size=8))
    def test_never_goes_back_and_keeps_the_time(self, phases):
        """After each exchange it is at the time that has passed, unless it was ahead; then it waits."""
        run, passed, counted = Run(), 0.0, 0.0
        for seconds in itertools.chain.from_iterable([seconds] * count for seconds, count in phases):
            is_exchanged, _, elapsed = run.step(seconds)
            passed += seconds
            counted += elapsed
            assert elapsed >= 0
            if is_exchanged:
                assert counted >= passed - 1e-9
            assert counted <= passed + 0.25

    def test_equal_steps_are_counted_as_they_pass(self):
        """Also between exchanges."""
        run = Run()

        assert [run.step(0.002)[2] for _ in range(100)] == pytest.approx([0.002] * 100)
