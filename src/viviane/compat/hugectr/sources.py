"""HugeCTR's module `hugectr.data`: the locations of files. Remote files are read from their mount points."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any, ClassVar, Final

from viviane.compat.hugectr.argument_types import typed_methods
from viviane.compat.hugectr.arguments import Arguments, Signature, note
from viviane.compat.hugectr.enums import DataReaderType_t, DataSourceType_t, FileSystemType_t
from viviane.core.errors import ConfigError, DataError

_FILES: Final = ("train_source", "train_filelist", "eval_source", "eval_filelist", "dense_model", "dense_opt_states",
                 "sparse_model", "sparse_opt_states", "model_home")  # fmt: skip
_LISTS: Final = ("sparse_model", "sparse_opt_states")


class DataSourceParams(Arguments):
    """The file system, and in 3.4 also the files."""

    signature: ClassVar[Signature] = Signature(
        "DataSourceParams",
        {
            "source": FileSystemType_t.Local, "server": "localhost", "port": 9000, "use_hdfs": False,
            "namenode": "localhost",
            **{f"{side}_{name}": [] if name in _LISTS else "" for side in ("hdfs", "local") for name in _FILES},
        },
    )  # fmt: skip

    @property
    def is_local(self) -> bool:
        """Whether the files are local."""
        return not self.use_hdfs and self.source in (FileSystemType_t.Local, DataSourceType_t.Local)


@typed_methods
class DataSource:
    """Copies files to local paths.

    Args:
        params: in 3.4: pairs of hdfs_ and local_ paths.
    """

    def __init__(self, params: DataSourceParams) -> None:
        self.params = params

    def move_to_local(self) -> None:
        """Copy the hdfs_ paths to the local_ paths.

        Raises:
            DataError: a file is not mounted.
        """
        for name in _FILES if self.params.use_hdfs else ():
            remote, local = (_listed(getattr(self.params, f"{side}_{name}")) for side in ("hdfs", "local"))
            for source, target in zip(remote, local, strict=False):
                _copy(mounted(source), Path(target))


def mounted(path: str) -> Path:
    """Return the mount path of a remote path: the path without its scheme and server.

    Raises:
        DataError: it is not mounted.

    Example:
        >>> mounted("hdfs://localhost:9000/").as_posix()
        '/'
    """
    local = Path(re.sub(r"^(hdfs|s3|gs|https?)://[^/]*", "", path))
    if not local.exists():
        raise DataError("a remote file must be mounted, but its local path does not exist", where=path,
                        value=str(local), fix="mount the file system, or copy the file")  # fmt: skip
    return local


def source_path(source: str, kind: DataReaderType_t, *, training: bool) -> Path:
    """Return the path of a data source; for a remote file system its mount path.

    Raises:
        DataError: the file does not exist; suggests how to create it.
    """
    path = mounted(source) if "://" in source else Path(source)
    if path.exists():
        return path
    what = "file" if kind in (DataReaderType_t.Raw, DataReaderType_t.RawAsync) else "file list"
    raise DataError(
        f"{what} of {'training' if training else 'evaluation'} data not found",
        where=f"DataReaderParams, {'source' if training else 'eval_source'} ({kind.name})",
        value=source,
        fix="create it with the script's preprocessing, `viviane convert` or "
        f"hugectr.tools.DataGenerator; the path is relative to {Path.cwd()}",
    )


def check_writable(prefix: str, where: str) -> None:
    """Raise an error for writes to a remote file system.

    Raises:
        ConfigError: the prefix is a URL.
    """
    if "://" in prefix:
        raise ConfigError("remote files cannot be written", where=where, value=prefix,
                          fix="mount the file system and pass the local path, or copy the written files")  # fmt: skip


def note_remote(params: Any, where: str) -> None:
    """Print a note about a remote file system: its files are read from their mount paths.

    Raises:
        ConfigError: the argument is no DataSourceParams.
    """
    if params is not None and not isinstance(params, DataSourceParams):
        raise ConfigError("an argument has the wrong type", where=f"{where}, data_source_params", value=params,
                          allowed="hugectr.data.DataSourceParams")  # fmt: skip
    if isinstance(params, DataSourceParams) and not params.is_local and not params.use_hdfs:
        note(where, f"data_source_params: files of {getattr(params.source, 'name', params.source)} are read from "
                    "their mount paths")  # fmt: skip


def _listed(value: Any) -> list[str]:
    return list(value) if isinstance(value, list | tuple) else [value] if value else []


def _copy(source: Path, target: Path) -> None:
    if source.resolve() == target.resolve():
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    if source.is_dir():
        shutil.copytree(source, target, dirs_exist_ok=True)
    else:
        shutil.copy2(source, target)
