#!/usr/bin/env bash
# blosc2 4.14.1 with numpy 2.4.6: with several threads, the same data compresses to different bytes at each call.
#
# With one thread the bytes are always the same. With four they change from call to call, while length and content stay
# the same. So a store that names chunks by their hash finds no duplicates, and files are not reproducible. zstandard
# with four threads always gives the same bytes. By default blosc2 uses several threads where there are several cores.
#
# Expected: bytes that depend on data and settings alone.
# Seen on 2026-11-30, with Python 3.11, of 100 calls each:
#   blosc2 with 1 thread       1 kind of bytes     1 length   1 content
#   blosc2 with 4 threads     14 kinds of bytes    1 length   1 content   (any number above 1 counts as the same)
#   zstandard with 4 threads   1 kind of bytes     1 length   1 content
# Exits with 1 if that changes.
set -euo pipefail

folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check blosc2==4.14.1 numpy==2.4.6 zstandard==0.25.0

"$folder/venv/bin/python" - <<'PYTHON'
import sys

import blosc2
import numpy as np
import zstandard

DATA = np.sin(np.arange(400_000, dtype=np.float32)).tobytes()
NUM_CALLS = 100


def of_zstandard():
    return zstandard.ZstdCompressor(threads=4).compress(DATA)


KINDS = {
    "blosc2 with 1 thread": (lambda: blosc2.compress2(DATA, nthreads=1), blosc2.decompress2),
    "blosc2 with 4 threads": (lambda: blosc2.compress2(DATA, nthreads=4), blosc2.decompress2),
    "zstandard with 4 threads": (of_zstandard, zstandard.ZstdDecompressor().decompress),
}
num_kinds = {}
same = True
for name, (compress, decompress) in KINDS.items():
    kinds = {compress() for _ in range(NUM_CALLS)}
    num_kinds[name] = len(kinds)
    lengths, contents = {len(each) for each in kinds}, {decompress(each) for each in kinds}
    print(f"{name}  {len(kinds)} kinds of bytes  {len(lengths)} length  {len(contents)} content")
    same = same and len(lengths) == 1 and contents == {DATA}
of_one, of_four, of_other = num_kinds.values()
sys.exit(not (same and of_one == 1 and of_four > 1 and of_other == 1))
PYTHON
