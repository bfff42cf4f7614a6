"""The code blocks of the specification run with the names and imports shown there.

Each class is a page, each test is a block (or two blocks of one program). The models are those of the pages, the data
are small and random, and mistakes of the pages are corrected. The blocks on events, algorithms and passes without a
trainer are in the tests of composer-engine, that of ALiBi in composer-functional, and those on models of timm, Hugging
Face and MMDetection in composer-models. Loops that use no name of this library are left out.
"""

import math

import pytest
import torch
import torch.nn.functional as F
import torch.optim as optim
import torchmetrics
import torchvision
import torchvision.models as models
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.collections import MetricCollection
from torchvision import datasets, transforms

import composer.core
from composer import Algorithm, Callback, Engine, Event, Logger, State, Time, Trainer
from composer import functional as cf
from composer.algorithms import BlurPool, ChannelsLast
from composer.functional import mixup_batch
from composer.loggers import InMemoryLogger
from composer.models import ComposerClassifier, ComposerModel

NUM_EPOCHS = 2


@pytest.fixture(autouse=True)
def same_draws():
    """Start every test with the same random numbers."""
    torch.manual_seed(0)


@pytest.fixture
def train_dataloader():
    """Two batches of four small images with labels."""
    return make_loader()


@pytest.fixture
def eval_dataloader():
    """Two batches of 16 other images."""
    return make_loader(size=16)


def make_loader(size=4, shape=(3, 32, 32)):
    """Return two batches of random samples with labels from 0 to 9."""
    samples = TensorDataset(torch.randn(2 * size, *shape), torch.randint(10, (2 * size,)))
    return DataLoader(samples, batch_size=size)


def copy_of(model):
    """Return a copy of a model's parameters."""
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def unmoved(model, before):
    """Return the names of the parameters that have not changed."""
    return [name for name, parameter in model.named_parameters() if torch.equal(parameter, before[name])]


