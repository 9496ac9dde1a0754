"""The folder in which a launched agent keeps its files, in place of the user's home folder."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from msgspec import Struct

from diskprefix.desk.shared.launched_daemon import locked
from diskprefix.desk.shared.recipes.recipe import Recipe, RecipeFile
from diskprefix.errors import SettingsError
from diskprefix.prefixstore.store.folder import sync
from diskprefix.private_file import make_private_folder

Report = Callable[[str], object]


class AgentProfile(Struct, frozen=True, kw_only=True):
    """The profile of one agent. A running agent holds a shared lock on `session.lock` in its `folder`.

    Agents and users edit the files. `written.json` has the digest of each text that was written: a file is rewritten
    only if its recipe has changed, and an edited file is backed up first.
    """

    folder: Path

    @contextmanager
    def session(self, recipe: Recipe, say: Report) -> Iterator[None]:
        """Writes the files of a recipe. Until the context ends, other launches do not change them.

        Raises `SettingsError` if they must change and the agent is running. The caller holds the launches' mutex when
        it enters.
        """
        with locked(self.folder / "session.lock", fcntl.LOCK_SH) as fd:
            stale = [file for file in recipe.files if not self._is_current(file)]
            if stale:
                self._require_alone(fd, f"{recipe.title} is running with other settings")
                for file in stale:
                    self._write(file, say)
                fcntl.flock(fd, fcntl.LOCK_SH)
            yield

    def remove(self, title: str) -> bool:
        """Removes the folder. Returns False if there is none. Raises `SettingsError` if the agent is running. The
        caller holds the launches' mutex."""
        if not self.folder.exists():
            return False
        with locked(self.folder / "session.lock", fcntl.LOCK_SH) as fd:
            self._require_alone(fd, f"{title} is running")
            shutil.rmtree(self.folder)
        return True

    def _require_alone(self, fd: int, problem: str) -> None:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise SettingsError(f"{problem} from another `diskprefix launch`; end it first") from error

    def _is_current(self, file: RecipeFile) -> bool:
        return Path(file.path).exists() and self._written().get(file.path) == _digest(file.text.encode())

    def _write(self, file: RecipeFile, say: Report) -> None:
        path, written = Path(file.path), self._written()
        make_private_folder(path.parent)
        if path.exists() and _digest(path.read_bytes()) != written.get(file.path):
            copy = next(
                free for number in range(1, 10**6) if not (free := path.with_name(f"{path.name}.{number}")).exists()
            )
            shutil.copy2(path, copy)
            say(f"{path} had been changed and is written anew; it was copied to {copy}")
        replace_file(path, file.text)
        replace_file(self._record, json.dumps(written | {file.path: _digest(file.text.encode())}, indent=2))

    @property
    def _record(self) -> Path:
        return self.folder / "written.json"

    def _written(self) -> dict[str, str]:
        """Returns the digests by path. A record that cannot be read counts as empty, so files are backed up."""
        try:
            return dict(json.loads(self._record.read_text(encoding="utf-8")))
        except (OSError, ValueError):
            return {}


def replace_file(path: Path, text: str) -> None:
    """Replaces a file atomically, also across a power failure. Only this user can read it."""
    new = path.with_name(f"{path.name}.new")
    try:
        with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as file:
            file.write(text)
        sync(new)
        new.replace(path)
    finally:
        new.unlink(missing_ok=True)
    sync(path.parent)


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
