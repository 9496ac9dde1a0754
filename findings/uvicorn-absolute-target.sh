#!/usr/bin/env bash
# uvicorn 0.54.0 with h11 0.16.0 and with httptools 0.9.0: the path of a request that names its whole address.
#
# HTTP/1.1 has servers accept `GET http://host/path`, as clients send it that take the server for a proxy (RFC 9112,
# 3.2.2). With httptools, the application's scope has the path alone. With h11, which uvicorn takes where httptools is
# not installed, it has the whole address as `path` and `raw_path`, so no route of an application fits and the answer is
# 404. Whether `uvicorn` or `uvicorn[standard]` was installed thus decides what becomes of the same request.
#
# Expected: one path from both, as for every other request here.
# Seen on 2026-11-28, with Python 3.11:
#   GET /models/a%20b?x=1                     h11 /models/a b                       httptools /models/a b
#   GET http://server.example/models/a%20b?x=1  h11 http://server.example/models/a b  httptools /models/a b
# Exits with 1 if that changes.
set -euo pipefail

folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check uvicorn==0.54.0 h11==0.16.0 httptools==0.9.0

"$folder/venv/bin/python" - <<'PYTHON'
import asyncio
import socket
import sys

import uvicorn

TARGETS = ("/models/a%20b?x=1", "http://server.example/models/a%20b?x=1")


async def application(scope, receive, send):
    path = scope["path"].encode()
    headers = [(b"content-length", str(len(path)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": path})


async def paths(parser):
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(application, http=parser, log_level="error", lifespan="off"))
    running = asyncio.create_task(server.serve(sockets=[listener]))
    found = []
    for target in TARGETS:
        reader, writer = await asyncio.open_connection(*listener.getsockname())
        writer.write(f"GET {target} HTTP/1.1\r\nHost: server.example\r\nConnection: close\r\n\r\n".encode())
        answer = await asyncio.wait_for(reader.read(), 30)
        found.append(answer.partition(b"\r\n\r\n")[2].decode())
        writer.close()
    server.should_exit = True
    await running
    return found


found = {parser: asyncio.run(paths(parser)) for parser in ("h11", "httptools")}
for number, target in enumerate(TARGETS):
    print(f"GET {target}", *(f"{parser} {answers[number]}" for parser, answers in found.items()), sep="  ")
whole, path = "http://server.example/models/a b", "/models/a b"
sys.exit(found != {"h11": [path, whole], "httptools": [path, path]})
PYTHON
