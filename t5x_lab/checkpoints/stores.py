"""Key-value stores of TensorStore for paths, and Orbax on s3://.

Orbax recognizes object storage by the prefix gs://: there it ends a checkpoint with a commit file, because a directory cannot
be renamed at once, and has TensorStore read and write by HTTP. The same holds for s3://.
"""

import os
from typing import Any

from orbax.checkpoint._src.path import gcs_utils
from orbax.checkpoint._src.serialization import tensorstore_utils

from t5x_lab.config.object_storage import SCHEMES, is_object_storage


def key_value_store(path: str | os.PathLike) -> dict[str, Any]:
    """Returns TensorStore's key-value store of a file or directory. A local path is not a URL: it may have any characters.

    Buckets of s3:// are those of the server AWS_ENDPOINT_URL_S3 or AWS_ENDPOINT_URL, in AWS_REGION, as for Amazon's tools;
    TensorStore reads the address of gs:// from TENSORSTORE_GCS_HTTP_URL itself.
    """
    path = os.fspath(path)
    if not is_object_storage(path):
        return {"driver": "file", "path": path}
    if path.startswith("gs://"):
        return _store_of_google(path)
    bucket, _, key = path.removeprefix("s3://").partition("/")
    store: dict[str, Any] = {"driver": "s3", "bucket": bucket, "path": key}
    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    if "AWS_ACCESS_KEY_ID" in os.environ:  # otherwise TensorStore complains about missing files of profiles
        store["aws_credentials"] = {"type": "environment"}
    if endpoint:
        region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION") or "us-east-1"
        store |= {"endpoint": endpoint, "aws_region": region}
    return store


def _normalize(path: str) -> str:
    scheme, separator, rest = path.rpartition("://")
    return f"{scheme}{separator}{os.path.normpath(rest)}"


_store_of_google = gcs_utils.get_kvstore_for_gcs
_REPLACED = {
    (gcs_utils, "_GCS_PATH_PREFIX"): SCHEMES,
    (gcs_utils, "get_kvstore_for_gcs"): key_value_store,
    (tensorstore_utils, "_use_gcs_driver"): is_object_storage,
    (tensorstore_utils, "_normalize_path"): _normalize,
}
for (module, name), value in _REPLACED.items():
    if not hasattr(module, name):
        raise ImportError(f"This version of Orbax has no {module.__name__}.{name}. Install orbax-checkpoint 0.12.")
    setattr(module, name, value)
