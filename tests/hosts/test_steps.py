"""In each host a step costs one forward pass, and the loss of an algorithm that changes targets follows them."""

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from comparison import Case
from ignite.engine import create_supervised_trainer
from torch.nn.functional import cross_entropy
from transformers import TrainingArguments

from composer.algorithms import EMA, LabelSmoothing, MixUp
from composer.integrations.accelerate import accelerate_algorithms
from composer.integrations.ignite import attach_algorithms
from composer.integrations.transformers import ComposerTrainer

lightning = pytest.importorskip("lightning")

from composer.integrations.lightning import ComposerCallback, FabricAlgorithms  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore:::lightning", "ignore::DeprecationWarning", "ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*pin_memory.*:UserWarning"),
]
CASE = Case(EMA, "vit")
STEPS = 4


@pytest.fixture(autouse=True)
def _new_state():
    """Accelerate keeps settings of the process."""
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def loss_of_labels(outputs, labels):
    """The loss of the outputs for labels, or those in a batch."""
    return cross_entropy(outputs["logits"], labels["labels"] if isinstance(labels, dict) else labels)


class Module(lightning.LightningModule):
    """A step that calls the model with its labels."""

    def __init__(self, model, loss):
        super().__init__()
        self.model, self.loss = model, loss

    def training_step(self, batch, batch_idx):
        return self.loss(self.model(**batch), batch)

    def configure_optimizers(self):
        return CASE.make_optimizer(self)


def in_lightning(model, algorithms, loss, folder):
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    trainer = lightning.Trainer(accelerator="cpu", max_epochs=1, callbacks=[ComposerCallback(algorithms)], **quiet)
    trainer.fit(Module(model, loss), CASE.make_data())


def in_fabric(model, algorithms, loss, folder):
    fabric = lightning.Fabric(accelerator="cpu")
    optimizer = CASE.make_optimizer(model)
    run = FabricAlgorithms(fabric, model, optimizer, algorithms, loss, forward=lambda network, batch: network(**batch))
    run.begin_fit(max_duration="1ep")
    run.begin_epoch()
    for batch in CASE.make_data():
        run.step(batch)


def in_accelerate(model, algorithms, loss, folder):
    accelerator, optimizer, loader = Accelerator(cpu=True), CASE.make_optimizer(model), CASE.make_data()
    run = accelerate_algorithms(accelerator, model, optimizer, loader, algorithms, loss=loss, max_duration="1ep")
    _, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for batch in loader:
        accelerator.backward(run.compute_loss(batch))
        optimizer.step()
        optimizer.zero_grad()


def in_ignite(model, algorithms, loss, folder):
    optimizer = CASE.make_optimizer(model)
    engine = create_supervised_trainer(
        model,
        optimizer,
        loss,
        # Images and labels, and the labels of the images for the model itself.
        prepare_batch=lambda batch, device, non_blocking: (batch["pixel_values"], batch["labels"]),
        model_fn=lambda network, images: network(images, labels=torch.zeros(len(images), dtype=torch.int64)),
    )
    attach_algorithms(engine, model, optimizer, loss, algorithms)
    engine.run(CASE.make_data(), max_epochs=1)


def in_transformers(model, algorithms, loss, folder):
    arguments = TrainingArguments(
        str(folder), use_cpu=True, report_to=[], disable_tqdm=True, num_train_epochs=1, per_device_train_batch_size=4,
        save_strategy="no", logging_strategy="no",
    )  # fmt: skip
    trainer = ComposerTrainer(model=model, args=arguments, train_dataset=CASE.samples(), algorithms=algorithms)
    trainer.train()


OF_USERS = {"lightning": in_lightning, "fabric": in_fabric, "accelerate": in_accelerate, "ignite": in_ignite}
HOSTS = {**OF_USERS, "transformers": in_transformers}


@pytest.mark.parametrize("host", HOSTS.values(), ids=HOSTS)
@pytest.mark.parametrize(
    "make",
    [list, lambda: EMA("2ba"), lambda: LabelSmoothing(0.1), MixUp, lambda: MixUp(interpolate_loss=True)],
    ids=["none", "EMA", "LabelSmoothing", "MixUp", "MixUp of losses"],
)
def test_forward_passes(host, make, tmp_path):
    """The model computes each batch once, with algorithms of any kind and without."""
    model, calls = CASE.make_model(), []
    model.vit.register_forward_hook(lambda *_: calls.append(1))
    host(model, make(), loss_of_labels, tmp_path)
    assert len(calls) == STEPS
