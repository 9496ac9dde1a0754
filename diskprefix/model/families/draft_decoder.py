"""The draft layer (MTP): a decoder layer over each token and the hidden state behind the token before it.

x = P · [norm(embedding), norm(hidden state)], y = norm(layer(x)). The logits of y are of the tokens that are guessed.
"""

from __future__ import annotations

from diskprefix.model.config import DecoderConfig
from diskprefix.model.families.decoder import decoder_layer
from diskprefix.model.operands import Buffer
from diskprefix.model.plan import ComputePlan
from diskprefix.model.slots import Slots
from diskprefix.native import ROWS

_FREQUENT, _SPECIAL = 32768, 1024
"""Tokens that are guessed: the first ones, because tokenizers number tokens by how frequent they are, and the last
ones, among which are those that end a turn or begin a call."""


def draft(plan: ComputePlan, config: DecoderConfig, slots: Slots) -> tuple[Buffer, list[range]]:
    """Writes the plan of a step. Returns the buffer of the hidden states that it reads, and the tokens that get logits:
    in float32, one range behind the other. Rows that get no logits have keys and values alone."""
    layer, own = config.draft_layer, slots.within("draft_layer")
    assert layer is not None
    angles = {} if layer.rotary is None else {layer.rotary: plan.angles(config.rotary[layer.rotary])}
    embedded = plan.embeddings(slots.table("embed_tokens"))
    before = plan.rows(embedded.width)
    both = plan.beside(plan.norm(embedded, own.norm("enorm")), plan.norm(before, own.norm("hnorm")))
    hidden = plan.product(both, own.matrix("eh_proj"))
    hidden = decoder_layer(plan, config, layer, own.within("mtp_block"), hidden, angles, is_last=True)
    plan.hidden = plan.norm(hidden, own.norm("post_norm"))
    head = slots.head()
    guessed = guessed_of(head.rows)
    parts = [head.part(one.start, one.stop) if len(one) < head.rows else head for one in guessed]
    plan.logits = plan.widened(plan.beside(*plan.products(plan.hidden, *parts)))
    return before, guessed


def guessed_of(num_tokens: int) -> list[range]:
    """Returns which of so many tokens are guessed."""
    last = (num_tokens - _SPECIAL) // ROWS * ROWS
    return [range(_FREQUENT), range(last, num_tokens)] if last > _FREQUENT else [range(num_tokens)]
