"""The verdicts of `tools/bench hostile`, and the requests of its bad clients."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from tests.server.daemon_process import DaemonProcess, serve_flags
from tools.hostile import bad_clients
from tools.hostile.bad_clients import CLOSED, CUT_OFF, HUNG_UP, Caller, End
from tools.hostile.crowd import bad_key, good_key
from tools.hostile.report import columns_of, memory_figures, tracebacks, verdicts
from tools.hostile.requests import CHAT, KINDS, SLOW_READER, chat
from tools.hostile.watch import Phase, figures
from tools.programs.hostile import chosen_kinds, write_keys

CHEAP = (
    "300 patterns",
    "nested pattern, n 16",
    "deep JSON",
    "deep arguments",
    "infinite numbers",
    "odd names of functions",
    "tools that are skipped",
    "image of 1 × 6000",
)


def report(**changes: Any) -> dict[str, Any]:
    seen = {"requests": 100, "ttft_p50_ms": 8.0, "ttft_p99_ms": 10.0, "failures": {}}
    sound: dict[str, Any] = {
        "alone": seen,
        "beside": seen | {"ttft_p99_ms": 14.0},
        "kinds": {SLOW_READER: {"ends": {"200": 8}}},
        "failed_answers": 0,
        "tracebacks": [],
        "health": {"max_s": 0.2, "not_200": 0},
        "memory": memory("beside", 1000.0, 1000.0),
        "stop": {"seconds": 3.0, "exit_code": 0},
        "restored": {"prompts": 24, "lost": []},
    }
    return sound | changes


def memory(phase: str, first_mb: float, last_mb: float) -> dict[str, Any]:
    samples = [{"own_mb": value, "resident_mb": value} for value in (first_mb, 1.0, last_mb)]
    return {phase: memory_figures(samples)}


def test_56_clients_have_all_kinds() -> None:
    kinds = chosen_kinds(56, ())
    assert len(kinds) == 56
    assert set(kinds) == set(KINDS)


def test_only_the_chosen_kinds_are_sent() -> None:
    assert chosen_kinds(3, ("deep JSON", "wrong host")) == ["deep JSON", "wrong host", "deep JSON"]


def test_a_run_in_which_good_clients_notice_nothing_passes() -> None:
    assert all(row["holds"] for row in verdicts(report()))


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"beside": report()["alone"] | {"ttft_p99_ms": 16.0}}, "p99 of the first token, beside / alone"),
        ({"beside": report()["alone"] | {"ttft_p99_ms": 0.0}}, "p99 of the first token, beside / alone"),
        ({"alone": report()["alone"] | {"failures": {"503": 1}}}, "good requests that failed"),
        ({"failed_answers": 1}, "answers with 500"),
        ({"tracebacks": ["ValueError: x"]}, "tracebacks in the log"),
        ({"health": {"max_s": 0.6, "not_200": 0}}, "slowest /health, s"),
        ({"health": {"max_s": 0.2, "not_200": 1}}, "answers of /health without 200"),
        ({"memory": memory("beside", 5000.0, 5000.0)}, "most memory, MB"),
        ({"memory": memory("beside", 1000.0, 1200.0)}, "memory in the last third, median MB"),
        ({"kinds": {SLOW_READER: {"ends": {CUT_OFF: 1}}}}, "streams of slow readers that were cut off"),
        ({"stop": {"seconds": 11.0, "exit_code": 0}}, "from SIGTERM to the end, s"),
        ({"stop": {"seconds": 1.0, "exit_code": None}}, "exit code"),
        ({"restored": {"prompts": 24, "lost": [{}]}}, "saved prompts that are not restored"),
        ({"restored": {"prompts": 0, "lost": []}}, "saved prompts"),
    ],
)
def test_each_thing_that_a_client_would_notice_fails_its_verdict(changes: dict[str, Any], what: str) -> None:
    assert [row["what"] for row in verdicts(report(**changes)) if not row["holds"]] == [what]


def test_a_phase_in_which_nothing_was_answered_has_figures_and_fails() -> None:
    nothing = figures(Phase())
    failed = [row["what"] for row in verdicts(report(alone=nothing)) if not row["holds"]]
    assert failed == ["p99 of the first token, beside / alone"]


def test_each_end_has_its_column() -> None:
    ends = {"200": 1, "403": 2, "400": 3, "429": 4, "503": 5, "500": 6, HUNG_UP: 7, CLOSED: 8, CUT_OFF: 9}
    assert list(columns_of(ends).values()) == [1, 5, 4, 5, 6, 7, 8, 9]


def test_the_error_of_each_traceback_is_found_in_a_log(tmp_path: Path) -> None:
    log = tmp_path / "log"
    trace = "Traceback (most recent call last):\n  File x, line 1\n    f()\n"
    log.write_text(f"INFO a\n{trace}ValueError: one\nINFO b\n{trace}KeyError: two\n", encoding="utf-8")
    assert [end.splitlines()[-1] for end in tracebacks(log)] == ["ValueError: one", "KeyError: two"]


@contextmanager
def answering(answer: bytes) -> Iterator[int]:
    """A server that says this to one client. Gives its port."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(1 << 16)
                connection.sendall(answer)

        server = Thread(target=serve)
        server.start()
        yield listener.getsockname()[1]
        server.join()


