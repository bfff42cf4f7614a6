"""The loop of ``plain_loop.py`` with gradient accumulation and mixed precision, and the same five algorithms.

Beyond ``plain_loop.py``, the loop sets ``state.microbatch`` to the number of the microbatch and ``state.precision`` to
the precision, and puts the whole batch back into ``state.batch`` before ``after_train_batch``.

    python accumulation_and_amp.py
"""

from __future__ import annotations

import torch
from plain_loop import EPOCHS, Shapes, make_data
from torch import nn

from composer.algorithms import EMA, BlurPool, GradientClipping, LabelSmoothing, MixUp
from composer.core import Engine, State, get_precision_context


def train(
    epochs: int = EPOCHS, alpha: float = 0.2, microbatch_size: int | None = 8, precision: str = "amp_bf16"
) -> tuple[nn.Module, list[float]]:
    """Train and return the model with its averaged weights, and the losses; None trains on whole batches."""
    torch.manual_seed(0)
    dataloader, model = make_data(), Shapes()
    sgd = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    ema = EMA(half_life="10ba")
    algorithms = [BlurPool(), MixUp(alpha), LabelSmoothing(0.1), GradientClipping("norm", 1.0), ema]
    state = State(model=model, optimizers=sgd, train_dataloader=dataloader, max_duration=epochs, precision=precision)
    state.set_dataloader(dataloader, "train")
    engine = Engine(state, algorithms=algorithms)
    autocast = get_precision_context(state.precision, state.device.type)
    losses = []

    for event in ("init", "before_load", "after_load", "fit_start"):
        engine.run_event(event)
    (optimizer,) = state.optimizers  # algorithms may have replaced it
    for _ in range(epochs):
        engine.run_event("epoch_start")
        for batch in dataloader:
            state.batch = batch
            engine.run_event("after_dataloader")
            engine.run_event("batch_start")
            engine.run_event("before_train_batch")
            optimizer.zero_grad()
            whole, total = state.batch, 0.0
            samples = len(whole[0])
            size = microbatch_size or samples
            parts = zip(whole[0].split(size), whole[1].split(size), strict=True)

            for state.microbatch, part in enumerate(parts):
                state.batch = part
                share = len(part[0]) / samples  # parts may be of unequal size

                engine.run_event("before_forward")
                with autocast:
                    state.outputs = model(state.batch)
                engine.run_event("after_forward")

                engine.run_event("before_loss")
                with autocast:
                    state.loss = model.loss(state.outputs, state.batch)
                engine.run_event("after_loss")

                engine.run_event("before_backward")
                (state.loss * share).backward()
                engine.run_event("after_backward")
                total += state.loss.item() * share

            state.batch, state.microbatch = whole, -1
            engine.run_event("after_train_batch")
            optimizer.step()
            losses.append(total)
            state.timestamp = state.timestamp.to_next_batch(samples=samples)
            engine.run_event("batch_end")
        state.timestamp = state.timestamp.to_next_epoch()
        engine.run_event("epoch_end")
    engine.run_event("fit_end")
    engine.close()
    return ema.get_ema_model(model), losses


if __name__ == "__main__":
    trained, losses = train()
    print(f"loss {losses[0]:.2f} -> {losses[-1]:.2f}")
