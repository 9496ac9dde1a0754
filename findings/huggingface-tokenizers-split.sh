#!/usr/bin/env bash
# tokenizers 0.23.3 (Python) beside @huggingface/tokenizers 0.2.0 (npm): one tokenizer.json, other tokens.
#
# The `behavior` of a `Split` or `Punctuation` step says what happens to the matches. The library for Node does not
# follow it fully: "Removed" keeps the separators, and "Isolated" with `invert`, which should keep all text, drops the
# text between the matches. Its `Whitespace` splits words at letters outside ASCII, and for a word that a `WordLevel`
# model does not know it returns an undefined id instead of the unknown token. No error is raised. Byte-level BPE with
# the regular expressions of GPT-2 and cl100k gave the same tokens in both.
#
# Needs Node 20 or later. Expected: the same tokens from both.
# Seen on 2026-11-30, with Python 3.11 and Node 20 (Python | Node):
#   Split " ", Removed              one two     ["one", "two"] | ["one", " ", "two"]
#   Split \w+, Isolated, invert     one two     ["one", " ", "two"] | ["one", "two"]
#   Split " ", Isolated             one two     ["one", " ", "two"] | the same
#   Punctuation, Removed            one,two     ["one", "two"] | ["one", ",", "two"]
#   Whitespace                      naïve two   ["naïve", "two"] | ["na", "ï", "ve", "two"]
#   Whitespace, unknown word        one six     ["one", "[UNK]"] | ["one"]
# Exits with 1 if that changes.
set -euo pipefail

folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check tokenizers==0.23.3
npm install --prefix="$folder" --silent --no-audit --no-fund @huggingface/tokenizers@0.2.0

cat >"$folder/tokens.mjs" <<'NODE'
import { readFileSync } from "node:fs";
import { Tokenizer } from "@huggingface/tokenizers";

const cases = JSON.parse(readFileSync(0, "utf8"));
const words = ([json, text]) => {
  const names = Object.fromEntries(Object.entries(json.model.vocab).map(([name, id]) => [id, name]));
  const { ids } = new Tokenizer(json, {}).encode(text);
  return Array.from(ids, (id) => names[id]).filter((name) => name !== undefined);
};
console.log(JSON.stringify(cases.map(words)));
NODE

"$folder/venv/bin/python" - "$folder/tokens.mjs" <<'PYTHON'
import json
import subprocess
import sys

from tokenizers import Regex, Tokenizer, models
from tokenizers.pre_tokenizers import Punctuation, Split, Whitespace

WORDS = ["[UNK]", "one", "two", " ", ",", "naïve", "na", "ï", "ve"]
CASES = {
    'Split " ", Removed': (Split(" ", "removed"), "one two"),
    r"Split \w+, Isolated, invert": (Split(Regex(r"\w+"), "isolated", invert=True), "one two"),
    'Split " ", Isolated': (Split(" ", "isolated"), "one two"),
    "Punctuation, Removed": (Punctuation("removed"), "one,two"),
    "Whitespace": (Whitespace(), "naïve two"),
    "Whitespace, unknown word": (Whitespace(), "one six"),
}
EXPECTED = [
    (["one", "two"], ["one", " ", "two"]),
    (["one", " ", "two"], ["one", "two"]),
    (["one", " ", "two"], ["one", " ", "two"]),
    (["one", "two"], ["one", ",", "two"]),
    (["naïve", "two"], ["na", "ï", "ve", "two"]),
    (["one", "[UNK]"], ["one"]),
]


def tokenizer_with(step):
    vocabulary = {word: number for number, word in enumerate(WORDS)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = step
    return tokenizer


tokenizers = [(tokenizer_with(step), text) for step, text in CASES.values()]
in_python = [tokenizer.encode(text).tokens for tokenizer, text in tokenizers]
documents = json.dumps([(json.loads(tokenizer.to_str()), text) for tokenizer, text in tokenizers])
run = subprocess.run(["node", sys.argv[1]], input=documents, capture_output=True, text=True, check=True)
found = list(zip(in_python, json.loads(run.stdout)))
for name, tokens in zip(CASES, found):
    print(name, " | ".join(json.dumps(each, ensure_ascii=False) for each in tokens), sep="   ")
sys.exit(found != EXPECTED)
PYTHON
