#!/usr/bin/env bash
# ml_dtypes 0.6.0 with numpy 2.4.6: a Python float widens an array of bfloat16, and a Python int does not.
#
# Since numpy 2, a Python number does not change the type of an array of floats: float16 times 0.5 is float16. bfloat16
# times 2 is bfloat16, too, but times 0.5 it is float32, and `np.where(x > 0, x, 0.0)` is float64: two and four times
# the memory. The inner product is float32 as `x @ x`, and bfloat16 as `np.dot(x, x)`. `x *= 0.5` stays bfloat16.
#
# Expected: bfloat16 wherever float16 stays float16.
# Seen on 2026-11-30, with Python 3.11 (float16 | bfloat16):
#   x * 2                     float16 | bfloat16
#   x * 0.5                   float16 | float32
#   x ** 0.5                  float16 | float32
#   np.maximum(x, 0.0)        float16 | float32
#   np.clip(x, 0, 1)          float16 | float32
#   np.where(x > 0, x, 0)     float16 | bfloat16
#   np.where(x > 0, x, 0.0)   float16 | float64
#   np.dot(x, x)              float16 | bfloat16
#   x @ x                     float16 | float32
# Exits with 1 if that changes.
set -euo pipefail

folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check ml_dtypes==0.6.0 numpy==2.4.6

"$folder/venv/bin/python" - <<'PYTHON'
import sys

import ml_dtypes
import numpy as np

EXPECTED = {
    "x * 2": "bfloat16",
    "x * 0.5": "float32",
    "x ** 0.5": "float32",
    "np.maximum(x, 0.0)": "float32",
    "np.clip(x, 0, 1)": "float32",
    "np.where(x > 0, x, 0)": "bfloat16",
    "np.where(x > 0, x, 0.0)": "float64",
    "np.dot(x, x)": "bfloat16",
    "x @ x": "float32",
}
same = True
for expression, expected in EXPECTED.items():
    names = []
    for dtype in (np.float16, ml_dtypes.bfloat16):
        names.append(eval(expression, {"np": np, "x": np.ones(3, dtype)}).dtype.name)
    same = same and names == ["float16", expected]
    print(expression, " | ".join(names), sep="   ")
in_place = np.ones(3, ml_dtypes.bfloat16)
in_place *= 0.5
sys.exit(not (same and in_place.dtype == ml_dtypes.bfloat16))
PYTHON
