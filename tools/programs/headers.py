"""The header of a GGUF file, damaged a million times: each reading is one line of refusal, or fits the file.

A damaged header has one to three mutations: cut off, bytes changed, removed or inserted, and numbers replaced by those
that overflow sums and products or point behind the end. The reader may take no more memory than the file has bytes.
"""

from __future__ import annotations

import random
import signal
import struct
import sys
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
import numpy as np
from rich.console import Console

from diskprefix.errors import ModelError
from diskprefix.model.load.gguf_file import part_paths, read_tensors
from tools.measuring.live_server import step
from tools.measuring.options import FOLDER, JSON
from tools.measuring.report import machine, new_table, print_report, say, show_machine
from tools.measuring.workspace import measuring

MOST_S = 20
"""Seconds after which a reading counts as a hang."""
SPARE_BYTES = 1 << 19
"""Memory beside the file's size: objects of Python for names that are there, and the buffer of a file."""
_SHOWN_FAILURES = 10
_NUMBERS = (
    0,
    1,
    2,
    3,
    9,
    12,
    13,
    31,
    255,
    2**16,
    2**31 - 1,
    2**31,
    2**32 - 1,
    2**32,
    2**62,
    2**63 - 1,
    2**63,
    2**64 - 1,
)


def write_sample(path: Path) -> Path:
    """Writes a small file that has metadata of every type, and tensors of some. Returns its path."""
    from gguf import GGMLQuantizationType, GGUFValueType, GGUFWriter
    from gguf.quants import quantize

    writer = GGUFWriter(path, "llama")
    for value_type in GGUFValueType:
        if value_type == GGUFValueType.STRING:
            writer.add_key_value("of.STRING", "text", value_type)
            writer.add_key_value("list.STRING", ["a", "bc", ""] * 5, GGUFValueType.ARRAY, value_type)
        elif value_type != GGUFValueType.ARRAY:
            writer.add_key_value(f"of.{value_type.name}", 1, value_type)
            writer.add_key_value(f"list.{value_type.name}", [1, 0, 1], GGUFValueType.ARRAY, value_type)
    writer.add_custom_alignment(64)
    rows = np.random.default_rng(0).normal(size=(2, 256)).astype(np.float32)
    writer.add_tensor("plain", rows)
    writer.add_tensor("stacked", rows.reshape(2, 2, 128).astype(np.float16))
    for kind in (GGMLQuantizationType.Q4_0, GGMLQuantizationType.Q8_0, GGMLQuantizationType.BF16):
        writer.add_tensor(kind.name, quantize(rows, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def damaged(content: bytes, choose: random.Random) -> bytes:
    """Returns `content` with one to three mutations."""
    changed = bytearray(content)
    for _ in range(choose.randint(1, 3)):
        at = choose.randrange(max(1, len(changed)))
        match choose.randrange(6):
            case 0:
                del changed[at:]
            case 1:
                changed[at : at + 1] = bytes([choose.randrange(256)])
            case 2:
                del changed[at : at + choose.choice((1, 4, 8, 100))]
            case 3:
                changed[at:at] = choose.randbytes(choose.choice((1, 4, 8, 100)))
            case 4:
                changed[at : at + 8] = struct.pack("<Q", choose.choice((*_NUMBERS, len(content))))
            case _:
                changed[at : at + 4] = struct.pack("<I", choose.choice((*_NUMBERS, len(content))) % 2**32)
    return bytes(changed)


def outcome(path: Path) -> str:
    """Reads the tensors of a file. Returns `read`, `refused` or how else it was refused. Raises `AssertionError` if the
    reading does not fit the file, and whatever else the reader raises."""
    try:
        tensors = read_tensors(part_paths(path))[1]
    except ModelError as error:
        return "refused" if len(str(error).splitlines()) == 1 else "refused in several lines"
    num_bytes = path.stat().st_size
    for tensor in tensors:
        content = tensor.content()
        assert tensor.offset + content.nbytes <= num_bytes, "a tensor that ends behind the file"
        del content
    return "read"


@contextmanager
def _alarmed() -> Iterator[None]:
    """Lets what takes longer than `MOST_S` fail, once `signal.alarm` is set."""

    def hangs(*_: object) -> None:
        raise TimeoutError("it hangs")

    before = signal.signal(signal.SIGALRM, hangs)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def tried(
    folder: Path, cases: int, seed: int, note: Callable[[str], None] = lambda _line: None
) -> tuple[Counter[str], list[dict[str, Any]]]:
    """Reads `cases` damaged files. Returns the counts of the outcomes, and the failures with the number of the case."""
    content = write_sample(folder / "whole.gguf").read_bytes()
    header = content[: read_tensors([folder / "whole.gguf"])[1][0].offset]
    rest, path = content[len(header) :], folder / "damaged.gguf"
    counts: Counter[str] = Counter()
    failures: list[dict[str, Any]] = []
    tracemalloc.start()
    try:
        with _alarmed():
            for case in range(cases):
                choose = random.Random(f"{seed}-{case}")
                # Most of what can be wrong is in the header; some files are cut short behind it.
                made = damaged(content, choose) if choose.random() < 0.1 else damaged(header, choose) + rest
                # ext4 waits for the disk when a file is cut to nothing and written again.
                path.unlink(missing_ok=True)
                path.write_bytes(made)
                tracemalloc.reset_peak()
                before = tracemalloc.get_traced_memory()[0]
                signal.alarm(MOST_S)
                try:
                    found = outcome(path)
                    assert found in ("read", "refused"), found
                    counts[found] += 1
                    taken = tracemalloc.get_traced_memory()[1] - before
                    assert taken <= len(made) + SPARE_BYTES, f"{taken} bytes of memory for a file of {len(made)}"
                except Exception as error:  # noqa: BLE001  # whatever it is, it is what the matrix looks for
                    counts["failed"] += 1
                    failures.append({"case": case, "error": f"{type(error).__name__}: {error}"})
                if case % 10_000 == 9_999:
                    note(", ".join(f"{count:,} {name}" for name, count in counts.items()))
    finally:
        tracemalloc.stop()
    return counts, failures


def show(report: dict[str, Any], console: Console) -> None:
    table = new_table(f"{report['cases']:,} headers, seed {report['seed']}", left=("",), right=("files",))
    for name in ("read", "refused", "failed"):
        table.add_row(name, f"{report['counts'].get(name, 0):,}")
    console.print(table)
    for failure in report["failures"][:_SHOWN_FAILURES]:
        say(console, f"case {failure['case']}: {failure['error']}")
    show_machine(report["machine"], console)


@click.command()
@click.option("--cases", type=click.IntRange(min=1), default=1_000_000, show_default=True, help="Damaged files.")
@click.option("--seed", type=int, default=0, show_default=True, help="Other files for each seed.")
@FOLDER
@JSON
def main(cases: int, seed: int, folder: Path | None, as_json: bool) -> None:
    """Read damaged headers of GGUF files: one line or a reading that fits, no hang, no memory beyond the file.

    A million take twenty minutes. Exits with 1 if one fails.
    """
    progress = Console(stderr=True)
    with measuring(folder, progress) as workspace, step(progress, f"{cases:,} damaged headers") as note:
        counts, failures = tried(workspace, cases, seed, note)
    report = {
        "benchmark": "headers",
        "cases": cases,
        "seed": seed,
        "machine": machine(),
        "counts": dict(counts),
        "failures": failures,
    }
    print_report(report, as_json, show)
    sys.exit(1 if failures else 0)
