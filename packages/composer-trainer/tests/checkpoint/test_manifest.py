"""The manifest, and that every change of it is noticed."""

import hashlib
import json

import attrs
import hypothesis.strategies as st
import pytest
import xxhash
from hypothesis import given, settings

from composer.checkpoint import CheckpointError, FileRecord, Manifest
from composer.core import Timestamp

MANIFEST = Manifest(
    files={"state.json": FileRecord(2, "0" * 64, "0" * 32), "model.safetensors": FileRecord(10, "a" * 64)},
    timestamp=Timestamp(epoch=1, batch=5),
    run_name="blur é",
    created="2026-01-01T00:00:00+00:00",
    versions={"torch": "2.15.0"},
    metrics={"metrics/eval/Accuracy": 0.1, "metrics/eval/Loss": None},
)


def signed(**changes):
    """Return a manifest's bytes with some fields changed, and a checksum that fits them."""
    data = {**json.loads(MANIFEST.to_bytes()), **changes}
    del data["sha256"]
    text = json.dumps(data, sort_keys=True, indent=1) + "\n"
    data["sha256"] = hashlib.sha256(text.encode()).hexdigest()
    return (json.dumps(data, sort_keys=True, indent=1) + "\n").encode()


class TestFileRecord:
    def test_checksums_of_others(self):
        """Both checksums are those that other implementations find, however the content is cut into pieces."""
        content = b"a checkpoint " * 1000
        record = FileRecord.of([content[:7], memoryview(content)[7:]])

        assert record.size == len(content)
        assert record.sha256 == hashlib.sha256(content).hexdigest()
        assert record.xxh3_128 == xxhash.xxh3_128_hexdigest(content)

    def test_empty(self):
        """XXH3 of nothing is what its specification says."""
        assert FileRecord.of([]).xxh3_128 == "99aa06d3014798d86001c324468d497f"

    def test_what_is_compared(self):
        """The quick checksum is compared, where there is one; both are if that is asked for."""
        new, old = FileRecord(1, "0" * 64, "1" * 32), FileRecord(1, "0" * 64)

        assert [list(record.hashes()) for record in (new, old)] == [["xxh3_128"], ["sha256"]]
        assert [len(record.hashes(thoroughly=True)) for record in (new, old)] == [2, 1]


