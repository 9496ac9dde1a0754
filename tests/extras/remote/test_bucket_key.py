"""Objects of machines that encrypt: nothing is in them as it is, nobody without both keys finds, reads or forges one,
and who has both works with them as with others."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from diskprefix.extras.remote.bucket_key import BucketKey
from diskprefix.extras.remote.signing import (
    PREAMBLE_BYTES,
    ObjectRefused,
    opened_piece,
    piece_digest,
    piece_place,
    signed_bytes,
)
from diskprefix.extras.remote.upkeep import purge, roots, sweep
from diskprefix.store.maintenance.purge import GoneText
from diskprefix.store.schema import Kind
from tests.extras.remote.made import ENCRYPTING, KEY, OTHER_ENCRYPTING, MakeMachine
from tests.store.building import BLOCK, ROOT, prompt

PROMPT = prompt(1, 7 * BLOCK + 5)
PIECE = b"a piece" * 9
STEP = 500


def content(bucket: Path) -> Iterator[tuple[str, bytes]]:
    return ((str(path.relative_to(bucket)), path.read_bytes()) for path in bucket.rglob("*") if path.is_file())


def test_no_token_name_model_or_payload_is_in_a_bucket(make: MakeMachine, tmp_path: Path) -> None:
    plain, encrypted = tmp_path / "plain", tmp_path / "encrypted"
    for key, folder in ((KEY, plain), (ENCRYPTING, encrypted)):
        machine = make(key=key, url=folder.as_uri())
        saved = machine.save(PROMPT, end_kind=Kind.BLOCK)
        machine.share(PROMPT, 7 * BLOCK + 2, in_parts=True)
    secrets = [PROMPT[at : at + 2].tobytes() for at in range(0, len(PROMPT), 2)]
    secrets += [ROOT, *(node.name for node in saved.nodes), ROOT.hex().encode(), b"tiny"]
    secrets += [node.name.hex().encode() for node in saved.nodes]
    for path, data in content(plain):
        if not path.endswith("/about"):
            body = data[signed_bytes(data) :]
            secrets += [body[at : at + 16] for at in range(0, len(body) - 16, STEP)]
    shown, hidden = (b"".join(path.encode() + data for path, data in content(one)) for one in (plain, encrypted))
    assert sum(secret in shown for secret in secrets) > 0.9 * len(secrets)
    assert [secret for secret in secrets if secret in hidden] == []


@pytest.mark.parametrize("other", [KEY, OTHER_ENCRYPTING])
def test_only_who_has_both_keys_finds_what_was_shared(other: BucketKey, make: MakeMachine, bucket: Path) -> None:
    one, stranger, near = make(key=ENCRYPTING), make(key=other), make(key=ENCRYPTING)
    saved = one.save(PROMPT)
    one.share(PROMPT)
    payloads = {node.name: bytes(node.payload) for node in saved.nodes}
    for have in (0, BLOCK):
        # With a part near, only a range of the first object is read.
        if have:
            near.save(PROMPT[:have], end_kind=Kind.BLOCK)
        _, nodes = near.prefetch(PROMPT)
        assert {node.name: bytes(node.payload) for node in nodes} == dict(list(payloads.items())[have // BLOCK :])
    assert stranger.prefetch(PROMPT)[1] == []
    assert roots(stranger.remote.objects, other) == []
    assert sum(stranger.remote.stats()["refused"].values()) == 0
    before = dict(content(bucket))
    stranger.save(PROMPT)
    stranger.share(PROMPT)
    purge(stranger.remote.objects, other, lambda _: True)
    assert dict(content(bucket)) == before


def test_a_changed_or_moved_object_is_refused(make: MakeMachine, bucket: Path) -> None:
    one, other = make(key=ENCRYPTING), make(key=ENCRYPTING)
    saved = one.save(PROMPT)
    one.share(PROMPT)
    first, second = (next(bucket.rglob(f"{ENCRYPTING.path_name(saved.nodes[at].name)}.*")) for at in (2, 5))
    second.write_bytes(first.read_bytes())
    assert [node.name for node in other.prefetch(PROMPT)[1]] == [node.name for node in saved.nodes[:3]]
    data = bytearray(first.read_bytes())
    data[-1] ^= 1
    first.write_bytes(data)
    assert make(key=ENCRYPTING).prefetch(PROMPT)[1] == []
    assert other.remote.stats()["refused"]["replayed"] == 1


def test_a_piece_opens_in_its_place_of_its_object_only() -> None:
    name = b"n" * 16

    def opened(path: str, its_name: bytes, index: int, stored: bytes) -> bytes:
        # Whoever had the key of the MAC, but not the one of the pieces.
        digest = piece_digest(ENCRYPTING, its_name, index, stored)
        return bytes(opened_piece(ENCRYPTING, path, its_name, index, memoryview(stored), digest))

    stored = bytes(ENCRYPTING.sealer()(piece_place("a/b", name, 1), PIECE))
    assert opened("a/b", name, 1, stored) == PIECE
    changed = stored[:-1] + bytes([stored[-1] ^ 1])
    for place in (("a/c", name, 1, stored), ("a/b", b"m" * 16, 1, stored), ("a/b", name, 0, stored)):
        with pytest.raises(ObjectRefused, match="is not the one that was signed"):
            opened(*place)
    for damaged in (changed, stored[:-1], stored[:30], b""):
        with pytest.raises(ObjectRefused, match="is not the one that was signed"):
            opened("a/b", name, 1, damaged)


def test_each_object_has_a_key_of_its_own(make: MakeMachine, bucket: Path) -> None:
    machine = make(key=ENCRYPTING)
    machine.save(PROMPT)
    machine.share(PROMPT)
    written = dict(content(bucket))
    purge(machine.remote.objects, ENCRYPTING, lambda _: True)
    machine.remote.ledger.forget(written)
    machine.share(PROMPT)
    again = dict(content(bucket))
    assert set(again) == set(written)
    salts = [data[PREAMBLE_BYTES + len(path) :][:16] for some in (written, again) for path, data in some.items()]
    assert len(set(salts)) == len(salts) == 8


def test_a_bucket_that_is_encrypted_is_swept_purged_and_forgets(make: MakeMachine, bucket: Path) -> None:
    machine = make(key=ENCRYPTING)
    machine.save(PROMPT, end_kind=Kind.BLOCK)
    objects = machine.remote.objects

    def share() -> None:
        machine.share(PROMPT, 7 * BLOCK + 2, in_parts=True)

    share()
    (root,) = roots(objects, ENCRYPTING)
    assert (root.model, root.block_size, len(root.objects)) == ("tiny", BLOCK, 4)
    assert machine.remote.forget([GoneText(ROOT, BLOCK, PROMPT, num_kept=0)], 20) == 4
    share()
    swept = sweep(objects, ENCRYPTING, ttl_s=1.0, budget_bytes=0, now=time.time() + 1e6)
    assert (swept.found, swept.objects, swept.unknown_objects) == (4, 4, 0)
    machine.remote.ledger.forget([one.path for one in root.objects])
    share()
    _, removed = purge(objects, ENCRYPTING, lambda root: root.model == "tiny")
    assert removed.objects == 4
    assert not list(content(bucket))
