"""Combinations of algorithms equal the sequence of their formulas."""

from itertools import permutations

import pytest
import torch

from composer import functional as cf
from composer.algorithms import (
    EMA,
    BlurPool,
    ChannelsLast,
    ColOut,
    CutMix,
    CutOut,
    Factorize,
    GhostBatchNorm,
    LabelSmoothing,
    MixUp,
    SqueezeExcite,
    WeightStandardization,
)
from composer.core import AlgorithmConflictError, Engine, Event, State, explain
from fixtures import full_copy, same_bits
from fixtures.surgery import bottlenecks, start

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
    """Return new algorithms with equal smoothing."""
    return [LabelSmoothing(SMOOTHING) if maker is LabelSmoothing else maker() for maker in order]


class TestLabels:
    @pytest.mark.parametrize("order", ORDERS)
    @pytest.mark.parametrize("soft", [False, True], ids=["ids", "probabilities"])
    def test_list_order_does_not_matter(self, watch, make_engine, step, batch, one_hot, soft_loss, order, soft):
        """In any list order the loss uses labels that are first mixed like the samples and then smoothed."""
        model = watch()
        targets = torch.rand(8, 3).softmax(1) if soft else batch[1]

        state = step(make_engine(model, *make(order)), (batch[0], targets))

        # Mixing is linear: what it made of the identity is the matrix that also mixes the labels.
        mixed = model.seen.inputs[0] @ (targets if soft else one_hot(targets))
        expected = soft_loss(model.seen.outputs[0], (1 - SMOOTHING) * mixed + SMOOTHING / 3)
        assert not torch.equal(model.seen.inputs[0], batch[0])
        assert torch.allclose(state.loss, expected, atol=1e-6)

    def test_partner_labels_are_smoothed(self, watch, make_engine, step, batch, one_hot):
        """With interpolated losses, the partners' loss also uses smoothed labels."""
        model = watch()

        state = step(make_engine(model, *make(RECIPES["smoothing and blended losses"])), batch)

        own, expected = model.seen.targets
        assert torch.allclose(own, (1 - SMOOTHING) * one_hot(batch[1]) + SMOOTHING / 3)
        assert torch.allclose(expected.sort(dim=1).values, own.sort(dim=1).values)
        assert torch.equal(state.batch[1], batch[1])


class TestSequenceOfKernels:
    """MixUp, CutMix and LabelSmoothing together equal direct calls of their kernels with the same draws."""

    @staticmethod
    def reference_mix(images, targets, order):
        """Apply the kernels in the given order, with the draws of batch and microbatch 0."""
        state = State(model=None)
        state.microbatch = 0
        for name in order:
            generator = state.generator(name)
            if name == "MixUp":
                images, partners, fraction = cf.mixup_batch(images, targets, alpha=5.0, generator=generator)
            else:
                indices = cf.draw_permutation(images, generator=generator)
                images, partners, weight, _ = cf.cutmix_batch(images, targets, indices=indices, generator=generator)
                fraction = 1 - weight
            targets = (1 - fraction) * targets + fraction * partners
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
    def test_matches_direct_kernel_calls(
        self, watch, make_engine, step, images, one_hot, soft_loss, blends_losses, order, soft
    ):
        """Samples match the kernels' output bit for bit; the loss uses the mixed, then smoothed targets."""
        model = watch(torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(192, 3)))
        targets = torch.rand(8, 3).softmax(1) if soft else images[1]
        algorithms = [
            MixUp(5.0, interpolate_loss="MixUp" in blends_losses),
            CutMix(interpolate_loss="CutMix" in blends_losses),
            LabelSmoothing(SMOOTHING),
        ]

        state = step(make_engine(model, *algorithms), (images[0], targets))

        mixed, blended = self.reference_mix(images[0], targets if soft else one_hot(targets), order)
        expected = soft_loss(model.seen.outputs[0], (1 - SMOOTHING) * blended + SMOOTHING / 3)
        assert torch.equal(model.seen.inputs[0], mixed)
        assert torch.allclose(state.loss, expected, atol=1e-6)


class TestRecipe:
    @pytest.fixture
    def recipe(self):
        """The five algorithms of the quick start."""
        return lambda: [BlurPool(), LabelSmoothing(), MixUp(), EMA(half_life="3ba"), ChannelsLast()]

    def test_list_order_does_not_matter(self, conv_net, make_engine, step, images, recipe):
        """The five algorithms give bit-identical weights in either list order."""
        model = conv_net()
        first = full_copy(model)
        results = []
        for algorithms in (recipe(), recipe()[::-1]):
            model = conv_net()
            model.load_state_dict(first)
            engine = make_engine(model, *algorithms)
            for _ in range(3):
                step(engine, images)
            results.append(full_copy(model))

        assert same_bits(*results)

    def test_layout_changes_after_blurpool(self, recipe):
        """The memory format is changed after all layers have been replaced."""
        entries = explain(recipe()[::-1]).entries

        assert [one.key for one in entries[Event.INIT]] == ["BlurPool", "ChannelsLast"]


class TestWithoutEngine:
    @pytest.mark.parametrize(
        ("event", "make"),
        [
            (Event.AFTER_DATALOADER, CutOut),
            (Event.AFTER_DATALOADER, ColOut),
            (Event.BEFORE_FORWARD, lambda: MixUp(5.0)),
            (Event.BEFORE_FORWARD, CutMix),
        ],
    )
    def test_apply_works_without_an_engine(self, event, make):
        """An algorithm applied directly has the same effect as in an engine where it is the only one."""
        images, targets = torch.rand(8, 3, 8, 8), torch.arange(8) % 3
        alone, engine = State(model=None), Engine(State(model=None), algorithms=make())
        alone.batch = engine.state.batch = images, targets

        make().apply(event, alone, engine.logger)
        engine.run_event(event)

        assert not torch.equal(alone.batch[0], images)
        assert torch.equal(alone.batch[0], engine.state.batch[0])


class TestConflicts:
    @pytest.mark.parametrize("kind", [EMA, BlurPool, ChannelsLast])
    def test_conflicting_pairs_raise(self, kind):
        """Pairs that conflict raise an error with both names and the shared resource."""
        (owned,) = kind.owns

        with pytest.raises(AlgorithmConflictError, match=f"Two {kind.__name__} cannot run together.*{owned}") as caught:
            Engine(State(model=None), algorithms=[kind(), kind()])

        assert f"Remove one: {kind()!r} or {kind()!r}." in str(caught.value)


@pytest.mark.parametrize("first_blur", [True, False])
def test_five_surgeries_together(first_blur):
    """Blur, squeeze-and-excite, factorization, ghost norms and standardized weights train together in one model."""
    blur = [BlurPool(min_channels=1)]
    rest = [
        SqueezeExcite(latent_channels=4, min_channels=16),
        Factorize(min_channels=16, factorize_linears=False),
        GhostBatchNorm(2),
        WeightStandardization(),
    ]
    model = bottlenecks()

    engine = start(model, *(blur + rest if first_blur else rest + blur))
    engine.state.model.loss(engine.state.model(engine.state.batch), engine.state.batch).backward()
    in_optimizer = {id(each) for group in engine.state.optimizers[0].param_groups for each in group["params"]}

    assert in_optimizer == {id(parameter) for parameter in model.parameters()}
    assert all(parameter.grad is not None for parameter in model.parameters())
