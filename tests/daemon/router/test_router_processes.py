"""The router and its workers as processes that die in turn, and models that come and go behind one port.

Where what workers answer does not matter, they are small: `small_workers`.
"""

from __future__ import annotations

import asyncio
import json
import os
import pickle
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import ollama
import pytest

from diskprefix.daemon.router import router
from diskprefix.daemon.router import workers as router_workers
from diskprefix.daemon.router.router import Failures, RouterApp
from diskprefix.daemon.router.workers import ModelWorker, Workers
from diskprefix.daemon.server.keys import OwnerToken
from diskprefix.daemon.server.process import router_line
from diskprefix.daemon.server.process.router_line import LOAD, UNLOAD, Order, RouterLine
from diskprefix.daemon.settings import Settings
from diskprefix.desk.shared.daemon_call import key_for
from diskprefix.errors import DeviceLost
from tests.daemon.server.chat_model import POSITIONS, weights_of, write_chat_model
from tests.daemon.server.daemon_process import CHAT, DaemonProcess, clean_environment, family, serve_flags, wait_until
from tests.daemon.server.process.test_process import Notifications, next_data
from tests.daemon.server.test_auth import write_keys
from tests.runtime.plan.tiny import write_gguf
from tests.runtimes import RUNTIME, not_by_llama

KEY = "k" * 24
ONE_OF_TWO = ("--memory-limit", "1GiB")
"""Room to compute is most of what a tiny model needs."""
REPLY = 6
COMPUTED_AGAIN = 16 - 1 + REPLY - 1 if RUNTIME == "llama" else 0
"""How many of the tokens that a turn has computed the next one may compute again: a part of a block and the reply, for
a model that is exact at blocks."""


def small(action: str, **environment: str) -> DaemonProcess:
    module = "tests.daemon.router.small_workers"
    return DaemonProcess(action, module=module, fresh=True, environment=clean_environment(**environment))


def below(daemon: DaemonProcess) -> list[int]:
    """The processes below the router."""
    return list(family(daemon.process.pid))[1:]


def is_gone(pid: int) -> bool:
    try:
        return ") Z " in Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return True


def wait_gone(pids: list[int]) -> None:
    wait_until(lambda: all(map(is_gone, pids)), "all end")


def wait_for(daemon: DaemonProcess, line: str, count: int = 1) -> None:
    """Waits until the log has so many lines with a text."""
    wait_until(lambda: len([found for found in daemon.lines if line in found]) >= count, line, 120)


def wait_for_worker(daemon: DaemonProcess, count: int = 1) -> int:
    """Waits for the worker of this number. Returns its process."""
    wait_for(daemon, " runs in process ", count)
    return [int(found[1]) for line in daemon.lines if (found := re.search(r"runs in process (\d+)", line))][count - 1]


def test_a_death_at_once_is_followed_by_longer_and_longer_waits_and_one_after_long_service_is_not() -> None:
    failures = Failures()
    assert [failures.record("why", 5.0) for _ in range(9)] == [0, 1, 2, 4, 8, 16, 32, 60, 60]
    assert (failures.until, failures.reason) == (65, "why")
    assert failures.record("why", 5.0, served_s=3600) == 0
    assert failures.record("why", 5.0) == 1
    assert Failures().record("why", 5.0, min_s=1) == 1


@pytest.mark.slow
def test_the_front_replaces_dead_workers_notifies_systemd_and_ends_them(tmp_path: Path) -> None:
    heard = Notifications(str(tmp_path / "notify"))
    with small("serve", NOTIFY_SOCKET=str(tmp_path / "notify"), WATCHDOG_USEC="1000000") as daemon:
        wait_for(daemon, "serving in")
        wait_until(lambda: {"WATCHDOG=1", "STATUS=serving", "READY=1"} <= set(heard.messages), "they are heard")
        os.kill(wait_for_worker(daemon), signal.SIGSTOP)
        daemon.wait_for_line("the worker gave no sign of life for 1 s")
        wait_for(daemon, "serving in", 2)
        os.kill(wait_for_worker(daemon, 2), signal.SIGKILL)
        wait_for(daemon, f"serving in {wait_for_worker(daemon, 3)}")
        all_of_them = below(daemon)
        assert daemon.stop() == 0
        wait_gone(all_of_them)
    wait_until(lambda: any(message.startswith("STOPPING=1") for message in heard.messages), "STOPPING=1")
    heard.close()


