"""The loss that a model computes, as a metric."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.utilities import dim_zero_cat


class ModelLoss(Metric):
    """The loss that a ``ComposerModel`` computes, averaged over all samples, and its parts.

    It is the metric ``"loss"`` of a model that has no other ones, in evaluation. A loss of several parts is their sum,
    or the one named ``"total"``, and each part is ``"loss/<name>"``.

    Example:
        >>> metric = ModelLoss()
        >>> metric.update({"near": torch.tensor(1.0), "far": torch.tensor(2.0)}, 3)
        >>> metric.update({"near": torch.tensor(5.0), "far": torch.tensor(2.0)}, 1)
        >>> metric.compute()
        {'': tensor(4.), 'near': tensor(2.), 'far': tensor(2.)}
    """

    is_differentiable = False
    higher_is_better = False
    full_state_update = False

    rows: list[Tensor]

    def __init__(self) -> None:
        super().__init__()
        self.names: tuple[str, ...] = ("",)
        self.add_state("rows", [], dist_reduce_fx="cat")

    def update(self, loss: Tensor | Mapping[str, Tensor] | Sequence[Tensor], count: Tensor | int) -> None:
        """Add a batch.

        Args:
            loss: The loss, or several, by name or in a sequence.
            count: The number of samples, or of other elements, that it is the mean of.
        """
        if isinstance(loss, Tensor):
            loss = {"": loss}
        parts = dict(loss) if isinstance(loss, Mapping) else {f"loss{place}": one for place, one in enumerate(loss)}
        total = parts.pop("total" if "total" in parts else "", None)
        self.names = ("", *parts)
        losses = torch.stack([sum(parts.values(), torch.zeros(())) if total is None else total, *parts.values()])
        weight = torch.as_tensor(count, dtype=torch.float32, device=losses.device)
        weighted = torch.where(weight == 0, 0.0, losses.detach().float() * weight)  # a mean over nothing is nan
        self.rows.append(torch.cat([weight[None], weighted])[None])

    def compute(self) -> Tensor | dict[str, Tensor]:
        """Return the mean, ``nan`` if there are no samples; with its parts, by name, if the loss has several."""
        count, *sums = dim_zero_cat(self.rows).sum(0) if len(self.rows) else torch.zeros(1 + len(self.names))
        means = [total / count for total in sums]
        return means[0] if len(means) == 1 else dict(zip(self.names, means, strict=False))
