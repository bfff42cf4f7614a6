"""Weights that the user loads after a training are evaluated and saved as they are, with a warning, in each host."""

import copy
import logging
import warnings

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from ignite.engine import create_supervised_evaluator, create_supervised_trainer
from safetensors.torch import load_file
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader
from transformers import TrainingArguments

from composer import Trainer
from composer.algorithms import EMA, SWA
from composer.integrations.accelerate import accelerate_algorithms
from composer.integrations.ignite import attach_algorithms
from composer.integrations.transformers import ComposerTrainer
from composer.models import ComposerClassifier

lightning = pytest.importorskip("lightning")

from composer.integrations.lightning import ComposerCallback, FabricAlgorithms  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore:::lightning", "ignore::DeprecationWarning", "ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*pin_memory.*:UserWarning"),
]
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
SEEN = []


@pytest.fixture(autouse=True)
def _new_state():
    """Accelerate keeps settings of the process."""
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


class Net(nn.Module):
    """A layer that notes the weights with which it is evaluated."""

    def __init__(self):
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.layer = nn.Linear(4, 3)

    def forward(self, pixel_values, labels=None):
        if not torch.is_grad_enabled():
            SEEN.append(self.layer.weight.detach().clone())
        logits = self.layer(pixel_values)
        return {"loss": cross_entropy(logits, labels), "logits": logits} if labels is not None else logits


class Module(lightning.LightningModule):
    def __init__(self, net):
        super().__init__()
        self.net = net

    def training_step(self, batch, batch_idx):
        return cross_entropy(self.net(batch[0]), batch[1])

    test_step = training_step

    def configure_optimizers(self):
        return sgd(self)


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.5)


def make_loader():
    generator = torch.Generator().manual_seed(0)
    return DataLoader([(torch.rand(4, generator=generator), place % 3) for place in range(16)], 4)


def loss_of(outputs, batch):
    return cross_entropy(outputs, batch[1])


@torch.no_grad()
def predict(net):
    net(torch.ones(1, 4))


def in_lightning(net, algorithm, folder):
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    trainer = lightning.Trainer(accelerator="cpu", max_epochs=2, callbacks=[ComposerCallback(algorithm)], **quiet)
    module = Module(net)
    trainer.fit(module, make_loader())

    def save():
        trainer.save_checkpoint(folder / "saved.ckpt")
        return torch.load(folder / "saved.ckpt", weights_only=True)["state_dict"]["net.layer.weight"]

    return lambda: trainer.test(module, make_loader(), verbose=False), save


def in_transformers(net, algorithm, folder):
    args = TrainingArguments(
        folder, num_train_epochs=2, report_to=[], use_cpu=True, save_strategy="no", disable_tqdm=True
    )
    data = [{"pixel_values": samples, "labels": label} for samples, label in make_loader().dataset]
    trainer = ComposerTrainer(
        net, args, train_dataset=data, eval_dataset=data, optimizers=(sgd(net), None), algorithms=algorithm
    )
    trainer.train()

    def save():
        trainer.save_model(folder / "saved")
        return load_file(folder / "saved" / "model.safetensors")["layer.weight"]

    return trainer.evaluate, save


def in_ignite(net, algorithm, _):
    optimizer = sgd(net)
    engine = create_supervised_trainer(net, optimizer, cross_entropy)
    algorithms = attach_algorithms(engine, net, optimizer, cross_entropy, algorithm)
    evaluator = create_supervised_evaluator(net)
    algorithms.attach_evaluator(evaluator)
    engine.run(make_loader(), max_epochs=2)
    return lambda: evaluator.run(make_loader()), None


def in_fabric(net, algorithm, _):
    run = FabricAlgorithms(lightning.Fabric(accelerator="cpu"), net, sgd(net), algorithm, loss_of)
    run.begin_fit(max_duration="2ep", train_dataloader=make_loader())
    for _epoch in range(2):
        run.begin_epoch()
        for batch in make_loader():
            run.step(batch)
        run.end_epoch()
    run.end_fit()
    return lambda: evaluate_in(run, net), None


