"""What is stored stays in use after an upgrade that changed no bit; after another one, nothing of it is restored."""

from __future__ import annotations

import logging
import runpy
import shutil
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from diskprefix.engine import measured_model
from diskprefix.engine.ahead_jobs import AheadModel
from diskprefix.engine.idle_work import IdleWork
from diskprefix.engine.loop import Engine
from diskprefix.kv.sequence import KVSequence
from diskprefix.model import plan_fingerprint
from diskprefix.native import build
from diskprefix.store.store import Store
from diskprefix.tokens import TokenIds
from diskprefix.values import SHARED, CacheReport
from tests.engine.driving import done, load, request, run, running, tokens, write_model
from tests.server.daemon_process import DaemonProcess, ask, clean_environment, serve_flags
from tests.waiting import wait_for

SALTED = SHARED.with_salt("another user")


@pytest.fixture(params=["llama", "qwen3_next"])
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return write_model(tmp_path / "model", request.param)


Opened = Callable[..., Engine]


@pytest.fixture
def opened(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Opened]:
    """Opens an engine as a build does whose sources and bits have these names."""
    engines = list[Engine]()

    def open_as(build: str, bits: str = "bits", **settings: Any) -> Engine:
        for engine in engines:
            assert engine.close()
        engines.clear()
        monkeypatch.setattr(measured_model, "build_of", lambda _: build)
        monkeypatch.setattr(plan_fingerprint, "bits_of_build", lambda _: bits)
        engines.append(load(model, tmp_path / "kv", **settings))
        return engines[0]

    yield open_as
    for engine in engines:
        assert engine.close()


def said(engine: Engine, num_tokens: int = 200, **options: Any) -> CacheReport:
    report = done(run(engine, tokens(num_tokens), **options)).cache
    assert report is not None
    return report


def wait_for_recheck(engine: Engine) -> None:
    with running(engine):
        wait_for(lambda: not engine.cache.must_recheck)


def test_other_sources_with_the_same_bits_use_what_is_stored(opened: Opened) -> None:
    assert said(opened("a comment")).restored == 0
    assert said(opened("another comment")).restored == 200
    assert said(opened("a comment", "other bits")).restored == 0


def test_a_prompt_that_another_build_has_stored_is_upgraded(opened: Opened) -> None:
    first = opened("one", "bits")
    for tenant in (SHARED, SALTED):
        assert said(first, tenant=tenant).miss_reason == "new"
    second = opened("two", "other bits")
    for tenant in (SHARED, SALTED):
        missed = said(second, tenant=tenant)
        assert (missed.restored, missed.miss_reason) == (0, "upgraded")
        # Now it is stored.
        assert said(second, tenant=tenant).restored == 200
    other = done(run(second, tokens(200, seed=1))).cache
    assert other is not None
    assert other.miss_reason == "new"


