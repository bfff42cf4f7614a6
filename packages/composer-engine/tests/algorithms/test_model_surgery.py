"""Algorithms that change the model's layers: replaced layers, optimizers, warnings and logs."""

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from composer import functional as cf
from composer.algorithms import (
    Alibi,
    BlurPool,
    Factorize,
    FusedLayerNorm,
    GatedLinearUnits,
    GhostBatchNorm,
    GyroDropout,
    LowPrecisionGroupNorm,
    LowPrecisionLayerNorm,
    NoOpModel,
    SqueezeExcite,
    StochasticDepth,
    WeightStandardization,
)
from composer.core import (
    AlgorithmConflictError,
    Engine,
    Event,
    Logger,
    LoggerDestination,
    NoEffectWarning,
    State,
    Time,
    Timestamp,
    explain,
)

OPENING = ("init", "before_load", "after_load", "fit_start")


class Wrapped(nn.Module):
    """A model of a library that is called with a batch and has a loss method."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, batch):
        if isinstance(batch, dict):
            outputs = self.model(**batch)
            return outputs.logits
        return self.model(batch[0])

    def loss(self, outputs, batch):
        return cross_entropy(outputs.float(), batch[1]) if isinstance(batch, tuple) else outputs.float().square().mean()


def bottlenecks():
    """A minimal torchvision ResNet of bottlenecks."""
    from torchvision.models.resnet import Bottleneck, ResNet

    return Wrapped(ResNet(Bottleneck, [1, 1, 1, 1], num_classes=3))


def convolutions():
    """Layers that every image surgery changes."""
    layers = [nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.Conv2d(16, 16, 3), nn.GroupNorm(4, 16), nn.Dropout(0.5)]
    head = [nn.Flatten(), nn.LazyLinear(32), nn.LayerNorm(32), nn.Linear(32, 16), nn.Linear(16, 3)]
    model = nn.Sequential(*layers, *head)
    model(torch.rand(2, 3, 8, 8))
    return Wrapped(model)


def transformer(kind):
    """A small GPT-2 or BERT."""
    import transformers

    if kind == "gpt2":
        config = transformers.GPT2Config(n_layer=1, n_head=2, n_embd=16, n_positions=32, vocab_size=32)
        return Wrapped(transformers.GPT2LMHeadModel(config))
    config = transformers.BertConfig(
        num_hidden_layers=1, num_attention_heads=2, hidden_size=16, intermediate_size=32, vocab_size=32
    )
    return Wrapped(transformers.BertForMaskedLM(config))


class WrittenOutNorm(nn.Module):
    """A norm written as single operations."""

    def __init__(self, features):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(features))

    def forward(self, x):
        return self.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


IMAGES = (torch.rand(4, 3, 8, 8), torch.tensor([0, 1, 2, 0]))
TOKENS = {"input_ids": torch.randint(32, (2, 16))}
CASES = {
    "SqueezeExcite": (lambda: SqueezeExcite(latent_channels=4, min_channels=16), convolutions, cf.SqueezeExciteConv2d),
    "Factorize": (
        lambda: Factorize(min_channels=16, min_features=16, latent_channels=0.25, latent_features=4),
        convolutions,
        (cf.FactorizedConv2d, cf.FactorizedLinear),
    ),
    "GhostBatchNorm": (lambda: GhostBatchNorm(2), convolutions, cf.GhostBatchNorm2d),
    "WeightStandardization": (WeightStandardization, convolutions, cf.WeightStandardizer),
    "LowPrecisionLayerNorm": (LowPrecisionLayerNorm, convolutions, cf.LowPrecisionLayerNorm),
    "LowPrecisionGroupNorm": (LowPrecisionGroupNorm, convolutions, cf.LowPrecisionGroupNorm),
    "FusedLayerNorm": (
        FusedLayerNorm,
        lambda: Wrapped(nn.Sequential(nn.Flatten(), nn.Linear(192, 8), WrittenOutNorm(8), nn.Linear(8, 3))),
        nn.RMSNorm,
    ),
    "GyroDropout": (lambda: GyroDropout(sigma=4, tau=2), convolutions, cf.GyroDropout),
    "StochasticDepth": (
        lambda: StochasticDepth("ResNetBottleneck", "sample"),
        bottlenecks,
        cf.StochasticDepthBlock,
    ),
    "Alibi": (lambda: Alibi(64), lambda: transformer("gpt2"), cf.AlibiBias),
    "GatedLinearUnits": (GatedLinearUnits, lambda: transformer("bert"), cf.GatedLinearUnit),
}


def start(model, *algorithms, batch=IMAGES, **options):
    """Return an engine after the events before training."""
    loader = DataLoader([0, 1, 2, 3], batch_size=2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    state = State(model=model, optimizers=optimizer, max_duration="2ep", train_dataloader=loader, **options)
    engine = Engine(state, algorithms=list(algorithms))
    for event in OPENING:
        engine.run_event(event)
    state.batch = batch
    return engine


@pytest.mark.parametrize("name", CASES)
class TestEach:
    def test_layers_are_replaced_and_trained(self, name):
        """Layers are replaced, and one step of an optimizer created before updates every parameter."""
        make, make_model, inserted = CASES[name]
        batch = TOKENS if name in {"Alibi", "GatedLinearUnits"} else IMAGES
        engine = start(make_model(), make(), batch=batch, precision="amp_bf16")
        state = engine.state
        with torch.no_grad():
            for parameter in state.model.parameters():
                parameter.add_(0.01 * torch.randn_like(parameter))
        before = [parameter.detach().clone() for parameter in state.model.parameters()]

        state.model.train()
        state.model.loss(state.model(state.batch), state.batch).backward()
        state.optimizers[0].step()

        assert cf.count_module_instances(state.model, inserted) > 0
        assert all(not torch.equal(one, two) for one, two in zip(state.model.parameters(), before, strict=True))

    def test_two_instances_raise(self, name):
        """Two instances raise, as the second would find nothing or change the first one's layers."""
        make, _, _ = CASES[name]

        with pytest.raises(AlgorithmConflictError, match=name):
            explain([make(), make()])

    def test_no_match_warns_or_raises(self, name):
        """A model without matching layers gives a warning with the reason; an unsupported architecture raises."""
        make, _, _ = CASES[name]

        with (
            pytest.warns(NoEffectWarning, match=name)
            if name
            not in {
                "Alibi",
                "GatedLinearUnits",
            }
            else pytest.raises(ValueError, match="GPT-2")
        ):
            start(Wrapped(nn.Sequential(nn.Identity(), nn.Embedding(2, 2))), make(), precision="amp_bf16")


