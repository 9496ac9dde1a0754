"""The file of packed weights is written while there is no request, and beside requests if there always are."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from diskprefix.daemon.engine.idle import kept_weights
from diskprefix.daemon.engine.idle.kept_weights import KeptWeights
from diskprefix.daemon.engine.loop import Engine
from diskprefix.native.library import operators
from diskprefix.runtime.files import packed_file
from diskprefix.runtime.load import packed_weights
from tests.daemon.engine.driving import BusyClient, load, request, running, tokens
from tests.runtime.plan import tiny
from tests.waiting import wait_for

pytestmark = pytest.mark.usefixtures("cache")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "weights"


@pytest.fixture
def engine(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Engine:
    if operators() is None:
        pytest.skip("no compiled operators")
    monkeypatch.setattr(packed_weights, "LEAST_BYTES", 0)
    monkeypatch.setattr(packed_file, "_READ_BYTES", 1024)
    model = tiny.write_gguf(tmp_path / "tiny.gguf", quantised="Q4_1")
    return load(model, tmp_path / "kv", block_size=16, packed_weights=str(folder))


def is_kept(folder: Path) -> bool:
    return folder.exists() and [file.suffix for file in folder.iterdir()] == [".packed"]


def test_an_idle_daemon_keeps_its_packed_weights(engine: Engine, folder: Path) -> None:
    with running(engine):
        wait_for(lambda: is_kept(folder))


def test_a_request_between_two_pieces_is_answered_and_the_file_goes_on(
    engine: Engine, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answered, own = list[bool](), KeptWeights.next_steps
    with running(engine) as inbox:

        def ask(self: KeptWeights) -> object:
            if not answered:
                answered.append(False)
                inbox.submit(request(tokens(40), max_tokens=2), lambda _: answered.append(True))
            return own(self)

        monkeypatch.setattr(KeptWeights, "next_steps", ask)
        wait_for(lambda: is_kept(folder) and True in answered)


def test_a_daemon_that_is_never_idle_keeps_them_too(
    engine: Engine, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ahead, own = [0.0], KeptWeights.next_steps
    monkeypatch.setattr(engine, "clock", lambda: time.perf_counter() + ahead[0])
    # So that nothing is written before there are requests.
    monkeypatch.setattr(KeptWeights, "next_steps", lambda self: own(self) if self.goes_beside else None)
    with running(engine) as inbox, BusyClient(inbox) as client:
        wait_for(lambda: client.num_answered > 2)
        assert not folder.exists()
        ahead[0] = 2 * kept_weights._IDLE_WITHIN_S
        wait_for(lambda: is_kept(folder))


def test_what_fails_ends_the_work_and_no_request(
    engine: Engine, folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> object:
        raise ValueError("a bug")

    monkeypatch.setattr(packed_weights, "write_packed", fail)
    given_up, own = list[str](), KeptWeights.give_up

    def give_up(self: KeptWeights, reason: str) -> None:
        given_up.append(reason)
        own(self, reason)

    monkeypatch.setattr(KeptWeights, "give_up", give_up)
    answered = list[object]()
    with running(engine) as inbox:
        wait_for(lambda: bool(given_up))
        inbox.submit(request(tokens(40), max_tokens=2), answered.append)
        wait_for(lambda: len(answered) > 2)
    assert given_up == ["a bug"]
    assert not list(folder.iterdir())
    assert "Traceback" not in caplog.text