@pytest.mark.parametrize(
    ("answer", "how"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi", "200"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nhi", CUT_OFF),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nhi\r\n0\r\n\r\n", "200"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nhi\r\n", CUT_OFF),
        (b"HTTP/1.1 500 Internal Server Error\r\nContent-Length: 2\r\n\r\nno", "500"),
        (b"", CLOSED),
    ],
)
def test_an_answer_that_is_not_whole_is_told_apart(answer: bytes, how: str) -> None:
    with answering(answer) as port:
        caller = Caller(port, "a-key-0123456789abcdef")
        end = asyncio.run(caller.ask(caller.request("/v1/chat/completions", b"{}")))
    assert end.how == how
    assert end.is_failure == (how == "500")


def test_a_client_that_loses_patience_has_hung_up() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        caller = Caller(listener.getsockname()[1], "a-key-0123456789abcdef")
        end = asyncio.run(caller.ask(caller.request("/v1/chat/completions", b"{}"), patience_s=0.05))
    assert end.how == HUNG_UP


def ended(daemon: DaemonProcess, kind: str, times: int = 1) -> list[End]:
    behaviour = KINDS[kind](Caller(int(daemon.url.rpartition(":")[2]), "a-key-0123456789abcdef"))

    async def run() -> list[End]:
        return [await behaviour() for _ in range(times)]

    return asyncio.run(run())


@pytest.mark.parametrize("kind", CHEAP)
def test_a_request_that_once_was_a_failure_is_served_or_refused(daemon: DaemonProcess, kind: str) -> None:
    (end,) = ended(daemon, kind)
    assert end.how in ("200", "400"), end.answer


def test_a_name_of_31_mib_and_unfinished_bodies_are_refused_while_another_key_is_served(
    chat_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bad_clients, "UNFINISHED_S", 2.0)
    kinds = ["31 MiB of a model's name", "256 unfinished bodies"]
    keys, models = write_keys(tmp_path / "keys", 1, kinds), tmp_path / "models.toml"
    models.write_text(f'[served]\nmodel = "{chat_model}"\npin = true\n')
    flags = serve_flags(chat_model, tmp_path / "kv", api_keys=keys)
    served: list[int] = []
    with DaemonProcess("--models-file", str(models), *flags[2:]) as daemon:
        port = int(daemon.url.rpartition(":")[2])
        good = Caller(port, good_key(0))
        hello = good.request(CHAT, chat(model="served"))

        async def run() -> list[End]:
            await good.ask(hello)
            attacks = [asyncio.ensure_future(KINDS[kind](Caller(port, bad_key(kind)))()) for kind in kinds]
            while not all(attack.done() for attack in attacks):
                served.append(int((await good.ask(hello)).how))
            return [attack.result() for attack in attacks]

        ends = asyncio.run(run())
        assert daemon.stop() == 0
    assert ends[0].how == "404"
    assert ends[1].how in ("429", HUNG_UP)
    assert set(served) == {200}


def test_a_foreign_host_is_refused(daemon: DaemonProcess) -> None:
    assert [end.how for end in ended(daemon, "wrong host")] == ["403"]


def test_stored_responses_are_stored_and_read(daemon: DaemonProcess) -> None:
    assert [end.how for end in ended(daemon, "stored responses", 9)] == ["200"] * 9


@pytest.mark.slow
def test_a_short_run_has_all_verdicts(chat_model: Path) -> None:
    command = [sys.executable, "-m", "tools", "hostile", "--minutes", "0.05", "--good", "2", "--bad", "4", "--json"]
    command += ["--think", "0.5", "--prompt-chars", "300", "--model", str(chat_model)]
    for kind in ("deep JSON", "hangs up in a stream", "opens and closes", "stored responses"):
        command += ["--only", kind]
    ran = subprocess.run(command, capture_output=True, text=True, check=False, cwd=Path(__file__).parents[2])
    assert ran.stdout, ran.stderr
    found = json.loads(ran.stdout)
    held = {row["what"]: row["holds"] for row in found["verdicts"]}
    # Not how long anything took.
    for what in ("good requests that failed", "answers with 500", "tracebacks in the log", "exit code"):
        assert held[what], found
    assert set(found["kinds"]) == set(found["bad"])
    assert found["beside"]["requests"] > 0
