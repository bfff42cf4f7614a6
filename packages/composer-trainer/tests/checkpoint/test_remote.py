"""Remote folders: a local S3 server, and memory."""

import _thread

import fsspec
import pytest

from composer.checkpoint import (
    CheckpointError,
    CheckpointSaveError,
    find_checkpoints,
    load_checkpoint,
    newest_checkpoint,
    save_checkpoint,
    show_checkpoint,
    verify_checkpoint,
)
from composer.checkpoint.folders import is_remote
from composer.checkpoint.remote import RemoteFolder
from composer.checkpoint.run_folder import delete_old, own_checkpoints
from composer.checkpoint.saving import take_snapshot
from composer.core import Timestamp

pytestmark = pytest.mark.filterwarnings("ignore:datetime.datetime.utcnow:DeprecationWarning")


@pytest.fixture(params=["memory", "s3"])
def url(request):
    """Return the URL of an empty folder."""
    if request.param == "s3":
        return f"{request.getfixturevalue('s3')}/{request.node.name.replace('[', '-').rstrip(']')}"
    files = fsspec.filesystem("memory")
    files.store.clear()
    files.pseudo_dirs[:] = [""]
    return "memory://runs"


def put(url, content):
    with fsspec.open(url, "wb") as file:
        file.write(content)


def names(url):
    files, root = fsspec.core.url_to_fs(url)
    files.invalidate_cache()
    return sorted(path.rpartition("/")[2] for path in files.find(root))


def keep_one(url):
    folder = RemoteFolder(url)
    own = own_checkpoints(folder, "blur", Timestamp(epoch=1, batch=9), weights_only=False)
    return delete_old(folder, own, 1)


class TestRemoteFolder:
    def test_round_trip(self, runs, url):
        """A run that is saved remotely is restored."""
        path = save_checkpoint(runs.make(), f"{url}/ep{{epoch}}-ba{{batch}}", extra={"data": [1]})
        later = runs.make(seed=1, rank_zero_seed=0)

        loaded = load_checkpoint(path, later)

        assert path == f"{url}/ep1-ba5"
        assert runs.same(runs.make(), later)
        assert loaded.extra == {"data": [1]}
        assert "run         blur" in show_checkpoint(path)

    def test_weights_only(self, runs, url):
        """For weights only, the optimizer's file is not downloaded; it may be damaged."""
        path = save_checkpoint(runs.make(), f"{url}/one")
        files, root = fsspec.core.url_to_fs(path)
        size = files.info(f"{root}/optimizers.safetensors")["size"]
        put(f"{path}/optimizers.safetensors", bytes(size))
        later = runs.make(seed=1)

        load_checkpoint(path, later, weights_only=True)

        assert runs.same_tensors(later.model.state_dict(), runs.make().model.state_dict())
        with pytest.raises(CheckpointError, match=r"one/optimizers\.safetensors has been changed"):
            load_checkpoint(path, later)

    def test_incomplete_upload(self, runs, url):
        """An upload without manifest is not a checkpoint, and is replaced by the next one."""
        save_checkpoint(runs.make(batch=3), f"{url}/ba3")
        for file in ("model.safetensors", "state.json"):
            put(f"{url}/ba5/{file}", b"half")

        unfinished, complete = find_checkpoints(url)
        save_checkpoint(runs.make(), f"{url}/ba5")

        assert "ba5/manifest.json is missing" in unfinished.problem
        assert complete.name == "ba3"
        assert newest_checkpoint(url).name == "ba5"

    def test_changed_checkpoint_is_skipped(self, runs, url):
        """A later checkpoint with a changed file is skipped with a warning that names it."""
        for batch in (3, 20):
            save_checkpoint(runs.make(batch=batch), f"{url}/ba{batch}")
        files, root = fsspec.core.url_to_fs(url)
        put(f"{url}/ba20/model.safetensors", bytes(files.info(f"{root}/ba20/model.safetensors")["size"]))

        with pytest.warns(UserWarning, match=r"ba20/model\.safetensors has been changed"):
            result = newest_checkpoint(url)

        assert result.name == "ba3"

    @pytest.mark.parametrize("name", [".DS_Store", "notes.txt"])
    def test_unlisted_files(self, runs, url, name):
        """Unlisted files are ignored; checkpoints with user files are not deleted."""
        path = save_checkpoint(runs.make(batch=3), f"{url}/ba3")
        save_checkpoint(runs.make(batch=4), f"{url}/ba4")
        put(f"{path}/{name}", b"other")

        verify_checkpoint(path)
        deleted = keep_one(url)

        assert deleted == (["ba3"] if name == ".DS_Store" else [])

    @pytest.mark.parametrize("damage", ["missing", "longer"])
    def test_missing_or_resized_files(self, runs, url, damage):
        """A file that is missing or of another size is named."""
        path = save_checkpoint(runs.make(), f"{url}/one")
        file = "state.json"
        if damage == "missing":
            files, root = fsspec.core.url_to_fs(path)
            files.rm_file(f"{root}/{file}")
        else:
            put(f"{path}/{file}", b"other")

        with pytest.raises(CheckpointError, match=rf"one/{file} "):
            verify_checkpoint(path)

    def test_old_checkpoints_are_deleted(self, runs, url):
        """Only the last checkpoints of this run are kept."""
        for batch in (3, 4, 5):
            save_checkpoint(runs.make(batch=batch), f"{url}/ba{batch}")
        save_checkpoint(runs.make(batch=1, run_name="other"), f"{url}/other")

        deleted = keep_one(url)

        assert deleted == ["ba3", "ba4"]
        assert [one.name for one in find_checkpoints(url)] == ["other", "ba5"]

    def test_manifest_is_deleted_first(self, runs, monkeypatch):
        """A checkpoint is invalid as soon as its deletion starts."""
        files = fsspec.filesystem("memory")
        files.store.clear()
        path, removed = save_checkpoint(runs.make(), "memory://runs/one"), []
        remove = type(files).rm_file
        monkeypatch.setattr(
            type(files), "rm_file", lambda own, path: (removed.append(path.rpartition("/")[2]), remove(own, path))
        )

        RemoteFolder("memory://runs").delete("one")

        assert removed[0] == "manifest.json"
        assert len(removed) == 5
        assert find_checkpoints(path) == []

    def test_user_files_are_not_deleted(self, runs, url):
        """Files of others under a checkpoint's name are neither replaced nor deleted."""
        put(f"{url}/one/notes.txt", b"precious")

        with pytest.raises(CheckpointSaveError, match=r"'notes\.txt' in it is not a file of a checkpoint"):
            save_checkpoint(runs.make(), f"{url}/one", overwrite=True)

        assert names(f"{url}/one") == ["notes.txt"]

    def test_overwrite(self, runs, url):
        """A checkpoint of another time is replaced with overwrite=True."""
        path = save_checkpoint(runs.make(), f"{url}/one")
        with pytest.raises(CheckpointSaveError, match="there is one already"):
            save_checkpoint(runs.make(batch=6), path)

        save_checkpoint(runs.make(batch=6), path, overwrite=True)

        assert int(verify_checkpoint(path).timestamp.batch) == 6

    def test_latest(self, runs, url):
        """A small file names the latest checkpoint."""
        path = save_checkpoint(runs.make(), f"{url}/one")
        folder = RemoteFolder(url)

        folder.set_latest("latest", "one")

        assert folder.get_latest("latest") == "one"
        assert verify_checkpoint(f"{url}/latest") == verify_checkpoint(path)
        assert folder.get_latest("nothing") is None

    def test_missing_url(self, url):
        """A missing URL has no checkpoints and cannot be loaded."""
        assert find_checkpoints(f"{url}/nothing") == []
        with pytest.raises(CheckpointError, match="does not exist"):
            verify_checkpoint(f"{url}/nothing")


