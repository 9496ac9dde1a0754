"""A model whose state is a hash of the tokens before it, so that a wrong byte is a wrong reply.

The state of a token is a hash of the tenant, the token, and the bytes of the state of all tokens before it as they lie
in the KV memory, computed or restored. The next token is a function of the state of all tokens. `Replies` computes the
same from the tokens alone.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import xxhash

from diskprefix.daemon.engine.running_request import Reply
from diskprefix.daemon.engine.scheduler import Chunk
from diskprefix.prefixstore.kv.layout import Group, LayerSpec, Layout, StateGroup, StateSpec, TensorSpec
from diskprefix.prefixstore.kv.page_table import PageTable
from diskprefix.prefixstore.kv.sequence import KVSequence
from diskprefix.runtime.contract import Rows, StepOutput
from diskprefix.runtime.files.folder_tokenizer import tokenizer_of_transformers
from diskprefix.tokens import Logits
from tests.faults.interleavings.threads import scheduler
from tests.runtime.plan import tiny

VOCAB, FIRST = 256, 3
"""Tokens below `FIRST` are special."""
_WINDOW = 11
_NUMBERS = struct.Struct("<4f")
"""The state of a token: numbers of 24 bits, which are finite as floats."""
_TOKENIZER = tokenizer_of_transformers(tiny.tokenizer())


def layout(exact_at: str, kind: str) -> Layout:
    """`kind`: the model has one layer of full attention, and beside it none ("full"), one of a window, or a state."""
    layers = {"full": (), "window": (LayerSpec("sliding", _WINDOW),), "state": (LayerSpec("linear", num_states=1),)}

    def group(layer: int, window: int | None) -> Group:
        forms = ((layer, part, 1, 2, "float32", window) for part in ("keys", "values"))
        return Group(tuple(TensorSpec(*form) for form in forms))

    return Layout(
        layers=(LayerSpec(), *layers[kind]),
        groups=(group(0, None), group(1, _WINDOW))[: 1 + (kind == "window")],
        states=(StateGroup((StateSpec(1, "recurrent", 0, (4,), "float32"),)),)[: kind == "state"],
        vocab_size=VOCAB,
        logits_dtype="float32",
        exact_at=exact_at,  # type: ignore[arg-type]
        packs=exact_at == "token",
    )


class _States:
    """Computes the state of one token after the other from what lies in memory of those before: all rows of full
    attention, and what the kind of a layout adds, which is the last row, or those of the window."""

    def __init__(self, salt: int, rows: Iterable[bytes], others: Iterable[bytes], most: int) -> None:
        self.new = list[bytes]()
        self._before = xxhash.xxh3_128(b"".join(rows), seed=salt)
        self._others = deque(others, maxlen=most)

    def add(self, token: int) -> None:
        hashed = self._before.copy()
        hashed.update(b"".join(self._others) + token.to_bytes(4, "little"))
        found = hashed.intdigest()
        self.new.append(_NUMBERS.pack(*(found >> shift & 0xFFFFFF for shift in (0, 24, 48, 72))))
        self._before.update(self.new[-1])
        self._others.append(self.new[-1])

    def next_token(self) -> int:
        return FIRST + self._before.intdigest() % (VOCAB - FIRST)


def salt_of(tenant: object) -> int:
    return xxhash.xxh3_64_intdigest(str(tenant).encode())


def salt_of_build(salt: int, build: int) -> int:
    """Returns the number that a build makes of that of a tenant."""
    return salt ^ build


class Replies:
    """Computes what the model must reply."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, int, bytes, int], list[int]] = {}

    def of(self, layout: Layout, salt: int, token_ids: Sequence[int], most: int) -> list[int]:
        key = _num_others(layout), salt, bytes(np.asarray(token_ids, np.int32)), most
        if key not in self._known:
            if len(self._known) > 10_000:
                self._known.clear()
            self._known[key] = self._compute(_States(salt, [], [], key[0]), token_ids, most)
        return self._known[key]

    def _compute(self, states: _States, token_ids: Sequence[int], most: int) -> list[int]:
        reply = list[int]()
        for position in range(len(token_ids) + most - 1):
            states.add(reply[-1] if position >= len(token_ids) else token_ids[position])
            if position >= len(token_ids) - 1:
                reply.append(states.next_token())
        return reply


class SaltedRows(Rows, frozen=True):
    """The rows of a sequence, with the number that its tenant makes of equal tokens."""

    salt: int = 0


