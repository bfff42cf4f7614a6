"""A run that is stopped at any point and resumed produces bit-identical results.

With ``RESUME_MATRIX=all`` in the environment every pair of algorithms is tested, otherwise a sample of them.
"""

import hashlib
import itertools
import os
import random
import shutil
import tempfile
import warnings

import kornia.augmentation as ka
import kornia.augmentation.auto as kauto
import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

import composer.algorithms as al
from composer import Trainer
from composer.core import Algorithm, AlgorithmConflictError, explain
from composer.loggers import InMemoryLogger
from composer.models import ComposerClassifier, HuggingFaceModel
from composer.optim import CosineAnnealingWithWarmupScheduler, LinearScheduler, muon_with_adamw
from fixtures.models import PatchEncoder, Teacher

FOLDER = tempfile.TemporaryDirectory()
PIPELINES = {
    "colours": lambda: ka.ColorJitter(0.3, 0.3, 0.3, 0.1),
    "geometry": lambda: ka.AugmentationSequential(ka.RandomAffine(30.0), ka.RandomPerspective(0.3)),
    "one of": lambda: ka.ImageSequential(
        ka.RandomGaussianNoise(), ka.RandomErasing(), ka.RandomPosterize(), random_apply=1
    ),
    "policy": lambda: kauto.RandAugment(2, 10),
    "drawn while applied": lambda: ka.RandomPlasmaBrightness(p=0.7),
}
SETTINGS = {
    "ActivationCheckpointing": {"modules": ("Bottleneck", "BertLayer", "GPT2Block")},
    "Augment": {"augmentation": PIPELINES["geometry"]()},
    "Alibi": {"max_sequence_length": 16},
    "AugMix": {"batch": True},
    "DepthStacking": {"at": "1ep", "blocks": "model.bert.encoder.layer"},
    "Distillation": {"teacher": Teacher()},
    "ChunkedCrossEntropy": {"head": "module.12", "chunk_size": 2, "z_loss": 0.01},
    "DiLoCo": {"sync_every": "2ba"},
    "EMA": {"half_life": "3ba"},
    "Factorize": {"min_channels": 16, "min_features": 16, "latent_features": 0.25},
    "GhostBatchNorm": {"ghost_batch_size": 2},
    "GradientClipping": {"clipping_type": "adaptive", "clipping_threshold": 0.1},
    "GyroDropout": {"sigma": 4, "tau": 2},
    "InfoBatch": {"ratio": 0.2, "annealing": 0.4},
    "PostHocEMA": {"folder": FOLDER.name, "snapshot_interval": "2ba", "overwrite": True},
    "RandAugment": {"batch": True},
    "SAM": {"interval": 2},
    "SWA": {"swa_start": "3ba", "swa_end": "8ba", "update_interval": "1ba"},
    "SelectiveBackprop": {"start": 0.0},
    "SeqLengthWarmup": {"duration": 0.5, "min_seq_length": 4, "max_seq_length": 12, "step_size": 4},
    "SkipSpikes": {"threshold": "0.5std", "window": 4},
    "SqueezeExcite": {"latent_channels": 4, "min_channels": 16},
    "StochasticDepth": {"target_layer_name": "ResNetBottleneck"},
}
NAMES = sorted(name for name, kind in vars(al).items() if isinstance(kind, type) and issubclass(kind, Algorithm))
FOR_DECODERS = {"GatedAttention", "QKNorm", "ValueResidual"}
FOR_TEXT = {"Alibi", "NEFTune", "GatedLinearUnits", "SeqLengthWarmup", "FusedLayerNorm", "TokenSelection"}
FOR_TEXT |= {"DepthStacking", *FOR_DECODERS}
STEPS = 9  # of three epochs


class Images(Dataset):
    """Images with noise drawn from all three global generators."""

    def __len__(self):
        """Return 11, so that the last batch of an epoch is smaller."""
        return 11

    def __getitem__(self, index):
        """Draw."""
        image = torch.rand(3, 12, 12, generator=torch.Generator().manual_seed(index))
        image[index % 3] += 0.5
        noise = torch.rand(()) + random.random() + float(np.random.rand())  # noqa: NPY002
        return (image + 0.1 * noise).clamp(0, 1), index % 3


