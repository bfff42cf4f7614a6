"""How a plan is drawn: the loop as a flowchart in the language of Mermaid."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, TypeAlias

import attrs

from composer.core.event import Event

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from composer.core.plan import Entry, Plan

__all__ = ["mermaid_lines"]


@attrs.frozen
class _Loop:
    """A part of the drawing that runs again and again.

    Args:
        name: What it is called in the drawing's source.
        title: What stands above it.
        again: What stands at the arrow back to its beginning.
        parts: What is in it: events, work (a text) and loops.
    """

    name: str
    title: str
    again: str
    parts: tuple[_Part, ...]


_Part: TypeAlias = "Event | str | _Loop"

_MICROBATCH = _Loop(
    "microbatches",
    "every microbatch",
    "next microbatch",
    (
        Event.BEFORE_FORWARD,
        "forward pass",
        Event.AFTER_FORWARD,
        Event.BEFORE_LOSS,
        "loss",
        Event.AFTER_LOSS,
        Event.BEFORE_BACKWARD,
        "backward pass",
        Event.AFTER_BACKWARD,
    ),
)
_BATCH = _Loop(
    "batches",
    "every batch",
    "next batch",
    (
        Event.BEFORE_DATALOADER,
        "take a batch",
        Event.AFTER_DATALOADER,
        Event.BATCH_START,
        Event.BEFORE_TRAIN_BATCH,
        _MICROBATCH,
        Event.AFTER_TRAIN_BATCH,
        "optimizer step",
        Event.BATCH_END,
        Event.BATCH_CHECKPOINT,
    ),
)
_EPOCH = _Loop(
    "epochs",
    "every epoch",
    "next epoch",
    (
        Event.ITERATION_START,
        Event.EPOCH_START,
        _BATCH,
        Event.EPOCH_END,
        Event.EPOCH_CHECKPOINT,
        Event.ITERATION_END,
        Event.ITERATION_CHECKPOINT,
    ),
)
_TRAINING: tuple[_Part, ...] = (
    Event.INIT,
    Event.BEFORE_LOAD,
    Event.AFTER_LOAD,
    Event.FIT_START,
    _EPOCH,
    Event.FIT_END,
)
_EVALUATION: tuple[_Part, ...] = (
    Event.EVAL_STANDALONE_START,
    Event.EVAL_BEFORE_ALL,
    _Loop(
        "evaluations",
        "every evaluation",
        "next data set",
        (
            Event.EVAL_START,
            _Loop(
                "evaluated",
                "every batch of an evaluation",
                "next batch",
                (
                    Event.EVAL_BATCH_START,
                    Event.EVAL_BEFORE_FORWARD,
                    "forward pass of an evaluation",
                    Event.EVAL_AFTER_FORWARD,
                    Event.EVAL_BATCH_END,
                ),
            ),
            Event.EVAL_END,
        ),
    ),
    Event.EVAL_AFTER_ALL,
    Event.EVAL_STANDALONE_END,
)
_PREDICTION: tuple[_Part, ...] = (
    Event.PREDICT_START,
    _Loop(
        "predicted",
        "every batch of a prediction",
        "next batch",
        (
            Event.PREDICT_BATCH_START,
            Event.PREDICT_BEFORE_FORWARD,
            "forward pass of a prediction",
            Event.PREDICT_AFTER_FORWARD,
            Event.PREDICT_BATCH_END,
        ),
    ),
    Event.PREDICT_END,
)
_ENTITIES = {"&": "#amp;", "#": "#35;", ";": "#59;", '"': "#quot;", "<": "#lt;", ">": "#gt;", "`": "#96;"}


def mermaid_lines(plan: Plan) -> Iterator[str]:
    """Yield the lines of a flowchart: the work of the loop, and each event at which anything runs with what runs there.

    What runs, or is asked, at every event has a box of its own.
    """
    yield "flowchart TD"
    everywhere = plan.keys_everywhere()
    labels = {
        event: [_label(entry) for entry in entries if entry.key not in everywhere]
        for event, entries in plan.entries.items()
    }
    drawing = _Drawing({event: texts for event, texts in labels.items() if texts})
    for parts in (_TRAINING, _EVALUATION, _PREDICTION):
        if drawing.has_events(parts):
            yield from drawing.nodes(parts, "    ")
            yield from drawing.arrows(parts)
    if everywhere:
        yield f'    everywhere["{"<br/>".join(["at every event", *map(_escaped, everywhere)])}"]'


class _Drawing:
    """The parts of the loop that are drawn: those where something runs, and the work between them."""

    def __init__(self, labels: dict[Event, list[str]]) -> None:
        self._labels = labels

    def has_events(self, parts: Sequence[_Part]) -> bool:
        return any(
            self.has_events(part.parts) if isinstance(part, _Loop) else isinstance(part, Event) and part in self._labels
            for part in parts
        )

    def nodes(self, parts: Sequence[_Part], indent: str) -> Iterator[str]:
        for part in self._drawn(parts):
            if isinstance(part, _Loop):
                yield f'{indent}subgraph {part.name}["{part.title}"]'
                yield from self.nodes(part.parts, f"{indent}    ")
                yield f"{indent}end"
            elif isinstance(part, Event):
                label = "<br/>".join(_escaped(text) for text in [part.value, *self._labels[part]])
                yield f'{indent}{_name(part)}["{label}"]'
            else:
                yield f'{indent}{_name(part)}(["{part}"])'

    def arrows(self, parts: Sequence[_Part]) -> Iterator[str]:
        drawn = self._drawn(parts)
        for before, after in pairwise(drawn):
            yield f"    {self._last(before)} --> {self._first(after)}"
        for part in drawn:
            if isinstance(part, _Loop):
                yield from self.arrows(part.parts)
                yield f'    {self._last(part)} -->|"{part.again}"| {self._first(part)}'

    def _drawn(self, parts: Sequence[_Part]) -> list[_Part]:
        # The value of an event is a text, too, but not one that says what is worked.
        return [part for part in parts if not isinstance(part, Event) or part in self._labels]

    def _first(self, part: _Part) -> str:
        return self._first(self._drawn(part.parts)[0]) if isinstance(part, _Loop) else _name(part)

    def _last(self, part: _Part) -> str:
        return self._last(self._drawn(part.parts)[-1]) if isinstance(part, _Loop) else _name(part)


def _label(entry: Entry) -> str:
    often = "" if entry.every is None else f", every {entry.every}"
    return f"{entry.key} ({entry.what}{often})"


def _name(part: Event | str) -> str:
    return f"at_{part.value}" if isinstance(part, Event) else f"do_{part.replace(' ', '_')}"


def _escaped(text: str) -> str:
    return "".join(_ENTITIES.get(character, character) for character in text)
