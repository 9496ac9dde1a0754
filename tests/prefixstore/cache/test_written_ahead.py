"""What is written of a prompt while it is computed, so that a kill does not lose it, and what becomes of that."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from diskprefix.prefixstore.cache import saving
from diskprefix.prefixstore.cache.cached_request import CachedRequest
from diskprefix.prefixstore.cache.policy.write_budget import Spending
from diskprefix.prefixstore.kv.sequence import KVSequence
from diskprefix.prefixstore.store.schema import EntryRecord, NodeKind, NodeRecord
from diskprefix.prefixstore.store.verify import verify_index
from diskprefix.runtime.prefill import prefill
from diskprefix.scope import parse_scope
from diskprefix.tokens import TokenIds
from diskprefix.values import SHARED, CacheOptions, Prompt
from tests.exactness.architectures import tiny_model
from tests.runner import BLOCK, Runner, random_prompt, same, tiny_llama, tiny_settings

KINDS = ("dense", "dense, grid", "hybrid", "hybrid, grid")
AUTO = CacheOptions(scope=parse_scope("auto", param="scope"))
INTERIM, HALT_AT = 2 * BLOCK, 7 * BLOCK
"""The tokens between two interim checkpoints, and those of a prompt that are computed when its process dies."""
PROMPT = random_prompt(1, 40 * BLOCK + 3)
WRITTEN = {kind: HALT_AT - (HALT_AT % INTERIM if "hybrid" in kind else 0) for kind in KINDS}
"""The tokens from which another process goes on then."""


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saving, "_INTERIM_S", 0.0)
    monkeypatch.setattr(saving, "_INTERIM_TOKENS", INTERIM)


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def opened(kind: str, folder: Path) -> Runner:
    model = tiny_model("qwen3_next", torch.bfloat16) if "hybrid" in kind else tiny_llama()
    return Runner(model, tiny_settings(folder), kind, exact_at="grid" if "grid" in kind else None)


class Killed(Exception):
    pass


def halted(runner: Runner, options: CacheOptions, token_ids: TokenIds = PROMPT) -> CachedRequest:
    """Computes a part of a prompt, and nothing afterwards, as if the process were killed once all of it is written."""

    def after_step(sequence: KVSequence) -> None:
        cached.after_step(sequence)
        if sequence.num_tokens >= HALT_AT:
            raise Killed

    cached = CachedRequest(runner.cache, Prompt(token_ids, (len(token_ids),)), options)
    sequence = runner.new_sequence(len(token_ids))
    start = cached.restore(sequence).num_tokens
    with pytest.raises(Killed):
        prefill(runner.runtime, sequence, token_ids, start=start, block_size=BLOCK, after_step=after_step)
    runner.flush()
    return cached


def with_scope(scope: str, **changes: Any) -> CacheOptions:
    return replace(AUTO, scope=parse_scope(scope, param="scope"), **changes)


def nodes_of(runner: Runner) -> list[NodeRecord]:
    with runner.cache.store.snapshot() as snapshot:
        nodes = [snapshot.node(name) for name, _ in snapshot.records("nodes")]
    return [node for node in nodes if node is not None and node.kind != NodeKind.GHOST]


def entries_of(runner: Runner) -> list[EntryRecord]:
    with runner.cache.store.snapshot() as snapshot:
        return [entry for _, entry in snapshot.entries()]


def test_another_process_goes_on_from_what_is_written_and_leaves_what_a_prompt_that_was_never_killed_leaves(
    kind: str, tmp_path: Path
) -> None:
    left = []
    for name in ("killed", "whole"):
        runner = opened(kind, tmp_path / name)
        if name == "killed":
            halted(runner, AUTO).leave()
            (entry,) = entries_of(runner)
            assert (entry.kind, entry.num_tokens) == ("partial", HALT_AT)
            runner.reopen()
        answer = runner.run(PROMPT, "auto", boundaries=(len(PROMPT),), reply=4)
        assert answer.report.restored == (WRITTEN[kind] if name == "killed" else 0)
        assert answer.report.miss_reason == ("partial" if name == "killed" else "new")
        assert same(runner.run(PROMPT, "off", reply=4), answer)
        runner.flush()
        assert verify_index(runner.cache.store).problems == ()
        assert {entry.kind for entry in entries_of(runner)} == {"saved"}
        left.append(sorted((node.position, node.num_tokens, node.kind) for node in nodes_of(runner)))
        runner.close()
    in_killed, in_whole = left
    # The checkpoint from which the retry began is one of those that a conversation keeps, until later ones replace it.
    assert [
        node for node in in_killed if (node[0] + node[1], node[2]) != (WRITTEN[kind], NodeKind.CHECKPOINT)
    ] == in_whole


@pytest.mark.parametrize(
    ("options", "most"),
    [
        (with_scope("off"), 0),
        (with_scope("auto", save=False), 0),
        (with_scope(str(3 * BLOCK)), 3 * BLOCK),
        (with_scope("full"), HALT_AT),
    ],
    ids=["off", "save: false", "N", "full"],
)
def test_nothing_is_written_that_the_request_would_not_save(
    kind: str, options: CacheOptions, most: int, tmp_path: Path
) -> None:
    runner = opened(kind, tmp_path)
    halted(runner, options).leave()
    assert max((node.position + node.num_tokens for node in nodes_of(runner)), default=0) == most
    assert {entry.kind for entry in entries_of(runner)} == ({"partial"} if most else set())
    runner.reopen()
    assert runner.run(PROMPT, "1").report.restored == min(WRITTEN[kind], most)
    runner.close()


def test_what_is_written_has_the_time_to_live_and_the_tenant_of_its_request(kind: str, tmp_path: Path) -> None:
    runner, tenant = opened(kind, tmp_path), SHARED.with_salt("alice")
    own = with_scope("full", tenant=tenant, ttl_s=900.0)
    halted(runner, own).leave()
    with runner.cache.store.snapshot() as snapshot:
        usages = [snapshot.usage(name) for name in snapshot.keys("usage")]
        assert {record.tenant for _, record in snapshot.roots()} == {str(tenant)}
    assert {usage.ttl_s for usage in usages if usage is not None} == {900}
    assert [(entry.kind, entry.ttl_s) for entry in entries_of(runner)] == [("partial", 900)]
    runner.reopen()
    assert runner.run(PROMPT, "1").report.restored == 0
    assert runner.run_prompt(Prompt(PROMPT), replace(own, save=False)).report.restored == WRITTEN[kind]
    runner.close()


@pytest.mark.parametrize("kind", ["hybrid", "hybrid, grid"])
def test_interim_checkpoints_are_none_of_those_that_a_conversation_keeps(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither the earlier turns' checkpoints nor what is found of them differ from a run without interim ones."""
    left = []
    for interim in (10**9, INTERIM):
        monkeypatch.setattr(saving, "_INTERIM_TOKENS", interim)
        runner = opened(kind, tmp_path / str(interim))
        for num_tokens in (4 * BLOCK, 6 * BLOCK, 8 * BLOCK, 10 * BLOCK, 20 * BLOCK):
            runner.run(PROMPT[:num_tokens], "auto", boundaries=(num_tokens,))
            runner.flush()
        left.append(sorted((node.position, node.num_tokens, node.kind) for node in nodes_of(runner)))
        runner.close()
    assert left[0] == left[1]


