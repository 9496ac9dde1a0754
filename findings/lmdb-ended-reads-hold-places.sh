#!/usr/bin/env bash
# lmdb 3.0.0 (Python): the place of a read-only transaction among the environment's readers, of which there are 126.
#
# A transaction that was aborted, committed or left with its `with` block can no longer be used, yet keeps its place until
# Python frees the object, and so does whatever refers to it: a cursor, or the traceback of an error. After 126 of them
# `begin` fails, in every process that has the folder open. `reader_check` frees none, and `max_spare_txns` changes
# nothing. LMDB documents that `mdb_txn_abort` closes a reader's place.
#
# Expected: no place is taken once all transactions have ended (one at most, which the package keeps to use again).
# Seen on 2026-11-30, with Python 3.11: places after 50 ended transactions, places once the objects are gone:
#   abort     50   0
#   commit    50   0
#   with      50   0
#   126 ended transactions: ReadersFullError
# Exits with 1 if that changes.
set -euo pipefail

folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check lmdb==3.0.0

"$folder/venv/bin/python" - "$folder" <<'PYTHON'
import sys
from pathlib import Path

import lmdb


def places(environment):
    return len(environment.readers().splitlines()) - 1


def end(transaction, how):
    if how == "with":
        with transaction:
            pass
    else:
        getattr(transaction, how)()
    return transaction


seen = []
for how in ("abort", "commit", "with"):
    environment = lmdb.open(str(Path(sys.argv[1], how)))
    ended = [end(environment.begin(), how) for _ in range(50)]
    environment.reader_check()
    taken = places(environment)
    ended.clear()
    seen.append((how, taken, places(environment)))
    print(f"{how:<8} {taken:>3} {places(environment):>3}")

environment = lmdb.open(str(Path(sys.argv[1], "full")), max_spare_txns=0)
ended, error = [], None
try:
    for _ in range(127):
        ended.append(end(environment.begin(), "abort"))
except lmdb.Error as raised:
    error = type(raised).__name__
print(f"{len(ended)} ended transactions: {error}")
expected = [("abort", 50, 0), ("commit", 50, 0), ("with", 50, 0)]
sys.exit(seen != expected or (len(ended), error) != (126, "ReadersFullError"))
PYTHON
