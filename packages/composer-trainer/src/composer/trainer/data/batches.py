"""The batches of training, one epoch after the other, from any resume point on.

:class:`Batches` owns two objects. Between them, a batch is moved to the device and transformed:

- its ``DataOrder`` (``data/order.py``) iterates over the loader, from any epoch and place on, with seeds;
- ``EpochPosition`` (``data/position.py``) counts it: the place of the next batch, and where the epoch ends.

Where only the loader can show the end of the epoch, it shows when the next batch is asked for, also in a resumed run.

``TrainingData`` creates the batches of a loader. They last over several calls of ``fit``, as long as loader and length
of an epoch stay the same. ``Run`` takes the batches, and ``ResumeState`` saves and loads their place.
"""

from __future__ import annotations

import copy
import itertools
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from composer.checkpoint.contents import SavedPlace
from composer.core.checks import caller_level
from composer.core.data.batches import move_batch
from composer.core.data.packing import has_packed_rows
from composer.core.saving.randomness import preserve_rng_state
from composer.distributed import all_agree, all_gather_object, get_data_world_size, get_world_size
from composer.distributed.samplers import NO_BATCH, in_step, is_split_by_rank, num_repeated_samples, unequal_lengths
from composer.export.inference import without_labels
from composer.functional.datasets import by_epoch
from composer.functional.nested import leaves
from composer.trainer.data.objects import (
    LoaderObjects,
    create_generators,
    load_objects,
    save_objects,
)
from composer.trainer.data.order import make_order
from composer.trainer.data.position import EpochPosition, PlaceReader
from composer.trainer.data.seeding import draws_nothing

if TYPE_CHECKING:
    from collections.abc import Iterable

    from composer.core import Batch, DataSpec, State
    from composer.trainer.data.order import DataOrder

# The numbers of each tensor by which first batches are compared between processes.
_COMPARED_NUMBERS = 1000


