"""`tools/agents --hour`: its tasks, its kills, its clock, and what it calls wrong."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from datetime import datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, cast

import httpx
import pytest

from tests.closing import needs
from tests.daemon.server.chat_model import write_chat_model
from tests.waiting import wait_for
from tools.measuring.environments import NotInstalled
from tools.measuring.live_server import LiveServer
from tools.real_agents.false_clock import FalseClock
from tools.real_agents.hour import PARTS, Script
from tools.real_agents.hour_report import Findings, Part
from tools.real_agents.hour_tasks import COUNTER, NUM_QUESTIONS, Task, counter, sources, tasks
from tools.real_agents.hour_world import Kill, Killer, fill, make_room, small_disk
from tools.real_agents.recomputing import Recomputed, recomputed
from tools.real_agents.records import recorded
from tools.real_agents.replies import Reply
from tools.real_agents.tap import Exchange, Tap

STREAMED = b'data: {"choices": [{"delta": {"content": "a"}}]}\n\n'


def test_each_question_differs_and_its_calls_fit_the_files_as_they_are_then(tmp_path: Path) -> None:
    files = sources()
    made = tasks(files, tmp_path)
    assert [task.number for task in made] == list(range(1, NUM_QUESTIONS + 1))
    assert PARTS.keys() <= {task.number for task in made}
    for task in made:
        assert sum(other.question in task.question for other in made) == 1
        assert not any(other.question in task.last for other in made)
        for name, arguments in task.calls:
            file = Path(arguments.get("filePath", tmp_path / COUNTER)).name
            if name == "edit":
                assert files[file].count(arguments["oldString"]) == 1
                files[file] = files[file].replace(arguments["oldString"], arguments["newString"])
            elif name == "read":
                assert arguments.get("offset", 1) < len(files[file].splitlines())
    assert files[COUNTER] == counter(sum(name == "edit" for task in made for name, _ in task.calls))


class Cutting(BaseHTTPRequestHandler):
    """Sends a piece of a reply; to `/cut` no more, otherwise also the end."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.do_GET()

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        self.wfile.write(b"%x\r\n%b\r\n" % (len(STREAMED), STREAMED))
        if self.path == "/cut":
            self.close_connection = True
        else:
            self.wfile.write(b"0\r\n\r\n")

    def log_message(self, format: str, *args: Any) -> None: ...


@pytest.fixture
def tap() -> Iterator[Tap]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Cutting) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        with Tap(server.server_address[1], lambda _body: True) as tap:
            yield tap
        server.shutdown()
        thread.join()


def test_an_agent_sees_that_a_reply_was_cut_off(tap: Tap) -> None:
    pieces: list[Exchange] = []
    tap.on_piece = pieces.append
    assert httpx.get(f"{tap.url}/whole").content == STREAMED
    with pytest.raises(httpx.RemoteProtocolError):
        httpx.get(f"{tap.url}/cut")
    assert [each.path for each in pieces] == ["/whole", "/cut"]
    wait_for(lambda: not tap.running)
    wait_for(lambda: [each.is_cut_off for each in tap.exchanges] == [False, True])


def test_requests_wait_while_they_are_held(tap: Tap) -> None:
    answers: list[httpx.Response] = []
    tap.hold(True)
    thread = threading.Thread(target=lambda: answers.append(httpx.get(f"{tap.url}/whole")))
    thread.start()
    thread.join(0.2)
    assert (answers, tap.exchanges) == ([], [])
    tap.hold(False)
    thread.join()
    assert answers[0].status_code == 200


SEES_MIDNIGHT = """
import sys, threading, time
from datetime import date
print(date.today(), flush=True)
sys.stdin.readline()
# A wait with a limit is by the machine's clock.
began = time.monotonic()
threading.Event().wait(0.05)
time.sleep(0.05)
# Bound: the test ends it.
while date.today() <= date.fromisoformat(sys.argv[1]):
    time.sleep(0.02)
print(date.today(), time.monotonic() - began < 600)
"""


@needs("cc")
def test_a_running_process_sees_midnight_pass_and_waits_as_long_as_before(tmp_path: Path) -> None:
    clock, today = FalseClock(tmp_path), datetime.now().date()
    command = [sys.executable, "-c", SEES_MIDNIGHT, str(today)]
    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ | clock.environment,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline().split() == [str(today)]
        clock.set_before_midnight(0.5)
        assert (clock.now() + timedelta(seconds=1.6)).date() == today + timedelta(days=1)
        said, _ = process.communicate("\n", timeout=60)
    assert said.split() == [str(today + timedelta(days=1)), "True"]


def test_a_filled_disk_takes_not_one_more_byte_until_there_is_room(tmp_path: Path) -> None:
    try:
        with small_disk(tmp_path / "disk", 1 << 20) as disk:
            fill(disk)
            with pytest.raises(OSError, match="No space left"):
                (disk / "more").write_bytes(b"a")
            make_room(disk)
            (disk / "more").write_bytes(bytes(1 << 19))
    except NotInstalled:
        pytest.skip("mounting a file system needs root")
    assert list((tmp_path / "disk").iterdir()) == []


