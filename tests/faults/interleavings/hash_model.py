"""A model whose state is a hash of the tokens before it, so that a wrong byte is a wrong reply.

The state of a token is a hash of the tenant, the token, and the bytes of the state of all tokens before it as they lie
in the KV memory, computed or restored. The next token is a function of the state of all tokens. `Replies` computes the
same from the tokens alone.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import xxhash

from diskprefix.engine.running_request import Reply
from diskprefix.engine.scheduler import Chunk
from diskprefix.kv.arena import KVArena
from diskprefix.kv.layout import Group, LayerSpec, Layout, TensorSpec
from diskprefix.model.exact.runner import Rows
from tests.faults.interleavings.threads import baton
from tests.model import tiny

VOCAB, FIRST = 256, 3
"""Tokens below `FIRST` are special."""
_ROW = struct.Struct("<2f")
_FORMS = [TensorSpec(0, part, heads=1, head_dim=2, dtype=torch.float32) for part in ("keys", "values")]
_TOKENIZER = tiny.tokenizer()


def layout(exact_at: str) -> Layout:
    return Layout(
        layers=(LayerSpec(),),
        groups=(Group(tuple(_FORMS)),),
        vocab_size=VOCAB,
        logits_dtype=torch.float32,
        exact_at=exact_at,  # type: ignore[arg-type]
        packs=exact_at == "token",
    )


def _state(salt: int, token: int, before: bytes) -> tuple[bytes, bytes]:
    """Returns the key and the value of a token: numbers of 24 bits, which are finite as floats."""
    found = xxhash.xxh3_128_intdigest(before + token.to_bytes(4, "little"), seed=salt)
    parts = [found >> shift & 0xFFFFFF for shift in (0, 24, 48, 72)]
    return _ROW.pack(*parts[:2]), _ROW.pack(*parts[2:])


def _next_token(salt: int, state: bytes) -> int:
    return FIRST + xxhash.xxh3_64_intdigest(state, seed=salt) % (VOCAB - FIRST)


def salt_of(tenant: object) -> int:
    return xxhash.xxh3_64_intdigest(str(tenant).encode())


class Replies:
    """Computes what the model must reply."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, bytes, int], list[int]] = {}

    def of(self, salt: int, token_ids: Sequence[int], most: int) -> list[int]:
        key = salt, bytes(np.asarray(token_ids, np.int32)), most
        if key not in self._known:
            if len(self._known) > 10_000:
                self._known.clear()
            self._known[key] = self._compute(salt, token_ids, most)
        return self._known[key]

    def _compute(self, salt: int, token_ids: Sequence[int], most: int) -> list[int]:
        keys, values, reply = bytearray(), bytearray(), list[int]()
        for position in range(len(token_ids) + most - 1):
            token = reply[-1] if position >= len(token_ids) else int(token_ids[position])
            key, value = _state(salt, token, bytes(keys + values))
            keys += key
            values += value
            if position >= len(token_ids) - 1:
                reply.append(_next_token(salt, bytes(keys + values)))
        return reply


@dataclass(frozen=True)
class SaltedRows(Rows):
    """The rows of a sequence, with the number that its tenant makes of equal tokens."""

    salt: int = 0


def salted_rows(chunk: Chunk[Reply]) -> SaltedRows:
    """In the place of `engine.forward._rows`."""
    reply = chunk.sequence
    assert reply.state is not None
    salt = salt_of(reply.running.request.cache.tenant)
    return SaltedRows(reply.state, reply.ids(chunk.start, chunk.end), 1 + chunk.num_drafted, salt)


@dataclass
class ModelFaults:
    """The share of steps that fail."""

    failing: float = 0.0


_faults = [ModelFaults()]


def reset() -> ModelFaults:
    """Returns the faults of the history that begins."""
    _faults[:] = [ModelFaults()]
    return _faults[-1]


def run(_model: Any, step: Sequence[SaltedRows]) -> list[torch.Tensor]:
    """In the place of `model.exact.runner.run`. Takes time in which other threads run."""
    results, one = [], baton()
    if _faults[-1].failing and one.random.random() < _faults[-1].failing:
        raise RuntimeError("the model fails, as it was asked to")
    for rows in step:
        assert isinstance(rows.state, KVArena)
        results.append(_compute(rows, rows.state))
    one.block(one.random.random() * 2e-3 * sum(rows.token_ids.shape[1] for rows in step))
    return results


def _compute(rows: SaltedRows, arena: KVArena) -> torch.Tensor:
    tokens = rows.token_ids[0].tolist()
    run_ = arena.begin_step(len(tokens))
    state = bytes(arena.read_tokens(0, run_.start))
    keys, values = bytearray(state[: len(state) // 2]), bytearray(state[len(state) // 2 :])
    begin = len(keys)
    logits = []
    for number, token in enumerate(tokens):
        key, value = _state(rows.salt, token, bytes(keys + values))
        keys += key
        values += value
        if number >= len(tokens) - rows.num_logits:
            logits.append(_next_token(rows.salt, bytes(keys + values)))
    new = [torch.frombuffer(part[begin:], dtype=torch.float32).view(1, 1, -1, 2) for part in (keys, values)]
    arena.token_layers[0].put(new[0], new[1], run_)
    arena.end_step(run_)
    found = torch.zeros((len(logits), VOCAB))
    found[range(len(logits)), logits] = 1.0
    return found


def loaded(kv_limit: int) -> Any:
    """Returns what `ServedModel` takes as a model that is loaded."""
    config = SimpleNamespace(vocab_size=VOCAB, max_position_embeddings=4096)
    config.get_text_config = lambda decoder: config  # noqa: ARG005
    model = SimpleNamespace(
        device=torch.device("cpu"), dtype=torch.float32, config=config, generation_config=SimpleNamespace()
    )
    fit = SimpleNamespace(kv_limit=kv_limit, context=4096)
    return SimpleNamespace(
        model=model, tokenizer=_TOKENIZER, media=None, name="hash", origin=Path("hash"), fit=fit, timings={}
    )