class Batches:
    """Iterates over the batches of a loader, epoch by epoch.

    Order and randomness of the data depend only on the seed and the epoch; see :mod:`composer.trainer.data.order`.
    Nothing is loaded before the first batch is asked for.

    Its methods are called in this order: :meth:`agree`, once; in a resumed run, :meth:`load`; then :meth:`next` for
    each batch, and :meth:`rewind` after each epoch.

    In each step, either all processes have a batch or none has one. If they have different numbers of batches, those
    that have ended get copies of their last batch, which do not count. Processes wait for each other

    - in :meth:`agree`;
    - where an epoch begins or a place is loaded, if a sampler shows only then where the data ends;
    - before each batch, if the processes may have different numbers of batches;
    - after the first batch, which is compared between them.

    Args:
        spec: The loader and its transforms.
        subset_num_batches: The number of batches in an epoch, if fewer than the loader has; -1 for all.
        device: The device that batches are moved to.
        seed: The run's seed.
        epoch: The number of the first epoch.
        spin: Whether a loader that cannot start in the middle of an epoch is fast-forwarded to the resume point; else
            it starts at the beginning of the epoch.

    Attributes:
        position: The place of the next batch, and where the epoch ends.
        place_reader: Reads saved places.
        usual_samples: The ``DataOrder.usual_samples`` of each of several processes, set by :meth:`agree`; None unless
            it is the same.
        checks_model: True if rows are packed, so that the model has to be checked; None if the first batch shows
            whether they are; False once it is checked, or need not be.
        _objects_at_start: The states at the start of the epoch of the objects that a resumed run replays. A save within
            the epoch contains them, because a resumed run draws the order again.
        _batches: The batches from the place on, each with whether it is an own one and no copy; None until the first
            one is asked for.

    Raises:
        ValueError: The loader has no batches.

    Example:
        >>> import torch
        >>> from composer.core import DataSpec
        >>> batches = Batches(DataSpec([torch.zeros(2), torch.ones(2)]), -1, torch.device("cpu"))
        >>> batches.position.length, batches.next(), batches.position.epoch_is_over
        (2, tensor([0., 0.]), False)
    """

    def __init__(
        self,
        spec: DataSpec,
        subset_num_batches: int,
        device: torch.device,
        *,
        seed: int = 0,
        epoch: int = 0,
        spin: bool = True,
    ) -> None:
        self.spec, self.spin = spec, spin
        # Of torch itself: a device of the state is a string to Tensor.to, which would parse it for each tensor.
        # On the CPU there is nothing to move, and walking through the containers takes time in each step.
        self._device, self._epoch = None if device.type == "cpu" else torch.device(device), epoch
        self._loader: Any = spec.dataloader
        self._order = order = make_order(self._loader, seed)
        self.position, self.place_reader = EpochPosition(spec, order, subset_num_batches), PlaceReader(spec, order)
        if 0 in (spec.length, self.position.data_end):
            raise ValueError(
                "train_dataloader has no batches: its data set is empty, or smaller than one batch of all processes "
                "with drop_last=True."
            )
        self.usual_samples: int | None = None
        self.checks_model: bool | None = has_packed_rows(self._loader) or None
        self._objects_at_start = save_objects(self.objects.replayed)
        self._batches: Iterator[tuple[Batch, bool]] | None = None
        # Between processes: an end that only the loader, or its sampler at the start of an epoch, can show may differ.
        self._may_end_apart = get_world_size() > 1 and self.position.data_end is None
        self._may_be_equal = get_data_world_size() > 1 and not is_split_by_rank(self._loader)
        if get_world_size() > 1 and order.global_batch_size is None:
            warn_of_repeats(self._loader)
        _warn_of_workers(self._loader, order)
        if order.saves_itself:
            _warn_if_not_exact(self._loader)

    @property
    def objects(self) -> LoaderObjects:
        """The objects that the loader consists of, and the transforms of the spec, which may be replaced."""
        return LoaderObjects.of(self.spec, skips=self._order.skips)

    def agree(self) -> None:
        """Agree with the other processes on the length of an epoch, that of the longest loader, and on usual batches.

        All processes must call it, once.

        Raises:
            ValueError: The loaders have different lengths, and one of the processes cannot train without own batches;
                or only some of them have a known length.
        """
        order, position = self._order, self.position
        gathered = all_gather_object((order.usual_samples, position.data_end, position.length))
        usual, ends, lengths = map(list, zip(*gathered, strict=True))
        is_known = [end is not None for end in ends]
        if any(is_known) and not all(is_known):
            raise ValueError(
                "train_dataloader must be of the same kind in every process: the number of its batches is known before "
                f"they are loaded in some of them and not in others, got {is_known} by rank."
            )
        if len({*zip(usual, ends, strict=True)}) == 1 < len(gathered):
            self.usual_samples = order.usual_samples
        if self._may_end_apart:
            position.announced = None if None in lengths else max(lengths)
            position.move_to(position.place)
        elif len({*lengths}) > 1:
            raise unequal_lengths(lengths)

    def next(self) -> Batch:
        """Return the epoch's next batch; ``NO_BATCH`` if there is none.

        Raises:
            ValueError: The loader returned no batch in the epoch, or None as a batch.
        """
        position = self.position
        if self._batches is None:
            self._continue_with(self._begin(position.place))
        assert self._batches is not None
        batch, is_own = next(self._batches, (NO_BATCH, True))
        if batch is NO_BATCH:
            self._check_end()
            position.set_end(position.place)
            return NO_BATCH
        # Algorithms may change it in place, and in_step repeats the last one; moving it makes a copy.
        if self._may_end_apart and self._device is None:
            batch = copy.deepcopy(batch)
        if self._device is not None or self.spec.batch_transforms is not None or batch is None:
            batch = prepare_batch(batch, self.spec, self._device, "train_dataloader", position.num_batches)
        position.advance(is_own=is_own)
        if self._may_be_equal:
            self._may_be_equal = False
            _warn_if_equal(batch if position.last_is_counted else None)
        return batch

    def rewind(self, epoch: int | None = None) -> None:
        """Start the next epoch, or the given one, with the next batch."""
        self._epoch = self._epoch + 1 if epoch is None else epoch
        self._batches = None
        self._order.rewind()
        self.position.move_to(0)

    def close(self) -> None:
        """Stop the workers of the training's loader, which cannot be iterated over afterwards."""
        self._batches = iter(())
        self._order.close()

    def save(self) -> SavedPlace:
        """Return the place in the data, and what restores and verifies it."""
        position = self.position
        return SavedPlace(
            epoch=self._epoch,
            place=position.place,
            global_batch_size=self._order.global_batch_size,
            sizes=self.place_reader.sizes,
            order=self._order.fingerprint(position.place),
            loader=self._order.save(in_epoch=position.place > 0),
            objects=self._objects_at_start if position.place else save_objects(self.objects.replayed),
            has_ended=not position.last_is_own,
            as_sampler=self._order.as_sampler,
        )

    def load(self, saved: SavedPlace, generators: Iterable[str] = ()) -> None:
        """Restore a saved place. Batches before it that have to be loaded are loaded now.

        Args:
            saved: What :meth:`save` returned.
            generators: The paths of further generators with a saved state; see :func:`create_generators`.
        """
        self.rewind(saved.epoch)
        objects = {**self.objects.replayed, **self.objects.by_path("loading"), **self.objects.by_path("transforms")}
        create_generators([*saved.objects.generators, *generators], objects, self._load_and_discard)
        self.rewind(saved.epoch)  # again, as a discarded batch may have begun it
        self._order.as_sampler = saved.as_sampler
        position = self.position
        position.move_to(self.place_reader.place_here(saved), is_own=not saved.has_ended)
        self._objects_at_start = saved.objects
        load_objects(saved.objects, self.objects.replayed)
        if position.place:
            _warn_of_any_order(self._loader)
        self._find_next(saved)

    def _load_and_discard(self) -> None:
        """Load the first batch of the epoch, unless the loader is an iterator, of which it would be missing."""
        if not isinstance(self._loader, Iterator):
            for batch in itertools.islice(self._order.begin(self._epoch), 1):
                prepare_batch(batch, self.spec, self._device, "train_dataloader", 0)

    def _find_next(self, saved: SavedPlace) -> None:
        """Let the place in the loader be the next batch.

        - A loader that saves itself loads its own state.
        - Between two epochs, the next one begins when its first batch is asked for.
        - Within an epoch, batches of a list or keys of a sampler are skipped.
        - All other loaders load the batches before the place again or, without ``spin``, begin the epoch again.
        """
        position = self.position
        if self._order.saves_itself and saved.loader is not None:
            self._order.load(saved.loader)
            # This process has no own batches left: in_step takes a copy of another process's, which does not count.
            # Iterated over, a loader at the end of its data may begin again.
            if saved.has_ended:
                self._continue_with(iter(()))
        elif self._order.skips:
            if position.place and position.data_end is None:  # only the sampler of the user, or a stream, can show it
                self._continue_with(self._begin(position.place))
            self.place_reader.warn_of_other_order(saved, position.place)
        elif position.place and self.spin:
            self._replay()
        else:
            position.move_to(0)

    def _replay(self) -> None:
        """Load the batches before the place again."""
        done = self.position.num_batches
        warnings.warn(
            f"train_dataloader cannot begin in the middle of an epoch: its first {done} batches are loaded again. The "
            "result is exact only if they are the same again, for which the loader may draw from the global generators "
            "or from its attributes. A DataLoader of a map-style dataset, or a loader with state_dict() and "
            "load_state_dict() such as torchdata's StatefulDataLoader, resumes without loading them.",
            stacklevel=2,
        )
        from tqdm.auto import tqdm  # noqa: PLC0415  (only here)

        batches, last = self._begin(), NO_BATCH
        for batch in tqdm(itertools.islice(batches, done), desc="loading to the resume point", total=done):
            last = batch
        self._continue_with(batches, last)

    def _begin(self, place: int = 0) -> Iterator[Batch]:
        """Return the loader's batches of the epoch from a place on."""
        self._objects_at_start = save_objects(self.objects.replayed)
        return self._order.begin(self._epoch, place)  # which may draw from these objects

    def _continue_with(self, batches: Iterator[Batch], last: Batch = NO_BATCH) -> None:
        """Set the batches from the place on, and agree with the other processes on their end, if it is known now.

        While other processes have further batches than this one, it computes copies of its last one, which do not
        count.

        Args:
            batches: The batches of this process.
            last: The one before them, if it was loaded.
        """
        is_same_in_all = self._agree_on_end()
        self._batches = zip(batches, itertools.repeat(True)) if is_same_in_all else in_step(batches, last)

    def _agree_on_end(self) -> bool:
        """Set the end of the data, that of the process with the most; return whether all are known to have the same.

        The end is known here in every process or in none. For a ``StatefulOrder`` it never is, so that no process
        waits for others, and one whose own batches have ended may call this alone in :meth:`load`.
        """
        end = self._order.end(self.position.place)
        if not self._may_end_apart or end is None:
            if end is not None:
                self.position.set_end(end)
            return not self._may_end_apart
        ends = all_gather_object(end)
        self.position.set_end(max(ends))
        return len({*ends}) == 1

    def _check_end(self) -> None:
        """Raise an error if the end of the loader is not that of an epoch."""
        position = self.position
        if not position.place:
            raise ValueError(
                "train_dataloader returned no batch in a complete epoch. A generator can be iterated over only "
                "once: give an iterable that can be iterated over again."
            )
        if get_world_size() > 1 and position.data_end is not None:
            raise ValueError(
                f"train_dataloader ended after {position.num_batches} of {position.length} batches in one of several "
                "processes, and the others wait for it. Does its data set raise StopIteration?"
            )


