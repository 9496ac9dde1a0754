"""`python -m tests.store.churner FOLDER SEED`: publish and evict until killed, a line on stdout for each commit."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.faults.lmdb_files import Churn, open_file


def main() -> None:
    churn = Churn(open_file(Path(sys.argv[1])), seed=int(sys.argv[2]))
    while True:
        churn.publish(2, 60_000)
        print("published", flush=True)
        if len(churn.names) > 30:
            churn.evict(2)
            print("evicted", flush=True)


if __name__ == "__main__":
    main()
