#!/usr/bin/env bash
# llguidance 1.9.1 (beside jsonschema 4.26.0): "format": "date" takes 29 February in every year.
#
# The grammar knows how many days a month has: it refuses 2026-02-30 and 2026-04-31 at the digit that makes them wrong.
# But it does not look at the year, so it takes 2025-02-29 and 1900-02-29. A date that the constraint let through is
# then refused by the format checker of jsonschema, and by Python's own datetime.
#
# Expected: refused like the 30th, or days not checked at all.
# Seen on 2026-11-28, with Python 3.11 (the first answer is jsonschema's, the second llguidance's):
#   2024-02-29 yes yes   2025-02-29 no yes   1900-02-29 no yes   2026-02-30 no no   2026-04-31 no no
# Exits with 1 if that changes.
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

SCHEMA = {"type": "string", "format": "date"}
tokenizer = LLTokenizer("byte")
grammar = LLMatcher.grammar_from_json_schema(json.dumps(SCHEMA))
validator = jsonschema.Draft202012Validator(SCHEMA, format_checker=jsonschema.FormatChecker())

found = {}
for date in ("2024-02-29", "2025-02-29", "1900-02-29", "2026-02-30", "2026-04-31"):
    tokens = tokenizer.tokenize_str(json.dumps(date))
    found[date] = validator.is_valid(date), LLMatcher(tokenizer, grammar).validate_tokens(tokens) == len(tokens)
    print(date, *("yes" if one else "no" for one in found[date]))
sys.exit([*found.values()] != [(True, True), (False, True), (False, True), (False, False), (False, False)])
PYTHON
