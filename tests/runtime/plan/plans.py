"""Computes tokens by the plan of a model that is no module: of its weights and its configuration."""

from __future__ import annotations

import numpy as np
import torch
from msgspec.structs import replace
from transformers import PreTrainedConfig

from diskprefix.prefixstore.kv.pages import PagePool
from diskprefix.prefixstore.kv.sequence import KVSequence
from diskprefix.runtime.contract import Rows
from diskprefix.runtime.plan.families.memory_layout import layout_of
from diskprefix.runtime.plan.planned import PlanRuntime
from diskprefix.runtime.plan.weights import Weights

_PAGE_TOKENS = 16
_NUM_TOKENS = 40


def logits_of(
    weights: Weights, config: PreTrainedConfig, token_ids: np.ndarray | None = None, *, with_draft: bool = False
) -> torch.Tensor:
    """The logits of tokens, or of made-up ones, float32 [tokens, vocab]."""
    layout = replace(layout_of(config, weights.dtype, with_draft_layer=with_draft), exact_at="token", packs=True)
    runtime = PlanRuntime(weights, config, layout, _PAGE_TOKENS)
    runtime.prepare()
    weights.finish_reading()
    ids = np.random.default_rng(0).integers(0, layout.vocab_size, _NUM_TOKENS) if token_ids is None else token_ids
    sequence = KVSequence(PagePool(layout, block_size=_PAGE_TOKENS))
    return torch.from_numpy(runtime.run([Rows(sequence, ids, len(ids))]).logits[0])
