"""A session that exceeds the model's positions, over HTTP."""

from __future__ import annotations

from pathlib import Path

import pytest

from diskprefix.app import load_engine
from diskprefix.cache.resources import open_store
from diskprefix.errors import SettingsError
from diskprefix.settings import Settings
from tests.agent_bodies import words
from tests.server.daemon_process import reply_to, wait_until
from tests.server.scripted import real_app, started_app


def test_a_session_goes_on_beyond_the_models_positions_and_its_turns_hit(chat_model: Path, tmp_path: Path) -> None:
    messages = [{"role": "system", "content": words(0, 20)}]
    for turn in range(12):
        messages += [{"role": "user", "content": words(turn, 40)}, {"role": "assistant", "content": words(turn, 30)}]
    with real_app(chat_model, tmp_path / "kv", prefill_compression="auto") as server, server.client() as client:
        bodies = [{"messages": messages[:length], "max_tokens": 2, "temperature": 0} for length in (22, 24)]
        replies = [reply_to(client, body) for body in bodies]
    first, second = (reply["prefix_cache"] for reply in replies)
    assert first["left_out"] == second["left_out"]
    assert first["left_out"]["messages"] > 4
    assert first["left_out"]["first"] == "messages.2"
    assert (first["boundary"], first["boundary_reason"], first["saved"]) == (0, "left_out", "none")
    assert second["restored"] >= replies[0]["usage"]["prompt_tokens"] - 8
    assert second["source"] == "memory"


@pytest.mark.parametrize("threshold", ["2048", "5000"])
def test_a_threshold_that_no_prompt_can_exceed_ends_the_start_with_an_error(
    chat_model: Path, tmp_path: Path, threshold: str
) -> None:
    folder = tmp_path / "kv"
    with started_app(chat_model, load_engine, prefill_compression=threshold, kv_cache_dir=folder) as server:
        wait_until(lambda: server.daemon.failure, "the start failed")
        assert isinstance(server.daemon.failure, SettingsError)
    open_store(Settings(kv_cache_dir=folder)).close()