class Perceptron(torch.nn.Module):
    """The model of the tour: ``forward`` takes the inputs, ``loss`` the targets."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(12, 16), torch.nn.ReLU(), torch.nn.Linear(16, 10))

    def forward(self, inputs):
        return self.layers(inputs)

    def loss(self, outputs, targets):
        return F.cross_entropy(outputs, targets)


class OnPairs(Perceptron):
    """The same with a batch of both as the argument."""

    def forward(self, batch):
        inputs, _ = batch
        return super().forward(inputs)

    def loss(self, outputs, batch):
        _, targets = batch
        return super().loss(outputs, targets)


class MixUp(Algorithm):
    """The MixUp of the tour, which only overrides ``match`` to define its events."""

    def match(self, event: Event, state: State) -> bool:
        return event in [Event.AFTER_DATALOADER, Event.AFTER_LOSS]

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        input, target = state.batch

        if event == Event.AFTER_DATALOADER:
            new_input, self.permuted_target, self.mixing = mixup_batch(input, target, alpha=0.2)
            state.batch = (new_input, target)

        if event == Event.AFTER_LOSS:
            modified_batch = (input, self.permuted_target)
            new_loss = state.model.loss(state.outputs, modified_batch)
            state.loss *= 1 - self.mixing
            state.loss += self.mixing * new_loss


IMPORTS = """
from composer import functional as cf
from composer import Time
from composer import Trainer
from composer.algorithms import BlurPool, ChannelsLast
from composer.algorithms.blurpool import BlurPool
from composer.algorithms.channels_last import ChannelsLast
from composer.core import Algorithm, Event
from composer.core import Event, State
from composer.core.passes import AlgorithmPass, T
from composer.core.passes import set_filo_order, sort_fused_layernorm_last, sort_selective_backprop_first
from composer.core.passes import sort_to_back, sort_to_front, warn_if_multiple_loss_interpolation
from composer.loggers import Logger
from composer.metrics import LanguageCrossEntropy
from composer.models import ComposerModel
from composer.models import ComposerClassifier, HuggingFaceModel, MMDetModel, composer_timm
"""


class TestImports:
    @pytest.mark.parametrize("line", IMPORTS.strip().splitlines())
    def test_names_of_the_pages(self, line):
        """Each name is imported from where the pages import it, without a warning."""
        names = {}

        exec(line, names)

        assert names.keys() >= {name.split()[-1] for name in line.partition(" import ")[2].split(",")}

    @pytest.mark.parametrize(
        ("module", "name"), [("composer.core.serializable", "Serializable"), ("composer.core.algorithm", "Algorithm")]
    )
    def test_former_modules(self, module, name):
        """The module of a page is a former one: the import works, with a warning that names the present place."""
        names = {}

        with pytest.warns(DeprecationWarning, match=r"is a former name of composer\.core"):
            exec(f"from {module} import {name}", names)

        assert names[name] is getattr(composer.core, name)


class TestAlgorithmsOverview:
    def test_randaugment_among_transforms(self):
        """Called without an image it is a transform, which a data set applies before its images become tensors."""
        mean, std = (0.5, 0.5, 0.5), (0.25, 0.25, 0.25)
        c10_transforms = transforms.Compose(
            [cf.randaugment(), transforms.ToTensor(), transforms.Normalize(mean, std)],
        )
        plain = transforms.Compose([transforms.ToTensor(), transforms.Normalize(mean, std)])

        batches = []
        for transform in (c10_transforms, plain):
            dataset = datasets.FakeData(16, (3, 32, 32), num_classes=10, transform=transform)
            images, _ = next(iter(torch.utils.data.DataLoader(dataset, batch_size=1024)))
            batches.append(images)

        assert batches[0].shape == batches[1].shape == (16, 3, 32, 32)
        assert sum(not torch.equal(one, other) for one, other in zip(*batches, strict=True)) > 8

    def test_cutmix_in_a_loop(self, train_dataloader):
        """The loop trains on images with a rectangle of another one, and on the probabilities of both classes."""
        model, loss_fn, num_classes = models.resnet18(num_classes=10), torch.nn.CrossEntropyLoss(), 10
        optimizer = optim.SGD(model.parameters(), lr=0.1)
        before, changed = copy_of(model), 0

        for data, target in train_dataloader:
            mixed, probabilities = cf.cutmix(data, target, alpha=1, num_classes=num_classes)
            is_new = (mixed != data).any(1).flatten(1).float().mean(1)  # the share of the pixels
            kept = probabilities.gather(1, target[:, None])[:, 0]
            torch.testing.assert_close(probabilities.sum(1), torch.ones(len(target)))
            assert (kept >= 1 - is_new - 1e-6).all()
            changed += int((is_new > 0).sum())
            optimizer.zero_grad()
            output = model(mixed)
            loss = loss_fn(output, probabilities)
            loss.backward()
            optimizer.step()

        assert changed > 0
        assert unmoved(model, before) == []

    def test_blurpool_by_function(self):
        """One call blurs a ResNet's strided convolutions and its pool; outputs keep their shape and change."""
        model = models.resnet18().eval()
        images = torch.randn(2, 3, 64, 64)
        plain = model(images)

        report = cf.apply_blurpool(model)

        # The stem's convolution has 3 input channels, fewer than min_channels; three stages begin with two strides.
        kinds = [type(module).__name__ for module in model.modules()]
        assert (kinds.count("BlurConv2d"), kinds.count("BlurMaxPool2d")) == (6, 1)
        assert len(report.replacements) == 7
        assert model(images).shape == plain.shape
        assert not torch.allclose(model(images), plain)

    def test_recipe_by_trainer(self, train_dataloader, eval_dataloader):
        """A trainer with two algorithms and the default optimizer trains the changed model and evaluates."""
        model = ComposerClassifier(models.resnet18(), num_classes=1000)

        trainer = Trainer(
            model=model,
            algorithms=[ChannelsLast(), BlurPool()],
            train_dataloader=train_dataloader,
            eval_dataloader=eval_dataloader,
            max_duration="10ep",
            train_subset_num_batches=1,
            eval_interval="5ep",
            progress_bar=False,
            device="cpu",
        )
        before = copy_of(model)
        with pytest.warns(UserWarning, match="No optimizer was specified"):
            trainer.fit()

        assert [entry.key for entry in trainer.engine.explain().entries[Event.INIT]] == ["BlurPool", "ChannelsLast"]
        assert model.module.layer2[0].conv1.conv.weight.is_contiguous(memory_format=torch.channels_last)
        assert trainer.state.timestamp.epoch == 10
        assert unmoved(model, before) == []
        assert 0 <= trainer.state.eval_metric_values["MulticlassAccuracy"] <= 1

    def test_own_algorithm(self, train_dataloader, eval_dataloader):
        """A class with a setting, ``match`` and ``apply`` works with built-in ones imported from their modules."""
        from composer.algorithms.blurpool import BlurPool
        from composer.algorithms.channels_last import ChannelsLast

        class MyAlgorithm(Algorithm):
            def __init__(self, hparam1=1):
                self.hparam1 = hparam1
                self.ran_at = []

            def match(self, event, state):
                return event in [Event.AFTER_DATALOADER, Event.AFTER_FORWARD]

            def apply(self, event, state, logger):
                self.ran_at.append(event)
                if event == Event.AFTER_DATALOADER:
                    inputs, targets = state.batch
                    state.batch = inputs * self.hparam1, targets
                if event == Event.AFTER_FORWARD:
                    self.outputs = state.outputs = state.outputs * self.hparam1

        model = ComposerClassifier(models.resnet18(), num_classes=1000)
        custom_algorithm = MyAlgorithm(hparam1=0)
        trainer = Trainer(
            model=model,
            optimizers=optim.SGD(model.parameters(), lr=0.1),
            train_dataloader=train_dataloader,
            eval_dataloader=eval_dataloader,
            max_duration="1ep",
            device="cpu",
            algorithms=[
                ChannelsLast(),
                BlurPool(replace_convs=True, replace_maxpools=True, blur_first=True),
                custom_algorithm,
            ],
            eval_interval="0ep",
            seed=42,
            progress_bar=False,
        )
        trainer.fit()

        assert custom_algorithm.ran_at == [Event.AFTER_DATALOADER, Event.AFTER_FORWARD] * 2
        # All scores are 0, so the loss is that of a uniform distribution over 1000 classes.
        assert trainer.state.total_loss.item() == pytest.approx(math.log(1000))
        assert trainer.state.eval_metric_values == {}


