"""Options of the parts of a decoder that may follow from its type alone.

The router reads types, so nothing here imports numpy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from msgspec import Struct

if TYPE_CHECKING:
    import numpy as np

NormKind = Literal["rms", "rms_unrounded", "rms_plus_one", "layer", "layer_plus_one"]
NormPlace = Literal["before", "around", "after"]
"""Where a part of a layer has norms: before it, before and after it, or after it."""
ParallelKind = Literal["", "one_norm", "two_norms"]
JoinedKind = Literal["", "in_parts", "in_heads"]


class Norms(Struct, frozen=True):
    """The norms of a decoder, all of one `kind` with one `epsilon`.

    `query_key` is the norm of queries and keys: over each head, over the whole row, or without weights over each
    rotated head. It is before the rotation, or `after_rotary`. `of_values`: values have a norm without weights.
    `of_embeddings`: a norm follows the embeddings. `inner`: a norm is before the last product of attention and of the
    feed-forward part.
    """

    kind: NormKind = "rms"
    epsilon: float = 1e-6
    query_key: Literal["", "head", "row", "without_weights"] = ""
    after_rotary: bool = False
    of_values: bool = False
    of_embeddings: bool = False
    inner: bool = False


class Gates(Struct, frozen=True):
    """The functions between products. `activation` is the function of the feed-forward part; with `is_joined` one
    product computes both gate and up. `attention` is the function of a gate on the output of attention, "" for no gate;
    with `is_in_query` the product of queries computes this gate, too: in each head it follows the query."""

    activation: str = "silu"
    is_joined: bool = False
    attention: str = ""
    is_in_query: bool = False


class DeltaConfig(Struct, frozen=True):
    """The layers with the delta rule. Its `inputs` are separate products; or one product has all inputs of the
    convolution; or products have all inputs, grouped by key heads. With `has_narrow_gates`, the gate and the decays
    (one for each number of a key) are low-rank products. `gate` is the function of the gate after the rule. Betas are
    multiplied by `beta_factor`."""

    inputs: Literal["apart", "together", "by_key_heads"]
    has_narrow_gates: bool = False
    gate: str = "silu"
    beta_factor: float = 1.0


class ExpertsForm(Struct, frozen=True):
    """The form of the matrices of experts in parameters. `has_up`: they have a matrix up, whose rows follow the rows of
    gate, or alternate with them (`is_interleaved`). `is_transposed`: matrices are [columns, rows]."""

    has_up: bool = True
    has_bias: bool = False
    is_transposed: bool = False
    is_interleaved: bool = False

    @property
    def first(self) -> str:
        """The name of the parameter with gate and, if there is one, up."""
        return "gate_up_proj" if self.has_up else "up_proj"

    def halves(self, name: str, rows: np.ndarray) -> dict[str, np.ndarray]:
        """Returns the matrices gate, up or down in the parameter `name`, [experts, rows, ..], not transposed."""
        if name == "down_proj" or not self.has_up:
            return {"down" if name == "down_proj" else "gate": rows}
        if self.is_interleaved:
            return {"gate": rows[:, ::2], "up": rows[:, 1::2]}
        half = rows.shape[1] // 2
        return {"gate": rows[:, :half], "up": rows[:, half:]}
