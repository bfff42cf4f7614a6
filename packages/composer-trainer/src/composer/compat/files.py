"""Functions of MosaicML Composer for names of files and for checkpoints."""

from __future__ import annotations

import json
import re
import string
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import torch

from composer import checkpoint
from composer.checkpoint.contents import IgnoreKeys
from composer.checkpoint.finding import open_checkpoint
from composer.checkpoint.folders import is_remote
from composer.checkpoint.inspection import verify_checkpoint
from composer.core import Logger, State, Timestamp
from composer.core.data.batches import move_batch
from composer.core.passes import Passes
from composer.distributed import (
    get_global_rank,
    get_local_rank,
    get_local_world_size,
    get_node_rank,
    get_world_size,
)
from composer.foreign.files import source_of
from composer.foreign.pt_files import content_of, save_as_file
from composer.foreign.torch_files import read_torch_file

PLACEHOLDERS = "{run_name}, {rank}, {local_rank}, {world_size}, {local_world_size}, {node_rank}"
PLACEHOLDERS_WITH_TIME = f"{PLACEHOLDERS}, {', '.join(f'{{{name}}}' for name in Timestamp().state_dict())}"


def format_name_with_dist(format_str: str, run_name: str, **extra_args: object) -> str:
    """Return a name with the name of the run and the numbers of the process filled in.

    Args:
        format_str: May contain ``{run_name}``, ``{rank}``, ``{local_rank}``, ``{world_size}``, ``{local_world_size}``,
            ``{node_rank}`` and the names of ``extra_args``.
        run_name: The name of the run.
        extra_args: Further values.

    Raises:
        KeyError: The name contains another field.

    Example:
        >>> format_name_with_dist("{run_name}/rank{rank}-{kind}", "mine", kind="log")
        'mine/rank0-log'
    """
    return format_str.format(
        run_name=run_name,
        rank=get_global_rank(),
        local_rank=get_local_rank(),
        world_size=get_world_size(),
        local_world_size=get_local_world_size(),
        node_rank=get_node_rank(),
        **extra_args,
    )


def format_name_with_dist_and_time(format_str: str, run_name: str, timestamp: Timestamp, **extra_args: object) -> str:
    """Return a name as :func:`format_name_with_dist`, also with the counts and the seconds of the clock.

    Example:
        >>> format_name_with_dist_and_time("ep{epoch}-ba{batch}-rank{rank}", "mine", Timestamp(epoch=1, batch=5))
        'ep1-ba5-rank0'
    """
    return format_name_with_dist(format_str, run_name, **(timestamp.state_dict() | extra_args))


@attrs.frozen
class PartialFilePath:
    """The name of a checkpoint in which the fields of a run are not filled in yet.

    Args:
        filename: The name; see :func:`format_name_with_dist_and_time`.
        folder: Its folder, whose fields are those of :func:`format_name_with_dist`.

    Example:
        >>> PartialFilePath("ep{epoch}.pt", "{run_name}").format(State(model=None, run_name="mine"))
        'mine/ep0.pt'
    """

    filename: str
    folder: str | None = None

    def format(self, state: State, keep_placeholders: bool = False) -> str:
        """Return the path for a run; with ``keep_placeholders`` nothing is filled in."""
        folder, name = self.folder or "", self.filename
        if not keep_placeholders:
            folder = format_name_with_dist(folder, state.run_name)
            name = format_name_with_dist_and_time(name, state.run_name, state.timestamp)
        return str(Path(folder, name))


def get_save_filename(state: State, filename: str = "ep{epoch}-ba{batch}-rank{rank}") -> str:
    """Return the name of a checkpoint of a run.

    Example:
        >>> get_save_filename(State(model=None, run_name="mine"))
        'ep0-ba0-rank0'
    """
    return PartialFilePath(filename).format(state)


class _Field(str):
    """The name of a field that remains, with its format."""

    def __format__(self, spec: str) -> str:
        return "".join(["{", self, ":" if spec else "", spec, "}"])


def partial_format(s: str, *args: object, **kwargs: object) -> str:
    """Return a string with the fields filled in that are given; the others remain.

    Example:
        >>> partial_format("{run_name}/ba{batch:04d}", run_name="mine")
        'mine/ba{batch:04d}'
    """
    named = {name: _Field(name) for _, name, _, _ in string.Formatter().parse(s) if name and name.isidentifier()}
    return s.format(*args, *["{}"] * s.count("{}"), **(named | kwargs))