class TestWelcomeTour:
    def test_plain_loop_with_mixup(self):
        """MixUp as a function in a plain loop: the loss is blended like the inputs, and the weights change."""
        model, dataloader = Perceptron(), make_loader(shape=(12,))
        optimizer = optim.SGD(model.parameters(), lr=0.1)
        before = copy_of(model)

        for _epoch in range(NUM_EPOCHS):
            for inputs, targets in dataloader:
                mixed, targets_perm, mixing = cf.mixup_batch(inputs, targets, alpha=0.2)
                assert 0 <= mixing <= 1
                assert sorted(targets_perm.tolist()) == sorted(targets.tolist())
                outputs = model.forward(mixed)
                loss = (1 - mixing) * model.loss(outputs, targets) + mixing * model.loss(outputs, targets_perm)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                assert loss.isfinite()

        assert unmoved(model, before) == []

    def test_own_mixup_in_a_loop_around_the_engine(self):
        """The loop of the tour, with events as strings, runs MixUp twice per batch and trains on the blended loss."""
        model, dataloader = OnPairs(), make_loader(shape=(12,))
        optimizer = optim.SGD(model.parameters(), lr=0.1)
        mixup, before, blended = MixUp(), copy_of(model), []
        state = State(
            model=model,
            max_duration=Time(10, "epoch"),
            rank_zero_seed=0,
            dataloader=dataloader,
            optimizers=optimizer,
            schedulers=optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5),
        )
        engine = Engine(state=state, algorithms=[mixup])

        engine.run_event("init")
        engine.run_event("fit_start")
        for _epoch in range(NUM_EPOCHS):
            engine.run_event("epoch_start")
            for state.batch in dataloader:
                loaded, targets = state.batch
                engine.run_event("after_dataloader")
                blended.append(not torch.equal(state.batch[0], loaded))

                engine.run_event("batch_start")

                engine.run_event("before_forward")
                state.outputs = state.model.forward(state.batch)
                engine.run_event("after_forward")

                engine.run_event("before_loss")
                state.loss = state.model.loss(state.outputs, state.batch)
                engine.run_event("after_loss")
                own, partners = (F.cross_entropy(state.outputs, ids) for ids in (targets, mixup.permuted_target))
                torch.testing.assert_close(state.loss, torch.lerp(own, partners, mixup.mixing))

                engine.run_event("before_backward")
                state.loss.backward()
                engine.run_event("after_backward")

                for each in state.optimizers:
                    each.step()
                    each.zero_grad()
                for scheduler in state.schedulers:
                    scheduler.step()

                engine.run_event("batch_end")
            engine.run_event("epoch_end")

        assert any(blended)
        assert state.max_duration == Time(10, "ep") == Time.from_timestring("10ep")
        assert optimizer.param_groups[0]["lr"] == 0.1 * 0.5**4
        assert unmoved(model, before) == []

    def test_own_mixup_in_the_trainer(self):
        """The same algorithm works in the trainer, which trains on the blended loss."""

        class Expect(Callback):
            def after_loss(self, state, logger):
                _, targets = state.batch
                own, partners = (F.cross_entropy(state.outputs, ids) for ids in (targets, mixup.permuted_target))
                expected.append(torch.lerp(own, partners, mixup.mixing).item())

        model, mixup, expected = OnPairs(), MixUp(), []
        before, logger = copy_of(model), InMemoryLogger()
        trainer = Trainer(
            model=model,
            algorithms=[mixup],
            callbacks=Expect(),
            optimizers=optim.SGD(model.parameters(), lr=0.1),
            train_dataloader=make_loader(shape=(12,)),
            max_duration=Time(NUM_EPOCHS, "epoch"),
            loggers=logger,
            progress_bar=False,
            device="cpu",
        )
        trainer.fit()

        losses = [value for _, value in logger.data["loss/train/total"]]
        assert losses == pytest.approx(expected)
        assert len(losses) == 4
        assert unmoved(model, before) == []


