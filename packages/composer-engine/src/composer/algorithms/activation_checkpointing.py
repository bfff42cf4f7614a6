"""ActivationCheckpointing: compute activations again in the backward pass, to save their memory."""

from __future__ import annotations

from typing import Any, ClassVar

import attrs

from composer import functional as cf
from composer.algorithms._surgery import FORWARD_PASSES, ModelSurgery
from composer.core import Event, Logger, Stage, State
from composer.core.checks import integer, one_of
from composer.functional.surgery.activation_checkpointing import check_not_recomputed, to_classes


@attrs.define(eq=False)
class ActivationCheckpointing(ModelSurgery):
    """Compute the activations of blocks again in the backward pass, to save their memory (arXiv:1604.06174).

    See :func:`composer.functional.apply_activation_checkpointing`. It comes after all other changes of the model, and
    before the model is compiled and sharded.

    Args:
        modules: The blocks: a class, its name, or several of them; by default the repeated blocks of the model.
        every: Change the first of so many blocks: with 2, half of them.
        policy: ``"full"`` stores the inputs of blocks only; ``"matmuls"`` also the results of matrix products,
            convolutions and attention kernels.

    Raises:
        TypeError: ``modules`` contains neither classes nor names, or ``every`` is no integer.
        ValueError: ``every`` is less than 1, or ``policy`` is unknown. At ``INIT`` and ``FIT_START``: the model already
            computes layers again.

    Example:
        >>> ActivationCheckpointing("BertLayer", policy="matmuls")
        ActivationCheckpointing(modules=('BertLayer',), every=1, policy='matmuls')
    """

    modules: Any = attrs.field(default=None, converter=to_classes)
    every: int = integer(1, 1, meaning="It is a distance in blocks.")
    policy: str = attrs.field(default="full", validator=one_of("full", "matmuls"))

    _kernel: ClassVar = staticmethod(cf.apply_activation_checkpointing)
    runs_at: ClassVar = {Event.INIT: Stage.LAYOUT, Event.FIT_START: Stage.LAYOUT}
    reads: ClassVar = {"model"}
    writes: ClassVar = {"model"}
    owns: ClassVar = {FORWARD_PASSES}
    changes_weights: ClassVar = False
    found_nothing: ClassVar = "{model} has no such blocks. Pass their class, modules=..., or remove it."

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        """Change the blocks; at ``FIT_START`` check that the model's own checkpointing was not enabled since."""
        if event is Event.FIT_START:
            check_not_recomputed(state.model)
        else:
            self.replace(state, logger)
