"""Write the tables and the drawing that are derived from the declarations of algorithms and from measurements.

    python docs/tables.py

A table is between ``<!-- table: NAME -->`` or ``<!-- table: NAME ARGUMENT … -->`` and ``<!-- end -->`` and is never
edited manually. A test compares the pages with the output of this program. The measurements are the studies in
``docs/evidence``, a folder for each task, as ``composer.ablation.ablate`` has written them.
"""

from __future__ import annotations

import inspect
import re
import textwrap
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING

import attrs

import composer.algorithms
import composer.callbacks
import composer.core
import composer.distributed
import composer.functional
import composer.optim
from composer.ablation import Study
from composer.compat.table import ARGUMENTS, NAMES, UNAVAILABLE, parse_home
from composer.core import Algorithm, Event, Stage, Time, explain
from composer.core.declarations import ALWAYS_SERVED, OPTIONAL_EVENTS, ExclusiveResource, ServedFields, fields_at

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from composer.ablation.statistics import Difference
    from composer.ablation.table import Row

DOCS = Path(__file__).parent
PLAN = DOCS / "guides" / "plan.svg"
PAGES = sorted(
    path for folder in ("evidence", "guides", "how_it_works", "methods") for path in (DOCS / folder).glob("*.md")
)
TABLE = re.compile(r"(<!-- table: (?P<name>\S+)(?P<arguments>[^>]*) -->\n).*?(<!-- end -->)", re.DOTALL)

STATE = {
    "max_duration": "`max_duration`",
    "dataloader_len": "`dataloader_len`",
    "optimizers": "`optimizers`",
    "train_dataloader": "`train_dataloader`",
    "precision": "`precision`",
    "timestamp": "`timestamp`",
}
"""Fields that a loop must set for the algorithms that read them, besides model, batch, outputs and loss."""

HOMES = (
    composer.algorithms,
    composer.optim,
    composer.core,
    composer.functional,
    composer.callbacks,
    composer.distributed,
)
"""The modules of the methods that have a card."""

TASKS = {
    "fashion_mnist_each": "Fashion-MNIST",
    "few_labels": "few labels",
    "language_model_each": "language model",
    "tables_each": "tables",
}
"""The tasks of the studies of single methods."""

CARDS_OF_ARMS = {
    "CautiousUpdates": "DecoupledAdamW",
    "WarmupStableDecay": "WarmupStableDecayScheduler",
}
"""The cards of arms that have another name."""

MEETINGS = {
    (Event.INIT, Stage.ARCHITECTURE): (
        "For some. List Factorize after GatedLinearUnits, which replaces complete layers, not factors. Factorize and "
        "BlurPool wrap each other's layers: the names of saved weights depend on the order. List NoOpModel "
        "last: algorithms after it find nothing to change. DepthStacking copies what those before it have drawn. For "
        "the others it does not matter."
    ),
    (Event.INIT, Stage.NORMALIZATION): "No: one changes norms, the other convolutions.",
    (Event.INIT, Stage.PRECISION): "No: group norms, layer norms and the head are different layers.",
    (Event.INIT, Stage.LAYOUT): "No: one changes the format of weights, the other when activations are computed.",
    (Event.AFTER_LOAD, Stage.PRECISION): "No: group norms and layer norms are different layers.",
    (Event.FIT_START, Stage.ARCHITECTURE): "No: DepthStacking only checks whether the model has blocks.",
    (Event.FIT_START, Stage.AUGMENT): "Yes: images are augmented in the order of the list.",
    (Event.FIT_START, Stage.WEIGHTS): "No: freezing and averaging do not depend on each other.",
    (Event.BATCH_START, Stage.ARCHITECTURE): (
        "In the batch of the growth. List DepthStacking first, so that the drop rates are those of the new depth."
    ),
    (Event.AFTER_DATALOADER, Stage.RESHAPE): (
        "Yes, the last of the list runs first. ColOut and ProgressiveResizing: if ColOut is first, it removes rows of "
        "the small image. Alibi and SeqLengthWarmup: if SeqLengthWarmup is first, the model receives sequences of its "
        "lengths."
    ),
    (Event.AFTER_DATALOADER, Stage.AUGMENT): (
        "Yes, the last of the list runs first. List CutOut first, so that the squares stay blank."
    ),
    (Event.AFTER_DATALOADER, Stage.MIX): "Little: with masks or boxes, each mixes the result of the other.",
    (Event.BEFORE_FORWARD, Stage.MIX): "Little: each blends the result of the other, and the labels accordingly.",
    (Event.BEFORE_LOSS, Stage.MIX): "No: labels are blended in the same order as the samples.",
    (
        Event.AFTER_LOSS,
        Stage.LOSS,
    ): "Two that interpolate the loss give a warning: set `interpolate_loss=False` for one.",
    (Event.AFTER_LOSS, Stage.LABEL): "No: one restores labels, the other adds the loss of the teacher.",
    (
        Event.BATCH_END,
        Stage.WEIGHTS,
    ): "When SWA ends, or DiLoCo takes an outer step: those after it see other weights.",
    (Event.EPOCH_END, Stage.WEIGHTS): "At an outer step of DiLoCo: those after it see other weights.",
    (Event.FIT_END, Stage.AUGMENT): "No: each takes out of the dataset what it has added.",
    (Event.FIT_END, Stage.WEIGHTS): "At a last outer step or stop of DiLoCo: those after it see other weights.",
}
"""Whether the order of the list matters for algorithms that share a stage at an event."""

