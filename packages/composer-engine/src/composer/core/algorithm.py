"""The base class of algorithms: settings, declarations, and one method that changes the state."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod

# Imported at run time, as attrs and cattrs resolve the annotations of a subclass and its bases.
from collections.abc import Mapping  # noqa: TC003
from collections.abc import Set as AbstractSet  # noqa: TC003
from typing import TYPE_CHECKING, ClassVar

from typing_extensions import deprecated

from composer.core.event import Event  # noqa: TC001
from composer.core.serializable import Serializable
from composer.core.stage import Stage  # noqa: TC001
from composer.functional import SurgeryReport  # noqa: TC001

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from composer.core.logger import Logger
    from composer.core.state import State

__all__ = ["Algorithm", "NoEffectWarning"]


class NoEffectWarning(UserWarning):
    """A method found nothing to change."""


class Algorithm(Serializable, ABC):
    """A change to training that composes with others.

    A subclass declares where it runs and implements :meth:`apply`. It may override :meth:`match` to decide at run time;
    ``match`` of an algorithm without declared events is called at every event.

    Example:
        >>> from composer.core import Event, Stage
        >>> class HalveTheLoss(Algorithm):
        ...     runs_at = {Event.AFTER_LOSS: Stage.LOSS}
        ...     reads = writes = {"loss"}
        ...     def apply(self, event, state, logger):
        ...         state.loss = state.loss / 2
        >>> HalveTheLoss().match(Event.AFTER_LOSS, state=None)
        True
    """

    runs_at: ClassVar[Mapping[Event, Stage]] = {}
    """The events at which it may run and its stage there."""

    reads: ClassVar[AbstractSet[str]] = frozenset()
    """The fields that it reads: ``"batch.input"``, ``"batch.target"``, ``"outputs"``, ``"loss"``, ``"model"``, …

    A plain set applies to all its events; :class:`FieldsByEvent` declares the fields of each event.
    """

    writes: ClassVar[AbstractSet[str]] = frozenset()
    """The fields that it changes, in the same form."""

    surgery_report: SurgeryReport | None = None
    """The layers that this algorithm has replaced in the model; None if it replaces none, or has not run."""

    owns: ClassVar[AbstractSet[str]] = frozenset()
    """The exclusive resources that only one algorithm of a run may own: ``"the weights used for evaluation"``."""

    interpolate_loss: bool = False
    """Whether it blends losses instead of targets; two such algorithms cause a warning."""

    def runs_at_events(self) -> Mapping[Event, Stage]:
        """Return the events at which it runs with its settings; :attr:`runs_at` by default."""
        if type(self).places is not Algorithm.places:
            warnings.warn(
                f"{type(self).__name__}.places is called runs_at_events now: rename the method.",
                DeprecationWarning,
                stacklevel=2,
            )
            return self.places()
        return self.runs_at

    @deprecated("Algorithm.places() is called runs_at_events() now.")
    def places(self) -> Mapping[Event, Stage]:
        """Return :meth:`runs_at_events`, under its former name."""
        return self.runs_at_events()

    def match(self, event: Event, state: State) -> bool:
        """Return whether to run now; called at the declared events, or at every event if there are none."""
        return event in self.runs_at_events()

    @abstractmethod
    def apply(self, event: Event, state: State, logger: Logger) -> int | None:
        """Change the state. A returned number is the ``exit_code`` of the :class:`~composer.core.Trace`, if logged."""

    def evaluation_weights(self, state: State) -> AbstractContextManager[object] | None:
        """Return a context in which the model has this algorithm's weights for evaluation; None if it has none.

        Ask :func:`composer.core.evaluation_weights` instead, which takes the optimizers into account, too. An algorithm
        that returns a context should own the weights used for evaluation (:attr:`owns`), must allow nested contexts,
        and restores the training weights at the end, also after an error. While its averages are outside the model,
        its ``state_dict()`` has them by name under ``"averaged_weights"``, where readers of checkpoints find them.
        """
        return None

    def restore(self, state: State) -> None:
        """Restore what was changed temporarily, after an error in an evaluation or prediction."""

    @property
    def find_unused_parameters(self) -> bool:
        """Whether a step may leave some parameters without a gradient."""
        return False

    @property
    def draws_layers(self) -> bool:
        """Whether each process draws which layers a step uses; with FSDP2, all processes must use the same ones."""
        return False

    @property
    def selects_samples(self) -> bool:
        """Whether it may remove samples from a batch; several processes then exchange the number in each batch."""
        return False

    @property
    def backwards_create_graph(self) -> bool:
        """Whether the backward pass must itself be differentiable."""
        return False

    @staticmethod
    def required_on_load() -> bool:
        """Return whether weights saved with this algorithm only fit a model that it has changed."""
        return False