def exchange(**changes: Any) -> Exchange:
    usual: dict[str, Any] = {
        "method": "POST",
        "path": "/v1/chat/completions",
        "body": b"Question 01: and now?",
        "status": 200,
    }
    return Exchange(**usual | {"is_turn": True, "is_repeated": False} | changes)


def findings(**changes: Any) -> Findings:
    usual: dict[str, Any] = {
        "agent": "an agent 1.0",
        "parts": [Part(name="work", cut=1, killed=1)],
        "kills": [Kill(question=1, moment="in a reply", detail="", requests=1)],
        "num_kills": 1,
        "exchanges": [exchange(reply=Reply(prompt_tokens=10, restored=8))],
        "first_question": "Question 01: and now?",
        "recomputed": Recomputed(1, 5, []),
        "unanswered": [],
        "asked_again": [],
        "is_file_right": True,
        "states_when_full": {"degraded", "ok"},
        "states_at_the_end": {"ok"},
        "days": {"2026-01-31", "2026-02-01"},
        "problems": [],
        "num_tracebacks": 0,
    }
    return Findings(**usual | changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"parts": [Part(name="work", cut=2, killed=1)]},
        {"parts": [Part(name="work", repeated=2)]},
        {"kills": []},
        {"exchanges": [exchange(body=b"Hello.")]},
        {"exchanges": [exchange(status=503)]},
        {"exchanges": [exchange(reply=Reply(errors=["overloaded"]))]},
        {"exchanges": [exchange(reply=Reply(cache={"miss_reason": "damaged"}))]},
        {"recomputed": Recomputed(1, 5, ["a prompt"])},
        {"unanswered": [3]},
        {"asked_again": [3]},
        {"is_file_right": False},
        {"states_when_full": {"ok"}},
        {"states_at_the_end": {"degraded"}},
        {"states_at_the_end": set()},
        {"days": {"2026-01-31"}},
        {"problems": [{"kind": "block"}]},
        {"num_tracebacks": 1},
    ],
    ids=str,
)
def test_each_fault_is_called_wrong(changes: dict[str, Any]) -> None:
    assert all(each["holds"] for each in findings().report()["verdicts"])
    wrong = [each["what"] for each in findings(**changes).report()["verdicts"] if not each["holds"]]
    assert len(wrong) >= 1


def test_tokens_of_a_request_that_a_kill_cut_off_count_once() -> None:
    part = Part(name="work")
    whole = exchange(reply=Reply(prompt_tokens=100, restored=90))
    cut = [exchange(is_cut_off=True, met_kill=True), exchange(is_cut_off=True)]
    part.add_exchanges([whole, *cut, exchange(method="GET", path="/props", status=401)])
    part.add_kill(Kill(question=1, moment="in a prefill", detail="", requests=1, sent=50, restored=20, computed=10))
    assert (part.requests, part.sent, part.restored, part.computed, part.cut, part.killed) == (3, 150, 110, 20, 2, 1)


@pytest.fixture
def script(tmp_path: Path) -> Script:
    models = [write_chat_model(tmp_path / name) for name in ("coder", "reviewer")]
    task = Task(number=1, question="Question 01: and now?", calls=(), last="a " * 20)
    return Script(tmp_path, models, [task])


class Daemon:
    """Stands for the `LiveServer` of two models, one of which is loaded."""

    def __init__(self) -> None:
        self.deeds: list[str] = []
        self.running: list[dict[str, Any]] = []
        self.pending_bytes = 0
        self.looks = 0
        self.ahead = {"tokens": 7, "waiting": 0}

    def props(self, model: str | None = None) -> dict[str, Any]:
        if model is None:
            return {"models": [{"model": "coder", "phase": "ready"}, {"model": "reviewer", "phase": "off"}]}
        assert model == "coder"
        self.looks += 1
        cache = {"state": "ok", "pending_bytes": self.pending_bytes}
        return {"running": self.running, "ahead": dict(self.ahead), "full_cache": {"state": cache}}

    def wait_for_looks(self) -> None:
        """Waits until the newest state was looked at."""
        before = self.looks
        wait_for(lambda: self.looks > before + 2)

    def kill(self) -> None:
        self.deeds.append("killed")

    def start(self) -> None:
        self.deeds.append("started")


def progress(state: str, prompt: int, restored: int, ready: int) -> dict[str, Any]:
    counts = {"prompt_tokens": prompt, "restored_tokens": restored, "computed_tokens": ready}
    return {"state": state, **counts}


@pytest.fixture
def daemon() -> Daemon:
    return Daemon()


@pytest.fixture
def killer(daemon: Daemon, tap: Tap) -> Killer:
    return Killer(cast("LiveServer", daemon), tap)


