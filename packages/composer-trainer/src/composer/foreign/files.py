"""From a path to what is loaded: a file of another library, or a checkpoint of this one."""

from __future__ import annotations

import contextlib
import os
import re
from functools import partial

import attrs

from composer.checkpoint.errors import CheckpointError
from composer.checkpoint.finding import agreed_newest, agreed_path, follow_link, without_link
from composer.checkpoint.folders import is_remote, local_path, open_folder, split_path
from composer.checkpoint.loading import SavedRun, Source
from composer.checkpoint.manifest import MANIFEST
from composer.core import State
from composer.core.saving.model_state import first_names
from composer.distributed import from_rank_zero, get_global_rank
from composer.distributed.collectives import failing_in_all_processes
from composer.foreign.composer_files import ComposerFile, names_here
from composer.foreign.pt_files import SUFFIX, open_files, saved_run
from composer.foreign.torch_files import read_file, weights_in

_ENDINGS = (".pt", ".pth", ".bin", ".ckpt", ".safetensors")


@attrs.frozen
class ForeignFile(Source):
    """A file of weights, or a checkpoint that is a file, for ``composer.checkpoint.load_checkpoint``.

    Nothing in it is executed. The Trainer makes one of a ``load_path`` with the ending of such a file.

    Args:
        path: The path or URL of a file of ``torch.save`` or of safetensors: a ``state_dict``, one under
            ``"state_dict"`` or ``"model"``; a checkpoint whose name ended in ``.pt`` when it was saved; or one of
            MosaicML Composer, of which also the optimizers and the clock are loaded, and a warning names what is not
            restored.

    Example:
        >>> import tempfile, torch
        >>> from composer.checkpoint import load_checkpoint
        >>> path, state = tempfile.mkdtemp() + "/weights.pt", State(torch.nn.Linear(2, 2))
        >>> torch.save({"weight": torch.eye(2), "bias": torch.ones(2)}, path)
        >>> loaded = load_checkpoint(ForeignFile(path), state, weights_only=True)
        >>> state.model.bias.tolist()
        [1.0, 1.0]
    """

    path: str = attrs.field(converter=os.fspath)

    def read(self, run: State, *, weights_only: bool) -> SavedRun:
        """Return the content of the file for a run.

        Raises:
            CheckpointError: It cannot be read, holds no weights, or only weights where more is wanted.
        """
        content = read_file(self.path)
        if (own := saved_run(content, self.path, weights_only=weights_only)) is not None:
            return own
        weights = weights_in(content, self.path)
        composer = ComposerFile.of(content)
        if composer is None and not weights_only:
            raise CheckpointError(
                self.path, "is a file of weights, not a checkpoint; set weights_only (load_weights_only of a Trainer)."
            )
        names = names_here(weights, expected := run.get_model_state_dict())
        if composer is None:
            if expected.keys().isdisjoint(names.values()):
                theirs, here = (", ".join([*some][:3]) for some in (weights, expected))
                raise CheckpointError(self.path, f"has no weight of the model: its names are {theirs} …, not {here} …")
            found, first = {new: weights[name] for name, new in names.items()}, first_names(run.model)
            tied = {first[name]: weight for name, weight in found.items() if name in first}  # a file may have it once
            return SavedRun(
                self.path, {"model": {name: tied[one] for name, one in first.items() if one in tied} | found}
            )
        ignored = composer.ignored(run)
        if weights_only:
            data = composer.model(names, averaged=True)
            others = {name: part for name, part in composer.state.items() if name not in data}
            return SavedRun(self.path, data, not_needed=others, ignored=ignored)
        data, not_read = composer.to_saved(names, run)
        warning = (
            f"{self.path} is a checkpoint of MosaicML Composer. The training continues from it, but not as it would "
            f"have there: not restored are {', '.join(not_read)}."
        )
        return SavedRun(self.path, data, ignored=ignored, warnings=[warning])


def source_of(path: str | os.PathLike[str]) -> str | Source:
    """Return what is at a path: a file of another library, or the path of a checkpoint; for one process.

    Example:
        >>> source_of("resnet.pt"), source_of("runs/ep3-ba1200")
        (ForeignFile(path='resnet.pt'), 'runs/ep3-ba1200')
    """
    text = without_link(os.fspath(path))  # which may change before another process follows it
    if not text.endswith(_ENDINGS) or (not is_remote(text) and local_path(text).is_dir()):
        return text
    return _checkpoint_named(text) or ForeignFile(text)


def agreed_source(path: str | os.PathLike[str]) -> str | Source:
    """Return what all processes load, which rank 0 chooses; all have to call it.

    Args:
        path: The path of a file, or of a checkpoint; see :func:`~composer.checkpoint.finding.agreed_path`.

    Raises:
        CheckpointError: With several processes, in each, if there is no checkpoint; else the load raises it.
    """
    source, has_pt_files = path, False
    with failing_in_all_processes("cannot be loaded: looking for it", partial(CheckpointError, path)):
        if get_global_rank() == 0:
            source = source_of(path)
            has_pt_files = not isinstance(source, Source) and any(local_path(source).glob(f"*{SUFFIX}"))
    source, has_pt_files = from_rank_zero((source, has_pt_files))
    newest = agreed_newest(open_files(source), None, weights_only=None) if has_pt_files else None
    source = source if newest is None else source_of(newest)
    return source if isinstance(source, Source) else agreed_path(str(source))


def _checkpoint_named(text: str) -> str | Source | None:
    """Return the checkpoint that a name of a file leads to, or that is a folder of the name, also without its end."""
    if not text.endswith(SUFFIX) or text.startswith("http"):  # a site is not asked for the names in a folder
        return None
    with contextlib.suppress(CheckpointError, ImportError):  # what opens the file raises it
        parent, file = split_path(text)
        folder, inside = open_folder(parent), "" if is_remote(text) else f"/{MANIFEST}"  # a link at a URL is a file
        names = file, file.removesuffix(SUFFIX), re.sub(r"-rank\d+\.pt$", "", file)
        target = follow_link(folder, file)  # where links are not supported, it is a file with a name
        if target != file:
            is_file = target.endswith(_ENDINGS) and not folder.exists(f"{target}/{MANIFEST}")
            return ForeignFile(folder.at(target)) if is_file else folder.at(target)
        if folder.exists(f"{file}/{MANIFEST}") or not folder.exists(file):
            return next((folder.at(one) for one in names if folder.exists(f"{one}{inside}")), None)
    return None
