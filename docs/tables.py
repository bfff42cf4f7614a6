"""Write the tables in the guides that follow from what algorithms declare.

    python docs/tables.py

A table stands between ``<!-- table: NAME -->`` and ``<!-- end -->`` and is never written by hand. A test compares the
guides with what this program would write.
"""

from __future__ import annotations

import inspect
import re
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING

import composer.algorithms
from composer.core import Algorithm, Event, Stage, explain
from composer.core.conflicts import ExclusiveResource
from composer.core.event import PLACES

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

GUIDES = Path(__file__).parent / "guides"
TABLE = re.compile(r"(<!-- table: (?P<name>\S+) -->\n).*?(<!-- end -->)", re.DOTALL)

STATE = {
    "max_duration": "`max_duration`",
    "dataloader_len": "`dataloader_len`",
    "optimizers": "`optimizers`",
    "train_dataloader": "`train_dataloader`",
    "precision": "`precision`",
    "timestamp": "`timestamp`",
}
"""What a loop has to put into the state because an algorithm reads it; model, batch, outputs and loss it has anyway."""

MEETINGS = {
    (Event.INIT, Stage.ARCHITECTURE): (
        "For some. List Factorize behind GatedLinearUnits, which looks for whole layers, not factors. Factorize and "
        "BlurPool wrap one another: weights saved with one order have other names than with the other. List NoOpModel "
        "last: those behind it find nothing. For the rest it does not."
    ),
    (Event.INIT, Stage.NORMALIZATION): "No: one is about norms, the other about convolutions.",
    (Event.INIT, Stage.PRECISION): "No: group norms and layer norms are different layers.",
    (Event.AFTER_LOAD, Stage.PRECISION): "No: group norms and layer norms are different layers.",
    (Event.FIT_START, Stage.AUGMENT): "Yes: images are augmented in the order of the list.",
    (Event.FIT_START, Stage.WEIGHTS): "No: what is frozen and what is averaged do not depend on each other.",
    (Event.AFTER_DATALOADER, Stage.RESHAPE): (
        "Yes, the last of the list runs first. ColOut and ProgressiveResizing: list ColOut first, and the small image "
        "is what it drops rows of. Alibi and SeqLengthWarmup: list SeqLengthWarmup first, and its lengths are those "
        "that the model sees."
    ),
    (Event.AFTER_DATALOADER, Stage.AUGMENT): (
        "Yes, the last of the list runs first. List CutOut first: what it blanks out then stays blank."
    ),
    (Event.BEFORE_FORWARD, Stage.MIX): "Little: either blends what the other has blended, and labels follow.",
    (Event.BEFORE_LOSS, Stage.MIX): "No: labels are blended as the samples were, in the same order.",
    (Event.AFTER_LOSS, Stage.LOSS): "Two that blend losses are warned about: set `interpolate_loss=False` for one.",
    (Event.EPOCH_END, Stage.WEIGHTS): "No: freezing changes no weight.",
    (Event.FIT_END, Stage.WEIGHTS): "No: LayerFreezing only checks there that it has frozen something.",
}
"""Whether the order of the list matters to those who meet at an event in one stage."""

TWICE = {
    "AugMix": "A batch is augmented twice; a dataset's second is left out with a `NoEffectWarning`.",
    "ColOut": "More rows and columns go; a dataset's second is left out with a `NoEffectWarning`.",
    "CutMix": "Boxes from two partners are pasted.",
    "CutOut": "More squares are blanked out.",
    "GradientClipping": "By norm and by value, for instance; the last of the list clips first.",
    "LabelSmoothing": "Labels are smoothed by both.",
    "MixUp": "Samples are blended with two partners.",
    "RandAugment": "A batch is augmented twice; a dataset's second is left out with a `NoEffectWarning`.",
}
"""What two of a class do, of those that may."""


def main() -> None:
    """Write all tables."""
    for path in GUIDES.glob("*.md"):
        text = path.read_text()
        if (written := with_tables(text)) != text:
            path.write_text(written)


