"""Composer's object stores, above fsspec."""

import importlib
import os
import shutil
import signal
import subprocess
import sys
from functools import partial

import fsspec
import pytest
import torch

from composer import Callback
from composer.checkpoint import find_checkpoints
from composer.compat.stores import (
    GCSObjectStore,
    ObjectStore,
    OCIObjectStore,
    RemoteUploaderDownloader,
    S3ObjectStore,
    SFTPObjectStore,
    get_file,
    maybe_create_object_store_from_uri,
)
from fixtures import small_run, weights

pytestmark = pytest.mark.filterwarnings("ignore:datetime.datetime.utcnow:DeprecationWarning")


@pytest.fixture(params=["memory", "s3"])
def store(request):
    """Return an empty store in memory, or in a bucket of a local S3 server."""
    if request.param == "s3":
        request.getfixturevalue("s3")
        return S3ObjectStore("bucket", prefix=request.node.name.replace("[", "-").rstrip("]"))
    fsspec.filesystem("memory").store.clear()
    return ObjectStore("memory://bucket")


@pytest.fixture
def text(tmp_path):
    """Return a file with five bytes."""
    (tmp_path / "a.txt").write_text("hello")
    return tmp_path / "a.txt"


def test_objects(store, text, tmp_path):
    """An object is uploaded, listed by its prefix, measured, and downloaded."""
    sizes = []
    store.upload_object("runs/a.txt", text, callback=lambda *done: sizes.append(done))
    store.upload_object("runs/b/c.txt", str(text))
    store.upload_object("other.txt", text)

    store.download_object("runs/a.txt", tmp_path / "new" / "a.txt")
    store.close()

    assert sizes == [(5, 5)]
    assert store.list_objects("runs/") == ["runs/a.txt", "runs/b/c.txt"]
    assert store.list_objects("o") == ["other.txt"]
    assert store.list_objects() == ["other.txt", "runs/a.txt", "runs/b/c.txt"]
    assert store.list_objects("none/") == []
    assert store.get_object_size("runs/a.txt") == 5
    assert store.get_uri("runs/a.txt") == f"{store.url}/runs/a.txt"
    assert (tmp_path / "new" / "a.txt").read_text() == "hello"


def test_credentials_of_s3(s3, text):
    """Key, secret, region and the settings of the client are passed on."""
    settings = {"region_name": "eu-west-1", "aws_access_key_id": "k", "aws_secret_access_key": "s"}

    store = S3ObjectStore("bucket", **settings, client_config={"read_timeout": 5})

    files = store._files
    assert (files.key, files.secret, files.client_kwargs) == ("k", "s", {"region_name": "eu-west-1"})
    assert files.config_kwargs["read_timeout"] == 5
    store.upload_object("credentials/a.txt", text)
    assert store.list_objects("credentials/") == ["credentials/a.txt"]


def test_get_file(store, text, tmp_path):
    """A file comes from a URL, a store, a destination of loggers or the disk, where it is linked."""
    store.upload_object("a.txt", text)
    uploader = RemoteUploaderDownloader(store.url)

    get_file(store.get_uri("a.txt"), tmp_path / "url.txt")
    get_file("a.txt", str(tmp_path / "store.txt"), object_store=store)
    get_file("a.txt", tmp_path / "logger.txt", object_store=uploader, progress_bar=False)
    get_file(text, tmp_path / "link.txt")
    get_file(text, tmp_path / "link.txt", overwrite=True)

    assert {path.read_text() for path in tmp_path.glob("*.txt")} == {"hello"}
    assert (tmp_path / "link.txt").is_symlink()
    assert not (tmp_path / "url.txt").is_symlink()
    with pytest.raises(FileExistsError):
        get_file(store.get_uri("a.txt"), tmp_path / "url.txt")
    with pytest.raises(FileNotFoundError):
        get_file(tmp_path / "none", tmp_path / "none.txt")