class TestAlgorithmPage:
    def test_match_decides_by_event_or_by_clock(self):
        """An algorithm can decide by the event or by the clock."""

        class OnEvent(Algorithm):
            def match(self, event, state):
                return event == Event.BEFORE_LOSS

            def apply(self, event, state, logger):
                ran.append((type(self).__name__, int(state.timestamp.epoch)))

        class Late(OnEvent):
            def match(self, event, state):
                return state.timestamp.epoch > 30

        ran = []
        state = State(model=None)
        engine = Engine(state, algorithms=[OnEvent(), Late()])
        for epoch in (30, 31):
            state.timestamp = state.timestamp.copy(epoch=epoch)
            engine.run_event(Event.BEFORE_LOSS)

        assert ran == [("OnEvent", 30), ("OnEvent", 31), ("Late", 31)]
        assert (OnEvent().find_unused_parameters, OnEvent().backwards_create_graph) == (False, False)
        assert OnEvent.required_on_load() is False


class ResNet18(ComposerModel):
    """The model of the page, with forward pass and loss."""

    def __init__(self):
        super().__init__()
        self.model = torchvision.models.resnet18()

    def forward(self, batch):
        inputs, _ = batch
        return self.model(inputs)

    def loss(self, outputs, batch):
        _, targets = batch
        return F.cross_entropy(outputs, targets)


class WithMetrics(ResNet18):
    """The same model with metrics for training and evaluation, and few classes so that some predictions are correct."""

    def __init__(self):
        super().__init__()
        self.model = torchvision.models.resnet18(num_classes=10)
        self.train_accuracy = torchmetrics.Accuracy(task="multiclass", num_classes=10)
        self.val_accuracy = torchmetrics.Accuracy(task="multiclass", num_classes=10)

    def eval_forward(self, batch, outputs=None):
        if outputs is not None:
            return outputs
        inputs, _ = batch
        return self.model(inputs)

    def update_metric(self, batch, outputs, metric):
        _, targets = batch
        metric.update(outputs, targets)

    def get_metrics(self, is_train=False):
        return {"Accuracy": self.train_accuracy} if is_train else {"Accuracy": self.val_accuracy}


class WithCollections(WithMetrics):
    """The same with a collection of two metrics for each phase, which ``get_metrics`` returns."""

    def __init__(self):
        super().__init__()
        top5 = {"task": "multiclass", "num_classes": 10, "top_k": 5}
        self.train_metrics = MetricCollection({"top1": self.train_accuracy, "top5": torchmetrics.Accuracy(**top5)})
        self.eval_metrics = MetricCollection({"top1": self.val_accuracy, "top5": torchmetrics.Accuracy(**top5)})

    def get_metrics(self, is_train=False):
        return self.train_metrics if is_train else self.eval_metrics


