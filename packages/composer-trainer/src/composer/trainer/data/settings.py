"""The settings of the data to train on, and checks of the model that is trained.

``TrainingData`` owns the arguments about data of the Trainer and of ``fit``, and the ``Batches`` made of them. The
place in the data is kept as long as loader and length of an epoch stay the same. The Trainer and ``ResumeState`` use
it.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import attrs
from torch import nn

from composer.core import DataSpec, State, SupportsTraining, ensure_data_spec
from composer.core.checks import is_flag, is_string, is_subset, own_arguments
from composer.distributed.collectives import failing_in_all_processes
from composer.distributed.samplers import split_data
from composer.trainer.data.batches import Batches
from composer.trainer.evaluation.metrics import SupportsMetrics, metrics_of, reduce_over_data, reset_metrics


@attrs.define
class TrainingData:
    """The data to train on, and the current position in it.

    The Trainer calls :meth:`install` when it is constructed. A call of ``fit`` changes nothing if an argument of it is
    rejected, so it works on a copy, in this order: :meth:`changed` returns the copy, :meth:`prepare` creates its
    batches, and :meth:`take` makes it the data in use.

    Args:
        train_dataloader: The loader; None if not given yet.
        train_dataloader_label: Its name in logs.
        train_subset_num_batches: The number of batches in an epoch; -1 for all.
        spin_dataloaders: Whether a loader that cannot start in the middle of an epoch is fast-forwarded to the
            resume point.

    Raises:
        TypeError: ``train_dataloader`` cannot be iterated over.
        ValueError: ``train_subset_num_batches`` is out of range.
    """

    spec: DataSpec | None = attrs.field(
        default=None, alias="train_dataloader", converter=attrs.converters.optional(ensure_data_spec)
    )
    label: str = attrs.field(default="train", alias="train_dataloader_label", validator=is_string)
    subset_num_batches: int = attrs.field(default=-1, alias="train_subset_num_batches", validator=is_subset)
    spin: bool = attrs.field(default=True, alias="spin_dataloaders", validator=is_flag)
    batches: Batches | None = attrs.field(default=None, init=False)

    def install(self, state: State) -> None:
        """Make this the training data of a state, from the epoch of its timestamp on."""
        if self.spec is not None:
            self.prepare(state)
            self._restart_metrics(state)
            self.select(state)

    def prepare(self, state: State, former: TrainingData | None = None) -> None:
        """Create the batches, from the epoch of a state's timestamp on; the state does not change.

        Those of ``former`` data with the same loader and length of an epoch are continued.

        Raises:
            ValueError: The loader of a process has no batches, or would give several processes the same ones.
        """
        assert self.spec is not None
        is_same = former is not None and former.spec is not None and former.spec.dataloader is self.spec.dataloader
        if former is not None and is_same and former.subset_num_batches == self.subset_num_batches and former.batches:
            self.batches = former.batches
            return
        with failing_in_all_processes("Preparing the training data", ValueError):
            # The run may have been loaded in the meantime, so that its batches are created again.
            spec = split_data(self.spec) if self.batches is None else self.batches.spec
            self.batches = Batches(
                spec,
                self.subset_num_batches,
                state.device,
                seed=state.rank_zero_seed,
                epoch=int(state.timestamp.epoch),
                spin=self.spin,
            )
        self.batches.agree()

    def _restart_metrics(self, state: State) -> None:
        """Reset the training metrics, or create them."""
        reset_metrics(state.train_metrics)
        if isinstance(state.model, SupportsMetrics) and not state.train_metrics:
            metrics = metrics_of(state.model, is_train=True)
            state.train_metrics = {name: metric.to(state.device) for name, metric in metrics.items()}
            reduce_over_data(state.train_metrics.values())

    def select(self, state: State) -> None:
        """Make this the dataloader in use."""
        assert self.batches is not None
        spec = self.batches.spec
        state.train_dataloader = spec
        state.set_dataloader(spec.dataloader, self.label, self.batches.position.length)

    def changed(self, given: Mapping[str, Any]) -> TrainingData:
        """Return a copy with its arguments among those of ``fit`` that are not None, for :meth:`take`.

        Raises:
            TypeError: ``train_dataloader`` cannot be iterated over.
            ValueError: There is no training data, or an argument is out of range.
        """
        changed = attrs.evolve(self, **own_arguments(TrainingData, given, without_none=True))
        if changed.spec is None:
            raise ValueError("There is nothing to train on: give train_dataloader to the Trainer or to fit().")
        return changed

    def take(self, new: TrainingData, state: State) -> Batches:
        """Become other data, which are prepared, and return its batches."""
        assert new.spec is not None
        assert new.batches is not None
        if new.batches is self.batches:
            loader = self.batches.spec.dataloader
            self.batches.spec, self.batches.spin = copy.copy(new.spec), new.spin
            self.batches.spec.dataloader = loader  # which may be a copy, see split_data
        else:
            self._restart_metrics(state)
        for field in attrs.fields(TrainingData):
            setattr(self, field.name, getattr(new, field.name))
        self.select(state)
        return new.batches


def check_model(model: object) -> None:
    """Raise a TypeError if a model lacks a method that training requires."""
    if isinstance(model, type):
        raise TypeError(f"model must be an object, got the class {model.__name__}; write {model.__name__}().")
    if not isinstance(model, nn.Module) or not isinstance(model, SupportsTraining):
        raise TypeError(
            "model must be a torch.nn.Module with forward(batch) and loss(outputs, batch), got "
            f"{type(model).__name__}. Wrap a classifier in composer.models.ComposerClassifier and a model of "
            "Transformers in HuggingFaceModel, or derive the model from ComposerModel."
        )


def check_trainable(model: nn.Module) -> None:
    """Raise a ValueError if a model has no trainable parameters."""
    parameters = list(model.parameters())
    if not any(parameter.requires_grad for parameter in parameters):
        found = f"all of its {len(parameters)} parameters are frozen" if parameters else "it has no parameters"
        raise ValueError(
            f"model has nothing to train: {type(model).__name__}: {found}. Set requires_grad on those to train, or "
            "leave out train_dataloader and only evaluate."
        )