def salted_rows(chunk: Chunk[Reply]) -> SaltedRows:
    """In the place of `engine.forward._rows`."""
    reply = chunk.sequence
    assert reply.state is not None
    rows = reply.ids(chunk.start, chunk.end)
    return SaltedRows(reply.state, rows, 1 + chunk.num_drafted, salt=salt_of(reply.running.request.cache.tenant))


salts: dict[KVSequence, int] = {}
"""The number of the tenant of each sequence of idle work."""


def idle_rows(sequence: KVSequence, token_ids: Any) -> SaltedRows:
    """In the place of `engine.idle.idle_work.Rows`."""
    return SaltedRows(sequence, token_ids, salt=salts[sequence])


@dataclass
class ModelFaults:
    """How the model computes."""

    failing: float = 0.0
    """The share of sequences in steps whose computation fails."""
    token_s: float = 2e-3
    """The longest time that a token takes."""


_faults = [ModelFaults()]


def reset() -> ModelFaults:
    """Returns the faults of the history that begins."""
    _faults[:] = [ModelFaults()]
    return _faults[-1]


class HashRuntime:
    """The runtime of such a model. Each `build` computes other bits."""

    vocab_size = VOCAB

    def __init__(self, layout: Layout, build: int) -> None:
        self.layout, self._build = layout, build

    def prepare(self) -> None:
        pass

    def run(self, step: Sequence[SaltedRows], **_: Any) -> StepOutput:
        """Takes time in which other threads run."""
        results, one = [], scheduler()
        for rows in step:
            if _faults[-1].failing and one.random.random() < _faults[-1].failing:
                raise RuntimeError("the model fails, as it was asked to")
            assert isinstance(rows.state, KVSequence)
            results.append(_compute(rows, rows.state, salt_of_build(rows.salt, self._build)))
        one.block(one.random.random() * _faults[-1].token_s * sum(len(rows.token_ids) for rows in step))
        return StepOutput(results)


def _num_others(layout: Layout) -> int:
    return _WINDOW - 1 if len(layout.groups) > 1 else len(layout.states)


def _compute(rows: SaltedRows, sequence: KVSequence, salt: int) -> Logits:
    tokens, most = rows.token_ids.tolist(), _num_others(sequence.layout)
    run_ = sequence.begin_step(len(tokens), (), rows.num_taken_back)
    others = _rows(sequence.tables[-1], max(0, run_.start - most), run_.start)
    if sequence.states and run_.start:
        others = [page.tensor.tobytes() for page in (sequence.states if run_.replays is None else sequence.spares)]
    states = _States(salt, _rows(sequence.tables[0], 0, run_.start), others, most)
    logits = np.zeros((rows.num_logits, VOCAB), np.float32)
    for number, token in enumerate(tokens, start=rows.num_logits - len(tokens)):
        states.add(token)
        if number >= 0:
            logits[number, states.next_token()] = 1.0
    new = np.frombuffer(b"".join(states.new), np.float32).reshape(-1, 4)
    for table in sequence.tables:
        # Keys, and then values.
        table.write_rows(run_.start, np.stack([new[:, :2], new[:, 2:]])[:, None])

    def set_states(num_tokens: int) -> None:
        for state in sequence.states:
            state.tensor[0] = new[num_tokens - 1]

    set_states(len(tokens))
    if run_.replays is not None:
        run_.replays.append(set_states)
    sequence.end_step(run_)
    return logits


def _rows(table: PageTable, start: int, end: int) -> list[bytes]:
    """Returns the rows of tokens as they lie in memory."""
    if start == end:
        return []
    keys, values = table.gathered(start, end)[:, 0]
    return [row.tobytes() for row in np.concatenate([keys, values], axis=1)]


_IN_MEMORY = Future[None]()
_IN_MEMORY.set_result(None)


def loaded(kv_limit: int) -> Any:
    """Returns what `ServedModel` takes as a model that is loaded."""
    config = SimpleNamespace(vocab_size=VOCAB, max_position_embeddings=4096)
    config.get_text_config = lambda decoder: config  # noqa: ARG005
    fit = SimpleNamespace(kv_limit=kv_limit, context=4096)
    return SimpleNamespace(
        config=config,
        dtype="float32",
        device="cpu",
        encoder=None,
        stops=[],
        suppressed=[],
        tokenizer=_TOKENIZER,
        processor=None,
        name="hash",
        origin=Path("hash"),
        fit=fit,
        timings={},
        finish=lambda: None,
        in_memory=_IN_MEMORY,
        keep_weights=lambda: iter(()),
    )
