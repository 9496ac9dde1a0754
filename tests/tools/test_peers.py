"""The programs that the daemon is measured beside: what is read of them, and the figures that are made of it."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from tools.peers.peer import HttpPeer, Peer, PeerError, Process, Reply, WorkerPeer, rate_together
from tools.peers.results import Figure, Results, UnreadableResults, better
from tools.programs.peers import measured

WORKER = """
import json, sys
print("{}", flush=True)
for line in sys.stdin:
    question = json.loads(line)
    if "die" in question["prompts"]:
        sys.exit("no memory left")
    at_s = [1 + i / 10 for i in range(question["max_tokens"])]
    print(json.dumps([{"prompt_tokens": 7, "at_s": at_s} for _ in question["prompts"]]), flush=True)
"""


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[WorkerPeer]:
    (tmp_path / "worker.py").write_text(WORKER)
    process = Process([sys.executable, str(tmp_path / "worker.py")], tmp_path / "log")
    peer = WorkerPeer(process, restores=True)
    yield peer
    peer.kill()


def test_every_case_of_a_peer_is_measured_and_it_is_killed_in_between(worker: WorkerPeer) -> None:
    found = {(figure.case, figure.size): figure.value for figure in measured(worker, (64,), 1)}
    of_a_prompt = {(case, 64) for case in ("cold_s", "rate", "together", "exact_s", "next_s")}
    assert found.keys() == {("ready_s", 0), ("memory_mib", 0), *of_a_prompt}
    assert found["cold_s", 64] == 1
    assert found["rate", 64] == pytest.approx(10)
    assert found["together", 64] == pytest.approx(50)
    assert found["memory_mib", 0] > 1


def test_a_worker_that_ends_says_why(worker: WorkerPeer) -> None:
    worker.start()
    with pytest.raises(PeerError, match="no memory left"):
        worker.ask(["die"], 1)


class Streams(BaseHTTPRequestHandler):
    chunks: list[dict[str, Any]]

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(400 if "bad" in body["prompt"] else 200)
        self.end_headers()
        for chunk in self.chunks:
            self.wfile.write(f"data: {json.dumps(chunk)}\n\n".encode())
        self.wfile.write(b"data: [DONE]\n\n")

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Callable[..., Peer]]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Streams)
    Thread(target=server.serve_forever, daemon=True).start()
    process = Process(["sleep", "60"], tmp_path / "log")
    peer = HttpPeer(process, server.server_port, {"model": "m"}, restores=False)
    peer.start()

    def answering(*chunks: dict[str, Any]) -> Peer:
        Streams.chunks = list(chunks)
        return peer

    yield answering
    peer.kill()
    server.shutdown()
    server.server_close()


def test_a_stream_is_counted_by_its_usage_or_by_its_pieces(served: Callable[..., Peer]) -> None:
    pieces = [{"choices": [{"text": text}]} for text in ("", "a", "b", "c")]
    assert served(*pieces).ask(["x"], 3)[0].tokens == 3
    with_usage = served(*pieces, {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 5}}).ask(["x"], 5)[
        0
    ]
    assert (with_usage.prompt_tokens, with_usage.tokens, len(with_usage.at_s)) == (7, 5, 3)


def test_a_refusal_and_an_empty_reply_are_errors(served: Callable[..., Peer]) -> None:
    with pytest.raises(PeerError, match="it answered 400"):
        served().ask(["bad"], 1)
    with pytest.raises(PeerError, match="without a reply"):
        served().ask(["x"], 1)


def reply(*at_s: float) -> Reply:
    return Reply(1, len(at_s), at_s)


def test_the_rate_of_several_counts_where_all_of_them_write() -> None:
    assert rate_together([reply(1, 2, 3, 4), reply(2, 3, 4, 5)]) == pytest.approx(2)
    one_after_the_other = [reply(1, 2), reply(3, 4)]
    assert rate_together(one_after_the_other) == pytest.approx(2 / 3)


def test_prompts_go_on_from_those_that_were_answered_before(
    worker: WorkerPeer, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[list[str]] = []
    ask = worker.ask

    def recorded(prompts: Sequence[str], max_tokens: int) -> list[Reply]:
        asked.append(list(prompts))
        return ask(prompts, max_tokens)

    monkeypatch.setattr(worker, "ask", recorded)
    list(measured(worker, (64,), 1))
    (alone,), (first_turn,), together, (exact,), (next_turn,) = asked[1:]
    assert len(set(together)) == 5
    assert all(prompt.startswith(alone) for prompt in together)
    assert exact == alone != first_turn
    assert next_turn.startswith(first_turn)
    assert next_turn != first_turn


def test_more_of_a_rate_and_less_of_a_time_is_better() -> None:
    assert better("rate 64", 20, 10) == 2
    assert better("cold_s 64", 2, 10) == 5


def test_another_run_adds_to_a_file_of_results(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    first = Results(path)
    first.add("m", "diskprefix", 0, [Figure("rate", 64, 20.0), Figure("rate", 64, 40.0), Figure("ready_s", 0, 3.0)])
    first.leave_out("m", "other", "it ended")
    first.begin("m", "third", 0)
    second = Results(path)
    assert second.has("m", "diskprefix", 0)
    assert not second.has("m", "diskprefix", 1)
    assert second.left_out == {"m": {"other": "it ended", "third": "cut off"}}
    second.add("m", "other", 0, [Figure("rate", 64, 10.0)])
    second.end("m", "other")
    report = json.loads(path.read_text())
    assert report["left_out"] == {"m": {"third": "cut off"}}
    assert report["models"]["m"]["rate 64"] == {
        "diskprefix": {"min": 20.0, "median": 30.0, "max": 40.0},
        "other": {"min": 10.0, "median": 10.0, "max": 10.0, "ratio": 3.0},
    }


def test_a_file_of_something_else_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    path.write_text("[]")
    with pytest.raises(UnreadableResults, match="not a file of results"):
        Results(path)
