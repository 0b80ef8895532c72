"""Object storage, gs:// and s3://: who reads and writes it, and what its errors mean."""

import errno
import importlib.util
import io
import json
import logging
import os
import re
import socket
import sys
import time
import traceback
import urllib.request
from collections.abc import Callable
from typing import Any, TypeVar

from t5x_lab.config.errors import UserError

T = TypeVar("T")
SCHEMES = ("gs://", "s3://")
INSTALL = "pip install 't5x_lab[storage]'"
_PACKAGES = ("gcsfs", "s3fs")
_OPTIONS = {"use_listings_cache": False}  # other processes write, too
_BUFFER_BYTES = 1 << 22
_PAUSES = (1, 2, 4, 8, 15, 30)  # seconds between attempts
_PASSING = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
_PERMANENT = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.ENAMETOOLONG)
# Of Google's and Amazon's storage, as TensorStore and fsspec report them. Credentials that have expired can be renewed.
_PERMANENT_TEXT = re.compile(
    r"PERMISSION_DENIED(?!.*http_response_code='401')|AccessDenied|Access Denied|InvalidAccessKeyId|SignatureDoesNotMatch"
    r"|NoSuchBucket|bucket does not exist|^Forbidden: |does not have storage\.\S+ access"
)


def is_object_storage(path: str | os.PathLike) -> bool:
    """Returns whether a path is on gs:// or s3://."""
    return os.fspath(path).startswith(SCHEMES)


def use_fsspec() -> None:
    """Lets etils read and write object storage through fsspec if `t5x_lab[storage]` is installed.

    Otherwise etils asks TensorFlow, which knows gs:// only.
    """
    if _is_installed():
        os.environ.setdefault("EPATH_USE_TF", "false")
        logging.getLogger("gcsfs").setLevel(logging.CRITICAL)  # it logs tracebacks of errors that it raises, too
    for scheme in ("gs", "s3"):
        os.environ.setdefault(f"FSSPEC_{scheme.upper()}", json.dumps(_OPTIONS))  # which fsspec reads when it is imported
        if "fsspec.config" in sys.modules:
            sys.modules["fsspec.config"].conf.setdefault(scheme, {}).update(_OPTIONS)


def _is_installed() -> bool:
    return all(importlib.util.find_spec(package) for package in _PACKAGES)


def open_file_system(path: str) -> tuple[Any, str]:
    """Returns fsspec's file system of a path on object storage, and the path in it.

    Raises:
      UserError: if packages are not installed, or the storage is unknown.
    """
    if not _is_installed():
        raise UserError(f"{path} needs packages that are not installed. Run: {INSTALL}.")
    import fsspec

    try:
        return fsspec.core.url_to_fs(path)
    except (ImportError, ValueError) as error:
        raise UserError(f"{path} cannot be read or written: {error}.") from error


def open_object(path: str) -> io.BufferedReader:
    """Opens a file on object storage for reading bytes."""
    return io.BufferedReader(_Object(path), _BUFFER_BYTES)


class _Object(io.RawIOBase):
    """File whose reads are repeated when the storage fails."""

    def __init__(self, path: str):
        system, name = open_file_system(path)
        self._path, self._file = path, retry(lambda: system.open(name, "rb"), path)

    readable = seekable = lambda self: True

    def readinto(self, buffer: Any) -> int:
        data = retry(lambda: self._file.read(len(buffer)), self._path)
        buffer[: len(data)] = data
        return len(data)

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        return self._file.seek(offset, whence)

    def tell(self) -> int:
        return self._file.tell()

    def close(self) -> None:
        self._file.close()
        super().close()


def check_storage(model_dir: str) -> None:
    """Checks that a run can be written to a directory on object storage.

    TensorFlow writes gs:// without the packages of `t5x_lab[storage]`, but Orbax does not delete checkpoints there. A bucket
    that does not exist would be created.

    Raises:
      UserError: if packages are not installed, or there is no such bucket.
    """
    if not is_object_storage(model_dir):
        return
    if not _is_installed():
        raise UserError(f"MODEL_DIR is {model_dir}, which needs packages that are not installed. Run: {INSTALL}.")
    scheme, _, path = model_dir.partition("://")
    if scheme == "s3" and not _bucket_exists(path.partition("/")[0]):
        raise UserError(f"MODEL_DIR is {model_dir}, but there is no bucket {path.partition('/')[0]}.")