@pytest.mark.parametrize(
    "name", sorted(set(CASES) - {"LowPrecisionLayerNorm", "LowPrecisionGroupNorm", "FusedLayerNorm"})
)
def test_required_on_load(name):
    """Algorithms that change names or meaning of weights are required on load."""
    assert CASES[name][0]().required_on_load()


class TestTogether:
    def test_norm_replacements_conflict(self):
        """FusedLayerNorm and LowPrecisionLayerNorm conflict, as both replace layer norms."""
        with pytest.raises(AlgorithmConflictError, match="LowPrecisionLayerNorm"):
            explain([FusedLayerNorm(), LowPrecisionLayerNorm()])

    @pytest.mark.parametrize("first_blur", [True, False])
    def test_five_surgeries_together(self, first_blur):
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


class TestLowPrecision:
    @pytest.mark.parametrize("kind", [LowPrecisionLayerNorm, LowPrecisionGroupNorm])
    def test_event_is_configurable(self, kind):
        """It runs at the configured event; unsupported events raise."""
        assert set(kind(apply_at="init").runs_at_events()) == {Event.INIT}
        for event in ("fit_start", "after_lod", None):
            with pytest.raises(ValueError, match=rf"apply_at must be Event.INIT or Event.AFTER_LOAD, got {event!r}"):
                kind(apply_at=event)

    def test_norms_compute_in_the_runs_precision(self):
        """Under amp_bf16 the norm's output is bfloat16, also on the CPU, where autocast would use float32."""
        engine = start(convolutions(), LowPrecisionLayerNorm(), precision="amp_bf16")
        norm = next(each for each in engine.state.model.modules() if isinstance(each, cf.LowPrecisionLayerNorm))

        with torch.autocast("cpu", torch.bfloat16):
            assert norm(torch.rand(2, 32)).dtype is torch.bfloat16


