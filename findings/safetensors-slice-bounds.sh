#!/usr/bin/env bash
# safetensors 0.8.0 with numpy 2.4.6: a lazy slice takes an index from the end, but no range from the end.
#
# `safe_open(...).get_slice(name)` is read with brackets as an array is. With 5 rows, [-1] gives the last row, and [::2]
# every second one, as numpy does. But [-2:], the last two rows, raises OverflowError; [3:100], which numpy cuts at the
# end, raises SafetensorError; and [4:2], which numpy takes for empty, raises SystemError, while [2:2] is empty. So code
# that reads the last rows of a tensor works with the loaded array, and not with the slice.
#
# Expected: bounds as numpy takes them, as the other brackets do.
# Seen on 2026-11-28, with Python 3.11:
#   [-1] equal   [::2] equal   [2:2] equal   [:, -1] equal
#   [-2:] OverflowError   [3:100] SafetensorError   [4:2] SystemError
# Exits with 1 if that changes.
set -euo pipefail

folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check safetensors==0.8.0 numpy==2.4.6

"$folder/venv/bin/python" - "$folder/rows.safetensors" <<'PYTHON'
import sys

import numpy as np
from safetensors import safe_open
from safetensors.numpy import save_file

ROWS = np.arange(20, dtype=np.float32).reshape(5, 4)
EXPECTED = {
    "-1": "equal",
    "::2": "equal",
    "2:2": "equal",
    ":, -1": "equal",
    "-2:": "OverflowError",
    "3:100": "SafetensorError",
    "4:2": "SystemError",
}
save_file({"rows": ROWS}, sys.argv[1])
found = {}
with safe_open(sys.argv[1], "np") as file:
    for brackets in EXPECTED:
        index = eval(f"np.s_[{brackets}]")
        try:
            read = file.get_slice("rows")[index]
            found[brackets] = "equal" if np.array_equal(read, ROWS[index]) else "other rows"
        except Exception as error:
            found[brackets] = type(error).__name__
        print(f"[{brackets}]", found[brackets])
sys.exit(found != EXPECTED)
PYTHON
