"""The folder in which an agent that diskprefix launches has its files, in place of the user's home folder."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from diskprefix.errors import SettingsError
from diskprefix.extras.clients.launched_daemon import locked
from diskprefix.extras.clients.recipe import Recipe, RecipeFile
from diskprefix.store.folder import sync

Report = Callable[[str], object]


@dataclass(frozen=True, kw_only=True)
class AgentProfile:
    """The profile of one agent. Each running agent holds a shared lock on `session.lock` in its `folder`.

    Agents and users edit the files, so `written.json` has the digest of each text that was written. A file is rewritten
    only if its recipe changed; an edited one is backed up first.
    """

    folder: Path

    @contextmanager
    def session(self, recipe: Recipe, say: Report) -> Iterator[None]:
        """Writes the files of a recipe, and keeps other launches from changing them until the end.

        Raises `SettingsError` if they must change and the agent is running. The caller holds the launches' mutex at
        the entry.
        """
        with locked(self.folder / "session.lock", fcntl.LOCK_SH) as fd:
            stale = [file for file in recipe.files if not self._is_current(file)]
            if stale:
                self._only(fd, f"{recipe.title} is running with other settings")
                for file in stale:
                    self._write(file, say)
                fcntl.flock(fd, fcntl.LOCK_SH)
            yield

    def remove(self, title: str) -> bool:
        """Removes the folder with all that the agent has left there. Returns False if there is none. Raises
        `SettingsError` if the agent is running. The caller holds the launches' mutex."""
        if not self.folder.exists():
            return False
        with locked(self.folder / "session.lock", fcntl.LOCK_SH) as fd:
            self._only(fd, f"{title} is running")
            shutil.rmtree(self.folder)
        return True

    def _only(self, fd: int, problem: str) -> None:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise SettingsError(f"{problem} from another `diskprefix launch`; end it first") from error

    def _is_current(self, file: RecipeFile) -> bool:
        return Path(file.path).exists() and self._written().get(file.path) == _digest(file.text.encode())

    def _write(self, file: RecipeFile, say: Report) -> None:
        path, written = Path(file.path), self._written()
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if path.exists() and _digest(path.read_bytes()) != written.get(file.path):
            copy = next(
                place for number in range(1, 10**6) if not (place := path.with_name(f"{path.name}.{number}")).exists()
            )
            shutil.copy2(path, copy)
            say(f"{path} had been changed and is written anew; it was copied to {copy}")
        _replace(path, file.text)
        _replace(self._record, json.dumps(written | {file.path: _digest(file.text.encode())}, indent=2))

    @property
    def _record(self) -> Path:
        return self.folder / "written.json"

    def _written(self) -> dict[str, str]:
        """Returns the digests by path. A record that cannot be read counts as none, so that files are copied."""
        try:
            return dict(json.loads(self._record.read_text(encoding="utf-8")))
        except (OSError, ValueError):
            return {}


def _replace(path: Path, text: str) -> None:
    """Writes a file that only this user can read. Readers see the old one or the new one, also after a power
    failure."""
    new = path.with_name(f"{path.name}.new")
    with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as file:
        file.write(text)
    sync(new)
    new.replace(path)
    sync(path.parent)


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