TWICE = {
    "AugMix": "A batch is augmented twice; a dataset's second is left out with a `NoEffectWarning`.",
    "ColOut": "More rows and columns are removed; a dataset's second is left out with a `NoEffectWarning`.",
    "CutMix": "Boxes from two partners are pasted.",
    "Augment": "Each is applied, the last of the list first.",
    "DepthStacking": "The model grows several times, each at its own time.",
    "CutOut": "More squares are blanked out.",
    "Distillation": "Each adds the loss of its teacher; the first of the list scales that of the second, too.",
    "GradientClipping": "For example by norm and by value; the last of the list clips first.",
    "LabelSmoothing": "Labels are smoothed by both.",
    "MixUp": "Samples are blended with two partners.",
    "PostHocEMA": "Each saves its snapshots: give each its own folder.",
    "RandAugment": "A batch is augmented twice; a dataset's second is left out with a `NoEffectWarning`.",
}
"""The effect of two algorithms of one class, if this is allowed."""


def main() -> None:
    """Write all tables."""
    for path in PAGES:
        text = path.read_text()
        if (written := with_tables(text)) != text:
            path.write_text(written)
    PLAN.write_text(plan_svg())


def with_tables(text: str) -> str:
    """Return the content of a page with updated tables."""

    def write(found: re.Match[str]) -> str:
        return f"{found[1]}{TABLES[found['name']](*found['arguments'].split())}{found[4]}"

    return TABLE.sub(write, text)


def algorithms() -> list[type[Algorithm]]:
    """Return the algorithms of this project, sorted by name."""
    named = (getattr(composer.algorithms, name) for name in composer.algorithms.__all__)
    kinds = [kind for kind in named if inspect.isclass(kind) and issubclass(kind, Algorithm)]
    return sorted(kinds, key=lambda kind: kind.__name__.lower())


def needs() -> str:
    """Return a table of the events and fields that each algorithm needs from the loop."""
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
    """Return a table of where each event belongs, and of the algorithms that need it."""
    return _table(
        ("event", "where", "needed by"),
        (
            (f"`{event.value}`", event.place, ", ".join(k.__name__ for k in algorithms() if event in k.runs_at))
            for event in Event
        ),
    )


def owners() -> str:
    """Return a table of exclusive resources, their owners, and advice."""
    remedies = {
        str(owned): owned.remedy for kind in algorithms() for owned in kind.owns if isinstance(owned, ExclusiveResource)
    }
    by_resource = owners_of()
    return _table(
        ("exclusive resource", "owned by", "advice"),
        (
            (words, ", ".join(names), remedies[words])
            for words, names in sorted(by_resource.items(), key=lambda one: one[1])
        ),
    )


def owners_of() -> Mapping[str, list[str]]:
    """Return the owners of each exclusive resource by its name."""
    owners: dict[str, list[str]] = defaultdict(list)
    for kind in algorithms():
        for words in sorted(kind.owns):
            owners[str(words)].append(kind.__name__)
    return owners


def same_stage() -> str:
    """Return a table of algorithms that share a stage, and whether the order of the list matters for them."""
    return _table(
        ("event", "stage", "algorithms", "does the order of the list matter?"),
        (
            (f"`{event.value}`", stage.name.lower(), ", ".join(names), MEETINGS[event, stage])
            for (event, stage), names in same_stage_algorithms().items()
        ),
    )


def same_stage_algorithms() -> Mapping[tuple[Event, Stage], list[str]]:
    """Return the algorithms that share a stage at an event and may run together."""
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
    """Return a table of algorithms that may be used twice."""
    return _table(
        ("algorithm", "effect of two"),
        ((kind.__name__, TWICE[kind.__name__]) for kind in algorithms() if not kind.owns),
    )


