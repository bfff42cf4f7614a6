"""Measure the events of a step without a registered component, and with an algorithm whose body is empty.

25 algorithms and 25 callbacks are registered for other events. Dictionary lookups are the lower bound.
"""

from __future__ import annotations

import argparse
import json
import timeit
from pathlib import Path

from composer.core import Algorithm, Callback, Engine, Event, Logger, Stage, State

STEP = (
    Event.BEFORE_DATALOADER,
    Event.AFTER_DATALOADER,
    Event.BATCH_START,
    Event.BEFORE_TRAIN_BATCH,
    Event.BEFORE_FORWARD,
    Event.AFTER_FORWARD,
    Event.BEFORE_LOSS,
    Event.AFTER_LOSS,
    Event.BEFORE_BACKWARD,
    Event.AFTER_BACKWARD,
    Event.AFTER_TRAIN_BATCH,
    Event.BATCH_END,
    Event.BATCH_CHECKPOINT,
)


class Elsewhere(Algorithm):
    """Runs at an event that is not part of a step."""

    runs_at = {Event.FIT_START: Stage.ARCHITECTURE}

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        """Do nothing."""


class AtEveryEvent(Algorithm):
    """Matches every event."""

    def match(self, event: Event, state: State) -> bool:
        """Return True."""
        return True

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        """Do nothing."""


class AtEpochs(Callback):
    """Runs at an event that is not part of a step."""

    def epoch_end(self, state: State, logger: Logger) -> None:
        """Do nothing."""


def microseconds(engine: Engine) -> float:
    """Return the microseconds of the events of one step."""
    run_event = engine.run_event
    run_event("fit_start")

    def step() -> None:
        for event in STEP:
            run_event(event)

    step()
    return min(timeit.repeat(step, number=20_000, repeat=7)) / 20_000 * 1e6


def main() -> None:
    """Measure and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="file to write the figures to")
    arguments = parser.parse_args()

    table = dict.fromkeys(STEP, ())
    floor = min(timeit.repeat(lambda: [table[event] for event in STEP], number=20_000, repeat=7)) / 20_000 * 1e6
    crowd = State(model=None, algorithms=[Elsewhere() for _ in range(25)], callbacks=[AtEpochs() for _ in range(25)])
    figures = {
        "thirteen dictionary lookups": floor,
        "thirteen events, nothing registered": microseconds(Engine(State(model=None))),
        "thirteen events, 25 algorithms and 25 callbacks at other events": microseconds(Engine(crowd)),
        "thirteen events, an algorithm that matches each": microseconds(
            Engine(State(model=None), algorithms=AtEveryEvent())
        ),
    }
    for name, value in figures.items():
        print(f"{value:>7.2f} µs  {name}")
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
