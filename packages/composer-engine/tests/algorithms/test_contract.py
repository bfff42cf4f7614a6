"""What every algorithm promises: settings that are data, true declarations, nothing held on to."""

import copy
import doctest
import gc
import inspect
import pickle
import weakref

import pytest
import torch

import composer.algorithms
from composer.algorithms import EMA, BlurPool, ChannelsLast, LabelSmoothing, MixUp
from composer.core import Event, State, Time

VARIANTS = {
    "BlurPool": lambda: BlurPool(min_channels=8),
    "ChannelsLast": ChannelsLast,
    "EMA": lambda: EMA(half_life="1ba"),
    "EMA of epochs": lambda: EMA(half_life="0.1dur", update_interval="1ep", ema_start="0.1dur"),
    "EMA by smoothing": lambda: EMA(half_life=None, smoothing=0.9),
    "LabelSmoothing": lambda: LabelSmoothing(0.2),
    "MixUp": lambda: MixUp(alpha=5.0),
    "MixUp of losses": lambda: MixUp(alpha=5.0, interpolate_loss=True),
}
WORDS = {"model", "optimizers", "outputs", "loss", "timestamp", "max_duration", "dataloader_len"}
FREE = {"generator", "precision", "device"}
BY_METHOD = {"reached": {"timestamp", "max_duration"}, "get_elapsed_duration": {"timestamp", "max_duration"}}

each = pytest.mark.parametrize("make", VARIANTS.values(), ids=VARIANTS)


class Recording:
    """A view of a state that writes down what is looked at, in the words of the declarations."""

    def __init__(self, state):
        vars(self).update(_state=state, seen=set())

    def __getattr__(self, name):
        assert name in WORDS | FREE | BY_METHOD.keys() | {"batch"}, f"a word for State.{name} is missing here"
        self.seen.update({name} & WORDS, BY_METHOD.get(name, ()))
        if name == "batch":
            self.seen.update({"batch.input", "batch.target"})
        return getattr(self._state, name)

    def __setattr__(self, name, value):
        setattr(self._state, name, value)

    def batch_get_item(self, key):
        self.seen.add(f"batch.{('input', 'target')[key]}")
        return self._state.batch_get_item(key)

    def batch_set_item(self, key, value):
        self._state.batch_set_item(key, value)


@pytest.fixture
def fingerprint():
    """Return what a state holds, copied, by the words of the declarations."""

    def take(state):
        optimizers = [
            [id(one) for group in optimizer.param_groups for one in group["params"]] for optimizer in state.optimizers
        ]
        layout = [(name, tensor.stride()) for name, tensor in state.model.state_dict().items()]
        held = {
            "batch.input": state.batch and state.batch[0],
            "batch.target": state.batch and state.batch[1],
            "outputs": state.outputs,
            "loss": state.loss,
            "model": (layout, list(state.model.state_dict().values())),
            "optimizers": optimizers,
            "timestamp": state.timestamp,
            "max_duration": state.max_duration,
        }
        return {word: copy.deepcopy(_detached(value)) for word, value in held.items()}

    return take


def _detached(value):
    if isinstance(value, torch.Tensor):
        return value.detach()
    return type(value)(map(_detached, value)) if isinstance(value, (list, tuple)) else value


def _same(one, other):
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(_same, one, other))
    return one is other if one is None or other is None else one == other


@pytest.fixture
def record(monkeypatch, fingerprint):
    """Return what makes an algorithm's class write down what its objects look at and what they change."""

    def patch(kind):
        looked_at, changed, apply = set(), set(), kind.apply

        def watched(self, event, state, logger):
            view, before = Recording(state), fingerprint(state)
            apply(self, event, view, logger)
            after = fingerprint(state)
            looked_at.update(view.seen)
            changed.update(word for word in before if not _same(before[word], after[word]))

        monkeypatch.setattr(kind, "apply", watched)
        return looked_at, changed

    return patch


class TestDeclarations:
    def test_all_are_here(self):
        """Every algorithm of the package is held to this contract."""
        assert {type(make()).__name__ for make in VARIANTS.values()} == set(composer.algorithms.__all__)

    @each
    def test_reads_and_writes(self, make, record, conv_net, engine_of, step, end_epoch, images):
        """Over two epochs with an evaluation each, nothing undeclared is looked at or changed, and something is."""
        algorithm = make()
        looked_at, changed = record(type(algorithm))

        engine = engine_of(conv_net(), algorithm, max_duration="4ep")
        for _ in range(2):
            for _ in range(2):
                step(engine, images)
            end_epoch(engine)
            for event in ("eval_start", "eval_end"):
                engine.run_event(event)

        assert looked_at <= algorithm.reads
        assert changed <= algorithm.writes
        assert changed

    @each
    def test_places(self, make):
        """Where it runs is among the events that its class declares."""
        algorithm = make()

        assert set(algorithm.places()) <= set(algorithm.runs_at)
        assert all(isinstance(event, Event) for event in algorithm.runs_at)
        assert all(algorithm.match(event, None) == (event in algorithm.places()) for event in Event)

    def test_all_events_of_a_class_are_used(self):
        """Each declared event is one at which some settings run."""
        for kind in {type(make()) for make in VARIANTS.values()}:
            used = set().union(*(make().places() for make in VARIANTS.values() if type(make()) is kind))
            assert used == set(kind.runs_at)