FORMER_NAMES = {
    "GhostBatchNorm": {"GhostBatchNorm/num_new_modules": cf.GhostBatchNorm2d},
    "Factorize": {
        "factorize/num_conv2d_replacements": cf.FactorizedConv2d,
        "factorize/num_linear_replacements": cf.FactorizedLinear,
    },
    "SqueezeExcite": {"squeeze_excite/num_squeeze_excite_layers": cf.SqueezeExciteConv2d},
    "WeightStandardization": {"WeightStandardization/num_weights_standardized": nn.Conv2d},
    "StochasticDepth": {"stochastic_depth/num_stochastic_layers": cf.StochasticDepthBlock},
}


@pytest.mark.parametrize("name", FORMER_NAMES)
def test_former_names_in_logs(name):
    """The number of replaced layers is also logged under the names that dashboards of MosaicML Composer have."""
    logged = {}

    class Store(LoggerDestination):
        def log_hyperparameters(self, hyperparameters):
            logged.update(hyperparameters)

        def log_metrics(self, metrics, step=None):
            logged.update(metrics)

    make, make_model, _ = CASES[name]
    state = State(model=make_model())
    Engine(state, Logger(state, Store()), algorithms=make()).run_event("init")

    del logged[f"{name}/replaced_layers"]
    assert logged == {n: cf.count_module_instances(state.model, kind) for n, kind in FORMER_NAMES[name].items()}
    assert all(logged.values())


class TestStochasticDepth:
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

    def test_no_block_warns(self):
        """A model without matching blocks gives a warning and trains."""
        with pytest.warns(NoEffectWarning):
            engine = start(convolutions(), StochasticDepth("ResNetBottleneck", drop_warmup=0.5))

        engine.run_event("batch_start")

        assert not cf.count_module_instances(engine.state.model, cf.StochasticDepthBlock)

    def test_reports_unused_parameters(self):
        """find_unused_parameters and draws_layers are set where complete blocks are skipped, not where samples are."""
        block, sample = StochasticDepth("ResNetBottleneck"), StochasticDepth("ResNetBottleneck", "sample")

        assert (block.find_unused_parameters, block.draws_layers) == (True, True)
        assert (sample.find_unused_parameters, sample.draws_layers) == (False, False)

    @pytest.mark.parametrize(
        "settings",
        [{"stochastic_method": "row"}, {"drop_rate": 1.5}, {"drop_distribution": "normal"}]
        + [{"drop_warmup": warmup} for warmup in (2, "2dur", "10ep", "soon", None)],
    )
    def test_bad_settings(self, settings):
        """Settings out of range raise, with their names."""
        with pytest.raises((TypeError, ValueError), match=next(iter(settings))):
            StochasticDepth("ResNetBottleneck", **settings)


class TestGyroDropout:
    def test_period_is_derived_from_max_duration(self):
        """The masks evenly divide two epochs of two batches of two microbatches."""
        engine = start(convolutions(), GyroDropout(sigma=4, tau=1), device_train_microbatch_size=1)
        layer = next(each for each in engine.state.model.modules() if isinstance(each, cf.GyroDropout))

        assert layer.period == 2 * 2 * 2 * 1 / 4

    def test_longer_training_has_longer_periods(self):
        """A longer fit, or one with a subset of batches, is divided evenly among the masks."""
        engine = start(convolutions(), GyroDropout(sigma=4, tau=1))
        layer = next(each for each in engine.state.model.modules() if isinstance(each, cf.GyroDropout))
        periods = [layer.period]
        engine.state.max_duration = "8ep"
        engine.run_event("fit_start")
        periods.append(layer.period)
        engine.state.set_dataloader(engine.state.train_dataloader, "train", 1)
        engine.run_event("fit_start")
        periods.append(layer.period)

        assert periods == [1, 4, 2]

    def test_replaced_at_init_if_the_length_is_known(self):
        """Layers are replaced at INIT, before masks are loaded; without a known length, at FIT_START."""
        model = convolutions()
        state = State(model=model, train_dataloader=DataLoader([0, 1], batch_size=1))
        engine = Engine(state, algorithms=GyroDropout(sigma=4, tau=2))

        engine.run_event("init")
        early = cf.count_module_instances(model, cf.GyroDropout)
        state.max_duration = "2ep"
        engine.run_event("fit_start")

        assert early == 0
        assert cf.count_module_instances(model, cf.GyroDropout) == 1

    def test_missing_max_duration_raises(self):
        """A training of unknown length raises."""
        engine = Engine(State(model=convolutions()), algorithms=GyroDropout())

        with pytest.raises(ValueError, match="max_duration"):
            engine.run_event("fit_start")


