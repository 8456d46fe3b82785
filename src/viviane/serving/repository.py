"""Several models and versions in one process, loaded and unloaded while requests come in."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, Self

from viviane.config.base import load_json
from viviane.core.errors import ConfigError, VivianeError, suggest
from viviane.core.locations import AnyPath
from viviane.core.threads import short_switch_interval
from viviane.serving.errors import ModelNotFoundError
from viviane.serving.parameter_server.settings import TableSettings
from viviane.serving.session import InferenceSession, Scores
from viviane.serving.settings import MODEL_NAME, ModelEntry, RepositorySettings, SessionSettings
from viviane.serving.versions import find_version, find_versions


@dataclass(frozen=True)
class ModelStatus:
    """One version of a model.

    Args:
        state: "loading", "ready", "unloading", or "failed" with the reason of the last attempt.
    """

    name: str
    version: int
    state: Literal["loading", "ready", "unloading", "failed"]
    reason: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for a reply."""
        return asdict(self)


@dataclass(eq=False)
class _Loaded:
    session: InferenceSession
    leases: int = 0
    unloading: bool = False


class ModelRepository:
    """Sessions by name and version. All methods may be called from any number of threads.

    A request pins the version that it is answered by: an unloaded version finishes the requests that it has, and a
    newly loaded one takes those that come afterwards, so that no request fails or mixes versions.

    Args:
        settings: models to load at once.

    Example:
        >>> with ModelRepository() as repository:
        ...     repository.index()
        []
    """

    def __init__(self, settings: RepositorySettings | None = None) -> None:
        self._turn = threading.Condition()
        self._loaded: dict[str, dict[int, _Loaded]] = {}
        self._retired: list[tuple[str, int, _Loaded]] = []
        self._status: dict[tuple[str, int], ModelStatus] = {}
        self._entries: dict[str, ModelEntry] = {}
        self._one_load = threading.Lock()
        for entry in (settings or RepositorySettings()).models:
            self.add(entry)

    @classmethod
    def from_json_file(cls, path: str | Path) -> Self:
        """Load the models of a JSON file: a `RepositorySettings`, alone or under "inference"."""
        return cls(RepositorySettings.of_clause(load_json(path), where=str(path)))

    # Loading ----------------------------------------------------------------------------------------------

    def add(self, entry: ModelEntry) -> list[int]:
        """Remember where a model is, and load those of its versions that the entry names; returns them.

        Raises:
            CheckpointError: a version is missing or damaged; others that were loaded before stay.
        """
        with self._turn:
            self._entries[entry.name] = entry
        found = find_versions(entry.path)
        chosen: list[int] = [max(found)]
        if entry.versions == "all":
            chosen = list(found)
        elif entry.versions != "latest":
            chosen = list(entry.versions)
        return [self.load(entry.name, version=version) for version in chosen]

    def load(
        self,
        name: str,
        path: str | AnyPath | None = None,
        *,
        version: int | None = None,
        settings: SessionSettings | None = None,
        tables: TableSettings | None = None,
    ) -> int:
        """Load a version of a model beside those that are loaded; returns its number.

        A version that is loaded already is reloaded and takes the place of the old one, which finishes its requests.

        Args:
            name: letters, digits, dots, dashes and underscores.
            path: a model folder, or a folder of versions; None takes where the model was loaded from before.
            version: None takes the latest in the folder.
            settings: of the session; None takes those of before.
            tables: the tiers of its tables; None takes those of before. Caches begin with the keys that the version
                has which answers now.

        Raises:
            ConfigError: a name that is not allowed. ModelNotFoundError: no path, and none is known.
            CheckpointError: there is no such version, or it is damaged; what was loaded stays.
        """
        entry = self._entry(name, path, settings, tables)
        number, _ = find_version(entry.path, version)
        with self._one_load, short_switch_interval():  # requests are answered meanwhile
            self._say(ModelStatus(name, number, "loading"))
            try:
                session = self._open(entry, number)
            except VivianeError as error:
                self._say(ModelStatus(name, number, "failed", error.what))
                raise
            except BaseException as error:
                self._say(ModelStatus(name, number, "failed", f"{type(error).__name__}: {error}"))
                raise
            with self._turn:
                self._entries[name] = entry
                old = self._loaded.setdefault(name, {}).get(number)
                self._loaded[name][number] = _Loaded(session)
                self._status[name, number] = ModelStatus(name, number, "ready")
            if old is not None:
                self._retire(name, number, old, wait=False)
        return number

    def unload(self, name: str, version: int | None = None, *, timeout_s: float | None = None) -> bool:
        """Take a version away, or all of a model, and free it when the requests that it has are answered.

        Args:
            version: None takes all versions.
            timeout_s: how long to wait for these requests; None waits for all. They are answered in either case.

        Returns:
            Whether all of them have been answered.

        Raises:
            ModelNotFoundError: no such model or version is loaded.
        """
        with self._turn:
            versions = self._versions(name)
            if version is not None and version not in versions:
                raise _not_found(name, version, versions)
            taken = {number: versions.pop(number) for number in list(versions) if version in (None, number)}
            if not versions:
                del self._loaded[name]
        answered = [self._retire(name, number, one, timeout_s=timeout_s) for number, one in taken.items()]
        return all(answered)

    def rollback(self, name: str, version: int | None = None) -> int:
        """Let an earlier version of a model respond to requests again; returns its number.

        The earlier version is loaded first if it is not loaded. Then the newer versions are unloaded: they complete the
        requests that they have, so that no request fails.

        Args:
            version: None takes the next lower one that is loaded, else the next lower one in the model's folder.

        Raises:
            ModelNotFoundError: the model is not loaded.
            ConfigError: there is no earlier version, or `version` is not an earlier one.
            CheckpointError: the earlier version is missing or damaged; what was loaded stays.
        """
        with self._turn:
            loaded = sorted(self._versions(name))
            path = self._entries[name].path
        current = loaded[-1]
        if version is None:
            earlier = loaded[:-1] or [number for number in find_versions(path) if number < current]
            if not earlier:
                raise ConfigError("there is no earlier version to roll back to", where=f"model {name!r}",
                                  value=f"version {current}", fix="keep earlier versions in the folder")  # fmt: skip
            version = max(earlier)
        if version >= current:
            raise ConfigError("a rollback is to an earlier version", where=f"model {name!r}", value=version,
                              allowed=f"lower than {current}", fix="load it instead")  # fmt: skip
        if version not in loaded:
            self.load(name, version=version)
        for newer in loaded:
            if newer > version:
                self.unload(name, newer)
        return version

    def _retire(
        self, name: str, version: int, old: _Loaded, *, wait: bool = True, timeout_s: float | None = None
    ) -> bool:
        with self._turn:
            old.unloading = True
            self._retired.append((name, version, old))
            if version not in self._loaded.get(name, {}):
                self._status[name, version] = ModelStatus(name, version, "unloading")
            done = self._turn.wait_for(lambda: not old.leases, timeout_s) if wait else not old.leases
        if done:
            self._free(name, version, old)
        return done

    def _free(self, name: str, version: int, old: _Loaded) -> None:
        with self._turn:
            if (name, version, old) not in self._retired:
                return
            self._retired.remove((name, version, old))
            # A version that was loaded twice may have two sessions that end: the last one takes the status along.
            others = any(one[:2] == (name, version) for one in self._retired)
            status = self._status.get((name, version))
            if status is not None and status.state == "unloading" and not others:
                del self._status[name, version]
        old.session.close()

    # Asking -----------------------------------------------------------------------------------------------

    def get(self, name: str, version: int | None = None) -> InferenceSession:
        """Return a loaded session, of the latest loaded version unless one is named.

        It may be closed by an `unload` before it is used; `lease` keeps it.

        Raises:
            ModelNotFoundError: no such model or version is loaded.
        """
        with self._turn:
            return self._find(name, version).session

    @contextmanager
    def lease(self, name: str, version: int | None = None) -> Iterator[InferenceSession]:
        """Pin a version for a request: the session answers until the block ends, even if it is unloaded meanwhile.

        Raises:
            ModelNotFoundError: no such model or version is loaded.
        """
        with self._turn:
            found = self._find(name, version)
            found.leases += 1
        try:
            yield found.session
        finally:
            with self._turn:
                found.leases -= 1
                last = found.unloading and not found.leases
                self._turn.notify_all()
            if last:
                self._free(name, found.session.version, found)

    def predict(self, name: str, rows: Any, *, version: int | None = None, raw: bool | None = None) -> Scores:
        """Predict with a version of a model; see `InferenceSession.predict`."""
        with self.lease(name, version) as session:
            return session.predict(rows, raw=raw)

    def index(self) -> list[ModelStatus]:
        """Return all versions that are loaded, on their way in or out, or failed, by name and version."""
        with self._turn:
            return [self._status[key] for key in sorted(self._status)]

    def names(self) -> dict[str, list[int]]:
        """Return the loaded versions of each model, rising."""
        with self._turn:
            return {name: sorted(versions) for name, versions in sorted(self._loaded.items())}

    def tables(self) -> dict[tuple[str, int], dict[str, Any]]:
        """Return what tables in tiers have done, by model and version."""
        with self._turn:
            loaded = [(name, n, one.session) for name, versions in self._loaded.items() for n, one in versions.items()]
        return {(name, n): session.tables.status() for name, n, session in loaded if session.tables is not None}

    def close(self) -> None:
        """Unload everything, once the requests in progress are answered."""
        for name in self.names():
            self.unload(name)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Inside -----------------------------------------------------------------------------------------------

    def _open(self, entry: ModelEntry, number: int) -> InferenceSession:
        """Load a version; while it warms its caches with them, the version that answers now keeps its keys."""
        with ExitStack() as held:
            before = held.enter_context(self.lease(entry.name)) if entry.name in self.names() else None
            return InferenceSession.from_settings(
                entry.path, entry.session, version=number, tables=entry.tables, warm_from=before
            )

    def _entry(
        self, name: str, path: str | AnyPath | None, settings: SessionSettings | None, tables: TableSettings | None
    ) -> ModelEntry:
        if not re.fullmatch(MODEL_NAME, name):
            raise ConfigError("a model's name is letters, digits, dots, dashes and underscores", value=name)
        with self._turn:
            known = self._entries.get(name)
        if path is None and known is None:
            raise ModelNotFoundError("no such model, and no path to load it from", value=name,
                                     fix=suggest(name, self._entries) if self._entries else None)  # fmt: skip
        where = str(path) if path is not None else known.path if known is not None else ""
        chosen = settings or (known.session if known is not None else SessionSettings())
        tiers = tables or (known.tables if known is not None else None)
        return ModelEntry(name=name, path=where, session=chosen, tables=tiers)

    def _say(self, status: ModelStatus) -> None:
        """Note the state of a version, unless one that answers requests keeps doing so."""
        with self._turn:
            if status.version not in self._loaded.get(status.name, {}):
                self._status[status.name, status.version] = status

    def _versions(self, name: str) -> dict[int, _Loaded]:
        if name not in self._loaded:
            fix = suggest(name, self._loaded) if self._loaded else "load it first"
            raise ModelNotFoundError("no such model is loaded", value=name, fix=fix)
        return self._loaded[name]

    def _find(self, name: str, version: int | None) -> _Loaded:
        versions = self._versions(name)
        number = max(versions) if version is None else version
        if number not in versions:
            raise _not_found(name, number, versions)
        return versions[number]


def _not_found(name: str, version: int, versions: dict[int, _Loaded]) -> ModelNotFoundError:
    known = ", ".join(map(str, sorted(versions)))
    what = "no such version of the model is loaded"
    return ModelNotFoundError(what, where=f"model {name!r}", value=version, allowed=known)
