"""Checkpoints as data: folders of safetensors and JSON files, written atomically."""

from composer.checkpoint.errors import (
    CheckpointError,
    CheckpointMismatchError,
    CheckpointSaveError,
    FolderInUseError,
)
from composer.checkpoint.finding import FoundCheckpoint, find_checkpoints, newest_checkpoint
from composer.checkpoint.inspection import merge_weights, show_checkpoint, verify_checkpoint
from composer.checkpoint.loading import LoadedCheckpoint, load_checkpoint
from composer.checkpoint.manifest import FileRecord, Manifest
from composer.checkpoint.run_folder import KeepBest
from composer.checkpoint.saving import save_checkpoint
from composer.functional.former_names import serve_former_names
from composer.functional.signatures import unquote_annotations

__all__ = [
    "CheckpointError",
    "CheckpointMismatchError",
    "CheckpointSaveError",
    "FileRecord",
    "FolderInUseError",
    "FoundCheckpoint",
    "KeepBest",
    "LoadedCheckpoint",
    "Manifest",
    "find_checkpoints",
    "load_checkpoint",
    "merge_weights",
    "newest_checkpoint",
    "save_checkpoint",
    "show_checkpoint",
    "verify_checkpoint",
]

unquote_annotations(globals())
serve_former_names(__name__)