class TestModels:
    def test_own_model_in_the_trainer(self, train_dataloader):
        """A model with only forward and loss trains with Adam for the given duration."""
        model = ResNet18()
        optimizer = optim.Adam(model.parameters(), lr=0.0001)
        before = copy_of(model)

        trainer = Trainer(
            model=model,
            optimizers=optimizer,
            train_dataloader=train_dataloader,
            max_duration="10ep",
            train_subset_num_batches=1,
            progress_bar=False,
            device="cpu",
        )
        trainer.fit()

        assert trainer.state.timestamp.epoch == trainer.state.timestamp.batch.value == 10
        assert trainer.state.total_loss.isfinite()
        assert unmoved(model, before) == []

    @torch.no_grad()
    def test_plain_validation_loop(self, eval_dataloader):
        """Metrics updated through the model equal the fraction of correct predictions."""
        model = WithMetrics().eval()
        metrics = model.get_metrics(is_train=False)

        hits = []
        for batch in eval_dataloader:
            outputs = model.eval_forward(batch)
            hits += (outputs.argmax(1) == batch[1]).tolist()
            for m in metrics.values():
                model.update_metric(batch, outputs, m)

        assert metrics["Accuracy"].compute() == sum(hits) / 32 > 0

    def test_metrics_in_the_trainer(self, train_dataloader, eval_dataloader):
        """Training and evaluation log their metrics and the loss to a logger that stores them in a dict."""
        model, logger = WithMetrics(), InMemoryLogger()
        Trainer(
            model=model,
            optimizers=optim.Adam(model.parameters(), lr=0.0001),
            train_dataloader=train_dataloader,
            eval_dataloader=eval_dataloader,
            max_duration="1ep",
            loggers=logger,
            progress_bar=False,
            device="cpu",
        ).fit()

        model.eval()
        with torch.no_grad():
            hits = [(model.model(inputs).argmax(1) == targets).float().mean() for inputs, targets in eval_dataloader]
        assert logger.data["metrics/eval/Accuracy"][-1][1] == sum(hits) / 2 > 0
        assert 0 <= logger.data["metrics/train/Accuracy"][-1][1] <= 1
        assert len(logger.data["loss/train/total"]) == 2

    def test_collections_in_the_trainer(self, train_dataloader, eval_dataloader):
        """Each metric of a collection is logged under its name in the collection."""
        model, logger = WithCollections(), InMemoryLogger()
        trainer = Trainer(
            model=model,
            optimizers=optim.SGD(model.parameters(), lr=0.01),
            train_dataloader=train_dataloader,
            eval_dataloader=eval_dataloader,
            max_duration="2ep",
            loggers=logger,
            progress_bar=False,
            device="cpu",
        )
        trainer.fit()

        model.eval()
        with torch.no_grad():
            images, targets = eval_dataloader.dataset.tensors
            best = model.model(images).topk(5).indices == targets[:, None]
        for phase in ("train", "eval"):
            assert len(logger.data[f"metrics/{phase}/top1"]) == len(logger.data[f"metrics/{phase}/top5"]) == 2
        assert logger.data["metrics/eval/top1"][-1][1] == best[:, 0].float().mean() > 0
        assert logger.data["metrics/eval/top5"][-1][1] == best.any(1).float().mean() < 1

    def test_collections_set_on_a_finished_model(self, train_dataloader):
        """Collections may also be set as attributes of an existing classifier."""
        model = ComposerClassifier(models.resnet18(), num_classes=1000)
        accuracy = {"task": "multiclass", "num_classes": 1000}
        model.train_metrics = MetricCollection(
            [torchmetrics.Accuracy(**accuracy), torchmetrics.CalibrationError(**accuracy)]
        )
        trainer = Trainer(
            model=model,
            optimizers=optim.SGD(model.parameters(), lr=0.01),
            train_dataloader=train_dataloader,
            max_duration="1ep",
            progress_bar=False,
            device="cpu",
        )
        trainer.fit()

        values = trainer.state.train_metric_values
        assert set(values) == {"MulticlassAccuracy", "MulticlassCalibrationError"}
        assert all(0 <= value <= 1 for value in values.values())


class TestPasses:
    def test_run_last_in_the_trainer(self):
        """The page's pass, passed to the trainer, moves an algorithm behind those listed after it."""
        ran = []

        class Other(Algorithm):
            def match(self, event, state):
                return event == Event.BEFORE_FORWARD

            def apply(self, event, state, logger):
                ran.append(type(self).__name__)

        class MyAlgorithm(Other):
            pass

        model = OnPairs()

        Trainer(
            model=model,
            algorithms=[MyAlgorithm(), Other()],
            algorithm_passes=lambda algorithms, _: sorted(algorithms, key=lambda x: isinstance(x, MyAlgorithm)),
            optimizers=optim.SGD(model.parameters(), lr=0.1),
            train_dataloader=make_loader(shape=(12,)),
            max_duration="1ba",
            progress_bar=False,
            device="cpu",
        ).fit()

        assert ran == ["Other", "MyAlgorithm"]
