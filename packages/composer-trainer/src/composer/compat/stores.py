"""Composer's object stores, which are URLs here: objects with their methods, by fsspec."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from composer.checkpoint.remote import file_system, set_storage_options
from composer.checkpoint.saver import CheckpointSaver
from composer.core import Logger, LoggerDestination, State
from composer.core.files import write_atomically

Progress = Callable[[int, int], None]


class ObjectStore:
    """A folder at a URL, whose objects are files below it.

    Args:
        url: The URL; any that fsspec opens.
        options: Arguments of the file system in fsspec, also for checkpoints at URLs below this one.

    Raises:
        ImportError: The package for the protocol is not installed.
        ValueError: fsspec does not support the protocol.

    Example:
        >>> store = ObjectStore("memory://bucket")
        >>> Path("weights.bin").touch()
        >>> store.upload_object("runs/weights.bin", "weights.bin")
        >>> store.list_objects("runs/"), store.get_object_size("runs/weights.bin")
        (['runs/weights.bin'], 0)
        >>> Path("weights.bin").unlink()
    """

    def __init__(self, url: str, **options: Any) -> None:
        self.url = url.rstrip("/")
        if options:
            set_storage_options(self.url, options)
        self._files, root = file_system(self.url, options)
        self._root = root.rstrip("/")

    def get_uri(self, object_name: str) -> str:
        """Return the URL of an object."""
        return f"{self.url}/{object_name}"

    def upload_object(self, object_name: str, filename: str | Path, callback: Progress | None = None) -> None:
        """Upload a local file; ``callback(size, size)`` is called at the end."""
        self._files.put_file(str(filename), f"{self._root}/{object_name}")
        _report(filename, callback)

    def get_object_size(self, object_name: str) -> int:
        """Return the size in bytes.

        Raises:
            FileNotFoundError: There is no such object.
        """
        return int(self._files.size(f"{self._root}/{object_name}"))

    def download_object(
        self, object_name: str, filename: str | Path, overwrite: bool = False, callback: Progress | None = None
    ) -> None:
        """Download an object, written atomically; ``callback(size, size)`` is called at the end.

        Raises:
            FileExistsError: The local file exists, and ``overwrite`` is False.
            FileNotFoundError: There is no such object.
        """
        _check_free(filename, overwrite=overwrite)
        write_atomically(lambda path: self._files.get_file(f"{self._root}/{object_name}", str(path)), Path(filename))
        _report(filename, callback)

    def list_objects(self, prefix: str | None = None) -> list[str]:
        """Return the names of the objects that begin with a prefix."""
        self._files.invalidate_cache()  # other processes write, too
        folder = f"{self._root}/{(prefix or '').rpartition('/')[0]}".rstrip("/")
        names = [path.removeprefix(f"{self._root}/") for path in self._files.find(folder)]
        return sorted(name for name in names if name.startswith(prefix or ""))

    def close(self) -> None:
        """Do nothing: fsspec closes its connections."""


class S3ObjectStore(ObjectStore):
    """A bucket of S3.

    Args:
        bucket: Its name.
        prefix: The beginning of the names of all objects.
        region_name: Its region.
        endpoint_url: The server; that in ``S3_ENDPOINT_URL`` if None.
        aws_access_key_id: The key; what is None is read from the environment and the files of AWS.
        aws_secret_access_key: The secret.
        aws_session_token: The token.
        client_config: Settings of botocore's ``Config``.
        transfer_config: Ignored.

    Raises:
        ImportError: s3fs is not installed: ``pip install "composer-trainer[s3]"``.
    """

    def __init__(
        self,
        bucket: str,
        prefix: str = "",
        region_name: str | None = None,
        endpoint_url: str | None = None,
        aws_access_key_id: str | None = None,
        aws_secret_access_key: str | None = None,
        aws_session_token: str | None = None,
        client_config: Mapping[str, Any] | None = None,
        transfer_config: Mapping[str, Any] | None = None,
    ) -> None:
        del transfer_config
        endpoint = endpoint_url or os.environ.get("S3_ENDPOINT_URL")
        options = {
            "key": aws_access_key_id,
            "secret": aws_secret_access_key,
            "token": aws_session_token,
            "endpoint_url": endpoint,
            "client_kwargs": {"region_name": region_name} if region_name else None,
            "config_kwargs": client_config,
        }
        super().__init__(f"s3://{bucket}/{prefix}", **{name: value for name, value in options.items() if value})


class GCSObjectStore(ObjectStore):
    """A bucket of Google Cloud Storage.

    Args:
        bucket: Its name.
        prefix: The beginning of the names of all objects.

    Raises:
        ImportError: gcsfs is not installed.
    """

    def __init__(self, bucket: str, prefix: str = "") -> None:
        super().__init__(f"gs://{bucket}/{prefix}")


class OCIObjectStore(ObjectStore):
    """A bucket of Oracle's object storage.

    Args:
        bucket: Its name.
        prefix: The beginning of the names of all objects.

    Raises:
        ImportError: ocifs is not installed.
    """

    def __init__(self, bucket: str, prefix: str = "") -> None:
        super().__init__(f"oci://{bucket}/{prefix}")


class SFTPObjectStore(ObjectStore):
    """A folder of an SFTP server.

    Args:
        host: The server, or its URL.
        port: Its port.
        username: The name of the user.
        password: The password.
        known_hosts_filename: Ignored.
        known_hosts_filename_environ: Ignored.
        key_filename: The file of the private key; that in the variable ``key_filename_environ`` if None.
        key_filename_environ: The name of that variable.
        missing_host_key_policy: Ignored.
        cwd: The folder.
        connect_kwargs: Further arguments of ``paramiko.SSHClient.connect``.

    Raises:
        ImportError: paramiko is not installed.
    """

    def __init__(
        self,
        host: str,
        port: int = 22,
        username: str | None = None,
        password: str | None = None,
        known_hosts_filename: str | Path | None = None,
        known_hosts_filename_environ: str = "COMPOSER_SFTP_KNOWN_HOSTS_FILE",
        key_filename: str | Path | None = None,
        key_filename_environ: str = "COMPOSER_SFTP_KEY_FILE",
        missing_host_key_policy: object = "RejectPolicy",
        cwd: str = "",
        connect_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        del known_hosts_filename, known_hosts_filename_environ, missing_host_key_policy
        key = key_filename or os.environ.get(key_filename_environ)
        options = {"username": username, "password": password, "key_filename": key and str(key)}
        given = {name: value for name, value in options.items() if value} | {**(connect_kwargs or {})}
        server = host.removeprefix("sftp://").rstrip("/")
        super().__init__(f"sftp://{server}/{cwd.lstrip('/')}", port=port, **given)


_BUCKETS = {"s3": S3ObjectStore, "gs": GCSObjectStore, "oci": OCIObjectStore}


def parse_uri(uri: str) -> tuple[str, str, str]:
    """Return the protocol, the bucket and the path of a URL; the first two are empty for a local path.

    Example:
        >>> parse_uri("s3://bucket/runs/a.pt"), parse_uri("/runs/a.pt")
        (('s3', 'bucket', 'runs/a.pt'), ('', '', '/runs/a.pt'))
    """
    protocol, found, rest = uri.partition("://")
    bucket, _, path = rest.partition("/")
    return (protocol, bucket.partition("@")[0], path) if found else ("", "", uri)


def maybe_create_object_store_from_uri(uri: str) -> ObjectStore | None:
    """Return the store of a URL's bucket; None for a local path.

    Example:
        >>> maybe_create_object_store_from_uri("memory://bucket/a.pt").url, maybe_create_object_store_from_uri("a.pt")
        ('memory://bucket', None)
    """
    protocol, bucket, _ = parse_uri(uri)
    if protocol in {"", "file"}:
        return None
    return _BUCKETS[protocol](bucket) if protocol in _BUCKETS else ObjectStore(f"{protocol}://{bucket}")


def is_uri(path: str) -> bool:
    """Return whether a path is a URL.

    Example:
        >>> is_uri("s3://bucket/a.pt"), is_uri("a.pt")
        (True, False)
    """
    return parse_uri(path)[0] != ""


def list_remote_objects(remote_path: str) -> list[str]:
    """Return the names in its bucket of the objects that begin with a URL.

    Raises:
        ValueError: It is a local path.

    Example:
        >>> list_remote_objects("memory://nothing/a")
        []
    """
    store = maybe_create_object_store_from_uri(remote_path)
    if store is None:
        raise ValueError(f"remote_path must be a URL, got {remote_path!r}. Use os.listdir.")
    return store.list_objects(parse_uri(remote_path)[2])


def validate_credentials(remote_backend: ObjectStore, remote_file_name_to_test: str) -> None:
    """Upload a small file, to see whether that is permitted.

    Example:
        >>> validate_credentials(ObjectStore("memory://bucket"), "permitted.txt")
    """
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.write("This run may write here.")
        file.flush()
        remote_backend.upload_object(remote_file_name_to_test, file.name)


def extract_path_from_symlink(source_path: str, object_store: ObjectStore | LoggerDestination | None = None) -> str:
    """Return the path in a file that stands for a link, local or in a store.

    Example:
        >>> extract_path_from_symlink("no/such/file.symlink")
        Traceback (most recent call last):
        FileNotFoundError: no/such/file.symlink does not exist.
    """
    name = source_path if object_store is None else parse_uri(source_path)[2]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "link")
        get_file(name, file, object_store)
        return file.read_text()


def get_file(
    path: str | Path,
    destination: str | Path,
    object_store: ObjectStore | LoggerDestination | None = None,
    overwrite: bool = False,
    progress_bar: bool = True,
) -> None:
    """Download a file, or link to a local one.

    Args:
        path: A local path, a URL that fsspec opens, or the name of an object in ``object_store``.
        destination: The local file.
        object_store: Where the object is.
        overwrite: Whether the local file may exist.
        progress_bar: Ignored.

    Raises:
        FileExistsError: ``destination`` exists, and ``overwrite`` is False.
        FileNotFoundError: There is no such file.

    Example:
        >>> get_file("no/such/file", "weights.bin")
        Traceback (most recent call last):
        FileNotFoundError: no/such/file does not exist.
    """
    name = str(path)
    if object_store is None and is_uri(name):
        parent, _, name = name.rpartition("/")
        object_store = ObjectStore(parent)
    if isinstance(object_store, LoggerDestination):
        object_store.download_file(name, str(destination), overwrite=overwrite, progress_bar=progress_bar)
    elif object_store is not None:
        object_store.download_object(name, destination, overwrite=overwrite)
    else:
        _check_free(destination, overwrite=overwrite)
        if not Path(path).exists():
            raise FileNotFoundError(f"{path} does not exist.")
        write_atomically(lambda link: link.symlink_to(Path(path).absolute()), Path(destination))


class RemoteUploaderDownloader(LoggerDestination):
    """Uploads to a URL the files that a run logs, and copies of the checkpoints that it saves in a local folder.

    A file is uploaded before the training continues, a checkpoint in the background, with its manifest last and a file
    that names the latest one. ``autoresume`` continues from the newest copy if the local folder has no checkpoint of
    the run that is as new. Checkpoints in a folder that is a URL are there already, and are not copied.

    Args:
        bucket_uri: The URL of the bucket or folder.
        backend_kwargs: Arguments of the class of the store, without the bucket.
        file_path_format_string: The name of the uploaded file: ``"{run_name}/{remote_file_name}"``.
        num_concurrent_uploads: Ignored.
        upload_staging_folder: Ignored.
        use_procs: Ignored.
        num_attempts: Ignored; fsspec tries again.

    Example:
        >>> uploader = RemoteUploaderDownloader("memory://bucket", file_path_format_string="logs/{remote_file_name}")
        >>> uploader.get_uri_for_file("a.txt")
        'memory://bucket/logs/a.txt'
    """

    def __init__(
        self,
        bucket_uri: str,
        backend_kwargs: Mapping[str, Any] | None = None,
        file_path_format_string: str = "{remote_file_name}",
        num_concurrent_uploads: int = 1,
        upload_staging_folder: str | None = None,
        use_procs: bool = True,
        num_attempts: int = 3,
    ) -> None:
        del num_concurrent_uploads, upload_staging_folder, use_procs, num_attempts
        protocol, bucket, path = parse_uri(bucket_uri)
        is_s3 = protocol == "s3" and backend_kwargs
        options = {"prefix": path, **(backend_kwargs or {})}
        self.remote_backend = S3ObjectStore(bucket, **options) if is_s3 else ObjectStore(bucket_uri)
        self.file_path_format_string = file_path_format_string
        self._run_name = "{run_name}"  # as in load_path, until the run has a name

    def init(self, state: State, logger: Logger) -> None:
        """Store the name of the run."""
        self._run_name = state.run_name

    def before_load(self, state: State, logger: Logger) -> None:
        """Let the savers of checkpoints copy them here, where ``autoresume`` looks for the newest copy."""
        for saver in state.callbacks:
            if isinstance(saver, CheckpointSaver) and self.get_uri_for_file not in saver.uploaders:
                saver.uploaders.append(self.get_uri_for_file)

    def can_upload_files(self) -> bool:
        """Return True."""
        return True

    def _name(self, remote_file_name: str) -> str:
        values = {"remote_file_name": remote_file_name.lstrip("/"), "run_name": self._run_name}
        return self.file_path_format_string.format(**values)

    def get_uri_for_file(self, remote_file_name: str) -> str:
        """Return the URL of a file."""
        return self.remote_backend.get_uri(self._name(remote_file_name))

    def upload_file(self, state: State, remote_file_name: str, file_path: Path, *, overwrite: bool = False) -> None:
        """Upload a file.

        Raises:
            FileExistsError: There is one of the name, and ``overwrite`` is False.
        """
        name = self._name(remote_file_name)
        if not overwrite and name in self.remote_backend.list_objects(name):
            raise FileExistsError(f"{self.remote_backend.get_uri(name)} exists. Pass overwrite=True to replace it.")
        self.remote_backend.upload_object(name, file_path)

    def download_file(
        self, remote_file_name: str, destination: str, overwrite: bool = False, progress_bar: bool = True
    ) -> None:
        """Download a file; as :meth:`ObjectStore.download_object`."""
        self.remote_backend.download_object(self._name(remote_file_name), destination, overwrite=overwrite)


def maybe_create_remote_uploader_downloader_from_uri(uri: str, *_: object, **__: object) -> LoggerDestination | None:
    """Return a destination that uploads files to the bucket of a URL; None for a local path.

    Example:
        >>> maybe_create_remote_uploader_downloader_from_uri("runs") is None
        True
    """
    protocol, bucket, _path = parse_uri(uri)
    return RemoteUploaderDownloader(f"{protocol}://{bucket}") if protocol else None


def _check_free(filename: str | Path, *, overwrite: bool) -> None:
    if not overwrite and Path(filename).exists():
        raise FileExistsError(f"{filename} exists. Pass overwrite=True to replace it.")


def _report(filename: str | Path, callback: Progress | None) -> None:
    if callback is not None:
        size = Path(filename).stat().st_size
        callback(size, size)
