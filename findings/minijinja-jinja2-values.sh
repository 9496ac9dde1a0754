#!/usr/bin/env bash
# minijinja 3.1.0 beside Jinja2 3.1.6: one chat template gives other text where it prints a float, and where it asks
# whether content is a sequence.
#
# Templates of chats are rendered by Jinja2 in Python and by minijinja in servers in Rust. Both print lists, dictionaries,
# booleans and None alike, in Python's way, which suggests that all values print alike. Floats do not: 1e-7 is 1e-07 in
# one and 0.0000001 in the other, 1e16 is 1e+16 and 10000000000000000.0, and within a list they differ once more. A tool
# whose schema has such a bound then begins another prompt. And `is sequence` is true of a string and of a dictionary in
# Jinja2, and of neither in minijinja, so a template that tells parts from plain text by it takes the other branch.
#
# Expected: the same text from both for all seven.
# Seen on 2026-11-28, with Python 3.11 (Jinja2 | minijinja):
#   {{ [true, none, 'a', {'b': 1}] }}   [True, None, 'a', {'b': 1}] | the same
#   {{ 1e-7 }}              1e-07 | 0.0000001
#   {{ 1e16 }}              1e+16 | 10000000000000000.0
#   {{ [1e-7, 1e16] }}      [1e-07, 1e+16] | [1e-7, 1e16]
#   {{ 1e-7|tojson }}       1e-07 | 1e-7
#   {{ 'a' is sequence }}   True | False
#   {{ {} is sequence }}    True | False
# Exits with 1 if that changes.
set -euo pipefail

folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check minijinja==3.1.0 Jinja2==3.1.6 MarkupSafe==3.0.3

"$folder/venv/bin/python" - <<'PYTHON'
import sys

import jinja2
import minijinja

SAME = "[True, None, 'a', {'b': 1}]"
EXPECTED = {
    "{{ [true, none, 'a', {'b': 1}] }}": (SAME, SAME),
    "{{ 1e-7 }}": ("1e-07", "0.0000001"),
    "{{ 1e16 }}": ("1e+16", "10000000000000000.0"),
    "{{ [1e-7, 1e16] }}": ("[1e-07, 1e+16]", "[1e-7, 1e16]"),
    "{{ 1e-7|tojson }}": ("1e-07", "1e-7"),
    "{{ 'a' is sequence }}": ("True", "False"),
    "{{ {} is sequence }}": ("True", "False"),
}
found = {}
for template in EXPECTED:
    found[template] = (
        jinja2.Environment().from_string(template).render(),
        minijinja.Environment().render_str(template),
    )
    print(template, " | ".join(found[template]), sep="  ")
sys.exit(found != EXPECTED)
PYTHON
