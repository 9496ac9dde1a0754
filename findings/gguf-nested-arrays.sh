#!/usr/bin/env bash
# gguf 0.19.0 (Python) beside @huggingface/gguf 0.4.6 (npm): metadata that the writer takes and the reader gives back in
# another form, or not at all.
#
# The format has arrays of arrays, and `add_array` writes them. `GGUFReader` gives one flat list: [[1, 2], [3]] comes
# back as [1, 2, 3], although the file stores the length of each inner array, and Node's library reads [[1, 2], [3]]
# from it. Empty strings and empty arrays are valid values, too. The writer drops their keys without an error, so a
# reader cannot tell them from keys that were never set.
#
# Needs Node 20 or later. Expected: both readers return what the writer was given.
# Seen on 2026-11-30, with Python 3.11 and Node 20 (written, Python, Node):
#   pairs    [[1, 2], [3]]    [1, 2, 3]    [[1, 2], [3]]
#   words    [["a", "b"], []] is refused by the writer
#   plain    [1, 2]           [1, 2]       [1, 2]
#   text     ""               no key       no key
#   list     []               no key       no key
# Exits with 1 if that changes.
set -euo pipefail

folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check gguf==0.19.0
npm install --prefix="$folder" --silent --no-audit --no-fund @huggingface/gguf@0.4.6

cat >"$folder/read.mjs" <<'NODE'
import { gguf } from "@huggingface/gguf";

const { metadata } = await gguf(process.argv[2], { allowLocalFile: true });
console.log(JSON.stringify(["pairs", "plain", "text", "list"].map((key) => metadata[key] ?? "no key")));
NODE

"$folder/venv/bin/python" - "$folder/read.mjs" "$folder/metadata.gguf" <<'PYTHON'
import json
import subprocess
import sys

from gguf import GGUFReader, GGUFWriter

script, path = sys.argv[1:]
WRITTEN = {"pairs": [[1, 2], [3]], "plain": [1, 2], "text": "", "list": []}
EXPECTED = {
    "pairs": ([1, 2, 3], [[1, 2], [3]]),
    "plain": ([1, 2], [1, 2]),
    "text": ("no key", "no key"),
    "list": ("no key", "no key"),
}


def write(path, values):
    writer = GGUFWriter(path, "llama")
    for key, value in values.items():
        (writer.add_string if isinstance(value, str) else writer.add_array)(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


try:
    write(f"{path}.refused", {"words": [["a", "b"], []]})
    refused = None
except ValueError as error:
    refused = str(error)
write(path, WRITTEN)
fields = GGUFReader(path).fields
in_python = [fields[key].contents() if key in fields else "no key" for key in WRITTEN]
in_node = json.loads(subprocess.run(["node", script, path], capture_output=True, text=True, check=True).stdout)
found = dict(zip(WRITTEN, zip(in_python, in_node)))
for key, values in found.items():
    print(key, WRITTEN[key], *values, sep="   ")
print("words", refused, sep="   ")
sys.exit(not (found == EXPECTED and refused))
PYTHON
