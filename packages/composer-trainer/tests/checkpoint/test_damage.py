"""Loading a damaged checkpoint raises an error or gives the saved run."""

import hashlib
import json
import os
import re
import shutil
import tracemalloc
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, given, settings

from composer.checkpoint import (
    CheckpointError,
    CheckpointSaveError,
    load_checkpoint,
    save_checkpoint,
    show_checkpoint,
    verify_checkpoint,
)
from composer.checkpoint.folder import FileRecord, Manifest, write_json

FILES = ["manifest.json", "layout.json", "model.safetensors", "optimizers.safetensors", "state.json"]
LONG = "a" * 5_000_000
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


def in_layout(**fields):
    """Return what changes fields of a weight in the layout."""

    def damage(files):
        layout = json.loads(files["layout.json"])
        layout["tensors"]["model.safetensors"]["0.weight"].update(fields)
        return files | {"layout.json": json.dumps(layout).encode()}

    return damage


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

    @settings(QUICK, max_examples=60)
    @pytest.mark.filterwarnings("ignore::UserWarning")
    @given(
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
            lambda inner: (
                st.lists(inner, max_size=3)
                | st.dictionaries(
                    st.sampled_from(["$tensor", "$tuple", "$dict", "$float", "a", "key"]), inner, max_size=3
                )
            ),
            max_leaves=8,
        ),
        st.sampled_from(
            [
                "timestamp",
                "algorithms",
                "callbacks",
                "schedulers",
                "optimizers",
                "model",
                "extra",
                "modules",
                "scaler",
                "environment",
                "eval_metric_values",
                "version",
                "run_name",
                "other",
            ]
        ),
    )
    def test_arbitrary_data(self, try_loading, value, field):
        """Arbitrary data in a field, with updated checksum, raises or is read."""

        def damage(files):
            data = json.loads(files["state.json"]) | {field: value}
            return files | {"state.json": json.dumps(data).encode()}

        assert try_loading(damage, True)[1] == []

    @pytest.mark.parametrize("length", [1 << 32, (1 << 63) - 1, (1 << 64) - 1, 99_999_999])
    def test_huge_positions(self, raises_error, length):
        """A tensor that claims to be behind the end of its file is not read."""
        assert raises_error(in_layout(positions=[length]), True)

    @pytest.mark.parametrize("shape", [[1 << 40, 4], [1 << 61, 1 << 61], [1 << 61]])
    def test_huge_shapes(self, raises_error, shape):
        """A tensor that claims to be larger than its file allocates no memory."""
        assert raises_error(in_layout(shape=shape, cuts=[[0]] * len(shape)), True)

    def test_links_are_not_followed(self, saved, runs):
        """A folder whose files are links raises, and their targets do not change."""
        outside = Path(saved.parent, "outside")
        outside.write_text("precious")
        (saved / "state.json").unlink()
        (saved / "state.json").symlink_to(outside)

        with pytest.raises(CheckpointError, match=r"state\.json must be a file, and is a link"):
            load_checkpoint(saved, runs.make())

        assert outside.read_text() == "precious"


class TestLongNames:
    """A name of 5 MB in a malicious file is truncated in errors."""

    @pytest.mark.parametrize(
        "change",
        [
            lambda data: data.update({LONG: 1}),
            lambda data: data["model"].update({LONG: 1.0}),
            lambda data: data["timestamp"].update({LONG: 1}),
            lambda data: data["optimizers"]["Adam"]["state"]["0.weight"]["step"].update({"$tensor": LONG}),
        ],
        ids=["field", "weight", "clock", "tensor"],
    )
    def test_state(self, runs, saved, change):
        """The error has the name's beginning and end, and states the problem."""
        runs.edit(saved, change)

        error = error_of(load_checkpoint, saved, runs.make(seed=1, batch=0))

        assert "characters are left out) ... " in error
        assert len(error) < 5000

    def test_manifest(self, saved):
        """An unknown field in a manifest with a valid checksum."""
        data = json.loads((saved / "manifest.json").read_bytes()) | {LONG: 1}
        del data["sha256"]
        data["sha256"] = hashlib.sha256(write_json(data)).hexdigest()
        (saved / "manifest.json").write_bytes(write_json(data))

        error = error_of(verify_checkpoint, saved)

        assert "unknown field" in error
        assert len(error) < 5000

    def test_state_that_is_too_large(self, runs, saved):
        """A larger file than any that is saved is not read, as its JSON would take many times as much memory."""
        os.truncate(saved / "state.json", (1 << 30) + 1)  # sparse
        manifest = Manifest.from_bytes((saved / "manifest.json").read_bytes(), saved)
        manifest.files["state.json"] = FileRecord((1 << 30) + 1, "0" * 32)
        (saved / "manifest.json").write_bytes(manifest.to_bytes())

        for call in (lambda path: load_checkpoint(path, runs.make(seed=1, batch=0)), show_checkpoint):
            assert "state.json has 1073741825 bytes, more than any that is saved" in error_of(call, saved)

    def test_layout_of_far_more_tensors(self, runs, saved):
        """A layout that is larger than the run's tensors need is not read, as that takes memory and time."""
        (saved / "layout.json").write_bytes((saved / "layout.json").read_bytes() + b" " * (14 << 20))
        runs.sign(saved)

        error = error_of(load_checkpoint, saved, runs.make(seed=1, batch=0))

        assert re.search(
            r"layout\.json has \d+ bytes, far more than for 4 weights and the tensors that \d+ bytes of state", error
        )

    def test_tensor_name(self, runs, saved):
        """A weight's name in the layout."""
        layout = json.loads((saved / "layout.json").read_text())
        weights = layout["tensors"]["model.safetensors"]
        weights[LONG] = weights.pop("0.weight")
        (saved / "layout.json").write_text(json.dumps(layout))
        runs.sign(saved)

        error = error_of(load_checkpoint, saved, runs.make(seed=1, batch=0))

        assert "model.0.weight" in error
        assert len(error) < 5000

    def test_warning(self, runs, saved):
        """A difference to the environment of the saved run."""
        runs.edit(saved, lambda data: data["environment"].update(torch=LONG))

        with pytest.warns(UserWarning, match="torch was aaa") as caught:
            load_checkpoint(saved, runs.make(seed=1, batch=0))

        assert len(str(caught[0].message)) < 5000

    def test_run_name(self, runs, tmp_path):
        """The name of another run's checkpoint at the same path."""
        runs.rename(save_checkpoint(runs.make(), tmp_path / "one"), LONG)

        with pytest.raises(CheckpointSaveError, match="there is one already, of run 'aaa") as caught:
            save_checkpoint(runs.make(run_name="other"), tmp_path / "one")

        assert len(str(caught.value)) < 5000
