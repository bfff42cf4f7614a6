"""Loading a damaged checkpoint raises an error or gives the saved run."""

import shutil
import tracemalloc
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, given, settings

from composer.checkpoint import (
    CheckpointError,
    load_checkpoint,
    show_checkpoint,
)

FILES = ["manifest.json", "layout.json", "model.safetensors", "optimizers.safetensors", "state.json"]
QUICK = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def error_of(call, *arguments):
    """Return the message with which a call rejects a checkpoint, or None."""
    try:
        call(*arguments)
    except CheckpointError as error:
        return str(error)
    return None


@pytest.fixture
def try_loading(runs, saved):
    """Return a function that damages and loads a copy of a checkpoint, and returns the results."""
    original = {file.name: file.read_bytes() for file in saved.iterdir()}

    def check(damage, sign):
        copy = saved.parent / "copy"
        shutil.rmtree(copy, ignore_errors=True)
        copy.mkdir()
        contents = damage(dict(original))
        for name, content in contents.items():
            (copy / name).write_bytes(content)
        if sign:
            runs.sign(copy)
        later = runs.make(seed=1, batch=0)
        before = {name: value.clone() for name, value in later.model.state_dict().items()}
        tracemalloc.start()
        try:
            error = error_of(load_checkpoint, copy, later)
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        output = error_of(show_checkpoint, copy)

        preserved = {
            "takes no more memory than the files explain": peak < 64 * sum(map(len, contents.values())) + (8 << 20),
            "names the checkpoint": error is None or str(copy) in error,
            "leaves the weights": error is None or runs.same_tensors(later.model.state_dict(), before),
            "leaves the clock": error is None or int(later.timestamp.batch) == 0,
            "rejects data without a valid checksum": error is not None or sign or contents == original,
            "is reported by show": output is None or str(copy) in output,
        }
        return error is not None, [promise for promise, is_kept in preserved.items() if not is_kept]

    return check


@pytest.fixture
def raises_error(try_loading):
    """Return a function that damages a copy of a checkpoint and returns whether loading raised without side effects."""

    def check(damage, sign):
        raised, broken_promises = try_loading(damage, sign)
        assert broken_promises == []
        return raised

    return check


def changed(content, position, value):
    content = bytearray(content)
    content[position % len(content)] = value
    return bytes(content)


class TestDamage:
    @QUICK
    @pytest.mark.filterwarnings("ignore::UserWarning")
    @given(st.sampled_from(FILES), st.integers(0, 10**6), st.integers(0, 255), st.booleans())
    def test_changed_bytes(self, raises_error, saved, name, position, value, sign):
        """A changed byte, also if the checksum is updated, raises or makes no difference."""
        sign, content = sign and name != FILES[0], (saved / name).read_bytes()
        damaged = changed(content, position, value)

        assert raises_error(lambda files: files | {name: damaged}, sign) or sign or damaged == content

    @QUICK
    @pytest.mark.filterwarnings("ignore::UserWarning")
    @given(st.sampled_from(FILES[1:]), st.integers(0, 200), st.integers(0, 255))
    def test_changed_headers(self, try_loading, name, position, value):
        """A changed byte among the first two hundred, with updated checksum, raises or is read."""
        _, broken_promises = try_loading(lambda files: files | {name: changed(files[name], position, value)}, True)

        assert broken_promises == []

    @settings(QUICK, max_examples=60)
    @given(st.sampled_from(FILES), st.integers(0, 10**6), st.booleans())
    def test_truncated(self, raises_error, name, length, sign):
        """A truncated file raises."""
        sign = sign and name != FILES[0]
        assert raises_error(lambda files: files | {name: files[name][: length % len(files[name])]}, sign)

    @settings(QUICK, max_examples=30)
    @given(st.sampled_from(FILES), st.sampled_from(FILES), st.booleans())
    def test_swapped(self, raises_error, one, other, sign):
        """A file replaced by another raises."""
        is_manifest = FILES[0] in (one, other)
        raised = raises_error(lambda files: files | {one: files[other], other: files[one]}, sign and not is_manifest)

        assert raised is (one != other)

    def test_links_are_not_followed(self, saved, runs):
        """A folder whose files are links raises, and their targets do not change."""
        outside = Path(saved.parent, "outside")
        outside.write_text("precious")
        (saved / "state.json").unlink()
        (saved / "state.json").symlink_to(outside)

        with pytest.raises(CheckpointError, match=r"state\.json must be a file, and is a link"):
            load_checkpoint(saved, runs.make())

        assert outside.read_text() == "precious"
