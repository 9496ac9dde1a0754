"""Machines that share a bucket: what one has computed, another one brings, and nothing that was planted. And what a
purge does with the bucket."""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from diskprefix.prefixstore.cache.tiers.tier import Prefetched, Upload
from diskprefix.prefixstore.remote.bundle import Header, split_bundle
from diskprefix.prefixstore.remote.objects import RemoteUnavailable
from diskprefix.prefixstore.remote.signing import signed, verified
from diskprefix.prefixstore.remote.upkeep import NamespaceObjects
from diskprefix.prefixstore.store.changes import NewNode
from diskprefix.prefixstore.store.following import GoneText
from diskprefix.prefixstore.store.schema import NodeKind, RootRecord
from diskprefix.prefixstore.store.store import Publication
from diskprefix.tokens import ID_BYTES
from tests.prefixstore.remote.made import KEY, OTHER_KEY, WAIT_S, Machine, MakeMachine, share_of_each
from tests.prefixstore.store.building import BLOCK, ROOT, prompt

PROMPT = prompt(1, 7 * BLOCK + 5)


def objects(bucket: Path) -> dict[str, Path]:
    return {str(path.relative_to(bucket)): path for path in bucket.rglob("*") if path.is_file()}


def bundles(bucket: Path) -> dict[str, Path]:
    return {name: path for name, path in objects(bucket).items() if not name.endswith("/about")}


def header_of(path: str, data: bytes) -> Header:
    return split_bundle(verified(KEY, path, data))[0]


