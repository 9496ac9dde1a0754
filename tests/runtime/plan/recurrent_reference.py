"""Layers with a state in float64, one token after the other, by the equations of their papers.

It shares nothing with transformers' layers but their weights, and none of its cuts or shortcuts:

* Mamba 2 (arXiv 2405.21060, and `Mamba2` of mamba_ssm): h = exp(-exp(A) · d) · h + d · x ⊗ B, y = h · C + D · x, where
  d = softplus(dt + bias), clamped to the limits of the configuration. Nothing else limits a step.
* Gated delta rule (arXiv 2412.06464): S = a · S, S += k ⊗ b · (v - k · S), o = q · S, where a = exp(-exp(A) · d). With
  Kimi's (KDA, arXiv 2510.26692), each channel of a key has an a of its own.
* Short convolution (LFM2): out(c × convolution(b × x)).
"""

from __future__ import annotations

from copy import deepcopy
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad, sigmoid, silu, softplus


def in_float64(model: Any) -> Any:
    """Returns a copy of a model in float64, whose layers with a state are those here."""
    found = deepcopy(model).double()
    # The products of experts in one call take no float64.
    found.set_experts_implementation("eager")
    config = found.config.get_text_config(decoder=True)
    limits = getattr(config, "time_step_limit", None) or (0.0, float("inf"))
    for module in found.modules():
        if hasattr(module, "A_log") and hasattr(module, "D"):
            module.forward = partial(state_space, module, limits)
        elif hasattr(module, "conv1d") and not hasattr(module, "ple_embedding"):
            module.forward = partial(delta_rule, module)
        elif hasattr(module, "conv") and hasattr(module, "in_proj"):
            module.forward = partial(short_convolution, module)
    return found


