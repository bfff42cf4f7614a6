"""After a training the plan has what each algorithm did, and an algorithm that did nothing is reported."""

import copy
import warnings

import pytest
import torch
from torch import nn

from composer.algorithms import (
    EMA,
    SWA,
    BlurPool,
    ChannelsLast,
    ChunkedCrossEntropy,
    ColOut,
    CutOut,
    DepthStacking,
    GhostBatchNorm,
    GyroDropout,
    LayerFreezing,
    MixUp,
    NEFTune,
    PatchDropout,
    PostHocEMA,
    ProgressiveResizing,
    SelectiveBackprop,
    SeqLengthWarmup,
    StochasticDepth,
)
from composer.core import Algorithm, Event, NoEffectWarning, Stage, State, Timestamp
from composer.core.testing import Training
from fixtures.models import WithLoss, make_transformer


def train(model, batches, *algorithms, duration="1ep", stop=None):
    """Train for an epoch, end or stop the training, and return the plan and the texts of the warnings."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    state = State(model, optimizers=optimizer, max_duration=duration, train_dataloader=batches)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        training = Training(state, algorithms)
        training.run(len(batches))
        if stop is not None:
            state.stop_training(stop)
        training.finish()
    texts = [str(one.message) for one in caught if issubclass(one.category, NoEffectWarning)]
    return training.engine.explain(), texts


def images(size=4, count=3):
    return [(torch.rand(size, 3, 8, 8), torch.arange(size) % 3) for _ in range(count)]


def tokens():
    ids = torch.randint(32, (4, 16))
    return [{"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.clone()}] * 3


def convolutions():
    pool = nn.AdaptiveAvgPool2d(1)
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, stride=2), nn.BatchNorm2d(16), pool, nn.Flatten(), nn.Dropout(), nn.Linear(16, 3)
    )


def images_model():
    return WithLoss(convolutions())


class Matching(Algorithm):
    """Runs where ``match`` returns True, as in MosaicML Composer."""

    def __init__(self, batches):
        self.batches = batches

    def match(self, event, state):
        return event is Event.BATCH_START and state.timestamp.batch < self.batches

    def apply(self, event, state, logger):
        """Do nothing."""


class Counting(Matching):
    """Counts what it does itself, in a unit of its own."""

    acted, acted_unit = 0, "pixels"

    def apply(self, event, state, logger):
        """Count."""
        self.acted += 5


class AtEpochs(Algorithm):
    """Runs at the ends of epochs."""

    runs_at = {Event.EPOCH_END: Stage.WEIGHTS}

    def apply(self, event, state, logger):
        """Do nothing."""


class TestCounts:
    def test_each_kind(self):
        """Replaced layers, batches, epochs, and calls where the algorithm is asked each time."""
        plan, texts = train(
            images_model(), images(), BlurPool(min_channels=3), ColOut(), MixUp(), AtEpochs(), Matching(2)
        )

        acted = {
            "BlurPool": (1, "layers"),
            "ColOut": (3, "batches"),
            "MixUp": (3, "times"),
            "AtEpochs": (1, "epochs"),
            "Matching": (2, "times"),
        }
        assert plan.acted == acted
        assert plan.to_dict()["acted"]["Matching"] == [2, "times"]
        assert "Acted in this training: BlurPool 1 layers, ColOut 3 batches" in " ".join(str(plan).split())
        assert texts == []

    def test_own_unit(self):
        """An algorithm that counts names the unit; with 0 of it there is a warning, too."""
        plan, texts = train(images_model(), images(), Counting(2), Counting(0))

        assert list(plan.acted.values()) == [(10, "pixels"), (0, "pixels")]
        assert [text.partition(".")[0] for text in texts] == ["Counting"]

    def test_before_training(self):
        """Before the first batch there is nothing to count."""
        state = State(images_model(), train_dataloader=images())

        assert Training(state, [MixUp()]).engine.explain().acted == {}

    def test_two_of_a_class(self):
        """Two algorithms of a class have counts of their own."""
        plan, _ = train(images_model(), images(), Matching(1), Matching(3))

        assert list(plan.acted.values()) == [(1, "times"), (3, "times")]

    def test_another_training(self):
        """A training that begins again counts from 0."""
        algorithms = [MixUp(), Matching(2), BlurPool(min_channels=3)]
        state = State(images_model(), max_duration="1ep", train_dataloader=images())
        state.optimizers = [torch.optim.SGD(state.model.parameters(), lr=0.05)]
        training = Training(state, algorithms)
        for _ in range(2):
            state.timestamp = Timestamp()
            training.engine.run_event("fit_start")
            training.run(3)
            training.engine.run_event("fit_end")

        assert list(training.engine.explain().acted.values()) == [(3, "times"), (2, "times"), (1, "layers")]

    @pytest.mark.parametrize(("make_model", "count"), [(images_model, 1), (lambda: WithLoss(nn.Linear(8, 3)), 0)])
    def test_memory_format(self, make_model, count):
        """The count of a memory format is that of the layers, and 0 if there are none."""
        batches = images() if count else [(torch.rand(4, 8), torch.arange(4) % 3)]
        plan, texts = train(make_model(), batches, ChannelsLast())

        assert (plan.acted["ChannelsLast"], len(texts)) == ((count, "layers"), 1 - count)


class TestNeverActed:
    @pytest.mark.parametrize(
        ("algorithm", "batches", "make_model", "reason"),
        [
            (MixUp(), images(1), images_model, "No batch or microbatch had a second sample to mix with"),
            (MixUp(alpha=1e-9), images(), images_model, "each had the weight 0"),
            (CutOut(length=0.01), images(), images_model, "All squares had less than a pixel"),
            (ProgressiveResizing(initial_scale=0.99, size_increment=8), images(), images_model, "full size"),
            (SeqLengthWarmup(0.5, 16, 32), tokens(), lambda: WithLoss(make_transformer("gpt2")), "No batch was longer"),
            (Matching(0), images(), images_model, "Train longer, choose other settings, or remove it"),
        ],
        ids=["MixUp", "weight", "CutOut", "ProgressiveResizing", "SeqLengthWarmup", "match"],
    )
    def test_reason(self, algorithm, batches, make_model, reason):
        """A warning at the end has the name and the reason."""
        if isinstance(algorithm, MixUp) and len(batches[0][0]) == 1:
            make_model = lambda: WithLoss(nn.Sequential(nn.Flatten(), nn.Linear(192, 3)))  # noqa: E731
        plan, (text,) = train(make_model(), batches, algorithm)

        assert text.startswith(f"{type(algorithm).__name__} has not acted in this training. ")
        assert reason in text
        assert plan.acted[type(algorithm).__name__] == (0, "times")


class TestStopped:
    @pytest.mark.parametrize(
        ("make", "text"),
        [
            (lambda _: EMA("1ba", ema_start="0.9dur"), "averaged nothing"),
            (lambda _: EMA("1ba", update_interval="9ba"), "never updated"),
            (lambda _: SWA("0.9dur", "1dur"), "averaged nothing"),
            (lambda _: SWA("1ba", "9ba", update_interval="2ba"), "only one state"),
            (lambda _: DepthStacking("9ba", blocks="network.2"), "has not added blocks"),
            (lambda _: LayerFreezing(freeze_start=0.9), "frozen no layer"),
            (lambda _: SelectiveBackprop(start=0.98, end=0.99), "has chosen no samples"),
            (lambda folder: PostHocEMA(folder, snapshot_interval="9ba"), "only one snapshot"),
            (lambda _: Matching(0), "has not acted"),
        ],
    )
    def test_advice(self, make, text, tmp_path):
        """A training that was stopped for good is reported as one that ended; one to be resumed is not."""
        model = WithLoss(
            nn.Sequential(nn.Flatten(), nn.Linear(192, 9), nn.Sequential(nn.Linear(9, 9), nn.Linear(9, 9)))
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ended, stopped, interrupted = (
                train(copy.deepcopy(model), images(), make(f"{tmp_path}/{stop}"), duration="9ba", stop=stop)[1]
                for stop in (None, "patience is over", "stopped by a signal")
            )

        assert [text in one and "if it is resumed" not in one for one in ended] == [True]
        assert [text in one and "stopped" in one and "ignore this if it is resumed" in one for one in stopped] == [True]
        assert interrupted == []


class TestWithoutEffect:
    def test_average_without_update(self):
        """An average whose interval is longer than the training is that of the first weights, which is reported."""
        plan, (text,) = train(images_model(), images(), EMA("1ba", update_interval="9ba"))

        assert "has never updated its averages" in text
        assert plan.acted["EMA"] == (0, "times")

    def test_average(self):
        """The count of an average is that of its updates."""
        plan, texts = train(images_model(), images(), EMA("1ba", update_interval="2ba"))

        assert (plan.acted["EMA"], texts) == ((1, "times"), [])

    @pytest.mark.parametrize(("size", "count"), [(3, 1), (4, 0)])
    def test_one_ghost_batch(self, size, count):
        """Ghost batches as large as the batch are reported."""
        plan, texts = train(images_model(), images(), GhostBatchNorm(size))

        assert plan.acted["GhostBatchNorm"] == ((1, "layers") if count else (0, "batches"))
        assert [text.endswith("ghost_batch_size: choose a smaller one.") for text in texts] == [True] * (1 - count)

    def test_no_dropout(self):
        """A model without dropout has one warning."""
        _, (text,) = train(WithLoss(nn.Sequential(nn.Flatten(), nn.Linear(192, 3))), images(), GyroDropout())

        assert "found nothing to change" in text

    def test_selection_that_never_begins(self):
        """The end of a training does not count as a selection."""
        plan, (text,) = train(images_model(), images(), SelectiveBackprop(start=0.98, end=0.99))

        assert "has chosen no samples" in text
        assert plan.acted["SelectiveBackprop"] == (0, "times")

    def test_no_images(self):
        """Samples that are no images are an error, also if their size would not change."""
        batches = [(torch.rand(4, 8), torch.arange(4) % 3)]
        with pytest.raises(ValueError, match=r"ProgressiveResizing needs images of shape \(N, C, H, W\), got .*4, 8"):
            train(WithLoss(nn.Linear(8, 3)), batches, ProgressiveResizing())


class KeepsInEvaluation(WithLoss):
    """A model whose ``train()`` leaves its network in evaluation mode."""

    def train(self, mode=True):
        super().train(mode)
        self.network.eval()
        return self


class ReadsHead(WithLoss):
    """Computes logits from the weight of the output head, without calling it."""

    def forward(self, batch):
        hidden = self.network.transformer(input_ids=batch["input_ids"]).last_hidden_state
        return hidden @ self.network.lm_head.weight.T

    def loss(self, outputs, batch):
        return nn.functional.cross_entropy(outputs[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())


def gpt2():
    return make_transformer("gpt2")


def blocks():
    from torchvision.models.resnet import Bottleneck

    return nn.Sequential(
        nn.Conv2d(3, 16, 3), Bottleneck(16, 4), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 3)
    )


def patches():
    from torchvision.models import VisionTransformer

    return VisionTransformer(8, 2, 1, 2, hidden_dim=8, mlp_dim=16, num_classes=3)


IN_TRAINING = {
    "NEFTune": (NEFTune, gpt2, tokens),
    "ChunkedCrossEntropy": (lambda: ChunkedCrossEntropy(z_loss=0.1), gpt2, tokens),
    "PatchDropout": (PatchDropout, patches, images),
    "StochasticDepth": (lambda: StochasticDepth("ResNetBottleneck", drop_rate=0.4), blocks, images),
    "GyroDropout": (lambda: GyroDropout(0.3, 4, 2), convolutions, images),
    "GhostBatchNorm": (lambda: GhostBatchNorm(2), convolutions, images),
}


class TestLayers:
    @pytest.mark.parametrize("name", IN_TRAINING)
    def test_evaluation_mode(self, name):
        """Layers that act only in training are reported if the model evaluates them, and not if it trains them."""
        make, network, data = IN_TRAINING[name]
        batches = data()
        for kind, is_idle in ((WithLoss, False), (KeepsInEvaluation, True)):
            model = kind(network())
            model(batches[0])
            plan, texts = train(model, batches, make())

            assert [name in text and "were in evaluation mode" in text for text in texts] == [True] * is_idle
            count, unit = plan.acted[name]
            assert (unit == "batches" and count == 0) if is_idle else (unit == "layers" and count > 0)
            assert not any(module._forward_pre_hooks for module in model.modules())

    @pytest.mark.parametrize("kind", [WithLoss, KeepsInEvaluation])
    def test_compiled(self, kind):
        """In a compiled model no hook is compiled, and the modes of the layers count."""
        model = kind(convolutions())
        model.compile(backend="eager", fullgraph=True)
        torch._dynamo.utils.counters.clear()
        plan, texts = train(model, images(), GhostBatchNorm(2))

        assert len(texts) == (kind is KeepsInEvaluation)
        assert plan.acted["GhostBatchNorm"][0] == (kind is WithLoss)
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 2  # training and evaluation

    def test_layer_without_a_call(self):
        """A head whose weight is read instead of a call is reported."""
        plan, (text,) = train(ReadsHead(gpt2()), tokens(), ChunkedCrossEntropy(z_loss=0.1))

        assert "ChunkedCrossEntropy has no effect: the model called none of its layers in the first batch" in text
        assert plan.acted == {"ChunkedCrossEntropy": (0, "batches")}
