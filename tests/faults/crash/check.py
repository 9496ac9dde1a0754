"""Checks a store after a process that used it was killed, against the ledger of that process."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from diskprefix.errors import CacheError, DiskPrefixError
from diskprefix.store.folder import DATA, LMDB_LOCK, LOCK
from diskprefix.store.schema import Kind
from diskprefix.store.store import Store
from diskprefix.store.writer import Writer
from diskprefix.tokens import HASH_BYTES
from tests.faults.crash import prompts, worker
from tests.faults.crash.ledger import Account
from tests.faults.crash.prompts import MODELS, Model, Payload
from tests.synthetic_model import Restorer, SyntheticModel, dense_layout

EVICTING = frozenset({"publish", "expire"})
_FILES = {DATA, LMDB_LOCK, LOCK}


@dataclass
class Finding:
    """The findings of a check. `restored` is the number of entries that were restored byte for byte."""

    restored: int = 0
    failures: list[str] = field(default_factory=list)

    def fail(self, what: str) -> None:
        self.failures.append(what)


def verify(folder: Path, finding: Finding) -> None:
    """Runs `diskprefix verify`."""
    try:
        code, text = worker.output("verify", "--json", "--kv-cache-dir", str(folder))
    except DiskPrefixError as error:
        finding.fail(f"verify: {error}")
        return
    report = json.loads(text)
    if code or not report["clean"]:
        finding.fail(f"verify: exit code {code}: {json.dumps(report['problems'])[:300]}")


def check_entries(
    folder: Path, account: Account, finding: Finding, *, may_evict: bool, payload: Payload = prompts.payload
) -> None:
    """Open the store, and restore every entry that it has as the daemon does.

    What was acknowledged must be there, unless it was being deleted, or a deed that evicts was going on. What is there
    must be whole, whether it was acknowledged or not.
    """
    try:
        with opened(folder) as store:
            _check_entries(store, account, finding, may_evict, payload)
    except CacheError as error:
        finding.fail(f"not opened: {error}")
    left = {path.name for path in folder.glob("*")} - _FILES
    if left:
        finding.fail(f"left behind in the folder: {sorted(left)}")


def _names_in(content: bytes, names: set[bytes]) -> set[bytes]:
    """Returns the names that are in a file, whose content is read once: a name is looked for where two bytes are those
    that some name begins with."""
    begins = np.zeros(1 << 16, bool)
    begins[np.frombuffer(b"".join(name[:2] for name in names), "<u2")] = True
    places = (
        2 * place + odd
        for odd in (0, 1)
        for place in np.flatnonzero(begins[np.frombuffer(content[odd : len(content) - odd], "<u2")]).tolist()
    )
    return names & {content[place : place + HASH_BYTES] for place in places}


@contextmanager
def opened(folder: Path) -> Iterator[Store]:
    store = Store(folder)
    try:
        yield store
    finally:
        store.close()


def _check_entries(store: Store, account: Account, finding: Finding, may_evict: bool, payload: Payload) -> None:
    with store.snapshot() as snapshot:
        present = set(snapshot.keys("entries"))
    names = {number: prompts.last_node(store.secret, number) for number in account.tried | account.saved}
    if unknown := present - set(names.values()):
        finding.fail(f"entries that nobody saved: {[name.hex() for name in unknown]}")
    deed, about = account.doing or ("", -1)
    kept = account.saved - ({about} if deed == "delete" else set())
    missing = sorted(number for number in kept if names[number] not in present)
    evicting = may_evict and deed in EVICTING
    # An eviction that is killed has begun to take what it wanted, and that is never as much as this.
    if missing and not (evicting and len(missing) <= max(2, len(account.saved) // 2)):
        finding.fail(f"acknowledged and lost: prompts {missing}, while {account.doing}")
    with _restorers(store, payload) as restorers:
        for number in sorted(number for number, name in names.items() if name in present):
            if problem := restorers[prompts.model_of(number)].problem(number):
                finding.fail(f"prompt {number}: {problem}")
            else:
                finding.restored += 1


class _ModelRestorer:
    """Restores the prompts of one model and compares their state."""

    def __init__(self, store: Store, model: Model, writer: Writer, payload: Payload) -> None:
        layout = dense_layout(
            layers=model.layers,
            heads=model.heads,
            head_dim=model.head_dim,
            dtype=getattr(torch, model.dtype),
            vocab_size=model.vocab_size,
        )
        assert layout.describe() == model.layout, "the process that is killed writes this layout"

        self._payload = payload
        self._model = SyntheticModel(store, layout, identity=model.identity, block_size=prompts.BLOCK)
        self._restorer = Restorer(self._model, writer, capacity=prompts.MAX_TOKENS)

    def problem(self, number: int) -> str | None:
        """Returns what is wrong with a stored prompt; None if every byte of it is right."""
        token_ids = prompts.token_ids(number)
        try:
            restored = self._restorer.restore(token_ids)
        except CacheError as error:
            return f"not restored: {error}"
        if restored.num_tokens != len(token_ids) or restored.logits is None:
            return f"{restored.num_tokens} of {len(token_ids)} tokens are restored"
        for node in self._model.path(token_ids):
            arena = self._restorer.arena
            found = bytes(arena.read_tokens(node.position, node.num_tokens))
            if node.kind == Kind.TAIL:
                found += arena.logits_bytes(restored.logits)
            expected = self._payload(node.name, token_ids[: node.end], self._model.payload_bytes(node))
            if found != expected:
                return f"another state at tokens {node.position} to {node.end}"
        return None

    def close(self) -> None:
        self._restorer.close()


@contextmanager
def _restorers(store: Store, payload: Payload) -> Iterator[dict[Model, _ModelRestorer]]:
    writer = Writer(store, buffer_bytes=0)
    restorers = {model: _ModelRestorer(store, model, writer, payload) for model in MODELS}
    try:
        yield restorers
    finally:
        for restorer in restorers.values():
            restorer.close()
        writer.close(60.0)
