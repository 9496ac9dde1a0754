#!/usr/bin/env bash
# zstandard 0.25.0: how much of the data is read, and whether a cut is noticed, depends on the function.
#
# Several frames may follow one another (RFC 8878, 3.1). Of two frames, `decompress` and `read_to_iter` return the first
# and ignore the second without an error; `stream_reader`, `copy_stream` and `open` return both. If the data was cut in
# the middle, `decompress` raises an error, and the other four return the part that they have, as if it were everything.
# gzip raises EOFError. A skippable frame before the data (RFC 8878, 3.1.2) is an error for `decompress`, `read_to_iter`
# returns nothing, and the other three skip it.
#
# Expected: the same of all functions, and an error for a cut.
# Seen on 2026-11-30, with Python 3.11 (two frames of 100 bytes, one of them cut, one after a skippable frame):
#   decompress      100   ZstdError   ZstdError
#   read_to_iter    100   a part      a part (none)
#   stream_reader   200   a part      100
#   copy_stream     200   a part      100
#   open            200   a part      100
#   gzip            200   EOFError    -
# Exits with 1 if that changes.
set -euo pipefail

folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check zstandard==0.25.0

"$folder/venv/bin/python" - <<'PYTHON'
import gzip
import io
import random
import sys

import zstandard

CONTENT = random.Random(0).randbytes(100)
FRAME = zstandard.ZstdCompressor().compress(CONTENT)
SKIPPABLE = bytes.fromhex("502a4d18") + (3).to_bytes(4, "little") + b"abc"
PART = "a part"


def of_copy(data):
    written = io.BytesIO()
    zstandard.ZstdDecompressor().copy_stream(io.BytesIO(data), written)
    return written.getvalue()


READERS = {
    "decompress": lambda data: zstandard.ZstdDecompressor().decompress(data),
    "read_to_iter": lambda data: b"".join(zstandard.ZstdDecompressor().read_to_iter(data)),
    "stream_reader": lambda data: zstandard.ZstdDecompressor().stream_reader(data).read(),
    "copy_stream": of_copy,
    "open": lambda data: zstandard.open(io.BytesIO(data)).read(),
}
EXPECTED = {
    "decompress": [100, "ZstdError", "ZstdError"],
    "read_to_iter": [100, PART, PART],
    "stream_reader": [200, PART, 100],
    "copy_stream": [200, PART, 100],
    "open": [200, PART, 100],
}


def outcome(read, data):
    try:
        num_bytes = len(read(data))
    except Exception as error:
        return type(error).__name__
    return num_bytes if num_bytes >= len(CONTENT) else PART


inputs = [FRAME + FRAME, FRAME[: len(FRAME) // 2], SKIPPABLE + FRAME]
found = {name: [outcome(read, data) for data in inputs] for name, read in READERS.items()}
member = gzip.compress(CONTENT)
of_gzip = [outcome(gzip.decompress, member + member), outcome(gzip.decompress, member[: len(member) // 2])]
for name, outcomes in {**found, "gzip": of_gzip}.items():
    print(name, *outcomes, sep="   ")
sys.exit(not (found == EXPECTED and of_gzip == [200, "EOFError"]))
PYTHON
