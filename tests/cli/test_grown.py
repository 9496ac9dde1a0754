"""Commands that are given the id of a saved prompt that has grown since."""

from __future__ import annotations

from pathlib import Path

from tests.cli.conftest import Run
from tests.extras.exchange.exported import entry_of
from tests.store.building import BLOCK, open_store, prompt

TOKENS = prompt(1, 3 * BLOCK)


def saved(folder: Path, *, end: int, seed: int = 0) -> str:
    """Saves a prompt that replaces shorter ones, and returns its id."""
    tokens = TOKENS[:end].copy()
    tokens[BLOCK + 5 :] += seed
    store = open_store(folder)
    pub = entry_of(store, tokens, replaces=True)
    store.publish(pub)
    store.close()
    assert pub.last_node is not None
    return pub.last_node.hex()


def test_a_former_id_is_read_with_a_line_that_says_so_and_not_removed(run: Run, folder: Path, tmp_path: Path) -> None:
    former, present = saved(folder, end=BLOCK + 3), saved(folder, end=BLOCK + 9)
    where = ("--kv-cache-dir", folder)
    line = f"entry {former[:12]} has grown; its id is now {present}\n"
    shown = run("inspect", former[:12], "--json", *where)
    assert (shown.exit_code, shown.stderr) == (0, line)
    assert shown.json["id"] == present
    exported = run("export", former[:12], "-o", tmp_path / "e.safetensors", *where)
    assert (exported.exit_code, exported.stderr) == (0, line)
    assert present[:12] in exported.stdout
    for flags in (("--yes",), ("--dry-run",)):
        refused = run("purge", former[:12], *flags, *where)
        assert (refused.exit_code, refused.stdout, refused.stderr) == (2, "", f"error: {line}")
    assert run("purge", present, "--yes", *where).exit_code == 0
    gone = run("inspect", former[:12], *where)
    assert (gone.exit_code, gone.stderr) == (2, f"error: no entry starts with '{former[:12]}'; {SEE}\n")


SEE = "run `diskprefix inspect` to see the ids"


def test_of_several_that_have_grown_out_of_it_none_is_taken_and_all_are_named(run: Run, folder: Path) -> None:
    former = saved(folder, end=BLOCK + 3)
    present = {saved(folder, end=BLOCK + 9), saved(folder, end=BLOCK + 9, seed=1)}
    for command in (("inspect",), ("export",), ("purge", "--yes")):
        ended = run(*command, former, "--kv-cache-dir", folder)
        assert (ended.exit_code, ended.stdout) == (2, "")
        assert f"entry {former} has grown into 2: " in ended.stderr
        assert all(id_ in ended.stderr for id_ in present)
