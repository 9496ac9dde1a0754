"""Checks that are taken away one by one, in a copy of the sources: a target must find each within a minute."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools.fuzzing import compiled, running

_SECONDS = 60


@dataclass(frozen=True)
class Mutant:
    """`old` stands once in a source of the operators, and becomes `new`."""

    target: str
    taken_away: str
    file: str
    old: str
    new: str


MUTANTS = (
    Mutant(
        "planes_join",
        "the exceptions of a run lie in the data",
        "planes.h",
        "if (count > end - exceptions || !unpack",
        "if (!unpack",
    ),
    Mutant(
        "planes_join",
        "the data is as long as its parts",
        "planes.h",
        "if (call->num_bytes < parts.exceptions) return 1;",
        "",
    ),
    Mutant(
        "planes_join",
        "a group has no more exceptions than its run",
        "planes.h",
        "if (__builtin_popcountll(excepted) > end - exceptions) return false;",
        "",
    ),
    Mutant(
        "planes_split",
        "the planes fit into their room",
        "planes.h",
        "if (total[bits - 1] >= call->num_bytes) return 1;",
        "",
    ),
    Mutant(
        "pack",
        "9 bits choose from a grid of 512",
        "packing.h",
        "chosen<8>(row.grid, at & 511,",
        "chosen<8>(row.grid, at,",
    ),
    Mutant(
        "pack",
        "a file that is cut short is an error",
        "packing.h",
        "if (count <= 0) return false;",
        "if (count <= 0) return true;",
    ),
    Mutant(
        "product",
        "a row's sum does not depend on the number of rows",
        "matrix.h",
        "case 3: return add<3>(rows,",
        "case 3: return add<2>(rows,",
    ),
    Mutant(
        "attention",
        "nothing is read behind the last token",
        "attention.h",
        "const int64_t present = least(KEY_TILE, last + 1 - start)",
        "const int64_t present = least(KEY_TILE, last + 2 - start)",
    ),
    Mutant(
        "attention",
        "tiles are merged in their order",
        "attention.h",
        "merge(partial(task, tile), task.num_rows)",
        "merge(partial(task, task.num_tiles - 1 - tile), task.num_rows)",
    ),
    Mutant(
        "experts",
        "an expert of that number is there",
        "experts.h",
        "if ((uint64_t)call_.chosen[pair] >= (uint64_t)call_.num_experts) return false;",
        "",
    ),
    Mutant(
        "recurrence",
        "a convolution goes on with its last inputs",
        "recurrence.h",
        "const float* numbers = (const float*)window_[(oldest + k) % kernel_];",
        "const float* numbers = (const float*)window_[k];",
    ),
    Mutant(
        "head_products",
        "the last numbers of a row are written alone",
        "parts.h",
        "memcpy(to, padded, left * sizeof *to);",
        "memcpy(to, padded, sizeof padded);",
    ),
)


def tried(wanted: Sequence[str], workspace: Path) -> list[dict[str, Any]]:
    """Compiles each mutant of the wanted targets (of all without names), for the oldest CPU alone, and runs its target.

    Returns a row for each, with what was found. Raises `CannotFuzz`, also if a target ends without an input that fails.
    """
    have = sorted({one.target for one in MUTANTS})
    if unknown := sorted(set(wanted) - set(have)):
        raise running.CannotFuzz(f"there is no mutant of {unknown[0]}; there are some of {', '.join(have)}")
    rows = []
    for number, mutant in enumerate(one for one in MUTANTS if not wanted or one.target in wanted):
        native = workspace / f"native-{number}"
        shutil.copytree(compiled.NATIVE / "source", native / "source")
        shutil.copy2(compiled.NATIVE / "build.py", native)
        changed = native / "source" / mutant.file
        text = changed.read_text(encoding="utf-8")
        assert text.count(mutant.old) == 1, f"{mutant.file} has changed: {mutant.taken_away}"
        changed.write_text(text.replace(mutant.old, mutant.new), encoding="utf-8")
        try:
            cache = workspace / "compiled"
            folder = compiled.compiled(cache, native=native, targets=[mutant.target], variants=["baseline"])
        except compiled.CannotCompile as error:
            raise running.CannotFuzz(str(error)) from error
        target = running.Fuzzed(mutant.target, "C++", (str(folder / mutant.target),), 256)
        outcome = running.run(target, _SECONDS, workspace / f"run-{number}")
        if outcome.finding and not outcome.input:
            raise running.CannotFuzz(f"the mutant of {mutant.target} does not run: {outcome.finding}")
        rows.append(
            {
                "target": mutant.target,
                "taken_away": mutant.taken_away,
                "finding": outcome.finding,
                "seconds": outcome.seconds,
            }
        )
    return rows
