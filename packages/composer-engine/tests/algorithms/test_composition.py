"""Several algorithms together give what their formulas, applied one after the other, give."""

from itertools import permutations

import pytest
import torch

from composer import functional as cf
from composer.algorithms import EMA, BlurPool, ChannelsLast, ColOut, CutMix, CutOut, LabelSmoothing, MixUp
from composer.core import AlgorithmConflictError, Engine, Event, State, explain

SMOOTHING = 0.2
RECIPES = {
    "smoothing and blended labels": (lambda: MixUp(5.0), LabelSmoothing),
    "smoothing and blended losses": (lambda: MixUp(5.0, interpolate_loss=True), LabelSmoothing),
    "two that blend labels": (lambda: MixUp(5.0), lambda: MixUp(2.0), LabelSmoothing),
    "labels and losses blended": (lambda: MixUp(5.0), lambda: MixUp(5.0, interpolate_loss=True), LabelSmoothing),
}
ORDERS = [
    pytest.param(order, id=f"{name} {''.join(map(str, places))}")
    for name, makers in RECIPES.items()
    for places in permutations(range(len(makers)))
    for order in [[makers[place] for place in places]]
]


def make(order):
    """Return new algorithms; those that smooth do it by the same amount."""
    return [LabelSmoothing(SMOOTHING) if maker is LabelSmoothing else maker() for maker in order]


class TestLabels:
    @pytest.mark.parametrize("order", ORDERS)
    @pytest.mark.parametrize("soft", [False, True], ids=["ids", "probabilities"])
    def test_in_any_order_of_the_list(self, watch, engine_of, step, batch, one_hot, soft_loss, order, soft):
        """The loss is that of the labels mixed as the samples are, and then smoothed."""
        model = watch()
        targets = torch.rand(8, 3).softmax(1) if soft else batch[1]

        state = step(engine_of(model, *make(order)), (batch[0], targets))

        # Mixing is linear: what it made of the identity is the matrix that also mixes the labels.
        mixed = model.seen.inputs[0] @ (targets if soft else one_hot(targets))
        expected = soft_loss(model.seen.outputs[0], (1 - SMOOTHING) * mixed + SMOOTHING / 3)
        assert not torch.equal(model.seen.inputs[0], batch[0])
        assert torch.allclose(state.loss, expected, atol=1e-6)

    def test_partners_labels_are_smoothed(self, watch, engine_of, step, batch, one_hot):
        """Where losses are blended, the loss of the partners sees smoothed labels as well."""
        model = watch()

        state = step(engine_of(model, *make(RECIPES["smoothing and blended losses"])), batch)

        own, theirs = model.seen.targets
        assert torch.allclose(own, (1 - SMOOTHING) * one_hot(batch[1]) + SMOOTHING / 3)
        assert torch.allclose(theirs.sort(dim=1).values, own.sort(dim=1).values)
        assert torch.equal(state.batch[1], batch[1])


class TestKernelsOneAfterTheOther:
    """MixUp, CutMix and LabelSmoothing together equal direct calls of their kernels with the same draws."""

    @staticmethod
    def mix_by_hand(images, targets, order):
        """Apply the kernels in an order, with the draws of batch 0 and microbatch 0; return samples and targets."""
        state = State(model=None)
        state.microbatch = 0
        for name in order:
            generator = state.generator(name)
            if name == "MixUp":
                images, partners, share = cf.mixup_batch(images, targets, alpha=5.0, generator=generator)
            else:
                indices = cf.draw_permutation(images, generator=generator)
                images, partners, weight, _ = cf.cutmix_batch(images, targets, indices=indices, generator=generator)
                share = 1 - weight
            targets = (1 - share) * targets + share * partners
        return images, targets

    @pytest.mark.parametrize("soft", [False, True], ids=["ids", "probabilities"])
    @pytest.mark.parametrize(
        ("blends_losses", "order"),
        [
            ((), ("MixUp", "CutMix")),
            (("CutMix",), ("MixUp", "CutMix")),
            (("MixUp",), ("CutMix", "MixUp")),  # whoever blends losses is the outermost
        ],
        ids=["labels", "CutMix blends losses", "MixUp blends losses"],
    )
    def test_samples_and_loss(self, watch, engine_of, step, images, one_hot, soft_loss, blends_losses, order, soft):
        """Samples are those of the kernels bit for bit; the loss is that of the targets they make, then smoothed."""
        model = watch(torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(192, 3)))
        targets = torch.rand(8, 3).softmax(1) if soft else images[1]
        algorithms = [
            MixUp(5.0, interpolate_loss="MixUp" in blends_losses),
            CutMix(interpolate_loss="CutMix" in blends_losses),
            LabelSmoothing(SMOOTHING),
        ]

        state = step(engine_of(model, *algorithms), (images[0], targets))

        mixed, blended = self.mix_by_hand(images[0], targets if soft else one_hot(targets), order)
        expected = soft_loss(model.seen.outputs[0], (1 - SMOOTHING) * blended + SMOOTHING / 3)
        assert torch.equal(model.seen.inputs[0], mixed)
        assert torch.allclose(state.loss, expected, atol=1e-6)