def test_files_of_a_run_are_uploaded(store, text):
    """A callback's files are uploaded with the name of the run, and downloaded."""

    class Upload(Callback):
        def fit_end(self, state, logger):
            assert logger.has_file_upload_destination()
            logger.upload_file("a.txt", text)

    uploader = RemoteUploaderDownloader(store.url, file_path_format_string="{run_name}/{remote_file_name}")
    with small_run(max_duration="1ba", run_name="mine", callbacks=Upload(), loggers=uploader) as trainer:
        trainer.fit()
    uploader.download_file("a.txt", str(text), overwrite=True)

    assert store.list_objects() == ["mine/a.txt"]
    assert uploader.get_uri_for_file("a.txt") == f"{store.url}/mine/a.txt"
    with pytest.raises(FileExistsError, match="overwrite=True"):
        uploader.upload_file(trainer.state, "a.txt", text)
    uploader.upload_file(trainer.state, "a.txt", text, overwrite=True)


def test_checkpoints_of_a_local_folder_are_uploaded(store, tmp_path, monkeypatch):
    """Checkpoints are copied, and a run continues from the URL of one, or of the link."""
    monkeypatch.chdir(tmp_path)
    make = partial(RemoteUploaderDownloader, store.url, file_path_format_string="team/{remote_file_name}")
    with small_run(max_duration="3ba") as whole:
        whole.fit()
    options = {"save_folder": "runs/{run_name}", "save_interval": "1ba", "save_num_checkpoints_to_keep": 1}
    with small_run(loggers=make(), run_name="mine", max_duration="2ba", **options) as first:
        first.fit()

    assert {name.split("/")[-2] for name in store.list_objects("team/runs/mine/ep")} == {"ep0-ba1", "ep0-ba2"}
    (local,) = (path for path in (tmp_path / "runs" / "mine").glob("ep*"))
    for path in local.iterdir():
        assert store.get_object_size(f"team/runs/mine/ep0-ba2/{path.name}") == path.stat().st_size
    for name in ("ep0-ba2-rank0.pt", "latest", "latest-rank0.pt", "ep0-ba2"):
        with small_run(max_duration="3ba", load_path=f"{store.url}/team/runs/mine/{name}") as later:
            assert later.state.timestamp.batch == 2
            later.fit()
        assert torch.equal(weights(whole), weights(later))


def test_new_machine_continues_from_the_newest_copy(tmp_path, monkeypatch, caplog):
    """Without a local checkpoint that is as new, ``autoresume`` continues from the run's newest copy, not another's."""
    url = f"memory://machines{tmp_path}"
    options = {"save_folder": "runs", "save_filename": "{run_name}-ba{batch}", "save_interval": "1ba"}

    def start(machine, duration, run_name="mine"):
        (tmp_path / machine).mkdir(exist_ok=True)
        monkeypatch.chdir(tmp_path / machine)
        uploader = RemoteUploaderDownloader(url)
        return small_run(loggers=uploader, run_name=run_name, autoresume=True, max_duration=duration, **options)

    with small_run(max_duration="4ba") as complete:
        complete.fit()
    for machine, duration, run_name in (("a", "2ba", "mine"), ("b", "3ba", "other")):
        with start(machine, duration, run_name) as trainer:
            assert trainer.state.timestamp.batch == 0
            trainer.fit()
    with start("c", "4ba") as later:
        result = later.fit()

    assert f"autoresume: resuming from {url}/runs/mine-ba2 " in caplog.text
    assert result.steps == 2
    assert torch.equal(weights(complete), weights(later))
    assert {path.name for path in (tmp_path / "c" / "runs").glob("mine-*")} == {"mine-ba3", "mine-ba4"}
    assert {one.name for one in find_checkpoints(f"{url}/runs")} >= {"mine-ba1", "mine-ba2", "mine-ba3", "mine-ba4"}
    with start("c", "5ba"):
        assert f"autoresume: resuming from {tmp_path}/c/runs/mine-ba4 " in caplog.text
    with start("a", "5ba") as earlier:  # which has the checkpoints of its first start
        assert earlier.state.timestamp.batch == 4