def is_tar(name: str | Path) -> bool:
    """Return whether the ending of a name is that of a tar archive.

    Example:
        >>> is_tar("data.tar.gz"), is_tar("data.zip")
        (True, False)
    """
    return re.search(r"\.(tar(\.(gz|bz2|xz|lzma))?|tgz|tbz2?|txz)$", str(name)) is not None


def create_symlink_file(existing_path: str, destination_filename: str | Path) -> None:
    """Write a new file that contains a path; URLs have no links.

    Raises:
        FileExistsError: There is such a file.

    Example:
        >>> import tempfile
        >>> create_symlink_file("ep1-ba3", Path(tempfile.mkdtemp(), "latest.symlink"))
    """
    with Path(destination_filename).open("x") as file:
        file.write(existing_path)


def ensure_folder_is_empty(folder_name: str | Path) -> None:
    """Raise an error if there is a file in a folder that is not hidden.

    Raises:
        FileExistsError: There is.

    Example:
        >>> import tempfile
        >>> ensure_folder_is_empty(tempfile.mkdtemp())
    """
    folder = Path(folder_name)
    visible = (path for path in folder.rglob("*") if not any(one[0] == "." for one in path.relative_to(folder).parts))
    found = next((path for path in visible if path.is_file()), None)
    if found is not None:
        raise FileExistsError(f"{folder_name} must be empty, and {found} exists. Choose another folder.")


def ensure_folder_has_no_conflicting_files(folder_name: str | Path, filename: str, timestamp: Timestamp) -> None:
    """Raise an error if a folder has a checkpoint that is later than a time.

    Args:
        folder_name: The folder.
        filename: The name of a checkpoint, with ``{epoch}``, ``{batch}`` and so on.
        timestamp: The time.

    Raises:
        FileExistsError: It has.

    Example:
        >>> import tempfile
        >>> ensure_folder_has_no_conflicting_files(tempfile.mkdtemp(), "ep{epoch}-ba{batch}", Timestamp())
    """
    counts, pattern = timestamp.state_dict(), ""
    for text, name, *_ in string.Formatter().parse(filename):
        pattern += re.escape(text)
        if name in counts:
            pattern += f"(?P={name})" if f"(?P<{name}>" in pattern else rf"(?P<{name}>\d+)"
        elif name is not None:
            pattern += ".+"
    for path in Path(folder_name).glob("*"):
        match = re.fullmatch(pattern, path.name)
        found = {name: int(count) for name, count in match.groupdict().items()} if match else {}
        is_same_epoch = found.get("epoch", counts["epoch"]) == counts["epoch"]  # else counts in the epoch mean nothing
        compared = {name for name in found if is_same_epoch or not name.endswith("_in_epoch")}
        if any(found[name] > counts[name] for name in compared):
            raise FileExistsError(f"{path} is later than the run. Choose another folder, or set overwrite=True.")


def load_checkpoint(
    path: str,
    state: State,
    logger: Logger,
    object_store: object = None,
    load_weights_only: bool = False,
    strict_model_weights: bool = False,
    progress_bar: bool = True,
    ignore_keys: IgnoreKeys = None,
    exclude_algorithms: Sequence[str] | None = None,
    algorithm_passes: Passes = None,
) -> None:
    """Load a checkpoint into a run; see :func:`composer.checkpoint.load_checkpoint`.

    Args:
        path: Its path or URL.
        state: The run.
        logger: The logger of algorithms that are constructed.
        object_store: The store that has ``path``, if this is no URL.
        load_weights_only: Whether to load only the weights of the model.
        strict_model_weights: Whether missing or unexpected weights raise an error.
        progress_bar: Ignored.
        ignore_keys: What not to load.
        exclude_algorithms: Algorithms not to construct.
        algorithm_passes: Passes that order them.

    Raises:
        TypeError: ``object_store`` is no store.

    Example:
        >>> import tempfile
        >>> state = State(torch.nn.Linear(2, 2), rank_zero_seed=17)
        >>> path = save_checkpoint(state, tempfile.mkdtemp() + "/first")
        >>> load_checkpoint(path, state, Logger(state))
    """
    del progress_bar
    checkpoint.load_checkpoint(
        source_of(path if object_store is None else _url_in_store(path, object_store)),
        state,
        weights_only=load_weights_only,
        strict_model_weights=strict_model_weights,
        ignore_keys=ignore_keys,
        exclude_algorithms=exclude_algorithms,
        algorithm_passes=algorithm_passes,
        logger=logger,
    )


