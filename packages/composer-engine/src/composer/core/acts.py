"""What each algorithm did in a training, and the layers that act only in training and are not called there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

from composer.core.event import STEP_EVENTS
from composer.core.time import TimeUnit

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle

    from composer.core.base import Algorithm
    from composer.core.state import State


class Acts:
    """Counts what the algorithms of an engine do.

    In the first batch hooks observe the layers of algorithms that act only in training; no later step does more for it.

    Args:
        state: With the clock, the model and the algorithms.

    Attributes:
        calls: How often each algorithm ran whose ``match`` is asked, by its key; without ``FIT_END``.
    """

    def __init__(self, state: State) -> None:
        self._state = state
        self.calls: Counter[str] = Counter()
        self._begun_at: tuple[int, int] | None = None  # batches and epochs
        self._handles: list[RemovableHandle] = []
        # Of the layers in the first batch, as they are called; None: in training, with an input that stays as it is.
        self._modes: dict[str, set[bool | None]] = {}
        self._reasons: dict[str, str] = {}  # why layers in training may do nothing
        self._idle: set[str] = set()  # algorithms none of whose layers was called in training there

    def begin(self, keys: list[str]) -> None:
        """Begin to count at the first batch of a training; the keys are those of the state's algorithms."""
        if self._begun_at is not None:
            return
        self._begun_at = self._clock()
        for key, algorithm in zip(keys, self._state.algorithms, strict=True):
            kinds = {one.new for one in algorithm.surgery_report or ()} if algorithm.acts_in_training else ()
            layers = [layer for layer in self._state.model.modules() if type(layer).__name__ in kinds] if kinds else []
            if layers and any(map(_is_compiled, self._state.model.modules())):
                self._modes[key] = {layer.training for layer in layers}  # a hook would be compiled, and again without
            elif layers:
                self._reasons[key] = algorithm.idle_reason
                note = partial(_note, self._modes.setdefault(key, set()))
                self._handles += [layer.register_forward_pre_hook(note) for layer in layers]

    def reset_at_start(self) -> None:
        """Count from 0 if another training begins, as in hosts that set the clock back; replaced layers stay."""
        if self._begun_at is not None and not any(self._clock()):
            self.calls.clear()
            for algorithm in self._state.algorithms:
                if algorithm.acted is not None:
                    algorithm.acted = type(algorithm).acted

    def end_of_first_batch(self) -> Iterator[str]:
        """Remove the hooks, and yield a sentence for each algorithm none of whose layers was called in training."""
        while self._handles:
            self._handles.pop().remove()
        modes_by_key, self._modes = self._modes, {}
        for key, modes in modes_by_key.items():
            if True not in modes:
                self._idle.add(key)
            if not modes:
                yield (
                    f"{key} has no effect: the model called none of its layers in the first batch, for example as it "
                    "reads the weights of a layer instead. Remove it, or let the model call the layer."
                )
            elif None in modes and True not in modes:
                yield f"{key} has no effect in the first batch. {self._reasons[key]}"
            elif True not in modes:
                yield (
                    f"{key} has no effect: its layers were in evaluation mode in the first batch, where they do "
                    "nothing. Let train() of the model put them into training mode."
                )

    def of(self, key: str, algorithm: Algorithm, *, asked: bool) -> tuple[int, str]:
        """Return how much an algorithm has done, and the unit."""
        batches, epochs = (now - begun for now, begun in zip(self._clock(), self._begun_at or (0, 0), strict=True))
        if key in self._idle:
            return 0, "batches"
        if algorithm.surgery_report is not None:
            return len(algorithm.surgery_report), "layers"
        if algorithm.acted is not None or asked:
            return self.calls[key] if algorithm.acted is None else algorithm.acted, algorithm.acted_unit
        return (batches, "batches") if algorithm.runs_at_events().keys() & STEP_EVENTS else (epochs, "epochs")

    @property
    def has_begun(self) -> bool:
        """Whether a batch was trained on."""
        return self._begun_at is not None and self._clock()[0] > self._begun_at[0]

    @property
    def from_start(self) -> bool:
        """Whether the first batch of the training was counted, and not only those after a resume."""
        return self._begun_at == (0, 0)

    def _clock(self) -> tuple[int, int]:
        now = self._state.timestamp
        return int(now.count(TimeUnit.BATCH)), int(now.count(TimeUnit.EPOCH))


def _is_compiled(module: Any) -> bool:
    return module._compiled_call_impl is not None or hasattr(module, "_orig_mod")  # noqa: SLF001


def _note(modes: set[bool | None], layer: Any, inputs: Any) -> None:
    idle = layer.training and inputs and hasattr(layer, "acts_on") and not layer.acts_on(*inputs)
    modes.add(None if idle else layer.training)
