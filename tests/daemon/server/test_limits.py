"""What bounds a caller: bytes and parts of a body, requests in flight, turns, threads and open connections."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
import tracemalloc
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AsyncExitStack, ExitStack
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from starlette.requests import ClientDisconnect, Request

from diskprefix.daemon.api.error_forms import HttpError
from diskprefix.daemon.api.fields import Body
from diskprefix.daemon.api.openai_chat import ChatRequest
from diskprefix.daemon.api.response_store import ResponseStore
from diskprefix.daemon.chat.messages import Conversation
from diskprefix.daemon.chat.renderer import PromptRenderer
from diskprefix.daemon.engine.request import FinishEvent, GenerateRequest, TextEvent
from diskprefix.daemon.json_values import MAX_PARTS, MAX_VALUES
from diskprefix.daemon.server import body as body_module
from diskprefix.daemon.server import limits
from diskprefix.daemon.server.body import Bodies
from diskprefix.daemon.server.limits import LARGE_BYTES, BodyPace, GivenTurn, InFlight, Turns
from diskprefix.daemon.server.log_context import LogContext
from diskprefix.daemon.server.process import connection as connections
from diskprefix.daemon.server.process import peer_user
from diskprefix.daemon.server.share import UNNAMED, Share
from diskprefix.daemon.server.threads import Threads, WorkKind
from diskprefix.daemon.settings import Settings
from diskprefix.errors import InvalidRequest, QueueFull, ShareFull
from diskprefix.runtime.files import template_sandbox
from diskprefix.thread_work import NobodyWaits, begin_step
from tests.daemon.server import test_auth as auth
from tests.daemon.server.chat_model import write_chat_model
from tests.daemon.server.daemon_process import open_raw, wait_until
from tests.daemon.server.scripted import AppServer, Emit, ScriptedEngine, done, real_app, say_hello, scripted_app
from tests.daemon.server.test_auth import bearer

CHAT = "/v1/chat/completions"
MIB = 1 << 20
WAIT_S = 60
ALICE, BOB, CAROL = (Share("key", name) for name in ("alice", "bob", "carol"))
POST = {"method": "POST", "path": CHAT, "headers": []}


@pytest.mark.parametrize("declared", [{}, {"content-length": "11"}])
def test_a_body_above_the_limit_is_a_413_and_a_declared_one_is_not_read(
    declared: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "MAX_BODY_BYTES", 10)
    taken = list[bytes]()

    async def pieces(*sent: bytes) -> AsyncIterator[bytes]:
        for piece in sent:
            taken.append(piece)
            yield piece

    assert asyncio.run(BodyPace().whole_body({"content-length": "10"}, pieces(b"01234", b"56789"))) == b"0123456789"
    taken.clear()
    with pytest.raises(HttpError) as refused:
        asyncio.run(BodyPace().whole_body(declared, pieces(b"01234", b"56789", b"0", b"1")))
    assert (refused.value.http_status, len(taken)) == (413, 0 if declared else 3)


def test_a_share_alone_has_all_places_and_gives_them_back() -> None:
    in_flight = InFlight(Settings(max_queue=4, max_sequences=2))
    held = [in_flight.counted(POST, ALICE) for _ in range(6)]
    with pytest.raises(QueueFull, match=r"^6 requests are not answered yet; try") as refused:
        in_flight.counted(POST, ALICE)
    assert refused.type is QueueFull
    with held.pop():
        assert in_flight.num == 6
    assert in_flight.num == 5


@pytest.mark.parametrize("other", [BOB, Share("user", "1000"), Share("address", "192.0.2.7"), UNNAMED])
def test_who_takes_all_places_leaves_another_share_its_part(other: Share) -> None:
    in_flight = InFlight(Settings(max_queue=4, max_sequences=2))
    with ExitStack() as stack:
        for _ in range(6):
            stack.enter_context(in_flight.counted(POST, ALICE))
        for _ in range(3):
            stack.enter_context(in_flight.counted(POST, other))
        for share in (ALICE, other):
            with pytest.raises(ShareFull, match="this client has its part of them"):
                in_flight.counted(POST, share)
    assert in_flight.num == 0


def test_many_addresses_refuse_no_key_and_have_a_bound() -> None:
    in_flight = InFlight(Settings(max_queue=4, max_sequences=2))
    addresses = [Share("address", f"192.0.2.{number}") for number in range(20)]
    with ExitStack() as stack:
        for address in addresses[:12]:
            stack.enter_context(in_flight.counted(POST, address, "c"))
        with pytest.raises(ShareFull):
            in_flight.counted(POST, addresses[12], "c")
        stack.enter_context(in_flight.counted(POST, ALICE))


def test_a_share_may_take_what_is_free_beside_another() -> None:
    in_flight = InFlight(Settings(max_queue=4, max_sequences=2))
    with ExitStack() as stack:
        stack.enter_context(in_flight.counted(POST, ALICE))
        for _ in range(5):
            stack.enter_context(in_flight.counted(POST, BOB))
        with pytest.raises(ShareFull):
            in_flight.counted(POST, BOB)


def test_an_agents_requests_leave_a_place_to_the_chat_of_the_same_user() -> None:
    in_flight = InFlight(Settings(max_queue=4, max_sequences=2))
    with ExitStack() as stack:
        for _ in range(6):
            stack.enter_context(in_flight.counted(POST, ALICE, "agent"))
        with in_flight.counted(POST, ALICE, "chat"):
            pass
        # One that has ended counts no more.
        for conversation in ("chat", "another"):
            stack.enter_context(in_flight.counted(POST, ALICE, conversation))
            with pytest.raises(QueueFull):
                in_flight.counted(POST, ALICE, conversation)
        with pytest.raises(QueueFull):
            in_flight.counted(POST, ALICE, "a name for each request")


def test_waiting_bodies_are_bounded_and_each_share_has_room_for_its_part() -> None:
    in_flight = InFlight(Settings())
    with ExitStack() as stack:
        for _ in range(4):
            stack.enter_context(in_flight.counted(POST, ALICE)).add(limits.MAX_BODY_BYTES)
        with pytest.raises(QueueFull, match=r"128\.0 MiB together; try"):
            in_flight.counted(POST | {"headers": [(b"content-length", b"1")]}, ALICE)
        for share, part in ((BOB, 2 * limits.MAX_BODY_BYTES), (CAROL, 4 * limits.MAX_BODY_BYTES // 3)):
            place, another = (stack.enter_context(in_flight.counted(POST, share)) for _ in range(2))
            place.add(part)
            for more in (another.add, another.hold):
                with pytest.raises(ShareFull, match=r"128\.0 MiB together, and this client has its part"):
                    more(1)
            place.release()
            place.add(part)
    assert not in_flight.bytes_of


def test_the_only_body_of_a_share_has_room_for_what_it_takes_in_memory() -> None:
    in_flight = InFlight(Settings())
    with ExitStack() as stack:
        for share in (ALICE, BOB):
            place = stack.enter_context(in_flight.counted(POST, share))
            place.add(limits.MAX_BODY_BYTES)
            place.hold(7 * limits.MAX_BODY_BYTES)
        place.hold(1)
        assert in_flight.bytes_of == {ALICE: 7 * limits.MAX_BODY_BYTES, BOB: 1}
    assert not in_flight.bytes_of


@pytest.mark.parametrize("is_chunked", [False, True])
def test_bodies_that_never_end_leave_room_for_another_key(
    keyed: AppServer, is_chunked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "MAX_BODY_BYTES", 64 * 1024)
    with ExitStack() as stack, keyed.client() as client:
        for _ in range(6):
            last = stack.enter_context(unfinished_body(keyed.port, auth.ALICE, 50 * 1024, is_chunked=is_chunked))
        assert last.recv(100).startswith(b"HTTP/1.1 503 ")
        assert keyed.daemon.in_flight.bytes_of.total() <= 256 * 1024
        served = client.post(CHAT, json={"messages": [TEXT_MESSAGE]}, headers=bearer(auth.BOB))
        assert served.status_code == 200
    wait_until(lambda: not keyed.daemon.in_flight.bytes_of, "they are given back")


def unfinished_body(port: int, key: str, num_bytes: int, *, is_chunked: bool) -> socket.socket:
    length = "Transfer-Encoding: chunked" if is_chunked else f"Content-Length: {num_bytes + 1}"
    head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {key}\r\n{length}\r\n\r\n"
    connection = socket.create_connection(("127.0.0.1", port), timeout=30)
    connection.sendall(head.encode() + (b"%x\r\n" % num_bytes if is_chunked else b"") + b" " * num_bytes)
    return connection


@pytest.mark.parametrize(
    ("method", "path", "is_counted"),
    [
        ("GET", "/health", False),
        ("GET", "/v1/models", False),
        ("GET", "/v1/responses/resp_1", True),
        ("DELETE", "/v1/responses/resp_1", True),
        ("POST", "/tokenize", True),
    ],
)
def test_requests_that_take_memory_are_counted(method: str, path: str, is_counted: bool) -> None:
    in_flight = InFlight(Settings())
    with in_flight.counted({"method": method, "path": path, "headers": []}, ALICE):
        assert in_flight.num == is_counted


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


@pytest.mark.parametrize(
    ("most", "names", "at_once", "all_of_them"),
    [
        (1, "a1 a2 a3 b1 b2 c1", "a1", "a1 b1 c1 a2 b2 a3"),
        (2, "a1 a2 b1 c1", "a1 b1", "a1 b1 a2 c1"),
    ],
)
def test_callers_take_single_turns_least_recent_first(most: int, names: str, at_once: str, all_of_them: str) -> None:
    async def scenario() -> None:
        turns, began, go_on = Turns(most), list[str](), asyncio.Event()

        async def work(name: str) -> None:
            async with turns.of(Share("key", name[0]), ""):
                began.append(name)
                await go_on.wait()

        tasks = [asyncio.create_task(work(name)) for name in names.split()]
        await settle()
        assert began == at_once.split()
        go_on.set()
        await asyncio.gather(*tasks)
        assert sorted(began) == sorted(all_of_them.split())
        assert most > 1 or began == all_of_them.split()

    asyncio.run(scenario())


def test_work_that_takes_too_long_keeps_its_turn_and_leaves_its_place() -> None:
    async def scenario() -> None:
        turns = Turns(1, patience_s=0.0, max_beside=2)

        def take(name: str) -> Awaitable[GivenTurn]:
            return asyncio.wait_for(turns.take(Share("key", name), ""), WAIT_S)

        held = {name: await take(name) for name in "abc"}
        again, other = (asyncio.ensure_future(take(name)) for name in "ad")
        await asyncio.sleep(0)
        done, _ = await asyncio.wait([again, other], timeout=0.1)
        assert not done, "the caller has its turn, and three work: one in the place and two beside it"
        turns.give_back(held["c"])
        last = await other
        assert not again.done()
        turns.give_back(held["a"])
        for turn in (await again, held["b"], last):
            turns.give_back(turn)
        assert not turns._long

    asyncio.run(scenario())


def test_within_a_share_conversations_take_turns() -> None:
    async def scenario() -> None:
        turns, began = Turns(2), list[str]()

        async def work(share: Share, conversation: str) -> None:
            async with turns.of(share, conversation):
                began.append(conversation)
                await asyncio.sleep(0)

        mine = [*(["agent"] * 64), "chat"]
        tasks = [asyncio.create_task(work(ALICE, name)) for name in mine]
        await settle()
        tasks.append(asyncio.create_task(work(BOB, "of another")))
        await asyncio.gather(*tasks)
        assert began.index("chat") == 1
        assert began.index("of another") < 15

    asyncio.run(scenario())


def test_a_new_name_for_each_request_gets_no_turn_before_another_share() -> None:
    async def scenario() -> None:
        turns, began = Turns(1), list[str]()

        async def work(share: Share, conversation: str) -> None:
            async with turns.of(share, conversation):
                began.append(conversation)
                await asyncio.sleep(0)

        named = [(ALICE, f"new {number}") for number in range(4)]
        await asyncio.gather(*(work(*one) for one in [*named, (BOB, "his"), (BOB, "his")]))
        assert began == ["new 0", "his", "new 1", "his", "new 2", "new 3"]
        assert not turns._last

    asyncio.run(scenario())


def test_one_share_has_half_of_the_places_and_one_conversation_a_quarter() -> None:
    async def scenario() -> None:
        turns = Turns(16)
        tasks = [asyncio.create_task(turns.take(ALICE, name)) for name in [*(["agent"] * 64), *("chat" * 16)]]
        await settle()
        assert sum(task.done() for task in tasks[:64]) == 4
        assert sum(task.done() for task in tasks) == 8
        for task in tasks:
            task.cancel()

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("shares", "conversations", "num_given"),
    [([ALICE], 1, 1 + 1), ([ALICE], 8, 1 + 2), ([ALICE, BOB, CAROL], 8, 1 + 4)],
)
def test_slow_work_of_a_share_has_half_and_of_a_conversation_a_quarter(
    shares: list[Share], conversations: int, num_given: int
) -> None:
    async def scenario() -> None:
        turns = Turns(1, patience_s=0.0, max_beside=4)
        tasks = [
            asyncio.create_task(turns.take(share, f"{number % conversations}"))
            for share in shares
            for number in range(8)
        ]
        done, waiting = set(tasks), set(tasks)
        # Bound: each round gives a turn.
        while done:
            done, waiting = await asyncio.wait(waiting, timeout=0.1, return_when=asyncio.FIRST_COMPLETED)
        assert len(tasks) - len(waiting) == num_given
        for task in tasks:
            task.cancel()

    asyncio.run(scenario())


def test_a_cancelled_wait_passes_its_turn_on() -> None:
    async def scenario() -> None:
        turns = Turns(1)
        first = await turns.take(ALICE, "")
        waiting, given, last = (asyncio.create_task(turns.take(Share("key", name), "")) for name in "bcd")
        await settle()
        waiting.cancel()
        await settle()
        turns.give_back(first)
        given.cancel()
        await last

    asyncio.run(scenario())


def test_a_caller_who_rests_has_no_turn_and_takes_none_of_others() -> None:
    async def scenario() -> None:
        turns = Turns(1)
        first = await turns.take(ALICE, "")
        resting, other = (asyncio.ensure_future(turns.take(share, "")) for share in (ALICE, BOB))
        await settle()
        turns.give_back(first, 0.01)
        turns.give_back(await other)
        assert not resting.done()
        await asyncio.wait_for(resting, WAIT_S)

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("kind", "is_computing", "rests"), [("counting", True, True), ("counting", False, False), ("writing", True, False)]
)
def test_a_caller_rests_after_long_work_while_the_engine_computes(
    kind: WorkKind, is_computing: bool, rests: bool
) -> None:
    now_s = 0.0

    def work() -> None:
        nonlocal now_s
        now_s += 1000.0

    async def scenario() -> None:
        threads = Threads(lambda: is_computing, lambda: now_s)
        try:
            await threads.run_for(request_of(share=ALICE), kind, work)
            await settle()
            again = asyncio.ensure_future(threads.run_for(request_of(share=ALICE), kind, work))
            done, _ = await asyncio.wait([again], timeout=0.2 if rests else WAIT_S)
            assert bool(done) != rests
            assert await threads.run_for(request_of(share=BOB), kind, lambda: 1) == 1
            again.cancel()
        finally:
            threads.close()

    asyncio.run(scenario())


@pytest.fixture
def threads() -> Iterator[Threads]:
    threads = Threads()
    yield threads
    threads.close()


def request_of(body: bytes = b"", share: Share = UNNAMED, *, has_left: bool = False) -> Request:
    async def receive() -> dict[str, Any]:
        kind = "http.disconnect" if has_left else "http.request"
        return {"type": kind, "body": body, "more_body": False}

    scope = {"method": "POST", "path": "/", "headers": []}
    with InFlight(Settings()).counted(scope, share) as place:
        state = {"record": LogContext(share=share), "place": place}
    return Request({"type": "http", "method": "POST", "path": "/", "headers": [], "state": state}, receive)


def test_work_ends_at_its_next_step_when_the_client_leaves(threads: Threads) -> None:
    began, left, ended = threading.Event(), threading.Event(), list[str]()

    def work() -> None:
        try:
            begin_step("render")
            began.set()
            left.wait(WAIT_S)
            begin_step("encode")
        except NobodyWaits:
            ended.append("early")
            raise
        ended.append("late")

    async def scenario() -> None:
        for run in (partial(threads.run, "rendering"), partial(threads.run_for, request_of(), "rendering")):
            began.clear()
            left.clear()
            preparing = asyncio.ensure_future(run(work))
            await asyncio.to_thread(began.wait, WAIT_S)
            preparing.cancel()
            await asyncio.wait([preparing])
            left.set()
            await asyncio.to_thread(wait_until, lambda: not threads.are_busy, "the work has ended")
        assert ended == ["early", "early"]

    asyncio.run(scenario())


def test_a_result_is_gone_with_its_receiver_though_its_thread_waits(
    threads: Threads, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_result, has_processor, stopped = Future.set_result, threading.Event(), list[bool]()

    def stop_after(future: Future[Any], result: Any) -> None:
        set_result(future, result)
        stopped.append(has_processor.wait(WAIT_S))

    async def scenario() -> None:
        for run in (partial(threads.run, "rendering"), partial(threads.run_for, request_of(), "rendering")):
            result = weakref.ref(await run(lambda: Anything(a=1)))
            assert result() is None
            assert not stopped

    monkeypatch.setattr(Future, "set_result", stop_after)
    asyncio.run(scenario())
    has_processor.set()


def test_no_kind_of_work_waits_for_another(threads: Threads) -> None:
    go_on = threading.Event()

    async def fill() -> None:
        async with asyncio.timeout(WAIT_S):
            stuck = [
                asyncio.create_task(
                    threads.run_for(request_of(share=Share("key", str(number))), kind, go_on.wait, WAIT_S)
                )
                for number in range(100)
                for kind in ("compiling", "parsing", "writing")
            ]
            assert await threads.run_for(request_of(), "rendering", lambda: 1) == 1
            assert await threads.run("stopping", lambda: 2) == 2
            assert threads.are_busy
            go_on.set()
            await asyncio.gather(*stuck)
            assert not threads.are_busy

    asyncio.run(fill())


def test_an_endless_rendering_leaves_room_for_others(threads: Threads) -> None:
    go_on = threading.Event()

    async def fill() -> None:
        async with asyncio.timeout(WAIT_S):
            stuck = asyncio.create_task(threads.run_for(request_of(), "rendering", go_on.wait, WAIT_S))
            assert await threads.run_for(request_of(share=ALICE), "rendering", lambda: 1) == 1
            go_on.set()
            await stuck

    asyncio.run(fill())


def test_templates_that_never_end_do_not_keep_the_places_of_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    again = "{% for i in range(9000) %}{% for k in range(9000) %}{% endfor %}{% endfor %}"
    template = (
        "{% for message in messages %}{% if 'spin' in message.content %}" + again + "{% endif %}{% endfor %}hello"
    )
    model = write_chat_model(tmp_path / "model", chat_template=template)
    monkeypatch.setattr(template_sandbox, "LIMIT_S", 0.2)

    def ask(client: httpx.Client, content: str) -> httpx.Response:
        body = {"messages": [{"role": "user", "content": content}], "max_tokens": 1}
        return client.post("/v1/chat/completions", json=body, timeout=WAIT_S)

    with real_app(model, tmp_path / "kv") as server, server.client() as client, ThreadPoolExecutor(12) as pool:
        refused = ask(client, "spin")
        assert refused.status_code == 400
        assert "it was ended after " in refused.json()["error"]["message"]
        spinning = [pool.submit(ask, client, f"spin {number}") for number in range(12)]
        assert ask(client, "hello").status_code == 200
        for answer in spinning:
            answer.result()
        wait_until(lambda: not server.daemon.threads.are_busy, "all places are free")


@pytest.mark.parametrize("kind", ["parsing", "rendering"])
def test_a_left_clients_work_is_dropped_or_keeps_its_turn(threads: Threads, kind: WorkKind) -> None:
    began: list[str] = []
    go_on = threading.Event()

    def work(name: str) -> None:
        began.append(name)
        assert go_on.wait(WAIT_S)

    async def leave() -> None:
        async with asyncio.timeout(WAIT_S):
            run = partial(threads.run_for, request_of(share=ALICE), kind, work)
            tasks = [asyncio.create_task(run(name)) for name in ("first", "second")]
            names = ("running", "running", "waiting")
            tasks += [asyncio.create_task(threads.run("writing", work, name)) for name in names]
            while len(began) < 3:
                await asyncio.sleep(0)
            for task in tasks:
                task.cancel()
            third = asyncio.create_task(run("third"))
            with pytest.raises(ClientDisconnect):
                await threads.run_for(request_of(has_left=True), kind, lambda: 1)
            assert await threads.run_for(request_of(), kind, lambda: 1) == 1
            assert sorted(began) == ["first", "running", "running"]
            go_on.set()
            await third
            assert await threads.run("writing", lambda: 2) == 2

    asyncio.run(leave())
    assert sorted(began) == ["first", "running", "running", "third"]


class Anything(Body):
    a: Any = None


SHAPES: dict[str, Any] = {
    "texts": {"messages": [{"role": "user", "content": "x" * 200_000}]},
    "wide texts": {"messages": [{"role": "user", "content": "x" * 200_000 + "\N{GRINNING FACE}"}]},
    "messages": {"messages": [{"role": "user", "content": "x"}] * 8192},
    "parts": {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}] * 1024}] * 8},
    **{
        name: {
            "messages": [{"role": "user", "content": "x"}],
            "tools": [{"type": "function", "function": {"name": "f", "parameters": {"a": values}}}],
        }
        for name, values in {
            "empty lists": [[]] * 50_000,
            "objects with a key": [{"": {}}] * 40_000,
            "numbers": list(range(1000, 90_000)),
            "keys": {f"{number:05}": {} for number in range(40_000)},
        }.items()
    },
}


@pytest.mark.parametrize("is_ascii", [False, True])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_a_parsed_body_takes_no_more_memory_than_counts_for_its_share(shape: Any, is_ascii: bool) -> None:
    sent = json.dumps(shape, ensure_ascii=is_ascii).encode()
    body_module._parse(sent, ChatRequest)
    tracemalloc.start()
    try:
        parsed, num_bytes = body_module._parse(sent, ChatRequest)
        kept_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert parsed.messages
    assert kept_bytes <= num_bytes <= 3 * kept_bytes + MIB


async def ended_by(works: Sequence[Awaitable[None]]) -> BaseException | None:
    """Returns the first error of works that are done together."""
    return next((error for error in await asyncio.gather(*works, return_exceptions=True) if error), None)


def test_bodies_that_were_parsed_and_wait_are_bounded_by_their_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_BODY_BYTES", MIB)
    in_flight, sent = InFlight(Settings()), b'{"a": [' + b"[]," * 6000 + b"[]]}"

    async def scenario() -> None:
        bodies = Bodies(Threads())
        async with AsyncExitStack() as held:

            async def read_one(share: Share) -> None:
                request = request_of(sent, share)
                request.state.place = held.enter_context(in_flight.counted(POST, share))
                await bodies.read_json(request, Anything, held)

            assert isinstance(await ended_by([read_one(ALICE) for _ in range(20)]), QueueFull)
            assert 3 * MIB < in_flight.bytes_of[ALICE] <= 4 * MIB
            await read_one(BOB)
        assert not in_flight.bytes_of

    asyncio.run(scenario())


def body_of(size: int) -> bytes:
    return b'{"a": "' + b"x" * (size - 9) + b'"}'


def test_only_large_bodies_wait_for_the_previous_one() -> None:
    async def scenario() -> None:
        bodies, first = Bodies(Threads()), AsyncExitStack()
        await bodies.read_json(request_of(body_of(LARGE_BYTES + 1), ALICE), Anything, first)
        second = AsyncExitStack()
        waiting = asyncio.create_task(bodies.read_json(request_of(body_of(LARGE_BYTES + 1), BOB), Anything, second))
        assert (await bodies.read_json(request_of(body_of(LARGE_BYTES), ALICE), Anything, AsyncExitStack())).a
        assert not waiting.done()
        await first.aclose()
        assert (await waiting).a
        await second.aclose()

    asyncio.run(scenario())


@pytest.mark.parametrize(("is_computing", "large_s", "pause_s"), [(False, 8 / 64, 10.0), (True, 1.0, 70.0)])
def test_large_bodies_are_slowed_while_the_engine_computes(
    is_computing: bool, large_s: float, pause_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, later = [0.0], list[float]()
    parse, real_sleep = body_module._parse, asyncio.sleep

    def parse_slowly(body: bytes, model: type[Anything]) -> tuple[Anything, int]:
        clock[0] += 10 if len(body) > LARGE_BYTES else 0
        return parse(body, model)

    async def read_two() -> None:
        loop, bodies = asyncio.get_running_loop(), Bodies(Threads(), lambda: is_computing)

        async def sleep(seconds: float) -> None:
            if asyncio.get_running_loop() is loop:
                clock[0] += seconds
            else:
                # A server in another thread of this process.
                await real_sleep(seconds)

        with monkeypatch.context() as changed:
            changed.setattr(body_module, "_parse", parse_slowly)
            changed.setattr(asyncio, "sleep", sleep)
            changed.setattr(loop, "time", lambda: clock[0])
            changed.setattr(loop, "call_later", lambda delay_s, *_: later.append(delay_s))
            await bodies.read_json(request_of(body_of(LARGE_BYTES)), Anything, AsyncExitStack())
            assert clock[0] == 0, "a small one"
            async with AsyncExitStack() as held:
                await bodies.read_json(request_of(body_of(8 * MIB)), Anything, held)
                assert clock[0] == 10 + large_s
                # The request waits for the model.
                clock[0] += 100

    asyncio.run(read_two())
    assert later[-1] == pause_s


def read(body: bytes) -> Anything:
    async def once() -> Anything:
        async with AsyncExitStack() as held:
            return await Bodies(Threads()).read_json(request_of(body), Anything, held)

    return asyncio.run(once())


@pytest.mark.parametrize(
    ("value", "num_values", "most"),
    [
        *((value, MAX_PARTS, MAX_PARTS) for value in ("[]", "{}", '""', '{"x":0}')),
        ("1", MAX_VALUES + 1, MAX_VALUES),
    ],
)
def test_a_body_with_too_many_values_is_refused_before_parsing(value: str, num_values: int, most: int) -> None:
    with pytest.raises(InvalidRequest, match=f"at most {most} are read"):
        read(f'{{"a": [{",".join([value] * num_values)}]}}'.encode())


@pytest.mark.cases(2)
@pytest.mark.parametrize("text", ["[],{}", '"[', "\\", '\\"', 'a\\\\"b,c: ["d"]'])
def test_text_counts_as_one_value_and_many_tokens_are_accepted(text: str) -> None:
    values = [text * MAX_PARTS, [text * 100], [1] * MIB]
    assert read(json.dumps({"a": values}).encode()).a == values


GET = b"GET /health HTTP/1.1\r\nHost: localhost\r\n"
SERVED = b"HTTP/1.1 200 OK"


def say_much(_request: GenerateRequest, emit: Emit, _is_cancelled: Callable[[], bool]) -> None:
    emit(TextEvent(0, "x" * 1_000_000, (1,)))
    emit(FinishEvent(0, "stop"))
    emit(done())


@pytest.fixture
def three(chat_model: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[AppServer]:
    # Connections of one known user leave places to others: `test_places.py`.
    monkeypatch.setattr(peer_user, "user_of", lambda *_, **__: None)
    monkeypatch.setattr(connections, "OTHER_CONNECTIONS", 3 - InFlight(Settings(max_sequences=1)).max_requests)
    with scripted_app(chat_model, ScriptedEngine(say_much)) as running:
        yield running


def connect(server: AppServer, data: bytes = b"") -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", server.port), timeout=30)
    connection.sendall(data)
    return connection


def connect_busy(server: AppServer) -> socket.socket:
    """A connection with a request whose body the server waits for."""
    connection = open_raw(server.port, announced_bytes=10, Expect="100-continue")
    assert connection.recv(25) == b"HTTP/1.1 100 Continue\r\n\r\n"
    return connection


def connect_used(server: AppServer) -> socket.socket:
    connection = connect(server, GET + b"\r\n")
    received = b""
    while not received.endswith(b"}"):
        part = connection.recv(65536)
        assert part, "the connection is closed"
        received += part
    assert received.startswith(SERVED)
    return connection


def is_open(connection: socket.socket) -> bool:
    connection.sendall(GET + b"\r\n")
    try:
        return connection.recv(len(SERVED)) == SERVED
    except ConnectionResetError:
        return False


def is_refused(server: AppServer) -> bool:
    try:
        with connect(server, GET + b"\r\n") as refused:
            return refused.recv(1) == b""
    except ConnectionError:
        return True


@pytest.mark.parametrize("first", [b"", GET], ids=["nothing sent", "half a head sent"])
def test_a_new_connection_replaces_the_longest_idle_one(three: AppServer, first: bytes) -> None:
    with ExitStack() as stack:
        longest = stack.enter_context(connect(three, first))
        second, third = (stack.enter_context(connect_used(three)) for _ in range(2))
        new = stack.enter_context(connect_used(three))
        assert longest.recv(1) == b""
        assert is_open(second), "from now on it is third that was idle for longest"
        stack.enter_context(connect_used(three))
        assert third.recv(1) == b""
        assert is_open(new)


def test_a_connection_with_a_request_is_not_closed_for_a_new_one(three: AppServer) -> None:
    with ExitStack() as stack:
        busy = [stack.enter_context(connect_busy(three)) for _ in range(2)]
        for _ in range(5):
            stack.enter_context(connect_used(three))
        for connection in busy:
            connection.sendall(b"0123456789")
            assert connection.recv(24) == b"HTTP/1.1 400 Bad Request"


def test_a_connection_with_an_unread_response_is_not_idle(three: AppServer) -> None:
    three.listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    body = {"messages": [{"role": "user", "content": "hello"}]}
    with ExitStack() as stack:
        for _ in range(3):
            # The kernel soon takes no more.
            connection = stack.enter_context(open_raw(three.port, body))
            received = b""
            while b"xxx" not in received:
                received += connection.recv(1024)
        assert is_refused(three)


def test_if_all_connections_are_in_requests_a_new_one_is_closed(three: AppServer) -> None:
    with ExitStack() as stack:
        for _ in range(3):
            stack.enter_context(connect_busy(three))
        for _ in range(10):
            assert is_refused(three)
    with three.client() as client:
        wait_until(lambda: client.get("/health").status_code == 200, "a connection is taken when others are closed")


@pytest.mark.parametrize("sent", [b"", b"GET", GET])
def test_a_connection_without_a_whole_head_is_closed(
    server: AppServer, sent: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "HEADERS_S", 0.2)
    with connect(server, sent) as connection:
        assert connection.recv(1) == b""


def test_a_slow_head_is_cut_off_also_on_a_used_connection(server: AppServer, monkeypatch: pytest.MonkeyPatch) -> None:
    with connect_used(server) as connection:
        monkeypatch.setattr(connections, "HEADERS_S", 0.2)

        def is_closed() -> bool:
            try:
                connection.sendall(b"G")
            except OSError:
                return True
            return False

        wait_until(is_closed, "the connection is closed")


def test_a_head_that_never_ends_is_refused(server: AppServer) -> None:
    with connect(server, GET + b"X: " + b"x" * 100_000) as connection:
        assert connection.recv(24) == b"HTTP/1.1 400 Bad Request"


TEXT_MESSAGE = {"role": "user", "content": "hello"}


@pytest.fixture(scope="module")
def keyed(chat_model: Path, keys_file: Path) -> Iterator[AppServer]:
    with scripted_app(chat_model, api_keys=keys_file) as running:
        yield running


HELD = {"messages": [{"role": "user", "content": "held"}], "max_tokens": 1}
RENDERED = [
    ("/tokenize", "tokenize", {"content": "held"}),
    ("/apply-template", "text_of", HELD),
    ("/v1/messages/count_tokens", "replay", HELD),
    (CHAT, "replay", HELD),
    ("/v1/completions", "completion", {"prompt": "held"}),
    ("/v1/embeddings", "completion", {"input": "held"}),
]


@pytest.mark.parametrize(("path", "method", "body"), RENDERED, ids=[path for path, *_ in RENDERED])
def test_beside_waiting_requests_of_one_key_another_key_is_served_at_once(
    keyed: AppServer, path: str, method: str, body: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Were it to wait for more than the one request that runs, it would wait for ever."""
    work, began, go_on = getattr(PromptRenderer, method), list[int](), threading.Event()

    def held(renderer: PromptRenderer, what: Any, *others: Any, **named: Any) -> Any:
        if "held" in repr(what):
            began.append(1)
            assert go_on.wait(WAIT_S)
        return work(renderer, what, *others, **named)

    monkeypatch.setattr(PromptRenderer, method, held)
    with ThreadPoolExecutor(7) as clients, keyed.client() as client:
        waiting = [clients.submit(client.post, path, json=body, headers=bearer(auth.ALICE)) for _ in range(6)]
        try:
            wait_until(lambda: keyed.daemon.in_flight.num == 6 and began, "they have arrived")
            served = clients.submit(client.post, CHAT, json={"messages": [TEXT_MESSAGE]}, headers=bearer(auth.BOB))
            assert (served.result(20).status_code, len(began)) == (200, 1)
        finally:
            go_on.set()
        assert {answer.result().status_code for answer in waiting} <= {200, 400}


