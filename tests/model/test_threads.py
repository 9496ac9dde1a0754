"""Whether the number of compute threads belongs to the identity: measured on the model, for each number."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaMLP

from diskprefix import PrefixCacheSession
from diskprefix.app import load_engine
from diskprefix.engine.engine import Engine
from diskprefix.kv.arena import KVArena
from diskprefix.model import threads
from diskprefix.model.rehearsal import rehearse
from diskprefix.model.threads import threads_in_identity
from diskprefix.settings import Settings
from tests.engine.test_engine import done, prompt, run
from tests.exactness.architectures import tiny_model
from tests.model import tiny

BLOCK = 16


@pytest.fixture(autouse=True)
def own_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing is remembered from other tests, and the number of threads is put back."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def uneven(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has a kernel that rounds otherwise for each number of threads."""
    forward = LlamaMLP.forward

    def rounding(self: LlamaMLP, hidden: torch.Tensor) -> Any:
        return forward(self, hidden) * (1 + torch.get_num_threads() / 64)

    monkeypatch.setattr(LlamaMLP, "forward", rounding)


def found(num_threads: int, model: Any = None, identity: str = "weights") -> str:
    model = model or tiny.llama()
    torch.set_num_threads(num_threads)
    return threads_in_identity(model, rehearse(model), block_size=BLOCK, identity=identity)


@pytest.mark.parametrize("num_threads", [1, 2, 3, 4])
def test_a_number_that_computes_what_one_thread_computes_is_left_out(num_threads: int) -> None:
    assert found(num_threads) == ""
    assert torch.get_num_threads() == num_threads


@pytest.mark.usefixtures("uneven")
def test_a_number_that_rounds_otherwise_belongs_to_the_identity() -> None:
    assert [found(num_threads) for num_threads in (1, 2, 3)] == ["", "2", "3"]


@pytest.mark.parametrize("name", ["gemma3", "deepseek_v32", "falcon_h1", "mamba", "rwkv"])
def test_every_kind_of_state_can_be_compared(name: str) -> None:
    assert found(2, tiny_model(name, torch.bfloat16)) == ""


@pytest.mark.usefixtures("uneven")
def test_the_comparison_is_made_once_for_each_identity_and_number(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [found(2), found(1)] == ["2", ""]
    monkeypatch.setattr(threads, "_compared", lambda *_: pytest.fail("it was compared again"))
    assert found(2) == "2"
    for num_threads, identity in ((3, "weights"), (2, "other weights")):
        with pytest.raises(pytest.fail.Exception):
            found(num_threads, identity=identity)


def test_what_cannot_be_compared_is_taken_to_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise ValueError("no such position")

    model = tiny.llama()
    layout = rehearse(model)
    torch.set_num_threads(2)
    monkeypatch.setattr(KVArena, "forward", fail)
    assert threads_in_identity(model, layout, block_size=BLOCK, identity="weights") == "2"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tiny.write_folder(tmp_path / "model", dtype=torch.bfloat16, max_position_embeddings=512)


def load(folder: Path, kv: Path, num_threads: int, **changes: Any) -> Engine:
    torch.set_num_threads(num_threads)
    settings = Settings(
        model=str(folder), kv_cache_dir=kv, block_size=BLOCK, kv_cache_min_tokens=BLOCK, kv_cache_gate="off", **changes
    )
    return load_engine(settings, lambda _: None)


def restored_after(folder: Path, kv: Path, before: int, after: int, **changes: Any) -> int:
    """Tokens that a daemon with `after` threads restores of what one with `before` threads saved."""
    for num_threads in (before, after):
        engine = load(folder, kv, num_threads, **changes)
        restored = done(run(engine, prompt(100))).usage.cached_tokens
        assert engine.close()
    return restored


def test_daemons_share_a_store_over_threads_that_compute_the_same(folder: Path, tmp_path: Path) -> None:
    assert restored_after(folder, tmp_path / "kv", 1, 3) == 100


@pytest.mark.usefixtures("uneven")
def test_daemons_do_not_share_a_store_over_threads_that_round_otherwise(folder: Path, tmp_path: Path) -> None:
    assert restored_after(folder, tmp_path / "a", 1, 3) == 0
    assert restored_after(folder, tmp_path / "b", 3, 3) == 100
    assert restored_after(folder, tmp_path / "c", 1, 3, fingerprint="portable") == 100


@pytest.mark.usefixtures("uneven")
def test_a_session_notices_that_the_number_of_threads_was_changed(tmp_path: Path) -> None:
    settings = Settings(kv_cache_dir=tmp_path, block_size=BLOCK, kv_cache_min_tokens=BLOCK, kv_cache_gate="off")
    restored = []
    with PrefixCacheSession(tiny.llama(), scope="full", settings=settings) as session:
        for num_threads in (1, 2, 2, 1):
            torch.set_num_threads(num_threads)
            restored.append(session.prefill(prompt(100).tolist())[1])
    assert restored == [0, 0, 96, 96]
