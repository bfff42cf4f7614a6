"""NoOpModel: measure the data loader alone."""

from __future__ import annotations

from typing import Any, ClassVar

import attrs
import torch
from torch import Tensor, nn

from composer import functional as cf
from composer.core import Algorithm, AlgorithmConflictError, Batch, Event, ExclusiveResource, Logger, Stage, State
from composer.core.data.batches import count_samples
from composer.core.declarations import Conflict


class _Nothing(nn.Module):
    """A model with one weight, whose square is the loss, and without metrics."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, batch: Batch) -> Tensor:
        return self.weight.clone()  # FSDP2 frees the memory of the gathered weight after the forward pass

    def loss(self, outputs: Tensor, batch: Batch, reduction: str = "mean") -> Tensor:
        loss = outputs.square().sum()
        return loss.expand(count_samples(batch)) if reduction == "none" else loss

    def eval_forward(self, batch: Batch, outputs: Tensor | None = None) -> Tensor:
        return self.forward(batch) if outputs is None else outputs

    def get_metrics(self, is_train: bool) -> dict[str, Any]:
        return {}

    def update_metric(self, batch: Batch, outputs: Tensor, metric: Any) -> None:
        """Do nothing: there are no metrics."""


@attrs.define(eq=False)
class NoOpModel(Algorithm):
    """Replace the model by one that computes nothing, to measure the throughput of the data loader.

    Nothing is trained: the optimizers hold the one weight of the new model. It must be the last algorithm in the list,
    and cannot be combined with algorithms that read the outputs, such as LabelSmoothing and MixUp.

    Raises:
        AlgorithmConflictError: At ``INIT``, if there is such an algorithm.

    Example:
        >>> NoOpModel()
        NoOpModel()
    """

    runs_at: ClassVar = {Event.INIT: Stage.ARCHITECTURE}
    reads: ClassVar = {"algorithms", "model", "optimizers"}
    writes: ClassVar = {"model", "optimizers"}
    owns: ClassVar = {
        ExclusiveResource("the model", remedy="One is enough to replace the model."),
        ExclusiveResource("the output head", remedy="NoOpModel has no head."),
    }

    @staticmethod
    def required_on_load() -> bool:
        """Return True: the weights are not those of the user's model."""
        return True

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        """Replace the model and update the optimizers."""
        readers = [each for each in state.algorithms if "outputs" in each.reads]
        if readers:
            remedy = "NoOpModel computes no outputs."
            raise AlgorithmConflictError(Conflict(each, self, ("the model's outputs",), (remedy,)) for each in readers)
        former, nothing = state.model, _Nothing().to(state.device)
        for optimizer in state.optimizers:
            cf.update_params_in_optimizer(former.parameters(), nothing.parameters(), optimizer)
        state.model = nothing
        logger.log_hyperparameters({"NoOpModel/former_model": type(former).__name__})