def prepare_batch(batch: Batch, spec: DataSpec, device: torch.device | None, name: str, number: int) -> Batch:
    """Return a batch on a device, with the batch transforms of a spec applied.

    Args:
        batch: What the loader returned.
        spec: The loader.
        device: The device; None does not move it.
        name: The name of the loader, for errors.
        number: The number of the batch in the epoch, for errors.

    Raises:
        ValueError: The loader or its transforms returned None.
    """
    what = name
    if batch is not None and device is not None:
        batch = move_batch(batch, device)
    if batch is not None and spec.batch_transforms is not None:
        what, batch = f"batch_transforms of {name}", spec.batch_transforms(batch)
    if batch is None:
        raise ValueError(
            f"{what} returned None as batch {number} of the epoch (counted from 0). Every batch must hold data: does "
            "the loader's collate_fn or a transform end without a return, or does its list or iterator hold None?"
        )
    return batch


def warn_of_repeats(loader: object, used: str = "trained on") -> None:
    """Warn if samples that a sampler repeats, so that all processes have equally many, cannot be left out."""
    repeated = num_repeated_samples(loader)
    if repeated:
        is_loader = isinstance(loader, DataLoader) and type(loader).__iter__ is DataLoader.__iter__
        described = type(loader.batch_sampler if is_loader else loader).__name__  # type: ignore[attr-defined]
        warnings.warn(
            f"{repeated} samples of each epoch are {used} twice, as the processes cannot share them out evenly and "
            f"the {described} chooses its batches itself, so that repeats cannot be left out. Give its sampler "
            "drop_last=True: composer.distributed.get_sampler(dataset, drop_last=True).",
            stacklevel=4,
        )


