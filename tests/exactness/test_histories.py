"""Whatever was asked before, and whatever was evicted: the logits are those of the cold run."""

from __future__ import annotations

import tempfile
from collections import Counter
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test
from transformers import PreTrainedModel

from diskprefix.cache.policy.scope import parse_scope
from diskprefix.engine.forward import prefill
from diskprefix.grid.rehearsal import rehearse
from diskprefix.kv.layout import Layout
from diskprefix.kv.pages import PagePool
from diskprefix.kv.sequence import KVSequence
from diskprefix.tokens import TokenIds, common_prefix_length, floor_to_grid
from diskprefix.values import CacheOptions, Prompt
from tests.exactness.architectures import tiny_model
from tests.examples import examples
from tests.modules import runtime_of
from tests.runner import BLOCK, VOCAB, Runner, random_prompt, tiny_settings
from tests.store.building import names_of_every_run

LONGEST = 12 * BLOCK
SCOPES: list[str | int] = ["full", "auto:1", "auto:8", "off", 3 * BLOCK, 90]
MODELS = {"dense": "llama", "sliding": "gemma3", "hybrid": "qwen3_next"}
"""The sliding one has windows that are longer than a step, and layers without; the hybrid can be cut at checkpoints
only."""


@cache
def model_of(kind: str) -> tuple[PreTrainedModel, Layout]:
    model = tiny_model(MODELS[kind], torch.bfloat16)
    return model, rehearse(model)


@cache
def cold_logits(kind: str, prompt: bytes) -> torch.Tensor:
    """Of a run that knows nothing of a cache, in memory of its own."""
    model, layout = model_of(kind)
    token_ids = np.frombuffer(prompt, dtype=np.int32).copy()
    sequence = KVSequence(PagePool(layout, block_size=BLOCK))
    with torch.inference_mode():
        sequence.reserve(len(token_ids))
        logits = prefill(
            runtime_of(model, layout, BLOCK),
            sequence,
            token_ids,
            start=0,
            block_size=BLOCK,
            after_step=lambda _: None,
        )
        return torch.from_numpy(logits)


def machine_of(kind: str, hits: Counter[str]) -> type[RuleBasedStateMachine]:
    """Requests that share, branch, shrink and edit; scopes, evictions and restarts in between. `hits` counts them."""

    class Histories(RuleBasedStateMachine):
        @initialize()
        def start(self) -> None:
            self.folder = tempfile.TemporaryDirectory()
            model, _ = model_of(kind)
            folder = Path(self.folder.name)
            settings = tiny_settings(folder, kv_cache_interval=3 * BLOCK, kv_cache_cold_max=4 * BLOCK)
            with names_of_every_run():
                self.runner = Runner(model, settings)
            self.prompts: list[TokenIds] = [random_prompt(0, 5 * BLOCK + 3)]
            self.held = self.prompts[0][:0]
            """The tokens of the prompt that was computed last in the runner's memory, as far as that has them."""

        @rule(data=st.data())
        def ask(self, data: st.DataObject) -> None:
            """A prompt that was asked before, or one made of it."""
            base = data.draw(st.sampled_from(self.prompts[-4:]))
            on_grid = st.sampled_from([*range(BLOCK, len(base) + 1, BLOCK), len(base)])
            cut = data.draw(st.one_of(st.integers(1, len(base)), on_grid))
            prompt = data.draw(st.sampled_from(_made_of(base, cut)))
            scope = data.draw(st.sampled_from(SCOPES))
            boundaries = tuple(sorted(data.draw(st.sets(st.integers(1, len(prompt)), max_size=4))))
            in_memory = self.in_memory(prompt) if data.draw(st.booleans()) else 0
            options = CacheOptions(scope=parse_scope(scope, param="scope"))
            answer = self.runner.run_prompt(Prompt(prompt.copy(), boundaries), options, have=in_memory)
            self.held = prompt
            assert torch.equal(answer.logits, cold_logits(kind, prompt.tobytes()))
            restored = answer.report.restored
            assert in_memory <= restored <= answer.report.matched <= len(prompt)
            hits["memory"] += in_memory > 0
            hits["all" if restored == len(prompt) else "part" if restored else "none"] += 1
            self.prompts.append(prompt)

        def in_memory(self, prompt: TokenIds) -> int:
            """How many of its tokens the last sequence holds."""
            sequence = self.runner.sequence
            common = min(common_prefix_length(self.held, prompt), sequence.num_tokens)
            num_tokens = floor_to_grid(min(common, len(prompt) - 1), BLOCK)
            if self.runner.layout.states and num_tokens != sequence.num_tokens:
                return 0
            return num_tokens if sequence.continues_at(num_tokens) else 0

        @rule(data=st.data(), steps=st.integers(1, 8), scope=st.sampled_from(SCOPES))
        def cancel(self, data: st.DataObject, steps: int, scope: str | int) -> None:
            """What it leaves is not wrong, and the next request goes on from there."""
            prompt = data.draw(st.sampled_from(_made_of(data.draw(st.sampled_from(self.prompts)), 3 * BLOCK)))
            options = CacheOptions(scope=parse_scope(scope, param="scope"))
            self.runner.cancelled(Prompt(prompt.copy()), options, steps)
            self.held = prompt
            self.prompts.append(prompt)
            hits["cancelled"] += 1

        @rule(seed=st.integers(0, 1 << 16))
        def evict(self, seed: int) -> None:
            """Some of what nothing continues, as the budget would: checkpoints, tails, last blocks."""
            self.runner.flush()
            random = np.random.default_rng(seed)
            with self.runner.cache.store.changes() as changes:
                for _ in range(int(random.integers(1, 6))):
                    table = changes.usages()
                    leaves = np.flatnonzero(table.records["children"] == 0)
                    if len(leaves):
                        name = table.names[int(random.choice(leaves))]
                        changes.delete_node(name, changes.parent(name))

        @rule()
        def restart(self) -> None:
            self.runner.reopen()
            self.held = self.held[:0]

        def teardown(self) -> None:
            self.runner.close()
            self.folder.cleanup()

    return Histories


def _made_of(base: TokenIds, cut: int) -> list[TokenIds]:
    """The same again, grown, branched off, shrunk, and edited. A base that is shorter than `cut` is cut at its end."""
    edited, cut = base.copy(), min(cut, len(base))
    edited[cut - 1] = (edited[cut - 1] + 1) % VOCAB
    grown = np.concatenate([base, random_prompt(cut, cut)])[:LONGEST]
    branch = np.concatenate([base[:cut], random_prompt(cut + 1, 2 * BLOCK)])[:LONGEST]
    return [base, base, grown, branch, base[:cut], edited]


@pytest.mark.slow
@pytest.mark.parametrize("kind", MODELS)
def test_any_history_of_prompts_scopes_and_evictions_gives_the_cold_runs_logits(kind: str) -> None:
    hits: Counter[str] = Counter()
    run_state_machine_as_test(
        machine_of(kind, hits),
        settings=settings(
            max_examples=examples(40),
            stateful_step_count=14,
            deadline=None,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
        ),
    )
    assert min(hits[how] for how in ("part", "all", "none", "memory", "cancelled")) > 0, (
        f"the histories must try everything: {hits}"
    )