KILLED = """
import os, signal, sys
from composer.compat.stores import RemoteUploaderDownloader
from fixtures import record, small_run

def kill(state):
    if int(state.timestamp.batch) == 3:
        os.kill(os.getpid(), signal.SIGKILL)

options = {"save_folder": sys.argv[2], "save_interval": "1ba", "run_name": "mine", "autoresume": True}
uploader = RemoteUploaderDownloader(sys.argv[1])
small_run(loggers=uploader, callbacks=record("batch_start", kill), max_duration="4ba", **options).fit()
"""


def test_new_machine_continues_after_a_kill(tmp_path):
    """A process that is killed in the middle of a copy leaves copies from which another machine continues exactly."""
    url, local = f"file://{tmp_path}/copies", tmp_path / "local"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    killed = subprocess.run([sys.executable, "-c", KILLED, url, str(local)], env=environment, check=False)
    assert killed.returncode == -signal.SIGKILL
    assert local.is_dir()
    shutil.rmtree(local)

    options = {"save_folder": str(local), "save_interval": "1ba", "run_name": "mine", "autoresume": True}
    with small_run(loggers=RemoteUploaderDownloader(url), max_duration="4ba", **options) as later:
        assert later.state.timestamp.batch in (2, 3)
        later.fit()
    with small_run(max_duration="4ba") as complete:
        complete.fit()

    assert torch.equal(weights(complete), weights(later))


def test_settings_of_a_store_are_those_of_its_urls(monkeypatch, tmp_path):
    """What a store or uploader is given for its file system is also used for checkpoints and models below its URL."""
    from fsspec.implementations.memory import MemoryFileSystem

    class Server(MemoryFileSystem):
        cachable = False

        def __init__(self, *args, username=None, **options):
            super().__init__(*args, **options)
            if username != "me":
                raise PermissionError("who is this?")

        @classmethod
        def _strip_protocol(cls, path):
            return super()._strip_protocol(path.rpartition("://")[2])

    monkeypatch.setitem(importlib.import_module("fsspec.registry")._registry, "sftp", Server)
    store = SFTPObjectStore("host", username="me", cwd="data")
    uploaded = tmp_path / "weights.pt"

    with small_run(max_duration="1ba", save_folder="sftp://host/data/runs", run_name="mine") as trainer:
        trainer.fit()
    torch.save(trainer.state.model.state_dict(), uploaded)
    store.upload_object("weights.pt", uploaded)
    trainer.export_for_inference("torchexport", "sftp://host/data/exported/model.pt2")

    assert store.list_objects("exported/") == ["exported/model.pt2"]
    for path, options in [("runs/latest", {}), ("weights.pt", {"load_weights_only": True})]:
        with small_run(load_path=store.get_uri(path), seed=3, **options) as later:
            assert torch.equal(weights(trainer), weights(later))
    with pytest.raises(PermissionError, match="who is this"):
        ObjectStore("sftp://host/other")


def test_stores_of_other_protocols(monkeypatch):
    """Stores of GCS, OCI and SFTP are folders at URLs with their protocols, and SFTP's options reach the server."""
    from fsspec.implementations.memory import MemoryFileSystem

    class Server(MemoryFileSystem):
        cachable = False

        def __init__(self, *args, **options):
            super().__init__(*args)
            self.options = options

        @classmethod
        def _strip_protocol(cls, path):
            return super()._strip_protocol(path.partition("://")[2])

    for protocol in ("gs", "oci", "sftp"):
        monkeypatch.setitem(importlib.import_module("fsspec.registry")._registry, protocol, Server)
    monkeypatch.setenv("COMPOSER_SFTP_KEY_FILE", "id_rsa")

    gs, oci = GCSObjectStore("bucket", "runs"), maybe_create_object_store_from_uri("oci://bucket/a.pt")
    sftp = SFTPObjectStore("sftp://host", 2222, "me", cwd="/runs", connect_kwargs={"timeout": 3})

    assert gs.get_uri("a.pt") == "gs://bucket/runs/a.pt"
    assert (type(oci), oci.url) == (OCIObjectStore, "oci://bucket")
    assert sftp.url == "sftp://host/runs"
    assert sftp._files.options == {"port": 2222, "username": "me", "key_filename": "id_rsa", "timeout": 3}
