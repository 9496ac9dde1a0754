"""Workers and fronts that are killed in the middle of a load, of a swap and of a save; two fronts on one folder."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.extras.front.test_front_processes import family, is_gone, wait_for, wait_for_worker
from tests.extras.front.test_models_in_turn import ONE_OF_TWO, body, conversation, several
from tests.server.chat_model import write_chat_model
from tests.server.daemon_process import DaemonProcess, wait_until
from tests.server.process.test_process import CHAT

TURNS = 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("faults")
    for seed, name in enumerate(("ash", "birch"), start=7):
        write_chat_model(folder / name, seed=seed)
    return folder


def ask(daemon: DaemonProcess, model: str) -> httpx.Response:
    return httpx.post(daemon.url + CHAT, json=body(model), timeout=120)


def replies(daemon: DaemonProcess, model: str) -> list[str]:
    with daemon.client() as client:
        return [reply for reply, _, _ in conversation(client, model, TURNS)]


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
                assert [(reply, again) for reply, again, _ in conversation(client, "ash", TURNS)] == [
                    (reply, 0) for reply in expected
                ]
            assert daemon.stop() == 0


def test_two_fronts_on_one_folder_both_serve_and_find_what_the_other_saved(folder: Path, tmp_path: Path) -> None:
    with (
        several(folder, tmp_path / "kv", disk_prefix_cache="full") as one,
        several(folder, tmp_path / "kv", disk_prefix_cache="full") as other,
    ):
        with ThreadPoolExecutor() as pool:
            both = [pool.submit(replies, daemon, name) for daemon in (one, other) for name in ("ash", "birch")]
        said = [talk.result() for talk in both]
        assert said[:2] == said[2:]
        assert (one.stop(), other.stop()) == (0, 0)
    with several(folder, tmp_path / "kv") as daemon:
        for name, expected in zip(("ash", "birch"), said, strict=False):
            with daemon.client() as client:
                found = list(conversation(client, name, TURNS))
            assert [reply for reply, _, _ in found] == expected
            assert all(again == 0 for _, again, _ in found)
        assert daemon.stop() == 0