class TestManifest:
    def test_comes_back(self):
        """A manifest that is written and read is the same."""
        assert Manifest.from_bytes(MANIFEST.to_bytes(), "manifest.json") == MANIFEST

    def test_checksum_is_that_of_the_rest(self):
        """The checksum is the SHA-256 of the JSON without it, so that others can check it."""
        data = json.loads(MANIFEST.to_bytes())
        claimed = data.pop("sha256")

        text = json.dumps(data, sort_keys=True, indent=1) + "\n"

        assert hashlib.sha256(text.encode()).hexdigest() == claimed

    @settings(max_examples=300, deadline=None)
    @given(st.data())
    def test_any_flipped_bit_is_noticed(self, data):
        """Whichever bit of the file is flipped, the manifest is refused by its name."""
        content = bytearray(MANIFEST.to_bytes())
        content[data.draw(st.integers(0, len(content) - 1))] ^= 1 << data.draw(st.integers(0, 7))

        with pytest.raises(CheckpointError, match=r"^here/manifest\.json "):
            Manifest.from_bytes(bytes(content), "here/manifest.json")

    @settings(max_examples=60, deadline=None)
    @given(st.integers(0, len(MANIFEST.to_bytes()) - 1))
    def test_any_truncation_is_noticed(self, length):
        """However much of the file is missing, the manifest is refused."""
        with pytest.raises(CheckpointError, match=r"^manifest\.json "):
            Manifest.from_bytes(MANIFEST.to_bytes()[:length], "manifest.json")

    def test_a_blank_more_is_noticed(self):
        """Not even what JSON does not mind may be changed."""
        with pytest.raises(CheckpointError, match="has been changed since"):
            Manifest.from_bytes(MANIFEST.to_bytes() + b" ", "manifest.json")

    @pytest.mark.parametrize(
        "name", ["../state.json", "/etc/passwd.json", "a/b.json", "manifest.json", "", ".json", "state.py", "a\nb.json"]
    )
    def test_paths_are_no_names(self, name):
        """A name outside of the folder, or of an unknown file, is refused."""
        with pytest.raises(CheckpointError, match="is no name of a file in a checkpoint"):
            Manifest.from_bytes(signed(files={name: {"size": 2, "sha256": "0" * 64}}), "manifest.json")

    @pytest.mark.parametrize(
        ("changes", "named"),
        [
            ({"files": {}}, "is not whole: files"),
            ({"files": {"state.json": {"size": -1, "sha256": "0" * 64}}}, "is not whole: files"),
            ({"files": {"state.json": {"size": 1 << 70, "sha256": "0" * 64}}}, "is not whole: files"),
            ({"files": {"state.json": {"size": 1, "sha256": "0"}}}, "is not whole: files"),
            ({"files": {"state.json": {"size": 1, "xxh3_128": "0" * 32}}}, "is not whole: files"),
            ({"files": {"state.json": {"size": 1, "sha256": "0" * 64, "xxh3_128": "x" * 32}}}, "is not whole: files"),
            ({"files": {"state.json": {"size": 1, "sha256": "0" * 64, "md5": "0" * 32}}}, "is not whole: files"),
            ({"files": {"state.json": {"size": 1, "sha256": "0" * 64, "xxh3_128": None}}}, "files.* has a null"),
            ({"files": []}, "is not whole: files"),
            ({"run_name": 3}, "is not whole: run_name"),
            ({"weights_only": 1}, "is not whole: weights_only"),
            ({"metrics": {"loss": "low"}}, "is not whole: metrics"),
            ({"metrics": {"loss": 3}}, "is not whole: metrics: 'loss' must be a finite float or None, got 3"),
            ({"metrics": {"loss": 1 << 2000}}, "is not whole: metrics"),
            ({"versions": {"torch": 2}}, "is not whole: versions"),
            ({"timestamp": {"batch": 1}}, "is not whole: timestamp"),
            ({"timestamp": []}, "is not whole: timestamp"),
            ({"format_version": 99}, "update composer-trainer"),
            ({"format_version": True}, "'format_version'"),
            ({"format": "other"}, "'format'"),
            ({"more": 1}, "'more' is unknown"),
        ],
    )
    def test_wrong_fields(self, changes, named):
        """A manifest that is signed and makes no sense is refused, and the field is named."""
        with pytest.raises(CheckpointError, match=named):
            Manifest.from_bytes(signed(**changes), "manifest.json")

    def test_message(self):
        """A wrong checksum is reported in one sentence, without the objects of the validator."""
        with pytest.raises(CheckpointError) as caught:
            Manifest.from_bytes(signed(files={"state.json": {"size": 1, "sha256": "0"}}), "manifest.json")

        assert str(caught.value) == (
            "manifest.json is not whole: files['state.json']: 'sha256' must match regex '[0-9a-f]{64}' ('0' doesn't)."
        )

    def test_format_1(self):
        """A manifest of format 1, whose files have one checksum, is read."""
        record = {"size": 1, "sha256": "0" * 64}

        manifest = Manifest.from_bytes(signed(files={"state.json": record}, format_version=1), "manifest.json")

        assert manifest.files == {"state.json": FileRecord(**record)}

    def test_endless_clock(self):
        """A duration that no clock can hold is refused, not overflowed."""
        clock = MANIFEST.timestamp.state_dict() | {"total_wct": 1e300}

        with pytest.raises(CheckpointError, match="is not whole: timestamp"):
            Manifest.from_bytes(signed(timestamp=clock), "manifest.json")

    @pytest.mark.parametrize(
        "content", [b"", b"[]", b"{}", b"\xff\xfe", b"[" * 99999, b'{"a":' * 9999, b"9" * 9999, b'{"a": 1e999}']
    )
    def test_no_manifest(self, content):
        """What is no manifest at all is refused with a sentence."""
        with pytest.raises(CheckpointError, match=r"^manifest\.json "):
            Manifest.from_bytes(content, "manifest.json")

    def test_size_is_the_sum(self):
        """The size is that of all files."""
        assert attrs.evolve(MANIFEST).size == 12
