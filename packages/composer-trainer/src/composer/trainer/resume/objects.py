"""The objects that were given to the Trainer, by name: what ``resume/contract.py`` states is applied to them here.

:class:`GivenObjects` belongs to a ``ResumeState``, which saves and restores them with the other data of a resume.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

from composer.core.components import by_key
from composer.distributed import get_global_rank
from composer.trainer.resume import contract

if TYPE_CHECKING:
    from collections.abc import Mapping

    from composer.core import Logger, State
    from composer.trainer.data.settings import TrainingData

__all__ = ["GivenObjects"]


class GivenObjects:
    """The objects that were given to the Trainer; of three kinds, by where their states are saved.

    - Components, such as the model and callbacks: with the state of the run. Only their generators are saved here, and
      so are those of streams to evaluate on.
    - What is replayed with the data, such as the sampler: by ``Batches``.
    - All others: here.

    Args:
        state: The run.
        data: The training data.
        logger: Its destinations are components.
    """

    def __init__(self, state: State, data: TrainingData, logger: Logger) -> None:
        self._state, self._data, self._logger = state, data, logger
        self._changes: contract.Changes | None = None
        self._has_reported = False

    def save(self) -> dict[str, Any]:
        """Return the states of the objects that are saved here."""
        return contract.save_objects(self._others(), self._components())

    def load(self, saved: Mapping[str, Any]) -> None:
        """Restore what :meth:`save` returned."""
        contract.load_objects(saved, self._others(), self._components())

    def watch(self) -> None:
        """Compare attributes from now on, until changes have been reported."""
        if not self._has_reported:
            self._changes = contract.Changes({**self._components(), **self._others(), **self._of_training("replayed")})

    def report_changes(self) -> None:
        """Warn, once in a run, about changed attributes that are not saved."""
        if self._changes is not None:
            changes, self._changes, self._has_reported = self._changes, None, True
            if get_global_rank() == 0:
                contract.warn_of_changes(changes.names(), list(contract.generators_of(self._of_training("copied"))))

    def _components(self) -> dict[str, Any]:
        state = self._state
        found: dict[str, Any] = {"model": state.model}
        for kind, held in (("algorithms", state.algorithms), ("callbacks", state.callbacks)):
            found |= {f"{kind}.{state.component_key(one)}": one for one in held}
        for evaluator in state.evaluators:
            _, streams = contract.objects_to_evaluate(evaluator.dataloader.dataloader)
            found |= _named(f"evaluators.{evaluator.label}", streams)
        return found | _named("loggers", by_key(self._logger.destinations))

    def _others(self) -> dict[str, Any]:
        loss = getattr(self._state.model, "loss_fn", None)
        found: dict[str, Any] = {} if loss is None or isinstance(loss, nn.Module) else {"loss_fn": loss}
        found |= self._of_training("others")
        for evaluator in self._state.evaluators:
            objects, _ = contract.objects_to_evaluate(evaluator.dataloader.dataloader)
            found |= _named(f"evaluators.{evaluator.label}", objects)
        return found

    def _of_training(self, kind: str) -> dict[str, Any]:
        """Return the objects of the training data that ``LoaderObjects`` names so; none without data."""
        batches = self._data.batches
        return {} if batches is None else _named("train_dataloader", getattr(batches.objects, kind))


def _named(path: str, objects: Mapping[str, Any]) -> dict[str, Any]:
    return {f"{path}.{name}": one for name, one in objects.items()}
