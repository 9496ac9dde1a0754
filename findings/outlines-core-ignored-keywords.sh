#!/usr/bin/env bash
# outlines_core 0.2.14 (beside jsonschema 4.26.0): the regular expression of a schema ignores some keywords without an
# error.
#
# `build_regex_from_schema` raises an error for an unknown format, which suggests that it does so for everything that it
# does not support. But it ignores the bounds of an integer, `multipleOf`, `uniqueItems`, and `required` without
# `properties`: an integer from 0 to 100 may be 101. It puts a `pattern` between quotes as it is. So "b" has to match
# the whole string, where JSON Schema looks for it anywhere in the string, and `[^a]` also matches a bare quotation
# mark, and the text is not JSON. An exponent needs a sign: 1E+5 matches and 1e5 does not.
#
# Expected: an error for what is not supported, and no text that is not JSON.
# Seen on 2026-11-30, with Python 3.11 (jsonschema | the regular expression):
#   {"type": "integer", "minimum": 0, "maximum": 100}                   101     no | yes
#   {"type": "integer", "multipleOf": 3}                                4       no | yes
#   {"type": "array", "items": {"type": "integer"}, "uniqueItems": true}  [1, 1]  no | yes
#   {"type": "object", "required": ["a"]}                               {}      no | yes
#   {"type": "string", "pattern": "^[^a]$"}                             """     not JSON | yes
#   {"type": "string", "pattern": "b"}                                  "abc"   yes | no
#   {"type": "number"}                                                  1e5     yes | no
#   {"type": "number"}                                                  1E+5    yes | yes
#   {"type": "string", "format": "idn-email"}                           ValueError
# Exits with 1 if that changes.
set -euo pipefail

folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check outlines_core==0.2.14 jsonschema==4.26.0

"$folder/venv/bin/python" - <<'PYTHON'
import json
import re
import sys

from jsonschema import Draft202012Validator
from outlines_core.json_schema import build_regex_from_schema

CASES = [
    ({"type": "integer", "minimum": 0, "maximum": 100}, "101", "no", "yes"),
    ({"type": "integer", "multipleOf": 3}, "4", "no", "yes"),
    ({"type": "array", "items": {"type": "integer"}, "uniqueItems": True}, "[1, 1]", "no", "yes"),
    ({"type": "object", "required": ["a"]}, "{}", "no", "yes"),
    ({"type": "string", "pattern": "^[^a]$"}, '"""', "not JSON", "yes"),
    ({"type": "string", "pattern": "b"}, '"abc"', "yes", "no"),
    ({"type": "number"}, "1e5", "yes", "no"),
    ({"type": "number"}, "1E+5", "yes", "yes"),
]


def validity(schema, text):
    try:
        return "yes" if Draft202012Validator(schema).is_valid(json.loads(text)) else "no"
    except json.JSONDecodeError:
        return "not JSON"


same = True
for schema, text, *expected in CASES:
    pattern = build_regex_from_schema(json.dumps(schema))
    found = [validity(schema, text), "yes" if re.fullmatch(pattern, text) else "no"]
    print(json.dumps(schema), text, " | ".join(found), sep="  ")
    same = same and found == expected
try:
    build_regex_from_schema(json.dumps({"type": "string", "format": "idn-email"}))
    same = False
except Exception as error:
    print("unknown format:", type(error).__name__)
    same = same and type(error) is ValueError
sys.exit(not same)
PYTHON
