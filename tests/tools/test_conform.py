"""`tools/conform.py` with servers that only pretend: what it sees of each fault, and how it asks for a cold answer."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
CONFORM = ROOT / "tools" / "conform.py"
NOT_TRIED = {"draft", "restart", "upgrade", "another CPU"}
DIGITS = "-0.12345678901234567"


class Pretender(BaseHTTPRequestHandler):
    """Restores the longest beginning of a prompt that it has seen, in characters, and answers with the prompt's end.

    `colds` is the field that asks for a cold answer, with its value or None for any; `digits` are those of an answer
    for which something was restored.
    """

    colds: tuple[str, Any] | None = None
    digits = DIGITS
    refuses = ""
    seen: list[str]

    def do_GET(self) -> None:
        self.say(200, {"data": [{"id": "a model"}]} if self.path.endswith("/models") else {"version": "1.2"})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.refuses in body:
            return self.say(400, {"error": f"no {self.refuses}"})
        prompt = "".join(message["content"] for message in body["messages"])
        restored = 0 if self.is_cold(body) else max([shared(prompt, one) for one in self.seen], default=0)
        self.seen.append(prompt)
        token = {"token": "a", "logprob": json.loads(self.digits if restored > 20 else DIGITS)}
        message = {"role": "assistant", "content": prompt[-60:]}
        logprobs = {"content": [token]} if body.get("logprobs") else None
        usage = {"prompt_tokens": len(prompt), "prompt_tokens_details": {"cached_tokens": restored}}
        choice = {"message": message, "logprobs": logprobs}
        return self.say(200, {"choices": [choice], "usage": usage, "cache": {"miss_reason": "new"}})

    def is_cold(self, body: Mapping[str, Any]) -> bool:
        return self.colds is not None and self.colds[0] in body and self.colds[1] in (None, body[self.colds[0]])

    def say(self, status: int, body: Mapping[str, Any]) -> None:
        text = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_: Any) -> None:
        """Says nothing."""


def shared(one: str, other: str) -> int:
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


@contextmanager
def served(**kind: Any) -> Iterator[str]:
    handler = type("OfTest", (Pretender,), kind | {"seen": []})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/v1"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def asked(*arguments: str) -> tuple[int, Any]:
    command = [sys.executable, str(CONFORM), "--json", "--rounds", "1", "--words", "40", "--settle", "0", *arguments]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode != 2, ran.stderr
    return ran.returncode, json.loads(ran.stdout)


@pytest.mark.cases(2)
@pytest.mark.parametrize("colds", [("prefix_cache", {"scope": "off"}), ("cache_prompt", False), ("cache_salt", None)])
def test_a_server_that_is_exact_is_the_same_in_all_columns(colds: tuple[str, Any]) -> None:
    with served(colds=colds) as url:
        code, found = asked(url)
    assert (code, json.loads(found["cold by"]).keys()) == (0, {colds[0]})
    verdicts = {name: {*cell["verdicts"]} for name, cell in found["columns"].items()}
    assert {name for name, of_one in verdicts.items() if of_one == {"same"}} == verdicts.keys() - NOT_TRIED
    assert {cell["why_not"] for name, cell in found["columns"].items() if name in NOT_TRIED} == {"not tried"}
    assert (found["says why not"], found["log probabilities"]) == ("cache.miss_reason: new", True)
    assert found["server"].endswith("1.2, a model")


def test_a_last_digit_that_differs_is_seen() -> None:
    with served(colds=("cache_prompt", False), digits=DIGITS[:-1] + "9") as url:
        code, found = asked(url)
    assert code == 1
    assert {verdict for cell in found["columns"].values() for verdict in cell["verdicts"]} == {"same", "digits"}
    assert 0 < found["columns"]["repeated"]["largest"] < 1e-15


def test_a_server_without_a_way_to_ask_and_without_log_probabilities_is_still_compared() -> None:
    with served(refuses="logprobs") as url:
        code, found = asked(url)
    assert (code, found["cold by"], found["log probabilities"]) == (0, "no way to ask", False)
    assert found["columns"]["repeated"]["verdicts"] == ["same"]
    assert found["columns"]["next turn"]["why_not"] == "not known: no way to ask"


PROGRAM = """
import sys
from http.server import ThreadingHTTPServer
from tests.tools.test_conform import Pretender
Pretender.seen = []
ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Pretender).serve_forever()
"""


@pytest.mark.slow
def test_a_server_that_forgets_is_restarted_for_cold_answers(tmp_path: Path) -> None:
    from tools.measuring.processes import free_port

    port = free_port()
    command = f"cd {ROOT} && exec {sys.executable} -c '{PROGRAM}' {port}"
    code, found = asked(
        f"http://127.0.0.1:{port}/v1", "--restart", command, "--upgrade", command, "--other-cpu", command
    )
    assert (code, found["cold by"]) == (0, "restart")
    assert found["columns"]["restart"]["cached"] < 20 < found["columns"]["next turn"]["cached"]
    server = "http://127.0.0.1:1/v1"
    ran = subprocess.run(
        [sys.executable, str(CONFORM), server, "--restart", "echo no such model >&2"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (ran.returncode, ran.stderr.endswith("it said at last: no such model\n")) == (2, True)
    file = tmp_path / "one.json"
    file.write_text(json.dumps(found))
    ran = subprocess.run([sys.executable, str(CONFORM), str(file)], capture_output=True, text=True, check=False)
    head, _, row = ran.stdout.splitlines()
    assert head.startswith("| server | repeated | next turn |")
    assert row.count("| same, ") == 7
    assert "| not tried |" in row
