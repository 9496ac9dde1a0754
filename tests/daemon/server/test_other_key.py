"""A miss that another key of the same user would have hit says so, and tells nothing of other users' prompts."""

from __future__ import annotations

import dataclasses
import signal
from pathlib import Path
from typing import Any

import httpx
import pytest

from diskprefix.daemon.server import keys
from diskprefix.daemon.server.keys import ApiKeys
from diskprefix.values import Tenant
from tests.daemon.server.daemon_process import DaemonProcess, cache_states, command, running_daemon, wait_until
from tests.daemon.server.other_user import OTHER_USER, url_as
from tests.daemon.server.test_auth import ADMIN, ALICE, BOB, NAMELESS, bearer, write_keys
from tests.daemon.server.test_known_user import asked

ALICE_NEW, ALSO_NAMELESS = "alice-new-0123456789abcdef", "also-nameless-0123456789"
PROMPT = "The keys of the workshop are in the drawer, and nobody else should know. " * 8
WRONG = PROMPT.replace("drawer", "garden")


def missed(daemon: DaemonProcess, key: str, prompt: str = PROMPT, **cache: Any) -> Any:
    with daemon.client(key) as client:
        report = asked(client, prompt, **cache)["prefix_cache"]
    assert report["restored"] == 0
    return report["miss_reason"]


def test_a_miss_says_that_another_key_with_the_same_name_would_have_hit(chat_model: Path, tmp_path: Path) -> None:
    lines = f"alice {ALICE}", f"alice {ALICE_NEW}", f"bob {BOB}", f"admin {ADMIN}", NAMELESS, ALSO_NAMELESS
    folder = tmp_path / "kv"
    with running_daemon(chat_model, folder, api_keys=write_keys(tmp_path / "keys", *lines)) as daemon:
        for key in (ALICE, NAMELESS):
            for salt in (None, "a"):
                missed(daemon, key, f"{salt}: {PROMPT}", salt=salt, save=True, scope="full")
        with daemon.client(ADMIN) as admin:
            wait_until(lambda: all(not state["pending"] for state in cache_states(admin)), "all is saved")
        assert missed(daemon, ALICE_NEW, f"None: {PROMPT}") == "other_key"
        assert missed(daemon, ALICE_NEW, f"a: {PROMPT}", salt="a") == "other_key"
        # A right guess with another salt or another user's key gets the answer of a wrong one.
        for key, salt in ((ALICE_NEW, "b"), (BOB, None), (BOB, "a"), (ALSO_NAMELESS, None), (ALSO_NAMELESS, "a")):
            wrong = missed(daemon, key, f"None: {WRONG}", salt=salt)
            assert wrong != "other_key"
            for right in (f"None: {PROMPT}", f"a: {PROMPT}"):
                assert missed(daemon, key, right, salt=salt) == wrong
        daemon.process.send_signal(signal.SIGTERM)
        assert daemon.process.wait(60) == 0
    lost = command("inspect", folder, "--lost")["lost"]
    (row,) = [row for row in lost if row["cause"] == "other_key"]
    assert (row["requests"], row["client"].split()[0]) == (2, "alice")
    assert row["tokens"] > 100
    assert "one of the user's keys" in row["advice"]


def test_without_keys_no_answer_names_another_tenant(chat_model: Path, tmp_path: Path) -> None:
    """Neither a salt of the same user, nor another user: all of a user's programs have one tenant."""
    with running_daemon(chat_model, tmp_path / "kv") as daemon:
        missed(daemon, "unused", save=True, scope="full")
        missed(daemon, "unused", f"a: {PROMPT}", salt="a", save=True, scope="full")
        daemon.wait_saved()
        for salt in (None, "b"):
            reasons = [missed(daemon, "unused", f"a: {text}", salt=salt) for text in (PROMPT, WRONG)]
            assert "other_key" not in reasons
        with url_as(OTHER_USER, daemon.url) as url, httpx.Client(base_url=url, timeout=60) as other:
            for headers in ({}, bearer("unused")):
                guesses = [asked(other, text, headers)["prefix_cache"] for text in (PROMPT, WRONG)]
                assert guesses[0] == guesses[1]
                assert guesses[0]["miss_reason"] != "other_key"


def test_only_keys_with_the_same_name_are_one_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keys, "_MAX_KEYS", 3)
    many = [f"alice key-{number}-0123456789abcdef" for number in range(5)]
    short = str(Tenant.of_key(NAMELESS))[:8]
    access = ApiKeys(write_keys(tmp_path / "keys", *many, f"bob {BOB}", NAMELESS, f"{short} {ALSO_NAMELESS}"))

    def others(key: str) -> list[Tenant]:
        caller = access.caller(f"Bearer {key}")
        assert caller is not None
        assert caller.tenant == dataclasses.replace(caller.tenant, others=())
        return list(caller.tenant.others)

    of_alice = [Tenant.of_key(line.split()[1]) for line in many]
    assert others(many[0].split()[1]) == of_alice[1:3]
    assert others(many[4].split()[1]) == of_alice[:3]
    assert others(BOB) == others(NAMELESS) == others(ALSO_NAMELESS) == []