def image_model():
    """Return a residual network in which every surgery on images finds something."""
    from torchvision.models.resnet import Bottleneck

    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), Bottleneck(16, 4), nn.GroupNorm(4, 16)]
    layers.append(PatchEncoder(12))
    head = [
        nn.Conv2d(16, 16, 3, stride=2),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(64, 32),
        nn.LayerNorm(32),
        nn.Dropout(0.1),
    ]
    return ComposerClassifier(nn.Sequential(*layers, *head, nn.Linear(32, 3)), num_classes=3)


class Text(Dataset):
    """Sentences of twelve ids, and which of three ids is the most frequent; or a label for each token."""

    def __init__(self, *, tokens=False):
        self.tokens = tokens

    def __len__(self):
        """Eleven."""
        return 11

    def __getitem__(self, index):
        """Draw."""
        ids = torch.randint(0, 20, (12,), generator=torch.Generator().manual_seed(index))
        ids[random.randrange(12)] = 3
        if self.tokens:
            return {"input_ids": ids, "labels": ids % 3, "reference_losses": ids / 20}
        return {"input_ids": ids, "labels": torch.tensor(index % 3)}


def text_model(*names, tokens=False):
    """Return a small BERT that classifies sentences, or tokens; GPT-2 for algorithms of these names for decoders."""
    import transformers

    from composer.models import ComposerModel

    class Classifier(ComposerModel):
        def __init__(self):
            super().__init__()
            unit = "Token" if family == "GPT2" else "Sequence"  # without a token of padding, which GPT-2 looks for
            self.model = getattr(transformers, f"{family}For{unit}Classification")(config)

        def forward(self, batch):
            logits = self.model(input_ids=batch["input_ids"], attention_mask=batch.get("attention_mask")).logits
            return logits[:, -1] if logits.ndim == 3 else logits

        def loss(self, outputs, batch):
            return nn.functional.cross_entropy(outputs, batch["labels"])

    sizes = {"vocab_size": 20, "num_labels": 3, "hidden_size": 16, "num_attention_heads": 2}
    sizes["max_position_embeddings"] = 16
    if FOR_DECODERS & {*names}:
        family = "GPT2"
        config = transformers.GPT2Config(**sizes, num_hidden_layers=2, eos_token_id=0)
    else:
        family, config = "Bert", transformers.BertConfig(**sizes, num_hidden_layers=1, intermediate_size=32)
    torch.manual_seed(0)
    return (
        HuggingFaceModel(getattr(transformers, f"{family}ForTokenClassification")(config)) if tokens else Classifier()
    )


def made(names, *, text=False):
    """Return algorithms with settings under which each has an effect."""
    settings = SETTINGS | ({"LabelSmoothing": {"target_key": "labels"}} if text else {})
    if FOR_DECODERS & {*names}:
        settings["DepthStacking"] = {"at": "1ep", "blocks": "model.transformer.h"}
    return [getattr(al, name)(**settings.get(name, {})) for name in names]


def run(folder, names=(), *, load_path=None, text=False, stop_after=None, **options):
    """Train, or resume from a checkpoint; return the closed trainer and its logger."""
    tokens = "TokenSelection" in names
    model = text_model(*names, tokens=tokens) if text else image_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    workers = options.pop("num_workers", 0)
    data, order = Text(tokens=tokens) if text else Images(), {"shuffle": True}
    if "InfoBatch" in names:
        data = al.InfoBatchDataset(data)
        order = {"sampler": data.sampler}
    loader = DataLoader(
        data,
        batch_size=4,
        **order,
        num_workers=workers,
        persistent_workers=options.pop("persistent_workers", False),
    )
    seed = options.pop("seed", 5)
    settings = {
        "optimizers": optimizer,
        "schedulers": LinearScheduler(alpha_f=0.1),
        "train_dataloader": loader,
        "save_interval": "1ba",
        **options,
    }
    log = InMemoryLogger()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of algorithms that have no effect, or interpolate the loss together
        warnings.filterwarnings("error", "A run that is resumed")  # all state of these components is saved
        trainer = Trainer(
            model=model,
            algorithms=made(names, text=text),
            loggers=log,
            max_duration="3ep",
            progress_bar=False,
            device="cpu",
            seed=seed,
            run_name="run",
            save_folder=str(folder),
            load_path=load_path,
            **settings,
        )
        trainer.fit(duration=f"{stop_after}ba") if stop_after else trainer.fit()
        trainer.close()
    return trainer, log