def ask(tap: Tap, killer: Killer) -> None:
    httpx.post(f"{tap.url}/whole", json={})
    killer.wait_until_started()


def test_a_kill_in_a_reply_comes_once_with_its_first_token(daemon: Daemon, killer: Killer, tap: Tap) -> None:
    daemon.running = [progress("decoding", 100, 60, 100)]
    ask(tap, killer)
    assert killer.kills == []
    killer.arm("reply", 3)
    ask(tap, killer)
    ask(tap, killer)
    assert daemon.deeds == ["killed", "started"]
    (kill,) = killer.kills
    assert (kill.question, kill.requests, kill.sent, kill.restored, kill.computed) == (3, 1, 100, 60, 40)
    assert killer.ahead_tokens() == 14, "of the killed process and of the new one"


def test_a_kill_while_saving_waits_for_bytes_to_save(daemon: Daemon, killer: Killer) -> None:
    killer.arm("saving", 3)
    daemon.wait_for_looks()
    assert killer.is_armed
    daemon.pending_bytes = 5
    wait_for(lambda: daemon.deeds == ["killed", "started"])
    assert [(kill.moment, kill.detail) for kill in killer.kills] == [("while saving", "5 bytes not written")]


def test_no_kill_while_saving_cuts_off_a_request(daemon: Daemon, killer: Killer, tap: Tap) -> None:
    armed = list[bool]()

    def on_piece(_exchange: Exchange) -> None:
        daemon.pending_bytes = 5
        daemon.wait_for_looks()
        armed.append(killer.is_armed)
        daemon.pending_bytes = 0
        daemon.wait_for_looks()

    tap.on_piece = on_piece
    killer.arm("saving", 3)
    httpx.post(f"{tap.url}/whole", json={})
    assert armed == [True]


def test_a_kill_in_a_prefill_waits_for_the_middle_of_a_long_one(daemon: Daemon, killer: Killer) -> None:
    waits = [("waiting", 0, 0), ("prefilling", 3000, 3500), ("prefilling", 100, 100), ("decoding", 100, 4000)]
    killer.arm("prefill", 3)
    for state, restored, ready in waits:
        daemon.running = [progress(state, 4000, restored, ready)]
        daemon.wait_for_looks()
        assert killer.is_armed
    daemon.running = [progress("prefilling", 4000, 100, 1500)]
    wait_for(lambda: daemon.deeds == ["killed", "started"])
    assert killer.kills[0].computed == 1400


def test_a_kill_in_work_ahead_waits_until_a_job_goes_on(daemon: Daemon, killer: Killer) -> None:
    killer.arm("ahead", 3)
    for tokens, waiting in [(7, 1), (40, 0), (40, 1)]:
        daemon.ahead = {"tokens": tokens, "waiting": waiting}
        daemon.wait_for_looks()
        assert killer.is_armed
    daemon.ahead = {"tokens": 72, "waiting": 1}
    wait_for(lambda: daemon.deeds == ["killed", "started"])
    assert [kill.moment for kill in killer.kills] == ["in work ahead"]


@pytest.mark.slow
def test_after_a_kill_the_daemon_goes_on_with_the_logits_of_a_cold_one(script: Script, tmp_path: Path) -> None:
    with script.daemon("server", tmp_path / "kv", ("--kv-cache-gate", "off"), {}) as server:
        server.start()
        with Tap(server.port, lambda body: bool(body.get("tools"))) as tap:
            killer = Killer(server, tap)
            ask_model(tap)
            server.wait_until_saved("coder")
            killer.kill("idle", 1, "")
            killer.wait_until_started()
            ask_model(tap)
    first, again = (each.reply for each in tap.exchanges)
    assert (first.prompt_tokens, first.restored) == (again.prompt_tokens, 0)
    assert again.restored >= first.prompt_tokens - 1
    records = recorded(script.records("server"))
    num_tokens = sum(len(each.digests) for each in records)
    with script.daemon("cold", tmp_path / "cold", ("--disk-prefix-cache", "off", "--speculative", "off"), {}) as cold:
        cold.start()
        assert recomputed(records, cold, script.records("cold")) == Recomputed(2, num_tokens, [])
        records[1].digests[3] = records[0].digests[0]
        (different,) = recomputed(records, cold, script.records("cold")).different
    assert different.endswith("token 3 of the reply differs")


def ask_model(tap: Tap) -> None:
    messages = [
        {"role": "system", "content": "Be careful with rivers. " * 30},
        {"role": "user", "content": "Question 01: and now?"},
    ]
    body = {"model": "coder", "messages": messages, "stream": True, "stream_options": {"include_usage": True}}
    body |= {"tools": [{"type": "function", "function": {"name": "look", "parameters": {}}}]}
    httpx.post(f"{tap.url}/v1/chat/completions", json=body, timeout=300).raise_for_status()
    tap.wait_until_idle()
