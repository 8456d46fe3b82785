"""HugeCTR's module `hugectr.data`: where files lie. Files are read where they are mounted."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any, ClassVar, Final

from viviane.compat.hugectr.arguments import Arguments, Signature, note
from viviane.compat.hugectr.enums import DataReaderType_t, DataSourceType_t, FileSystemType_t
from viviane.core.errors import ConfigError, DataError

_FILES: Final = ("train_source", "train_filelist", "eval_source", "eval_filelist", "dense_model", "dense_opt_states",
                 "sparse_model", "sparse_opt_states", "model_home")  # fmt: skip
_LISTS: Final = ("sparse_model", "sparse_opt_states")


class DataSourceParams(Arguments):
    """Which file system, and in the form of 3.4 which files."""

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
        """Whether the files are reached by their paths alone."""
        return not self.use_hdfs and self.source in (FileSystemType_t.Local, DataSourceType_t.Local)


class DataSource:
    """Brings files to local paths.

    Args:
        params: in the form of 3.4: pairs of hdfs_ and local_ paths.
    """

    def __init__(self, params: DataSourceParams) -> None:
        self.params = params

    def move_to_local(self) -> None:
        """Copy what is named under hdfs_ to the local_ paths.

        Raises:
            DataError: a file is not mounted here.
        """
        for name in _FILES if self.params.use_hdfs else ():
            remote, local = (_listed(getattr(self.params, f"{side}_{name}")) for side in ("hdfs", "local"))
            for source, target in zip(remote, local, strict=False):
                _copy(mounted(source), Path(target))


def mounted(path: str) -> Path:
    """Return where a remote path is mounted: the path without its scheme and server.

    Raises:
        DataError: it is not.

    Example:
        >>> mounted("hdfs://localhost:9000/").as_posix()
        '/'
    """
    local = Path(re.sub(r"^(hdfs|s3|gs|https?)://[^/]*", "", path))
    if not local.exists():
        raise DataError("a remote file is read where it is mounted, and nothing is there", where=path,
                        value=str(local), fix="mount the file system, or copy the file")  # fmt: skip
    return local


def source_path(source: str, kind: DataReaderType_t, *, training: bool) -> Path:
    """Return where a source of data is; that of a remote file system is where it is mounted.

    Raises:
        DataError: there is no such file; how it comes to be is said.
    """
    path = mounted(source) if "://" in source else Path(source)
    if path.exists():
        return path
    what = "file" if kind in (DataReaderType_t.Raw, DataReaderType_t.RawAsync) else "file list"
    raise DataError(
        f"no such {what} of {'training' if training else 'evaluation'} data",
        where=f"DataReaderParams, {'source' if training else 'eval_source'} ({kind.name})",
        value=source,
        fix="make it first, by the preprocessing that comes with the script, by `viviane convert`, or by "
        f"hugectr.tools.DataGenerator; the path counts from {Path.cwd()}",
    )


def check_writable(prefix: str, where: str) -> None:
    """Refuse to write to a remote file system.

    Raises:
        ConfigError: the prefix is a URL.
    """
    if "://" in prefix:
        raise ConfigError("remote files are not written", where=where, value=prefix,
                          fix="mount the file system and give the path, or copy what was written")  # fmt: skip


def note_remote(params: Any, where: str) -> None:
    """Note a remote file system: its files are read where it is mounted, under the paths that the script has."""
    if isinstance(params, DataSourceParams) and not params.is_local and not params.use_hdfs:
        note(where, f"data_source_params: files of {getattr(params.source, 'name', params.source)} are read where they "
                    "are mounted")  # fmt: skip


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
