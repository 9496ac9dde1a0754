#!/usr/bin/env bash
# json_repair 0.64.6: a repair anywhere in a document takes the last newlines off every string in it.
#
# A model's reply that breaks off, or has a comma too many, is repaired. The strings before the fault need no repair,
# yet each of them that ends in "\n" loses its final newlines: the content of a file no longer ends in a newline, and
# the separator "\n" becomes the empty string. Spaces and tabs at the end stay. A valid document keeps its newlines, so
# whether a file ends in one depends on a comma much later in the document.
#
# Expected: the same text and separator from all three.
# Seen on 2026-11-30, with Python 3.11:
#   {"text": "a\n", "separator": "\n", "tail": "b \t"}    'a\n' '\n' 'b \t'
#   {"text": "a\n", "separator": "\n", "tail": "b \t",}   'a' '' 'b \t'
#   {"text": "a\n", "separator": "\n", "tail": "b \t"     'a' '' 'b \t'
# Exits with 1 if that changes.
set -euo pipefail

folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check json_repair==0.64.6

"$folder/venv/bin/python" - <<'PYTHON'
import json
import sys

from json_repair import repair_json

WHOLE = {"text": "a\n", "separator": "\n", "tail": "b \t"}
CHANGED = {"text": "a", "separator": "", "tail": "b \t"}
start = json.dumps(WHOLE).removesuffix("}")
expected = {start + "}": WHOLE, start + ",}": CHANGED, start: CHANGED}
found = {}
for document in expected:
    found[document] = repair_json(document, return_objects=True)
    print(document, *map(repr, found[document].values()))
sys.exit(found != expected)
PYTHON
