"""What only memory has of conversations, saved when a model is unloaded."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from diskprefix.cache.cache import PrefixCache
from tests.engine.driving import load, request, run_request, tokens


@pytest.mark.parametrize(("ttl_s", "saved"), [(None, [78]), (0.5, [])])
def test_what_has_expired_is_not_saved(
    ttl_s: float | None, saved: Sequence[int], folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    monkeypatch.setattr(
        PrefixCache, "hibernate", lambda _cache, _arena, token_ids, _options: asked.append(len(token_ids))
    )
    engine = load(folder, tmp_path / "kv")
    one = request(tokens(67, 1))
    run_request(engine, replace(one, cache=replace(one.cache, ttl_s=ttl_s)))
    time.sleep(0.6)
    engine.hibernate()
    engine.close()
    assert asked == saved
