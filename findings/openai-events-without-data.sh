#!/usr/bin/env bash
# openai 3.57.0 (Python) beside openai 6.49.0 (npm): an event without data ends a streamed reply with a JSON error.
#
# An event stream may contain blocks without a `data:` line, and clients skip them according to the HTML standard
# (9.2.6): `retry:` alone sets the pause before a new connection, `id:` alone names a position, and `event: ping` alone
# keeps a connection open. The Python client parses the missing data as JSON, raises JSONDecodeError, and the reply is
# lost. The Node client skips the first two and fails at the third. Both skip a comment (`: ping`).
#
# Needs Node 20 or later. Expected: "AB" from both for each stream.
# Seen on 2026-11-30, with Python 3.11 and Node 20 (Python | Node):
#   comment  AB | AB
#   retry    JSONDecodeError | AB
#   id       JSONDecodeError | AB
#   event    JSONDecodeError | SyntaxError
# Exits with 1 if that changes.
set -euo pipefail

folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check openai==3.57.0
npm install --prefix="$folder" --silent --no-audit --no-fund openai@6.49.0

cat >"$folder/read.mjs" <<'NODE'
import OpenAI from "openai";

const messages = [{ role: "user", content: "?" }];
for (const baseURL of process.argv.slice(2)) {
  const client = new OpenAI({ baseURL, apiKey: "none", maxRetries: 0 });
  let text = "";
  try {
    for await (const chunk of await client.chat.completions.create({ model: "m", messages, stream: true }))
      text += chunk.choices[0].delta.content;
  } catch (error) {
    text = error.constructor.name;
  }
  console.log(text);
}
NODE

"$folder/venv/bin/python" - "$folder/read.mjs" <<'PYTHON'
import json
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import openai

BLOCKS = {"comment": ": ping", "retry": "retry: 1000", "id": "id: 7", "event": "event: ping"}
EXPECTED = {
    "comment": ("AB", "AB"),
    "retry": ("JSONDecodeError", "AB"),
    "id": ("JSONDecodeError", "AB"),
    "event": ("JSONDecodeError", "SyntaxError"),
}


def event(text):
    choice = {"index": 0, "delta": {"content": text}, "finish_reason": None}
    chunk = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": [choice]}
    return f"data: {json.dumps(chunk)}\n\n"


class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.end_headers()
        block = BLOCKS[self.path.split("/")[1]]
        self.wfile.write(f"{event('A')}{block}\n\n{event('B')}data: [DONE]\n\n".encode())

    def log_message(self, *_):
        pass


def read(url):
    client = openai.OpenAI(base_url=url, api_key="none", max_retries=0)
    try:
        chunks = client.chat.completions.create(model="m", messages=[{"role": "user", "content": "?"}], stream=True)
        return "".join(chunk.choices[0].delta.content for chunk in chunks)
    except Exception as error:
        return type(error).__name__


server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
threading.Thread(target=server.serve_forever, daemon=True).start()
urls = [f"http://127.0.0.1:{server.server_port}/{name}" for name in BLOCKS]
node = subprocess.run(["node", sys.argv[1], *urls], capture_output=True, text=True, check=True).stdout.split()
found = dict(zip(BLOCKS, zip(map(read, urls), node)))
for name, texts in found.items():
    print(name, " | ".join(texts), sep="  ")
sys.exit(found != EXPECTED)
PYTHON
