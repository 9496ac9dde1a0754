"""What a save, a restore and a start cost, counted and not timed: an optimisation that is lost fails a test.

The numbers are those of the day when the test was written. Where one falls, write the new one here.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from diskprefix.prefixstore.store.environment import Environment
from diskprefix.prefixstore.store.snapshot import Snapshot
from tests.closing import needs
from tests.faults.power.deeds import Loop
from tests.faults.power.recording import Op, record
from tests.runner import BLOCK, Runner, random_prompt, tiny_llama, tiny_settings

_OTHER_VERSIONS = 1.05
"""Other versions of the libraries that compress and that store may need so much more."""

SAVES = """
import sys
from pathlib import Path
from tests.faults.power.deeds import Loop, mark
loop = Loop(Path(sys.argv[1]) / "kv", 64 << 20)
for number in (0, 1, 5, 6):
    mark(begins=f"prompt {number}")
    loop.publish(number)
mark(begins="a use")
loop.touch(0)
mark(begins="the end")
loop.store.close()
"""
EXPECTED = {
    "prompt 0": (6, 40, 150_120),  # 4 KiB a block, the first of its model
    "prompt 1": (4, 18, 59_120),
    "prompt 5": (6, 38, 285_032),  # 32 KiB a block
    "prompt 6": (4, 19, 100_080),
    "a use": (2, 6, 13_432),
    "the end": (2, 6, 13_432),
}
"""Barriers, writes and written bytes."""


@needs("cc")
def test_a_save_needs_no_more_barriers_writes_and_bytes(tmp_path: Path) -> None:
    (tmp_path / "root").mkdir()
    counts, deed = dict[str, Counter[str]](), "a start"
    for event in record(("-c", SAVES, str(tmp_path / "root")), tmp_path / "root", tmp_path / "log"):
        if event.op == Op.MARK:
            deed = json.loads(event.path).get("begins", deed)
        counts.setdefault(deed, Counter())[event.op.name] += 1
        counts[deed]["bytes"] += event.size if event.op == Op.WRITE else 0
    found = {deed: (counts[deed]["SYNC"], counts[deed]["WRITE"], counts[deed]["bytes"]) for deed in EXPECTED}
    assert {deed: syncs for deed, (syncs, _, _) in found.items()} == {deed: of[0] for deed, of in EXPECTED.items()}
    more = {
        deed: (found[deed], expected)
        for deed, expected in EXPECTED.items()
        if any(one > limit * _OTHER_VERSIONS for one, limit in zip(found[deed][1:], expected[1:], strict=True))
    }
    assert more == {}


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """What is read of the store, by this thread and by the one that writes."""
    counts, this_thread = Counter[str](), threading.get_ident()
    pieces_at, get_record, begin = Snapshot.pieces_at, Snapshot.get_record, Environment._begin_transaction

    def pieces(self: Snapshot, *arguments: Any) -> Iterator[memoryview | None]:
        for piece in pieces_at(self, *arguments):
            counts["pieces"] += 1
            counts["bytes"] += len(piece or b"")
            yield piece

    def record(self: Snapshot, database: str, key: bytes) -> Any:
        counts[database if threading.get_ident() == this_thread else f"writer: {database}"] += 1
        return get_record(self, database, key)

    def transaction(self: Environment, write: bool) -> Any:
        counts["writes"] += write
        return begin(self, write)

    monkeypatch.setattr(Snapshot, "pieces_at", pieces)
    monkeypatch.setattr(Snapshot, "get_record", record)
    monkeypatch.setattr(Environment, "_begin_transaction", transaction)
    return counts


def test_a_restore_reads_each_block_once_and_its_use_is_one_transaction(tmp_path: Path, counted: Counter[str]) -> None:
    blocks = 20
    runner, prompt = Runner(tiny_llama(), tiny_settings(tmp_path)), random_prompt(1, blocks * BLOCK)
    runner.run(prompt, "full")
    runner.flush()
    runner.reopen()
    counted.clear()
    assert runner.run(prompt, "full").report.restored == len(prompt)
    # The logits behind the prompt are the last piece.
    assert counted["pieces"] == blocks + 1
    assert counted["bytes"] <= 59_227 * _OTHER_VERSIONS
    # When the prompt is matched and when it is read.
    assert counted["nodes"] <= 2 * (blocks + 1)
    assert counted["usage"] <= 2 * blocks
    runner.flush()
    assert counted["writes"] == 1
    # What the writer knows of the blocks, what it changes of them, and what their prompt has been seen to be.
    assert counted["writer: nodes"] <= 3 * (blocks + 2) + 1
    assert counted["pieces"] == blocks + 1
    runner.close()


READ = """
import resource, sys
from pathlib import Path
from diskprefix.prefixstore.store.store import Store
from tests.faults.power import prompts
from tests.faults.power.deeds import START_S
from tests.prefixstore.store.building import Clock
def faults():
    # Of this thread alone: pages that it was the first to touch.
    used = resource.getrusage(resource.RUSAGE_THREAD)
    return used.ru_minflt + used.ru_majflt
def read(number):
    with store.snapshot() as snapshot:
        of_prompt = [*snapshot.ancestry(prompts.last_node(store, number))]
        return sum(len(bytes(piece)) for name in of_prompt for _, piece in snapshot.pieces(name))
before = faults()
store = Store(Path(sys.argv[1]), budget_bytes=256 << 20, clock=Clock(START_S), on_corruption="quarantine", serving=True)
opened = faults()
# Another prompt's read imports what reads, and allocates.
read(10)
begun = faults()
num_bytes = read(5)
print(num_bytes, opened - before, faults() - begun)
store.close()
"""


@pytest.mark.skipif(not hasattr(resource, "RUSAGE_THREAD"), reason="the kernel does not tell")
def test_the_pages_that_a_start_and_a_read_touch_do_not_grow_with_the_store(tmp_path: Path) -> None:
    loop = Loop(tmp_path, 256 << 20)
    for number in (5, *range(10, 15), *range(25, 30)):
        loop.publish(number)
    loop.store.close()
    pages = (tmp_path / "data.mdb").stat().st_size // resource.getpagesize()
    answer = subprocess.run([sys.executable, "-c", READ, str(tmp_path)], capture_output=True, text=True, check=True)
    num_bytes, of_start, of_read = map(int, answer.stdout.split())
    assert num_bytes == 158_084
    # The kernel maps up to 16 pages at a fault: to look at all of the file is several hundred faults.
    assert pages > 5_000
    assert max(of_start, of_read) < 40, (of_start, of_read)


STARTS = {
    "daemon.app": 43,
    "daemon.cli.serve_command": 71,
    "daemon.server.process.process": 86,
    "prefixstore.store.store": 158,
}
"""How many modules that are not of Python are imported with each."""


@pytest.mark.parametrize("module", STARTS)
def test_a_start_imports_no_more_modules(module: str) -> None:
    code = f"import diskprefix.{module}, sys; print(*sys.modules)"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    names = [name for name in answer.stdout.split() if name.partition(".")[0] not in sys.stdlib_module_names]
    assert len(names) <= STARTS[module] * _OTHER_VERSIONS, sorted(names)
