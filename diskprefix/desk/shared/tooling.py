"""Parts that commands share: the folder of the store, output as JSON and text, progress."""

from __future__ import annotations

import json
import shutil
import sys
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import click

from diskprefix.daemon.cli.options import Decorated, PathType, setting_option, variable_of
from diskprefix.errors import SettingsError, StoreCorrupt, StoreUnavailable
from diskprefix.folders import DEFAULT_DIR, default_kv_cache_dir, expanded
from diskprefix.prefixstore.store.folder import DATA
from diskprefix.prefixstore.store.store import Store
from diskprefix.prefixstore.store.tree import EntryInfo
from diskprefix.printable import printable_only
from diskprefix.progress import progress_bar
from diskprefix.tenant_ids import short_tenant
from diskprefix.user_key import is_users

_LONG_S = 3.0
_SHOWN_ID_DIGITS, _MIN_ID_DIGITS = 12, 4
_SEE_IDS = "run `diskprefix inspect` to see the ids"
SHOWN = 20
"""The most list items in text output. --json has all."""

json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON for scripts, and nothing else.")
"""`--json`, passed to the command as `as_json: bool`."""


def store_options(command: Decorated) -> Decorated:
    """Adds `--kv-cache-dir` and `--json`, passed to the command as `kv_cache_dir: Path` and `as_json: bool`."""
    folder_option = click.option(
        "--kv-cache-dir",
        type=PathType(),
        default=default_kv_cache_dir,
        envvar=variable_of("--kv-cache-dir"),
        show_default=DEFAULT_DIR,
        show_envvar=True,
        # No shell expands a variable from an environment file, so this does.
        callback=lambda _context, _parameter, path: expanded(path),
        help="The folder of the store. Policy files are not read.",
    )
    return folder_option(json_option(command))


packed_weights_option = setting_option("packed_weights", help="The folder of packed weights, as for serve.")
"""`--packed-weights`, passed to the command as `packed_weights: str`."""


def existing_folder(folder: Path) -> Path:
    """Returns the folder, or its nearest parent that exists."""
    return next(place for place in (folder, *folder.absolute().parents) if place.exists())


def require_store(folder: Path) -> None:
    """Raises `StoreUnavailable` if there is no store in `folder`: reading commands must not create one."""
    file = folder / DATA
    if not file.is_file() or not file.stat().st_size:
        raise StoreUnavailable(
            f"{folder} holds no diskprefix store; `serve` and `import` make it, or give its folder with --kv-cache-dir"
        )


@contextmanager
def opened_store(
    folder: Path, *, write: bool = False, min_free_bytes: int = 0, new_budget_bytes: int = 0
) -> Iterator[Store]:
    """Opens the store in `folder`, read-only unless `write`, and closes it at the end. With `new_budget_bytes`, makes a
    store of this budget if there is none. Raises `CacheError`."""
    if not new_budget_bytes:
        require_store(folder)
    with advised():
        store = Store(folder, read_only=not write, min_free_bytes=min_free_bytes, new_budget_bytes=new_budget_bytes)
    with closing(store):
        yield store


@contextmanager
def advised() -> Iterator[None]:
    """Adds advice to a `StoreCorrupt` from opening a store."""
    try:
        yield
    except StoreCorrupt as error:
        advice = "delete the file, or let `diskprefix serve` move it aside and start an empty store"
        raise StoreCorrupt(f"{error.message}; `verify --fix` cannot repair this: {advice}") from error


def print_json(value: object) -> None:
    """Prints JSON with control characters escaped and all letters as they are."""
    text = json.dumps(value, indent=2, ensure_ascii=False)
    click.echo("".join(char if char.isprintable() or char == "\n" else json.dumps(char)[1:-1] for char in text))


def plain(text: str) -> Any:
    """Returns a `rich` text without markup and control characters."""
    from rich.text import Text

    return Text(printable_only(text))


def shortened(text: str, width: int) -> str:
    """Returns `text` cut in its middle to `width` characters. Conversations of one agent often begin alike."""
    head = width // 3
    return text if len(text) <= width else f"{text[:head]}…{text[len(text) - (width - head - 1) :]}"


def short_id(id_: str) -> str:
    """Returns the first digits of an entry's id, enough to tell it from others."""
    return id_[:_SHOWN_ID_DIGITS]