def studies() -> Mapping[str, Study]:
    """Return the studies by the name of the task."""
    return {path.parent.name: Study.load(path.parent) for path in sorted(DOCS.glob("evidence/*/results.jsonl"))}


def study(task: str) -> str:
    """Return the table of a study, with what a reader must consider."""
    return f"\n{studies()[task].to_markdown()}\n"


def errors(task: str, arms: str = "all") -> str:
    """Return a table of the errors of arms, for a study whose metric is an accuracy: all, of one method or several."""
    one = studies()[task]
    baseline, *others = one.rows
    others = [row for row in others if arms == "all" or (len(row.arm) == 1) == (arms == "single")]
    remaining = 1 - baseline.metric
    rough = "~" if one.settings.is_rough else ""
    return _table(
        ("trained with", "errors", "fewer errors than the baseline", "time relative to the baseline"),
        (
            ("baseline", f"{100 * remaining:.2f} %", "", ""),
            *(
                (
                    row.label,
                    f"{100 * (1 - row.metric):.2f} %",
                    _interval(row.difference, "{:z.0f} %", 100 / remaining),
                    _interval(row.time_ratio, rough + "{:.2f}"),
                )
                for row in others
                if row.metric is not None
            ),
        ),
    )


def trials(task: str) -> str:
    """Return a table of the trials by which settings were selected, on data for validation."""
    one = studies()[task]
    return _table(
        ("settings", f"{one.settings.metric.removeprefix('eval/')} on validation data", "difference", "relative time"),
        (
            (
                ", ".join(f"`{name}`" for name in row.arm) or "where the search began",
                f"{row.metric:.4g}",
                _interval(row.difference, "{:+.2g}"),
                "" if row.time_ratio is None else f"{row.time_ratio.mean:.2f}",
            )
            for row in one.rows
            if row.metric is not None
        ),
    )


def differences(task: str) -> str:
    """Return a table of the final metric of each arm and of its difference to the baseline's."""
    one = studies()[task]
    rough = "~" if one.settings.is_rough else ""
    return _table(
        ("trained with", one.settings.metric.removeprefix("eval/"), "difference", "time relative to the baseline"),
        (
            (
                row.label,
                f"{row.metric:.4g}",
                _interval(row.difference, "{:+.3g}"),
                _interval(row.time_ratio, rough + "{:.2f}"),
            )
            for row in one.rows
            if row.metric is not None
        ),
    )


def speed(task: str) -> str:
    """Return a table of the final metric of each arm and of the time to the baseline's final one."""
    one = studies()[task]
    rough = "~" if one.settings.is_rough else ""
    name = one.settings.metric.removeprefix("eval/")
    return _table(
        ("trained with", name, "time to the baseline's final one, relative", "time relative to the baseline"),
        (
            (
                row.label,
                f"{row.metric:.4g}",
                "" if not row.arm else rough + f"{1 / row.speed_up:.2f}" if row.speed_up else "not reached",
                _interval(row.time_ratio, rough + "{:.2f}"),
            )
            for row in one.rows
            if row.metric is not None
        ),
    )


def environment(task: str) -> str:
    """Return a table of the machine and the versions of a study."""
    measured = studies()[task].settings.environment
    hidden = {"hostname", "device_memory_gib", "num_devices"}
    facts = {key: value for part in measured.values() for key, value in part.items() if key not in hidden}
    facts = {key: value for key, value in facts.items() if value is not None}
    return _table(tuple(key.replace("_", " ") for key in facts), [tuple(str(value) for value in facts.values())])


def measured(kind: str) -> str:
    """Return a table of what the studies measured for an algorithm alone."""
    return _table(
        ("task", "settings", "metric", "difference", "p (Holm)", "relative time"),
        (
            (
                f"[{TASKS.get(task, task)}](../evidence/{task.removesuffix('_each')}.md)",
                f"`{_changed_settings(kind, text) if text.startswith(f'{kind}(') else text}`",
                one.settings.metric.removeprefix("eval/"),
                _interval(row.difference, "{:+.3g}"),
                "" if row.adjusted_p is None else f"{row.adjusted_p:.2g}",
                _interval(row.time_ratio, "~{:.2f}" if one.settings.is_rough else "{:.2f}"),
            )
            for task, one in studies().items()
            if task in TASKS
            for row in one.rows
            if len(row.arm) == 1
            and row.difference is not None
            and card_of(row.arm[0], one) == kind
            and (text := one.settings.algorithms[row.arm[0]])
        ),
    )


