"""ChunkedCrossEntropy: compute the loss of the head without all of its logits in memory."""

from __future__ import annotations

from typing import ClassVar

import attrs

from composer import functional as cf
from composer.algorithms._surgery import ModelSurgery
from composer.core import Event, Stage
from composer.core.checks import integer, number
from composer.core.declarations import owned


@attrs.define(eq=False)
class ChunkedCrossEntropy(ModelSurgery):
    """Compute the cross entropy of the head a chunk of logits at a time (arXiv:2411.09009).

    See :func:`composer.functional.apply_chunked_cross_entropy`. The loss and its gradients stay the same up to
    rounding, also for smoothed or mixed labels and for the losses of samples.

    Args:
        head: The name of the head, a ``torch.nn.Linear``; ``None`` for that of a model of Transformers or timm.
        chunk_size: The number of rows, such as tokens, whose logits are in memory at a time; ``None`` for at most
            2^24 logits on a CPU and 2^27 on a GPU.
        z_loss: The factor of the z-loss in training (arXiv:2204.02311), such as 1e-4.
        softcap: The limit of the logits, in training and in evaluation (arXiv:2408.00118), such as 30.

    Raises:
        TypeError: A value is not a number.
        ValueError: A value is out of range; or, when the model is changed, the head cannot be found.

    Example:
        >>> ChunkedCrossEntropy(z_loss=1e-4)
        ChunkedCrossEntropy(head=None, chunk_size=None, z_loss=0.0001, softcap=None)
    """

    head: str | None = None
    chunk_size: int | None = integer(None, 1, meaning="It is the number of rows of a chunk.")
    z_loss: float = number(0.0, 0, meaning="It is the factor of a loss.")
    softcap: float | None = number(None, 0, above=True, meaning="It is the limit of the logits.")

    _kernel: ClassVar = staticmethod(cf.apply_chunked_cross_entropy)
    runs_at: ClassVar = {Event.INIT: Stage.PRECISION}
    reads: ClassVar = {"model"}
    writes: ClassVar = {"model"}
    owns: ClassVar = owned("the output head", "Choose one set of settings.")
    changes_weights: ClassVar = False
    acts_in_training = True
    found_nothing: ClassVar = "the head of {model} has been replaced before. Remove it."