class OwnAttention(nn.Module):
    """A custom attention with an activation as in a feed-forward block."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(4, 4)
        self.act = nn.ReLU()

    def attend(self, hidden):
        return (hidden @ hidden.mT).softmax(-1) @ hidden

    def forward(self, hidden):
        return self.attend(self.act(self.up(hidden)))


def attend_with_bias(self, hidden):
    """Attend with the bias added."""
    length = hidden.shape[-2]
    return (hidden @ hidden.mT + self.alibi(length, length)).softmax(-1) @ hidden


def test_own_modules_are_described_by_settings():
    """Alibi and GatedLinearUnits change modules of the user's own model that their settings describe."""
    model = Wrapped(nn.Sequential(nn.Embedding(9, 4), OwnAttention()))
    alibi = Alibi(
        64,
        heads_per_layer=1,
        position_embedding_attribute="model.0",
        attention_module=OwnAttention,
        attr_to_replace="attend",
        alibi_attention=attend_with_bias,
        causal=True,
    )
    units = GatedLinearUnits(feed_forward_module=OwnAttention, first_layer_attribute="up", activation_attribute="act")

    start(model, alibi, units)

    assert isinstance(model.model[1].alibi, cf.AlibiBias)
    assert model.model[1].alibi.causal
    assert isinstance(model.model[1].up, cf.GatedLinearUnit)
    assert isinstance(model.model[1].act, nn.Identity)


class TestAlibi:
    def test_sequences_are_folded(self):
        """A batch of (N, L) becomes (4 N, L / 4), in token order."""
        engine = start(transformer("gpt2"), Alibi(64), batch=TOKENS)

        engine.run_event("after_dataloader")

        assert engine.state.batch["input_ids"].shape == (8, 4)
        assert torch.equal(engine.state.batch["input_ids"].reshape(2, 16), TOKENS["input_ids"])

    def test_not_folded_at_full_length(self):
        """With scaling 1 the batch does not change."""
        assert set(Alibi(64, train_sequence_length_scaling=1).runs_at_events()) == {Event.INIT}

    @pytest.mark.parametrize("arguments", [(0,), (64, 0), (64, 1.5), ("long",)])
    def test_bad_settings(self, arguments):
        """Invalid lengths raise."""
        with pytest.raises((TypeError, ValueError), match="sequence_length"):
            Alibi(*arguments)


class TestDraws:
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


class TestNoOpModel:
    def test_accepts_any_batch_with_one_weight(self):
        """The model accepts any batch, costs nothing, and has one weight for the optimizer."""
        engine = start(convolutions(), NoOpModel())
        state = engine.state

        state.model.loss(state.model("any batch"), "any batch").backward()
        state.optimizers[0].step()

        assert sum(parameter.numel() for parameter in state.model.parameters()) == 1
        assert len(state.optimizers[0].param_groups[0]["params"]) == 1
        assert state.model.get_metrics(is_train=True) == {}


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: SqueezeExcite(latent_channels=0), "latent_channels"),
        (lambda: SqueezeExcite(latent_channels=1.5), "latent_channels must be a whole number of at least 1, or a frac"),
        (lambda: SqueezeExcite(min_channels=-1), "min_channels"),
        (lambda: Factorize(latent_features=-1), "latent_features"),
        (lambda: Factorize(latent_channels=2.5), "latent_channels must be a whole number of at least 1, or a fraction"),
        (lambda: Factorize(factorize_convs=False, factorize_linears=False), "factorize_convs"),
        (lambda: GhostBatchNorm(0), "ghost_batch_size"),
        (lambda: WeightStandardization(-1), "n_last_layers_ignore"),
        (lambda: GyroDropout(p=1.0), "p must"),
        (lambda: GyroDropout(sigma=2, tau=4), "sigma"),
        (lambda: GatedLinearUnits(act_fn="gelu"), "act_fn"),
    ],
)
def test_bad_settings(make, name):
    """Settings out of range raise at construction, with their names."""
    with pytest.raises((TypeError, ValueError), match=name):
        make()
