#!/usr/bin/env bash
# numcodecs 0.16.6: three of its codecs cannot decode what they encoded from an empty buffer.
#
# An empty array has an empty buffer. Zlib, GZip, BZ2 and LZMA decode what they encoded from it. Zstd, LZ4 and Blosc
# encode it without an error, and raise RuntimeError when they decode the result. Zstd's frame is valid: zstandard
# decodes it. The failure only shows when the data is read.
#
# Expected: each codec decodes what it encoded.
# Seen on 2026-11-30, with Python 3.11:
#   Zlib empty   GZip empty   BZ2 empty   LZMA empty
#   Zstd RuntimeError   LZ4 RuntimeError   Blosc RuntimeError
#   zstandard, of the bytes of Zstd: empty
# Exits with 1 if that changes.
set -euo pipefail

folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check numcodecs==0.16.6 numpy==2.4.6 zstandard==0.25.0

"$folder/venv/bin/python" - <<'PYTHON'
import sys

import numcodecs
import zstandard

EXPECTED = dict.fromkeys(("Zlib", "GZip", "BZ2", "LZMA"), "empty")
EXPECTED |= dict.fromkeys(("Zstd", "LZ4", "Blosc"), "RuntimeError")


def outcome(decode, data):
    try:
        return "empty" if len(decode(data)) == 0 else "something"
    except Exception as error:
        return type(error).__name__


found = {}
for name in EXPECTED:
    codec = getattr(numcodecs, name)()
    found[name] = outcome(codec.decode, bytes(codec.encode(b"")))
    print(name, found[name])
of_frame = outcome(zstandard.ZstdDecompressor().decompress, bytes(numcodecs.Zstd().encode(b"")))
print("zstandard, of the bytes of Zstd:", of_frame)
sys.exit(not (found == EXPECTED and of_frame == "empty"))
PYTHON
