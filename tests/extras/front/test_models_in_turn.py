"""`serve --models-dir`: several models behind one port, which come and go, also while processes are killed."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from diskprefix.extras.front.listing import merged_metrics
from tests.extras.front.test_front_processes import family, is_gone, wait_for, wait_for_worker
from tests.server.chat_model import write_chat_model
from tests.server.daemon_process import DaemonProcess, serve_flags, wait_until
from tests.server.process.test_process import CHAT, next_data

KEY = "k" * 24
ONE_OF_TWO = ("--memory-limit", "1GiB")
"""Room to compute is most of what a tiny model needs."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The models `ash` and `birch`, and `damaged`, whose weights are cut short."""
    folder = tmp_path_factory.mktemp("several")
    for seed, name in enumerate(("ash", "birch", "damaged"), start=7):
        write_chat_model(folder / name, seed=seed)
    (weights,) = (folder / "damaged").glob("*.safetensors")
    weights.write_bytes(weights.read_bytes()[: weights.stat().st_size // 2])
    return folder


def several(folder: Path, cache: Path, *more: str, **changes: Any) -> DaemonProcess:
    flags = serve_flags(folder, cache, **changes)
    return DaemonProcess("--models-dir", *flags[1:], *more)


@pytest.fixture(scope="module")
def daemon(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    with several(folder, tmp_path_factory.mktemp("front") / "kv") as daemon:
        yield daemon
        assert daemon.stop() == 0


def body(model: str, said: str = "Name three rivers and tell me where each begins. ", **more: Any) -> dict[str, Any]:
    turn = {"messages": [{"role": "user", "content": said * 3}], "max_tokens": 4, "temperature": 0}
    return {"model": model} | turn | more


def endless(model: str) -> dict[str, Any]:
    return body(model, stream=True, max_tokens=1800, n=16, logit_bias={"2": -100})


def states(daemon: DaemonProcess) -> dict[str, str]:
    found: dict[str, str] = httpx.get(daemon.url + "/health").json()["models"]
    return found


def ordered(daemon: DaemonProcess, model: str, what: str) -> dict[str, str]:
    with daemon.client() as client:
        found: dict[str, str] = client.post(f"/models/{model}/{what}").raise_for_status().json()
    return found


def conversation(client: httpx.Client, model: str, turns: int) -> Iterator[tuple[str, int, int]]:
    """Yields the reply of each turn, the prompt tokens that were computed again, and the tokens of the prompt."""
    messages: list[dict[str, str]] = []
    known = 0
    for number in range(turns):
        messages.append({"role": "user", "content": f"Say more about river number {number}, please. " * 4})
        asked = {"model": model, "messages": messages, "max_tokens": 6, "temperature": 0, "cache_salt": "mine"}
        reply = client.post(CHAT, json=asked).raise_for_status().json()
        message, usage = reply["choices"][0]["message"], reply["usage"]
        yield message["content"], max(0, known - reply["prefix_cache"]["restored"]), usage["prompt_tokens"]
        messages.append({"role": "assistant", "content": message["content"]})
        # The last token of a reply was sampled, not computed.
        known = usage["prompt_tokens"] + usage["completion_tokens"] - 1


def replies(daemon: DaemonProcess, model: str) -> list[str]:
    with daemon.client() as client:
        return [reply for reply, _, _ in conversation(client, model, 3)]


def test_two_models_that_do_not_fit_together_take_turns_and_compute_nothing_twice(
    folder: Path, tmp_path: Path, daemon: DaemonProcess
) -> None:
    """With `auto` and a salt, the policy keeps nothing of a first turn: it is saved when the model is unloaded."""
    names, turns = ("ash", "birch"), 3
    with several(folder, tmp_path / "kv", *ONE_OF_TWO, disk_prefix_cache="auto:30") as swapping:
        with swapping.client() as client:
            both = [conversation(client, name, turns) for name in names]
            taken = [[next(one) for one in both] for _ in range(turns)]
        assert [again for turn in taken for _, again, _ in turn] == [0] * turns * len(names)
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
    answer = httpx.post(daemon.url + CHAT, json=body("brich"), timeout=60)
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")
    assert "birch" in answer.json()["error"]["message"]
    said = httpx.post(daemon.url + "/v1/messages", json=body("brich"), timeout=60)
    assert (said.status_code, said.json()["type"]) == (404, "error")
    assert states(daemon) == before


@pytest.mark.parametrize(
    ("method", "path", "fields"),
    [
        ("POST", CHAT, {"model": 30_000_000}),
        ("POST", "/v1/messages", {"model": 201}),
        ("POST", f"{CHAT}?model={{}}", {}),
        ("GET", "/v1/models/{}", {}),
        ("GET", "/props?model={}", {}),
        ("POST", "/models/{}/load", {}),
    ],
)
def test_a_name_that_no_model_can_have_is_a_404_wherever_it_stands(
    method: str, path: str, fields: dict[str, int], daemon: DaemonProcess
) -> None:
    asked = body("birch") | {name: "x" * length for name, length in fields.items()}
    if not fields:
        del asked["model"]
    with daemon.client() as client:
        answer = client.request(method, path.format("x" * 201), json=asked, timeout=60)
    error = answer.json()["error"]
    assert (answer.status_code, error.get("param", "model")) == (404, "model")
    assert "characters; 200 are the most" in error["message"]
    assert "x" * 20 not in error["message"]


def test_the_models_are_listed_embed_by_name_and_metrics_are_by_model(daemon: DaemonProcess) -> None:
    httpx.post(daemon.url + CHAT, json=body("ash"), timeout=60).raise_for_status()
    listed = httpx.get(daemon.url + "/v1/models").json()["data"]
    assert {card["id"]: card["loaded"] for card in listed}["ash"]
    assert [card["id"] for card in listed] == ["ash", "birch", "damaged"]
    asked = [{"model": name, "input": "Oslo"} for name in ("ash", "birch")]
    made = [httpx.post(daemon.url + "/v1/embeddings", json=one, timeout=60).raise_for_status().json() for one in asked]
    assert [one["model"] for one in made] == ["ash", "birch"]
    assert made[0]["data"] != made[1]["data"]
    assert httpx.get(daemon.url + "/v1/models/birch").json()["id"] == "birch"
    named = httpx.get(daemon.url + "/v1/models", headers={"anthropic-version": "2023-06-01"}).json()
    assert (named["first_id"], named["last_id"]) == ("ash", "damaged")
    metrics = httpx.get(daemon.url + "/metrics").text
    assert 'diskprefix_model_loaded{model="ash"} 1\n' in metrics
    assert re.search(r'^diskprefix_requests_total\{model="ash",outcome="completed"\} [1-9]', metrics, re.MULTILINE)
    with daemon.client() as client:
        props = client.get("/props", params={"model": "ash"}).json()
    assert props["model"]["name"] == "ash"


def test_a_model_is_loaded_and_unloaded_by_its_routes_and_by_keep_alive(daemon: DaemonProcess) -> None:
    for what in ("load", "unload"):
        assert httpx.post(f"{daemon.url}/models/birch/{what}").status_code == 401
    assert ordered(daemon, "birch", "load")["model"] == "birch"
    wait_until(lambda: states(daemon).get("birch") == "ready", "it is loaded")
    assert ordered(daemon, "birch", "unload") == {"model": "birch", "status": "unloading"}
    wait_until(lambda: "birch" not in states(daemon), "it is unloaded")
    httpx.post(daemon.url + CHAT, json=body("birch", keep_alive=0), timeout=60).raise_for_status()
    wait_until(lambda: "birch" not in states(daemon), "it is unloaded after the answer")
    wrong = httpx.post(daemon.url + CHAT, json=body("birch", keep_alive="soon"), timeout=60)
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "keep_alive")
    long = httpx.post(daemon.url + CHAT, json=body("birch", keep_alive="1" + " " * (4 << 20) + "x"), timeout=60)
    assert (long.status_code, long.json()["error"]["param"]) == (400, "keep_alive")
    assert len(long.content) < 300


def test_a_model_that_cannot_be_loaded_fails_its_requests_with_the_reason_and_no_other(daemon: DaemonProcess) -> None:
    for _ in range(2):
        answer = httpx.post(daemon.url + CHAT, json=body("damaged"), timeout=60)
        assert answer.status_code in (500, 503)
        assert "damaged or cut short" in answer.json()["error"]["message"]
    httpx.post(daemon.url + CHAT, json=body("ash"), timeout=60).raise_for_status()


@pytest.mark.parametrize(
    ("content", "code"),
    [(b'{"messages": []', "invalid_json"), (b'{"model": 5}', "invalid_value"), (b'{"messages": []}', "invalid_value")],
)
def test_a_body_that_names_no_model_is_a_400(daemon: DaemonProcess, content: bytes, code: str) -> None:
    for name in ("ash", "birch"):
        ordered(daemon, name, "load")
    answer = httpx.post(daemon.url + CHAT, content=content, headers={"Content-Type": "application/json"}, timeout=60)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, code)


def test_a_worker_that_is_killed_fails_its_own_requests_alone(folder: Path, tmp_path: Path) -> None:
    with several(folder, tmp_path / "kv") as daemon:
        with (
            httpx.stream("POST", daemon.url + CHAT, json=endless("ash"), timeout=60) as broken,
            httpx.stream("POST", daemon.url + CHAT, json=endless("birch"), timeout=60) as other,
        ):
            lines, others = broken.iter_lines(), other.iter_lines()
            next_data(lines)
            next_data(others)
            os.kill(wait_for_worker(daemon), signal.SIGKILL)
            with pytest.raises(httpx.TransportError):
                list(lines)
            next_data(others)
        wait_for(daemon, "cancelled")
        httpx.post(daemon.url + CHAT, json=body("ash"), timeout=60).raise_for_status()
        assert daemon.stop() == 0


def test_an_only_model_that_was_idle_is_unloaded_and_loaded_again_by_the_next_request(
    folder: Path, tmp_path: Path
) -> None:
    with DaemonProcess(*serve_flags(folder / "ash", tmp_path / "kv"), "--idle-unload", "0.1s") as daemon:
        assert httpx.get(daemon.url + "/health").json() == {"status": "ok"}, "it is loaded for the first request"
        assert httpx.get(daemon.url + "/metrics").status_code == 503, "who looks from time to time does not load it"
        first = httpx.post(daemon.url + CHAT, json=body("ash"), timeout=60).json()
        wait_for(daemon, "is unloaded")
        again = httpx.post(daemon.url + CHAT, json=body("ash"), timeout=60).json()
        assert again["prefix_cache"]["source"] == "disk"
        assert again["choices"] == first["choices"]
        assert httpx.post(daemon.url + CHAT, json=body("other"), timeout=60).status_code == 404
        assert daemon.stop() == 0


def test_merged_metrics_have_each_family_once() -> None:
    one = '# HELP a_total Help.\n# TYPE a_total counter\na_total{b="x y"} 1.0\na_total 2.0\n'
    merged = merged_metrics({"m": one, 'n"': one}, {"m": True, "o": False})
    assert merged.splitlines() == [
        "# HELP a_total Help.",
        "# TYPE a_total counter",
        'a_total{model="m",b="x y"} 1.0',
        'a_total{model="m"} 2.0',
        'a_total{model="n\\"",b="x y"} 1.0',
        'a_total{model="n\\""} 2.0',
        "# HELP diskprefix_model_loaded Whether a model is in memory.",
        "# TYPE diskprefix_model_loaded gauge",
        'diskprefix_model_loaded{model="m"} 1',
        'diskprefix_model_loaded{model="o"} 0',
    ]


def test_a_system_prompt_is_warmed_for_the_named_model_which_is_loaded_for_it(
    daemon: DaemonProcess, tmp_path: Path
) -> None:
    file = tmp_path / "prompt.txt"
    file.write_text("You answer about rivers. " * 20)
    for name in ("ash", "birch"):
        flags = ["--system", str(file), "--url", daemon.url, "--model", name]
        subprocess.run([sys.executable, "-m", "diskprefix", "warm", *flags], check=True)
        system = {"role": "system", "content": file.read_text()}
        chat = {"model": name, "messages": [system, {"role": "user", "content": "Name one."}], "max_tokens": 1}
        reply = httpx.post(daemon.url + CHAT, json=chat, timeout=60).raise_for_status().json()
        assert reply["prefix_cache"]["restored"] >= reply["usage"]["prompt_tokens"] - 32


def test_without_a_key_nothing_is_loaded(folder: Path, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text(f"alice {KEY}\n")
    keys.chmod(0o600)
    with several(folder, tmp_path / "kv", "--api-keys", str(keys)) as daemon:
        for path, asked in (
            (CHAT, body("ash")),
            ("/models/ash/load", {}),
            ("/", body("ash")),
            ("/health", body("ash")),
        ):
            assert httpx.post(daemon.url + path, json=asked).status_code == 401
        paths = ("/", "/dashboard", "/favicon.ico")
        assert [httpx.get(daemon.url + path).status_code for path in paths] == [200, 307, 204]
        with daemon.client(KEY) as client:
            assert client.post("/models/ash/load").status_code == 403, "that is for the key named admin"
            assert client.get("/health").json() == {"status": "ok"}
        assert "<title>diskprefix chat</title>" in httpx.get(f"{daemon.url}/chat").raise_for_status().text
        assert not any(" is for " in line for line in daemon.lines)
        assert daemon.stop() == 0


def ask(daemon: DaemonProcess, model: str) -> httpx.Response:
    return httpx.post(daemon.url + CHAT, json=body(model), timeout=120)


def test_a_request_whose_worker_is_killed_while_it_loads_is_answered_by_the_next_one(
    folder: Path, tmp_path: Path
) -> None:
    with several(folder, tmp_path / "kv") as daemon, ThreadPoolExecutor() as pool:
        first = pool.submit(ask, daemon, "ash")
        os.kill(wait_for_worker(daemon), signal.SIGKILL)
        assert first.result().status_code == 200
        assert wait_for_worker(daemon, 2) in family(daemon.process.pid)
        assert daemon.stop() == 0


@pytest.mark.parametrize("whom", ["who comes", "who goes", "the front"])
def test_whoever_is_killed_in_a_swap_the_conversations_go_on_as_if_nothing_had_been(
    folder: Path, tmp_path: Path, whom: str
) -> None:
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
            if whom == "the front":
                all_of_them = family(daemon.process.pid)
                assert daemon.stop(signal.SIGKILL) == -signal.SIGKILL
                assert isinstance(asked.exception(), httpx.TransportError)
                wait_until(lambda: all(map(is_gone, all_of_them)), "all end")
            else:
                os.kill(comes if whom == "who comes" else goes, signal.SIGKILL)
                assert asked.result().status_code == 200
                assert replies(daemon, "ash") == expected
                assert daemon.stop() == 0
    if whom == "the front":
        with several(folder, tmp_path / "kv") as daemon:
            with daemon.client() as client:
                assert [(reply, again) for reply, again, _ in conversation(client, "ash", 3)] == [
                    (reply, 0) for reply in expected
                ]
            assert daemon.stop() == 0