def state_space(mixer: Any, limits: tuple[float, float], hidden_states: Tensor, **_: Any) -> Tensor:
    heads, groups = mixer.A_log.numel(), mixer.n_groups
    width = mixer.out_proj.in_features
    of_states = (mixer.conv1d.weight.shape[0] - width) // 2
    rows = mixer.in_proj(hidden_states[0] * getattr(mixer, "ssm_in_multiplier", 1.0))
    rows = rows * getattr(mixer, "mup_vector", torch.ones(1)).double().flatten()
    gate, mixed, steps = parted(rows, width, width + 2 * of_states, heads)
    x, into, out_of = parted(convolved(mixed, mixer.conv1d, has_silu=True), width, of_states, of_states)
    steps = softplus(steps + mixer.dt_bias).clamp(*limits)
    decays = torch.exp(-mixer.A_log.exp() * steps)
    x = x.reshape(len(x), heads, -1)
    into, out_of = (one.reshape(len(x), groups, -1).repeat_interleave(heads // groups, 1) for one in (into, out_of))
    state, found = torch.zeros(heads, x.shape[2], into.shape[2]).double(), []
    for t in range(len(x)):
        state = decays[t, :, None, None] * state + (steps[t, :, None] * x[t])[..., None] * into[t, :, None]
        found.append((state * out_of[t, :, None]).sum(2))
    y = (torch.stack(found) + mixer.D[:, None] * x).reshape(len(x), -1)
    norm = getattr(mixer, "norm", None)
    if norm is None or not getattr(mixer, "mamba_rms_norm", True):
        y = y * silu(gate)
    elif getattr(norm, "norm_before_gate", False):
        y = normed(y, norm, groups) * silu(gate)
    else:
        y = normed(y * silu(gate), norm, groups)
    found_rows: Tensor = mixer.out_proj(y)
    return found_rows[None]


def delta_rule(mixer: Any, hidden_states: Tensor, **_: Any) -> Tensor:
    rows = hidden_states[0]
    key_dim = getattr(mixer, "head_k_dim", None) or mixer.head_dim
    value_dim = getattr(mixer, "head_v_dim", None) or mixer.head_dim
    if hasattr(mixer, "forget_gate"):
        source, is_sigmoid = mixer.forget_gate, True
        q, k, v = mixer.q_proj(rows), mixer.k_proj(rows), mixer.v_proj(rows)
        z, b, a = mixer.g_b_proj(mixer.g_a_proj(rows)), mixer.b_proj(rows), source.f_b_proj(source.f_a_proj(rows))
    else:
        source, is_sigmoid = mixer, False
        q, k, v, z, b, a = _parts(mixer, rows, key_dim, value_dim)
    mixed = convolved(torch.cat([q, k, v], 1), mixer.conv1d, has_silu=True)
    q, k, v = parted(mixed, q.shape[1], k.shape[1], v.shape[1])
    heads = v.shape[1] // value_dim
    q, k = (one.reshape(len(rows), -1, key_dim) for one in (q, k))
    q, k = (one.repeat_interleave(heads // one.shape[1], 1) for one in (q, k))
    q, k = (one * (one.square().sum(2, keepdim=True) + 1e-6).rsqrt() for one in (q, k))
    q, v, z = q * key_dim**-0.5, v.reshape(len(rows), heads, -1), z.reshape(len(rows), heads, -1)
    betas = sigmoid(b) * (2.0 if getattr(mixer, "allow_neg_eigval", False) else 1.0)
    steps = softplus(a + source.dt_bias).reshape(len(rows), heads, -1)
    decays = torch.exp(-source.A_log.exp().reshape(heads, 1) * steps)
    state, found = torch.zeros(heads, key_dim, value_dim).double(), []
    for t in range(len(rows)):
        state = decays[t, :, :, None] * state
        error = betas[t, :, None] * (v[t] - (k[t, :, :, None] * state).sum(1))
        state = state + k[t, :, :, None] * error[:, None]
        found.append((q[t, :, :, None] * state).sum(1))
    norm = mixer.o_norm if hasattr(mixer, "o_norm") else mixer.norm
    y = normed(torch.stack(found), norm) * (sigmoid(z) if is_sigmoid else silu(z))
    out = mixer.o_proj if hasattr(mixer, "o_proj") else mixer.out_proj
    found_rows: Tensor = out(y.reshape(len(rows), -1))
    return found_rows[None]


def _parts(mixer: Any, rows: Tensor, key_dim: int, value_dim: int) -> list[Tensor]:
    """Returns q, k, v, z, b and a, [tokens, numbers]."""
    if hasattr(mixer, "g_proj"):
        return [getattr(mixer, f"{name}_proj")(rows) for name in "qkvgba"]
    if hasattr(mixer, "in_proj_qkv"):
        of_keys = mixer.num_k_heads * key_dim
        parts = parted(mixer.in_proj_qkv(rows), of_keys, of_keys, mixer.num_v_heads * value_dim)
        return [*parts, mixer.in_proj_z(rows), mixer.in_proj_b(rows), mixer.in_proj_a(rows)]
    heads, of_each = mixer.num_k_heads, mixer.num_v_heads // mixer.num_k_heads
    by_head = [matrix(rows).reshape(len(rows) * heads, -1) for matrix in (mixer.in_proj_qkvz, mixer.in_proj_ba)]
    parts = parted(by_head[0], key_dim, key_dim, of_each * value_dim, of_each * value_dim)
    return [one.reshape(len(rows), -1) for one in (*parts, *parted(by_head[1], of_each, of_each))]


def short_convolution(mixer: Any, hidden_states: Tensor, **_: Any) -> Tensor:
    b, c, x = mixer.in_proj(hidden_states[0]).chunk(3, 1)
    found: Tensor = mixer.out_proj(c * convolved(b * x, mixer.conv))
    return found[None]


def convolved(rows: Tensor, convolution: Any, *, has_silu: bool = False) -> Tensor:
    """Returns the causal convolution of each column of [tokens, channels]."""
    kernel = convolution.weight[:, 0]
    padded = pad(rows, (0, 0, kernel.shape[1] - 1, 0))
    found = torch.stack([padded[i : i + len(rows)] * kernel[:, i] for i in range(kernel.shape[1])]).sum(0)
    found = found if convolution.bias is None else found + convolution.bias
    return silu(found) if has_silu else found


def normed(rows: Tensor, norm: Any, groups: int = 1) -> Tensor:
    """Returns rows whose groups have the root mean square one, times weights."""
    parts = rows.reshape(*rows.shape[:-1], groups, -1)
    parts = parts * (parts.square().mean(-1, keepdim=True) + norm.variance_epsilon).rsqrt()
    found: Tensor = parts.reshape(rows.shape) * norm.weight
    return found


def parted(rows: Tensor, *widths: int) -> list[Tensor]:
    """Returns parts of these widths of [tokens, numbers]."""
    return [rows[:, end - width : end] for end, width in zip(accumulate(widths), widths, strict=True)]
