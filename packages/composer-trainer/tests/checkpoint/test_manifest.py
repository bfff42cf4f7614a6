"""The manifest and the files of a folder; the folders are in ``test_folders.py`` and ``test_remote.py``."""

import hashlib
import json

import hypothesis.strategies as st
import pytest
import xxhash
from hypothesis import given, settings

from composer.checkpoint import CheckpointError, FileRecord, Manifest, manifest
from composer.checkpoint.folders import LocalFolder
from composer.checkpoint.manifest import Content
from composer.checkpoint.reading import OpenCheckpoint
from composer.core import Timestamp

MANIFEST = Manifest(
    files={"state.json": FileRecord(2, "0" * 32), "model.safetensors": FileRecord(10, "a" * 32)},
    timestamp=Timestamp(epoch=1, batch=5),
    run_name="blur é",
    created="2026-01-01T00:00:00+00:00",
    versions={"torch": "2.15.0"},
    metrics={"metrics/eval/Accuracy": 0.1, "metrics/eval/Loss": None},
)


def signed(**changes):
    """Return a manifest's bytes with changed fields and a valid checksum."""
    data = {**json.loads(MANIFEST.to_bytes()), **changes}
    del data["sha256"]
    text = json.dumps(data, sort_keys=True, indent=1) + "\n"
    data["sha256"] = hashlib.sha256(text.encode()).hexdigest()
    return (json.dumps(data, sort_keys=True, indent=1) + "\n").encode()


class TestContent:
    def test_parts(self, monkeypatch):
        """A file has the XXH3 of all of it and of its blocks; also if it is read again."""
        monkeypatch.setattr(manifest, "BLOCK_BYTES", 4)
        content = Content([memoryview(b"par"), memoryview(b"ts of tensors")])
        next(iter(content))  # an attempt to write that has failed
        for _ in range(2):
            written = b"".join(content)

        assert written == b"parts of tensors"
        assert content.record == FileRecord(16, xxhash.xxh3_128_hexdigest(written))
        blocks = (b"part", b"s of", b" ten", b"sors")
        assert content.blocks == "".join(map(xxhash.xxh3_128_hexdigest, blocks))


class TestManifest:
    def test_round_trip(self):
        """A manifest that is written and read is equal."""
        assert Manifest.from_bytes(MANIFEST.to_bytes(), "manifest.json") == MANIFEST

    def test_own_checksum(self):
        """The checksum is the SHA-256 of the JSON without it."""
        data = json.loads(MANIFEST.to_bytes())
        claimed = data.pop("sha256")

        text = json.dumps(data, sort_keys=True, indent=1) + "\n"

        assert hashlib.sha256(text.encode()).hexdigest() == claimed

    @settings(max_examples=300, deadline=None)
    @given(st.data())
    def test_flipped_bits_are_detected(self, data):
        """For any flipped bit the manifest raises with its name."""
        content = bytearray(MANIFEST.to_bytes())
        content[data.draw(st.integers(0, len(content) - 1))] ^= 1 << data.draw(st.integers(0, 7))

        with pytest.raises(CheckpointError, match=r"^here/manifest\.json "):
            Manifest.from_bytes(bytes(content), "here/manifest.json")

    @pytest.mark.parametrize(
        "name", ["../state.json", "/etc/passwd.json", "a/b.json", "manifest.json", "", ".json", "state.py", "a\nb.json"]
    )
    def test_invalid_file_names_raise(self, name):
        """A name outside the folder, or of an unknown file, raises."""
        with pytest.raises(CheckpointError, match="is no name of a file in a checkpoint"):
            Manifest.from_bytes(signed(files={name: {"size": 2, "xxh3_128": "0" * 32}}), "manifest.json")


def test_file_that_no_memory_can_hold(tmp_path):
    """A file that is larger than memory, as a sparse one may be, raises an error with its size."""
    manifest = Manifest(files={"layout.json": FileRecord(1 << 61, "0" * 32)}, timestamp=Timestamp())
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "layout.json").write_bytes(b"{}")

    with pytest.raises(CheckpointError, match="has 2305843009213693952 bytes, which memory cannot hold"):
        OpenCheckpoint(LocalFolder(tmp_path), "one", manifest).content("layout.json")