@pytest.mark.parametrize(("action", "line"), [("serve", "serving in"), ("load", "loading in")])
def test_workers_end_with_a_killed_front_and_free_its_port(tmp_path: Path, action: str, line: str) -> None:
    with small(action, TMPDIR=str(tmp_path)) as daemon:
        port = int(daemon.url.rpartition(":")[2])
        wait_for(daemon, line)
        all_of_them = below(daemon)
        assert wait_for_worker(daemon) in all_of_them
        (folder,) = tmp_path.iterdir()
        assert folder.stat().st_mode & 0o777 == 0o700, "only its user reaches the workers' sockets"
        assert daemon.stop(signal.SIGKILL) == -signal.SIGKILL
        socket.create_server(("127.0.0.1", port)).close()
        wait_gone(all_of_them)
        assert not folder.exists()


def test_a_worker_ends_whose_router_died_with_unread_messages(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ended = threading.Event()
    monkeypatch.setattr(router_line, "notify_through", lambda _channel: None)
    monkeypatch.setattr(router_line, "_ORPHAN_S", 0.0)
    monkeypatch.setattr(os, "kill", lambda _pid, _number: None)
    monkeypatch.setattr(os, "_exit", lambda _code: ended.set())
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs, socket.socket(socket.AF_UNIX) as listener:
        (tmp_path / "folder").mkdir()
        listener.bind(str(tmp_path / "folder" / "1"))
        theirs.send(b"WATCHDOG=1")
        ours.close()
        RouterLine(Order(Settings(), "", None, None, takes_any_name=False, sent_at=0.0), listener, theirs)
        assert ended.wait(30)
    assert not (tmp_path / "folder").exists()


def spare_beside(daemon: DaemonProcess, worker: int) -> int:
    """Waits for the process that the router has ready. Returns it."""
    wait_until(lambda: len(below(daemon)) == 2, "a spare process")
    (spare,) = set(below(daemon)) - {worker}
    return spare


def test_a_spare_process_takes_the_place_of_a_dead_worker_and_is_replaced_even_if_it_dies_itself() -> None:
    with small("serve") as daemon:
        wait_for(daemon, "serving in")
        worker = wait_for_worker(daemon)
        spare = spare_beside(daemon, worker)
        os.kill(worker, signal.SIGKILL)
        wait_for(daemon, f"serving in {spare}")
        assert wait_for_worker(daemon, 2) == spare
        wait_gone([worker])
        os.kill(spare_beside(daemon, spare), signal.SIGKILL)
        os.kill(spare, signal.SIGKILL)
        third = wait_for_worker(daemon, 3)
        wait_for(daemon, f"serving in {third}")
        all_of_them = [third, spare_beside(daemon, third)]
        assert daemon.stop() == 0
        wait_gone(all_of_them)


def test_an_order_that_a_spare_process_does_not_take_goes_to_a_new_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router_workers, "program", [sys.executable, "-c", "import time; time.sleep(60)"])

    async def start() -> None:
        workers = Workers(takes_any_name=False)
        workers.keep_spare()
        spare = workers._spare
        assert spare is not None
        spare.process.kill()
        spare.process.wait()
        worker = ModelWorker(model="one", needed_bytes=1, waits_since=0)
        workers.start(worker, Settings())
        assert worker.process.pid != spare.process.pid
        workers.kill_all()
        await worker.ended.wait()

    asyncio.run(start())