def ends_in(bucket: Path) -> set[int]:
    found = bundles(bucket).items()
    nodes = [node for name, path in found for node in header_of(name, path.read_bytes()).nodes]
    return {node.position + len(node.token_ids) // ID_BYTES for node in nodes}


def sharing(make: MakeMachine) -> tuple[Machine, Publication]:
    """Has a machine share the prompt. Returns another one, and what the first one saved."""
    one, other = make(), make()
    saved = one.save(PROMPT)
    one.share(PROMPT)
    return other, saved


def payloads(nodes: Iterable[NewNode]) -> dict[bytes, bytes]:
    return {node.name: b"".join(node.payload) for node in nodes}


@pytest.mark.parametrize("num_tokens", [BLOCK, 6 * BLOCK, 8 * BLOCK + 1])
def test_another_machine_fetches_computed_state_bit_for_bit(num_tokens: int, make: MakeMachine) -> None:
    ids, one, other = prompt(2, num_tokens), make(), make()
    saved = one.save(ids)
    one.share(ids)
    prefetched, nodes = other.prefetch(ids)
    assert payloads(nodes) == payloads(saved.nodes)
    assert [(n.name, n.parent, n.position, n.kind) for n in nodes] == [
        (n.name, n.parent, n.position, n.kind) for n in saved.nodes
    ]
    assert prefetched.names == {node.name for node in saved.nodes}
    assert prefetched.is_whole


def test_checkpoints_come_with_their_blocks(make: MakeMachine) -> None:
    one, other = make(state_bytes=4000), make(state_bytes=4000)
    saved = one.save(PROMPT, checkpoints=(2 * BLOCK, 5 * BLOCK, 7 * BLOCK))
    one.share(PROMPT)
    _, nodes = other.prefetch(PROMPT)
    assert payloads(nodes) == payloads(saved.nodes)
    assert sum(node.kind == NodeKind.CHECKPOINT for node in nodes) == 3


@pytest.mark.parametrize(("offered", "reached"), [(6 * BLOCK, 6 * BLOCK), (6 * BLOCK + 3, 6 * BLOCK + 2)])
def test_no_checkpoint_behind_the_offered_tokens_is_written(
    offered: int, reached: int, make: MakeMachine, bucket: Path
) -> None:
    """It would have tokens of a question that nobody asked twice, and a state computed from them."""
    one = make(state_bytes=4000)
    one.save(PROMPT, checkpoints=(3 * BLOCK + 2, 6 * BLOCK + 2, 6 * BLOCK + 7, 7 * BLOCK + 1))
    one.share(PROMPT, offered)
    assert ends_in(bucket) == {*range(BLOCK, 6 * BLOCK + 1, BLOCK), 3 * BLOCK + 2, reached}


def test_bundles_lie_at_fixed_positions_so_prompts_share_them(make: MakeMachine, bucket: Path) -> None:
    one = make()
    one.save(PROMPT)
    one.share(PROMPT)
    assert len(bundles(bucket)) == 3, "two whole ones, and the prompt's end"
    ids = np.concatenate([PROMPT, prompt(3, 2 * BLOCK)])
    one.save(ids)
    one.share(ids)
    assert len(bundles(bucket)) == 5, "the third whole one, and the longer prompt's end"


@pytest.mark.parametrize("reached", [2, 4])
def test_a_longer_prompt_takes_what_a_shorter_one_left_at_its_end(reached: int, make: MakeMachine) -> None:
    one, other = make(), make()
    saved = one.save(PROMPT)
    one.share(PROMPT, num_tokens=reached * BLOCK + 3)
    _, nodes = other.prefetch(PROMPT)
    assert payloads(nodes) == payloads(saved.nodes[:reached])


def test_who_reads_while_the_tier_closes_goes_on_without_the_rest(
    make: MakeMachine, caplog: pytest.LogCaptureFixture
) -> None:
    """As a daemon ends while a request waits for the bucket."""
    other, _ = sharing(make)
    other.remote.close(WAIT_S)
    prefetched, nodes = other.prefetch(PROMPT)
    assert (prefetched.is_whole, nodes, caplog.records) == (False, [], [])


def test_what_a_machine_has_is_not_fetched_again(make: MakeMachine) -> None:
    other, saved = sharing(make)
    other.save(PROMPT[: 4 * BLOCK], end_kind=NodeKind.BLOCK)
    _, nodes = other.prefetch(PROMPT)
    assert payloads(nodes) == payloads(saved.nodes[4:])
    assert other.remote.stats()["fetched"] == 2
    other.save(PROMPT)
    before = other.remote.stats()
    assert other.prefetch(PROMPT)[1] == []
    assert other.remote.stats() == before, "nobody is asked for a prompt that is stored"


def test_what_memory_holds_is_not_asked_for(make: MakeMachine) -> None:
    other, saved = sharing(make)
    before = other.remote.stats()
    assert other.prefetch(PROMPT, in_memory_tokens=6 * BLOCK + 1)[1] == []
    assert other.remote.stats() == before
    asked: list[int] = []

    def pays(num_tokens: int, _: int) -> bool:
        asked.append(num_tokens)
        return True

    # What continues it can only be stored if all before it is.
    assert payloads(other.prefetch(PROMPT, in_memory_tokens=6 * BLOCK, pays=pays)[1]) == payloads(saved.nodes)
    assert asked == [BLOCK + 5]


def test_a_bucket_that_cannot_be_written_is_still_read(make: MakeMachine, monkeypatch: pytest.MonkeyPatch) -> None:
    other, saved = sharing(make)

    def full(*_: object, **__: object) -> Any:
        raise OSError("no space")

    monkeypatch.setattr(other.remote.objects, "_put", full)
    for _ in range(4):
        with pytest.raises(RemoteUnavailable):
            other.remote.objects.put("a", b"")
    assert other.remote.stats()["state"] == "ok"
    assert payloads(other.prefetch(PROMPT)[1]) == payloads(saved.nodes)


class Panic(BaseException):
    """An error as the library raises it when it panics: no `Exception`."""


@pytest.mark.parametrize("error", [RuntimeError, Panic])
def test_no_error_of_the_library_or_of_our_own_fails_a_request(
    error: type[BaseException], make: MakeMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    other, saved = sharing(make)
    get, asked = other.remote.objects._obstore.get, []

    def fail(*args: Any, **options: Any) -> Any:
        asked.append(args)
        if len(asked) > 1:
            raise error("at once")
        return get(*args, **options)

    monkeypatch.setattr(other.remote.objects._obstore, "get", fail)
    prefetched, nodes = other.prefetch(PROMPT)
    assert payloads(nodes) == payloads(saved.nodes[:3])
    assert (len(prefetched.names), prefetched.is_whole) == (3, False)
    monkeypatch.undo()
    monkeypatch.setattr("diskprefix.prefixstore.remote.remote_tier.slot_path", fail)
    if error is RuntimeError:
        assert other.prefetch(PROMPT)[0].is_whole is False


def test_a_bucket_that_is_late_three_times_in_a_row_is_left_alone(make: MakeMachine) -> None:
    other, _ = sharing(make)
    for _ in range(5):
        prefetched, _ = other.prefetch(PROMPT, max_s=0.0)
        assert not prefetched.is_whole
    stats = other.remote.stats()
    assert (stats["late"], stats["skipped"], stats["state"]) == (3, 2, "failing")
    assert prefetched.num_bytes == 0
    late, _ = make().prefetch(PROMPT, max_s=0.0)
    assert (late.is_late, late.num_bytes) == (True, 0)
    assert late.wanted_bytes == 7 * other.nodes(PROMPT).layout.payload_bytes(BLOCK, NodeKind.BLOCK)


def test_closing_does_not_wait_for_what_hangs(make: MakeMachine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine, began, goes_on = make(), threading.Event(), threading.Event()
    put = machine.remote.objects._put
    names: list[str] = []

    def hang(path: str, data: bytes) -> object:
        names.append(path)
        began.set()
        assert goes_on.wait(WAIT_S)
        return put(path, data)

    monkeypatch.setattr(machine.remote.objects, "_put", hang)
    machine.save(PROMPT)
    record = RootRecord(model="tiny", block_size=BLOCK, layout=machine.layout, created_at=0.0)
    machine.remote.upload(Upload(machine.nodes(PROMPT), len(PROMPT), record, machine.tiers))
    assert began.wait(WAIT_S)
    machine.remote.close(0.05)
    goes_on.set()
    machine.remote._writer.join(WAIT_S)
    assert len(names) == 2, "the description and one object: the next ones are not begun"


def test_a_prompt_of_which_nothing_is_there_costs_few_requests(make: MakeMachine) -> None:
    machine = make()
    prefetched, nodes = machine.prefetch(prompt(4, 30 * BLOCK))
    assert (prefetched.num_bytes, nodes, prefetched.is_whole) == (0, [], True)
    assert machine.remote.stats()["missing"] <= 3


def test_an_object_is_written_once_by_all_machines(make: MakeMachine, bucket: Path) -> None:
    one, other = make(), make()
    for machine in (one, one, other):
        machine.save(PROMPT)
        machine.share(PROMPT)
    assert one.remote.stats()["written"] == 3
    assert other.remote.stats()["written"] == 0
    assert len(bundles(bucket)) == 3


def cut(data: bytes, _: str) -> bytes:
    return data[:-10]


def flip(data: bytes, _: str) -> bytes:
    return data[:-10] + bytes([data[-10] ^ 1]) + data[-9:]


def sign_again(data: bytes, path: str, change: Callable[[Header], Header], key: Any = KEY) -> bytes:
    header, body = split_bundle(verified(KEY, path, data))
    packed = msgspec.msgpack.encode(change(header))
    return signed(key, path, struct.pack("<I", len(packed)) + packed + body)


def with_other_tokens(header: Header) -> Header:
    first = header.nodes[0]
    other = msgspec.structs.replace(first, token_ids=bytes(len(first.token_ids)))
    return msgspec.structs.replace(header, nodes=(other, *header.nodes[1:]))


def plant(data: bytes, path: str) -> bytes:
    """Good checksums, and the namespace of the fleet, but none of its keys."""
    forged = bytearray(sign_again(data, path, lambda header: header, OTHER_KEY))
    forged[:24] = data[:24]
    return bytes(forged)


def with_a_large_piece(header: Header) -> Header:
    first = header.nodes[0]
    other = msgspec.structs.replace(first, sizes=(1 << 30, *first.sizes[1:]))
    return msgspec.structs.replace(header, nodes=(other, *header.nodes[1:]))


DAMAGE: dict[str, tuple[Callable[[bytes, str], bytes], str]] = {
    "a cut body": (cut, "truncated"),
    "a cut header": (lambda data, _: data[:100], "truncated"),
    "nothing": (lambda _data, _path: b"", "truncated"),
    "a flipped bit of state": (flip, "mac"),
    "another program's": (lambda _data, _path: b"PNG" * 100, "foreign"),
    "signed by another fleet": (lambda d, p: sign_again(d, p, lambda header: header, OTHER_KEY), "foreign"),
    "planted without the key": (plant, "mac"),
    "signed with other tokens": (lambda d, p: sign_again(d, p, with_other_tokens), "mismatch"),
    "signed with a piece that is too large": (lambda d, p: sign_again(d, p, with_a_large_piece), "mismatch"),
    "a header of another kind": (lambda _, p: signed(KEY, p, struct.pack("<I", 3) + b"abc"), "mismatch"),
    "no header": (lambda _, p: signed(KEY, p, b"a"), "mismatch"),
    "much more than it can be": (lambda d, _: d + bytes(8 << 20), "oversized"),
    "signed without its nodes": (
        lambda d, p: sign_again(d, p, lambda h: msgspec.structs.replace(h, nodes=h.nodes[:1])),
        "mismatch",
    ),
}


@pytest.mark.parametrize(
    ("what", "is_behind_a_block"),
    [*((what, False) for what in DAMAGE), ("a cut body", True), ("nothing", True), ("a flipped bit of state", True)],
)
def test_a_wrong_object_is_refused_and_counted_and_what_comes_before_it_is_used(
    what: str, is_behind_a_block: bool, make: MakeMachine, bucket: Path
) -> None:
    other, saved = sharing(make)
    victim = 5 if not is_behind_a_block else 2
    (path,) = (name for name in bundles(bucket) if saved.nodes[victim].name.hex() in name)
    damage, reason = DAMAGE[what]
    bundles(bucket)[path].write_bytes(damage(bundles(bucket)[path].read_bytes(), path))
    if is_behind_a_block:
        other.save(PROMPT[:BLOCK], end_kind=NodeKind.BLOCK)
    _, nodes = other.prefetch(PROMPT)
    assert payloads(nodes) == payloads(saved.nodes[:3] if not is_behind_a_block else [])
    refused = {name: count for name, count in other.remote.stats()["refused"].items() if count}
    assert refused == {reason: 1}
    before = other.remote.stats()
    other.prefetch(PROMPT)
    assert other.remote.stats()["refused"] == before["refused"], "it is not fetched again"


def test_an_object_under_another_name_is_refused(make: MakeMachine, bucket: Path) -> None:
    other, saved = sharing(make)
    first, second = (
        next(path for name, path in bundles(bucket).items() if saved.nodes[index].name.hex() in name)
        for index in (2, 5)
    )
    second.write_bytes(first.read_bytes())
    assert payloads(other.prefetch(PROMPT)[1]) == payloads(saved.nodes[:3])
    assert other.remote.stats()["refused"]["replayed"] == 1


def test_who_computes_what_was_refused_writes_it_anew(make: MakeMachine, bucket: Path) -> None:
    other, saved = sharing(make)
    for path in bundles(bucket).values():
        path.write_bytes(b"planted")
    assert other.prefetch(PROMPT)[1] == []
    other.save(PROMPT)
    other.share(PROMPT)
    # Of the third one nobody knows that it is bad.
    assert payloads(make().prefetch(PROMPT)[1]) == payloads(saved.nodes[:3])


def test_a_request_that_is_cancelled_or_has_no_time_waits_no_longer(make: MakeMachine) -> None:
    other, _ = sharing(make)
    for wish in ({"is_cancelled": lambda: True}, {"max_s": 0.0}):
        prefetched, nodes = other.prefetch(PROMPT, **wish)
        assert (prefetched.is_whole, nodes) == (False, [])
    assert other.remote.stats()["late"] == 1


def test_without_room_in_the_buffer_it_stops(make: MakeMachine) -> None:
    other, _ = sharing(make)
    prefetched, _ = other.prefetch(PROMPT, publish=lambda _: False)
    assert (prefetched.is_whole, prefetched.names) == (False, frozenset())


def test_what_is_computed_sooner_is_not_fetched(make: MakeMachine) -> None:
    other, _ = sharing(make)
    asked: list[tuple[int, int]] = []

    def pays(num_tokens: int, num_bytes: int) -> bool:
        asked.append((num_tokens, num_bytes))
        return False

    assert other.prefetch(PROMPT, pays=pays)[1] == []
    nodes = other.nodes(PROMPT)
    assert asked == [(len(PROMPT), 7 * nodes.layout.payload_bytes(nodes.block_size, NodeKind.BLOCK))]
    assert (other.remote.stats()["slower"], other.remote.stats()["fetched"]) == (1, 0)


def test_a_server_that_fails_is_left_alone_after_three_failures(
    make: MakeMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine, asked = make(), []

    def fail(*args: object, **_: object) -> Any:
        asked.append(args)
        raise machine.remote.objects._obstore.exceptions.GenericError("it is on fire")

    monkeypatch.setattr(machine.remote.objects._obstore, "get", fail)
    for _ in range(5):
        prefetched, nodes = machine.prefetch(PROMPT)
        assert (prefetched.is_whole, nodes) == (False, [])
    stats = machine.remote.stats()
    assert (stats["state"], stats["failed"], stats["skipped"], len(asked)) == ("failing", 3, 2, 3)


def test_what_is_evicted_before_it_is_written_is_left_out(make: MakeMachine, bucket: Path) -> None:
    make().share(PROMPT)
    assert objects(bucket) == {}


def test_machines_agree_on_the_format(make: MakeMachine, bucket: Path) -> None:
    """Objects outlive the version that wrote them: what changes here is another version of the format."""
    machine: Machine = make()
    machine.save(PROMPT)
    machine.share(PROMPT)
    name = machine.nodes(PROMPT).path.block_names[2].hex()
    data = bundles(bucket)[f"{KEY.digest.hex()}/{ROOT.hex()}/{name}.3"].read_bytes()
    assert data[:6] == b"dpxR\x03\x00"
    assert data[16:24] == KEY.digest[:8]


def test_only_whole_or_late_fetches_measure_the_speed_of_the_tier() -> None:
    whole = Prefetched(frozenset({b"a"}), 100, 200, 1.0)
    late = Prefetched(frozenset({b"b"}), 0, 300, 9.0, is_whole=False, is_late=True)
    failed = Prefetched(frozenset({b"c"}), 7, 400, 2.0, is_whole=False)
    assert [one.telling_bytes for one in (whole, late, failed)] == [100, 300, 0]


@pytest.mark.parametrize("num_looks", [0, 1])
def test_a_prompt_of_before_a_purge_is_not_uploaded_and_what_was_just_written_of_it_goes(
    make: MakeMachine, num_looks: int
) -> None:
    """A purge may look at the bucket before the object is there that is being written."""
    machine, looks = make(), iter([True] * num_looks)
    machine.save(PROMPT)
    record = RootRecord(model="tiny", block_size=BLOCK, layout=machine.layout, created_at=0.0)
    upload = Upload(machine.nodes(PROMPT), len(PROMPT), record, machine.tiers, lambda: next(looks, False))
    machine.remote.upload(upload)
    assert machine.remote.flush(30)
    assert [path for path in machine.remote.objects.list("") if not path.endswith("about")] == []
    assert machine.remote.counts()["dropped"] == 1


def num_objects(bucket: Path) -> int:
    return len(list(bucket.rglob("*.*")))


def test_a_purge_of_a_tenant_leaves_the_others(make: MakeMachine, bucket: Path) -> None:
    share_of_each(make(), PROMPT, "", "a" * 32)
    objects = make().remote.objects
    assert NamespaceObjects(objects, OTHER_KEY).purge(lambda _model, _tenant: True) == 0
    assert NamespaceObjects(objects, KEY).purge(lambda model, tenant: (model, tenant) == ("tiny", "a" * 32)) == 3
    assert num_objects(bucket) == len(list(bucket.rglob("*/about"))) * 3 == 3
    assert NamespaceObjects(objects, KEY).purge(lambda _model, tenant: tenant == "a" * 32) == 0
    assert NamespaceObjects(objects, KEY).purge(lambda _model, tenant: tenant == "") == 3
    assert [path for path in bucket.rglob("*") if path.is_file()] == []


def test_a_deleted_prompt_leaves_the_objects_that_another_needs(make: MakeMachine, bucket: Path) -> None:
    machine, other = make(), PROMPT.copy()
    other[5 * BLOCK :] += 1
    for token_ids in (PROMPT, other):
        machine.save(token_ids)
        machine.share(token_ids)
    before = {path.name for path in bucket.rglob("*.*")}
    text = GoneText(ROOT, BLOCK, PROMPT, num_kept=5 * BLOCK)
    assert machine.remote.delete_texts([text], 20) == 2, "the bundle and the end of the prompt that are its own"
    assert len(before) - len({path.name for path in bucket.rglob("*.*")}) == 2
    assert len(make().prefetch(other)[1]) == 8
    # What it knew of the objects that are gone does not keep it from writing them again.
    machine.share(PROMPT)
    assert {path.name for path in bucket.rglob("*.*")} == before


def test_of_a_whole_prompt_nothing_is_left(make: MakeMachine, bucket: Path) -> None:
    machine = make()
    machine.save(PROMPT)
    machine.share(PROMPT)
    machine.share(PROMPT, 4 * BLOCK)
    assert machine.remote.delete_texts([GoneText(ROOT, BLOCK, PROMPT, num_kept=0)], 20) >= 3
    assert [path.name for path in bucket.rglob("*") if path.is_file()] == ["about"]


def test_a_daemon_describes_its_root_again_after_a_purge(make: MakeMachine, bucket: Path) -> None:
    machine = make()
    machine.save(PROMPT)
    machine.share(PROMPT[: 3 * BLOCK])
    NamespaceObjects(machine.remote.objects, KEY).purge(lambda model, _tenant: model == "tiny")
    assert not list(bucket.rglob("about"))
    longer = np.concatenate([PROMPT[: 6 * BLOCK], prompt(2, BLOCK)])
    machine.save(longer)
    machine.share(longer)
    assert NamespaceObjects(machine.remote.objects, KEY).purge(lambda model, _tenant: model == "tiny") > 0
    assert num_objects(bucket) == 0


def test_objects_without_a_sound_description_stay(make: MakeMachine, bucket: Path) -> None:
    share_of_each(make(), PROMPT, "", "a" * 32)
    objects = make().remote.objects
    about = sorted(bucket.rglob("about"))[1]
    for planted in (b"planted", bytes(1 << 20), None):
        about.unlink() if planted is None else about.write_bytes(planted)
        assert NamespaceObjects(objects, KEY).purge(lambda _model, tenant: tenant == "a" * 32) == 0
    assert NamespaceObjects(objects, KEY).purge(lambda _model, _tenant: True) == 3
    assert num_objects(bucket) == 3