@pytest.mark.parametrize("why", ["there is no memory for a copy", "the write budget is scarce"])
def test_an_interim_checkpoint_that_cannot_be_is_no_loss(
    why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner, capture = opened("hybrid", tmp_path), KVSequence.capture

    def without_room(self: KVSequence, position: int, pieces: Any, logits: Any = None) -> Any:
        has_states = any(piece.group >= len(self.tables) for piece in pieces)
        return None if has_states and self.num_tokens < len(PROMPT) else capture(self, position, pieces, logits)

    if "memory" in why:
        monkeypatch.setattr(KVSequence, "capture", without_room)
    else:
        scarce = Spending(used_bytes=3 << 20, limit_bytes=10 << 20, bytes_per_token=1)
        monkeypatch.setattr(runner.cache, "spending", lambda _share="": scarce)
    cached = halted(runner, with_scope("full", is_asked=True))
    assert {node.kind for node in nodes_of(runner)} == {NodeKind.BLOCK}
    assert cached.close().saved == "queued"
    assert runner.cache.writer.dropped == 0
    runner.close()


def test_a_prompt_that_is_computed_soon_has_no_interim_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saving, "_INTERIM_S", 600.0)
    runner = opened("hybrid", tmp_path)
    halted(runner, AUTO).leave()
    assert {node.kind for node in nodes_of(runner)} == {NodeKind.BLOCK}
    runner.close()


def test_a_retry_that_leaves_the_part_early_says_nothing_of_it(tmp_path: Path) -> None:
    """Another prompt that begins so is new."""
    runner = opened("dense", tmp_path)
    halted(runner, AUTO).leave()
    runner.reopen()
    other = np.concatenate([PROMPT[: 3 * BLOCK], random_prompt(9, 40 * BLOCK)])
    report = runner.run(other, "auto").report
    assert (report.restored, report.miss_reason) == (3 * BLOCK, "new")
    runner.close()
