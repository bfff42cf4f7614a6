"""Draw the diagrams and curves of the method cards; ``pictures.py`` writes them.

A chart is a function that returns a figure; the function and the picture have the same name. What it shows is computed
by :mod:`composer.functional` wherever possible.
"""

from __future__ import annotations

import copy
import itertools
from typing import TYPE_CHECKING

import matplotlib.pyplot as plt
import torch
from matplotlib.patches import Circle, FancyBboxPatch, Rectangle
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from composer import functional as cf
from composer.algorithms import SeqLengthWarmup
from composer.core import Engine, State, Timestamp
from composer.optim import CosineAnnealingWithWarmupScheduler, WarmupStableDecayScheduler

if TYPE_CHECKING:
    from collections.abc import Callable

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BLUE, ORANGE, GREEN, PURPLE, GREY = "#0072b2", "#d55e00", "#009e73", "#aa4499", "#777777"
SIZE = (8, 3.6)


def figure(columns: int = 1, **settings: object) -> tuple[Figure, list[Axes]]:
    """Return a figure with axes side by side, without upper and right edges."""
    result, axes = plt.subplots(1, columns, figsize=SIZE, squeeze=False, layout="constrained", **settings)
    for one in axes[0]:
        one.spines[["top", "right"]].set_visible(False)
    return result, list(axes[0])


def alibi() -> Figure:
    """Show the bias of one head as a matrix, and of all heads by distance."""
    result, (matrix, lines) = figure(2, width_ratios=(1, 1.35))
    length, heads = 24, 4
    bias = cf.AlibiBias(heads)(length, length)[0]
    shown = matrix.imshow(bias[0].masked_fill(torch.ones(length, length).triu(1).bool(), torch.nan), cmap="viridis")
    matrix.set(title="bias of head 1 of 4", xlabel="position of the key", ylabel="position of the query")
    result.colorbar(shown, ax=matrix, shrink=0.85)
    distances = torch.arange(length)
    for head, color in enumerate((BLUE, ORANGE, GREEN, PURPLE)):
        slope = cf.alibi_slopes(heads)[head].item()
        lines.plot(distances, -slope * distances, color=color, label=f"head {head + 1}, slope {slope:.2g}")
    lines.set(title="bias by distance", xlabel="distance of the key from the query", ylabel="added to the logit")
    lines.legend(frameon=False, loc="lower left")
    return result


def channels_last() -> Figure:
    """Show the order of an image's values in memory in both formats."""
    result, (axes,) = figure()
    channels, height, width = 3, 2, 3
    image = torch.arange(channels * height * width).view(1, channels, height, width)
    formats = {"contiguous (default)": image, "channels_last": image.to(memory_format=torch.channels_last)}
    for row, (name, stored) in enumerate(formats.items()):
        y = 1.6 * (1 - row)
        axes.text(0, y + 0.78, name, fontsize=12, weight="bold")
        for place, value in enumerate(stored.as_strided((image.numel(),), (1,)).tolist()):
            channel, pixel = divmod(value, height * width)
            color = ("#e8998d", "#9cc5a1", "#9db4e0")[channel]
            axes.add_patch(Rectangle((place, y), 1, 0.6, facecolor=color, edgecolor="white", linewidth=2))
            axes.text(place + 0.5, y + 0.3, f"{'RGB'[channel]}{pixel}", ha="center", va="center", fontsize=11)
    axes.text(0, -0.45, "addresses in memory →   R0 is the red value of pixel 0", fontsize=11, color=GREY)
    axes.set(xlim=(-0.1, image.numel() + 0.1), ylim=(-0.7, 2.7))
    axes.axis("off")
    return result


