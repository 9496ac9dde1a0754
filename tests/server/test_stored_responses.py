"""Stored responses of a real daemon: across a kill, and while another process purges the store."""

from __future__ import annotations

import signal
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import OpenAI

from diskprefix.store.purge import PurgeFilter, purge
from diskprefix.store.store import Store
from tests.server.daemon_process import DaemonProcess, running_daemon

MODEL = "tiny-chat"
FIELDS: dict[str, Any] = {"model": MODEL, "max_output_tokens": 8, "temperature": 0}
INPUT = "Name three rivers and tell me where each of them begins. " * 3


def client_of(daemon: DaemonProcess) -> OpenAI:
    return OpenAI(base_url=f"{daemon.url}/v1", api_key="none", max_retries=0)


def test_a_conversation_goes_on_after_a_kill_and_ends_with_a_purge(chat_model: Path, tmp_path: Path) -> None:
    cache = tmp_path / "kv"
    with running_daemon(chat_model, cache) as daemon, client_of(daemon) as client:
        first = client.responses.create(input=INPUT, **FIELDS)
        second = client.responses.create(input="And lakes?", previous_response_id=first.id, **FIELDS)
        deleted = client.responses.create(input="x", **FIELDS)
        daemon.wait_saved()
        client.responses.delete(deleted.id)
        daemon.stop(signal.SIGKILL)
    with running_daemon(chat_model, cache) as daemon, client_of(daemon) as client:
        again = client.responses.retrieve(second.id)
        assert again.to_dict() == second.to_dict()
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(deleted.id)
        third = client.responses.create(input="And seas?", previous_response_id=second.id, **FIELDS)
        items = list(client.responses.input_items.list(third.id, order="asc"))
        assert [getattr(item, "role", None) for item in items] == ["user", "assistant"] * 2 + ["user"]
        assert third.usage is not None
        assert second.usage is not None
        # What was stored is said again word for word, so the turns before are restored, with their replies.
        assert third.usage.input_tokens_details.cached_tokens > second.usage.input_tokens
        daemon.wait_saved()
        with closing(Store(cache)) as store:
            assert purge(store, PurgeFilter(model=MODEL), time.time(), lambda _: None).notes >= 3
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(third.id)
