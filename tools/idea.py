"""A prefix cache on disk that gives the same bits: the whole idea in one file. Everything else is efficiency.

A language model computes some state for each token of a prompt (its keys and values), which the tokens after it read.
Agents send the same long beginning again and again. So keep the state of beginnings on disk, restore it in place of
computing it, and let nobody see a difference: the answer is equal to the last bit. `python tools/idea.py` shows it.

Four ideas carry it: those of diskprefix/README.md, in this order.
"""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Iterator
from multiprocessing import Process
from typing import Any, NamedTuple

import lmdb
import numpy as np
import xxhash

# ---- Idea 1: a token's state depends on the tokens before it and on nothing else, to the last bit. A sum of floats
# depends on its order, and libraries choose the order by the shapes that they are given: a token that is computed among
# 256 others has other bits than the same token alone. So here each token makes the same calls, however a prompt is cut
# into steps, and it can be restored up to any token. (The daemon's operators do so for many tokens at a time. A model
# without such operators is cut at multiples of 256 tokens alone, where equal steps give equal bits.) ----

LAYERS, HEADS, WIDTH, VOCAB, CONTEXT = 2, 4, 64, 256, 1024
DECAY = np.float32(0.9)


class State(NamedTuple):
    """All that a model remembers of some tokens. `rows`, float32 [tokens, LAYERS, 2, WIDTH]: keys and values of each.
    `memory`, float32 [WIDTH]: what a recurrent model has made of all of them. It has no parts for single tokens."""

    rows: np.ndarray
    memory: np.ndarray


NOTHING = State(np.empty((0, LAYERS, 2, WIDTH), np.float32), np.zeros(WIDTH, np.float32))


def norm(row: Any) -> Any:
    return row / np.sqrt(np.mean(row**2) + np.float32(1e-5))


