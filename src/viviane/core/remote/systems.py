"""Connections to stores by URL; credentials come only from the environment.

s3://bucket/key       AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_SESSION_TOKEN, AWS_PROFILE; AWS_REGION;
                      AWS_ENDPOINT_URL for stores other than Amazon's; AWS_NO_SIGN_REQUEST=1 for public buckets
gs://bucket/key       GOOGLE_APPLICATION_CREDENTIALS; STORAGE_EMULATOR_HOST
hdfs://host:port/path HADOOP_CONF_DIR, HADOOP_USER_NAME
webhdfs://host:port/  HADOOP_USER_NAME
"""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from functools import lru_cache
from typing import Any, Final

from viviane.core.optional import require
from viviane.core.remote.retry import attempts, timeout_s

SCHEMES: Final = ("s3", "gs", "hdfs", "webhdfs")
# A change of any of these variables opens a new connection.
_NAMES: Final = (
    "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_PROFILE", "AWS_REGION",
    "AWS_DEFAULT_REGION", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_NO_SIGN_REQUEST",
    "GOOGLE_APPLICATION_CREDENTIALS", "STORAGE_EMULATOR_HOST", "HADOOP_CONF_DIR", "HADOOP_USER_NAME",
)  # fmt: skip


def connect(scheme: str, host: str) -> Any:
    """Return the pyarrow file system for a URL's scheme and host, or bucket; created once per process.

    Raises:
        MissingExtraError: the scheme needs a library that is not installed.
    """
    environment = tuple(os.environ.get(name) for name in _NAMES)
    return _connect(scheme, "" if scheme in ("s3", "gs") else host, environment, timeout_s())


@lru_cache(maxsize=64)
def _connect(scheme: str, host: str, environment: tuple[str | None, ...], timeout: float) -> Any:
    del environment  # only the cache key: the functions below read the variables
    made: dict[str, Callable[[str, float], Any]] = {"s3": _s3, "gs": _gcs, "hdfs": _hdfs, "webhdfs": _webhdfs}
    return made[scheme](host, timeout)


def _s3(_bucket: str, timeout: float) -> Any:
    from pyarrow import fs

    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
    return fs.S3FileSystem(
        anonymous=os.environ.get("AWS_NO_SIGN_REQUEST", "").lower() in ("1", "true", "yes"),
        region=region or ("us-east-1" if endpoint else None),
        endpoint_override=endpoint,
        request_timeout=timeout,
        connect_timeout=timeout,
        retry_strategy=fs.AwsStandardS3RetryStrategy(max_attempts=1),  # `retried` counts, waits and reports
    )


def _gcs(_bucket: str, timeout: float) -> Any:
    from pyarrow import fs

    limit = timedelta(seconds=timeout * attempts())
    emulator = os.environ.get("STORAGE_EMULATOR_HOST")
    if emulator is None:
        return fs.GcsFileSystem(retry_time_limit=limit)
    scheme, _slashes, place = emulator.rpartition("://")
    return fs.GcsFileSystem(
        anonymous=True, scheme=scheme or "http", endpoint_override=place.rstrip("/"), retry_time_limit=limit
    )


def _hdfs(host: str, _timeout: float) -> Any:
    from pyarrow import fs

    native = require("hdfs_native.fsspec", extra="hdfs", purpose="reading and writing hdfs:// URLs")
    name, _colon, port = host.partition(":")
    handler: Any = fs.FSSpecHandler
    return fs.PyFileSystem(handler(native.HdfsFileSystem(host=name or None, port=int(port) if port else None)))


def _webhdfs(host: str, timeout: float) -> Any:
    from pyarrow import fs

    from viviane.core.remote.webhdfs import WebHdfs

    return fs.PyFileSystem(WebHdfs(host, timeout))


def rename_over(system: Any, source: str, target: str) -> None:
    """Rename a file of HDFS atomically, replacing an existing one, which pyarrow's `move` refuses."""
    if system.handler.get_type_name() == "webhdfs":
        system.handler.rename_over(source, target)
    else:
        system.handler.fs.mv(source, target, overwrite=True)
