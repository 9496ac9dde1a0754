"""The rooms of the desk: what they say is there. `tests/test_walls.py` tests that each can be taken away."""

from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType

import click
import pytest

from diskprefix.daemon import rooms
from diskprefix.daemon.cli import commands
from tests.desk.conftest import Run

ROOT = Path(__file__).parents[2]
DESK = ROOT / "diskprefix/desk"
ROOMS = [room.__name__.rpartition(".")[2] for room in rooms.rooms()]
PAGE = (DESK / "README.md").read_text(encoding="utf-8")


def test_every_folder_of_the_desk_but_the_shared_one_is_a_room_with_tests() -> None:
    folders = {file.parent.name for file in DESK.glob("*/__init__.py")}
    assert folders == {*ROOMS, "shared"}
    assert [name for name in ROOMS if not (ROOT / "tests/desk" / name / "__init__.py").is_file()] == []


@pytest.mark.parametrize("room", rooms.rooms(), ids=ROOMS)
def test_what_a_room_says_that_it_adds_is_there(room: ModuleType) -> None:
    for target in getattr(room, "COMMANDS", {}).values():
        assert isinstance(rooms.loaded(f"{room.__name__}.{target}"), click.Command)
    for path in getattr(room, "PAGES", {}):
        assert rooms.page_at(path) is not None
    assert vars(room).keys() & {"COMMANDS", "ROUTES", "PAGES"}


def test_routes_of_rooms_can_be_added() -> None:
    assert all(callable(module.add_routes) and module.routes for module in rooms.modules_of_routes())


def test_names_of_commands_and_places_of_rooms_are_single() -> None:
    names = [name for room in rooms.rooms() for name in getattr(room, "COMMANDS", {})]
    places = [vars(room)["PLACE"] for room in rooms.rooms()]
    assert (len({*names}), len({*places})) == (len(names), len(places))
    assert len(commands()) == len(names) + 2


def test_without_rooms_the_daemon_has_its_own_commands_and_no_page(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rooms, "rooms", tuple)
    text = run("--help").stdout
    assert re.findall(r"^  (\w+)  ", text[text.index("Commands:") :], re.MULTILINE) == ["serve", "completion"]
    run("inspect").assert_refused(2, "No such command 'inspect'")
    assert (rooms.page_at("/"), rooms.welcome()) == (None, {"name": "diskprefix", "docs": "/docs"})


def test_the_page_has_a_row_for_each_room_and_the_recipes_name_files_that_are_there() -> None:
    """A room that was taken away may keep its row."""
    rows = dict(re.findall(r"^\| `(\w+)` \| (.+) \|$", PAGE, re.MULTILINE))
    assert {*ROOMS, "shared"} <= rows.keys()
    for room in rooms.rooms():
        told = rows[room.__name__.rpartition(".")[2]]
        assert [name for name in getattr(room, "COMMANDS", {}) if f"`{name}`" not in told] == []
    recipes = PAGE[PAGE.index("## Recipes") :]
    files = re.findall(r"`((?:diskprefix|tests)/[\w/.]+)`", recipes)
    assert len(files) >= 6
    assert [file for file in files if not (ROOT / file).exists()] == []
