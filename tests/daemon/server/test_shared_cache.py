"""Who finds again what a real daemon has saved: tenants, processes, machines; after a kill, and for how long."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from diskprefix.prefixstore.cache.cache import PrefixCache
from tests.daemon.server.daemon_process import (
    DaemonProcess,
    ask,
    command,
    props,
    reply_to,
    running_daemon,
    text_of,
    wait_until,
)
from tests.daemon.server.scripted import real_app
from tests.daemon.server.test_auth import ADMIN, ALICE, BOB, CHAT
from tests.examples import thorough
from tests.object_server import object_server


def unique(test: str) -> str:
    """A question that no other test asks; it is asked six times over."""
    return f"{test}: name three rivers and tell me where each of them begins. "


@pytest.fixture(scope="module")
def keyed(chat_model: Path, keys_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    with running_daemon(chat_model, tmp_path_factory.mktemp("tenants") / "kv", api_keys=keys_file) as daemon:
        yield daemon


def assert_miss(reply: dict[str, Any]) -> None:
    report = reply["prefix_cache"]
    assert (report["restored"], report["saved"]) == (0, "queued")
    assert reply["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


def assert_hit(reply: dict[str, Any], source: str | None = None) -> None:
    """The whole prompt is restored; all but one token if its logits are still being compressed."""
    assert reply["usage"]["prompt_tokens"] - reply["prefix_cache"]["restored"] in (0, 1)
    assert source in (None, reply["prefix_cache"]["source"])


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    ("with_keys", "first", "others"),
    [
        (False, (None, None), [(None, "a")]),
        (False, (None, "a"), [(None, "b"), (None, None), (None, "A"), (None, "a ")]),
        (True, (ALICE, "a"), [(ALICE, None), (ALICE, "b"), (BOB, "a"), (BOB, ALICE), (BOB, None)]),
    ],
    ids=["unsalted", "salts", "keys"],
)
def test_a_tenant_restores_only_its_own_state(
    request: pytest.FixtureRequest, with_keys: bool, first: tuple[Any, Any], others: list[tuple[Any, Any]]
) -> None:
    """A tenant is a key and a salt. Others are answered alike, but they compute it, also what a longer prompt has of
    it."""
    daemon: DaemonProcess = request.getfixturevalue("keyed" if with_keys else "daemon")
    question = unique(request.node.callspec.id)
    replies = []
    for key, salt in (first, *others):
        replies.append(ask(daemon, question, salt=salt, key=key))
        assert_miss(replies[-1])
    for key, salt in (first, *others):
        replies.append(ask(daemon, question, salt=salt, key=key))
        assert_hit(replies[-1])
    assert {text_of(reply) for reply in replies} == {text_of(replies[0])}
    key, salt = first
    longer = f"{question} And then? "
    assert ask(daemon, longer, salt=salt, key=key)["prefix_cache"]["restored"] > 0
    assert_miss(ask(daemon, longer, salt="somebody else", key=key))


def test_a_tenants_prompts_move_no_boundary_of_another(daemon: DaemonProcess) -> None:
    """`auto` looks at recent prompts: with one window for all, boundaries and reasons of misses would tell of them."""
    seen = ("boundary", "boundary_reason", "restored", "saved", "miss_reason", "diverged_at")

    def reports(salt: str | None) -> list[dict[str, Any]]:
        told = []
        for system, user in (
            *(("the window", "one"), ("the window", "two")),
            *(("another window", "one"), ("another", "two")),
        ):
            messages = [{"role": "system", "content": unique(system) * 3}, {"role": "user", "content": user}]
            body = {"messages": messages, "max_tokens": 4, "temperature": 0}
            with daemon.client() as client:
                report = reply_to(client, body, scope="auto:8", salt=salt)["prefix_cache"]
            told.append({name: report.get(name) for name in seen})
        return told

    alone = reports("window-1")
    assert alone[0]["miss_reason"] == "new"
    assert alone[0]["boundary"] > alone[1]["restored"] > 0
    assert alone[3]["miss_reason"] == "new"
    assert reports("window-2") == alone
    reports(None)
    assert reports("window-3") == alone


def test_a_kill_keeps_tenants_apart_and_leaves_no_key_or_salt(
    chat_model: Path, tmp_path: Path, keys_file: Path
) -> None:
    folder, question, unsaved = tmp_path / "kv", unique("restart"), unique("restart, not saved by bob")
    mine = [(ALICE, None), (ALICE, "swordfish"), (BOB, None)]
    logs = []
    with running_daemon(chat_model, folder, api_keys=keys_file) as daemon:
        first = [ask(daemon, question, salt=salt, key=key) for key, salt in mine]
        ask(daemon, unsaved, key=ALICE)
        with httpx.Client(base_url=daemon.url) as client:
            wrong = client.post(CHAT, json={"messages": []}, headers={"Authorization": "Bearer swordfish-swordfish"})
        assert wrong.status_code == 401
        daemon.wait_saved(ADMIN)
        assert daemon.stop(signal.SIGKILL) == -signal.SIGKILL
        logs.append(daemon.log)
    with running_daemon(chat_model, folder, api_keys=keys_file) as daemon:
        assert_miss(ask(daemon, question, salt="b", key=ALICE))
        assert_miss(ask(daemon, unsaved, key=BOB))
        for (key, salt), before in zip(mine, first, strict=True):
            again = ask(daemon, question, salt=salt, key=key)
            assert_hit(again, source="disk")
            assert again["choices"] == before["choices"]
        assert daemon.stop() == 0
        logs.append(daemon.log)
    with running_daemon(chat_model, folder) as daemon:
        # Without the keys nothing leads to what was saved under them, neither a salt nor the text of a key.
        for salt in (ALICE, "swordfish", None):
            assert_miss(ask(daemon, question, salt=salt))
        assert daemon.stop() == 0
    stored = b"".join(path.read_bytes() for path in folder.rglob("*") if path.is_file())
    for secret in (ALICE, ADMIN, "swordfish"):
        assert secret.encode() not in stored
        assert secret not in "".join(logs)


def test_two_daemons_see_each_other_and_commands_run_beside_them(chat_model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "kv"
    with running_daemon(chat_model, folder) as daemon, running_daemon(chat_model, folder) as other:
        for number, (writer, reader) in enumerate([(daemon, other), (other, daemon)] * 2):
            question = f"Where does river number {number} rise, and where does it end? "
            first = ask(writer, question)
            writer.wait_saved()
            second = ask(reader, question)
            assert second["prefix_cache"]["restored"] == first["usage"]["prompt_tokens"]
            assert second["prefix_cache"]["source"] == "disk"
            assert text_of(first) == text_of(second) == text_of(ask(writer, question, "off"))
            assert len(command("inspect", folder)["entries"]) == number + 1
            assert command("verify", folder)["problems"] == []
        assert daemon.stop() == 0
        assert ask(other, "Where does river number 0 rise, and where does it end? ")["prefix_cache"]["restored"] > 0


def remote_of(daemon: DaemonProcess) -> dict[str, Any]:
    with daemon.client() as client:
        state: dict[str, Any] = props(client)["full_cache"]["state"]["remote"]
    return state


@thorough
def test_two_daemons_share_a_bucket_and_no_fault_of_it_changes_an_answer(
    chat_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "key").write_text("a key that both daemons share")
    (tmp_path / "key").chmod(0o600)
    flags: dict[str, Any] = {"namespace_key_file": tmp_path / "key", "remote_write": "all"}
    question = "Where does the river rise, and where does it end? "
    with object_server(tmp_path / "objects") as server:
        flags["remote_tier"] = server.url
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        with (
            running_daemon(chat_model, tmp_path / "one", **flags) as daemon,
            running_daemon(chat_model, tmp_path / "other", **flags) as other,
        ):
            first = ask(daemon, question)
            wait_until(lambda: (state := remote_of(daemon))["written"] and not state["offered"], "it is shared")
            second = ask(other, question)
            assert second["prefix_cache"]["source"] == "remote"
            # The prompt's last tokens are not worth a request.
            restored = second["prefix_cache"]["restored"]
            assert restored >= first["usage"]["prompt_tokens"] - 32
            assert text_of(second) == text_of(first)
            assert not any(remote_of(other)["refused"].values())
            with other.client() as client:
                metrics = client.get("/metrics").text
            assert f'diskprefix_prompt_tokens_total{{source="remote"}} {restored}.0' in metrics
            assert 'diskprefix_remote_refused_objects_total{reason="mac"} 0.0' in metrics
            for fault in ("partial", "hang"):
                server.reset()
                faulty = f"What happens while the bucket answers with the fault {fault}? "
                first = ask(daemon, faulty)
                server.fault = fault
                assert text_of(ask(other, faulty)) == text_of(first)
            state = remote_of(other)
            assert state["failed"] + state["late"] >= 2
            server.reset()


TTL_S = 300


def records(cache: PrefixCache) -> Any:
    with cache.store.snapshot() as snapshot:
        return snapshot.usages().records


def test_an_entry_with_a_time_to_live_expires_although_it_was_reused(
    chat_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = {"messages": [{"role": "user", "content": unique("five minutes") * 2}], "max_tokens": 1}
    flags = {"kv_memory_keeps": False, "kv_cache_gate": "off"}
    with real_app(chat_model, tmp_path / "kv", **flags) as server, server.client() as client:

        def told() -> Any:
            return reply_to(client, body, scope="full", ttl="5m")["prefix_cache"]

        cache = server.engine.cache
        assert told()["saved"] == "queued"
        wait_until(lambda: len(records(cache)) and not cache.writer.pending, "the prompt is stored")
        num_nodes = len(records(cache))
        assert told()["restored"] > 0
        wait_until(lambda: (records(cache)["restores"] == 1).all(), "the reuse is recorded")
        assert (records(cache)["ttl_s"] == TTL_S).all(), "every node of it, still"
        assert cache.finish_aside(30)
        assert cache.writer.flush(30)
        later = time.time() + TTL_S
        for now, num_expired in ((later - 60, 0), (later + 60, num_nodes)):
            monkeypatch.setattr(cache.store, "clock", lambda now=now: now)
            assert cache.store.evictor.expire(0) == num_expired
        assert cache.store.counts()["prompts"] == 0, "nor is the prompt remembered"
        # As the writer does after it has removed what has expired.
        cache.namespaces.forget_deleted()
        assert told()["miss_reason"] == "new"