def test_stored_blocks_are_computed_again_once_and_stay(opened: Opened, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    first = opened("one")
    assert not first.cache.must_recheck
    for tenant in (SHARED, SALTED):
        said(first, tenant=tenant)
    second = opened("two")
    assert second.cache.must_recheck
    wait_for_recheck(second)
    assert "2 stored prompts looked at" in caplog.text
    assert said(second).restored == 200
    assert not opened("two").cache.must_recheck


def test_a_build_that_computes_other_bits_than_what_is_stored_drops_it(
    opened: Opened, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    first = opened("one")
    for tenant in (SHARED, SALTED):
        said(first, tenant=tenant)
    second = opened("two")
    flipped = _flipping_one_bit(monkeypatch)
    wait_for_recheck(second)
    assert flipped
    assert "which is dropped" in caplog.text
    stats = second.cache.stats()
    assert (stats["outdated"], stats["blocks"], stats["entries"]) == (1, 0, 0)
    monkeypatch.undo()
    assert said(second).restored == 0
    assert said(second).restored == 200


def _flipping_one_bit(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Has each step of the recheck compute another bit."""
    flipped, compute = list[int](), IdleWork.compute

    def flip(self: IdleWork, model: AheadModel, sequence: KVSequence, token_ids: TokenIds) -> None:
        compute(self, model, sequence, token_ids)
        page = (sequence.tables[0].pages or sequence.states)[-1]
        assert page is not None
        assert page.rows is not None
        page.rows[0, 0] ^= 1
        flipped.append(sequence.num_tokens)

    monkeypatch.setattr(IdleWork, "compute", flip)
    return flipped


def test_a_request_goes_before_the_recheck(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    said(opened("one"))
    second = opened("two")
    used, ran, compute = second.pages.pool.used_bytes, list[int](), IdleWork.compute
    with running(second) as inbox:

        def note(self: IdleWork, model: AheadModel, sequence: KVSequence, token_ids: TokenIds) -> None:
            if not ran:
                inbox.submit(request(tokens(100, seed=5)), lambda _: None)
            ran.append(sequence.num_tokens)
            compute(self, model, sequence, token_ids)

        monkeypatch.setattr(IdleWork, "compute", note)
        wait_for(lambda: not second.cache.must_recheck)
    assert ran[0] == ran[1], "it began again"
    second.pages.forget_idle()
    wait_for(lambda: second.pages.pool.used_bytes == used)


def test_blocks_of_another_build_are_evicted_first(opened: Opened) -> None:
    said(opened("one"))
    second = opened("two", "other bits")
    said(second)
    assert second.cache.writer.flush(10)
    store: Store = second.cache.store
    with store.snapshot() as snapshot:
        (old,) = snapshot.outdated_roots(second.cache.root_record(SHARED).identity, "")
        is_useless = snapshot.saves_nothing(store.evictor.served)
        assert is_useless is not None
        useless = {snapshot.node(name).root for name in snapshot.keys("usage") if is_useless(name)}  # type: ignore[union-attr]
    assert old in useless
    # Of a model with states, blocks are of no use without a checkpoint behind them.
    assert useless == {old} or (second.cache.layout.states and useless == {old, second.cache.root})


OF_EXP2 = struct.pack("<f", 5.5504109e-2)
"""A factor in `exp2` (`source/vector.h`), of which attention and gates are made."""


def other_build(folder: Path, *, flips_a_bit: bool) -> dict[str, str]:
    """Copies the package with other sources and the library that would be made of them, in which a bit of each kernel
    may be another one. Returns the environment of a process that runs the copy."""
    own_package = build.SOURCES.parents[1]
    package = shutil.copytree(own_package, folder / "diskprefix")
    (folder / "policies").symlink_to(own_package.parent / "policies")
    for source, comment in (("native/calls.py", "#"), ("native/source/vector.h", "//")):
        with (package / source).open("a") as file:
            file.write(f"{comment} {folder.name}\n")
    library, own = package / "native" / build.LIBRARY.name, build.digest().encode()
    digest = runpy.run_path(str(package / "native/build.py"))["digest"]().encode()
    content = library.read_bytes()
    assert own in content
    assert OF_EXP2 in content
    flipped = bytes((OF_EXP2[0], OF_EXP2[1] ^ 0x40, *OF_EXP2[2:]))
    library.write_bytes(content.replace(own, digest).replace(OF_EXP2, flipped if flips_a_bit else OF_EXP2))
    return clean_environment(PYTHONPATH=str(folder), PYTHONSAFEPATH="1")


@pytest.mark.slow
def test_daemons_of_other_builds_restore_what_has_their_bits(chat_model: Path, tmp_path: Path) -> None:
    flags, said = serve_flags(chat_model, tmp_path / "kv"), list[dict[str, Any]]()
    for name, flips_a_bit in (("own", False), ("same bits", False), ("a flipped bit", True)):
        environment = None if name == "own" else other_build(tmp_path / name, flips_a_bit=flips_a_bit)
        with DaemonProcess(*flags, environment=environment, fresh=environment is not None) as daemon:
            said.append(ask(daemon.wait_ready(), "Name three rivers. ")["prefix_cache"])
            if name == "same bits":
                daemon.wait_for_line("this version computes the bits of an earlier one: 1 stored prompt looked at")
            daemon.wait_saved()
            daemon.stop()
    own, same, other = said
    assert (own["restored"], own["miss_reason"]) == (0, "new")
    assert (same["restored"], same["source"]) == (own["boundary"], "disk")
    assert (other["restored"], other["miss_reason"]) == (0, "upgraded")
