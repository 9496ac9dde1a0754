#!/usr/bin/env bash
# ml_dtypes 0.6.0 with numpy 2.4.6: with a NaN in a bfloat16 array, `sort` does not sort, and `nansum` returns NaN.
#
# numpy sorts NaN to the end. A NaN in bfloat16 keeps the other values from being sorted: [3, nan, 1, 2] stays as it is,
# with `argsort` and `unique` as well. `nansum`, `nanmean` and `nan_to_num` do not replace the NaN, and give no warning,
# because numpy does not count bfloat16 among its floating-point types. All of them work with float16. `sort` of
# float8_e4m3fn behaves like that of bfloat16.
#
# Expected: from bfloat16 what float16 gives.
# Seen on 2026-11-30, with Python 3.11, of [3, nan, 1, 2] (float16 | bfloat16):
#   sort         [1, 2, 3, nan] | [3, nan, 1, 2]
#   argsort      [2, 3, 0, 1] | [0, 1, 2, 3]
#   unique       [1, 2, 3, nan] | [3, nan, 1, 2]
#   nansum       6 | nan
#   nanmean      2 | nan
#   nan_to_num   [3, 0, 1, 2] | [3, nan, 1, 2]
#   isnan        [False, True, False, False] | the same
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

VALUES = [3, np.nan, 1, 2]
SORTED = "[1.0, 2.0, 3.0, nan]"
KEPT = "[3.0, nan, 1.0, 2.0]"
EXPECTED = {
    "sort": (SORTED, KEPT),
    "argsort": ("[2, 3, 0, 1]", "[0, 1, 2, 3]"),
    "unique": (SORTED, KEPT),
    "nansum": ("6.0", "nan"),
    "nanmean": ("2.0", "nan"),
    "nan_to_num": ("[3.0, 0.0, 1.0, 2.0]", KEPT),
    "isnan": ("[False, True, False, False]",) * 2,
}


def result(name, dtype):
    # nanmean's bfloat16 scalar is no Python number.
    value = np.asarray(getattr(np, name)(np.array(VALUES, dtype)))
    return str((value if value.dtype.kind in "bi" else value.astype(np.float32)).tolist())


found = {}
for name, expected in EXPECTED.items():
    found[name] = result(name, np.float16), result(name, ml_dtypes.bfloat16)
    print(name, " | ".join(found[name]), sep="  ")
is_e4m3_alike = result("sort", ml_dtypes.float8_e4m3fn) == KEPT
sys.exit(not (found == EXPECTED and is_e4m3_alike))
PYTHON
