"""Streams of hidden states that all layers share (hyper-connections), and embeddings of n-grams that are added to them.

The streams x lie side by side, n has the norm of each stream, s is the number of streams. A part f of a layer reads the
mean over the streams, y = 1/s Σ sigmoid(Wup silu(Wdown n / s)) × n. Then g = Winject n has a gate for each stream:
x += 2 × sigmoid(g / s) × f(y).
"""

from __future__ import annotations

from diskprefix.runtime.plan.config import DecoderConfig, LayerConfig
from diskprefix.runtime.plan.operands import Buffer
from diskprefix.runtime.plan.plan import ComputePlan
from diskprefix.runtime.plan.slots import Slots


def normed_streams(plan: ComputePlan, slots: Slots, name: str, streams: Buffer, count: int) -> Buffer:
    """Returns the norm of each of `count` streams, with weights of its own."""
    normed = plan.copy(streams)
    plan.norm_rotate_store(normed, streams.width // count, norm=slots.norm(name))
    return normed


def read_streams(plan: ComputePlan, slots: Slots, streams: Buffer, count: int) -> tuple[Buffer, Buffer]:
    """Returns what a part of a layer reads, and the norms of the streams."""
    normed = normed_streams(plan, slots, "hc_norm", streams, count)
    narrow = plan.product(normed, slots.matrix("input_mix_weight_down"))
    plan.scale(narrow, 1 / count)
    gates = plan.product(plan.gated(narrow, None, "silu"), slots.matrix("input_mix_weight_up"))
    return plan.mean_of_streams(gates, normed, count), normed


def stream_gates(plan: ComputePlan, slots: Slots, normed: Buffer) -> Buffer:
    """Returns the gate of each stream, for what a part of a layer adds to it."""
    return plan.product(normed, slots.matrix("block_inject_weight"))


def add_ngrams(plan: ComputePlan, config: DecoderConfig, layer: LayerConfig, slots: Slots, streams: Buffer) -> None:
    """Adds the embeddings of the last tokens to the streams of a layer: v and its convolution, where
    v = sigmoid(root(key · stream)) × value for each stream."""
    count = config.hyper_streams
    assert layer.ngrams is not None
    of_embedding = slots.within("ple_embedding")
    of_embedding.require_integers("layer_multipliers", layer.ngrams.multipliers)
    of_embedding.require_integers("ngram_heads_vocab_sizes", layer.ngrams.sizes)
    of_embedding.require_integers("ngram_heads_offsets", layer.ngrams.offsets)
    table = slots.table_rows("ple_embedding.ngram_embedding")
    embedded = plan.ngrams(layer.ngrams, table, layer.states["ngrams", 0])
    keys, values = plan.products(embedded, slots.matrix("key_proj"), slots.matrix("value_proj"))
    keys = normed_streams(plan, slots, "norm_key", keys, count)
    gated = plan.gate_streams(keys, normed_streams(plan, slots, "norm_query", streams, count), values)
    inner = normed_streams(plan, slots, "norm_conv", gated, count)
    weight, bias = slots.convolution("conv1d", len(layer.ngrams.multipliers))
    plan.add(gated, plan.convolution(inner, weight, bias, layer.states["conv", 1], has_silu=True))
    plan.add(streams, gated)
