"""What a load has read of a checkpoint or file, and how it is changed before it is compared with the run.

:meth:`SavedRun.read` reads all but the weights, of which only names and shapes are compared. The other methods each
make one change of what was read, in the order in which :class:`~composer.checkpoint.loading.LoadRequest` calls them:
leave out what is ignored, use averages as the weights, and read the weights that are still needed.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import attrs
from torch import Tensor
from torch.utils._pytree import tree_leaves

from composer.checkpoint.contents import BESIDE_STATE, IgnoreKeys, ignored_keys
from composer.checkpoint.errors import CheckpointError
from composer.checkpoint.manifest import EXTRA, MODEL, OPTIMIZERS, STATE, dictionary
from composer.checkpoint.reading import OpenCheckpoint, references, sharded_like
from composer.core import State, join_tensors, model_state
from composer.core.serialization import from_data
from composer.functional.dtensors import is_sharded, reshard

__all__ = ["SavedRun"]

_AVERAGES = "averaged_weights"
"""In the state of an algorithm, the weights for evaluation; see :meth:`composer.core.Algorithm.evaluation_weights`."""


@attrs.define
class SavedRun:
    """What was read of a run.

    Args:
        path: The checkpoint or file.
        data: What was read, by the names of :mod:`~composer.checkpoint.contents`; of the model, its weights and what
            else its state has.
        opened: The checkpoint, whose weights are on the meta device, without data, until :meth:`read_weights`; None
            for a file, of which everything was read.
        likes: Like which DTensors the weights are read; see :func:`~composer.checkpoint.reading.sharded_like`.
        is_schedule_free: Whether the weights are those for training, of an optimizer that evaluates with others.

    Attributes:
        ignored: The paths of what was left out.
    """

    path: str
    data: dict[str, Any]
    opened: OpenCheckpoint | None = None
    likes: Mapping[str, Tensor] | None = None
    is_schedule_free: bool = False
    ignored: tuple[str, ...] = attrs.field(default=(), init=False)

    @classmethod
    def read(cls, opened: OpenCheckpoint, state: State, *, weights_only: bool) -> SavedRun:
        """Read what a checkpoint contains, or only what the model's weights need.

        What is read is compared with its checksums, so that nothing depends on the files afterwards. Of tensors that
        are sharded in this run, only the own region is read.

        Raises:
            CheckpointError: A file is missing, or its content is not the one that was written.
        """
        reshard(state.model)
        own, data = state.get_model_state_dict(), opened.data()
        with _naming_state(opened.path):
            opened.check_layout(len(own) + len(references(data)))
            likes = sharded_like(opened, own, data) if is_sharded(state.model) else {}
            is_schedule_free = weights_only and _has_training_weights(data)
            if weights_only:
                data = {name: data[name] for name in ("model", "algorithms", "modules") if name in data}
            saved = _with_tensors(data, opened, likes, is_part=weights_only)
            if not isinstance(saved.get("model", {}), dict):
                raise TypeError("'model' must be a dictionary.")
        if MODEL in opened.layout.tensors:
            saved["model"] = opened.shapes(MODEL) | saved.get("model", {})
        else:
            saved.pop("model", None)
        return cls(opened.path, saved, opened, likes.get(MODEL), is_schedule_free)

    @property
    def state(self) -> dict[str, Any]:
        """The state of the run, as ``State.state_dict`` returns it, with ``"model"`` and ``"optimizers"``."""
        return {name: value for name, value in self.data.items() if name not in BESIDE_STATE}

    def beside(self, name: str) -> dict[str, Any]:
        """Return what was saved beside the state: ``"extra"``, ``"modules"`` or ``"environment"``."""
        return dictionary(self.data.get(name))

    def ignore(self, keys: IgnoreKeys, state: State) -> None:
        """Remove what is ignored, and put the run's own values there, so that they do not change.

        If all weights or all optimizers are ignored, they are only removed.
        """
        saved = self.data
        self.ignored = ignored_keys(saved, keys)
        if keys and not callable(keys) and not self.ignored:
            warnings.warn(
                f"{self.path} holds nothing that ignore_keys={keys!r} would leave out. Its parts are "
                f"{', '.join(saved)}; a pattern is such as 'model/head.*', 'optimizers/*' or 'algorithms/EMA'.",
                UserWarning,
                stacklevel=4,
            )
        own = state.state_dict() if self.ignored else {}
        for name, own_part in (("model", state.get_model_state_dict), ("optimizers", state.get_optim_state_dict)):
            if any(key.startswith(f"{name}/") for key in self.ignored):
                own[name] = own_part()
        for name, _, inner in (key.partition("/") for key in self.ignored):
            if not inner:
                saved |= {name: own[name]} if name in own else {}
            elif isinstance(saved.get(name), list):
                saved[name] += [record for record in own.get(name, []) if record["key"] == inner]
            elif isinstance(saved.get(name), dict) and inner in dictionary(own.get(name)):
                saved[name][inner] = own[name][inner]

    def match_neutral_callbacks(self, state: State) -> None:
        """Ignore callbacks without settings and state that only the run or only the checkpoint has."""
        records = self.data.get("callbacks")
        if not isinstance(records, list) or not all(isinstance(dictionary(one).get("key"), str) for one in records):
            return  # which the comparison with the run rejects
        own = {record["key"]: record for record in state.state_dict()["callbacks"]}
        saved = {record["key"] for record in records}
        kept = [one for one in records if one["key"] in own or one.get("settings") or one.get("state")]
        added = [one for key, one in own.items() if key not in saved and not one["settings"] and not one["state"]]
        self.data["callbacks"] = kept + added

    def use_averages(self, model: Any) -> str:
        """Replace the weights by the averages of an algorithm, and return its key; an empty string without any.

        Raises:
            CheckpointError: Averages are no dictionary of tensors.
        """
        records, weights = self.data.get("algorithms"), self.data["model"]
        for record in filter(dictionary, records if isinstance(records, list) else []):
            key, averages = record.get("key"), dictionary(record.get("state")).get(_AVERAGES, {})
            with _naming_state(self.path):
                from_data(averages, dict[str, Tensor], f"algorithms.{key}.{_AVERAGES}")
            if not averages or f"algorithms/{key}" in self.ignored:
                continue
            first = model_state.first_names(model)
            for name, weight in weights.items():
                average = averages.get(first.get(name, name))  # tied weights have one average
                if average is not None and f"model/{name}" not in self.ignored:
                    # Averages of weights in bfloat16 are saved in float32.
                    weights[name] = average.to(weight.dtype) if isinstance(weight, Tensor) else average
            return str(key)
        return ""

    def read_weights(self) -> None:
        """Read those weights that have no data yet and are still part of the state."""
        model = self.data.get("model", {})
        if self.opened is not None:
            names = {name for name, one in model.items() if isinstance(one, Tensor) and one.is_meta}
            model.update(self.opened.tensors(MODEL, self.likes, names))


def _has_training_weights(data: dict[str, Any]) -> bool:
    """Return whether an optimizer evaluates with other weights than the saved ones, which such optimizers record."""
    groups = tree_leaves(data.get("optimizers"), is_leaf=lambda one: "train_mode" in dictionary(one))
    return any(dictionary(one).get("train_mode") is True for one in groups)


def _with_tensors(
    data: dict[str, Any], opened: OpenCheckpoint, likes: Mapping[str, Mapping[str, Tensor]], *, is_part: bool
) -> dict[str, Any]:
    """Return data with the tensors that it refers to, other than weights; all of the checkpoint, or of a part of it."""
    listed = opened.shapes(EXTRA) | opened.shapes(OPTIMIZERS)
    names = listed.keys() & references(data).keys() if is_part else listed.keys()
    join_tensors(data, {name: listed[name] for name in names})  # the names are checked before anything is read
    extra, optimizers = (opened.tensors(kind, likes.get(kind), names) for kind in (EXTRA, OPTIMIZERS))
    return dict(join_tensors(data, extra | optimizers))


@contextlib.contextmanager
def _naming_state(path: str) -> Iterator[None]:
    """Raise what is wrong with data within this context as an error that names their file."""
    try:
        yield
    except CheckpointError:
        raise
    except (ValueError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{path}/{STATE}", f"is not the state of a checkpoint: {error}") from None
