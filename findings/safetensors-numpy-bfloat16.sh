#!/usr/bin/env bash
# safetensors 0.8.0 with ml_dtypes 0.6.0 and numpy 2.4.6: `safetensors.numpy` saves types that it cannot load, or only
# from a file.
#
# Arrays of bfloat16 and float8 (from ml_dtypes) are saved without an error. `load_file` returns bfloat16, but `load`,
# which reads the same bytes from memory, raises KeyError: 'BF16'. Neither reads float8: `load` raises KeyError, and
# `load_file` AttributeError, because numpy itself has no such type.
#
# Expected: what is saved can be loaded, from bytes as from a file.
# Seen on 2026-11-30, with Python 3.11 (load | load_file):
#   float16         float16 | float16
#   bfloat16        KeyError | bfloat16
#   float8_e4m3fn   KeyError | AttributeError
#   float8_e5m2     KeyError | AttributeError
# Exits with 1 if that changes.
set -euo pipefail

folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check safetensors==0.8.0 ml_dtypes==0.6.0 numpy==2.4.6

"$folder/venv/bin/python" - "$folder/one.safetensors" <<'PYTHON'
import sys

import ml_dtypes
import numpy as np
from safetensors.numpy import load, load_file, save, save_file

path = sys.argv[1]
TYPES = (np.float16, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2)
EXPECTED = {
    "float16": ("float16", "float16"),
    "bfloat16": ("KeyError", "bfloat16"),
    "float8_e4m3fn": ("KeyError", "AttributeError"),
    "float8_e5m2": ("KeyError", "AttributeError"),
}


def dtype_or_error(read, source):
    try:
        return read(source)["one"].dtype.name
    except Exception as error:
        return type(error).__name__


found = {}
for dtype in TYPES:
    tensors = {"one": np.ones(3, dtype)}
    save_file(tensors, path)
    found[dtype.__name__] = dtype_or_error(load, save(tensors)), dtype_or_error(load_file, path)
    print(dtype.__name__, " | ".join(found[dtype.__name__]), sep="   ")
sys.exit(found != EXPECTED)
PYTHON
