"""The draft layer (MTP): a decoder layer over each token and the hidden state after the previous token.

x = P · [norm(embedding), norm(hidden state)], y = norm(layer(x)). The logits of y cover the draft tokens only.
"""

from __future__ import annotations

from diskprefix.native import ROWS
from diskprefix.runtime.plan.config import DecoderConfig
from diskprefix.runtime.plan.families.decoder import decoder_layer
from diskprefix.runtime.plan.operands import Buffer
from diskprefix.runtime.plan.plan import ComputePlan
from diskprefix.runtime.plan.slots import Slots

_FREQUENT, _SPECIAL = 32768, 1024
"""Tokens that may be drafted: the first ones, because tokenizers number tokens by frequency, and the last ones, because
they include the tokens that end a turn or begin a call."""


def draft(plan: ComputePlan, config: DecoderConfig, slots: Slots) -> tuple[Buffer, list[range]]:
    """Writes the plan of a step. Returns the buffer of the hidden states that it reads, and the tokens that the logits
    cover, in this order. Logits are float32. For rows without logits, only keys and values are computed."""
    layer, own = config.draft_layer, slots.within("draft_layer")
    assert layer is not None
    angles = {} if layer.rotary is None else {layer.rotary: plan.angles(config.rotary[layer.rotary])}
    embedded = plan.embeddings(slots.table("embed_tokens"))
    before = plan.rows(embedded.width)
    both = plan.concat_columns(plan.norm(embedded, own.norm("enorm")), plan.norm(before, own.norm("hnorm")))
    hidden = plan.product(both, own.matrix("eh_proj"))
    hidden = decoder_layer(plan, config, layer, own.within("mtp_block"), hidden, angles, is_last=True)
    plan.hidden = plan.norm(hidden, own.norm("post_norm"))
    head = slots.head()
    drafted = draft_tokens(head.rows)
    parts = [head.part(tokens.start, tokens.stop) if len(tokens) < head.rows else head for tokens in drafted]
    plan.logits = plan.widened(plan.concat_columns(*plan.products(plan.hidden, *parts)))
    return before, drafted


def draft_tokens(num_tokens: int) -> list[range]:
    """Returns the tokens of a vocabulary of `num_tokens` that may be drafted."""
    last = (num_tokens - _SPECIAL) // ROWS * ROWS
    return [range(_FREQUENT), range(last, num_tokens)] if last > _FREQUENT else [range(num_tokens)]
