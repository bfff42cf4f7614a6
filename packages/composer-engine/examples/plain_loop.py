"""Five algorithms in a plain PyTorch training loop.

It is the usual PyTorch loop with one added line for each event. ``engine.explain()`` prints what runs on each event.

    python plain_loop.py
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from composer.algorithms import EMA, BlurPool, GradientClipping, LabelSmoothing, MixUp
from composer.core import Engine, State

EPOCHS, BATCH_SIZE = 4, 32


class Shapes(nn.Module):
    """Classifies images by the quarter that is bright; ``forward`` takes a whole batch, ``loss`` its outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(16, 16, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(256, 4),
        )

    def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Return the logits."""
        images, _ = batch
        return self.layers(images)

    def loss(self, outputs: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Return the mean cross entropy; targets may be class ids or probabilities."""
        _, labels = batch
        return cross_entropy(outputs, labels)


def make_data(samples: int = 256) -> list[tuple[Tensor, Tensor]]:
    """Return batches of noisy images, one quarter of which is brighter, and which."""
    labels = torch.arange(samples) % 4
    images = torch.randn(samples, 1, 8, 8)
    for image, label in zip(images, labels.tolist(), strict=True):
        rows, columns = divmod(label, 2)
        image[0, 4 * rows : 4 * rows + 4, 4 * columns : 4 * columns + 4] += 1
    return list(zip(images.split(BATCH_SIZE), labels.split(BATCH_SIZE), strict=True))


def train(epochs: int = EPOCHS, alpha: float = 0.2) -> tuple[nn.Module, list[float]]:
    """Train and return the model with its averaged weights, and the losses; ``alpha`` is that of MixUp."""
    torch.manual_seed(0)
    dataloader, model = make_data(), Shapes()
    sgd = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    ema = EMA(half_life="10ba")
    algorithms = [BlurPool(), MixUp(alpha), LabelSmoothing(0.1), GradientClipping("norm", 1.0), ema]
    state = State(model=model, optimizers=sgd, train_dataloader=dataloader, max_duration=epochs)
    state.set_dataloader(dataloader, "train")
    engine = Engine(state, algorithms=algorithms)
    losses = []

    engine.run_event("init")
    engine.run_event("before_load")
    engine.run_event("after_load")
    engine.run_event("fit_start")
    (optimizer,) = state.optimizers  # algorithms may have replaced it
    for _ in range(epochs):
        engine.run_event("epoch_start")
        for batch in dataloader:
            state.batch = batch
            engine.run_event("after_dataloader")
            engine.run_event("batch_start")
            engine.run_event("before_train_batch")
            optimizer.zero_grad()

            engine.run_event("before_forward")
            state.outputs = model(state.batch)
            engine.run_event("after_forward")

            engine.run_event("before_loss")
            state.loss = model.loss(state.outputs, state.batch)
            engine.run_event("after_loss")

            engine.run_event("before_backward")
            state.loss.backward()
            engine.run_event("after_backward")

            engine.run_event("after_train_batch")
            optimizer.step()
            losses.append(state.loss.item())
            state.timestamp = state.timestamp.to_next_batch(samples=len(batch[0]))
            engine.run_event("batch_end")
        state.timestamp = state.timestamp.to_next_epoch()
        engine.run_event("epoch_end")
    engine.run_event("fit_end")
    engine.close()
    return ema.get_ema_model(model), losses


if __name__ == "__main__":
    trained, losses = train()
    correct = sum(
        int((trained((images, labels)).argmax(1) == labels).sum())
        for images, labels in make_data()  # newly drawn
    )
    print(f"loss {losses[0]:.2f} -> {losses[-1]:.2f}, {correct} of 256 right")