def effects() -> str:
    """Return a table of the effect of each method alone in each task: on the metric, the time and the memory."""
    found: dict[str, dict[str, str]] = defaultdict(dict)
    for task, one in studies().items():
        baseline, *others = one.rows
        for row in others:
            if len(row.arm) == 1 and row.difference is not None:
                cells = found[card_of(row.arm[0], one)]  # Flips and Augment are two settings of one method
                cells[task] = "; ".join(
                    [*filter(None, [cells.get(task)]), f"{_verdict(one, row)}: {_effect(one, row, baseline)}"]
                )
    cards = {
        path.read_text().partition("\n")[0].removeprefix("# "): path.name for path in sorted(DOCS.glob("methods/*.md"))
    }
    tasks = [task for task in TASKS if any(task in cells for cells in found.values())]
    return _table(
        ("method", *(f"[{TASKS[task]}]({task.removesuffix('_each')}.md)" for task in tasks)),
        (
            (f"[{name}](../methods/{cards[name]})", *(cells.get(task, "") for task in tasks))
            for name, cells in sorted(found.items(), key=lambda item: item[0].lower())
            if name in cards  # a shorter training is no method
        ),
    )


def card_of(name: str, one: Study) -> str:
    """Return the title of the card of a method of a study."""
    kind = one.settings.algorithms[name].partition("(")[0]
    return kind if kind in composer.algorithms.__all__ else CARDS_OF_ARMS.get(name, name)


def _verdict(study: Study, row: Row) -> str:
    """Return whether the method improves the metric, with a p-value that is adjusted for the number of methods."""
    if row.adjusted_p is None or row.adjusted_p >= 0.05:
        return "unclear"
    return "**helps**" if study.settings.sign * row.difference.mean > 0 else "costs"


def _effect(study: Study, row: Row, baseline: Row) -> str:
    rough = "~" if study.settings.is_rough else ""
    parts = [_interval(row.difference, "{:+.2g}"), f"{_interval(row.time_ratio, rough + '{:.2f}')} × time"]  # noqa: RUF001
    if row.memory and baseline.memory:
        parts.append(f"{row.memory / baseline.memory:.2f} × memory")  # noqa: RUF001
    return ", ".join(parts)


def defaults(kind: str) -> str:
    """Return the call of a method with its defaults, and the names of settings without one."""
    settings = [
        name if default in (attrs.NOTHING, inspect.Parameter.empty) else f"{name}={_as_argument(default)}"
        for name, default in settings_of(kind).items()
    ]
    call = f"{kind}({', '.join(settings)})"
    return "```text\n" + "\n".join(textwrap.wrap(call, 100, subsequent_indent="    ")) + "\n```\n"


def settings_of(kind: str) -> dict[str, object]:
    """Return the defaults of the settings of a method: an algorithm, optimizer, schedule, data set or callback."""
    found = next(getattr(module, kind) for module in HOMES if kind in module.__all__)
    if attrs.has(found):
        return {field.name: field.default for field in attrs.fields(found) if field.init}
    return {name: one.default for name, one in inspect.signature(found).parameters.items()}


def _as_argument(value: object) -> str:
    if isinstance(value, tuple) and all(inspect.isclass(one) for one in value):
        return f"({', '.join(one.__name__ for one in value)})"
    return f'"{value}"' if isinstance(value, (Time, str)) else repr(value)


def _changed_settings(kind: str, text: str) -> str:
    """Return the description of an algorithm without the settings that have their defaults."""
    fields = attrs.fields_dict(getattr(composer.algorithms, kind))
    settings = re.split(rf"(?:^|, )(?=(?:{'|'.join(fields)})=)", text.removeprefix(f"{kind}(").removesuffix(")"))
    changed = [
        re.sub(r"(?:object of|class|function) (?:\w+\.)*", "", re.sub(r"<class '([\w.]+)'>", r"class \1", one))
        for one in settings
        if one and str(fields[one.partition("=")[0]].default) != one.partition("=")[2]
    ]
    return f"{kind}({', '.join(changed)})"


def former_names() -> str:
    """Return a table of the former names that are elsewhere in this library."""
    return _table(("in Composer", "names", "here"), _former_names(available=True))


def removed() -> str:
    """Return a table of the former names that are not available, with what to use instead."""
    return _table(("in Composer", "names", "instead"), _former_names(available=False))