def tenant_names(*, in_full: bool = False) -> Callable[[str], str]:
    """Returns a function that shows the id of a tenant, which `purge --salt` takes, shortened unless `in_full`. The
    tenant of this user's programs has the mark `(yours)` after it."""
    is_own, text = is_users(), str if in_full else short_tenant
    return lambda tenant: text(tenant) + (" (yours)" if is_own(tenant) else "")


def find_entry(entries: list[EntryInfo], beginning: str) -> EntryInfo:
    """Returns the entry whose id begins with `beginning`. Raises `SettingsError` for none and for several."""
    if len(beginning) < _MIN_ID_DIGITS:
        problem = f"{beginning!r} is too short for an id; give at least {_MIN_ID_DIGITS} hexadecimal characters"
        raise SettingsError(f"{problem}; {_SEE_IDS}")
    matching = [info for info in entries if info.id.startswith(beginning.lower())]
    if len(matching) != 1:
        number = f"{len(matching)} entries start" if matching else "no entry starts"
        raise SettingsError(f"{number} with {beginning!r}; {_SEE_IDS}")
    return matching[0]


def say(line: str) -> None:
    """Prints a line for people on stderr."""
    click.echo(printable_only(line), err=True)


def confirmed(question: str, otherwise: str = "add --yes") -> bool:
    """Asks at the terminal. Without a terminal, raises a `SettingsError` that ends with `otherwise`."""
    if not sys.stdin.isatty():
        raise SettingsError(f"cannot ask, because standard input is not a terminal; {otherwise}")
    return click.confirm(question, default=False, err=True)


@contextmanager
def progress(label: str, total: int, *, in_bytes: bool = True) -> Iterator[Callable[[int], None]]:
    """Shows a bar on stderr if that is a terminal. Yields a function that takes the work done since its last call."""
    done = 0
    with progress_bar(label, total, lambda _line: None, in_bytes=in_bytes) as advance:

        def add(number: int) -> None:
            nonlocal done
            done += number
            advance(done)

        yield add


@contextmanager
def status(text: str) -> Iterator[Callable[[str], None]]:
    """Shows a text on stderr during a wait. Yields a function that changes the text.

    If stderr is no terminal, each text is a line, and nothing is printed during the first seconds.
    """
    if sys.stderr.isatty():
        from rich.console import Console

        with Console(stderr=True).status(plain(text)) as shown:
            yield lambda line: shown.update(plain(line))
        return
    last, is_long = text, False

    def print_last() -> None:
        nonlocal is_long
        is_long = True
        say(last)

    def show(line: str) -> None:
        nonlocal last
        if line != last:
            last = line
            if is_long:
                print_last()

    timer = threading.Timer(_LONG_S, print_last)
    timer.daemon = True
    timer.start()
    try:
        yield show
    finally:
        timer.cancel()


def terminal_width(otherwise: int) -> int:
    """Returns the columns of the terminal, or `otherwise` if standard output is no terminal."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else otherwise


def print_table(
    titles: Iterable[str],
    rows: Iterable[Sequence[Any]],
    *,
    right: Collection[str] = (),
    wrapped: Collection[str] | None = None,
) -> None:
    """Prints a table without lines. A cell is text in the markup of `rich`, or a result of `plain`. Columns in `right`
    are aligned right. In a narrow terminal the columns in `wrapped` (None: all) take several lines."""
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in titles:
        table.add_column(
            title,
            justify="right" if title in right else "left",
            no_wrap=wrapped is not None and title not in wrapped,
            overflow="fold" if wrapped else "ellipsis",
        )
    for row in rows:
        table.add_row(*row)
    console = Console(width=terminal_width(otherwise=200))
    # With a broken pipe, rich ends the process; click raises an error, which becomes the exit code.
    with console.capture() as printed:
        console.print(table)
    click.echo("\n".join(line.rstrip() for line in printed.get().splitlines()))


def show_first(lines: Sequence[str]) -> None:
    """Prints the first lines of a list and the number of the others."""
    for line in lines[:SHOWN]:
        click.echo(printable_only(line))
    if len(lines) > SHOWN:
        click.echo(f"… and {len(lines) - SHOWN:,} more; --json shows them all")