def _warn_of_workers(loader: Any, order: DataOrder) -> None:
    """Warn if a loader has workers that the training does not reach."""
    if getattr(loader, "_iterator", None) is not None:  # torch's DataLoader keeps it if its workers are persistent
        warnings.warn(
            "train_dataloader has an active iterator, whose workers keep running beside those of the training. Do not "
            "iterate over it before, or create another one with persistent_workers=True for the training.",
            stacklevel=4,
        )
    is_own = order.loader is loader and getattr(loader, "persistent_workers", False)
    if is_own and by_epoch(loader.dataset):
        warnings.warn(
            f"set_epoch() of the data set does not reach the workers of this {type(loader).__name__}, which keep their "
            "copies for all epochs, so that each epoch has the same order. Give it persistent_workers=False.",
            stacklevel=4,
        )


def _warn_if_not_exact(loader: Any) -> None:
    """Warn if a loader that saves its own state is known not to resume exactly with its data."""
    dataset = getattr(loader, "dataset", None)
    stream = getattr(dataset, "_ex_iterable", None)  # of Hugging Face's IterableDataset
    while stream is not None and not hasattr(stream, "buffer_size"):
        stream = getattr(stream, "ex_iterable", None)
    if stream is not None:
        what = (
            "the samples in the buffer of dataset.shuffle() are left out after a resume within an epoch. Use a "
            "torch.utils.data.DataLoader, which loads the samples again"
        )
    elif getattr(loader, "num_workers", 0) and not (isinstance(dataset, IterableDataset) or draws_nothing(dataset)):
        what = (
            "random numbers that the data set draws in workers are others after a resume within an epoch. If it draws "
            "any, use a torch.utils.data.DataLoader, whose workers are seeded for each batch"
        )
    else:
        return
    name = type(loader).__name__
    warnings.warn(f"train_dataloader, a {name}, may not resume exactly: {what}.", stacklevel=caller_level())


