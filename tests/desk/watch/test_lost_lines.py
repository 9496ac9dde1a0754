"""`inspect --lost` shows the line that broke a prefix in clear as long as its prompt is stored: to who may read the
store, and nowhere else."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from diskprefix.daemon.chat.canonicalisers import shape_of
from diskprefix.desk.watch.inspect.stored_text import line_at
from diskprefix.prefixstore.store.ghosts import newest_first
from diskprefix.prefixstore.store.store import Store
from diskprefix.values import SourceText
from tests.agent_bodies import words
from tests.daemon.server.chat_model import weights_of, write_chat_model
from tests.daemon.server.daemon_process import DaemonProcess, command, reply_to, running_daemon

SYSTEM = words(1, 300)
SECRETS = "The password of Marmot 4711 is Kumquat.", "The password of Beaver 8052 is Quinces."
SHAPE = shape_of(SECRETS[1])


def ask(daemon: DaemonProcess, line: str, **cache: Any) -> Any:
    messages = [{"role": "system", "content": f"{line}\n{SYSTEM}"}, {"role": "user", "content": "hello"}]
    with daemon.client() as client:
        return reply_to(client, {"model": "", "messages": messages, "max_tokens": 1}, **cache)["prefix_cache"]


def lost_row(folder: Path) -> dict[str, Any]:
    (row,) = [row for row in command("inspect", folder, "--lost")["lost"] if row["cause"] == "diverged"]
    assert row["line"] == SHAPE
    return dict(row)


def run_two(model: Path, folder: Path, **cache: Any) -> str:
    """Asks twice, with another line the second time. Returns the log."""
    with running_daemon(model, folder) as daemon:
        reports = [ask(daemon, line, **cache) for line in SECRETS]
        daemon.wait_saved()
        daemon.process.send_signal(signal.SIGTERM)
        assert daemon.process.wait(60) == 0
    assert reports[1]["broken_by"]["line"] == SHAPE, "a client is shown the shape"
    return daemon.log


@pytest.mark.parametrize("form", ["folder", "gguf"])
def test_the_line_is_clear_in_the_list_and_masked_in_log_and_reply(form: str, chat_model: Path, tmp_path: Path) -> None:
    is_folder = form == "folder"
    model = chat_model if is_folder else weights_of(write_chat_model(tmp_path / "model", runtime="llama"))
    log = run_two(model, tmp_path / "kv")
    assert SHAPE in log
    assert not [word for word in ("Marmot", "Beaver", "Kumquat", "Quinces") if word in log]
    assert lost_row(tmp_path / "kv")["what"].endswith(f": {SECRETS[1]}")


def test_a_deletion_of_the_prompt_takes_the_clear_line_with_it(chat_model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "kv"
    run_two(chat_model, folder)
    for entry in command("inspect", folder)["entries"]:
        if "Beaver" in entry["preview"]:
            command("purge", folder, entry["id"], "--yes")
    shown = command("inspect", folder, "--lost")
    assert "Beaver" not in str(shown)


def test_a_prompt_that_has_expired_leaves_the_masked_line(chat_model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "kv"
    run_two(chat_model, folder)
    store = Store(folder, clock=lambda: time.time() + 600)
    with store.snapshot() as snapshot:
        (root,) = [root for root, _ in snapshot.roots() if next(newest_first(snapshot, root), None)]
    store.evictor.expire(60.0)
    with store.snapshot() as snapshot:
        assert next(newest_first(snapshot, root), None) is None
    store.close()
    what = lost_row(folder)["what"]
    assert "Beaver" not in what
    assert what.endswith(f"{SHAPE} (letters are masked as x, digits as #)")


def test_what_is_not_to_be_saved_stays_masked(chat_model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "kv"
    with running_daemon(chat_model, folder) as daemon:
        ask(daemon, SECRETS[0])
        ask(daemon, SECRETS[1], save=False)
        daemon.wait_saved()
        daemon.process.send_signal(signal.SIGTERM)
        assert daemon.process.wait(60) == 0
    assert "Beaver" not in lost_row(folder)["what"]
    assert b"Quinces" not in (folder / "data.mdb").read_bytes()


@pytest.mark.parametrize("window", [3, 5, 1024])
def test_the_line_of_a_token_is_that_of_the_text(window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each character is a token, and some are two, the second of which spells nothing."""
    monkeypatch.setattr("diskprefix.desk.watch.inspect.stored_text._TOKENS", window)
    text = "one\ntwo words\n\n\nlast ünd line"
    ids = np.array([code for char in text for code in ([ord(char), 1] if ord(char) > 127 else [ord(char)])], np.int32)

    def decode(token_ids: Any) -> str:
        return "".join(chr(token) for token in token_ids.tolist() if token != 1)

    starts = [len(decode(ids[: number + 1])) - 1 for number in range(len(ids))]
    source = SourceText(text, np.array(starts, np.int32))
    for token in range(len(ids)):
        whole = source.line_at(token) if ids[token] != 1 else text.split("\n")[-1]
        assert whole.startswith(line_at(decode, ids, token)), token
        if window > len(ids):
            assert line_at(decode, ids, token) == whole