def _url_in_store(path: str, store: object) -> str:
    """Return the URL of a path in a store of objects or an uploader of files; a URL is returned as it is."""
    url_of = getattr(store, "get_uri_for_file", None) or getattr(store, "get_uri", None)
    if url_of is None:
        raise TypeError(
            f"object_store must be a store such as S3ObjectStore('bucket'), got {store!r}. Remove it, and pass the URL "
            "of the checkpoint: 's3://bucket/run/latest'."
        )
    return path if is_remote(path) else str(url_of(path))


def save_checkpoint(
    state: State,
    filename: str = "ep{epoch}-ba{batch}-rank{rank}",
    *,
    weights_only: bool = False,
    ignore_keys: IgnoreKeys = None,
) -> str:
    """Save a run, and return the path of the checkpoint; see :func:`composer.checkpoint.save_checkpoint`.

    Example:
        >>> import tempfile
        >>> save_checkpoint(State(torch.nn.Linear(2, 2)), tempfile.mkdtemp() + "/ep{epoch}.pt")[-6:]
        'ep0.pt'
    """
    return save_as_file(state, filename, None, weights_only=weights_only, ignore_keys=ignore_keys, together=True)


def safe_torch_load(
    composer_states_filepath: Path | str,
    map_location: str | torch.device | None = "cpu",
    load_monolith_rank0_only: bool = False,
) -> dict[str, Any]:
    """Return the content of a checkpoint file, whose code is never run; of a checkpoint folder its data and weights.

    Args:
        composer_states_filepath: A file of ``torch.save``, or the folder of a checkpoint of this library.
        map_location: The device of the tensors; the CPU if None.
        load_monolith_rank0_only: Ignored.

    Raises:
        CheckpointError: It does not exist, is damaged, or holds objects that are not data.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp(), "checkpoint.pt")
        >>> torch.save({"state": {"model": {"weight": torch.ones(2)}}}, path)
        >>> safe_torch_load(path)["state"]["model"]["weight"]
        tensor([1., 1.])
    """
    del load_monolith_rank0_only
    if Path(composer_states_filepath).is_file():
        content = read_torch_file(Path(composer_states_filepath))
    else:
        content = content_of(open_checkpoint(source_of(composer_states_filepath)), str(composer_states_filepath))
    loaded: dict[str, Any] = move_batch(content, torch.device(map_location or "cpu"))
    return loaded


def ensure_valid_checkpoint(checkpoint_filepath: Path | str) -> Path | str:
    """Return the path of a checkpoint, after reading it.

    Raises:
        CheckpointError: It does not exist, is damaged, or holds objects that are not data.

    Example:
        >>> ensure_valid_checkpoint("no/such/checkpoint")
        Traceback (most recent call last):
        composer.checkpoint.errors.MissingCheckpointError: no/such/checkpoint does not exist.
    """
    if Path(checkpoint_filepath).is_file():
        read_torch_file(Path(checkpoint_filepath))
    else:
        verify_checkpoint(source_of(checkpoint_filepath))
    return checkpoint_filepath


def get_hf_config_from_composer_state_dict(
    state_dict: Mapping[str, Any], config_overrides: Mapping[str, Any] | None = None
) -> Any:
    """Return the configuration of a model of Transformers from what :func:`safe_torch_load` returns.

    Args:
        state_dict: The content of a checkpoint of Composer or of this library.
        config_overrides: Settings to change.

    Raises:
        ValueError: The checkpoint is not of a model of Transformers.

    Example:
        >>> config = {"content": {"model_type": "gpt2", "n_layer": 3}}
        >>> saved = {"state": {"integrations": {"huggingface": {"model": {"config": config}}}}}
        >>> get_hf_config_from_composer_state_dict(saved, {"n_head": 2}).n_layer
        3
    """
    from transformers import AutoConfig  # noqa: PLC0415  (an extra)

    saved = state_dict["state"].get("integrations", {}).get("huggingface")
    if not saved:
        raise ValueError("state_dict has no state/integrations/huggingface: its model is not a HuggingFaceModel.")
    model = saved["model"]
    content = json.loads(model["files"]["config.json"]) if "files" in model else model["config"]["content"]
    return AutoConfig.for_model(content["model_type"]).from_dict({**content, **(config_overrides or {})})