class TestRecipe:
    @pytest.fixture
    def recipe(self):
        """The five algorithms of the quick start."""
        return lambda: [BlurPool(), LabelSmoothing(), MixUp(), EMA(half_life="3ba"), ChannelsLast()]

    def test_order_of_the_list_does_not_matter(self, conv_net, engine_of, step, images, weights_of, same_bits, recipe):
        """The five give the same weights bit for bit, forwards and backwards in the list."""
        model = conv_net()
        first = weights_of(model)
        results = []
        for algorithms in (recipe(), recipe()[::-1]):
            model = conv_net()
            model.load_state_dict(first)
            engine = engine_of(model, *algorithms)
            for _ in range(3):
                step(engine, images)
            results.append(weights_of(model))

        assert same_bits(*results)

    def test_blur_before_layout(self, recipe):
        """The memory format is changed when the layers are what they will be."""
        entries = explain(recipe()[::-1]).entries

        assert [one.key for one in entries[Event.INIT]] == ["BlurPool", "ChannelsLast"]

    def test_blurred_layers_are_laid_out(self, conv_net, engine_of, recipe):
        """Convolutions inside blurred ones have the new memory format."""
        model = conv_net()

        engine_of(model, *recipe())

        assert model.layers[2].conv.weight.is_contiguous(memory_format=torch.channels_last)


class TestLoopsWithoutAnEngine:
    @pytest.mark.parametrize(
        ("event", "make"),
        [
            (Event.AFTER_DATALOADER, CutOut),
            (Event.AFTER_DATALOADER, ColOut),
            (Event.BEFORE_FORWARD, lambda: MixUp(5.0)),
            (Event.BEFORE_FORWARD, CutMix),
        ],
    )
    def test_apply_needs_no_list_of_algorithms(self, event, make):
        """An algorithm that the loop itself calls does what it does as the only one of an engine."""
        images, targets = torch.rand(8, 3, 8, 8), torch.arange(8) % 3
        alone, engine = State(model=None), Engine(State(model=None), algorithms=make())
        alone.batch = engine.state.batch = images, targets

        make().apply(event, alone, engine.logger)
        engine.run_event(event)

        assert not torch.equal(alone.batch[0], images)
        assert torch.equal(alone.batch[0], engine.state.batch[0])

    @pytest.mark.parametrize("make", [lambda: MixUp(5.0), CutMix])
    def test_batch_that_is_not_split(self, make):
        """It is mixed alike whether the loop calls it the first microbatch or no microbatch."""
        images, targets = torch.rand(8, 3, 8, 8), torch.arange(8) % 3
        mixed = []
        for number in (-1, 0, 1):
            engine = Engine(State(model=None), algorithms=make())
            engine.state.batch, engine.state.microbatch = (images, targets), number
            engine.run_event("before_forward")
            mixed.append(engine.state.batch[0])

        assert torch.equal(mixed[0], mixed[1])
        assert not torch.equal(mixed[1], mixed[2])


class TestConflicts:
    @pytest.mark.parametrize("kind", [EMA, BlurPool, ChannelsLast])
    def test_one_too_many(self, kind):
        """Two where the second would undo or find nothing are refused by name, with what they share."""
        (owned,) = kind.owns

        with pytest.raises(AlgorithmConflictError, match=f"Two {kind.__name__} cannot run together.*{owned}") as caught:
            Engine(State(model=None), algorithms=[kind(), kind()])

        assert f"Remove one: {kind()!r} or {kind()!r}." in str(caught.value)

    @pytest.mark.parametrize("kind", [MixUp, LabelSmoothing])
    def test_twice_is_fine(self, kind):
        """Two that work on what the other has left may run together."""
        assert [one.name for one in explain([kind(), kind()]).algorithms] == [kind.__name__, f"{kind.__name__}.1"]