@pytest.mark.cases(1)
@pytest.mark.parametrize("free_bytes", [1 << 30, 4 << 30])
def test_a_spare_process_is_kept_where_there_is_memory_for_it(monkeypatch: pytest.MonkeyPatch, free_bytes: int) -> None:
    kept: list[bool] = []
    monkeypatch.setattr(router, "available_ram_bytes", lambda: free_bytes)
    app = SimpleNamespace(
        _swaps=SimpleNamespace(slots=[]),
        _is_stopping=False,
        _workers=SimpleNamespace(keep_spare=lambda: kept.append(True)),
    )
    RouterApp._keep_spare(app)  # type: ignore[arg-type]
    assert bool(kept) == (free_bytes > 2 << 30)


_NOTED_IMPORTS = """
import os, sys
from diskprefix.daemon.router import worker_program

leave = os._exit

def serve(settings, router):
    before = set(sys.modules)

    def noting(code):
        print(*sys.modules.keys() - before, flush=True)
        leave(code)

    os._exit = noting
    worker_program.serve_model(settings, router)

worker_program.main(serve, prepare=worker_program.import_all)
"""


@pytest.mark.timing("a worker has a minute to load, answer and end")
@not_by_llama("it is another library")
def test_a_spare_process_has_imported_what_a_first_reply_needs(tmp_path: Path) -> None:
    settings = Settings(model=str(write_gguf(tmp_path / "tiny.gguf")), kv_cache_dir=tmp_path / "kv")
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs, socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "worker"))
        listener.listen()
        worker = subprocess.Popen(
            [sys.executable, "-P", "-c", _NOTED_IMPORTS, str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdout=subprocess.PIPE,
            text=True,
        )
        token = OwnerToken.drawn()
        order = Order(settings, "", token, None, takes_any_name=False, sent_at=time.monotonic())
        socket.send_fds(ours, [pickle.dumps(order)], [listener.fileno()])
        ours.send(LOAD)
        transport = httpx.HTTPTransport(uds=str(tmp_path / "worker"))
        with httpx.Client(transport=transport, base_url="http://localhost", timeout=60) as client:
            asked = {"model": "tiny", "prompt": "Oslo", "max_tokens": 2, "temperature": 0}
            client.post("/v1/completions", json=asked).raise_for_status()
        ours.send(UNLOAD)
        late = set((worker.communicate(timeout=60)[0] or "").split())
    assert late, "it has noted them"
    named = {name for name in late if name.partition(".")[0] not in sys.stdlib_module_names}
    # It chooses by what is installed, when it is first used.
    assert [name for name in sorted(named) if not name.startswith("lmdb.")] == []


_LATE_BODIES = """
import sys
from diskprefix.daemon import hooks
from diskprefix.daemon.router import worker_program

worker_program.import_all()
before = set(sys.modules)
from diskprefix.daemon.server import answer

for module in (answer, *hooks.modules_of_routes()):
    for route in module.routes:
        if route.about is not None and (body := route.about.body) is not None:
            print(route.path, "late" if not body.__pydantic_complete__ else "ready")
print(*sorted(sys.modules.keys() - before))
"""


def test_a_spare_process_has_made_the_validators_of_all_apis() -> None:
    """Else a first request after a swap waits for them: of chat 15 ms, of responses 30."""
    said = subprocess.run([sys.executable, "-P", "-c", _LATE_BODIES], capture_output=True, text=True, check=True)
    *bodies, imported = said.stdout.splitlines()
    assert {"/v1/chat/completions ready", "/v1/responses ready", "/v1/messages ready", "/api/chat ready"} <= {*bodies}
    assert [body for body in bodies if body.endswith("late")] == []
    assert imported == ""


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("action", "line", "number"),
    [
        ("load", "loading in", signal.SIGTERM),
        ("load", "loading in", signal.SIGINT),
        ("hang", "loading in", signal.SIGTERM),
        ("serve", "serving in", signal.SIGTERM),
    ],
)
def test_a_hangup_and_a_signal_while_a_worker_loads_or_serves_end_all_with_0(
    action: str, line: str, number: signal.Signals
) -> None:
    with small(action) as daemon:
        wait_for(daemon, line)
        daemon.process.send_signal(signal.SIGHUP)
        all_of_them = below(daemon)
        assert daemon.stop(number) == 0
        wait_gone(all_of_them)
        assert not any("was killed by" in line for line in daemon.lines), "it does not listen for that yet"