def bits(value):
    """Return nested values with tensors replaced by a digest of their bytes."""
    if isinstance(value, torch.Tensor):
        content = value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        return f"{value.dtype} {tuple(value.shape)} {hashlib.sha256(content).hexdigest()[:16]}"
    if isinstance(value, dict):
        return {key: bits(item) for key, item in value.items() if not str(key).endswith("_wct")}
    return [bits(item) for item in value] if isinstance(value, (list, tuple)) else value


def compared(trainer, log, of):
    """Return the values to compare: all state, and the logged values of the last ``of`` batches."""
    state = trainer.state
    # An evaluation runs after the batch is counted and before the checkpoint.
    logged = {
        name: values
        for name, entries in log.data.items()
        if name.startswith(("loss/", "metrics/", "lr", "trainer/", "time/"))
        and (
            values := [
                (int(moment.batch), bits(value))
                for moment, value in entries
                if int(moment.batch) >= STEPS - of + name.startswith("metrics/eval")
            ]
        )
    }
    saved = state.state_dict()
    saved.pop("callbacks")
    return {
        "model": bits(state.get_model_state_dict()),
        "optimizers": bits(state.get_optim_state_dict()),
        "state": bits(saved),
        "logged": logged,
    }


def assert_same(first, second):
    """Compare each part, so that a failure names the part."""
    assert first.keys() == second.keys()
    for part in first:
        assert first[part] == second[part], f"{part} differs"


def check(tmp_path, names=(), stop=None, **options):
    """Train uninterrupted, then resume from the checkpoint after ``stop`` batches; results must be bit-identical."""
    stop = random.Random("/".join(names)).randrange(1, STEPS) if stop is None else stop
    full, log = run(tmp_path / "full", names, **options)
    (path,) = [path for path in (tmp_path / "full").iterdir() if path.name.endswith(f"-ba{stop}")][:1]

    resumed, later = run(tmp_path / "resumed", names, load_path=str(path), **options)

    assert int(resumed.state.timestamp.batch) == STEPS
    assert_same(compared(full, log, STEPS - stop), compared(resumed, later, STEPS - stop))


class TestEachAlgorithm:
    @pytest.mark.parametrize("name", NAMES)
    def test_alone(self, tmp_path, name):
        """A run with each algorithm resumes exactly after some batch."""
        check(tmp_path, [name], text=name in FOR_TEXT)


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("name", PIPELINES)
def test_pipelines(tmp_path, monkeypatch, name, num_workers):
    """A training with a pipeline of kornia, stopped in the middle of an epoch, continues with the same draws."""
    monkeypatch.setitem(SETTINGS, "Augment", {"augmentation": PIPELINES[name]()})

    check(tmp_path, ["Augment"], stop=4, num_workers=num_workers)


@pytest.mark.skipif(shutil.which(os.environ.get("CXX", "g++")) is None, reason="compiling needs a C++ compiler")
def test_compiled_pipeline(tmp_path, monkeypatch):
    """A training with a compiled augmentation resumes exactly. More than 5 seconds, because it is compiled."""
    torch.compiler.reset()  # what other tests compiled counts against a limit
    pipeline = ka.AugmentationSequential(ka.RandomAffine(30.0), ka.ColorJitter(0.3).compile())
    monkeypatch.setitem(SETTINGS, "Augment", {"augmentation": pipeline})

    check(tmp_path, ["Augment"], stop=4)


PAIRS = [pair for pair in itertools.combinations(NAMES, 2) if not (set(pair) & FOR_TEXT)]
PAIRS += list(itertools.combinations(sorted(FOR_TEXT | {"EMA", "LayerFreezing", "LabelSmoothing", "SAM"}), 2))
PAIRS = sorted(set(PAIRS))
SAMPLE = PAIRS if os.environ.get("RESUME_MATRIX") == "all" else random.Random(11).sample(PAIRS, 24)