def in_accelerate(net, algorithm, _, *, max_duration="2ep"):
    accelerator, optimizer, loader = Accelerator(cpu=True), sgd(net), make_loader()
    run = accelerate_algorithms(accelerator, net, optimizer, loader, algorithm, loss=loss_of, max_duration=max_duration)
    _, optimizer, loader = accelerator.prepare(net, optimizer, loader)
    for _epoch in range(2):
        for batch in loader:
            accelerator.backward(run.compute_loss(batch))
            optimizer.step()
            optimizer.zero_grad()
        evaluate_in(run, net)
    return lambda: evaluate_in(run, net), None


def stopped_in_accelerate(net, algorithm, folder):
    """A loop that is left after an evaluation, without ``end_fit``."""
    return in_accelerate(net, algorithm, folder, max_duration="9ep")


def evaluate_in(run, net):
    with run.evaluation():
        predict(net)


def in_our_trainer(net, algorithm, folder):
    model = ComposerClassifier(net, num_classes=3)
    trainer = Trainer(
        model=model, train_dataloader=make_loader(), eval_dataloader=make_loader(), optimizers=sgd(net),
        algorithms=algorithm, max_duration="2ep", eval_interval=0, device="cpu", progress_bar=False,
    )  # fmt: skip
    trainer.fit()

    def save():
        trainer.save_checkpoint(folder / "saved")
        loaded = ComposerClassifier(Net(), num_classes=3)
        Trainer(model=loaded, load_path=folder / "saved", load_weights_only=True, device="cpu", progress_bar=False)
        return loaded.module.layer.weight

    return trainer.eval, save


HOSTS = [in_lightning, in_transformers, in_ignite, in_fabric, in_accelerate, stopped_in_accelerate, in_our_trainer]
AVERAGES = [lambda: EMA("2ba"), lambda: SWA("1ep", "9ep", "1ba")]


@pytest.fixture(params=HOSTS, ids=lambda host: host.__name__)
def host(request):
    return request.param


@pytest.fixture(params=AVERAGES, ids=["EMA", "SWA"])
def trained(host, request, tmp_path):
    """A network after a training, what evaluates it, what saves it, and the average."""
    net, algorithm = Net(), request.param()
    evaluate, save = host(net, algorithm, tmp_path)
    averaged = getattr(algorithm, f"get_{type(algorithm).__name__.lower()}_model")(algorithm._averages._model)
    weight = next(weight for name, weight in averaged.named_parameters() if name.endswith("layer.weight"))
    return net, evaluate, save, weight.detach()


def test_loaded_weights(trained):
    """They are evaluated and saved, also again, and the only warning is the first."""
    net, evaluate, save, _ = trained
    best = {name: torch.full_like(one, 7) for name, one in net.state_dict().items()}
    net.load_state_dict(best)

    with pytest.warns(UserWarning, match="were changed after their training"):
        evaluate()
    assert torch.equal(SEEN[-1], best["layer.weight"])
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*were changed after their training")
        evaluate()
        assert torch.equal(SEEN[-1], best["layer.weight"])
        assert save is None or torch.equal(save(), best["layer.weight"])
    assert torch.equal(net.layer.weight, best["layer.weight"])


def test_weights_of_the_training(trained):
    """The averages are evaluated and saved, also after the model was on another device, or in another dtype."""
    net, evaluate, save, averages = trained
    before = copy.deepcopy(net.state_dict())
    for _ in range(2):
        evaluate()
        assert torch.equal(SEEN[-1], averages)
        net.double().float()
    assert save is None or torch.equal(save(), averages)
    assert torch.equal(net.layer.weight, before["layer.weight"])
    assert not torch.equal(averages, before["layer.weight"])