def test_a_hangup_is_for_the_worker_alone() -> None:
    with small("serve") as daemon:
        wait_for(daemon, "serving in")
        daemon.process.send_signal(signal.SIGHUP)
        wait_for(daemon, "the keys are read again")
        assert not any(map(is_gone, below(daemon)))
        assert daemon.stop() == 0


@pytest.mark.cases(2)
@pytest.mark.parametrize("code", [2, 3, 4])
def test_an_error_of_the_only_model_that_another_start_would_meet_too_ends_all_with_its_code(code: int) -> None:
    with small(str(code)) as daemon:
        assert daemon.process.wait(60) == code


@pytest.mark.cases(1)
@pytest.mark.parametrize(
    ("action", "how"),
    [("die", "was killed by SIGKILL"), (str(DeviceLost.exit_code), f"ended with exit code {DeviceLost.exit_code}")],
)
def test_a_worker_that_dies_at_once_is_started_more_and_more_slowly(action: str, how: str) -> None:
    with small(action) as daemon:
        daemon.wait_for_line(f"{how}; another is started$")
        daemon.wait_for_line(r"another is started in 1 s: it died 2 times in a row")
        # Between two of them: how a worker ended is the exit code of the router.
        wait_for(daemon, "another is started in 2 s: it died 3 times in a row")
        assert daemon.stop() == 0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The models `ash` and `birch`, and `damaged`, whose weights are cut short."""
    folder = tmp_path_factory.mktemp("several")
    for seed, name in enumerate(("ash", "birch", "damaged"), start=7):
        write_chat_model(folder / name, seed=seed)
    weights = weights_of(folder / "damaged")
    weights.write_bytes(weights.read_bytes()[: weights.stat().st_size // 2])
    return folder


def several(folder: Path, cache: Path, *more: str, **changes: Any) -> DaemonProcess:
    flags = serve_flags(folder, cache, **changes)
    return DaemonProcess("--models-dir", *flags[1:], *more)


@pytest.fixture(scope="module")
def daemon(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    with several(folder, tmp_path_factory.mktemp("router") / "kv") as daemon:
        yield daemon
        assert daemon.stop() == 0


def body(model: str, **more: Any) -> dict[str, Any]:
    said = "Name three rivers and tell me where each begins. " * 3
    return {"model": model, "messages": [{"role": "user", "content": said}], "max_tokens": 4, "temperature": 0} | more


def ask(daemon: DaemonProcess, model: str, path: str = CHAT, **more: Any) -> httpx.Response:
    return httpx.post(daemon.url + path, json=body(model, **more), timeout=120)


def endless(daemon: DaemonProcess, model: str) -> Any:
    asked = body(model, stream=True, max_tokens=1800, n=16, logit_bias={"2": -100})
    return httpx.stream("POST", daemon.url + CHAT, json=asked, timeout=60)


def states(daemon: DaemonProcess) -> dict[str, str]:
    found: dict[str, str] = httpx.get(daemon.url + "/health").json()["models"]
    return found


def ordered(daemon: DaemonProcess, model: str, what: str) -> dict[str, str]:
    with daemon.client() as client:
        found: dict[str, str] = client.post(f"/models/{model}/{what}").raise_for_status().json()
    return found


def conversation(client: httpx.Client, model: str, turns: int = 3) -> Iterator[tuple[str, int]]:
    """Yields the reply of each turn, and how many tokens of the prompt were computed again."""
    messages: list[dict[str, str]] = []
    known = 0
    for number in range(turns):
        messages.append({"role": "user", "content": f"Say more about river number {number}, please. " * 4})
        asked = {"model": model, "messages": messages, "max_tokens": REPLY, "temperature": 0, "cache_salt": "mine"}
        reply = client.post(CHAT, json=asked).raise_for_status().json()
        message, usage = reply["choices"][0]["message"], reply["usage"]
        yield message["content"], max(0, known - reply["prefix_cache"]["restored"])
        messages.append({"role": "assistant", "content": message["content"]})
        # The last token of a reply was sampled, not computed.
        known = usage["prompt_tokens"] + usage["completion_tokens"] - 1


def replies(daemon: DaemonProcess, model: str) -> list[str]:
    with daemon.client() as client:
        return [reply for reply, _ in conversation(client, model)]


@pytest.mark.slow
def test_two_models_that_do_not_fit_together_take_turns_and_compute_nothing_twice(
    folder: Path, tmp_path: Path, daemon: DaemonProcess
) -> None:
    """With `auto` and a salt, the policy keeps nothing of a first turn: it is saved when the model is unloaded."""
    names, turns = ("ash", "birch"), 3
    with several(folder, tmp_path / "kv", *ONE_OF_TWO, disk_prefix_cache="auto:30") as swapping:
        with swapping.client() as client:
            both = [conversation(client, name, turns) for name in names]
            taken = [[next(one) for one in both] for _ in range(turns)]
        assert max(again for turn in taken for _, again in turn) <= COMPUTED_AGAIN
        assert len([line for line in swapping.lines if "is being unloaded" in line]) == turns * len(names) - 1
        assert swapping.stop() == 0
    for index, name in enumerate(names):
        assert [turn[index][0] for turn in taken] == replies(daemon, name)


def test_the_page_and_an_unknown_name_which_is_a_404_that_names_the_nearest_load_nothing(daemon: DaemonProcess) -> None:
    before = states(daemon)
    page = httpx.get(daemon.url, headers={"accept": "text/html"})
    assert "<html data-several " in page.text
    assert "script-src 'sha256-" in page.headers["content-security-policy"]
    assert httpx.get(daemon.url).json()["name"] == "diskprefix"
    answer, said = ask(daemon, "brich"), ask(daemon, "brich", "/v1/messages")
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")
    assert "birch" in answer.json()["error"]["message"]
    assert (said.status_code, said.json()["type"]) == (404, "error")
    assert states(daemon) == before


LONG = "x" * 201


@pytest.mark.cases(6)
@pytest.mark.parametrize(
    ("method", "path", "content", "code"),
    [
        ("POST", CHAT, json.dumps({"model": LONG * 150_000}), "model_not_found"),
        ("POST", "/v1/messages", json.dumps({"model": LONG}), "model_not_found"),
        ("POST", f"{CHAT}?model={LONG}", "{}", "model_not_found"),
        ("GET", f"/v1/models/{LONG}", "", "model_not_found"),
        ("GET", f"/props?model={LONG}", "", "model_not_found"),
        ("POST", f"/models/{LONG}/load", "", "model_not_found"),
        ("POST", CHAT, '{"messages": []', "invalid_json"),
        ("POST", CHAT, '{"x": ' + "[" * 100_000, "invalid_json"),
        ("POST", CHAT, '{"model": 5}', "invalid_value"),
        ("POST", CHAT, '{"messages": []}', "invalid_value"),
    ],
    ids=["chat", "messages", "query", "card", "props", "load", "cut", "deep", "number", "none"],
)
def test_a_name_that_no_model_can_have_is_a_404_wherever_it_stands_and_a_body_without_one_is_a_400(
    daemon: DaemonProcess, method: str, path: str, content: str, code: str
) -> None:
    for name in ("ash", "birch"):
        ordered(daemon, name, "load")
    with daemon.client() as client:
        answer = client.request(method, path, content=content, headers={"Content-Type": "application/json"})
    error = answer.json()["error"]
    assert answer.status_code == (404 if code == "model_not_found" else 400)
    assert error.get("code", code) == code
    if code == "model_not_found":
        assert error.get("param", "model") == "model"
        assert "characters; 200 are the most" in error["message"]
        assert "x" * 20 not in error["message"]


@not_by_llama("it gives no hidden states")
def test_the_models_embed_by_name(daemon: DaemonProcess) -> None:
    asked = [{"model": name, "input": "Oslo"} for name in ("ash", "birch")]
    with daemon.client() as client:
        made = [client.post("/v1/embeddings", json=one).raise_for_status().json() for one in asked]
    assert [one["model"] for one in made] == ["ash", "birch"]
    assert made[0]["data"] != made[1]["data"]


def test_the_models_are_listed_and_metrics_are_by_model(daemon: DaemonProcess) -> None:
    ask(daemon, "ash").raise_for_status()
    with daemon.client() as client:
        wait_until(lambda: "problem" in client.get("/v1/models/damaged").json(), "all headers are read")
        listed = client.get("/v1/models").json()["data"]
        assert {card["id"]: card["loaded"] for card in listed}["ash"]
        assert [card["id"] for card in listed] == ["ash", "birch", "damaged"]
        assert [card.get("capabilities") for card in listed] == [["completion", "chat", "tool_use"]] * 2 + [None]
        assert all(card["created"] > 1e9 for card in listed[:2])
        assert client.get("/v1/models/birch").json()["id"] == "birch"
        named = client.get("/v1/models", headers={"anthropic-version": "2023-06-01"}).json()
        assert (named["first_id"], named["last_id"]) == ("ash", "damaged")
        metrics = client.get("/metrics").text
        assert 'diskprefix_model_loaded{model="ash"} 1.0\n' in metrics
        assert re.search(r'^diskprefix_requests_total\{model="ash",outcome="completed"\} [1-9]', metrics, re.MULTILINE)
        assert client.get("/props", params={"model": "ash"}).json()["model"]["name"] == "ash"


def test_a_stored_response_is_found_without_the_models_name_also_when_another_model_is_loaded(
    daemon: DaemonProcess,
) -> None:
    with daemon.client() as client:
        made = [
            client.post("/v1/responses", json={"model": name, "input": "hello", "max_output_tokens": 1}, timeout=120)
            for name in ("ash", "birch")
        ]
        of_ash, of_birch = (one.raise_for_status().json() for one in made)
        for one in (of_ash, of_birch):
            assert client.get(f"/v1/responses/{one['id']}").raise_for_status().json() == one
        assert client.get("/v1/responses/resp_0").status_code == 404
        ordered(daemon, "ash", "unload")
        wait_until(lambda: "ash" not in states(daemon), "ash is unloaded")
        assert client.get(f"/v1/responses/{of_ash['id']}").raise_for_status().json() == of_ash
        listed = client.get(f"/v1/responses/{of_ash['id']}/input_items").raise_for_status().json()["data"]
        assert [one["content"][0]["text"] for one in listed] == ["hello"]
        assert client.delete(f"/v1/responses/{of_ash['id']}").raise_for_status().json()["deleted"]
        assert client.get(f"/v1/responses/{of_ash['id']}").status_code == 404
        ordered(daemon, "birch", "unload")
        wait_until(lambda: not states(daemon), "birch is unloaded")
        refused = client.get(f"/v1/responses/{of_birch['id']}")
        assert (refused.status_code, "no model is loaded" in refused.text) == (503, True)


@pytest.mark.cases(3)
@pytest.mark.parametrize("path", ["/", "/chat", "/health", "/v1/models", "/v1/models/ash", "/props?model=ash"])
def test_head_is_answered_as_get_without_a_body(daemon: DaemonProcess, path: str) -> None:
    ask(daemon, "ash").raise_for_status()
    with daemon.client() as client:
        asked, head = client.get(path), client.head(path)
    assert (head.status_code, head.content) == (asked.status_code, b"") == (200, b"")


def test_ollamas_client_lists_all_models_without_loading_one_and_unloads_with_keep_alive(daemon: DaemonProcess) -> None:
    for name in ("ash", "birch"):
        ordered(daemon, name, "unload")
    wait_until(lambda: not states(daemon), "all are unloaded")
    with ollama.Client(daemon.url) as client:
        names = {"ash", "birch"}
        wait_until(lambda: names <= {one.model for one in client.list().models if one.size}, "headers are read")
        info = client.show("birch").modelinfo
        assert info is not None
        assert info["llama.context_length"] == POSITIONS
        assert client.ps().models == []
        with pytest.raises(ollama.ResponseError, match="diskprefix rm NAME"):
            client.delete("ash")
        with pytest.raises(ollama.ResponseError, match="no model is called 'brich'; the nearest name is 'birch'"):
            client.show("brich")
        assert client.generate("ash:latest", "hello", options={"num_predict": 4}).model == "ash"
        [loaded] = client.ps().models
        assert (loaded.name, loaded.context_length) == ("ash", POSITIONS)
        assert client.chat("ash", keep_alive="0s").done_reason == "unload"
        wait_until(lambda: not client.ps().models, "it is unloaded")


@pytest.mark.slow
def test_a_model_is_loaded_and_unloaded_by_its_routes_and_by_keep_alive(daemon: DaemonProcess) -> None:
    for what in ("load", "unload"):
        assert httpx.post(f"{daemon.url}/models/birch/{what}").status_code == 401
    assert ordered(daemon, "birch", "load")["model"] == "birch"
    wait_until(lambda: states(daemon).get("birch") == "ready", "it is loaded")
    assert ordered(daemon, "birch", "unload") == {"model": "birch", "status": "unloading"}
    wait_until(lambda: "birch" not in states(daemon), "it is unloaded")
    ask(daemon, "birch", keep_alive=0).raise_for_status()
    wait_until(lambda: "birch" not in states(daemon), "it is unloaded after the answer")
    for wrong in ("soon", "1" + " " * (4 << 20) + "x"):
        refused = ask(daemon, "birch", keep_alive=wrong)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "keep_alive")
        assert len(refused.content) < 300


def test_a_model_that_cannot_be_loaded_fails_its_requests_with_the_reason_and_no_other(daemon: DaemonProcess) -> None:
    for _ in range(2):
        answer = ask(daemon, "damaged")
        assert answer.status_code in (500, 503)
        assert "cut short" in answer.json()["error"]["message"]
    ask(daemon, "ash").raise_for_status()


def test_a_worker_that_is_killed_fails_its_own_requests_alone_and_another_answers_from_disk(
    folder: Path, tmp_path: Path
) -> None:
    with several(folder, tmp_path / "kv") as daemon:
        first = ask(daemon, "ash").json()
        daemon.wait_saved()
        with endless(daemon, "ash") as broken, endless(daemon, "birch") as other:
            lines, others = broken.iter_lines(), other.iter_lines()
            next_data(lines)
            next_data(others)
            os.kill(wait_for_worker(daemon), signal.SIGKILL)
            with pytest.raises(httpx.TransportError):
                list(lines)
            next_data(others)
        wait_for(daemon, "cancelled")
        again = ask(daemon, "ash").json()
        assert again["choices"] == first["choices"]
        assert again["prefix_cache"]["source"] == "disk"
        assert daemon.stop() == 0


@pytest.mark.slow
def test_an_only_model_that_was_idle_is_unloaded_and_loaded_again_by_the_next_request(
    folder: Path, tmp_path: Path
) -> None:
    with DaemonProcess(*serve_flags(folder / "ash", tmp_path / "kv"), "--idle-unload", "0.1s") as daemon:
        assert httpx.get(daemon.url + "/health").json() == {"status": "ok"}, "it is loaded for the first request"
        assert httpx.get(daemon.url + "/metrics").status_code == 503, "who looks from time to time does not load it"
        first = ask(daemon, "ash").json()
        wait_for(daemon, "is unloaded")
        again = ask(daemon, "ash").json()
        assert again["prefix_cache"]["source"] == "disk"
        assert again["choices"] == first["choices"]
        assert ask(daemon, "other").status_code == 404
        assert daemon.stop() == 0


def test_a_system_prompt_is_warmed_for_the_named_model_which_is_loaded_for_it(
    daemon: DaemonProcess, tmp_path: Path
) -> None:
    file = tmp_path / "prompt.txt"
    file.write_text("You answer about rivers. " * 20)
    flags = ["--system", str(file), "--url", daemon.url, "--model", "birch"]
    subprocess.run([sys.executable, "-m", "diskprefix", "warm", *flags], check=True)
    messages = [{"role": "system", "content": file.read_text()}, {"role": "user", "content": "Name one."}]
    # `warm` and the agents of its user have the same tenant, behind a router too.
    with httpx.Client(headers={"x-api-key": key_for(daemon.url)}) as agent:
        reply = agent.post(daemon.url + CHAT, json=body("birch", messages=messages)).raise_for_status().json()
    assert reply["prefix_cache"]["restored"] >= reply["usage"]["prompt_tokens"] - 32


def test_without_a_key_nothing_is_loaded(folder: Path, tmp_path: Path) -> None:
    keys = write_keys(tmp_path / "keys", f"alice {KEY}")
    with several(folder, tmp_path / "kv", "--api-keys", str(keys)) as daemon:
        for path in (CHAT, "/models/ash/load", "/", "/health"):
            assert ask(daemon, "ash", path).status_code == 401
        paths = ("/", "/dashboard", "/favicon.ico")
        assert [httpx.get(daemon.url + path).status_code for path in paths] == [200, 307, 204]
        with daemon.client(KEY) as client:
            assert client.post("/models/ash/load").status_code == 403, "that is for the key named admin"
            assert client.get("/health").json() == {"status": "ok"}
        assert "<title>diskprefix chat</title>" in httpx.get(f"{daemon.url}/chat").raise_for_status().text
        assert not any(" runs in process " in line for line in daemon.lines)
        assert daemon.stop() == 0


@pytest.mark.slow
def test_a_request_whose_worker_is_killed_while_it_loads_is_answered_by_the_next_one(
    folder: Path, tmp_path: Path
) -> None:
    with several(folder, tmp_path / "kv") as daemon, ThreadPoolExecutor() as pool:
        first = pool.submit(ask, daemon, "ash")
        os.kill(wait_for_worker(daemon), signal.SIGKILL)
        assert first.result().status_code == 200
        assert wait_for_worker(daemon, 2) in below(daemon)
        assert daemon.stop() == 0


@pytest.mark.cases(1)
@pytest.mark.parametrize("whom", ["who comes", "who goes", "the router"])
def test_conversations_continue_after_any_process_is_killed_in_a_swap(folder: Path, tmp_path: Path, whom: str) -> None:
    """With `auto` and a salt, only memory has the conversation of who goes: it is killed while that is saved."""
    scope = "auto:30" if whom == "who goes" else "full"
    with several(folder, tmp_path / "kv", *ONE_OF_TWO, disk_prefix_cache=scope) as daemon:
        expected = replies(daemon, "ash")
        if scope == "full":
            daemon.wait_saved()
        goes = wait_for_worker(daemon)
        with ThreadPoolExecutor() as pool:
            asked = pool.submit(ask, daemon, "birch")
            wait_for(daemon, "ash is being unloaded")
            comes = wait_for_worker(daemon, 2)
            if whom == "the router":
                all_of_them = below(daemon)
                assert daemon.stop(signal.SIGKILL) == -signal.SIGKILL
                assert isinstance(asked.exception(), httpx.TransportError)
                wait_gone(all_of_them)
            else:
                os.kill(comes if whom == "who comes" else goes, signal.SIGKILL)
                assert asked.result().status_code == 200
                assert replies(daemon, "ash") == expected
                assert daemon.stop() == 0
    if whom == "the router":
        with several(folder, tmp_path / "kv") as daemon:
            with daemon.client() as client:
                assert list(conversation(client, "ash")) == [(reply, 0) for reply in expected]
            assert daemon.stop() == 0


def test_an_address_that_is_nearly_right_names_the_right_one_before_a_model_is_chosen(daemon: DaemonProcess) -> None:
    for path, meant in (
        ("/v1/v1/chat/completions", "/v1/chat/completions"),
        ("//v1/messages", "/v1/messages"),
        ("/health/", "/health"),
    ):
        answer = httpx.post(f"{daemon.url}{path}", json={"messages": []})
        assert answer.status_code == 404
        assert f"no such route: POST {path}; did you mean {meant}?" in answer.text