@pytest.mark.parametrize("pair", SAMPLE, ids="+".join)
def test_pairs(tmp_path, pair):
    """Two algorithms that may run together resume exactly; others raise at construction."""
    if conflicts(made(pair)):
        with pytest.raises(AlgorithmConflictError):
            check(tmp_path, pair)
    elif {*pair} == {"DepthStacking", "ValueResidual"}:
        with pytest.raises(ValueError, match="equal and separate modules"):  # its first block differs from the others
            check(tmp_path, pair, text=True)
    else:
        check(tmp_path, pair, text=bool(set(pair) & FOR_TEXT))


def conflicts(algorithms):
    """Return whether the engine rejects them, or an algorithm reads the outputs, which NoOpModel does not produce."""
    if any(isinstance(one, al.NoOpModel) for one in algorithms) and any("outputs" in one.reads for one in algorithms):
        return True
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            explain(algorithms)
    except AlgorithmConflictError:
        return True
    return False


class TestEachWayToTrain:
    def test_a_generated_seed(self, tmp_path):
        """A resumed run uses the seed of the first one, for draws and for the order of the data."""
        full, log = run(tmp_path / "full", ["MixUp"], seed=None)
        resumed, later = run(tmp_path / "resumed", ["MixUp"], seed=None, load_path=str(tmp_path / "full" / "ep1-ba4"))

        assert_same(compared(full, log, STEPS - 4), compared(resumed, later, STEPS - 4))

    @pytest.mark.parametrize("stop", range(1, STEPS))
    def test_at_each_batch(self, tmp_path, stop):
        """A run resumes exactly from any batch, in the middle or at the end of an epoch."""
        check(tmp_path, ["MixUp", "EMA"], stop, eval_dataloader=DataLoader(Images(), batch_size=4), eval_interval="2ba")

    @pytest.mark.parametrize(
        "options",
        [
            {"num_workers": 1},
            {"num_workers": 2},
            {"num_workers": 2, "persistent_workers": True},
            {"device_train_microbatch_size": 3},
            {"device_train_microbatch_size": "auto"},
            {"precision": "amp_bf16"},
            {"precision": "amp_fp16"},
            {"train_subset_num_batches": 3, "eval_dataloader": DataLoader(Images(), batch_size=4, shuffle=True)},
            {"schedulers": CosineAnnealingWithWarmupScheduler(t_warmup="2ba")},
        ],
        ids=lambda options: ",".join(f"{name}={value}" for name, value in options.items() if len(str(value)) < 20),
    )
    def test_with(self, tmp_path, options):
        """Workers, accumulation, loss scaling, evaluations and schedules make no difference."""
        check(tmp_path, ["LabelSmoothing"], 4, **options)

    @pytest.mark.parametrize(
        "make",
        [
            lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5),
            lambda optimizer: torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 2]),
            lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 2),
            lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=20),
            lambda optimizer: torch.optim.lr_scheduler.SequentialLR(
                optimizer,
                [
                    torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=1),
                    torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5),
                ],
                milestones=[1],
            ),
        ],
    )
    def test_with_torchs_schedulers(self, tmp_path, make):
        """Schedulers of torch resume, also those that change settings other than the learning rate."""

        def settings(model):
            optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
            return {"optimizers": optimizer, "schedulers": make(optimizer)}

        assert_same(*twice(tmp_path, settings, stop="ep1-ba5"))

    def test_several_optimizers(self, tmp_path):
        """Each of several optimizers resumes with its own state."""

        def settings(model):
            weights = list(model.parameters())
            second = torch.optim.SGD(weights[5:], 0.01, momentum=0.9)
            return {"optimizers": [torch.optim.Adam(weights[:5], lr=0.01), second]}

        assert_same(*twice(tmp_path, settings, stop="ep0-ba2"))

    @pytest.mark.parametrize("options", [{"ns_coefficients": "polar_express"}, {"row_beta": 0.95}])
    def test_muon(self, tmp_path, options):
        """Muon with AdamW resumes under a schedule."""

        def settings(model):
            optimizer = muon_with_adamw(model, lr=0.02, **options)
            return {"optimizers": optimizer, "schedulers": LinearScheduler(alpha_f=0.1)}

        assert_same(*twice(tmp_path, settings, stop="ep1-ba5"))

    def test_schedule_free(self, tmp_path):
        """An optimizer with separate evaluation weights resumes with the training weights."""
        schedulefree = pytest.importorskip("schedulefree", reason="it is an optional optimizer")

        def settings(model):
            return {
                "optimizers": schedulefree.AdamWScheduleFree(model.parameters(), lr=0.01),
                "eval_dataloader": DataLoader(Images(), batch_size=4),
                "eval_interval": "2ba",
            }

        assert_same(*twice(tmp_path, settings, stop="ep1-ba5"))


