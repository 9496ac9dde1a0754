"""The sources of `diskprefix top`: a running daemon, or the store."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any, Protocol

from diskprefix.cli.tooling import opened_store
from diskprefix.errors import DiskPrefixError, NotReady, SettingsError, StoreUnavailable
from diskprefix.extras.daemon_call import Answer, Call, running_daemon
from diskprefix.extras.watch.browse.flat import listing
from diskprefix.extras.watch.browse.outline import outline
from diskprefix.store.maintenance.purge import delete_entry, erase


class Source(Protocol):
    """A source. Its methods block, so call them in a thread, and raise `DiskPrefixError`."""

    name: str

    def state(self, since: int) -> dict[str, Any] | None:
        """Returns the daemon's state as in `/dashboard/state`, None without a daemon."""

    def entries(self) -> dict[str, Any]:
        """Returns the saved prompts and their trees, as in `/dashboard/entries`."""

    def delete(self, entry_id: str) -> int:
        """Deletes a saved prompt and returns the freed bytes."""


class DaemonSource:
    """A running daemon."""

    def __init__(self, call: Call, name: str) -> None:
        self.name = name
        self._call = call

    def state(self, since: int) -> dict[str, Any] | None:
        state: dict[str, Any] = self._asked("GET", f"/dashboard/state?since={since}")
        return state

    def entries(self) -> dict[str, Any]:
        found: dict[str, Any] = self._asked("GET", "/dashboard/entries")
        return found

    def delete(self, entry_id: str) -> int:
        return int(self._asked("DELETE", f"/dashboard/entries/{entry_id}")["stored_bytes"])

    def _asked(self, method: str, path: str) -> Any:
        answer = self._call(method, path, None)
        if answer.status != 200 or not isinstance(answer.body, dict):
            raise _refusal(answer)
        return answer.body


class StoreSource:
    """A store without a daemon."""

    def __init__(self, folder: Path) -> None:
        self.name = str(folder)
        self._folder = folder

    def state(self, since: int) -> dict[str, Any] | None:  # noqa: ARG002 - the protocol's signature
        return None

    def entries(self) -> dict[str, Any]:
        with opened_store(self._folder) as store, store.snapshot() as snapshot:
            return listing(outline(snapshot))

    def delete(self, entry_id: str) -> int:
        with opened_store(self._folder, write=True) as store:
            remove = partial(erase, store, now=store.clock())
            return delete_entry(store, entry_id, remove).stored_bytes


def chosen_source(url: str, api_key: str | None, folder: Path) -> Source:
    """Returns the daemon at `url`, or the store in `folder` if none answers.

    Raises `SettingsError` for an invalid URL or a refused key, and `StoreUnavailable` if there is no store either.
    """
    source = DaemonSource(running_daemon(url, api_key), url)
    try:
        source.state(0)
    except NotReady as nobody:
        try:
            with opened_store(folder):
                return StoreSource(folder)
        except StoreUnavailable as error:
            raise StoreUnavailable(f"{nobody.message}, or the folder of a store with --kv-cache-dir") from error
    return source


def _refusal(answer: Answer) -> DiskPrefixError:
    if answer.status in (401, 403):
        return SettingsError(f"--api-key: {answer.message}")
    return DiskPrefixError(f"the daemon answers: {answer.message}")