class TestFailures:
    def test_upload_is_complete_or_absent(self, runs, url, monkeypatch):
        """A file is uploaded after it is written completely, so that an error before that uploads nothing of it."""

        def pieces():
            yield memoryview(b"header")
            raise RuntimeError("no more")

        with pytest.raises(CheckpointSaveError, match="no more"):
            RemoteFolder(url).put("one", "one", "model.safetensors", pieces())

        assert names(f"{url}/one") == []

    def test_failure_leaves_no_checkpoint(self, runs, url, monkeypatch):
        """An upload that fails permanently raises and leaves no checkpoint."""
        upload = RemoteFolder._upload

        def broken(folder, path, pieces):
            if path.endswith("state.json"):
                raise ConnectionError("reset by peer")
            upload(folder, path, pieces)

        monkeypatch.setattr(RemoteFolder, "_upload", broken)
        with pytest.raises(CheckpointSaveError, match="one was not saved: ConnectionError: reset by peer"):
            take_snapshot(runs.make(), RemoteFolder(url), "one").write()

        assert not any(one.is_complete for one in find_checkpoints(url))
        assert _thread._count() < 50

    def test_unknown_protocol(self, runs):
        """An unknown protocol raises."""
        with pytest.raises(CheckpointError, match="is not a URL that fsspec supports"):
            load_checkpoint("teapot://runs/one", runs.make())


class TestIsRemote:
    @pytest.mark.parametrize(
        ("path", "expected"),
        [("s3://b/x", True), ("gs://b", True), ("file:///tmp/x", False), ("/tmp/x", False), ("C:\\runs", False)],
    )
    def test_urls(self, path, expected):
        """URLs have a protocol; local paths are not URLs."""
        assert is_remote(path) is expected

    def test_url_without_a_folder_raises(self, runs):
        """It is not taken for a local folder whose name is the protocol."""
        for call in (save_checkpoint, lambda state, url: load_checkpoint(url, state)):
            with pytest.raises(CheckpointError, match="is a URL without a folder"):
                call(runs.make(), "memory://one")

    def test_file_urls_are_paths(self, runs, tmp_path):
        """``file://`` is a local folder with all features."""
        path = save_checkpoint(runs.make(), f"file://{tmp_path}/one")

        assert path == str(tmp_path / "one")
        assert load_checkpoint(f"file://{tmp_path}/one", runs.make(seed=1)).path == path
