"""A prefix cache on disk that gives the same bits: the whole idea in one file. Everything else is efficiency.

A language model computes some state for each token of a prompt (its keys and values), which the tokens after it read.
Agents send the same long beginning again and again. So keep the state of beginnings on disk, restore it in place of
computing it, and let nobody see a difference: the answer is equal to the last bit. `python tools/idea.py` shows it.
"""

from __future__ import annotations

import math
import os
import signal
import tempfile
from multiprocessing import Process
from typing import Any, NamedTuple

import lmdb
import numpy as np
import xxhash

# ---- A language model: a transformer with random weights. It knows nothing, but it computes like one that does. ----

LAYERS, HEADS, WIDTH, VOCAB, CONTEXT = 2, 4, 64, 256, 1024
KEYS_AND_VALUES = (LAYERS, 2, WIDTH)
"""The shape of a token's state."""


def norm(rows: Any) -> Any:
    return rows / np.sqrt(np.mean(rows**2, axis=-1, keepdims=True) + np.float32(1e-5))


def by_head(rows: np.ndarray) -> np.ndarray:
    return rows.reshape(len(rows), HEADS, -1).swapaxes(0, 1)


class Model:
    def __init__(self, seed: int = 0) -> None:
        numbers = np.random.default_rng(seed)
        sizes = [(VOCAB, WIDTH), (CONTEXT, WIDTH)]
        sizes += [(WIDTH, 3 * WIDTH), (WIDTH, WIDTH), (WIDTH, 4 * WIDTH), (4 * WIDTH, WIDTH)] * LAYERS
        self.weights = [numbers.normal(0, shape[0] ** -0.5, shape).astype(np.float32) for shape in sizes]

    def step(self, token_ids: np.ndarray, state: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns the logits of the token that comes next, float32 [VOCAB], and the state with these tokens in it.

        `state` is float32 [tokens, LAYERS, 2, WIDTH]: the keys and values of each token before these. It is all that a
        model remembers of them. A token attends to itself and to those before it: its state depends on nothing else, so
        it can be kept.
        """
        embeddings, positions, *layers = self.weights
        start, end = len(state), len(state) + len(token_ids)
        state = np.concatenate([state, np.empty((len(token_ids), *KEYS_AND_VALUES), np.float32)])
        is_later = np.arange(end) > np.arange(start, end)[:, None]
        rows = embeddings[token_ids] + positions[start:end]
        for layer in range(LAYERS):
            attention_in, attention_out, up, down = layers[4 * layer : 4 * layer + 4]
            query, state[start:, layer, 0], state[start:, layer, 1] = np.split(norm(rows) @ attention_in, 3, axis=1)
            keys, values = by_head(state[:, layer, 0]), by_head(state[:, layer, 1])
            scores = by_head(query) @ keys.swapaxes(1, 2) / np.float32((WIDTH / HEADS) ** 0.5)
            scores = np.where(is_later, -np.inf, scores)
            weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
            attended = weights / weights.sum(axis=-1, keepdims=True) @ values
            rows = rows + attended.swapaxes(0, 1).reshape(rows.shape) @ attention_out
            rows = rows + np.maximum(norm(rows) @ up, 0) @ down
        return norm(rows[-1]) @ embeddings.T, state


NO_LOGITS = np.empty(0, np.float32)

# ---- Idea 1: steps on a grid. A sum of floats depends on its order, and libraries choose the order by the shapes that
# they are given. So a prompt is always computed in steps of BLOCK tokens, counted from position 0, and one shorter step
# at its end. A run that restores some steps and computes the others makes the same calls on the same bytes as a run
# that computes all of them. Nothing else is needed for equal bits. (The daemon's own operators give a row the same bits
# in any step, so its models can be cut at any token. Only models without such operators need this grid.) ----

BLOCK = 16

# ---- Idea 2: a block's name is a hash of its parent's name and its own tokens, so it names all that its state depends
# on: the tokens up to its end, in order, and the root. Prompts with one beginning have the same first names: they share
# blocks. The longest stored beginning is found by looking up one name after the other. ----


class Block(NamedTuple):
    """The tokens of a prompt from `start` to before `end`, and a name of 16 bytes."""

    name: bytes
    start: int
    end: int


def blocks_of(secret: int, root: bytes, token_ids: np.ndarray) -> list[Block]:
    """Returns the full blocks of a prompt, and its end: the tokens left over (perhaps none), with the logits after
    them. With the secret, which each store draws, nobody else can make names."""
    blocks, parent = [], root
    for start in range(0, len(token_ids) + 1, BLOCK):
        end = min(start + BLOCK, len(token_ids))
        # An end has another name than a block of the same tokens.
        mark = b"" if end - start == BLOCK else b"t"
        parent = xxhash.xxh3_128_digest(parent + token_ids[start:end].tobytes() + mark, seed=secret)
        blocks.append(Block(parent, start, end))
    return blocks


# ---- Idea 3: a scope says how much of a prompt is worth keeping. ----


def tokens_to_keep(scope: str, length: int) -> tuple[int, bool]:
    """Returns how many first tokens of a prompt to keep, and whether its last block and logits too, with which an exact
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


# ---- Idea 4: the store is a file with transactions (LMDB). A block is in it whole or not at all, and the blocks before
# it are in it too, because they were written first. So the process may be killed at any moment. ----


class Answer(NamedTuple):
    """The model's logits after a prompt, float32 [VOCAB], and the tokens whose state was restored, computed, saved."""

    logits: np.ndarray
    restored: int
    computed: int
    saved: int


class Cache:
    def __init__(self, folder: str, scope: str, model: Model) -> None:
        self.scope, self.model = scope, model
        # The root stands for all that changes the numbers besides the tokens: another model never finds these blocks.
        numbers = [*model.weights, np.array([LAYERS, HEADS, BLOCK]), np.array(np.__version__)]
        self.root = xxhash.xxh3_128_digest(b"".join(array.tobytes() for array in numbers))
        self.file = lmdb.open(folder, map_size=1 << 28, max_dbs=1)
        self.blocks = self.file.open_db(b"blocks")
        with self.file.begin(write=True) as transaction:
            transaction.put(b"secret", os.urandom(8), overwrite=False)
            self.secret = int.from_bytes(transaction.get(b"secret") or b"", "big")

    def answer(self, token_ids: np.ndarray, *, killed_after: int = 0) -> Answer:
        """Answers a prompt, int32 [tokens]. This process is killed after so many steps, if there are as many."""
        length, blocks = len(token_ids), blocks_of(self.secret, self.root, token_ids)
        # 1. Match and restore: block after block, until one is missing.
        state, logits, num_stored = np.empty((0, *KEYS_AND_VALUES), np.float32), NO_LOGITS, 0
        for block in blocks if self.scope != "off" else []:
            if (stored := self.load(block, token_ids)) is None:
                break
            state, logits = np.concatenate([state, stored[0]]), stored[1]
            num_stored += 1
        if num_stored == len(blocks):
            restored = length
        else:
            # The last step gives the logits. Where these are not stored, it is computed, although its tokens may be.
            restored = min(len(state), (length - 1) // BLOCK * BLOCK)
            state = state[:restored]
        # 2. Choose what to keep, before it is computed.
        num_kept, keeps_end = tokens_to_keep(self.scope, length)
        # 3. Compute the rest in steps of the grid, and save each block that is kept, after those before it.
        saved = 0
        for step, start in enumerate(range(restored, length, BLOCK), 1):
            logits, state = self.model.step(token_ids[start : start + BLOCK], state)
            block = blocks[start // BLOCK]
            if len(state) - start == BLOCK and len(state) <= num_kept and start // BLOCK >= num_stored:
                saved += self.save(block, token_ids, state[start:])
            if step == killed_after:
                os.kill(os.getpid(), signal.SIGKILL)
        if keeps_end and num_stored < len(blocks):
            saved += self.save(blocks[-1], token_ids, state[blocks[-1].start :], logits)
        return Answer(logits, restored, length - restored, saved)

    def save(self, block: Block, token_ids: np.ndarray, state: np.ndarray, logits: np.ndarray = NO_LOGITS) -> int:
        content = b"".join(array.tobytes() for array in (token_ids[block.start : block.end], state, logits))
        with self.file.begin(write=True) as transaction:  # it ends when the bytes are on the disk
            transaction.put(block.name, xxhash.xxh3_64_digest(content) + content, db=self.blocks)
        return block.end - block.start

    def load(self, block: Block, token_ids: np.ndarray) -> tuple[np.ndarray, np.ndarray] | None:
        """Returns the state and the logits of a block. What is missing, damaged or another's is a miss, no error."""
        with self.file.begin() as transaction:
            content = transaction.get(block.name, db=self.blocks, default=b"")
        digest, content = content[:8], content[8:]
        # A name proves nothing: two prompts may have one. So the tokens are compared.
        ids = token_ids[block.start : block.end].tobytes()
        if digest != xxhash.xxh3_64_digest(content) or not content.startswith(ids):
            return None
        numbers = np.frombuffer(content[len(ids) :], np.float32)
        size = (block.end - block.start) * math.prod(KEYS_AND_VALUES)
        return numbers[:size].reshape(-1, *KEYS_AND_VALUES), numbers[size:]


# ---- The proof: a process that is killed, and one that comes after it. ----

SCOPES = ("off", "full", "auto:30", "100")


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


def live(folder: str, scope: str, *, dies: bool) -> None:
    """Answers all prompts in this process, which dies while it computes the next turn."""
    cache = Cache(folder, scope, Model())
    with tempfile.TemporaryDirectory() as elsewhere:
        cold = Cache(elsewhere, "off", Model())
        for name, token_ids in prompts().items():
            answer = cache.answer(token_ids, killed_after=3 if dies and name == "the next turn" else 0)
            is_same = answer.logits.tobytes() == cold.answer(token_ids).logits.tobytes()
            counts = f"{len(token_ids):6}  {answer.restored:8}  {answer.computed:8}  {answer.saved:5}"
            print(f"{scope:7}  {name:20}  {counts}  {'yes' if is_same else 'NO'}", flush=True)
            assert is_same, "a restored answer differs from a computed one"


def main() -> None:
    print("scope    prompt                tokens  restored  computed  saved  same bits", flush=True)
    for scope in SCOPES:
        with tempfile.TemporaryDirectory() as folder:
            for dies in (True, False):
                process = Process(target=live, args=(folder, scope), kwargs={"dies": dies})
                process.start()
                process.join()
                if dies:
                    print(f"{scope:7}  the next turn         killed by kill -9; a new process starts", flush=True)
                assert process.exitcode == (-signal.SIGKILL if dies else 0)


if __name__ == "__main__":
    main()
