"""The contract of every algorithm: the checks of composer.core.testing, documentation and lifetime of batches."""

import copy
import gc
import inspect
import pickle
import tempfile
import weakref
from collections.abc import Mapping

import kornia.augmentation as ka
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import composer.algorithms
from composer.algorithms import (
    EMA,
    SAM,
    SWA,
    AugMix,
    ColOut,
    Distillation,
    GyroDropout,
    LabelSmoothing,
    LayerFreezing,
    MixUp,
    NEFTune,
    PatchDropout,
    ProgressiveResizing,
    RandAugment,
    SelectiveBackprop,
    StochasticDepth,
    TokenSelection,
)
from composer.core import Algorithm, Callback, Event, NoEffectWarning, Stage, State, Time
from composer.core.declarations import find_conflicts
from composer.core.testing import CHECKS, Case, Effects, effects_of
from fixtures.models import Teacher, WithLoss, WrittenOutNorm, make_transformer

NAMES = [
    name
    for name in composer.algorithms.__all__
    if inspect.isclass(kind := getattr(composer.algorithms, name)) and issubclass(kind, Algorithm)
]


FOLDER = tempfile.TemporaryDirectory()
SURGERY = {Stage.ARCHITECTURE, Stage.NORMALIZATION, Stage.PRECISION}


def new(name, *arguments, **settings):
    """Return a function that creates algorithms of a class, looked up by name."""
    return lambda: getattr(composer.algorithms, name)(*arguments, **settings)


def convolutions(norm=None):
    """Return strided convolutions with a norm, by default of batches, dropout and linear layers."""
    return WithLoss(
        nn.Sequential(
            nn.AdaptiveAvgPool2d(8),
            nn.Conv2d(3, 16, 3, padding=1),
            norm or nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.Conv2d(16, 16, 3, stride=2, padding=1),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Dropout(0.2),
            nn.Linear(64, 16),
            nn.LayerNorm(16),
            nn.Linear(16, 3),
        )
    )


def blocks():
    """Return two residual blocks of torchvision's, which can be skipped."""
    from torchvision.models.resnet import Bottleneck

    stem, head = nn.Conv2d(3, 16, 3, padding=1), [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 3)]
    return WithLoss(nn.Sequential(stem, Bottleneck(16, 4), Bottleneck(16, 4), *head))


def patches():
    """Return torchvision's smallest vision transformer."""
    from torchvision.models import VisionTransformer

    return WithLoss(VisionTransformer(8, 2, 1, 2, hidden_dim=8, mlp_dim=16, num_classes=3))


def linear(norm=nn.Identity):
    """Return a linear layer, which no surgery replaces."""
    return WithLoss(nn.Sequential(nn.Flatten(), nn.Linear(192, 3), norm(3)))


def stack():
    """Return a transformer of two layers for sequences of three tokens, the channels of an image."""
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, norm_first=True)
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    return WithLoss(nn.Sequential(nn.Flatten(2), nn.Linear(64, 8), encoder, nn.Flatten(), nn.Linear(24, 3)))


def images(size=8):
    return [(torch.rand(size, 3, 8, 8), torch.randint(3, (size,))) for _ in range(3)]


def masks():
    return [(torch.rand(4, 3, 8, 8), torch.rand(4, 1, 8, 8)) for _ in range(3)]


