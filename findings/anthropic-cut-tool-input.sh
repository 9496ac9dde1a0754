#!/usr/bin/env bash
# anthropic 2.14.0 with jiter 0.19.0 (Python) beside @anthropic-ai/sdk 1.14.0 (npm): the input of a tool call that was
# cut at `max_tokens`.
#
# Both clients parse the part of the input's JSON that arrived, and raise no error if it is incomplete. Both leave out a
# string that was cut. Node's client also leaves out a number at the end, while Python's takes the digits that arrived
# for the whole number: if the model was writing 1200 and the reply ended after 12, `limit` is 12.
#
# Needs Node 20 or later. Expected: one input from both, with no value that may be incomplete.
# Seen on 2026-11-30, with Python 3.11 and Node 20 (Python | Node):
#   {"limit": 5, "path": "not   {"limit": 5} | {"limit": 5}
#   {"all": true, "limit": 12   {"all": true, "limit": 12} | {"all": true}
#   {"all": true, "limit": -    {"all": true} | {"all": true}
# Exits with 1 if that changes.
set -euo pipefail

folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check anthropic==2.14.0 jiter==0.19.0
npm install --prefix="$folder" --silent --no-audit --no-fund @anthropic-ai/sdk@1.14.0

cat >"$folder/read.mjs" <<'NODE'
import Anthropic from "@anthropic-ai/sdk";

const messages = [{ role: "user", content: "?" }];
const found = [];
for (const baseURL of process.argv.slice(2)) {
  const client = new Anthropic({ baseURL, apiKey: "none", maxRetries: 0 });
  const message = await client.messages.stream({ model: "m", max_tokens: 9, messages }).finalMessage();
  found.push(message.content[0].input);
}
console.log(JSON.stringify(found));
NODE

"$folder/venv/bin/python" - "$folder/read.mjs" <<'PYTHON'
import json
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import anthropic

CUT = ['{"limit": 5, "path": "not', '{"all": true, "limit": 12', '{"all": true, "limit": -']
EXPECTED = [
    ({"limit": 5}, {"limit": 5}),
    ({"all": True, "limit": 12}, {"all": True}),
    ({"all": True}, {"all": True}),
]


def events(text):
    usage = {"input_tokens": 3, "output_tokens": 1}
    start = {"id": "m", "type": "message", "role": "assistant", "model": "m", "content": [], "usage": usage}
    block = {"type": "tool_use", "id": "t", "name": "read", "input": {}}
    delta = {"type": "input_json_delta", "partial_json": text}
    yield {"type": "message_start", "message": {**start, "stop_reason": None, "stop_sequence": None}}
    yield {"type": "content_block_start", "index": 0, "content_block": block}
    yield {"type": "content_block_delta", "index": 0, "delta": delta}
    yield {"type": "content_block_stop", "index": 0}
    ending = {"stop_reason": "max_tokens", "stop_sequence": None}
    yield {"type": "message_delta", "delta": ending, "usage": {"output_tokens": 9}}
    yield {"type": "message_stop"}


class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.end_headers()
        for event in events(CUT[int(self.path.split("/")[1])]):
            self.wfile.write(f"event: {event['type']}\ndata: {json.dumps(event)}\n\n".encode())

    def log_message(self, *_):
        pass


def read(url):
    client = anthropic.Anthropic(base_url=url, api_key="none", max_retries=0)
    with client.messages.stream(model="m", max_tokens=9, messages=[{"role": "user", "content": "?"}]) as stream:
        return stream.get_final_message().content[0].input


server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
threading.Thread(target=server.serve_forever, daemon=True).start()
urls = [f"http://127.0.0.1:{server.server_port}/{number}" for number in range(len(CUT))]
node = json.loads(subprocess.run(["node", sys.argv[1], *urls], capture_output=True, text=True, check=True).stdout)
found = list(zip(map(read, urls), node))
for text, inputs in zip(CUT, found):
    print(text, " | ".join(map(json.dumps, inputs)), sep="   ")
sys.exit(found != EXPECTED)
PYTHON
