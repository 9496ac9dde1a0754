"""The number of compute threads belongs to the identity: kernels cut their sums by it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from diskprefix import PrefixCacheSession
from diskprefix.settings import Settings
from tests.engine.driving import done, load, run, tokens
from tests.model import tiny

BLOCK = 16


@pytest.fixture(autouse=True)
def threads_put_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tiny.write_folder(tmp_path / "model", dtype=torch.bfloat16, max_position_embeddings=512)


def restored_after(folder: Path, kv: Path, before: int, after: int, **changes: Any) -> int:
    """Tokens that a daemon with `after` threads restores of what one with `before` threads saved."""
    for num_threads in (before, after):
        torch.set_num_threads(num_threads)
        engine = load(folder, kv, block_size=BLOCK, **changes)
        restored = done(run(engine, tokens(100))).usage.cached_tokens
        assert engine.close()
    return restored


def test_daemons_do_not_share_a_store_over_numbers_of_threads(folder: Path, tmp_path: Path) -> None:
    assert restored_after(folder, tmp_path / "a", 1, 3) == 0
    assert restored_after(folder, tmp_path / "b", 3, 3) == 100
    assert restored_after(folder, tmp_path / "c", 1, 3, fingerprint="portable") == 100


def test_a_session_notices_that_the_number_of_threads_was_changed(tmp_path: Path) -> None:
    settings = Settings(kv_cache_dir=tmp_path, block_size=BLOCK, kv_cache_min_tokens=BLOCK, kv_cache_gate="off")
    restored = []
    with PrefixCacheSession(tiny.llama(), scope="full", settings=settings) as session:
        for num_threads in (1, 2, 2, 1):
            torch.set_num_threads(num_threads)
            restored.append(session.prefill(tokens(100).tolist())[1])
    assert restored == [0, 0, 96, 96]
