"""The pictures of prompts in the engine: which rows a step takes, and that each picture is encoded once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from torch import nn

from diskprefix.daemon.engine.fetches import Fetches
from diskprefix.daemon.engine.pictures.picture_rows import PictureRowsSource, SlicedCall
from diskprefix.daemon.engine.pictures.prompt_pictures import PromptPictures
from diskprefix.daemon.engine.pools import EnginePools
from diskprefix.daemon.engine.scheduler import NO_LIMIT
from diskprefix.errors import DeviceLost, InvalidRequest
from diskprefix.prefixstore.kv.numbers import Array
from diskprefix.prefixstore.store import reads
from diskprefix.prefixstore.store.epochs import Epoch
from diskprefix.thread_pool import ThreadPool
from diskprefix.tokens import as_token_ids, picture_ids
from diskprefix.values import CacheOptions, Picture, Prompt, Scope, Tenant
from tests.examples import examples
from tests.waiting import wait_for

FULL = CacheOptions(scope=Scope("full"))
PLACEHOLDER = 7


class Encoder:
    """Returns rows that tell the picture and the number of the row, in two layers."""

    token_id, levels, hidden, dtype, sees_whole = PLACEHOLDER, 2, 3, "float32", False
    nothing = np.empty((2, 0, 3), np.float32)

    def __init__(self) -> None:
        self.layers = nn.ModuleList([nn.Identity(), nn.Identity()])
        self.encoded: list[bytes] = []

    def slices(self) -> list[nn.Module]:
        return list(self.layers)

    def positions(self, token_ids: Array, is_picture: Array, _pictures: Any) -> Array:
        """Tokens of pictures do not count on the second axis."""
        return np.stack([np.arange(len(token_ids)), (~is_picture).cumsum()])

    def encode(self, picture: Picture, inputs: dict[str, Any]) -> Array:
        self.encoded.append(picture.name)
        rows: Array = rows_of(picture) + inputs["add"]
        for layer in self.layers:
            rows = layer(rows)
        return rows


def rows_of(picture: Picture) -> Array:
    return np.arange(2 * picture.num_tokens * 3, dtype=np.float32).reshape(2, -1, 3) + 1000 * picture.name[0]


def picture(number: int, num_tokens: int, prepare: Callable[[], dict[str, Any]] = lambda: {"add": 0}) -> Picture:
    return Picture(bytes([number]) * 16, "", num_tokens, {}, "1x1", 1, f"messages.{number}", prepare)


def prompt_of(*parts: int | Picture) -> Prompt:
    """A prompt of pictures, and of texts of so many tokens."""
    ids = [np.full(part, 5) if isinstance(part, int) else picture_ids(part.name, part.num_tokens) for part in parts]
    pictures = tuple(part for part in parts if isinstance(part, Picture))
    return Prompt(as_token_ids(np.concatenate(ids)), pictures=pictures)


def pictures_in(*parts: int | Picture, encoder: Any = None) -> PromptPictures:
    made: Any = encoder or Encoder()
    return PromptPictures.of(prompt_of(*parts), made)


@given(sizes=st.lists(st.tuples(st.integers(0, 4), st.integers(1, 5)), min_size=1, max_size=4), data=st.data())
@settings(max_examples=examples(60), deadline=None)
def test_the_rows_of_steps_are_those_of_the_whole_prompt_however_it_is_cut(
    sizes: list[tuple[int, int]], data: st.DataObject
) -> None:
    pictures = [picture(number, count) for number, (_, count) in enumerate(sizes)]
    prompt = pictures_in(*(part for (text, _), one in zip(sizes, pictures, strict=True) for part in (text, one)), 2)
    prompt.encoded = [rows_of(one) for one in pictures]
    length = len(prompt.token_ids)
    assert int((prompt.token_ids == PLACEHOLDER).sum()) == sum(count for _, count in sizes)
    cuts = sorted(data.draw(st.sets(st.integers(1, length + 3), max_size=4)))
    steps = [prompt.rows(start, end) for start, end in zip([0, *cuts], [*cuts, length + 5], strict=True)]
    found = np.concatenate([step.encoded for step in steps], axis=1)
    assert np.array_equal(found, np.concatenate([*map(rows_of, pictures)], axis=1))
    is_picture = np.concatenate([step.is_picture for step in steps])
    assert np.array_equal(is_picture[:length], prompt.is_picture)
    assert not is_picture[length:].any()
    positions = np.concatenate([step.positions for step in steps if step.positions is not None], axis=1)
    assert prompt.positions is not None
    assert np.array_equal(positions[:, :length], prompt.positions)
    assert positions[:, length:].tolist() == [list(range(length, length + 5))] * 2


def test_a_prompt_is_computed_up_to_the_first_picture_whose_rows_are_missing() -> None:
    prompt = pictures_in(3, picture(0, 4), 2, picture(1, 4), 5)
    assert [(prompt.missing(at), prompt.limit(at)) for at in (0, 3, 5)] == [(0, 3), (0, 3), (0, 5)]
    assert [(prompt.missing(at), prompt.limit(at)) for at in (7, 12, 13)] == [(1, 9), (1, 12), (None, NO_LIMIT)]
    prompt.encoded[0] = rows_of(prompt.pictures[0])
    assert (prompt.missing(0), prompt.limit(0)) == (1, 9)


def test_pictures_that_see_themselves_and_touch_are_computed_together() -> None:
    class Seeing(Encoder):
        sees_whole = True

    prompt = pictures_in(3, picture(0, 4), picture(1, 4), 5, picture(2, 2), encoder=Seeing())
    assert prompt.spans == ((3, 11), (16, 18))
    assert [prompt.limit(at) for at in (0, 5)] == [3, 5]
    prompt.encoded[0] = rows_of(prompt.pictures[0])
    assert [prompt.limit(at) for at in (0, 5)] == [3, 5]
    prompt.encoded[1] = rows_of(prompt.pictures[1])
    assert prompt.limit(0) == 16
    assert prompt.rows(0, 12).spans == ((3, 11),)


def test_a_call_is_run_in_slices_and_ends_with_its_result_or_its_error_or_where_it_is_closed() -> None:
    layers, passed = [nn.Identity(), nn.Identity()], list[int]()

    def call() -> Array:
        rows = np.ones(1)
        for number, layer in enumerate(layers):
            rows = layer(rows)
            passed.append(number)
        return rows

    threads = ThreadPool(1, "encoder").start()
    sliced = SlicedCall(call, layers, threads)
    for slices in range(3):
        assert (len(passed), sliced.is_over) == (max(0, slices - 1), False)
        sliced.run_slice()
    assert sliced.is_over
    assert sliced.result is not None
    assert not layers[0]._forward_pre_hooks
    failing = SlicedCall(lambda: np.ones(2) @ np.ones(3), layers, threads)
    failing.run_slice()
    assert isinstance(failing.error, ValueError)
    passed.clear()
    closed = SlicedCall(call, layers, threads)
    closed.run_slice()
    closed.close()
    assert closed.is_over
    assert not passed
    # Others may call the modules meanwhile.
    layers[0](np.ones(1))
    threads.shutdown()


class Stored:
    """Outputs of encoders by the names of pictures."""

    def __init__(self) -> None:
        self.rows: dict[bytes, Array] = {}
        self.saved: list[bytes] = []
        self.may_load = threading.Event()
        self.may_load.set()

    def epoch(self, _tenant: Tenant) -> Epoch:
        return Epoch()

    def load(self, picture: Picture, *_: Any) -> Array | None:
        assert self.may_load.wait(10)
        return self.rows.get(picture.name)

    def save(self, picture: Picture, rows: Array, *_: Any) -> None:
        self.rows[picture.name] = rows.copy()
        self.saved.append(picture.name)


@pytest.fixture
def parts() -> Iterator[SimpleNamespace]:
    woken, encoder, stored, beats = threading.Event(), Encoder(), Stored(), list[int]()
    store = SimpleNamespace(reads=SimpleNamespace(stalled=None), write_s=0.0)
    cache: Any = SimpleNamespace(store=store, count=str, settings=SimpleNamespace(max_sequences=1))
    pages: Any = SimpleNamespace()
    pools = EnginePools(1)
    fetches = Fetches(cache, pages, pools.steps, woken.set)
    begin = fetches.begin_read
    source = PictureRowsSource(encoder, stored, begin, woken.set, beats.append, pools)  # type: ignore[arg-type]
    yield SimpleNamespace(
        source=source, fetches=fetches, pools=pools, encoder=encoder, stored=stored, woken=woken, beats=beats
    )
    pools.close()


def taken(parts: SimpleNamespace) -> list[tuple[PromptPictures, Exception | None]]:
    for read in parts.fetches.ended_reads():
        read.on_end(read)
    found: list[tuple[PromptPictures, Exception | None]] = parts.source.ready_prompts()
    return found


def wait_for_loads(parts: SimpleNamespace) -> None:
    parts.fetches._pools["picture"].submit(int).result()


def drain(parts: SimpleNamespace) -> list[tuple[PromptPictures, Exception | None]]:
    """Does what the engine does until no picture is wanted."""
    found: list[tuple[PromptPictures, Exception | None]] = []
    while parts.source._jobs:
        assert parts.woken.wait(10)
        parts.woken.clear()
        found += taken(parts)
        while parts.source.run_slice():
            found += taken(parts)
    return found


def test_a_picture_that_several_prompts_want_is_encoded_once_and_then_comes_from_the_store(
    parts: SimpleNamespace,
) -> None:
    def is_shared() -> bool:
        """In a function of its own: assertions keep what they compare."""
        of = [pictures_in(*before, picture(1, 3), encoder=parts.encoder) for before in ((1,), (), (5,))]
        wanted = [parts.source.want(pictures, 0, FULL) for pictures in (*of[:2], of[0])]
        came = drain(parts)
        told = [one.timings()["images_encoded"] for one in of[:2]]
        is_there = parts.source.want(of[2], 0, FULL)
        is_one = of[0].encoded[0] is of[1].encoded[0] is of[2].encoded[0] is not None
        return (wanted, told, is_there, is_one) == ([False] * 3, [1, 0], True, True) and came == [
            (of[0], None),
            (of[1], None),
        ]

    assert is_shared()
    later = pictures_in(2, picture(1, 3), encoder=parts.encoder)
    assert not parts.source.want(later, 0, FULL)
    assert drain(parts) == [(later, None)]
    assert later.timings()["images_restored"] == 1
    assert parts.encoder.encoded == parts.stored.saved == [picture(1, 3).name]


def test_shares_take_turns_with_the_encoder(parts: SimpleNamespace) -> None:
    asked = [*((number, "alice") for number in range(6)), *((number, "bob") for number in (6, 7))]
    wanted = [(pictures_in(picture(number, 3), encoder=parts.encoder), share) for number, share in asked]
    for pictures, share in wanted:
        assert not parts.source.want(pictures, 0, replace(FULL, share=share))
    wait_for_loads(parts)
    drain(parts)
    order = [0, 6, 1, 7, 2, 3, 4, 5]
    assert parts.encoder.encoded == [picture(number, 3).name for number in order]


def test_what_goes_wrong_with_a_picture_reaches_all_prompts_that_want_it(parts: SimpleNamespace) -> None:
    def fail() -> dict[str, Any]:
        raise ValueError("cannot be decoded")

    wanting = [pictures_in(picture(2, 3, prepare), encoder=parts.encoder) for prepare in (fail, fail)]
    for pictures in wanting:
        parts.source.want(pictures, 0, FULL)
    assert [(pictures, str(error)) for pictures, error in drain(parts)] == [
        (one, "cannot be decoded") for one in wanting
    ]
    again = pictures_in(picture(2, 3), encoder=parts.encoder)
    parts.source.want(again, 0, FULL)
    assert drain(parts) == [(again, None)]


def test_a_picture_of_a_request_that_has_ended_is_not_begun_but_goes_on_to_its_end(parts: SimpleNamespace) -> None:
    gone, begun = (pictures_in(picture(number, 3), encoder=parts.encoder) for number in (3, 4))
    parts.source.want(gone, 0, FULL)
    assert parts.woken.wait(10)
    gone.is_over = True
    drain(parts)
    assert parts.encoder.encoded == []
    parts.woken.clear()
    parts.source.want(begun, 0, FULL)
    assert parts.woken.wait(10)
    taken(parts)
    while not parts.source.run_slice():
        assert parts.woken.wait(10)
        parts.woken.clear()
    begun.is_over = True
    while parts.source.run_slice():
        taken(parts)
    assert parts.stored.saved == [begun.pictures[0].name]
    assert parts.beats == [3, 3, 3]


def test_a_device_that_fails_in_an_encoder_is_lost(parts: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    def encode(*_: Any) -> None:
        try:
            fail()
        except RuntimeError as error:
            raise InvalidRequest("the model's own code fails over it") from error

    monkeypatch.setattr("diskprefix.daemon.engine.device.probe_devices", fail)
    parts.encoder.encode = encode
    parts.source.want(pictures_in(picture(11, 3), encoder=parts.encoder), 0, FULL)
    with pytest.raises(DeviceLost):
        drain(parts)


def test_pixels_of_requests_that_have_ended_are_not_kept_nor_made(parts: SimpleNamespace) -> None:
    prepared, may_go = list[int](), threading.Event()

    def prepare(number: int) -> dict[str, Any]:
        prepared.append(number)
        assert may_go.wait(10)
        return {"add": 0}

    first, second, third = (
        pictures_in(picture(number, 3, partial(prepare, number)), encoder=parts.encoder) for number in (5, 6, 7)
    )
    for one in (first, second, third):
        parts.source.want(one, 0, FULL)
    third.is_over = True
    while len(parts.source._encoding) < 2:
        assert parts.woken.wait(10)
        parts.woken.clear()
        taken(parts)
    assert not parts.source.run_slice(), "its pixels are not there yet"
    may_go.set()
    parts.pools.preparer.submit(lambda: None).result()
    assert parts.source.run_slice()
    second.is_over = True
    assert parts.source.run_slice()
    assert [job.picture for job in parts.source._encoding] == [*first.pictures]
    parts.source.close()
    assert prepared == [5, 6]


def test_a_picture_is_prepared_for_who_asks_after_others_have_gone(parts: SimpleNamespace) -> None:
    gone, asks = (pictures_in(picture(9, 3), encoder=parts.encoder) for _ in range(2))
    may_load = threading.Event()
    parts.fetches._pools["picture"].submit(may_load.wait, 10)
    parts.source.want(gone, 0, FULL)
    gone.is_over = True
    may_load.set()
    wait_for_loads(parts)
    parts.source.want(asks, 0, FULL)
    assert (asks, None) in [one for _ in range(2) for one in drain(parts)]


def test_a_picture_whose_load_hangs_is_encoded_and_so_is_one_behind_it(
    parts: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanting = [pictures_in(picture(number, 3), encoder=parts.encoder) for number in (12, 13)]
    monkeypatch.setattr(reads, "STALL_S", 0.0)
    parts.stored.may_load.clear()
    for pictures in wanting:
        parts.source.want(pictures, 0, FULL)
    came = list[tuple[PromptPictures, Exception | None]]()

    def have_all() -> bool:
        parts.source.run_slice()
        came.extend(taken(parts))
        return len(came) == 2

    wait_for(have_all)
    assert came == [(one, None) for one in wanting]
    parts.stored.may_load.set()
    wait_for_loads(parts)
    assert taken(parts) == []
    assert not parts.fetches._open


def test_a_picture_is_saved_if_one_of_those_who_want_it_saves(parts: SimpleNamespace) -> None:
    others = [replace(FULL, scope=Scope("off")), replace(FULL, save=False), replace(FULL, scope=Scope("tokens", 5))]
    for options in (*others, FULL, *others):
        parts.source.want(pictures_in(picture(10, 3), encoder=parts.encoder), 0, options)
    (job,) = parts.source._jobs.values()
    assert job.options is FULL


def test_the_pixels_of_two_pictures_at_most_are_in_memory(parts: SimpleNamespace) -> None:
    prepared = list[int]()

    def prepare(number: int) -> dict[str, Any]:
        prepared.append(number)
        return {"add": 0}

    wanting = [
        pictures_in(picture(number, 2, partial(prepare, number)), encoder=parts.encoder) for number in range(5, 9)
    ]
    for pictures in wanting:
        parts.source.want(pictures, 0, FULL)
    wait_for_loads(parts)
    taken(parts)
    parts.source.run_slice()
    parts.pools.preparer.submit(lambda: None).result()
    assert prepared == [5, 6]
    assert [one for one, _ in drain(parts)] == wanting
    assert prepared == [5, 6, 7, 8]


def test_rows_behind_which_a_prompt_is_computed_are_let_go() -> None:
    pictures = pictures_in(3, picture(0, 4), 2, picture(1, 4), 5)
    pictures.encoded = [rows_of(one) for one in pictures.pictures]
    for end, kept in ((6, [True, True]), (7, [False, True]), (12, [False, True]), (13, [False, False])):
        pictures.release_rows(end)
        assert [one is not None for one in pictures.encoded] == kept
