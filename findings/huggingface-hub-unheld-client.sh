#!/usr/bin/env bash
# huggingface_hub 2.4.0 with httpx2 2.16.2: a streamed chat cannot be read once nothing refers to its InferenceClient.
#
# `chat_completion(stream=True)` returns an iterator without a reference to its client. When the client is collected,
# which CPython does at once, the stream is closed. So `for chunk in InferenceClient(url).chat_completion(...)` raises
# StreamClosed before the first chunk, as does a function that makes a client and returns the stream. With the client in
# a variable, the same lines work. openai 3.57.0 reads the stream in both cases.
#
# Expected: the iterator holds the client that it reads from, as openai's does.
# Seen on 2026-11-30, with Python 3.11:
#   openai                 held AB   unheld AB
#   InferenceClient        held AB   unheld StreamClosed
#   without stream=True    held AB   unheld AB
# Exits with 1 if that changes.
set -euo pipefail

folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check huggingface_hub==2.4.0 httpx2==2.16.2 openai==3.57.0

"$folder/venv/bin/python" - <<'PYTHON'
import json
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from huggingface_hub import InferenceClient
from openai import OpenAI

MESSAGES = [{"role": "user", "content": "?"}]
EXPECTED = {
    "openai": ("AB", "AB"),
    "InferenceClient": ("AB", "StreamClosed"),
    "without stream=True": ("AB", "AB"),
}


def completion(kind, key, text):
    choice = {"index": 0, key: {"role": "assistant", "content": text}, "finish_reason": None}
    return json.dumps({"id": "c", "object": kind, "created": 1, "model": "m", "choices": [choice]})


class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        is_stream = json.loads(self.rfile.read(int(self.headers["content-length"]))).get("stream")
        chunks = [completion("chat.completion.chunk", "delta", text) for text in "AB"] + ["[DONE]"]
        events = "".join(f"data: {chunk}\n\n" for chunk in chunks)
        self.send_response(200)
        self.send_header("content-type", "text/event-stream" if is_stream else "application/json")
        self.end_headers()
        self.wfile.write((events if is_stream else completion("chat.completion", "message", "AB")).encode())

    def log_message(self, *_):
        pass


def texts(stream):
    return "".join(chunk.choices[0].delta.content for chunk in stream)


def new_openai():
    return OpenAI(base_url=url, api_key="none", max_retries=0)


def new_client():
    return InferenceClient(base_url=url, api_key="none")


def of_openai(client):
    return client.chat.completions.create(model="m", messages=MESSAGES, stream=True)


def of_client(client):
    return client.chat_completion(messages=MESSAGES, model="m", stream=True)


def whole_of_client(client):
    return client.chat_completion(messages=MESSAGES, model="m").choices[0].message.content


def text_or_error(read):
    try:
        return read()
    except Exception as error:
        return type(error).__name__


server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
threading.Thread(target=server.serve_forever, daemon=True).start()
url = f"http://127.0.0.1:{server.server_port}/v1"
held, held_openai = new_client(), new_openai()
found = {
    "openai": (texts(of_openai(held_openai)), text_or_error(lambda: texts(of_openai(new_openai())))),
    "InferenceClient": (texts(of_client(held)), text_or_error(lambda: texts(of_client(new_client())))),
    "without stream=True": (whole_of_client(held), whole_of_client(new_client())),
}
for name, (of_held, of_unheld) in found.items():
    print(f"{name}  held {of_held}  unheld {of_unheld}")
sys.exit(found != EXPECTED)
PYTHON
