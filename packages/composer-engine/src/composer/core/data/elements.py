"""The elements of a loss: what it is the mean over, how they are counted, and the weights of microbatches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from composer.core.data.batches import count_tokens

if TYPE_CHECKING:
    from composer.core.data.batches import Batch
    from composer.core.data.spec import DataSpec
    from composer.core.step import Microbatch


class Elements:
    """What the loss of a model is the mean over, and how these elements are counted.

    1. A model with ``loss_is_sum = True``: the loss is a sum, so those of microbatches and processes are added.
    2. ``by_tokens``, and a function of the user counts tokens (``DataSpec(get_num_tokens_in_batch=...)``): what it
       returns, of a dictionary the ``"loss_generating"`` ones.
    3. A model with ``count_loss_terms(batch)``: what it counts, a tensor on the device, which the host does not wait
       for. If it returns None for a batch, the next rules hold.
    4. ``by_tokens``: all ids in ``batch["input_ids"]``, with padding; see ``count_tokens``.
    5. Otherwise: samples.

    Args:
        model: The model.
        spec: The data.
        by_tokens: Whether tokens are counted, by the rules 2 and 4: ``accumulate_train_batch_on_tokens``.

    Attributes:
        is_sum: Whether the loss is a sum.
        count: ``f(batch) -> int`` by the rules 2, 4 and 5. The host needs numbers also where the others hold.
        are_usual: Whether nearly all batches have equally many, as they have samples but not tokens; False for sums.

    Example:
        >>> from composer.core import DataSpec
        >>> elements = Elements(torch.nn.Linear(2, 1), DataSpec([]), by_tokens=False)
        >>> elements.count(torch.zeros(5, 2)), elements.are_usual, elements.on_device([])
        (5, True, None)
    """

    def __init__(self, model: Any, spec: DataSpec, *, by_tokens: bool) -> None:
        self.is_sum = bool(getattr(model, "loss_is_sum", False))
        by_user = by_tokens and spec._get_num_tokens_in_batch is not count_tokens  # noqa: SLF001
        by_model: Callable[[Batch], Tensor | None] | None = getattr(model, "count_loss_terms", None)
        self._by_model = None if self.is_sum or by_user else by_model
        self.count = spec.get_num_loss_tokens_in_batch if by_tokens else spec.get_num_samples_in_batch
        self.are_usual = not (by_tokens or self.is_sum)

    def on_device(self, microbatches: Sequence[Microbatch]) -> list[Tensor] | None:
        """Return the number of elements of each microbatch that the model counts (rule 3); None if it does not."""
        if self._by_model is None:
            return None
        numbers = [self._by_model(batch) for batch, _ in microbatches]
        return None if any(number is None for number in numbers) else numbers  # type: ignore[return-value]


def weighted_by(
    microbatches: Sequence[Microbatch], elements: Sequence[Tensor], world_size: int = 1
) -> Sequence[Microbatch]:
    """Return microbatches, each with its fraction of the elements of all, times the number of processes.

    The numbers stay on their device. Several processes add them in a reduction; gradients are averaged over processes.

    Example:
        >>> weighted_by([("a", 0.5), ("b", 0.5)], [torch.tensor(3), torch.tensor(1)])
        [('a', tensor(0.7500, dtype=torch.float64)), ('b', tensor(0.2500, dtype=torch.float64))]
    """
    numbers = torch.stack([*elements])
    # Doubles are slow on most other devices.
    numbers = numbers.double() if numbers.device.type == "cpu" else numbers.float()
    total = numbers.sum()
    if world_size > 1:
        torch.distributed.all_reduce(total)
        numbers *= world_size
    # Not clamped, as they may be weights of classes, whose sum may be below 1.
    weights = (numbers / torch.where(total == 0, 1, total)).unbind()
    return [(batch, weight) for (batch, _), weight in zip(microbatches, weights, strict=True)]
