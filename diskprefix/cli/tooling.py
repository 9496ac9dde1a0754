"""What the commands that work on a store share: its folder, JSON for scripts, text for people, progress, questions."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import click

from diskprefix.errors import SettingsError, StoreCorrupt, StoreUnavailable
from diskprefix.printable import printable_only
from diskprefix.settings import DEFAULT_DIR, default_kv_cache_dir
from diskprefix.store.folder import DATA
from diskprefix.store.listing import EntryInfo
from diskprefix.store.store import Store

Decorated = TypeVar("Decorated", bound=Callable[..., Any])

_SHOWN_ID_DIGITS, _MIN_ID_DIGITS = 12, 4

store_folder_option = click.option(
    "--kv-cache-dir",
    type=click.Path(path_type=Path),
    default=default_kv_cache_dir,
    envvar="DISKPREFIX_KV_CACHE_DIR",
    show_default=DEFAULT_DIR,
    show_envvar=True,
    # As serve does: a file of environment variables has no shell to expand it.
    callback=lambda _context, _parameter, path: path.expanduser(),
    help="Folder of the store; policy files are not read.",
)
"""`--kv-cache-dir`, handed to the command as `kv_cache_dir: Path`."""

json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON for scripts, and nothing else.")
"""`--json`, handed to the command as `as_json: bool`."""

yes_option = click.option("--yes", "-y", is_flag=True, help="Do not ask.")
"""`--yes`, handed to the command as `yes: bool`; goes with `confirm`."""


def require_store(folder: Path) -> None:
    """Raises `StoreUnavailable` if there is no store in `folder`: a command must not create one by looking at it."""
    if not (folder / DATA).is_file():
        raise StoreUnavailable(f"{folder} holds no diskprefix store; give its folder with --kv-cache-dir")


@contextmanager
def opened_store(folder: Path, *, write: bool = False) -> Iterator[Store]:
    """The store in `folder`, closed in the end; read-only unless `write`. Raises `CacheError`."""
    require_store(folder)
    with advised():
        store = Store.open(folder, read_only=not write)
    try:
        yield store
    finally:
        store.close()


@contextmanager
def advised() -> Iterator[None]:
    """Around opening a store: where its file is damaged, `StoreCorrupt` says what to do about that."""
    try:
        yield
    except StoreCorrupt as error:
        raise StoreCorrupt(
            f"{error.message}; `verify --fix` cannot mend this: `diskprefix serve` moves the file aside and starts an "
            "empty store, or delete it"
        ) from error


def print_json(value: object) -> None:
    """JSON to read and to parse: letters of all scripts as they are, what a terminal would act on escaped."""
    text = json.dumps(value, indent=2, ensure_ascii=False)
    click.echo("".join(char if char.isprintable() or char == "\n" else json.dumps(char)[1:-1] for char in text))


def plain(text: str) -> Any:
    """A `rich` text: what others wrote must neither be read as markup nor steer the terminal."""
    from rich.text import Text

    return Text(printable_only(text))


def shortened(text: str, width: int) -> str:
    """Beginning and end: conversations of one agent begin alike."""
    head = width // 3
    return text if len(text) <= width else f"{text[:head]}…{text[len(text) - (width - head - 1) :]}"


def counted(number: int, noun: str, plural: str | None = None) -> str:
    """`1 block`, `2,000 blocks`, `2 entries`."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def short_id(id_: str) -> str:
    """As much of an entry's id as tells it from others."""
    return id_[:_SHOWN_ID_DIGITS]


def find_entry(entries: list[EntryInfo], beginning: str) -> EntryInfo:
    """The entry whose id is or begins with what was typed. Raises `SettingsError` if none does, or several."""
    if len(beginning) < _MIN_ID_DIGITS:
        raise SettingsError(
            f"{beginning!r} is too short for an id: give at least {_MIN_ID_DIGITS} digits of what `diskprefix inspect` "
            "shows",
            param="ENTRY",
        )
    found = [info for info in entries if info.id.startswith(beginning.lower())]
    if len(found) == 1:
        return found[0]
    problem = "no entry starts" if not found else f"{len(found)} entries start"
    raise SettingsError(f"{problem} with {beginning!r}; run `diskprefix inspect` to see the ids", param="ENTRY")


@contextmanager
def progress(label: str, total_bytes: int | None) -> Iterator[Callable[[int], None]]:
    """A bar on stderr while work goes on, where stderr is a terminal. Yields what is told that `n` more bytes are done.

    `total_bytes` None: nobody knows how many they will be.
    """
    if not sys.stderr.isatty():
        yield lambda _num_bytes: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(binary_units=True), TransferSpeedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(label, total=total_bytes)
        yield lambda num_bytes: bar.advance(task, num_bytes)


def confirm(question: str, *, yes: bool) -> bool:
    """Whether to go on: `--yes`, or what is answered at the terminal. Raises `SettingsError` where there is none."""
    if yes:
        return True
    if not sys.stdin.isatty():
        raise SettingsError("nobody is there to ask (standard input is no terminal): add --yes, or --dry-run to look")
    return click.confirm(question, default=False, err=True)
