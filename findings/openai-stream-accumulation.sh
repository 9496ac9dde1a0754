#!/usr/bin/env bash
# openai 3.57.0 (Python) beside openai 6.49.0 (npm): the message that `chat.completions.stream` joins from its deltas.
#
# Servers repeat what they could leave out: `role` in each delta, or the `id` and the name of a tool call. Python's
# client appends each string that comes again, so the role is "assistantassistant" and the id "call_1call_1", which is
# not the id that the server sent. Node's client replaces strings, so of a function's name that comes in two parts it
# keeps only the second. `reasoning_content`, which many servers send and neither client declares, is joined in Python,
# and in Node it is the last delta alone. A stream that repeats or splits one of these strings gives different messages
# in the two clients.
#
# Needs Node 20 or later. Expected: one message from both, the repeated strings once and the split ones whole.
# Seen on 2026-11-30, with Python 3.11 and Node 20 (Python | Node):
#   role in each delta        assistantassistant | assistant
#   id in each delta          call_1call_1 | call_1
#   name in two parts         get_weather | weather
#   reasoning in two parts    first, then | then
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
const found = [];
for (const baseURL of process.argv.slice(2)) {
  const client = new OpenAI({ baseURL, apiKey: "none", maxRetries: 0 });
  const completion = await client.chat.completions.stream({ model: "m", messages }).finalChatCompletion();
  found.push(completion.choices[0].message);
}
console.log(JSON.stringify(found));
NODE

"$folder/venv/bin/python" - "$folder/read.mjs" <<'PYTHON'
import json
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import openai


FIRST = {"role": "assistant", "content": None}


def call(name=None, **rest):
    return {"tool_calls": [{"index": 0, "function": {"name": name, "arguments": ""} if name else {}, **rest}]}


STREAMS = {
    "role": [{"role": "assistant", "content": "a"}, {"role": "assistant", "content": "b"}],
    "id": [FIRST, call("now", id="call_1", type="function"), call(id="call_1")],
    "name": [FIRST, call("get_", id="call_1", type="function"), call("weather")],
    "reasoning": [FIRST, {"reasoning_content": "first, "}, {"reasoning_content": "then"}, {"content": "a"}],
}
PARTS = {
    "role": lambda message: message["role"],
    "id": lambda message: message["tool_calls"][0]["id"],
    "name": lambda message: message["tool_calls"][0]["function"]["name"],
    "reasoning": lambda message: message["reasoning_content"],
}
EXPECTED = {
    "role": ("assistantassistant", "assistant"),
    "id": ("call_1call_1", "call_1"),
    "name": ("get_weather", "weather"),
    "reasoning": ("first, then", "then"),
}


def event(delta, reason=None):
    choice = {"index": 0, "delta": delta, "finish_reason": reason}
    chunk = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": [choice]}
    return f"data: {json.dumps(chunk)}\n\n".encode()


class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.end_headers()
        deltas = STREAMS[self.path.split("/")[1]]
        self.wfile.write(b"".join([*map(event, deltas), event({}, "stop"), b"data: [DONE]\n\n"]))

    def log_message(self, *_):
        pass


def read(url):
    client = openai.OpenAI(base_url=url, api_key="none", max_retries=0)
    with client.chat.completions.stream(model="m", messages=[{"role": "user", "content": "?"}]) as stream:
        return stream.get_final_completion().choices[0].message.to_dict()


server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
threading.Thread(target=server.serve_forever, daemon=True).start()
urls = [f"http://127.0.0.1:{server.server_port}/{name}" for name in STREAMS]
node = json.loads(subprocess.run(["node", sys.argv[1], *urls], capture_output=True, text=True, check=True).stdout)
found = {}
for name, url, message in zip(STREAMS, urls, node):
    found[name] = PARTS[name](read(url)), PARTS[name](message)
    print(name, " | ".join(found[name]), sep="  ")
sys.exit(found != EXPECTED)
PYTHON
