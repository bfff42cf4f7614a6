"""Reading the files of a folder; both kinds of folders are in ``test_local.py`` and ``test_remote.py``."""

import pytest

from composer.checkpoint import CheckpointError, FileRecord, Manifest
from composer.checkpoint.local import LocalFolder
from composer.core import Timestamp


def test_file_that_no_memory_can_hold(tmp_path):
    """A file that is larger than memory, as a sparse one may be, raises an error with its size."""
    manifest = Manifest(files={"layout.json": FileRecord(1 << 61, "0" * 32)}, timestamp=Timestamp())
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "layout.json").write_bytes(b"{}")

    with pytest.raises(CheckpointError, match="has 2305843009213693952 bytes, which memory cannot hold"):
        LocalFolder(tmp_path).content("one", "layout.json", manifest)