@pytest.mark.parametrize(("size", "num_slow"), [(1, 2), (LARGE_BYTES, 1)])
def test_prompts_that_take_too_long_hold_up_no_other_conversation(
    size: int, num_slow: int, server: AppServer, engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.script = say_hello
    threads, replay = server.daemon.threads, PromptRenderer.replay
    turns = server.daemon.bodies._turns if size == LARGE_BYTES else threads._turns["rendering"]
    monkeypatch.setattr(turns, "_patience_s", 0.01)
    began, go_on = list[int](), threading.Event()

    def held(renderer: PromptRenderer, conversation: Conversation, *others: Any) -> Any:
        if "slow" in conversation.messages[0].texts[0].text:
            began.append(1)
            assert go_on.wait(WAIT_S)
        return replay(renderer, conversation, *others)

    monkeypatch.setattr(PromptRenderer, "replay", held)
    slow, quick = (
        {"messages": [{"role": "user", "content": said}], "ignored": " " * size} for said in ("slow", "quick")
    )
    with ThreadPoolExecutor(4) as clients, server.client() as client:
        sessions = [{"session-id": str(number)} for number in range(num_slow)]
        waiting = [clients.submit(client.post, CHAT, json=slow, headers=session) for session in sessions]
        try:
            wait_until(lambda: len(began) == num_slow, "all have begun")
            assert clients.submit(client.post, CHAT, json=quick).result(WAIT_S).status_code == 200
        finally:
            go_on.set()
        assert {answer.result(WAIT_S).status_code for answer in waiting} == {200}


def test_a_slow_rendering_holds_up_no_stored_response(
    tmp_path: Path, chat_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replay, began, go_on = PromptRenderer.replay, threading.Event(), threading.Event()

    def held(renderer: PromptRenderer, conversation: Conversation, *others: Any) -> Any:
        if "slow" in conversation.messages[-1].texts[0].text:
            began.set()
            assert go_on.wait(WAIT_S)
        return replay(renderer, conversation, *others)

    monkeypatch.setattr(PromptRenderer, "replay", held)
    with real_app(chat_model, tmp_path / "kv") as server, server.client() as client, ThreadPoolExecutor(1) as pool:
        monkeypatch.setattr(server.daemon.threads._turns["rendering"], "_patience_s", 0.01)
        body = {"input": "Hello", "max_output_tokens": 4}
        body["previous_response_id"] = client.post("/v1/responses", json=body).raise_for_status().json()["id"]
        slow = pool.submit(client.post, "/v1/responses", json=body | {"input": "slow"})
        try:
            assert began.wait(WAIT_S)
            with server.client() as another:
                assert another.post("/v1/responses", json=body | {"input": "quick"}).status_code == 200
        finally:
            go_on.set()
        assert slow.result(WAIT_S).status_code == 200


@pytest.mark.parametrize("is_read", [False, True])
def test_a_wait_for_responses_that_others_read_is_none_for_the_disk(
    is_read: bool, tmp_path: Path, chat_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    get, began, go_on, passed_s = ResponseStore.get, threading.Event(), threading.Event(), 0.0

    def held(store: ResponseStore, id_: str) -> Any:
        if not began.is_set():
            began.set()
            assert go_on.wait(WAIT_S)
        return get(store, id_)

    with real_app(chat_model, tmp_path / "kv") as server, server.client() as client, ThreadPoolExecutor(2) as pool:
        body = {"input": "Hello", "max_output_tokens": 4}
        id_ = client.post("/v1/responses", json=body).raise_for_status().json()["id"]
        monkeypatch.setattr(ResponseStore, "get", held)
        clock = SimpleNamespace(monotonic=lambda: time.monotonic() + passed_s)
        monkeypatch.setattr("diskprefix.prefixstore.store.reads.time", clock)
        stored, turns = f"/v1/responses/{id_}", server.daemon.stored_turns
        pool.submit(client.get, stored, headers={"session-id": "first"})
        try:
            assert began.wait(WAIT_S)
            headers, more = {"session-id": "second"}, body | {"previous_response_id": id_}
            send = partial(client.get, stored) if is_read else partial(client.post, "/v1/responses", json=more)
            second = pool.submit(send, headers=headers)
            wait_until(lambda: len(turns._waiting) == 1, "it waits for its turn")
            assert turns._waiting[0][0].conversation == "second"
            passed_s = 3600.0
        finally:
            go_on.set()
        assert second.result(WAIT_S).status_code == 200


def test_text_prompts_take_one_turn_and_large_bodies_none_of_theirs(keyed: AppServer) -> None:
    turns = keyed.daemon.threads._turns["rendering"]
    for content, num_turns in (("hello", 1), (" " * LARGE_BYTES, 0)):
        before = turns._num_given
        with keyed.client() as client:
            body = {"messages": [{"role": "user", "content": content}], "max_tokens": 1}
            client.post(CHAT, json=body, headers=bearer(auth.BOB))
        assert turns._num_given - before == num_turns
