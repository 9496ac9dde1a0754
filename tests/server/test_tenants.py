"""Tenants over the real daemon: what one has saved, no other finds, is told of, or is answered faster by."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.server.daemon_process import DaemonProcess, running_daemon
from tests.server.test_auth import ADMIN, ALICE, BOB, CHAT

SALT_A: dict[str, Any] = {"prefix_cache": {"salt": "a"}}
SALT_B: dict[str, Any] = {"prefix_cache": {"salt": "b"}}


def say(text: str, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], "max_tokens": 4, "temperature": 0} | fields


def unique(test: str) -> str:
    """A prompt of many blocks that no other test sends."""
    return f"{test}: name three rivers and tell me where each of them begins. " * 3


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tenants") / "kv"


@pytest.fixture(scope="module")
def keyed(chat_model: Path, cache: Path, keys_file: Path) -> Iterator[DaemonProcess]:
    with running_daemon(chat_model, cache, api_keys=keys_file) as daemon:
        yield daemon


class Chat:
    """One client of a daemon, who asks for everything to be saved unless the request says otherwise."""

    def __init__(self, daemon: DaemonProcess, api_key: str | None = None) -> None:
        self._daemon = daemon
        self._key = api_key

    def __call__(self, text: str, **fields: Any) -> dict[str, Any]:
        with self._daemon.client(self._key) as client:
            answer = client.post(CHAT, json=say(text, **fields))
        assert answer.status_code == 200, answer.text
        reply: dict[str, Any] = answer.json()
        return reply


def assert_miss(reply: dict[str, Any]) -> None:
    """Nothing was restored, and all of it is saved anew."""
    report = reply["prefix_cache"]
    assert (report["restored"], report["saved"]) == (0, "queued")
    assert reply["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


def assert_hit(reply: dict[str, Any], source: str | None = None) -> None:
    """The whole prompt is restored; all but one token if its logits are still being compressed."""
    assert reply["usage"]["prompt_tokens"] - reply["prefix_cache"]["restored"] in (0, 1)
    assert source in (None, reply["prefix_cache"]["source"])


def test_what_one_salt_saved_is_restored_for_it_alone(daemon: DaemonProcess) -> None:
    chat, text = Chat(daemon), unique("one salt")
    first = chat(text, **SALT_A)
    assert_miss(first)
    others = [chat(text, **SALT_B), chat(text), chat(text, cache_salt="A"), chat(text, cache_salt="a ")]
    for other in others:
        assert_miss(other)
    again = chat(text, **SALT_A)
    assert_hit(again)
    assert_hit(chat(text, **SALT_B))
    assert_hit(chat(text))
    assert {str(reply["choices"]) for reply in (first, again, *others)} == {str(first["choices"])}


def test_a_salted_request_finds_nothing_of_the_unsalted_ones(daemon: DaemonProcess) -> None:
    chat, text = Chat(daemon), unique("no salt")
    assert_miss(chat(text))
    assert_miss(chat(text, **SALT_A))


def test_a_longer_prompt_of_another_salt_restores_no_part_of_it(daemon: DaemonProcess) -> None:
    chat, text = Chat(daemon), unique("a part")
    chat(text, **SALT_A)
    assert chat(f"{text} And then?", **SALT_A)["prefix_cache"]["restored"] > 0
    assert_miss(chat(f"{text} And then?", **SALT_B))


def test_the_salt_of_vllm_is_the_same_salt(daemon: DaemonProcess) -> None:
    chat, text = Chat(daemon), unique("cache_salt")
    assert_miss(chat(text, cache_salt="a"))
    assert_hit(chat(text, **SALT_A))
    assert_hit(chat(text, **SALT_A, cache_salt="a"))
    completion = {"prompt": text, "max_tokens": 1, "temperature": 0}
    with daemon.client() as client:
        replies = [
            client.post("/v1/completions", json=completion | salt).json()
            for salt in ({"cache_salt": "a"}, SALT_A, {"cache_salt": "b"})
        ]
    assert [reply["prefix_cache"]["restored"] > 0 for reply in replies] == [False, True, False]


@pytest.mark.parametrize("fields", [{"prefix_cache": {"salt": ""}}, {"cache_salt": 1}, SALT_A | {"cache_salt": "b"}])
def test_a_wrong_salt_is_a_400_that_names_its_field(daemon: DaemonProcess, fields: dict[str, Any]) -> None:
    with daemon.client() as client:
        answer = client.post(CHAT, json=say("hello", **fields))
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] in ("prefix_cache.salt", "cache_salt")


def test_what_one_tenant_sent_moves_no_boundary_of_another(daemon: DaemonProcess) -> None:
    """`auto` looks at recent prompts: with one window for all, boundaries and reasons of misses would tell of them."""
    chat = Chat(daemon)
    seen = ("boundary", "boundary_reason", "restored", "saved", "miss_reason", "diverged_at")

    def reports(salt: str | None) -> list[dict[str, Any]]:
        options = {"scope": "auto:8"} | ({"salt": salt} if salt else {})
        told = []
        for system, user in (
            ("the window", "one"),
            ("the window", "two"),
            ("another window", "one"),
            ("another", "two"),
        ):
            messages = [{"role": "system", "content": unique(system)}, {"role": "user", "content": user}]
            report = chat("", messages=messages, prefix_cache=options)["prefix_cache"]
            told.append({name: report.get(name) for name in seen})
        return told

    alone = reports("window-1")
    assert alone[0]["miss_reason"] == "new"
    assert alone[1]["restored"] >= alone[0]["boundary"] > 0
    assert alone[3]["miss_reason"] == "new"
    assert reports("window-2") == alone
    reports(None)
    assert reports("window-3") == alone


def test_a_salt_separates_the_users_of_a_key_and_reaches_no_other_key(keyed: DaemonProcess) -> None:
    alice, bob, text = Chat(keyed, ALICE), Chat(keyed, BOB), unique("key and salt")
    assert_miss(alice(text, **SALT_A))
    for reply in (alice(text), alice(text, **SALT_B), bob(text, **SALT_A), bob(text, cache_salt=ALICE), bob(text)):
        assert_miss(reply)
    for reply in (alice(text, **SALT_A), alice(text), bob(text, cache_salt="a")):
        assert_hit(reply)


def test_tenants_stay_apart_after_a_kill_and_a_restart(chat_model: Path, tmp_path: Path, keys_file: Path) -> None:
    text, unsaved = unique("restart"), unique("restart, not saved by b")
    keys = {"api_keys": keys_file}
    with running_daemon(chat_model, tmp_path / "kv", **keys) as daemon:
        alice, bob = Chat(daemon, ALICE), Chat(daemon, BOB)
        first = [alice(text), alice(text, **SALT_A), bob(text)]
        alice(unsaved)
        daemon.wait_saved(ADMIN)
        assert daemon.stop(signal.SIGKILL) == -signal.SIGKILL
    with running_daemon(chat_model, tmp_path / "kv", **keys) as daemon:
        alice, bob = Chat(daemon, ALICE), Chat(daemon, BOB)
        assert_miss(alice(text, **SALT_B))
        assert bob(unsaved)["prefix_cache"]["restored"] == 0
        again = [alice(text), alice(text, **SALT_A), bob(text)]
        for reply in again:
            assert_hit(reply, source="disk")
        assert [reply["choices"] for reply in again] == [reply["choices"] for reply in first]
        assert daemon.stop() == 0
    with running_daemon(chat_model, tmp_path / "kv") as daemon:
        chat = Chat(daemon)
        # Without the keys nothing leads to what was saved under them, neither a salt nor the text of a key.
        assert chat(text, cache_salt=ALICE)["prefix_cache"]["restored"] == 0
        assert chat(text, **SALT_A)["prefix_cache"]["restored"] == 0
        assert chat(text)["prefix_cache"]["restored"] == 0


def test_nothing_on_disk_or_in_the_log_holds_a_key_or_a_salt(chat_model: Path, tmp_path: Path, keys_file: Path) -> None:
    with running_daemon(chat_model, tmp_path / "kv", api_keys=keys_file) as daemon:
        Chat(daemon, ALICE)(unique("secrets"), prefix_cache={"salt": "swordfish"})
        with httpx.Client(base_url=daemon.url, timeout=60) as client:
            bad = client.post(CHAT, json=HELLO_WITHOUT_KEY, headers={"Authorization": "Bearer swordfish-swordfish"})
        assert bad.status_code == 401
        assert daemon.stop() == 0
    files = [path for path in (tmp_path / "kv").rglob("*") if path.is_file()]
    assert any(path.name == "data.mdb" for path in files)
    stored = b"".join(path.read_bytes() for path in files)
    for secret in (ALICE, ADMIN, "swordfish"):
        assert secret.encode() not in stored
        assert secret not in daemon.log


HELLO_WITHOUT_KEY = say("hello", cache_salt="swordfish")
