"""`python -m tests.faults.mutants FILE OLDER FOLDER CASES SEED`: what LMDB does with damaged files that pass the check.

Prints one JSON line for each damaged copy: its kind and seed, what the check says, and how a hard use ended. A process
of its own, so that a fork has no threads to lose.
"""

from __future__ import annotations

import json
import shutil
import sys
from functools import partial
from pathlib import Path

from diskprefix.errors import StoreCorrupt
from diskprefix.store.filecheck import check_file
from tests.faults.file_damage import FILE_DAMAGE, damaged
from tests.faults.isolated import run_isolated
from tests.faults.lmdb_files import use_hard

_TIMEOUT_S = 20.0


def verdict_of_check(file: Path) -> str:
    """Returns the state that the check reports, or "corrupt: …"."""
    try:
        return check_file(file).state
    except StoreCorrupt as error:
        return f"corrupt: {str(error).removeprefix(str(file))}"


def use_and_check(folder: Path, seed: int) -> str:
    """Returns how the use of the file ended. LMDB must leave a file that passes the check."""
    outcome = use_hard(folder, seed)
    checked = verdict_of_check(folder / "data.mdb")
    return outcome if checked == "sound" else f"{outcome}, then {checked}"


def main() -> None:
    file, older, folder = (Path(argument) for argument in sys.argv[1:4])
    cases, first_seed = (int(argument) for argument in sys.argv[4:6])
    data, before = file.read_bytes(), older.read_bytes()
    kinds = list(FILE_DAMAGE)
    for seed in range(first_seed, first_seed + cases):
        kind = kinds[seed % len(kinds)]
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        (folder / "data.mdb").write_bytes(damaged(data, before, kind, seed))
        check = run_isolated(partial(verdict_of_check, folder / "data.mdb"), _TIMEOUT_S)
        passed = not check.startswith("corrupt")
        use = run_isolated(partial(use_and_check, folder, seed), _TIMEOUT_S) if passed else ""
        print(json.dumps({"kind": kind, "seed": seed, "check": check, "use": use}), flush=True)


if __name__ == "__main__":
    main()
