#!/usr/bin/env bash
# llguidance 1.9.1 (beside jsonschema 4.26.0): a bound on a number takes away ways to write it that JSON allows.
#
# With {"type": "number"} the grammar takes 1e-7, 1e30 and -0.0. With "minimum": 0 added it takes none of them, although
# each is at least 0: no exponent can be written any more, and no minus sign before a zero. A model then has to write
# 1e30 with all of its zeros. jsonschema finds every one of these values valid under both schemas. The same holds for
# "maximum": 1e6, under which 1e5 is refused, and 100000 taken.
#
# Expected: what is taken without bounds is taken with them if its value is within.
# Seen on 2026-11-28, with Python 3.11:
#   {"type": "number"}                      1e-7 yes yes   1e30 yes yes   -0.0 yes yes   0.5 yes yes
#   {"type": "number", "minimum": 0}        1e-7 yes no    1e30 yes no    -0.0 yes no    0.5 yes yes
#   {"type": "number", "maximum": 1000000}  1e5 yes no     100000 yes yes
# (the first answer is jsonschema's, the second llguidance's). Exits with 1 if that changes.
set -euo pipefail

folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check llguidance==1.9.1 jsonschema==4.26.0

"$folder/venv/bin/python" - <<'PYTHON'
import json
import sys

import jsonschema
from llguidance import LLMatcher, LLTokenizer

tokenizer = LLTokenizer("byte")


def is_taken(schema, text):
    matcher = LLMatcher(tokenizer, LLMatcher.grammar_from_json_schema(json.dumps(schema)))
    tokens = tokenizer.tokenize_str(text)
    return matcher.validate_tokens(tokens) == len(tokens) and matcher.consume_tokens(tokens) and matcher.is_accepting()


def is_valid(schema, text):
    return jsonschema.Draft202012Validator(schema).is_valid(json.loads(text))


expected = [
    ({"type": "number"}, {"1e-7": True, "1e30": True, "-0.0": True, "0.5": True}),
    ({"type": "number", "minimum": 0}, {"1e-7": False, "1e30": False, "-0.0": False, "0.5": True}),
    ({"type": "number", "maximum": 1000000}, {"1e5": False, "100000": True}),
]
same = True
for schema, texts in expected:
    words = []
    for text, taken in texts.items():
        found = is_valid(schema, text), is_taken(schema, text)
        same = same and found == (True, taken)
        words.append(" ".join([text, *("yes" if one else "no" for one in found)]))
    print(json.dumps(schema), "  ".join(words), sep="  ")
sys.exit(not same)
PYTHON