def _former_names(available: bool) -> Iterator[tuple[str, str, str]]:
    for places, homes in NAMES.items():
        for home, names in homes.items():
            module, advice = parse_home(home)
            if (module not in {None, UNAVAILABLE}) == available:
                listed = [name.replace("=", "` → `") for name in names if name != "*"]
                shown = ", ".join(f"`{name}`" for name in listed) or "all"
                yield f"`{places}`", shown, advice or f"`{module}`"


def removed_arguments() -> str:
    """Return a table of arguments that are not accepted."""
    return _table(
        ("argument in Composer", "here"),
        ((f"`{called}({name}=…)`", text) for called, names in ARGUMENTS.items() for name, text in names.items()),
    )


def _interval(difference: Difference | None, form: str, scale: float = 1.0) -> str:
    if difference is None:
        return ""
    mean = form.format(scale * difference.mean)
    if difference.low is None:
        return mean
    return f"{mean} ({form.format(scale * difference.low)} to {form.format(scale * difference.high)})"


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    return "".join(_lines(head, rows))


def _lines(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> Iterator[str]:
    yield f"| {' | '.join(head)} |\n"
    yield f"|{'---|' * len(head)}\n"
    for row in rows:
        yield f"| {' | '.join(row)} |\n".replace("|  |", "| |")


def plan_svg() -> str:
    """Return the drawing of the plan of a recipe."""
    kinds = [getattr(composer.algorithms, name) for name in ("BlurPool", "MixUp", "LabelSmoothing", "EMA")]
    return f"{explain([kind() for kind in kinds]).to_svg()}\n"


def hosts() -> str:
    """Return a table of the algorithms in each host, with the fields that a host does not serve."""
    served = _served_by_hosts()
    rows = ((kind.__name__, *(_support(kind, one) for one in served)) for kind in algorithms())
    return _table(("algorithm", *(one.host for one in served)), rows)


def _support(kind: type[Algorithm], serves: ServedFields) -> str:
    missing = {
        field
        for event in {*kind.runs_at} - OPTIONAL_EVENTS
        for needed, by_event in ((kind.reads, serves.readable), (kind.writes, serves.writable))
        for field in fields_at(needed, event) - ALWAYS_SERVED - by_event.get(event, frozenset())
        if not (field.startswith("batch.") and "batch" in by_event.get(event, frozenset()))
    }
    if "train_dataloader" in missing and "batch" in inspect.signature(kind).parameters:
        return "with `batch=True`"
    return f"no: {', '.join(f'`{field}`' for field in sorted(missing))}" if missing else "yes"


def _served_by_hosts() -> list[ServedFields]:
    """Return what the hosts serve with the usual settings."""
    import tempfile  # noqa: PLC0415  (only this table needs the hosts)

    import lightning  # noqa: PLC0415
    import torch  # noqa: PLC0415
    import transformers  # noqa: PLC0415
    from accelerate import Accelerator  # noqa: PLC0415
    from ignite.engine import create_supervised_trainer  # noqa: PLC0415

    from composer.integrations.accelerate import accelerate_algorithms  # noqa: PLC0415
    from composer.integrations.ignite import attach_algorithms  # noqa: PLC0415
    from composer.integrations.lightning import ComposerCallback, FabricAlgorithms  # noqa: PLC0415
    from composer.integrations.transformers import composer_trainer  # noqa: PLC0415

    model, loss = torch.nn.Linear(1, 1), torch.nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = torch.utils.data.DataLoader([0])
    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(folder, use_cpu=True, report_to=[])
        trainer = composer_trainer(transformers.Trainer)(model=model, args=arguments, algorithms=[])
    accelerated = accelerate_algorithms(
        Accelerator(cpu=True), model, optimizer, loader, [], loss=loss, max_duration="1ep"
    )
    attached = attach_algorithms(create_supervised_trainer(model, optimizer, loss), model, optimizer, loss, [])
    adapters = [
        ComposerCallback([]).adapter,
        FabricAlgorithms(lightning.Fabric(accelerator="cpu"), model, optimizer, [], loss).adapter,
        trainer.algorithm_adapter,
        accelerated.adapter,
        attached.adapter,
    ]
    return [adapter.serves for adapter in adapters]


TABLES = {
    "defaults": defaults,
    "hosts": hosts,
    "former_names": former_names,
    "removed": removed,
    "removed_arguments": removed_arguments,
    "needs": needs,
    "events": events,
    "owners": owners,
    "same_stage": same_stage,
    "twice": twice,
    "study": study,
    "errors": errors,
    "differences": differences,
    "speed": speed,
    "trials": trials,
    "effects": effects,
    "environment": environment,
    "measured": measured,
}


if __name__ == "__main__":
    main()