def _warn_of_any_order(loader: Any) -> None:
    """Warn, within an epoch, if a loader returns batches in another order than that of its sampler."""
    if not getattr(loader, "in_order", True) and loader.num_workers > 1:
        warnings.warn(
            "train_dataloader has in_order=False: the workers' batches came in another order before the run stopped, "
            "so some samples of this epoch may come twice and others not at all. in_order=True resumes exactly.",
            stacklevel=3,
        )


def _warn_if_equal(batch: Batch | None) -> None:
    """Warn if all processes have the same first batch, by the first numbers of each tensor.

    ``batch`` is None if the first batch of this process does not count.
    """
    tensors = [value for value in leaves(batch) if isinstance(value, torch.Tensor)]
    dense = [tensor for tensor in tensors if tensor.layout is torch.strided and not tensor.is_nested]
    beginnings = [(tuple(tensor.shape), tensor.reshape(-1)[:_COMPARED_NUMBERS].tolist()) for tensor in dense]
    if all_agree(beginnings) and beginnings:
        warnings.warn(
            f"train_dataloader returned the same first batch in all {get_world_size()} processes, so that each "
            "trains on every sample. Split the data by rank: an IterableDataset may yield itertools.islice(samples, "
            "composer.distributed.get_data_rank(), None, composer.distributed.get_data_world_size()).",
            stacklevel=3,
        )


def first_batch(state: State, spec: DataSpec, name: str) -> Any:
    """Return the first batch of data, on the state's device; errors call the loader ``name``."""
    batch = next(make_order(spec.dataloader, state.rank_zero_seed).begin(0))
    return prepare_batch(batch, spec, state.device, name, 0)


def batch_to_export(state: State) -> Any:
    """Return the first batch to evaluate, or else to train on, as the model's ``forward`` takes it.

    Raises:
        ValueError: There is no loader, or it is an iterator, which would lose the batch.
    """
    given = [*(evaluator.dataloader for evaluator in state.evaluators), state.train_data_spec]
    specs = [one for one in given if one is not None and not isinstance(one.dataloader, Iterator)]
    if not specs:
        raise ValueError("There is no batch to export with: give sample_input.")
    with preserve_rng_state(state.device):
        batch = first_batch(state, specs[0], "the loader whose first batch is exported")
        transform = specs[0].microbatch_transforms
        return without_labels(state.model, batch if transform is None else transform(batch))