def ema() -> Figure:
    """Show the test error during a training with a large learning rate, of the weights and of their average."""
    result, (axes,) = figure()
    images, labels = digits()
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    average, optimizer = copy.deepcopy(model), torch.optim.SGD(model.parameters(), lr=0.7)
    errors: dict[str, list[float]] = {"weights of the step": [], "average, half-life of 20 steps": []}
    for step in range(300):
        chosen = torch.randint(1200, (16,), generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        cross_entropy(model(images[chosen]), labels[chosen]).backward()
        optimizer.step()
        cf.compute_ema(model, average, smoothing=0.5 ** (1 / 20))
        for values, one in zip(errors.values(), (model, average), strict=True):
            with torch.no_grad():
                values.append(100 * (one(images[1200:]).argmax(1) != labels[1200:]).float().mean().item())
    for (name, values), color in zip(errors.items(), ("#9bbfd6", ORANGE), strict=True):
        axes.plot(values, label=name, color=color, linewidth=1.2 if color != ORANGE else 2.2)
    axes.set(ylim=(0, 50), xlabel="step", ylabel="errors on test images in %", title="digits, constant learning rate")
    axes.legend(frameon=False)
    return result


def swa() -> Figure:
    """Show steps of SGD around the minimum of a quadratic function, and their mean."""
    result, (axes,) = figure()
    torch.manual_seed(5)
    weights, average = nn.Linear(2, 1, bias=False), nn.Linear(2, 1, bias=False)
    curvature = torch.tensor([0.35, 1.0])
    weights.weight.data = torch.tensor([[-4.6, 1.7]])
    path, num_averaged = [weights.weight.data[0].clone()], 0
    for step in range(130):
        gradient = curvature * weights.weight.data + 1.1 * torch.randn(1, 2)
        weights.weight.data -= 0.45 * gradient
        path.append(weights.weight.data[0].clone())
        if step >= 25:
            num_averaged = cf.compute_swa(weights, average, num_averaged)
    x, y = torch.meshgrid(torch.linspace(-5.2, 3.2, 200), torch.linspace(-2.1, 2.3, 120), indexing="xy")
    loss = (curvature[0] * x**2 + curvature[1] * y**2) / 2
    axes.contour(x, y, loss, levels=12, colors="#cccccc", linewidths=0.9)
    points = torch.stack(path)
    axes.plot(*points[:27].T, "o-", color="#9bbfd6", markersize=3.5, linewidth=1, label="SGD, before swa_start")
    axes.plot(*points[26:].T, "o-", color=BLUE, markersize=3.5, linewidth=0.7, label="SGD, averaged")
    axes.plot(*average.weight.data[0], "*", color=ORANGE, markersize=19, markeredgecolor="white", label="the mean")
    axes.plot(0, 0, "+", color="black", markersize=14, markeredgewidth=2, label="minimum of the loss")
    axes.set(xlabel="weight 1", ylabel="weight 2")
    axes.legend(frameon=False, bbox_to_anchor=(1, 1), loc="upper left")
    return result


def sam() -> Figure:
    """Show a sharp and a flat minimum, and the highest loss within a radius of each."""
    result, (axes,) = figure()
    rho = 0.35
    x = torch.linspace(-2.4, 3.4, 1000)

    def loss(weight: Tensor) -> Tensor:
        return 1.6 - 1.45 * torch.exp(-((weight + 1.2) ** 2) / 0.09) - 1.38 * torch.exp(-((weight - 1.4) ** 2) / 1.4)

    axes.plot(x, loss(x), color="black", linewidth=1.6)
    for center, name, color in ((-1.2, "sharp", ORANGE), (1.4, "flat", GREEN)):
        inside = (x - center).abs() <= rho
        highest = loss(x)[inside].max().item()
        axes.axvspan(center - rho, center + rho, color=color, alpha=0.14, linewidth=0)
        bottom = loss(torch.tensor(center)).item()
        axes.plot(center, bottom, "o", color=color, markersize=8)
        axes.hlines(highest, center - rho, center + rho, color=color, linewidth=2.5)
        text = f"{name} minimum: loss {bottom:.2f}\nhighest within rho: {highest:.2f}"
        axes.text(center, -0.12, text, color=color, va="top", ha="center")
    axes.set(xlabel="weight", ylabel="loss", ylim=(-0.5, 1.75), yticks=(0, 0.5, 1, 1.5), xlim=(-2.4, 3.4))
    return result


def gated_linear_units() -> Figure:
    """Show the layers of a feed-forward block before and after the surgery."""
    result, (axes,) = figure()
    axes.text(0, 3.65, "before", fontsize=12, weight="bold")
    chain(axes, 3, [("linear", BLUE), ("activation", GREY), ("linear", BLUE)])
    axes.text(0, 2.15, "after", fontsize=12, weight="bold")
    chain(axes, 1.5, [("linear", BLUE), ("activation", GREY), ("multiply", ORANGE), ("linear", BLUE)])
    box(axes, 2.6, 0.2, "linear, new", GREEN)
    arrow(axes, (0.5, 1.5), (0.5, 0.2), (2.6 - 0.88, 0.2))
    arrow(axes, (2.6 + 0.88, 0.2), (6.0, 0.2), (6.0, 1.5 - 0.32))
    axes.set(xlim=(-0.1, 11.5), ylim=(-0.3, 4))
    axes.axis("off")
    return result


def sequence_packing() -> Figure:
    """Show documents in rows of their own, packed in order and by best fit, and the mask of a row."""
    length, generator = 64, torch.Generator().manual_seed(5)
    sizes = torch.randint(4, 45, (16,), generator=generator).tolist()
    ways = {
        "padded": [[index] for index in range(len(sizes))],
        "in order": cf.pack_lengths(sizes, length, "in_order"),
        "best fit": cf.pack_lengths(sizes, length),
    }
    result, axes = figure(4, width_ratios=(1, 1, 1, 1.5))
    for one, (name, rows) in zip(axes[:3], ways.items(), strict=True):
        for number, row in enumerate(rows):
            ends = list(itertools.accumulate(sizes[index] for index in row))
            one.barh(number, length, color="#eeeeee")
            for index, end in zip(row, ends, strict=True):
                color = (BLUE, ORANGE, GREEN, PURPLE)[index % 4]
                one.barh(number, sizes[index], left=end - sizes[index], color=color, edgecolor="white")
        one.set(title=f"{name}: {sum(sizes) / length / len(rows):.0%} full", xlim=(0, length), ylim=(len(sizes), -1))
        one.set(xlabel="tokens", yticks=[])
    axes[0].set_ylabel("rows")
    documents = [torch.arange(sizes[index]) for index in max(ways["best fit"], key=len)]
    batch = cf.collate_packed([cf.pack_documents(documents, length)])
    axes[3].imshow(cf.add_document_mask(batch)["attention_mask"][0, 0], cmap="Blues", vmin=0, vmax=1.4)
    axes[3].set(
        title=f"mask of {len(documents)} documents", xlabel="position of the key", ylabel="position of the query"
    )
    return result


def squeeze_excite() -> Figure:
    """Show a convolution followed by squeeze-and-excitation."""
    result, (axes,) = figure()
    axes.text(0, 3.65, "before", fontsize=12, weight="bold")
    chain(axes, 3, [("convolution", BLUE)])
    axes.text(0, 2.15, "after", fontsize=12, weight="bold")
    chain(axes, 1.5, [("convolution", BLUE), None, None, None, ("multiply", ORANGE)])
    steps = [("mean", GREY), ("linear + ReLU", GREEN), ("linear + sigmoid", GREEN)]
    for column, (name, color) in enumerate(steps):
        box(axes, 4.1 + 2.2 * column, 0.2, name, color)
        if column:
            arrow(axes, (4.1 + 2.2 * column - 1.35, 0.2), (4.1 + 2.2 * column - 0.88, 0.2))
    arrow(axes, (2.9, 1.5), (2.9, 0.2), (4.1 - 0.88, 0.2))
    arrow(axes, (8.5 + 0.88, 0.2), (10.4, 0.2), (10.4, 1.5 - 0.32))
    axes.text(6.5, 0.72, "one value per channel", ha="center", fontsize=10, color=GREY)
    axes.text(6.5, 1.62, "all pixels", ha="center", fontsize=10, color=GREY)
    axes.set(xlim=(-0.1, 12.2), ylim=(-0.3, 4))
    axes.axis("off")
    return result


def chain(axes: Axes, y: float, layers: list[tuple[str, str] | None]) -> None:
    """Draw layers from left to right with arrows between them; None is an empty place."""
    centers = [1.6 + 2.2 * place for place in range(len(layers))]
    left = 0.1
    for center, layer in zip(centers, layers, strict=True):
        if layer is not None:
            arrow(axes, (left, y), (center - 0.88, y))
            box(axes, center, y, *layer)
            left = center + 0.88
    arrow(axes, (left, y), (left + 0.65, y))


def box(axes: Axes, x: float, y: float, text: str, color: str) -> None:
    """Draw a layer."""
    shape = FancyBboxPatch((x - 0.83, y - 0.27), 1.66, 0.54, boxstyle="round,pad=0.05", color=color, linewidth=0)
    axes.add_patch(shape)
    axes.text(x, y, text, ha="center", va="center", color="white", fontsize=8.5, weight="bold")


def arrow(axes: Axes, *points: tuple[float, float]) -> None:
    """Draw an arrow along points."""
    for start, end in itertools.pairwise(points[:-1]):
        axes.plot(*zip(start, end, strict=True), color="black", linewidth=1.3)
    settings = {"arrowstyle": "-|>", "color": "black", "shrinkA": 0, "shrinkB": 0}
    axes.annotate("", points[-1], points[-2], arrowprops=settings)


def ghost_batchnorm() -> Figure:
    """Show the values of one channel before and after, with a norm of the batch and of its parts."""
    result, axes = figure(3)
    torch.manual_seed(3)
    values = torch.randn(64, 1) * 0.8 + torch.tensor([0.5, 3.0, 1.2, 2.2]).repeat_interleave(16)[:, None]
    layers = {
        "values of a channel": nn.Identity(),
        "BatchNorm": nn.BatchNorm1d(1),
        "ghost batches of 16": cf.GhostBatchNorm1d(1, ghost_batch_size=16),
    }
    for one, (name, layer) in zip(axes, layers.items(), strict=True):
        outputs = layer(values).detach()[:, 0]
        for part, color in enumerate((BLUE, ORANGE, GREEN, PURPLE)):
            samples = slice(16 * part, 16 * part + 16)
            one.plot(range(64)[samples], outputs[samples], "o", color=color, markersize=4)
            one.hlines(outputs[samples].mean(), 16 * part, 16 * part + 15, color=color, linewidth=2.5)
        one.set(title=name, xlabel="sample of the batch")
        if one is not axes[0]:
            one.set_ylim(-3, 3)
    return result


def gradient_clipping() -> Figure:
    """Show a gradient of two weights, clipped by its norm and by value."""
    result, axes = figure(2)
    gradient = torch.tensor([1.9, 0.7])
    for one, kind, color in zip(axes, ("norm", "value"), (BLUE, ORANGE), strict=True):
        weight = nn.Parameter(torch.zeros(2))
        weight.grad = gradient.clone()
        cf.apply_gradient_clipping([weight], kind, 1.0)
        limit = Circle((0, 0), 1) if kind == "norm" else Rectangle((-1, -1), 2, 2)
        limit.set(facecolor="none", edgecolor=GREY, linestyle="--")
        one.add_patch(limit)
        for vector, shade, name in ((gradient, "#bbbbbb", "gradient"), (weight.grad, color, "clipped")):
            arrow = {"arrowstyle": "-|>", "color": shade, "linewidth": 2.5, "shrinkA": 0, "shrinkB": 0}
            one.annotate("", vector.tolist(), (0, 0), arrowprops=arrow)
            x, y = (vector + torch.tensor([0.05, 0.06 if name == "clipped" and kind == "value" else -0.25])).tolist()
            one.text(x, y, name, color=color if name == "clipped" else GREY)
        direction = "same direction" if kind == "norm" else "another direction"
        one.set(title=f'"{kind}", threshold 1: {direction}', xlim=(-1.2, 2.7), ylim=(-1.2, 1.3), aspect="equal")
        one.set(xlabel="gradient of weight 1", ylabel="gradient of weight 2")
    return result


def gyro_dropout() -> Figure:
    """Show which of 40 neurons are dropped for the first sample of the batch in 60 steps."""
    result, axes = figure(2)
    neurons, steps = 40, 60
    layers = {
        "nn.Dropout(0.5)": nn.Dropout(0.5),
        "GyroDropout, sigma=8, tau=2": cf.GyroDropout(p=0.5, sigma=8, tau=2, iters_per_epoch=steps, max_epoch=1),
    }
    for one, (name, layer) in zip(axes, layers.items(), strict=True):
        torch.manual_seed(0)
        masks = torch.stack([layer(torch.ones(4, neurons))[0] > 0 for _ in range(steps)], dim=1)
        one.imshow(masks, cmap="Blues", aspect="auto", vmin=0, vmax=1.4, interpolation="nearest")
        one.set(title=name, xlabel="step", ylabel="neuron (blue: in use)")
    return result


def label_smoothing() -> Figure:
    """Show a label of ten classes with three strengths."""
    result, axes = figure(3, sharey=True)
    for one, smoothing in zip(axes, (0.0, 0.1, 0.3), strict=True):
        label = cf.smooth_labels(torch.zeros(1, 10), torch.tensor([3]), smoothing=smoothing)[0]
        one.bar(range(10), label, color=[ORANGE if place == 3 else BLUE for place in range(10)])
        one.set(title=f"smoothing={smoothing:g}", xlabel="class", xticks=range(0, 10, 3), ylim=(0, 1.12))
        one.text(3, label[3] + 0.02, f"{label[3]:.2f}", ha="center")
        if smoothing:
            one.text(8, label[8] + 0.02, f"{label[8]:.2f}", ha="center")
    axes[0].set_ylabel("target probability")
    return result


def layer_freezing() -> Figure:
    """Show which of ten layers are trained in each of 40 epochs."""
    result, axes = figure(2)
    layers, epochs = 10, 40
    for one, (start, level) in zip(axes, ((0.5, 1.0), (0.25, 0.5)), strict=True):
        counts = [cf.count_layers_to_freeze(layers, epoch / epochs, start, level) for epoch in range(epochs)]
        trained = torch.tensor([[layer >= count for count in counts] for layer in range(layers)])
        one.imshow(trained, cmap="Blues", vmin=0, vmax=1.4, aspect="auto", origin="lower", extent=(0, 1, 0.5, 10.5))
        one.set(title=f"freeze_start={start}, freeze_level={level}", xlabel="fraction of the training")
        one.set(ylabel="layer (blue: trained)", yticks=(1, 4, 7, 10))
    return result


def selective_backprop() -> Figure:
    """Show a batch of digits sorted by their losses, and the half that is selected."""
    images, labels = digits()
    torch.manual_seed(0)
    model = nn.Linear(64, 10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(40):
        optimizer.zero_grad()
        cross_entropy(model(images[:500]), labels[:500]).backward()
        optimizer.step()
    batch, targets = images[1200:1216], labels[1200:1216]
    losses = cross_entropy(model(batch), targets, reduction="none")
    selected, _ = cf.select_using_loss(batch, targets, model, cross_entropy, keep=0.5)
    result, axes = plt.subplots(2, 8, figsize=SIZE, layout="constrained")
    for one, place in zip(axes.flat, losses.argsort(descending=True).tolist(), strict=True):
        kept = any(torch.equal(batch[place], other) for other in selected)
        one.imshow(batch[place].view(8, 8), cmap="gray_r", alpha=1.0 if kept else 0.35)
        one.set(xticks=[], yticks=[])
        one.set_title(f"{losses[place].item():.2f}", color=ORANGE if kept else GREY, fontsize=11)
        one.spines[:].set(color=ORANGE if kept else "#bbbbbb", linewidth=3 if kept else 1)
    axes[0, 0].set_ylabel("selected", color=ORANGE, fontsize=12)
    axes[1, 0].set_ylabel("left out", color=GREY, fontsize=12)
    result.suptitle("a batch of 16 digits with their losses, keep=0.5")
    return result


def seq_length_warmup() -> Figure:
    """Show the length of the sequences and the number of samples during the training."""
    result, axes = figure(2)
    for truncate, color in ((True, BLUE), (False, ORANGE)):
        shapes = []
        warmup = SeqLengthWarmup(duration=0.5, min_seq_length=32, max_seq_length=256, step_size=32, truncate=truncate)
        state = State(nn.Identity(), max_duration="100ba", dataloader_len=100)
        engine = Engine(state, algorithms=[warmup])
        for batch in range(100):
            state.timestamp, state.batch = Timestamp(batch=batch), {"input_ids": torch.zeros(8, 256, dtype=torch.long)}
            engine.run_event("after_dataloader")
            shapes.append(state.batch["input_ids"].shape)
        samples, lengths = zip(*shapes, strict=True)
        style = {
            "color": color,
            "linewidth": 2.2,
            "label": f"truncate={truncate}",
            "linestyle": "-" if truncate else "--",
        }
        axes[0].step(range(100), lengths, where="post", **style)
        axes[1].step(range(100), samples, where="post", **style)
    axes[0].set(xlabel="batch", ylabel="tokens of a sequence", ylim=(0, 270), title="length")
    axes[1].set(xlabel="batch", ylabel="sequences of a batch", ylim=(0, 68), title="sequences")
    axes[1].legend(frameon=False)
    return result


def stochastic_depth() -> Figure:
    """Show which of 12 residual blocks run in each of 40 steps."""
    result, (rates, runs) = figure(2, width_ratios=(1, 2), sharey=True)
    torch.manual_seed(2)
    blocks, steps = 12, 40
    model = nn.Sequential(*(Residual() for _ in range(blocks)))
    cf.apply_stochastic_depth(model, Residual, stochastic_method="block", drop_rate=0.5)
    ran = torch.zeros(blocks, steps)
    for step in range(steps):
        values = [torch.ones(1, 1)]
        for block in model:
            values.append(block(values[-1]))
        ran[:, step] = torch.tensor([float((a != b).item()) for a, b in itertools.pairwise(values)])
    numbers = range(1, blocks + 1)
    rates.barh(numbers, [0.5 * block / blocks for block in numbers], color=ORANGE)
    rates.set(xlabel="rate", ylabel="block", title="drop_rate=0.5", yticks=(1, 4, 8, 12))
    runs.imshow(
        ran, cmap="Blues", vmin=0, vmax=1.4, aspect="auto", origin="lower", extent=(0, steps, 0.5, blocks + 0.5)
    )
    runs.set(xlabel="step", title="blocks that run (blue) and that are skipped")
    return result


class Residual(nn.Module):
    """The smallest residual block."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Return the input with the layer's output added."""
        return x + self.layer(x)


def weight_standardization() -> Figure:
    """Show the distribution of the weights of eight filters before and after."""
    result, axes = figure(2)
    torch.manual_seed(0)
    conv = nn.Conv2d(16, 8, 3)
    with torch.no_grad():
        conv.weight.mul_(torch.linspace(0.3, 3, 8).view(-1, 1, 1, 1)).add_(0.15 * torch.randn(8, 1, 1, 1))
    before = conv.weight.detach().flatten(1)
    cf.apply_weight_standardization(conv_model := nn.Sequential(conv))
    after = conv_model[0].weight.detach().flatten(1)
    for one, weights, name, color in ((axes[0], before, "before", BLUE), (axes[1], after, "after", ORANGE)):
        parts = one.violinplot(list(weights), showextrema=False, widths=0.85)
        for body in parts["bodies"]:
            body.set(facecolor=color, alpha=0.8)
        one.plot(range(1, 9), weights.mean(1), "_", color="black", markersize=16, markeredgewidth=2)
        one.set(title=name, xlabel="filter", ylabel="weights, with their mean", xticks=range(1, 9))
    return result


def warmup_stable_decay() -> Figure:
    """Show a constant phase with two branches that decay, and a cosine of one length."""
    result, (axes,) = figure()

    def rates(schedule: Callable[[State], float], length: int) -> list[float]:
        state = State(nn.Identity(), max_duration=f"{length}ba", dataloader_len=length)
        factors = []
        for batch in range(length):
            state.timestamp = Timestamp(batch=batch)
            factors.append(schedule(state))
        return factors

    stable = rates(WarmupStableDecayScheduler("10ba", "0ba"), 200)
    axes.plot(stable, color=BLUE, linewidth=2.2, label="constant phase")
    for begin, length, color in ((80, 20, ORANGE), (160, 40, GREEN)):
        branch = rates(WarmupStableDecayScheduler("10ba", f"{length}ba"), begin + length)
        axes.plot(range(begin, begin + length), branch[begin:], color=color, linewidth=2.2)
        axes.plot(begin, 1, "o", color=color, label=f'checkpoint {begin}, fit(cooldown="{length}ba")')
    cosine = rates(CosineAnnealingWithWarmupScheduler("10ba"), 200)
    axes.plot(cosine, "--", color=GREY, linewidth=1.5, label="cosine of 200 batches")
    axes.set(xlabel="batch", ylabel="factor of the learning rate", ylim=(0, 1.1), xlim=(0, 205))
    axes.legend(frameon=False, loc="lower left")
    return result


def alternating_flip() -> Figure:
    """Show six digits in four epochs, with independent and with alternating flips."""
    result, axes = figure(2)
    images, epochs = digits()[0][:6].view(6, 1, 8, 8), 4
    generator = torch.Generator().manual_seed(4)
    turns = torch.rand(epochs, 6, generator=generator) < 0.5
    random = [torch.where(one[:, None, None, None], images.flip(-1), images) for one in turns]
    alternating = [cf.alternating_flip_batch(images, torch.arange(6), epoch) for epoch in range(epochs)]
    for one, name, shown in zip(axes, ("random flips", "alternating flips"), (random, alternating), strict=True):
        padded = nn.functional.pad(torch.stack(shown)[:, :, 0], (1, 1, 1, 1))
        one.imshow(padded.permute(0, 2, 1, 3).reshape(10 * epochs, 60), cmap="gray_r")
        repeated = [(a == b).all((1, 2)) for a, b in itertools.pairwise(padded)]
        for epoch, image in torch.stack(repeated).nonzero().tolist():
            one.add_patch(Rectangle((10 * image, 10 * epoch + 10), 9, 9, fill=False, edgecolor=ORANGE, linewidth=2))
        one.set(title=name, xticks=[], yticks=[10 * epoch + 4.5 for epoch in range(epochs)])
        one.set_yticklabels([f"epoch {epoch}" for epoch in range(epochs)])
        one.spines[:].set_visible(False)
    axes[0].set_xlabel("orange: as in the epoch before", color=ORANGE)
    return result


def post_hoc_ema() -> Figure:
    """Show the weight of each step in averages: those that are saved, and others that are computed from them."""
    result, axes = figure(2, sharey=True)
    steps = 400

    def profile(updates: int, sigma_rel: float) -> Tensor:
        weights = torch.zeros(steps, dtype=torch.float64)
        for step in range(1, updates + 1):
            smoothing = cf.power_ema_smoothing(step, sigma_rel)
            weights *= smoothing
            weights[step - 1] += 1 - smoothing
        return weights

    for width, color in ((0.05, BLUE), (0.1, GREEN)):
        axes[0].plot(100 * profile(steps, width), color=color, linewidth=2.2, label=f"sigma_rel={width}")
    places = [(step, width) for step in range(20, steps + 1, 20) for width in (0.05, 0.1)]
    saved = torch.stack([profile(*place) for place in places])
    for width, color in ((0.07, ORANGE), (0.15, PURPLE)):
        factors = cf.post_hoc_weights(*zip(*places, strict=True), sigma_rel=width)
        axes[1].plot(100 * factors @ saved, color=color, linewidth=2.2, label=f"sigma_rel={width}")
        axes[1].plot(100 * profile(steps, width), ":", color="black", linewidth=1)
    axes[0].set(title="two averages, saved 20 times", xlabel="step", ylabel="weight of the step in %")
    axes[1].set(title="computed afterwards (dotted: directly)", xlabel="step")
    for one in axes:
        one.legend(frameon=False, loc="upper left")
    return result


def skip_spikes() -> Figure:
    """Show norms of gradients with spikes, and the limits above which a step is skipped."""
    result, (axes,) = figure()
    torch.manual_seed(0)
    norms, window = 1 + 0.12 * torch.randn(240) + torch.linspace(0.8, 0, 240), 64
    norms[[90, 91, 170]] += torch.tensor([4.5, 3.2, 5.5])
    history, limits, spikes = torch.full((window,), torch.nan), [], []
    for step, norm in enumerate(norms):
        is_spike, limit = cf.detect_spikes(norm, history, 6.0, window // 2)
        limits.append(limit.item())
        spikes += [step] * bool(is_spike)
        history[step % window] = torch.minimum(norm, limit)
    axes.plot(norms, color="#9bbfd6", linewidth=1.2, label="norm of the gradients")
    axes.plot(limits, color=BLUE, linewidth=2.2, label="limit: mean and 6 deviations of the 64 before")
    axes.plot(spikes, norms[spikes], "o", color=ORANGE, label="skipped")
    axes.set(xlabel="step", ylabel="norm", ylim=(0, 8))
    axes.legend(frameon=False, loc="upper left")
    return result


def width_groups() -> Figure:
    """Show how much four steps change the outputs of a hidden layer and of the head, over widths."""
    result, axes = figure(2, sharey=True)
    widths = [32, 64, 128, 256, 512]

    def make(width: int) -> nn.Sequential:
        hidden = (nn.Linear(width, width), nn.ReLU(), nn.LayerNorm(width))
        layers = nn.Sequential(nn.Embedding(8, width), *hidden, nn.Linear(width, 8))
        nn.init.zeros_(layers[-1].weight)
        return layers

    def loss(model: nn.Module) -> Tensor:
        return nn.functional.cross_entropy(model(torch.arange(8)), torch.arange(8).flip(0))

    for one, title in zip(axes, ("one rate", "width_groups"), strict=True):
        changes = []
        for width in widths:
            torch.manual_seed(0)
            model = make(width).double()
            groups = model.parameters() if title == "one rate" else cf.width_groups(model, make(32), 0.003)
            changes.append(cf.activation_changes(model, torch.optim.Adam(groups, lr=0.003), loss))
        for name, label, color in (("1", "hidden layer", BLUE), ("4", "head", ORANGE)):
            one.loglog(widths, [change[name] for change in changes], "o-", color=color, label=label)
        one.set(title=title, xlabel="width", xticks=widths, xticklabels=widths)
        one.minorticks_off()
    axes[0].set(ylabel="change of the outputs")
    axes[0].legend(frameon=False)
    return result


def digits() -> tuple[Tensor, Tensor]:
    """Return the digits, shape ``(1797, 64)`` from 0 to 1, and their labels, in a fixed random order."""
    pixels, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    return torch.tensor(pixels, dtype=torch.float32)[order] / 16, torch.tensor(labels)[order]


CHARTS = [
    alibi,
    alternating_flip,
    channels_last,
    ema,
    gated_linear_units,
    ghost_batchnorm,
    gradient_clipping,
    gyro_dropout,
    label_smoothing,
    layer_freezing,
    post_hoc_ema,
    sam,
    selective_backprop,
    seq_length_warmup,
    sequence_packing,
    skip_spikes,
    squeeze_excite,
    stochastic_depth,
    swa,
    warmup_stable_decay,
    weight_standardization,
    width_groups,
]
