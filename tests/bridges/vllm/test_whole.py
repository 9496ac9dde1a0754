"""Scheduler's side and workers together, over pages as vLLM has them: what was computed comes back, bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from diskprefix.bridges.shared import connector_settings
from diskprefix.bridges.shared.step_orders import NO_PAGE
from diskprefix.errors import StoreUnavailable
from diskprefix.prefixstore.simulate.trace_formats import read_trace
from diskprefix.prefixstore.store.schema import piece_key
from diskprefix.prefixstore.store.verify import verify_index
from tests.bridges.vllm.engine import BLOCK, FULL, PAGE, SLIDING, Engine, Request, prompt
from tests.devices import DEVICES

PROMPT = prompt(1, 3 * BLOCK + 5)
Make = Callable[..., Engine]


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Make]:
    """Makes engines on one folder, one after the other, as restarts do."""
    made: list[Engine] = []

    def make(**changes: Any) -> Engine:
        while made:
            made.pop().close()
        made.append(Engine(tmp_path / "kv", **changes))
        return made[-1]

    yield make
    while made:
        made.pop().close()


def stored_at(engine: Engine, position: int, rank: int = 0) -> tuple[bytes, bytes]:
    root = engine.identities[rank].root("")
    with engine.shared.store.snapshot() as snapshot:
        records = ((name, snapshot.node(name)) for name in list(snapshot.keys("usage")))
        return next((n, r.parent) for n, r in records if r is not None and (r.root, r.position) == (root, position))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("by_token", [False, True], ids=["head by head", "token by token"])
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_after_a_restart_the_pages_hold_what_was_computed(
    engine: Make, num_ranks: int, by_token: bool, device: str
) -> None:
    layout: dict[str, Any] = {"num_ranks": num_ranks, "by_token": by_token, "device": device}
    assert engine(**layout).run(Request("a", PROMPT)) == 0
    again, request = engine(**layout), Request("b", [*PROMPT, 7, 8, 9])
    assert again.begin(request) == 3 * BLOCK
    assert again.results(request) == [(True, False, set())] * num_ranks
    assert again.is_right(request, 3 * BLOCK)


def test_one_token_is_left_to_compute(engine: Make) -> None:
    engine().run(Request("a", PROMPT[: 2 * BLOCK]))
    assert engine().begin(Request("b", PROMPT[: 2 * BLOCK])) == BLOCK


def test_what_the_engine_has_itself_is_not_loaded(engine: Make) -> None:
    engine().run(Request("a", PROMPT))
    again, request = engine(), Request("b", PROMPT, num_computed_tokens=PAGE + BLOCK)
    again.allocate(request, PAGE + BLOCK)
    assert again.begin(request) == 2 * BLOCK - PAGE
    assert again.results(request) == [(True, False, set())]
    kept = again.tables["b"][0][: (PAGE + BLOCK) // PAGE]
    assert all(not again.caches[0][layer][kept].any() for layer in FULL.layers)
    tail = again.tables["b"][0][(PAGE + BLOCK) // PAGE :]
    assert all(again.caches[0][layer][tail].any() for layer in FULL.layers)


def test_only_what_all_ranks_have_is_loaded(engine: Make) -> None:
    one = engine(num_ranks=2)
    one.run(Request("a", PROMPT))
    (last, parent) = stored_at(one, 2 * BLOCK, rank=1)
    assert one.shared.store.quarantine(last, parent) == 1
    again, request = engine(num_ranks=2), Request("b", PROMPT)
    assert again.begin(request) == 2 * BLOCK
    assert again.results(request) == [(True, False, set())] * 2
    assert again.is_right(request, 2 * BLOCK)


def test_a_reply_is_kept_and_restored_once_its_tokens_are_known(engine: Make) -> None:
    one, request = engine(), Request("a", PROMPT[:BLOCK])
    one.begin(request)
    one.step(request, BLOCK)
    request.reply = prompt(2, BLOCK - 1)
    one.step(request, BLOCK)
    one.end(request)
    assert one.shared.store.counts()["blocks"] == 1
    whole = [*PROMPT[:BLOCK], *prompt(2, BLOCK - 1), 5, 6]
    assert engine().begin(Request("b", whole)) == BLOCK, "a token of the second block was only guessed"
    two, request = engine(), Request("c", PROMPT[:BLOCK])
    two.begin(request)
    two.results(request)
    request.reply = prompt(2, BLOCK)
    two.step(request, 2 * BLOCK - request.num_computed_tokens)
    two.end(request)
    again, request = engine(), Request("d", [*PROMPT[:BLOCK], *prompt(2, BLOCK), 5])
    assert again.begin(request) == 2 * BLOCK
    again.results(request)
    assert again.is_right(request, 2 * BLOCK)


def test_a_load_names_the_pages_of_a_damaged_block_and_loads_the_rest(engine: Make) -> None:
    one = engine()
    one.run(Request("a", PROMPT))
    second, _ = stored_at(one, BLOCK)
    with one.shared.store.changes() as changes:
        piece = bytes(changes.get_record("payloads", piece_key(second, 0)))
        changes._put_record("payloads", piece_key(second, 0), piece[:-1] + bytes([piece[-1] ^ 1]))
    again, request = engine(), Request("b", PROMPT)
    assert again.begin(request) == 3 * BLOCK
    table = again.tables["b"][0]
    assert again.results(request) == [(True, True, set(table[BLOCK // PAGE :]))]
    assert again.is_right(request, BLOCK)
    again.shared.writer.flush(10)
    request.num_computed_tokens = BLOCK
    assert engine().begin(Request("c", PROMPT)) == BLOCK


def begin_with_lost(engine: Engine, request: Request, position: int) -> list[tuple[bool, bool, set[int]]]:
    """A request is matched, then the block at `position` is evicted, then it is loaded. Returns `Engine.results`."""
    engine.scheduler.add(request, not_cached=None)
    num_external = engine.scheduler.match(request.request_id, 0)
    assert num_external is not None
    engine.shared.store.quarantine(*stored_at(engine, position))
    engine.scheduler.plan_load(request.request_id, engine.allocate(request, num_external), num_external)
    engine.workers[0].load(engine.scheduler.plan([]))
    return engine.results(request)


@pytest.mark.parametrize("groups", [(FULL,), (FULL, SLIDING)], ids=["one group", "several groups"])
def test_a_load_that_failed_is_not_planned_again_and_what_was_lost_is_saved(engine: Make, groups: Any) -> None:
    engine(groups=groups).run(Request("a", PROMPT))
    again, request = engine(groups=groups), Request("b", PROMPT, kv_transfer_params={})
    begin_with_lost(again, request, 0)
    # vLLM keeps nothing of it, and asks again each time until it has blocks.
    assert [again.scheduler.match("b", 0) for _ in range(2)] == [0, 0]
    again.step(request, len(PROMPT))
    told = {"restored": 0, "source": "none", "saved": 3 * BLOCK, "reason": "full"}
    assert again.end(request) == {"prefix_cache": told}
    assert again.scheduler.take_counts()["restored_tokens"] == 0
    assert engine(groups=groups).begin(Request("c", PROMPT)) == 3 * BLOCK


def test_a_partly_failed_load_saves_the_rest_and_reports_the_loaded_tokens(engine: Make) -> None:
    engine().run(Request("a", PROMPT))
    again, request = engine(), Request("b", PROMPT, kv_transfer_params={})
    begin_with_lost(again, request, BLOCK)
    # vLLM goes on at the first bad block.
    request.num_computed_tokens = BLOCK
    again.step(request, len(PROMPT) - BLOCK)
    told = {"restored": BLOCK, "source": "disk", "saved": 2 * BLOCK, "reason": "full"}
    assert again.end(request) == {"prefix_cache": told}
    assert again.scheduler.take_counts()["restored_tokens"] == BLOCK
    assert engine().begin(Request("c", PROMPT)) == 3 * BLOCK


def test_after_a_preemption_a_request_is_looked_up_again(engine: Make) -> None:
    one, request = engine(), Request("a", PROMPT)
    assert one.begin(request) == 0
    one.step(request, len(PROMPT))
    request.num_computed_tokens, request.num_preemptions = 0, 1
    assert one.scheduler.match("a", 0) == 3 * BLOCK, "it saved them itself"
    one.shared.writer.flush(10)
    one.shared.store.quarantine(*stored_at(one, BLOCK))
    request.num_preemptions = 2
    assert one.scheduler.match("a", 0) == BLOCK
    one.step(request, len(PROMPT))
    one.end(request)
    assert engine().begin(Request("b", PROMPT)) == 3 * BLOCK


def test_a_worker_forgets_a_request_whose_saves_were_lost_or_whose_store_failed(
    engine: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = engine()

    def preempted(name: str, seed: int) -> Request:
        request = Request(name, prompt(seed, 3 * BLOCK))
        one.begin(request)
        one.step(request, 2 * BLOCK)
        one.shared.writer.flush(10)
        request.num_computed_tokens, request.num_preemptions = 0, 1
        return request

    lost = preempted("lost", 1)
    one.shared.store.quarantine(*stored_at(one, 0))
    assert one.scheduler.match("lost", 0) == 0
    preempted("failed", 2)
    assert set(one.workers[0]._saves) == {"lost", "failed"}

    def fail(_tiers: Any) -> Any:
        raise StoreUnavailable("the disk is gone")

    with monkeypatch.context() as patched:
        patched.setattr("diskprefix.bridges.vllm.scheduler_side.open_views", fail)
        assert one.scheduler.match("failed", 0) == 0
    one.end(lost)
    assert one.workers[0]._saves == {}
    with one.shared.store.snapshot() as snapshot:
        assert [entry.num_tokens for _, entry in snapshot.entries()] == [2 * BLOCK]


def test_vllms_null_block_is_not_named_as_bad(engine: Make) -> None:
    groups = (FULL, SLIDING)
    engine(groups=groups).run(Request("a", PROMPT))
    again, request = engine(groups=groups), Request("b", PROMPT)
    again.allocate(request, 3 * BLOCK)[1][0] = NO_PAGE
    ((_, has_failed, bad),) = begin_with_lost(again, request, 0)
    assert has_failed
    assert NO_PAGE not in bad


def test_a_full_write_buffer_drops_the_rest_of_a_prompt(engine: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    block_bytes = engine().workers[0].block_bytes
    monkeypatch.setattr(connector_settings, "_WRITE_BUFFER", 2 * block_bytes)
    one = engine()
    one.shared.writer.pause_writing()
    with one.shared.store.changes():
        # Nothing can be written meanwhile.
        request = Request("a", PROMPT)
        one.begin(request)
        one.step(request, len(PROMPT))
        assert one.shared.writer.num_pending == 2, "the prompt for the history, and what the step saves"
    one.end(request)
    assert one.workers[0].take_counts()["dropped"] == 1
    assert engine().begin(Request("b", PROMPT)) == 2 * BLOCK


def test_pages_that_cannot_be_copied_end_what_is_saved_of_a_request_and_nothing_else(
    engine: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = engine()
    (worker,) = one.workers
    read, copied = worker._pages.read, list[Any]()

    def fail_at_the_second(*args: Any) -> None:
        copied.append(args)
        if len(copied) == 2:
            raise RuntimeError("out of memory")
        read(*args)

    monkeypatch.setattr(worker._pages, "read", fail_at_the_second)
    one.run(Request("a", PROMPT), step=len(PROMPT))
    assert one.shared.writer.pending_bytes == 0
    assert worker.take_counts()["dropped"] == 1
    other = prompt(2, 2 * BLOCK)
    one.run(Request("b", other))
    again = engine()
    assert [again.begin(Request(name, [*ids, 9])) for name, ids in (("c", PROMPT), ("d", other))] == [BLOCK, 2 * BLOCK]


@pytest.mark.parametrize("numbers", [{"dtype": "float16"}, {"weights_digest": "other"}, {"vllm_version": "0.33"}])
def test_state_of_another_identity_is_a_miss_with_its_reason(
    engine: Make, numbers: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    engine().run(Request("a", PROMPT))
    other = engine(numbers=numbers)
    assert other.run(Request("b", PROMPT)) == 0
    assert f"stored prefixes of tiny are not used: they differ in {next(iter(numbers))} (" in caplog.text
    assert other.scheduler.take_counts()["miss_other_numbers"] == 1
    other.run(Request("c", prompt(9, BLOCK)))
    assert other.scheduler.take_counts()["miss_not_stored"] == 1


def test_another_block_size_or_number_of_ranks_is_a_miss(engine: Make) -> None:
    engine().run(Request("a", PROMPT))
    assert engine(block_size=2 * BLOCK).begin(Request("b", PROMPT)) == 0
    assert engine(num_ranks=2).begin(Request("b", PROMPT)) == 0


def test_a_salt_parts_tenants(engine: Make) -> None:
    engine().run(Request("a", PROMPT, cache_salt="mine"))
    assert engine().begin(Request("b", PROMPT)) == 0
    assert engine().begin(Request("c", PROMPT, cache_salt="other")) == 0
    assert engine().begin(Request("d", PROMPT, cache_salt="mine")) == 3 * BLOCK


def test_layers_with_windows_are_saved_while_their_pages_are_there(engine: Make) -> None:
    groups = (FULL, SLIDING)
    engine(groups=groups).run(Request("a", PROMPT))
    again, request = engine(groups=groups), Request("b", PROMPT)
    again.scheduler.add(request, not_cached=None)
    assert again.scheduler.match("b", 0) == 3 * BLOCK
    tables = again.allocate(request, 3 * BLOCK)
    # vLLM gives no blocks for what lies before the window.
    tables[1][: 2 * BLOCK // PAGE] = [NO_PAGE] * (2 * BLOCK // PAGE)
    again.scheduler.plan_load("b", tables, 3 * BLOCK)
    again.workers[0].load(again.scheduler.plan([]))
    assert again.results(request) == [(True, False, set())]
    assert again.is_right(request, 3 * BLOCK)
    under = again._found(0, SLIDING.layers[0], request, 1, 3 * BLOCK)
    assert under[:, 2 * BLOCK :].any()
    assert not again.caches[0][SLIDING.layers[0]][NO_PAGE].any()


def test_blocks_outside_a_window_and_their_continuations_are_not_saved(engine: Make) -> None:
    groups = (FULL, SLIDING)
    one, request = engine(groups=groups), Request("a", PROMPT, num_computed_tokens=2 * BLOCK)
    tables = one.allocate(request, 2 * BLOCK)
    tables[1][0] = NO_PAGE
    one.begin(request)
    one.step(request, BLOCK)
    one.end(request)
    assert one.shared.store.counts()["blocks"] == 0


@pytest.mark.parametrize(
    ("parameters", "saved"), [({"scope": "off"}, 0), ({"save": False}, 0), ({"scope": 20}, 1), ({"marks": [40]}, 3)]
)
def test_a_request_says_what_is_kept(engine: Make, parameters: dict[str, Any], saved: int) -> None:
    one = engine()
    one.run(Request("a", PROMPT, kv_transfer_params=parameters))
    assert one.shared.store.counts()["blocks"] == saved


def test_auto_keeps_what_two_prompts_share(engine: Make) -> None:
    one = engine(disk_prefix_cache="auto")
    for number in range(12):
        one.run(Request(f"once {number}", prompt(10 + number, 2 * BLOCK)))
    assert one.run(Request("a", [*PROMPT[: 2 * BLOCK], *prompt(3, 20)])) == 0
    one.run(Request("b", [*PROMPT[: 2 * BLOCK], *prompt(4, 20)]))
    assert engine(disk_prefix_cache="auto").begin(Request("c", [*PROMPT[: 2 * BLOCK], *prompt(5, 20)])) == 2 * BLOCK


def test_bad_parameters_and_what_cannot_be_cached_are_served_without_the_cache(
    engine: Make, caplog: pytest.LogCaptureFixture
) -> None:
    one = engine()
    one.begin(Request("a", PROMPT, kv_transfer_params={"window": "many"}))
    one.begin(Request("b", PROMPT), not_cached="media")
    one.begin(Request("c", None))
    counts = one.scheduler.take_counts()
    assert (counts["miss_bad_parameters"], counts["miss_media"], counts["miss_no_tokens"]) == (1, 1, 1)
    assert "a: served without the cache: window: must be an integer of at least 1" in caplog.text


def test_a_store_that_fails_fails_no_request(engine: Make, tmp_path: Path) -> None:
    one = engine()
    one.run(Request("a", PROMPT))
    for file in (tmp_path / "kv").iterdir():
        file.unlink()
    one.shared.store.maintain()
    assert one.run(Request("b", PROMPT)) == 0
    assert one.scheduler.take_counts()["requests"] == 2


def test_a_full_disk_saves_nothing_and_fails_no_request(engine: Make) -> None:
    one = engine()
    one.run(Request("a", PROMPT))
    one.shared.store.min_free_bytes = 2**60
    other = prompt(2, 3 * BLOCK + 1)
    assert one.run(Request("b", other)) == 0
    assert one.begin(Request("c", PROMPT)) == 3 * BLOCK, "what is stored is still restored"
    assert engine().begin(Request("d", other)) == 0


def test_a_file_that_is_damaged_all_over_is_moved_aside_and_all_is_a_miss(engine: Make, tmp_path: Path) -> None:
    engine().run(Request("a", PROMPT))
    engine().close()
    file = tmp_path / "kv" / "data.mdb"
    file.write_bytes(b"\x5a" * file.stat().st_size)
    one = Engine(tmp_path / "kv")
    assert one.run(Request("b", PROMPT)) == 0
    assert one.begin(Request("c", PROMPT)) == 3 * BLOCK
    one.close()


def test_after_the_engine_has_reset_its_caches_nothing_is_restored_or_saved(
    engine: Make, caplog: pytest.LogCaptureFixture
) -> None:
    one = engine()
    one.run(Request("a", PROMPT))
    running, other = Request("b", prompt(2, 3 * BLOCK)), prompt(3, 3 * BLOCK)
    one.begin(running)
    one.step(running, 2 * BLOCK)
    for _ in range(2):
        one.scheduler.switch_off()
    one.step(running, BLOCK)
    one.end(running)
    assert one.begin(Request("c", PROMPT)) == 0
    one.run(Request("d", other))
    assert one.scheduler.take_counts()["miss_reset"] == 2
    assert caplog.text.count("vLLM reset its caches") == 1
    assert one.workers[0]._saves == {}
    again = engine()
    assert [again.begin(Request(name, [*ids, 9])) for name, ids in (("e", PROMPT), ("f", other))] == [3 * BLOCK, 0]
    assert again.begin(Request("g", [*(running.prompt_token_ids or []), 9])) == 2 * BLOCK, "computed before the reset"


def test_the_store_is_whole_and_lists_each_prompt_for_each_rank(engine: Make) -> None:
    one = engine(num_ranks=2)
    one.run(Request("a", PROMPT))
    with one.shared.store.snapshot() as snapshot:
        entries = dict(snapshot.entries())
    assert [entry.num_tokens for entry in entries.values()] == [3 * BLOCK] * 2
    assert len({entry.root for entry in entries.values()}) == 2
    assert verify_index(one.shared.store).problems == ()


def test_a_recording_can_be_simulated(engine: Make, tmp_path: Path) -> None:
    record = tmp_path / "day.jsonl"
    for _ in range(2):
        engine(record=str(record)).run(Request("a", PROMPT))
    engine()
    requests = [one.prompt for one in read_trace(record)]
    assert [len(one.token_ids) for one in requests] == [len(PROMPT)] * 2
