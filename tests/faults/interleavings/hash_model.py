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
from tests.faults.interleavings.threads import scheduler
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


class _States:
    """Computes the state of one token after the other, from the keys and the values of those before."""

    def __init__(self, salt: int, keys: bytes, values: bytes) -> None:
        self.keys, self.values = bytearray(keys), bytearray(values)
        self._before = xxhash.xxh3_128(seed=salt)
        for start in range(0, len(keys), _ROW.size):
            self._before.update(keys[start : start + _ROW.size] + values[start : start + _ROW.size])

    def add(self, token: int) -> None:
        """Adds the key and the value of a token: numbers of 24 bits, which are finite as floats."""
        hashed = self._before.copy()
        hashed.update(token.to_bytes(4, "little"))
        found = hashed.intdigest()
        key = _ROW.pack(found & 0xFFFFFF, found >> 24 & 0xFFFFFF)
        value = _ROW.pack(found >> 48 & 0xFFFFFF, found >> 72 & 0xFFFFFF)
        self.keys += key
        self.values += value
        self._before.update(key + value)

    def next_token(self) -> int:
        return FIRST + self._before.intdigest() % (VOCAB - FIRST)


def first_keys(tenant: object, token_ids: Sequence[int]) -> bytes:
    """Returns the keys of the first two tokens, as they lie in memory."""
    states = _States(salt_of(tenant), b"", b"")
    for token in token_ids[:2]:
        states.add(token)
    return bytes(states.keys)


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
        states, reply = _States(salt, b"", b""), list[int]()
        for position in range(len(token_ids) + most - 1):
            states.add(reply[-1] if position >= len(token_ids) else token_ids[position])
            if position >= len(token_ids) - 1:
                reply.append(states.next_token())
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
    results, one = [], scheduler()
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
    before = bytes(arena.read_tokens(0, run_.start))
    begin = len(before) // 2
    states, logits = _States(rows.salt, before[:begin], before[begin:]), np.zeros((rows.num_logits, VOCAB), np.float32)
    for number, token in enumerate(tokens, start=rows.num_logits - len(tokens)):
        states.add(token)
        if number >= 0:
            logits[number, states.next_token()] = 1.0
    new = [
        torch.frombuffer(part[begin:], dtype=torch.float32).view(1, 1, -1, 2) for part in (states.keys, states.values)
    ]
    arena.token_layers[0].put(new[0], new[1], run_)
    arena.end_step(run_)
    return torch.from_numpy(logits)


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