def twice(tmp_path, settings, stop):
    """Train with ``settings(model)``, uninterrupted and resumed; return the values to compare of both."""
    results = []
    for number, load in enumerate((None, str(tmp_path / "0" / stop))):
        model, log = image_model(), InMemoryLogger()
        trainer = Trainer(
            model=model,
            train_dataloader=DataLoader(Images(), batch_size=4, shuffle=True),
            loggers=log,
            max_duration="3ep",
            progress_bar=False,
            device="cpu",
            seed=5,
            run_name="run",
            save_folder=str(tmp_path / str(number)),
            save_interval="1ba",
            load_path=load,
            **settings(model),
        )
        trainer.fit()
        trainer.close()
        results.append(compared(trainer, log, STEPS - int(stop.partition("-ba")[2])))
    return results


class Stream(IterableDataset):
    """A stream of eleven samples in a random order."""

    def __iter__(self):
        """Draw."""
        images = Images()
        for index in torch.randperm(11).tolist():
            yield images[index]


class Batches:
    """An iterable of batches that is not a DataLoader."""

    def __iter__(self):
        """Draw."""
        for _ in range(3):
            index = random.randrange(3)
            yield torch.rand(4, 3, 12, 12), torch.full((4,), index)


class TestOtherLoaders:
    @pytest.mark.parametrize("workers", [0, 2])
    def test_a_stream_is_replayed(self, tmp_path, workers):
        """A stream is fast-forwarded to the resume point, with a warning that states how to avoid it."""
        loaders = [DataLoader(Stream(), batch_size=4, num_workers=workers) for _ in range(2)]
        steps = 3 * (3 if workers == 0 else 6)
        full, log = run(tmp_path / "full", train_dataloader=loaders[0])
        path = next(path for path in (tmp_path / "full").iterdir() if path.name.endswith("-ba5"))

        resumed, later = run(tmp_path / "resumed", train_dataloader=loaders[1], load_path=str(path))

        assert int(resumed.state.timestamp.batch) == steps
        assert bits(full.state.get_model_state_dict()) == bits(resumed.state.get_model_state_dict())
        assert [value for _, value in log.data["loss/train/total"]][5:] == [
            value for _, value in later.data["loss/train/total"]
        ]

    def test_the_warning(self, tmp_path):
        """The warning states how many batches are loaded again, and which loader would resume immediately."""
        run(tmp_path / "full", train_dataloader=Batches())
        model = image_model()

        trainer = Trainer(
            model=model,
            train_dataloader=Batches(),
            optimizers=torch.optim.AdamW(model.parameters(), lr=0.01),
            schedulers=LinearScheduler(alpha_f=0.1),
            max_duration="3ep",
            progress_bar=False,
            device="cpu",
            load_path=str(tmp_path / "full" / "ep1-ba5"),
        )

        with trainer, pytest.warns(UserWarning, match=r"first 2 batches are loaded again.*StatefulDataLoader"):
            trainer.fit()

    def test_any_iterable(self, tmp_path):
        """A user's iterable that draws from global generators resumes exactly."""
        full, _ = run(tmp_path / "full", train_dataloader=Batches())
        resumed, _ = run(tmp_path / "resumed", train_dataloader=Batches(), load_path=str(tmp_path / "full" / "ep1-ba4"))

        assert bits(full.state.get_model_state_dict()) == bits(resumed.state.get_model_state_dict())

    @pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")  # of torchdata's own
    def test_a_loader_with_a_state_dict(self, tmp_path):
        """Torchdata's StatefulDataLoader is restored by its own state."""
        module = pytest.importorskip("torchdata.stateful_dataloader", reason="it is an optional loader")
        created = [module.StatefulDataLoader(Plain(), batch_size=4) for _ in range(2)]

        full, _ = run(tmp_path / "full", train_dataloader=created[0])
        resumed, _ = run(
            tmp_path / "resumed", train_dataloader=created[1], load_path=str(tmp_path / "full" / "ep1-ba5")
        )

        assert bits(full.state.get_model_state_dict()) == bits(resumed.state.get_model_state_dict())


