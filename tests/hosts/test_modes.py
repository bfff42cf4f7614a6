"""In each host the model trains in training mode, except for frozen norms that were in evaluation mode."""

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from ignite.engine import create_supervised_trainer
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader
from transformers import TrainingArguments

from composer.algorithms import LabelSmoothing
from composer.integrations.accelerate import accelerate_algorithms
from composer.integrations.ignite import attach_algorithms
from composer.integrations.transformers import ComposerTrainer

lightning = pytest.importorskip("lightning")

from composer.integrations.lightning import ComposerCallback, FabricAlgorithms  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore:::lightning", "ignore::DeprecationWarning", "ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*pin_memory.*:UserWarning"),
]


@pytest.fixture(autouse=True)
def _new_state():
    """Accelerate keeps settings of the process."""
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


class Net(nn.Module):
    """A head on a base model as ``from_pretrained`` returns it, with a norm that is frozen; it records the modes."""

    def __init__(self):
        super().__init__()
        norm = nn.BatchNorm1d(4).requires_grad_(False)
        self.base = nn.Sequential(nn.Linear(4, 4), norm, nn.Dropout(), nn.BatchNorm1d(4)).eval()
        self.head = nn.Linear(4, 3)
        self.modes = []

    def forward(self, pixel_values, labels=None):
        self.modes.append([module.training for module in self.base])
        logits = self.head(self.base(pixel_values))
        return {"loss": cross_entropy(logits, labels), "logits": logits} if labels is not None else logits


def make_loader():
    generator = torch.Generator().manual_seed(0)
    return DataLoader([(torch.rand(4, generator=generator) + 5, place % 3) for place in range(16)], 4)


def loss_of(outputs, batch):
    return cross_entropy(outputs, batch[1])


def sgd(model):
    return torch.optim.SGD((weight for weight in model.parameters() if weight.requires_grad), lr=0.1)


class Module(lightning.LightningModule):
    def __init__(self, net):
        super().__init__()
        self.net = net

    def training_step(self, batch, batch_idx):
        return loss_of(self.net(batch[0]), batch)

    def configure_optimizers(self):
        return sgd(self)


def in_lightning(net, _):
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    callback = ComposerCallback(LabelSmoothing(0.1), module=net)
    lightning.Trainer(accelerator="cpu", max_epochs=2, callbacks=[callback], **quiet).fit(Module(net), make_loader())


def in_fabric(net, _):
    fabric, optimizer = lightning.Fabric(accelerator="cpu"), sgd(net)
    run = FabricAlgorithms(fabric, net, optimizer, LabelSmoothing(0.1), loss_of)
    run.begin_fit(max_duration="2ep")
    for _epoch in range(2):
        run.begin_epoch()
        for batch in make_loader():
            run.step(batch)
        run.end_epoch()


def in_accelerate(net, _):
    accelerator, optimizer, loader = Accelerator(cpu=True), sgd(net), make_loader()
    run = accelerate_algorithms(
        accelerator, net, optimizer, loader, LabelSmoothing(0.1), loss=loss_of, max_duration="2ep"
    )
    model, optimizer, loader = accelerator.prepare(net, optimizer, loader)
    for epoch in range(2):
        if epoch:
            model.train()
        for batch in loader:
            accelerator.backward(run.compute_loss(batch))
            optimizer.step()
            optimizer.zero_grad()


def in_ignite(net, _):
    optimizer = sgd(net)
    engine = create_supervised_trainer(net, optimizer, cross_entropy)
    attach_algorithms(engine, net, optimizer, cross_entropy, LabelSmoothing(0.1))
    engine.run(make_loader(), max_epochs=2)


def in_transformers(net, folder):
    args = TrainingArguments(
        folder, num_train_epochs=2, report_to=[], use_cpu=True, save_strategy="no", disable_tqdm=True
    )
    data = [{"pixel_values": samples, "labels": label} for samples, label in make_loader().dataset]
    optimizers = (sgd(net), None)
    ComposerTrainer(net, args, train_dataset=data, optimizers=optimizers, algorithms=LabelSmoothing(0.1)).train()


HOSTS = [in_lightning, in_fabric, in_accelerate, in_ignite, in_transformers]


@pytest.mark.parametrize("train", HOSTS, ids=[train.__name__ for train in HOSTS])
def test_modes(train, tmp_path):
    """The base model trains in each step, and the statistics of its frozen norm do not change."""
    net = Net()
    train(net, tmp_path)

    assert len(net.modes) >= 4
    assert net.modes == [[True, False, True, True]] * len(net.modes)
    assert not net.base[1].running_mean.any()
    assert net.base[3].running_mean.any()


@pytest.mark.parametrize("train", HOSTS, ids=[train.__name__ for train in HOSTS])
def test_own_train(train, tmp_path):
    """A model whose ``train()`` keeps its norms in evaluation mode trains with these."""

    class Fixed(Net):
        def train(self, mode=True):
            super().train(mode)
            self.base[3].eval()
            return self

    net = Fixed()
    net.base[3].train()
    train(net, tmp_path)

    assert net.modes == [[True, False, True, False]] * len(net.modes)
