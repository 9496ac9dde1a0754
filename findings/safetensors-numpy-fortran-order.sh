#!/usr/bin/env bash
# safetensors 0.8.0 with numpy 2.4.6: an array that is not C-contiguous is saved with its values in the wrong places.
#
# `safetensors.numpy.save` and `save_file` accept any array, and write the bytes from its first value on as they lie in
# memory. The file has the array's shape, but no strides, so the array is loaded with its values shuffled, or with other
# values of the array that it is a view of. No error is raised. This concerns arrays in Fortran order, transposes, and
# views of some columns. Version 0.7.0 saved all of these correctly. `np.ascontiguousarray` before saving avoids it.
#
# Expected: the values in their places, as `np.save` has them.
# Seen on 2026-11-30, with Python 3.11, of [[0, 1, 2], [3, 4, 5]]:
#   row by row            [[0, 1, 2], [3, 4, 5]]
#   column by column      [[0, 3, 1], [4, 2, 5]]
#   a transpose           [[0, 3, 1], [4, 2, 5]]
#   every second column   [[0, 0, 1], [1, 2, 2]]   (of an array that has each column twice)
# Exits with 1 if that changes.
set -euo pipefail

folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check safetensors==0.8.0 numpy==2.4.6

"$folder/venv/bin/python" - "$folder/rows.safetensors" <<'PYTHON'
import sys

import numpy as np
from safetensors.numpy import load, load_file, save, save_file

ROWS = np.arange(6, dtype=np.float32).reshape(2, 3)
ARRAYS = {
    "row by row": (ROWS, [[0, 1, 2], [3, 4, 5]]),
    "column by column": (np.asfortranarray(ROWS), [[0, 3, 1], [4, 2, 5]]),
    "a transpose": (np.ascontiguousarray(ROWS.T).T, [[0, 3, 1], [4, 2, 5]]),
    "every second column": (np.repeat(ROWS, 2, axis=1)[:, ::2], [[0, 0, 1], [1, 2, 2]]),
}
same = True
for name, (array, expected) in ARRAYS.items():
    assert np.array_equal(array, ROWS)
    save_file({"rows": array}, sys.argv[1])
    read = [load(save({"rows": array}))["rows"].tolist(), load_file(sys.argv[1])["rows"].tolist()]
    print(name, read[0], sep="   ")
    same = same and read == [expected, expected]
sys.exit(not same)
PYTHON