def tokens():
    batches = []
    for _ in range(3):
        ids = torch.randint(32, (4, 16))
        batches.append({"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.clone()})
    return batches


class Pictures(Dataset):
    """PIL images, as in torchvision's datasets."""

    def __init__(self, transform):
        self.transform = transform
        self.pixels = torch.randint(256, (12, 8, 8, 3), dtype=torch.uint8).numpy()

    def __len__(self):
        return len(self.pixels)

    def __getitem__(self, place):
        from PIL import Image

        return self.transform(Image.fromarray(self.pixels[place])), place % 3


def spikes():
    """Return batches of which the last one has much larger gradients."""
    first, second, (samples, labels) = images()
    return [first, second, (20 * samples, labels)]


def pictures():
    from torchvision.transforms import ToTensor

    return DataLoader(Pictures(ToTensor()), batch_size=4)


def tokens_with_reference():
    return [{**batch, "reference_losses": 3 + torch.rand(4, 16)} for batch in tokens()]


class WithoutReference(WithLoss):
    """Also takes batches with losses of a reference model, which the loop without the algorithm has."""

    def forward(self, batch):
        return super().forward({name: value for name, value in batch.items() if name != "reference_losses"})


class WithoutIndices(WithLoss):
    """Also takes batches with indices, which the loop evaluates as they are loaded."""

    def forward(self, batch):
        return super().forward(batch[1] if isinstance(batch[1], list) else batch)

    def loss(self, outputs, batch, **options):
        return super().loss(outputs, batch[1] if isinstance(batch[1], list) else batch, **options)


def indexed():
    data = composer.algorithms.InfoBatchDataset([(torch.rand(3, 8, 8), place % 3) for place in range(12)])
    return DataLoader(data, batch_size=4, sampler=data.sampler)


def state(make_model, make_batches, make_optimizer=None):
    """Return a function that creates states with SGD and momentum."""

    def make():
        model, batches = make_model(), make_batches()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        return State(model, optimizers=optimizer, max_duration="2ep", train_dataloader=batches)

    return make


on_images = state(convolutions, images)
on_pictures = state(convolutions, pictures)
on_indexed = state(lambda: WithoutIndices(convolutions().network), indexed)
on_groups = state(lambda: convolutions(nn.GroupNorm(4, 16)), images)
on_blocks = state(blocks, images)
on_patches = state(patches, images)
on_stack = state(stack, images)
on_masks = state(lambda: WithLoss(nn.Conv2d(3, 1, 1), nn.functional.mse_loss), masks)
on_text = state(lambda: WithLoss(make_transformer("gpt2")), tokens)
on_text_with_reference = state(lambda: WithoutReference(make_transformer("gpt2")), tokens_with_reference)
on_two_layers = state(lambda: WithLoss(make_transformer("gpt2", 2)), tokens)
on_masked_text = state(lambda: WithLoss(make_transformer("bert")), tokens)
on_norms = state(lambda: linear(WrittenOutNorm), images)
on_nothing = state(linear, images)
on_spikes = state(linear, spikes)


def seeded_teacher():
    """Return a teacher with the layers of the model, the same each time."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        return convolutions()


def in_bf16(make):
    """Return a function that creates the same states with a model in 16 bits."""

    def make_state():
        state = make()
        state.precision = "amp_bf16"
        return state

    return make_state


CASES = {
    "ActivationCheckpointing": Case(
        new("ActivationCheckpointing"),
        on_blocks,
        make_unfit_state=on_nothing,
        refused=(("modules", 3), ("every", 0), ("every", 1.5), ("policy", "x")),
        same_results=True,
    ),
    "ActivationCheckpointing of text": Case(
        new("ActivationCheckpointing", every=2, policy="matmuls"), on_text, same_results=True
    ),
    "Alibi": Case(new("Alibi", 16), on_text, make_unfit_state=on_nothing, refused=(("max_sequence_length", 0),)),
    "AugMix": Case(new("AugMix", severity=2), on_pictures, refused=(("width", 0), ("alpha", -1))),
    "AugMix of batches": Case(new("AugMix", batch=True), on_images),
    "Augment": Case(
        lambda: composer.algorithms.Augment(ka.RandomHorizontalFlip(p=0.5)),
        on_images,
        refused=(("augmentation", "flip"), ("box_format", "yxyx"), ("min_visible", 2), ("labels_key", 1)),
    ),
    "BlurPool": Case(
        new("BlurPool", min_channels=8),
        on_images,
        make_unfit_state=on_nothing,
        refused=(("min_channels", -1), ("min_channels", 1.5)),
    ),
    "ChannelsLast": Case(new("ChannelsLast"), on_images, make_unfit_state=on_nothing, same_results=True),
    "ChunkedCrossEntropy": Case(
        new("ChunkedCrossEntropy", z_loss=1e-4),
        on_text,
        refused=(("chunk_size", 0), ("z_loss", -1), ("softcap", 0), ("softcap", "x")),
    ),
    "ColOut": Case(new("ColOut"), on_images, refused=(("p_row", 1.5), ("p_col", "x"))),
    "ColOut of masks": Case(new("ColOut"), on_masks),
    "ColOut of a dataset": Case(new("ColOut", batch=False), on_pictures),
    "CutMix": Case(new("CutMix"), on_images, refused=(("alpha", -1), ("alpha", float("nan")))),
    "CutMix of masks": Case(new("CutMix", mask_key=1), on_masks),
    "CutMix of losses": Case(new("CutMix", interpolate_loss=True), on_images),
    "CutOut": Case(new("CutOut", num_holes=2), on_images, refused=(("num_holes", -1), ("length", 2))),
    "DepthStacking": Case(
        new("DepthStacking", "2ba"),
        on_stack,
        make_unfit_state=on_nothing,
        refused=(("at", "2dur"), ("factor", 1), ("order", "x"), ("blocks", 3), ("zero_layers", 3)),
    ),
    "DepthStacking at an epoch": Case(new("DepthStacking", "0.4dur", 3, "interleave"), on_stack),
    "DepthStacking at construction": Case(new("DepthStacking", None), on_stack, make_unfit_state=on_nothing),
    "DiLoCo": Case(
        new("DiLoCo", "2ba"),
        on_images,
        refused=(("sync_every", "0ba"), ("outer_lr", 0), ("outer_momentum", 1), ("nesterov", 1)),
    ),
    "Distillation": Case(
        lambda: composer.algorithms.Distillation(Teacher()),
        on_images,
        refused=(("teacher", 3), ("temperature", 0), ("weight", 2), ("kind", "x"), ("features", 3), ("features", "x")),
    ),
    "Distillation of features": Case(
        lambda: composer.algorithms.Distillation(seeded_teacher(), features={"network.3": "network.3"}), on_images
    ),
    "EMA": Case(
        new("EMA", half_life="1ba"),
        on_images,
        refused=(
            ("half_life", 0),
            ("half_life", "soon"),
            ("half_life", None),
            ("smoothing", 1),
            ("ema_start", "2dur"),
            ("update_interval", "8sp"),
        ),
    ),
    "EMA of epochs": Case(new("EMA", half_life="0.1dur", update_interval="1ep", ema_start="0.1dur"), on_images),
    "EMA by smoothing": Case(new("EMA", half_life=None, smoothing=0.8), on_images),
    "EMA in parts of an epoch": Case(new("EMA", half_life="2ep", update_interval="1ba"), on_images),
    "Factorize": Case(
        new("Factorize", min_channels=16, latent_channels=4, min_features=16, latent_features=4),
        on_images,
        make_unfit_state=on_nothing,
        refused=(("latent_channels", 0), ("min_features", -1)),
    ),
    "FusedLayerNorm": Case(new("FusedLayerNorm"), on_norms, make_unfit_state=on_nothing, same_results=True),
    "GatedAttention": Case(
        new("GatedAttention"),
        on_text,
        make_unfit_state=on_nothing,
        refused=(("initial_gate", 0), ("initial_gate", 1), ("elementwise", "x")),
    ),
    "GatedLinearUnits": Case(new("GatedLinearUnits"), on_masked_text, make_unfit_state=on_nothing),
    "GhostBatchNorm": Case(
        new("GhostBatchNorm", 4), on_images, make_unfit_state=on_nothing, refused=(("ghost_batch_size", 0),)
    ),
    "GradientClipping": Case(
        new("GradientClipping", "norm", 0.1), on_images, refused=(("clipping_type", "x"), ("clipping_threshold", -1))
    ),
    "GradientClipping by value": Case(new("GradientClipping", "value", 0.01), on_images),
    "GradientClipping adaptively": Case(new("GradientClipping", "adaptive", 0.01), on_images),
    "GyroDropout": Case(
        new("GyroDropout", p=0.3, sigma=4, tau=2), on_images, make_unfit_state=on_nothing, refused=(("p", 2),)
    ),
    "InfoBatch": Case(
        new("InfoBatch", ratio=0.4),
        on_indexed,
        make_unfit_state=on_images,
        refused=(("ratio", 1), ("ratio", -0.1), ("ratio", "x"), ("annealing", 2)),
    ),
    "LabelSmoothing": Case(
        new("LabelSmoothing", 0.2), on_images, refused=(("smoothing", -0.1), ("smoothing", 1.1), ("smoothing", "x"))
    ),
    "LayerFreezing": Case(
        new("LayerFreezing", 0.2, 0.8), on_images, refused=(("freeze_start", 2), ("freeze_level", -1))
    ),
    "LowPrecisionGroupNorm": Case(
        new("LowPrecisionGroupNorm"), in_bf16(on_groups), make_unfit_state=in_bf16(on_nothing)
    ),
    "LowPrecisionLayerNorm": Case(
        new("LowPrecisionLayerNorm"), in_bf16(on_images), make_unfit_state=in_bf16(on_nothing)
    ),
    "LowPrecisionGroupNorm at once": Case(new("LowPrecisionGroupNorm", apply_at=Event.INIT), in_bf16(on_groups)),
    "LowPrecisionLayerNorm at once": Case(new("LowPrecisionLayerNorm", apply_at=Event.INIT), in_bf16(on_images)),
    "MixUp": Case(
        new("MixUp", alpha=5.0),
        on_images,
        refused=(("alpha", -1), ("alpha", float("nan")), ("alpha", float("inf")), ("alpha", True)),
    ),
    "MixUp of masks": Case(new("MixUp", alpha=5.0, mask_key=1), on_masks),
    "MixUp of losses": Case(new("MixUp", alpha=5.0, interpolate_loss=True), on_images),
    "NEFTune": Case(new("NEFTune"), on_text, refused=(("alpha", -1), ("alpha", "x"))),
    "NoOpModel": Case(new("NoOpModel"), on_images),
    "PatchDropout": Case(new("PatchDropout"), on_patches, make_unfit_state=on_nothing, refused=(("p", 1), ("p", -1))),
    "PostHocEMA": Case(
        new("PostHocEMA", FOLDER.name, "2ba", overwrite=True),
        on_images,
        refused=(("folder", "a/{batch}"), ("snapshot_interval", "0ba"), ("sigma_rels", (0.1, 0.1)), ("overwrite", 1)),
        same_results=True,
    ),
    "ProgressiveResizing": Case(
        new("ProgressiveResizing", initial_scale=0.5), on_images, refused=(("mode", "x"), ("initial_scale", 2))
    ),
    "ProgressiveResizing by cropping": Case(new("ProgressiveResizing", mode="crop"), on_images),
    "ProgressiveResizing of masks": Case(new("ProgressiveResizing", resize_targets=True), on_masks),
    "QKNorm": Case(new("QKNorm"), on_text, make_unfit_state=on_nothing, refused=(("eps", 0), ("eps", "x"))),
    "RandAugment": Case(new("RandAugment"), on_pictures, refused=(("severity", 11), ("depth", -1))),
    "RandAugment of batches": Case(new("RandAugment", batch=True), on_images),
    "SAM": Case(new("SAM"), on_images, refused=(("rho", -1), ("interval", 0))),
    "SAM at every second step": Case(new("SAM", interval=2), on_images),
    "SWA": Case(
        new("SWA", swa_start="1ba", swa_end="5ba", update_interval="1ba"),
        on_images,
        refused=(("swa_start", "-1ba"), ("update_interval", "0ba"), ("anneal_strategy", "x")),
    ),
    "SWA that does not end": Case(
        new("SWA", swa_start="1ba", swa_end="100ba", update_interval="1ba", schedule_swa_lr=True, swa_lr=0.01),
        on_images,
    ),
    "SWA with learning rates": Case(
        new("SWA", swa_start="0.2dur", update_interval="2ba", schedule_swa_lr=True, swa_lr=0.01, anneal_steps=2),
        on_images,
    ),
    "SelectiveBackprop": Case(
        new("SelectiveBackprop", start=0.1, end=1.0, interrupt=2), on_images, refused=(("start", -1), ("keep", 2))
    ),
    "SeqLengthWarmup": Case(
        new("SeqLengthWarmup", duration=0.7, min_seq_length=4, max_seq_length=16, step_size=4),
        on_text,
        refused=(("duration", 2), ("min_seq_length", 0)),
    ),
    "SkipSpikes": Case(
        new("SkipSpikes", "4std", 4),
        on_spikes,
        refused=(("threshold", 0), ("threshold", "6"), ("threshold", "std"), ("window", 3), ("action", "x")),
    ),
    "SkipSpikes by clipping": Case(new("SkipSpikes", 4, 4, "clip"), on_spikes),
    "SkipSpikes with indices": Case(new("SkipSpikes", 4, 4, index_key=1), on_spikes),
    "SqueezeExcite": Case(
        new("SqueezeExcite", 4, 16), on_images, make_unfit_state=on_nothing, refused=(("min_channels", -1),)
    ),
    "StochasticDepth": Case(
        new("StochasticDepth", "ResNetBottleneck", "sample", 0.4, drop_warmup=0.5),
        on_blocks,
        make_unfit_state=on_nothing,
        refused=(("drop_rate", 2), ("stochastic_method", "x")),
    ),
    "StochasticDepth of whole batches": Case(new("StochasticDepth", "ResNetBottleneck", "block", 0.4), on_blocks),
    "TokenSelection": Case(
        new("TokenSelection"), on_text_with_reference, refused=(("keep", 0), ("keep", 1.5), ("keep", "x"))
    ),
    "ValueResidual": Case(
        new("ValueResidual"), on_two_layers, make_unfit_state=on_nothing, refused=(("initial_weight", -1),)
    ),
    "WeightStandardization": Case(
        new("WeightStandardization"), on_images, make_unfit_state=on_nothing, refused=(("n_last_layers_ignore", -1),)
    ),
}
VARIANTS = {label: case for label, case in CASES.items() if label.split()[0] in NAMES}

each = pytest.mark.parametrize("case", VARIANTS.values(), ids=VARIANTS)


def variants_of(name):
    """Return the cases of a class."""
    return [case for label, case in VARIANTS.items() if label.split()[0] == name]


class TestContract:
    @pytest.mark.parametrize("name", NAMES)
    def test_every_algorithm_is_tested(self, name):
        """Every algorithm of the package is tested here."""
        assert [type(case.make()).__name__ for case in variants_of(name)][:1] == [name]

    @each
    @pytest.mark.filterwarnings("ignore:The model was made deeper before")  # by a second training of the same object
    @pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
    def test_contract(self, check, case):
        """Declarations, draws, resumption and all other checks of the contract suite pass."""
        assert check(case) is None

    @pytest.mark.parametrize("name", NAMES)
    def test_declarations_are_minimal(self, name):
        """For each declared read or write there are settings that use it."""
        kind, used = getattr(composer.algorithms, name), Effects()

        for case in variants_of(name):
            used |= effects_of(case)

        def covered(words):
            return words | {"batch"} if any(word.startswith("batch.") for word in words) else words

        # Surgery hands the optimizers over to be changed, whether or not there are new parameters this time.
        is_surgery = not SURGERY.isdisjoint(kind.runs_at.values())
        assert kind.reads <= covered(used.reads)
        assert kind.writes - ({"optimizers"} if is_surgery else set()) <= covered(used.writes)

    @pytest.mark.parametrize("name", NAMES)
    def test_all_declared_events_are_used(self, name):
        """For each declared event there are settings that run at it."""
        used = set().union(*(case.make().runs_at_events() for case in variants_of(name)))

        assert used == set(getattr(composer.algorithms, name).runs_at)

    @pytest.mark.parametrize("name", NAMES)
    def test_defaults_are_plain(self, name):
        """Defaults are plain data, which tools that construct classes from YAML can write and read, as LightningCLI."""
        defaults = [one.default for one in inspect.signature(getattr(composer.algorithms, name)).parameters.values()]

        assert {type(one) for one in defaults} <= {type, type(None), bool, int, float, str, tuple}

    @pytest.mark.parametrize("name", NAMES)
    def test_bad_settings_are_covered(self, name):
        """Each algorithm with validated settings has a case of an invalid one."""
        checked = [case.refused for case in variants_of(name) if case.refused]

        settings = variants_of(name)[0].make().settings().values()
        assert checked or not any(isinstance(one, (int, float, Time)) and type(one) is not bool for one in settings)


class TestDocumentation:
    @pytest.mark.parametrize("name", NAMES)
    def test_settings_are_documented(self, name):
        """The docstring describes each setting, and has an example."""
        algorithm = variants_of(name)[0].make()
        doc = inspect.getdoc(type(algorithm))

        assert ">>>" in doc
        assert all(f"\n    {setting}: " in doc for setting in algorithm.settings())

    @pytest.mark.parametrize("name", NAMES)
    def test_conflict_errors_name_a_remedy(self, name):
        """The error for two owners of a resource ends with a remedy."""
        algorithms = [variants_of(name)[0].make() for _ in range(2)]

        conflicts = find_conflicts(algorithms)

        assert all(conflict.remedies for conflict in conflicts)
        assert bool(conflicts) == bool(algorithms[0].owns)


class TestSettings:
    @each
    def test_pickle_round_trip(self, case):
        """A new instance can be pickled, and its class attributes are documented."""
        algorithm = case.make()

        again = pickle.loads(pickle.dumps(algorithm))

        assert repr(again) == repr(algorithm)
        assert again is not algorithm

    @pytest.mark.parametrize(
        ("make", "settings"),
        [
            (lambda: AugMix(depth=0), "depth=0"),
            (lambda: ColOut(0, 0), "p_row=0 and p_col=0"),
            (lambda: Distillation(Teacher(), weight=0), "weight=0"),
            (lambda: EMA(half_life=None, smoothing=0), "smoothing=0"),
            (lambda: EMA(ema_start="1dur"), "ema_start=1dur"),
            (lambda: GyroDropout(p=0), "p=0"),
            (lambda: LabelSmoothing(0), "smoothing=0"),
            (lambda: LayerFreezing(freeze_level=0), "freeze_level=0"),
            (lambda: LayerFreezing(freeze_start=1.0), "freeze_start=1.0"),
            (lambda: MixUp(0.0), "alpha=0.0"),
            (lambda: NEFTune(0), "alpha=0"),
            (lambda: PatchDropout(p=0), "p=0"),
            (lambda: ProgressiveResizing(initial_scale=1), "initial_scale=1"),
            (lambda: RandAugment(depth=0), "depth=0"),
            (lambda: SAM(rho=0), "rho=0"),
            (lambda: SWA(swa_start="1dur", swa_end="9ep"), "swa_start=1dur"),
            (lambda: SelectiveBackprop(start=0.5, end=0.5), "start=0.5 and end=0.5"),
            (lambda: SelectiveBackprop(keep=1), "keep=1"),
            (lambda: SelectiveBackprop(interrupt=1), "interrupt=1"),
            (lambda: StochasticDepth("ResNetBottleneck", drop_rate=0), "drop_rate=0"),
            (lambda: TokenSelection(keep=1), "keep=1"),
        ],
    )
    def test_settings_without_effect_warn(self, make, settings):
        """Settings without effect, such as the end of a sweep, are allowed and give a warning."""
        with pytest.warns(NoEffectWarning, match=rf"changes nothing with {settings}\.") as caught:
            make()

        assert caught[0].filename == __file__


class TestLifetime:
    @each
    def test_batches_are_released(self, case):
        """No tensor of a batch, its outputs or its loss is alive once the loop and the state have released it."""
        gc.freeze()  # existing objects need not be searched
        batches = []

        def reference_tensors(*values):
            batches.extend(weakref.ref(one) for one in tensors_of(values) if not isinstance(one, nn.Parameter))

        class Holder(Callback):
            def after_loss(self, state, logger):
                reference_tensors(state.batch, state.outputs, state.loss)

            def batch_end(self, state, logger):
                reference_tensors(state.batch)

        training = case.train(case.make())
        state = training.state
        state.callbacks.append(Holder())
        training.run(2)

        state.batch = state.outputs = state.loss = state.total_loss = state.dataloader = state.train_dataloader = None
        training.losses.clear()
        gc.collect()
        gc.unfreeze()

        assert batches
        assert [reference() for reference in batches] == [None] * len(batches)

    @each
    def test_copy_runs_in_another_state(self, case):
        """An algorithm is not bound to its first state: a copy works in another run."""
        algorithm = case.make()
        first = case.train(copy.deepcopy(algorithm))
        first.run(2)

        second = case.train(algorithm)
        second.run(2)

        assert [*first.losses.values()] == [*second.losses.values()]


def tensors_of(value):
    """Return the tensors of a batch, of outputs or of losses."""
    if isinstance(value, torch.Tensor):
        return [value]
    parts = value.values() if isinstance(value, Mapping) else value if isinstance(value, (list, tuple)) else ()
    return [tensor for part in parts for tensor in tensors_of(part)]