def with_tables(text: str) -> str:
    """Return a guide with its tables as they have to be."""
    return TABLE.sub(lambda found: f"{found[1]}{TABLES[found['name']]()}{found[3]}", text)


def algorithms() -> list[type[Algorithm]]:
    """Return the algorithms of this project, by name."""
    named = (getattr(composer.algorithms, name) for name in composer.algorithms.__all__)
    kinds = [kind for kind in named if inspect.isclass(kind) and issubclass(kind, Algorithm)]
    return sorted(kinds, key=lambda kind: kind.__name__.lower())


def needs() -> str:
    """Return a table of what each algorithm needs from the loop."""
    return _table(
        ("algorithm", "events", "in the state"),
        (
            (
                kind.__name__,
                ", ".join(f"`{event.value}`" for event in Event if event in kind.runs_at),
                ", ".join(text for word, text in STATE.items() if word in kind.reads),
            )
            for kind in algorithms()
        ),
    )


def events() -> str:
    """Return a table of where each event belongs, and who needs it."""
    return _table(
        ("event", "where", "needed by"),
        (
            (f"`{event.value}`", PLACES[event], ", ".join(k.__name__ for k in algorithms() if event in k.runs_at))
            for event in Event
        ),
    )


def refused() -> str:
    """Return a table of what only one algorithm can have, who wants it, and what to do about a second."""
    remedies = {
        str(owned): owned.remedy for kind in algorithms() for owned in kind.owns if isinstance(owned, ExclusiveResource)
    }
    owners = owners_of()
    return _table(
        ("only one can have", "who wants it", "what to do"),
        ((words, ", ".join(owners[words]), remedies[words]) for words in sorted(owners, key=lambda one: owners[one])),
    )


def owners_of() -> Mapping[str, list[str]]:
    """Return who owns what, by what it is."""
    owners: dict[str, list[str]] = defaultdict(list)
    for kind in algorithms():
        for words in sorted(kind.owns):
            owners[str(words)].append(kind.__name__)
    return owners


def meetings() -> str:
    """Return a table of who meets in one stage, where the order of the list decides, and whether that matters."""
    return _table(
        ("at", "stage", "who", "does the order of the list matter?"),
        (
            (f"`{event.value}`", stage.name.lower(), ", ".join(names), MEETINGS[event, stage])
            for (event, stage), names in who_meets().items()
        ),
    )


def who_meets() -> Mapping[tuple[Event, Stage], list[str]]:
    """Return where two or more algorithms that may run together are of one stage, and which."""
    found: dict[tuple[Event, Stage], list[type[Algorithm]]] = defaultdict(list)
    for event in Event:
        for stage in Stage:
            for kind in algorithms():
                if kind.runs_at.get(event) is stage:
                    found[event, stage].append(kind)
    return {
        place: [kind.__name__ for kind in kinds]
        for place, kinds in found.items()
        if any(not one.owns & other.owns for one in kinds for other in kinds if one is not other)
    }


def twice() -> str:
    """Return a table of those that may be there twice."""
    return _table(("twice", "then"), ((kind.__name__, TWICE[kind.__name__]) for kind in algorithms() if not kind.owns))


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    return "".join(_lines(head, rows))


def _lines(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> Iterator[str]:
    yield f"| {' | '.join(head)} |\n"
    yield f"|{'---|' * len(head)}\n"
    for row in rows:
        yield f"| {' | '.join(row)} |\n".replace("|  |", "| |")


def drawing() -> str:
    """Return the drawing of a recipe."""
    recipe = [composer.algorithms.BlurPool(), composer.algorithms.MixUp(), composer.algorithms.LabelSmoothing()]
    return f"```mermaid\n{explain(recipe).to_mermaid()}\n```\n"


TABLES = {
    "drawing": drawing,
    "needs": needs,
    "events": events,
    "refused": refused,
    "meetings": meetings,
    "twice": twice,
}


if __name__ == "__main__":
    main()
