"""Random lives of conversations in one store, and what is left of one after its deletion.

Each conversation writes tokens that no other one writes, and a word in its texts, so that nothing of it is overlooked.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from diskprefix.prefixstore.cache.cached_request import CachedRequest
from diskprefix.prefixstore.cache.context import SENT, PromptOrigin
from diskprefix.prefixstore.kv.sequence import KVSequence
from diskprefix.prefixstore.store.note_record import NoteKind, decode_note
from diskprefix.prefixstore.store.purge import PurgeFilter, purge
from diskprefix.prefixstore.store.schema import DATABASES, PromptRecord, decode_node, decode_record
from diskprefix.prefixstore.store.snapshot import Snapshot
from diskprefix.prefixstore.store.verify import verify_index
from diskprefix.runtime.prefill import prefill
from diskprefix.tokens import LEAST_TOKENS, PromptDigest, TokenIds, as_token_ids
from diskprefix.values import CacheOptions, Prompt, Scope, Tenant
from tests.runner import Runner

_OWN_IDS, _NUM_SHARED = 40, 40
"""Token ids that a conversation has for itself, and those that all have."""
SALTS = ("alice", "bob")


def tenant_of(number: int) -> Tenant:
    return Tenant().with_salt(SALTS[number % len(SALTS)])


def word_of(number: int) -> str:
    return f"swordfish{number}"


@dataclass
class Conversation:
    """The conversation of this number: its tokens so far, and the prompts that were sent."""

    number: int
    system: TokenIds
    rng: random.Random
    history: list[int] = field(default_factory=list)
    sent: list[TokenIds] = field(default_factory=list)

    @property
    def own_ids(self) -> range:
        start = _NUM_SHARED + self.number * _OWN_IDS
        return range(start, start + _OWN_IDS)

    def more(self, least: int, most: int) -> list[int]:
        return [self.rng.choice(self.own_ids) for _ in range(self.rng.randint(least, most))]

    def prompt(self, token_ids: TokenIds) -> Prompt:
        return Prompt(
            token_ids,
            boundaries=(len(self.system), len(token_ids)),
            system_end=len(self.system),
            text=f"… {word_of(self.number)}",
        )

    def next_turn(self) -> TokenIds:
        """The prompt of the next turn."""
        self.history += self.more(10, 50)
        self.sent.append(np.concatenate([self.system, as_token_ids(self.history)]))
        return self.sent[-1]

    def options(self) -> CacheOptions:
        scope = self.rng.choice([Scope("full"), Scope("full"), Scope("auto", 30)])
        return CacheOptions(scope=scope, tenant=tenant_of(self.number), ttl_s=self.rng.choice([None, 600.0]))


class Lives:
    """The conversations of a runner, whose steps are drawn from a seed."""

    def __init__(self, runner: Runner, seed: int, num_conversations: int = 4) -> None:
        self.runner, self.rng = runner, random.Random(seed)
        system = as_token_ids([self.rng.randrange(_NUM_SHARED) for _ in range(self.rng.choice([20, 32, 45]))])
        self.conversations = [
            Conversation(number, system, random.Random(seed * 31 + number)) for number in range(num_conversations)
        ]
        self.steps: list[str] = []
        self._deeds: dict[str, Callable[[Conversation], None]] = {
            "saved": self.save,
            "ahead": self.compute_ahead,
            "opening": self.open_another_day,
            "asked": self.ask_ahead,
            "imported": self.import_prompt,
            "cancelled": self.cancel,
            "killed": self.kill,
            "evicted": self.evict,
        }

    def live(self, num_steps: int) -> None:
        for _ in range(num_steps):
            one, deed = self.rng.choice(self.conversations), self.rng.choice([*self._deeds, "saved", "ahead"])
            self.steps.append(f"{deed} {one.number}")
            self._deeds[deed](one)
        self.runner.flush()

    def save(self, one: Conversation) -> None:
        token_ids, options = one.next_turn(), one.options()
        reply = self._as_reply(one, one.rng.choice([0, 0, 6, 20]))
        self.runner.run_prompt(one.prompt(token_ids), options, reply=reply)
        self._note(one, NoteKind.TURN, token_ids)
        self._note(one, NoteKind.RESPONSE, token_ids)

    def _as_reply(self, one: Conversation, num_tokens: int) -> int:
        """Has the runner sample tokens of the conversation's own, which its history then has too."""
        tokens = [one.rng.choice(one.own_ids) for _ in range(num_tokens)]

        def decode(_logits: Any, _count: int) -> list[int]:
            for token in tokens[:-1]:
                self.runner.logits_behind(token)
            return tokens

        self.runner._decode = decode  # type: ignore[assignment, method-assign]
        one.history += tokens
        return num_tokens

    def _note(self, one: Conversation, kind: NoteKind, token_ids: TokenIds) -> None:
        content = word_of(one.number).encode() + as_token_ids(one.history[-5:]).tobytes()
        self.runner.cache.notes(tenant_of(one.number)).put(kind, f"{one.number} {len(token_ids)}", content, token_ids)

    def compute_ahead(self, one: Conversation) -> None:
        """The history as the template writes it for the next question: without a part that was thought."""
        if one.sent:
            last = one.sent[-1]
            start = one.rng.randint(len(one.system) + 1, len(last))
            without = np.concatenate([last[:start], as_token_ids(one.history)[start - len(one.system) + 5 :]])
            self._compute(one, without, PromptOrigin("ahead", self._digest(one, last)))
            if one.rng.random() < 0.5:
                one.history = without[len(one.system) :].tolist()

    def open_another_day(self, one: Conversation) -> None:
        if one.sent:
            day = as_token_ids([one.rng.randrange(_NUM_SHARED), *one.sent[0][1:]])
            self._note(one, NoteKind.OPENING, one.sent[0])
            self._compute(one, day, PromptOrigin("opening", self._digest(one, one.sent[0])))

    def ask_ahead(self, one: Conversation) -> None:
        token_ids = one.next_turn()
        self._note(one, NoteKind.ASKED_OPENING, token_ids)
        self._compute(one, token_ids, PromptOrigin("opening"))

    def import_prompt(self, one: Conversation) -> None:
        token_ids = one.next_turn()
        self._note(one, NoteKind.IMPORTED, token_ids)
        self._compute(one, token_ids, PromptOrigin("imported", self._digest(one, token_ids)))

    def cancel(self, one: Conversation) -> None:
        self.runner.cancelled(one.prompt(one.next_turn()), one.options(), one.rng.randint(1, 4))

    def kill(self, one: Conversation) -> None:
        """A daemon that is killed in the middle of a prompt, and starts again."""
        self._compute(one, one.next_turn(), SENT, num_steps=one.rng.randint(1, 4))
        self.runner.reopen()

    def evict(self, _: Conversation) -> None:
        """Makes room, as a full store does."""
        self.runner.flush()
        store = self.runner.cache.store
        with store.reads.snapshot() as snapshot:
            victims = store.evictor._victims(snapshot, self.rng.randint(1, 40_000), frozenset())[1]
        store.evictor._evict(victims)

    def _digest(self, one: Conversation, token_ids: TokenIds) -> PromptDigest:
        return PromptDigest.of(self.runner.cache.epoch(tenant_of(one.number)).secret, token_ids)

    def _compute(self, one: Conversation, token_ids: TokenIds, origin: PromptOrigin, num_steps: int = 10**6) -> None:
        """The calls of the engine's work ahead, or of a request that ends after some steps."""
        runner, size = self.runner, self.runner.settings.block_size
        if runner.layout.exact_at == "grid":
            token_ids = token_ids[: len(token_ids) // size * size]
        if len(token_ids) < LEAST_TOKENS:
            return

        class Over(Exception):
            pass

        def after_step(sequence: KVSequence) -> None:
            nonlocal num_steps
            cached.after_step(sequence)
            num_steps -= 1
            if num_steps <= 0:
                raise Over

        cached = CachedRequest(
            runner.cache, one.prompt(token_ids), one.options(), is_prefix_only=origin is not SENT, origin=origin
        )
        sequence = runner.new_sequence(len(token_ids))
        restore = cached.begin_restore(sequence, token_ids)
        restore.run(prefetches=False)
        cached.adopt_restore(restore)
        try:
            if len(token_ids) - sequence.num_tokens >= LEAST_TOKENS:
                if origin is SENT:
                    cached.choose(sequence)
                else:
                    cached.choose_ahead(sequence)
                stops = tuple(at for at in cached.selection.checkpoints if sequence.num_tokens < at < len(token_ids))
                prefill(
                    *(runner.runtime, sequence, token_ids),
                    start=sequence.num_tokens, block_size=size, after_step=after_step, stops=stops,
                )  # fmt: skip
                cached.save_partial(sequence, token_ids)
        except Over:
            pass
        finally:
            cached.leave()

    def delete_by_id(self, number: int) -> bool:
        """Deletes what is listed of a conversation, as its user sees it: first the prompts that were saved. Returns
        whether anything was."""
        store, was_listed = self.runner.cache.store, False
        # Bound: each round deletes an entry.
        while True:
            with store.reads.snapshot() as snapshot:
                listed = [(entry.kind, name) for name, entry in snapshot.entries() if word_of(number) in entry.preview]
            if not listed:
                return was_listed
            was_listed = True
            own = [name for kind, name in listed if kind in ("saved", "imported")] or [name for _, name in listed]
            self.runner.cache.delete(self.rng.choice(sorted(own)).hex())

    def delete_by_key(self, number: int) -> None:
        self.runner.cache.purge(PurgeFilter(salt=str(tenant_of(number))))

    def forget_all(self) -> None:
        purge(self.runner.cache.store, PurgeFilter(), self.runner.cache.store.clock())
        for forget in self.runner.cache.on_forget:
            forget()


def left_of(snapshot: Snapshot, conversation: Conversation) -> list[str]:
    """Returns where the store still holds tokens or text of a conversation: all records of all databases, decoded."""
    word, own = word_of(conversation.number).encode(), conversation.own_ids
    pairs = {as_token_ids(conversation.history[at : at + 2]).tobytes() for at in range(len(conversation.history) - 1)}
    left = []
    for database in DATABASES:
        for key, value in snapshot.records(database):
            texts, token_ids = _decoded(database, key, bytes(value))
            if word in texts or any(token in own for token in token_ids):
                left.append(f"{database} {key.hex()}")
            elif database in ("notes", "meta", "roots", "entries") and any(pair in texts for pair in pairs):
                left.append(f"{database} {key.hex()}: tokens in its bytes")
    return left


def _decoded(database: str, key: bytes, value: bytes) -> tuple[bytes, list[int]]:
    """Returns the text of a record, and its token ids."""
    match database:
        case "nodes":
            return value, decode_node(key, value).token_ids.tolist()
        case "seen":
            return value, np.frombuffer(decode_record(PromptRecord, key, value).rest, "<i4").tolist()
        case "notes":
            return decode_note(key, value)[1], []
        case "children":
            return key, np.frombuffer(key[16:-16], "<i4").tolist()
        case _:
            return key + value, []


def payloads_without_node(snapshot: Snapshot) -> list[str]:
    """Returns the pieces of state, and the other records, that belong to no node with payload."""
    nodes = set(snapshot.keys("usage"))
    owned: Iterator[bytes] = (key[:16] for name in ("payloads", "entries") for key in snapshot.keys(name))
    return [name.hex() for name in owned if name not in nodes]


def is_sound(runner: Runner) -> bool:
    return not verify_index(runner.cache.store).problems