class TestDocumentation:
    @pytest.mark.parametrize("name", composer.algorithms.__all__)
    def test_examples_run(self, name):
        """Each class shows an example, and it gives what it shows."""
        kind = getattr(composer.algorithms, name)

        result = doctest.testmod(inspect.getmodule(kind))

        assert ">>>" in kind.__doc__
        assert result.failed == 0

    @pytest.mark.parametrize("name", composer.algorithms.__all__)
    def test_settings_are_explained(self, name):
        """Each setting has its line in the docstring."""
        kind = getattr(composer.algorithms, name)

        assert all(f"\n        {setting}: " in kind.__doc__ for setting in kind().settings())


class TestSettings:
    @each
    def test_repr_makes_it_again(self, make):
        """The printed form is the call that makes an equal one."""
        algorithm = make()
        names = {name: getattr(composer.algorithms, name) for name in composer.algorithms.__all__}

        again = eval(repr(algorithm), {**names, "Time": Time})

        assert type(again) is type(algorithm)
        assert again.settings() == algorithm.settings()

    @each
    def test_round_trip(self, make):
        """The settings are the arguments of an equal one."""
        algorithm = make()

        assert type(algorithm)(**algorithm.settings()).settings() == algorithm.settings()

    @each
    @pytest.mark.parametrize("through", [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
    def test_copies(self, make, through):
        """A fresh one can be copied and pickled."""
        algorithm = make()

        again = through(algorithm)

        assert again.settings() == algorithm.settings()
        assert again is not algorithm

    @each
    def test_running_leaves_them(self, make, conv_net, engine_of, step, images):
        """A training changes no setting."""
        algorithm = make()
        before = algorithm.settings()

        step(engine_of(conv_net(), algorithm, max_duration="4ep"), images)

        assert algorithm.settings() == before

    @pytest.mark.parametrize(
        ("make", "error", "text"),
        [
            (lambda: BlurPool(min_channels=0), ValueError, "min_channels must be at least 1, got 0"),
            (lambda: BlurPool(min_channels=1.5), TypeError, "min_channels must be a whole number, got 1.5"),
            (lambda: LabelSmoothing(-0.1), ValueError, r"smoothing must be in \[0, 1\], got -0.1"),
            (lambda: LabelSmoothing(1.1), ValueError, r"smoothing must be in \[0, 1\], got 1.1"),
            (lambda: LabelSmoothing("0.1"), TypeError, "smoothing must be a number, got '0.1'"),
            (lambda: MixUp(-1), ValueError, "alpha must be at least 0, got -1"),
            (lambda: MixUp(float("nan")), ValueError, "alpha must be at least 0, got nan"),
            (lambda: MixUp(float("inf")), ValueError, "alpha must be at least 0, got inf"),
            (lambda: MixUp(True), TypeError, "alpha must be a number, got True"),
            (lambda: EMA(half_life=0), ValueError, "half_life must be more than 0, got 0ba"),
            (lambda: EMA(half_life="soon"), ValueError, "half_life is no length of time.*'soon'"),
            (lambda: EMA(half_life=1.5), TypeError, "half_life is no length of time.*1.5"),
            (lambda: EMA(half_life=None), ValueError, "either half_life or smoothing"),
            (lambda: EMA(smoothing=0.9), ValueError, "either half_life or smoothing.*half_life=None"),
            (lambda: EMA(half_life=None, smoothing=1), ValueError, r"smoothing must be in \[0, 1\), got 1"),
            (lambda: EMA(half_life=None, smoothing="x"), TypeError, "smoothing must be a number, got 'x'"),
            (lambda: EMA(ema_start="-1ba"), ValueError, "ema_start must be within the training, got -1ba"),
            (lambda: EMA(ema_start="2dur"), ValueError, "ema_start must be within the training, got 2dur"),
            (lambda: EMA(ema_start=None), TypeError, "ema_start is no length of time.*None"),
            (lambda: EMA(update_interval="0ba"), ValueError, "update_interval must be at least one .*, got 0ba"),
            (lambda: EMA(update_interval="8sp"), ValueError, "update_interval must be at least one .*, got 8sp"),
            (lambda: EMA(update_interval="often"), ValueError, "update_interval is no length of time.*'often'"),
        ],
    )
    def test_bad_ones_are_named(self, make, error, text):
        """A setting that makes no sense is refused when it is given, by its name."""
        with pytest.raises(error, match=text):
            make()


class TestLifetime:
    @each
    def test_batches_are_let_go(self, make, conv_net, engine_of, step, images):
        """When loop and state have let go of a batch, its tensors, outputs and loss are gone."""
        engine = engine_of(conv_net(), make(), max_duration="4ep")
        batch = tuple(tensor.clone() for tensor in images)
        state = step(engine, batch)
        held = [weakref.ref(tensor) for tensor in (*batch, *state.batch, state.outputs, state.loss)]

        del batch
        state.batch = state.outputs = state.loss = None
        gc.collect()

        assert [reference() for reference in held] == [None] * len(held)

    @each
    def test_runs_in_a_second_state(self, make, conv_net, engine_of, step, images):
        """An algorithm is not bound to what it was made beside: a copy works in another run."""
        algorithm = make()
        step(engine_of(conv_net(), copy.deepcopy(algorithm), max_duration="4ep"), images)

        state = step(engine_of(conv_net(), algorithm, max_duration="4ep"), images)

        assert isinstance(state, State)