def _bucket_exists(bucket: str) -> bool:
    """Returns False only for a bucket of s3:// that certainly does not exist; s3fs would create it."""
    import fsspec

    try:
        fsspec.filesystem("s3").call_s3("head_bucket", Bucket=bucket)
    except FileNotFoundError:
        return False
    except Exception:  # an outage, or no permission to ask; the first write tells more
        pass
    return True


def check_local(setting: str, path: str) -> None:
    """Raises a `UserError` for a path on object storage where a disk is needed."""
    if is_object_storage(path):
        raise UserError(f"{setting} is {path}, but it must be on a disk. Choose a local path, and copy the result.")


def check_network(path: str | os.PathLike) -> None:
    """Raises an `OSError` without a network if a path is on gs://. gcsfs would try for half a minute to find the server."""
    has_other_server = "STORAGE_EMULATOR_HOST" in os.environ or urllib.request.getproxies()
    if os.fspath(path).startswith("gs://") and not has_other_server:
        socket.getaddrinfo("storage.googleapis.com", 443)


def retry(action: Callable[[], T], path: str | os.PathLike) -> T:
    """Calls a function that reads or writes a path, and again for a minute if object storage fails.

    Raises:
      Exception: the last error of the function; the first one if the path is on a disk, or if retrying does not help.
    """
    for pause in (*_PAUSES, None):
        try:
            return action()
        except Exception as error:
            may_pass = is_storage_error(error) and not isinstance(error, FileNotFoundError) and not is_permanent(error)
            if pause is None or not may_pass or not is_object_storage(path):
                raise
            from t5x_lab.config.log import log  # not at the top: the package imports this module

            log(f"{describe_problem(error) or f'{path}: {error}.'} Retrying in {pause} s.")
            time.sleep(pause)
    raise AssertionError("unreachable: the last error is raised")


def is_storage_error(error: BaseException) -> bool:
    """Returns whether an error is of a disk or of object storage."""
    return isinstance(error, OSError) or describe_problem(error) is not None


def is_permanent(error: BaseException | None) -> bool:
    """Returns whether an error of a disk or of object storage is permanent, such as a missing bucket or permission."""
    if error is None:
        return False
    if isinstance(error, OSError) and error.errno in (*_PASSING, *_PERMANENT):
        return error.errno in _PERMANENT
    return bool(_PERMANENT_TEXT.search(str(error))) or is_permanent(error.__cause__)


def modified_at(path: Any) -> float:
    """Returns the time of the last change of a file, an `epath.Path`, in seconds since the Unix epoch."""
    if is_object_storage(path) and _is_installed():
        storage, name = open_file_system(os.fspath(path))
        return storage.modified(name).timestamp()
    return path.stat().mtime


def describe_problem(error: BaseException) -> str | None:
    """Returns a sentence about an error of object storage, with the path; None for other errors."""
    modules = {frame.f_globals.get("__name__", "").partition(".")[0] for frame, _ in traceback.walk_tb(error.__traceback__)}
    is_of_tensorflow = type(error).__module__.startswith("tensorflow.")
    if not is_of_tensorflow and not modules & {*_PACKAGES}:
        return None
    reason = re.sub(r"\{\{.*?\}\}", "", str(error)).partition("\n")[0].strip().rstrip(".")
    if isinstance(error, FileNotFoundError) and "://" in reason:  # gcsfs says no more than the address
        reason = "the bucket or the file does not exist"
    path = _remote_path(error) or next(iter(re.findall(r"\w+://[^\s')]+", str(error))), None)
    if is_of_tensorflow and path is None:
        return None
    problem = f"{path or 'Object storage'} cannot be read or written"
    if scheme := re.search(r"File system scheme '(\w+)' not implemented", str(error)):
        advice = f"Run: {INSTALL}." if scheme[1] == "s3" and not _is_installed() else "Use gs://, or mount it as a directory."
        return f"{problem}: TensorFlow does not know {scheme[1]}://. {advice}"
    return f"{problem}: {reason or type(error).__name__}. Check the path, the credentials and the network."


def _remote_path(error: BaseException) -> str | None:
    """Returns the path whose method raised an error."""
    paths = [
        str(frame.f_locals.get("self"))
        for frame, _ in traceback.walk_tb(error.__traceback__)
        if frame.f_globals.get("__name__", "").startswith("etils.epath.")
    ]
    return next((path for path in paths if is_object_storage(path)), None)
