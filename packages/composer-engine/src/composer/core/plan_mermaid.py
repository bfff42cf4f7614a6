"""The drawing of a plan: the loop as a flowchart in the language of Mermaid."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

from composer.core.event import Event

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from composer.core.plan import Entry, Plan

__all__ = ["mermaid_lines"]


class _Loop(NamedTuple):
    """A loop of the drawing: its name in the source, its title, the label of the arrow back, and its parts."""

    name: str
    title: str
    again: str
    parts: Sequence[str | _Loop]


def _parts(*parts: str | _Loop) -> list[str | _Loop]:
    """Return events, work between them and loops; a string has several words, of which those of no event are work."""
    return [word for part in parts for word in (part.split() if isinstance(part, str) else [part])]


_MICROBATCH = _Loop(
    "microbatches",
    "every microbatch",
    "next microbatch",
    _parts(
        "before_forward forward_pass after_forward before_loss loss after_loss before_backward backward_pass",
        "after_backward",
    ),
)
_BATCH = _Loop(
    "batches",
    "every batch",
    "next batch",
    _parts(
        "before_dataloader take_a_batch after_dataloader batch_start before_train_batch",
        _MICROBATCH,
        "after_train_batch optimizer_step batch_end batch_checkpoint",
    ),
)
_EPOCH = _Loop(
    "epochs",
    "every epoch",
    "next epoch",
    _parts(
        "iteration_start epoch_start",
        _BATCH,
        "epoch_end epoch_checkpoint iteration_end iteration_checkpoint",
    ),
)
_EVALUATED = _Loop(
    "evaluated",
    "every batch of an evaluation",
    "next batch",
    _parts(
        "eval_batch_start eval_before_forward forward_pass_of_an_evaluation eval_after_forward eval_batch_end",
    ),
)
_EVALUATION = _Loop("evaluations", "every evaluation", "next data set", _parts("eval_start", _EVALUATED, "eval_end"))
_PREDICTED = _Loop(
    "predicted",
    "every batch of a prediction",
    "next batch",
    _parts(
        "predict_batch_start predict_before_forward forward_pass_of_a_prediction predict_after_forward",
        "predict_batch_end",
    ),
)
_DRAWINGS = (
    _parts("init before_load after_load fit_start", _EPOCH, "fit_end"),
    _parts("eval_standalone_start eval_before_all", _EVALUATION, "eval_after_all eval_standalone_end"),
    _parts("predict_start", _PREDICTED, "predict_end"),
)
_EVENTS = frozenset(Event)
_ENTITIES = str.maketrans(
    {"&": "#amp;", "#": "#35;", ";": "#59;", '"': "#quot;", "<": "#lt;", ">": "#gt;", "`": "#96;"}
)


def mermaid_lines(plan: Plan) -> Iterator[str]:
    """Yield the lines of a flowchart: the events with the components that run there, and the work of the loop.

    Components that run, or are asked, at every event have a box of their own.
    """
    yield "flowchart TD"
    everywhere = plan.keys_everywhere()
    labels = {
        event.value: [_label(entry) for entry in entries if entry.key not in everywhere]
        for event, entries in plan.entries.items()
    }
    for parts in _DRAWINGS:
        nodes, arrows, _, _ = _draw(parts, labels, "    ")
        if any(node.lstrip().startswith("at_") for node in nodes):
            yield from (*nodes, *arrows)
    if everywhere:
        keys = (key.translate(_ENTITIES) for key in everywhere)
        yield f'    everywhere["{"<br/>".join(["at every event", *keys])}"]'


def _draw(
    parts: Sequence[str | _Loop], labels: Mapping[str, Sequence[str]], indent: str
) -> tuple[list[str], list[str], str, str]:
    """Return the lines of the nodes and of the arrows between some parts, and the names of the first and last node."""
    nodes, arrows, ends = [], [], []
    for part in parts:
        if isinstance(part, _Loop):
            inner_nodes, inner_arrows, first, last = _draw(part.parts, labels, f"{indent}    ")
            nodes += [f'{indent}subgraph {part.name}["{part.title}"]', *inner_nodes, f"{indent}end"]
            arrows += [*inner_arrows, f'    {last} -->|"{part.again}"| {first}']
            ends.append((first, last))
        elif part not in _EVENTS:
            nodes.append(f'{indent}do_{part}(["{part.replace("_", " ")}"])')
            ends.append((f"do_{part}", f"do_{part}"))
        elif labels.get(part):
            nodes.append(f'{indent}at_{part}["{"<br/>".join([part, *labels[part]])}"]')
            ends.append((f"at_{part}", f"at_{part}"))
    forward = [f"    {before} --> {after}" for (_, before), (after, _) in pairwise(ends)]
    return nodes, [*forward, *arrows], ends[0][0] if ends else "", ends[-1][1] if ends else ""


def _label(entry: Entry) -> str:
    often = "" if entry.every is None else f", every {entry.every}"
    return f"{entry.key} ({entry.what}{often})".translate(_ENTITIES)