class Plain(Images):
    """The images without random noise, because another loader does not seed the generators."""

    def __getitem__(self, index):
        """Return it."""
        image = torch.rand(3, 12, 12, generator=torch.Generator().manual_seed(index))
        return image, index % 3


class TestMaskedTokens:
    """Transformers' collator for masked language models, which creates its generator with the first batch."""

    def train(self, folder, load_path=None, seed=5, make_loader=DataLoader, **workers):
        transformers = pytest.importorskip("transformers", reason="the collator is of Transformers")
        tokenizers = pytest.importorskip("tokenizers", reason="the tokenizer is of Transformers")
        vocabulary = {name: index for index, name in enumerate(["[PAD]", "[MASK]", "[UNK]", *"abcdefghijklm"])}
        backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
        special = {"pad_token": "[PAD]", "mask_token": "[MASK]", "unk_token": "[UNK]"}
        tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, **special)
        collate = transformers.DataCollatorForLanguageModeling(tokenizer, mlm_probability=0.3, seed=seed)
        sizes = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
        torch.manual_seed(0)
        config = transformers.BertConfig(vocab_size=len(vocabulary), hidden_dropout_prob=0.0, **sizes)
        model = HuggingFaceModel(transformers.BertForMaskedLM(config), tokenizer)
        texts = [{"input_ids": (torch.arange(8) + index) % 13 + 3} for index in range(12)]
        trainer = Trainer(
            model=model,
            train_dataloader=make_loader(texts, batch_size=4, collate_fn=collate, **{"shuffle": True} | workers),
            optimizers=torch.optim.SGD(model.parameters(), lr=0.1),
            max_duration="3ep",
            save_folder=str(folder),
            save_interval="1ba",
            save_num_checkpoints_to_keep=-1,
            seed=7,
            load_path=load_path,
            progress_bar=False,
            device="cpu",
        )
        with trainer:
            trainer.fit()
        return bits(trainer.state.get_model_state_dict())

    def test_the_generator_continues(self, tmp_path):
        """A run that resumes within an epoch masks the same tokens, without a warning."""
        expected = self.train(tmp_path / "full")

        assert self.train(tmp_path / "resumed", str(tmp_path / "full" / "ep1-ba5")) == expected

    @pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
    @pytest.mark.parametrize("persistent_workers", [False, True])
    def test_generators_of_workers_are_seeded_for_each_batch(self, tmp_path, persistent_workers):
        """The collator creates another generator in each worker, whose draws depend on its seed and the batch."""
        workers = {"num_workers": 2, "persistent_workers": persistent_workers}
        expected = self.train(tmp_path / "full", **workers)

        resumed = self.train(tmp_path / "resumed", str(tmp_path / "full" / "ep1-ba5"), **workers)

        assert resumed == expected == self.train(tmp_path / "one", num_workers=1)
        assert expected != self.train(tmp_path / "other", seed=6, **workers)

    @pytest.mark.filterwarnings("ignore:train_dataloader cannot begin in the middle:UserWarning")
    def test_persistent_workers_of_a_stream(self, tmp_path):
        """Those that have loaded an epoch mask the same tokens as new ones of a resumed run."""

        class Stream(IterableDataset):
            def __init__(self, texts):
                self.texts = texts

            def __iter__(self):
                worker = get_worker_info()
                return iter(self.texts[worker.id :: worker.num_workers])

        options = {"make_loader": lambda texts, **kwargs: DataLoader(Stream(texts), **kwargs), "shuffle": None}
        options |= {"num_workers": 2, "persistent_workers": True}
        expected = self.train(tmp_path / "full", **options)

        assert self.train(tmp_path / "resumed", str(tmp_path / "full" / "ep1-ba5"), **options) == expected
        assert expected != self.train(tmp_path / "other", seed=6, **options)
