"""The sources of `diskprefix top`: a running daemon, or the store."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import quote

from diskprefix.cli.tooling import opened_store
from diskprefix.errors import DiskPrefixError, NotReady, SettingsError, StoreUnavailable
from diskprefix.extras.daemon_call import Answer, Call, running_daemon
from diskprefix.extras.watch.browse.flat import listing
from diskprefix.extras.watch.browse.outline import outline
from diskprefix.store.maintenance.purge import delete_entry, purge


class Source(Protocol):
    """A source. Its methods block, so call them in a thread, and raise `DiskPrefixError`."""

    name: str

    def state(self, since: int) -> dict[str, Any] | None:
        """Returns the daemon's state as in `/dashboard/state`, None without a daemon."""

    def entries(self) -> dict[str, Any]:
        """Returns the saved prompts and their trees, as in `/dashboard/entries`."""

    def delete(self, entry_id: str) -> int:
        """Deletes a saved prompt and returns the freed bytes."""


class NothingLoaded(DiskPrefixError):
    """A daemon with several models has none in memory that could be watched."""


class DaemonSource:
    """A running daemon. Of one with several models, `model` is watched, or else one that is loaded."""

    def __init__(self, call: Call, name: str, model: str | None = None) -> None:
        self.name = name
        self._call, self._model = call, model
        self._watched: str | None = None
        self._is_front: bool | None = None

    def state(self, since: int) -> dict[str, Any] | None:
        """Adds `models` to the state of one of several: all that are in memory, as `/props` has them."""
        places = self._places()
        if self._is_front:
            self._choose(places)
        state: dict[str, Any] = self._asked("GET", f"/dashboard/state?since={since}")
        return state | ({"models": places} if self._is_front else {})

    def entries(self) -> dict[str, Any]:
        found: dict[str, Any] = self._asked("GET", "/dashboard/entries")
        return found

    def delete(self, entry_id: str) -> int:
        return int(self._asked("DELETE", f"/dashboard/entries/{entry_id}")["stored_bytes"])

    def _places(self) -> list[dict[str, Any]]:
        if self._is_front is False:
            return []
        answer = self._call("GET", "/props", None)
        if answer.status != 200:
            # It may not be known yet: a daemon that begins or ends says nothing.
            return []
        self._is_front = isinstance(answer.body, dict) and "models" in answer.body
        return answer.body["models"] if self._is_front else []

    def _choose(self, places: list[dict[str, Any]]) -> None:
        """Goes on with the same model while it is loaded. Raises `DiskPrefixError` if it is another one, which counts
        its requests from the start, or none."""
        ready = [place["model"] for place in places if place["phase"] == "ready"]
        ready = [model for model in ready if self._model in (None, model)]
        watched = self._watched if self._watched in ready else next(iter(ready), None)
        if watched is None:
            self._watched = None
            others = ", ".join(f"{place['model']} is {place['phase']}" for place in places)
            named = "no model is loaded" if self._model is None else f"{self._model} is not loaded"
            raise NothingLoaded(f"{named}; {others or f'a request loads one of {self._known()}'}")
        was, self._watched = self._watched, watched
        if was not in (None, watched):
            raise DiskPrefixError(f"{was} is unloaded")

    def _known(self) -> str:
        answer = self._call("GET", "/v1/models", None)
        return ", ".join(card["id"] for card in answer.body["data"]) if answer.status == 200 else "them"

    def _asked(self, method: str, path: str) -> Any:
        if self._is_front and self._watched is None:
            raise NothingLoaded("no model is loaded")
        if self._watched is not None:
            path += f"{'&' if '?' in path else '?'}model={quote(self._watched, safe='')}"
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
            remove = partial(purge, store, now=store.clock())
            return delete_entry(store, entry_id, remove).stored_bytes


def chosen_source(url: str, api_key: str | None, folder: Path, model: str | None = None) -> Source:
    """Returns the daemon at `url`, of which `model` is watched, or the store in `folder` if none answers.

    Raises `SettingsError` for an invalid URL or a refused key, and `StoreUnavailable` if there is no store either.
    """
    call = running_daemon(url, api_key)
    source = DaemonSource(call, url, model)
    try:
        # What accepts connections and says nothing is known soonest by this.
        call("GET", "/health", None)
        source.state(0)
    except NothingLoaded:
        # The screen says so until a model is loaded.
        return source
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