class Model:
    """A transformer with random weights. It knows nothing, but it computes like one that does. A recurrent one also has
    a memory that each token changes."""

    def __init__(self, seed: int = 0, *, is_recurrent: bool = False) -> None:
        self.is_recurrent = is_recurrent
        numbers = np.random.default_rng(seed)
        sizes = [(VOCAB, WIDTH), (CONTEXT, WIDTH)]
        sizes += [(WIDTH, 3 * WIDTH), (WIDTH, WIDTH), (WIDTH, 4 * WIDTH), (4 * WIDTH, WIDTH)] * LAYERS
        self.weights = [numbers.normal(0, shape[0] ** -0.5, shape).astype(np.float32) for shape in sizes]

    def step(self, token_ids: np.ndarray, state: State) -> tuple[np.ndarray, State]:
        """Returns the logits of the token that comes next, float32 [VOCAB], and the state with these tokens in it."""
        start, memory = len(state.rows), state.memory
        rows = np.concatenate([state.rows, np.empty((len(token_ids), *NOTHING.rows.shape[1:]), np.float32)])
        for position, token_id in enumerate(token_ids, start):
            row, memory = self._token(token_id, position, rows, memory)
        return norm(row) @ self.weights[0].T, State(rows, memory)

    def _token(self, token_id: int, position: int, rows: np.ndarray, memory: np.ndarray) -> Any:
        """Computes one token. It attends to itself and to those before it."""
        embeddings, positions, *layers = self.weights
        row = embeddings[token_id] + positions[position]
        if self.is_recurrent:
            memory = memory * DECAY + row
            row = row + norm(memory)
        for layer in range(LAYERS):
            attention_in, attention_out, up, down = layers[4 * layer : 4 * layer + 4]
            query, rows[position, layer, 0], rows[position, layer, 1] = np.split(norm(row) @ attention_in, 3)
            keys, values = (rows[: position + 1, layer, i].reshape(-1, HEADS, WIDTH // HEADS) for i in (0, 1))
            scores = np.einsum("hd,thd->ht", query.reshape(HEADS, -1), keys) / np.float32((WIDTH / HEADS) ** 0.5)
            weights = np.exp(scores - scores.max(axis=1, keepdims=True))
            attended = np.einsum("ht,thd->hd", weights / weights.sum(axis=1, keepdims=True), values)
            row = row + attended.reshape(-1) @ attention_out
            row = row + np.maximum(norm(row) @ up, 0) @ down
        return row, memory


# ---- Idea 2: one block, everywhere. The state of BLOCK tokens is a block; its bytes on disk are those in memory. Its
# name is a hash of its parent's name and its own tokens, so it names all that its state depends on: the tokens up to
# its end, in order, and the root, which stands for the model. Prompts with one beginning share their first blocks. The
# longest stored beginning is found block by block. Where the blocks end, the stored node that shares most tokens with
# the rest gives these. ----

BLOCK = 16
LEAST = 16
"""A match of fewer tokens is none: all prompts of one chat template share some."""


class Node(NamedTuple):
    """The tokens of a prompt from `start` to before `end`: a full block, or fewer tokens where a prompt ends."""

    parent: bytes
    name: bytes
    start: int
    end: int


def node_at(secret: int, parent: bytes, token_ids: np.ndarray, start: int, end: int, mark: bytes = b"") -> Node:
    """Returns a node with its name of 16 bytes. With the secret, which each store draws, nobody else can make names."""
    name = xxhash.xxh3_128_digest(parent + token_ids[start:end].tobytes() + mark, seed=secret)
    return Node(parent, name, start, end)


def nodes_of(secret: int, root: bytes, token_ids: np.ndarray, kept: int, *, keeps_logits: bool) -> list[Node]:
    """Returns the nodes of the first `kept` tokens: full blocks, and what is left over. A node that comes with the
    logits after it has another name, and may have no tokens."""
    nodes, parent = list[Node](), root
    for start in range(0, kept - BLOCK + 1, BLOCK):
        nodes.append(node_at(secret, parent, token_ids, start, start + BLOCK))
        parent = nodes[-1].name
    start = kept // BLOCK * BLOCK
    if keeps_logits or start < kept:
        nodes.append(node_at(secret, parent, token_ids, start, kept, b"t" if keeps_logits else b""))
    return nodes


def tokens_to_keep(scope: str, length: int) -> tuple[int, bool]:
    """Returns how many first tokens of a prompt to keep, and whether the logits at its end too, with which an exact
    repeat computes nothing."""
    if scope == "off":
        return 0, False
    if scope == "full":
        return length, True
    if scope.startswith("auto"):
        # All of it: it may be sent again, or be continued. (A full store asks whether prompts like this one come again
        # before they would be evicted. If they do not, it keeps what this one shares with the last N.)
        return length, False
    return min(int(scope), length), int(scope) >= length


# ---- Idea 3: checkpoints for what cannot be cut. A recurrent model's memory exists at one position only. It is stored
# whole at the end of a prompt, and such a model is restored where a memory is: where an earlier prompt ended that this
# one continues. All others are cut at any token. ----

# ---- Idea 4: a failing cache never fails a request. A missing, damaged or foreign node is a miss, and a node that
# cannot be written is not stored. A transaction is in the file whole or not at all, and parents are written before
# their children. So the process may be killed at any moment. ----


class Stored(NamedTuple):
    """A node as it is read: its name, its tokens, and their keys and values."""

    name: bytes
    token_ids: np.ndarray
    rows: np.ndarray


class Answer(NamedTuple):
    """The model's logits after a prompt, float32 [VOCAB], and the tokens whose state was restored, computed, saved."""

    logits: np.ndarray
    restored: int
    computed: int
    saved: int


class Cache:
    def __init__(self, folder: str, scope: str, model: Model) -> None:
        self.scope, self.model = scope, model
        # The root stands for all that changes the numbers besides the tokens: another model never finds these nodes.
        numbers = [*model.weights, np.array([LAYERS, HEADS, BLOCK, model.is_recurrent]), np.array(np.__version__)]
        self.root = xxhash.xxh3_128_digest(b"".join(array.tobytes() for array in numbers))
        self.file = lmdb.open(folder, map_size=1 << 28, max_dbs=2)
        self.nodes, self.ends = self.file.open_db(b"nodes"), self.file.open_db(b"ends")
        with self.file.begin(write=True) as transaction:
            transaction.put(b"secret", os.urandom(8), overwrite=False)
            self.secret = int.from_bytes(transaction.get(b"secret") or b"", "big")

    def answer(self, token_ids: np.ndarray, *, killed_after: int = 0) -> Answer:
        """Answers a prompt, int32 [tokens]. This process is killed after so many steps, if there are as many."""
        length = len(token_ids)
        # 1. Match and restore.
        state, logits = self.restore(token_ids) if self.scope != "off" else (NOTHING, None)
        restored = len(state.rows)
        # 2. Choose what to keep, before it is computed.
        kept, keeps_logits = tokens_to_keep(self.scope, length)
        nodes = nodes_of(self.secret, self.root, token_ids, kept, keeps_logits=keeps_logits)
        # 3. Compute the rest, and save each node once it is complete, after those before it.
        saved, number = 0, 0
        while (start := len(state.rows)) < length:
            number += 1
            logits, state = self.model.step(token_ids[start : start + BLOCK - start % BLOCK], state)
            saved += sum(self.save(node, token_ids, state) for node in nodes if start < node.end <= len(state.rows))
            if number == killed_after:
                os.kill(os.getpid(), signal.SIGKILL)
        assert logits is not None
        if keeps_logits or (self.model.is_recurrent and kept == length):
            content = state.memory.tobytes() + (logits.tobytes() if keeps_logits else b"")
            self.write(self.ends, self.end_name(token_ids), content)
        return Answer(logits, restored, length - restored, saved)

    def restore(self, token_ids: np.ndarray) -> tuple[State, np.ndarray | None]:
        """Returns the state of the longest stored beginning of a prompt, and the logits if that is all of it and they
        are stored. Otherwise at least one token is left to compute, for the logits."""
        path, matched, parent = [NOTHING.rows], 0, self.root
        while (nearest := self.longest(parent, token_ids[matched : matched + BLOCK])) is not None:
            node, common = nearest
            path.append(node.rows)
            matched, parent = matched + common, node.name
            if common < BLOCK:
                break
        for length in range(matched, LEAST - 1, -1):
            end = self.read(self.ends, self.end_name(token_ids[:length])) or b""
            memory, logits = np.frombuffer(end[: NOTHING.memory.nbytes], np.float32), end[NOTHING.memory.nbytes :]
            is_whole = length == len(token_ids)
            # To any token, but a recurrent model only to a memory.
            if (logits or not is_whole) and (end or not self.model.is_recurrent):
                state = State(np.concatenate(path)[:length], memory if len(memory) else NOTHING.memory)
                return state, np.frombuffer(logits, np.float32) if is_whole else None
        return NOTHING, None

    def end_name(self, token_ids: np.ndarray) -> bytes:
        return nodes_of(self.secret, self.root, token_ids, len(token_ids), keeps_logits=True)[-1].name

    def longest(self, parent: bytes, token_ids: np.ndarray) -> tuple[Stored, int] | None:
        """Returns the node that continues `parent` and shares most of these tokens, and how many. None if none does."""
        best = None
        for node in self.children(parent):
            size = min(len(node.token_ids), len(token_ids))
            differs = np.flatnonzero(node.token_ids[:size] != token_ids[:size])
            common = int(differs[0]) if len(differs) else size
            if common > (best[1] if best else 0):
                best = node, common
        return best

    def children(self, parent: bytes) -> Iterator[Stored]:
        """Yields the sound nodes that continue `parent`. (The daemon keeps them in order, and reads the nearest.)"""
        with self.file.begin() as transaction:
            cursor = transaction.cursor(self.nodes)
            keys = list[bytes]()
            is_there = cursor.set_range(parent)
            while is_there and cursor.key().startswith(parent):
                keys.append(cursor.key())
                is_there = cursor.next()
        for key in keys:
            if (content := self.read(self.nodes, key)) is not None:
                ids = np.frombuffer(content, np.int32, content[0], 4)
                numbers = np.frombuffer(content[4 + ids.nbytes :], np.float32)
                yield Stored(key[16:], ids, numbers.reshape(-1, *NOTHING.rows.shape[1:]))

    def save(self, node: Node, token_ids: np.ndarray, state: State) -> int:
        """Saves a node in place of the shorter ones whose tokens it begins with, and returns its number of tokens; 0 if
        a longer one is there or it cannot be written."""
        ids, shorter = token_ids[node.start : node.end], list[bytes]()
        for other in self.children(node.parent):
            if other.name == node.name:
                return 0
            # A node without tokens brings its logits alone, beside any longer one.
            if len(ids) and other.token_ids[: len(ids)].tobytes() == ids[: len(other.token_ids)].tobytes():
                if len(other.token_ids) > len(ids):
                    return 0
                shorter.append(node.parent + other.name)
        content = len(ids).to_bytes(4, "little") + ids.tobytes() + state.rows[node.start : node.end].tobytes()
        return len(ids) if self.write(self.nodes, node.parent + node.name, content, shorter) else 0

    def write(self, table: Any, key: bytes, content: bytes, removed: list[bytes] | None = None) -> bool:
        try:
            with self.file.begin(write=True, db=table) as transaction:  # it ends when the bytes are on the disk
                for other in removed or []:
                    transaction.delete(other)
                transaction.put(key, xxhash.xxh3_64_digest(key + content) + content)
        except lmdb.Error:
            return False
        return True

    def read(self, table: Any, key: bytes) -> bytes | None:
        with self.file.begin(db=table) as transaction:
            content = transaction.get(key, default=b"")
        return content[8:] if content[:8] == xxhash.xxh3_64_digest(key + content[8:]) else None


# ---- The proof: a process that is killed, and one that comes after it. ----

RUNS = {
    "off": Model(),
    "full": Model(),
    "auto:30": Model(),
    "100": Model(),
    "full, recurrent": Model(is_recurrent=True),
}
"""Scopes, each with its model."""


def prompts() -> dict[str, np.ndarray]:
    numbers = np.random.default_rng(1)
    question, reply, other = (numbers.integers(0, VOCAB, count).astype(np.int32) for count in (75, 60, 9))
    return {
        "shorter than a block": question[:10],
        "a question": question,
        "the next turn": np.concatenate([question, reply]),
        "the same again": np.concatenate([question, reply]),
        "another end": np.concatenate([question[:-5], other]),
        "ends with a block": question[: 4 * BLOCK],
    }


def answer_all(folder: str, run: str, *, is_killed: bool) -> None:
    """Answers all prompts in this process, which is killed while it computes the next turn."""
    scope, model = run.partition(",")[0], RUNS[run]
    cache = Cache(folder, scope, model)
    with tempfile.TemporaryDirectory() as empty_folder:
        uncached = Cache(empty_folder, "off", model)
        for name, token_ids in prompts().items():
            answer = cache.answer(token_ids, killed_after=3 if is_killed and name == "the next turn" else 0)
            is_same = answer.logits.tobytes() == uncached.answer(token_ids).logits.tobytes()
            counts = f"{len(token_ids):6}  {answer.restored:8}  {answer.computed:8}  {answer.saved:5}"
            print(f"{run:15}  {name:20}  {counts}  {'yes' if is_same else 'NO'}", flush=True)
            assert is_same, "a restored answer differs from a computed one"


def main() -> None:
    print("scope            prompt                tokens  restored  computed  saved  same bits", flush=True)
    for run in RUNS:
        with tempfile.TemporaryDirectory() as folder:
            for is_killed in (True, False):
                process = Process(target=answer_all, args=(folder, run), kwargs={"is_killed": is_killed})
                process.start()
                process.join()
                if is_killed:
                    print(f"{run:15}  the next turn         killed by kill -9; a new process starts", flush=True)
                assert process.exitcode == (-signal.SIGKILL if is_killed else 0)


if __name__ == "__main__":
    main()
