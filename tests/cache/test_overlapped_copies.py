"""The cache of a device: a restored prompt is the cold run's, and the thread that computes waits for no copy.

The device is one in main memory whose copies are made as late as possible (`tests.kv.late_streams`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from diskprefix.cache.cached_request import CachedRequest
from diskprefix.cache.policy.scope import parse_scope
from diskprefix.cache.tiers import loading
from diskprefix.errors import StoreCorrupt
from diskprefix.kv.capturer import Capturer
from diskprefix.kv.copies import PinnedBuffers, StreamCopies
from diskprefix.nouns import CacheOptions, Prompt
from diskprefix.store.pieces import _cuts
from diskprefix.store.snapshot import Snapshot
from tests.exactness.architectures import tiny_model
from tests.kv.late_streams import LateStreams, install
from tests.runner import BLOCK, Answer, Runner, random_prompt, same, tiny_settings

PROMPT = random_prompt(1, 6 * BLOCK + 5)
LONGER = np.concatenate([PROMPT, random_prompt(2, 20)])
KINDS = ["llama", "gemma3", "deepseek_v3", "qwen3_next", "mamba2"]


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Iterator[LateStreams]:
    """A copy has one layer of a block at most, which has several pieces."""
    streams = LateStreams()
    install(monkeypatch, streams)
    monkeypatch.setattr("diskprefix.cache.restoration.COPY_BYTES", 1 << 10)
    monkeypatch.setattr("diskprefix.store.pieces.PIECE_BYTES", 1 << 9)
    _cuts.cache_clear()
    yield streams
    _cuts.cache_clear()


def opened(kind: str, folder: Path) -> Runner:
    return Runner(tiny_model(kind, torch.bfloat16), tiny_settings(folder), exact_at=None)


def stored(runner: Runner) -> Answer:
    """Computes and stores the prompt. Then nothing of it is in memory."""
    answer = runner.run(PROMPT, "full", reply=4)
    runner.flush()
    # Readers as for a device.
    runner.device = "late"
    runner.reopen()
    return answer


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def runner(kind: str, tmp_path: Path, streams: LateStreams) -> Iterator[Runner]:
    runner = opened(kind, tmp_path)
    # The rehearsal of a model waits.
    streams.blocked.clear()
    yield runner
    runner.close()


def test_a_prompt_that_came_over_streams_is_the_cold_run_and_its_thread_never_waited(
    runner: Runner, streams: LateStreams
) -> None:
    cold = stored(runner)
    longer = runner.run(LONGER, "full", reply=4)
    runner.flush()
    assert (longer.report.restored, longer.report.source) == (len(PROMPT), "disk")
    assert same(longer, runner.run(LONGER, "off", reply=4))
    runner.reopen()
    again = runner.run(PROMPT, "full", reply=4)
    assert again.report.restored == len(PROMPT)
    assert same(again, cold)
    runner.reopen()
    assert same(runner.run(LONGER, "full", reply=4), longer)
    assert min(streams.counts["loads"], streams.counts["saves"]) > 5
    assert threading.current_thread().name not in streams.blocked
    assert {name.partition("_")[0] for name in streams.blocked} <= {"kv-capture", "kv-reader"}


@pytest.mark.parametrize("kind", ["llama", "mamba2"], indirect=True)
def test_three_buffers_are_enough_and_no_more_memory_is_pinned(runner: Runner, streams: LateStreams) -> None:
    few_buffers(streams)
    before = streams.counts["pinned_bytes"]
    cold = stored(runner)
    assert same(runner.run(PROMPT, "full", reply=4), cold)
    assert streams.counts["pinned_bytes"] == before + (3 << 18)


def few_buffers(streams: LateStreams) -> None:
    assert streams.lane is not None
    streams.lane.buffers = PinnedBuffers(streams.pinned, 3, 1 << 18)


@pytest.mark.parametrize("kind", ["llama", "gemma3"], indirect=True)
@pytest.mark.parametrize("at", [0, 2, 5])
def test_a_damaged_block_is_found_before_it_is_copied_and_a_shorter_prefix_is_restored(
    runner: Runner, at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    cold = stored(runner)
    cached = runner.cache.begin(Prompt(PROMPT), CacheOptions(scope=parse_scope("full", param="scope")))
    name = cached.nodes.block_names[at]
    cached.close()
    decode = Snapshot.decode

    def damaged(self: Snapshot, found: bytes, index: int, *args: Any) -> None:
        # The last of its layers: the first ones are on their way.
        if found == name and index:
            raise StoreCorrupt("its checksum is wrong")
        decode(self, found, index, *args)

    monkeypatch.setattr(Snapshot, "decode", damaged)
    answer = runner.run(PROMPT, "full", reply=4)
    assert answer.report.restored == at * BLOCK
    assert same(answer, cold)


def test_the_layers_of_all_blocks_are_loaded_one_after_the_other(
    tmp_path: Path, streams: LateStreams, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = opened("llama", tmp_path)
    stored(runner)
    # Of two readers, one may be late with a layer.
    monkeypatch.setattr("diskprefix.cache.resources.reader_threads", lambda **_: 1)
    waits: list[tuple[int, int]] = []
    arrive = StreamCopies.arrive

    def watched(self: StreamCopies, layer: int | None = None) -> None:
        arrive(self, layer)
        if layer is not None and layer >= 0:
            waits.append((layer, streams.num_loaded))

    monkeypatch.setattr(StreamCopies, "arrive", watched)
    runner.reopen()
    runner.run(LONGER, "full")
    del waits[len(runner.layout.layers) :]
    layers = [where for where, _ in waits]
    made = [count for _, count in waits]
    assert layers == sorted(layers)
    # When the first layer computes, copies of later ones are still to be made.
    assert 0 < made[0] < made[-1]
    runner.close()


Break = Callable[[pytest.MonkeyPatch], None]


def no_wait(patch: pytest.MonkeyPatch) -> None:
    """Attention reads what has not arrived."""
    patch.setattr(StreamCopies, "arrive", lambda *_: None)


def no_wait_for_states(patch: pytest.MonkeyPatch) -> None:
    arrive = StreamCopies.arrive
    patch.setattr(StreamCopies, "arrive", lambda self, layer=None: None if layer == -1 else arrive(self, layer))


class _First(dict[int, Any]):
    def update(self, found: Any) -> None:
        for layer, event in found.items():
            self.setdefault(layer, event)


def wait_for_the_first_copy(patch: pytest.MonkeyPatch) -> None:
    """A layer waits for its first block only."""
    init = StreamCopies.__init__

    def begin(self: StreamCopies, *args: Any) -> None:
        init(self, *args)
        self._coming = _First()

    patch.setattr(StreamCopies, "__init__", begin)


def buffers_that_are_free_too_early(patch: pytest.MonkeyPatch) -> None:
    """A buffer is filled again before what it held was copied."""
    give = PinnedBuffers.give
    patch.setattr(PinnedBuffers, "give", lambda self, buffer, _event=None: give(self, buffer))


def never_finished(patch: pytest.MonkeyPatch) -> None:
    """States are written before they are copied out of the device."""
    for module in ("publish", "saving"):
        patch.setattr(f"diskprefix.cache.{module}.finish", lambda later: later.clear())


def states_that_change(patch: pytest.MonkeyPatch) -> None:
    """States are copied out of the device after the reply has changed them."""
    has_ended, publish_reply, find = threading.Event(), CachedRequest.publish_reply, Capturer._next

    def ending(self: CachedRequest, *args: Any) -> None:
        publish_reply(self, *args)
        if self.options.scope.kind != "off":
            has_ended.set()
            self.cache.capturer.wake()

    patch.setattr(CachedRequest, "publish_reply", ending)
    patch.setattr(Capturer, "_next", lambda self: find(self) if has_ended.is_set() else None)

    def read_later(self: StreamCopies, payload: Any, values: torch.Tensor, later: Any) -> None:
        later.append(lambda: self.read(payload, values))

    patch.setattr(StreamCopies, "read_later", read_later)


@pytest.mark.parametrize(
    ("kind", "broken"),
    [
        ("llama", no_wait),
        ("llama", wait_for_the_first_copy),
        ("gemma3", wait_for_the_first_copy),
        ("llama", buffers_that_are_free_too_early),
        ("llama", never_finished),
        ("mamba2", no_wait_for_states),
        ("mamba2", never_finished),
        ("mamba2", states_that_change),
    ],
)
def test_each_wait_is_needed(
    kind: str, broken: Break, tmp_path: Path, streams: LateStreams, monkeypatch: pytest.MonkeyPatch
) -> None:
    if broken is buffers_that_are_free_too_early:
        few_buffers(streams)
    runner = opened(kind, tmp_path)
    with monkeypatch.context() as patch:
        broken(patch)
        cold = runner.run(PROMPT, "off", reply=4)
        longer = runner.run(LONGER, "off", reply=4)
        stored(runner)
        restored = [runner.run(LONGER, "full", reply=4)]
        runner.reopen()
        restored.append(runner.run(PROMPT, "full", reply=4))
    assert all(answer.report.restored for answer in restored)
    assert not (same(restored[0], longer) and same(restored[1], cold))
    runner.close()


@pytest.mark.parametrize(("bytes_per_s", "refused"), [(1e12, None), (10.0, "faster_to_compute")])
def test_the_gate_goes_by_the_speed_of_the_device(
    bytes_per_s: float, refused: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, LateStreams(bytes_per_s))
    runner = Runner(tiny_model("llama", torch.bfloat16), tiny_settings(tmp_path, kv_cache_gate="auto"), exact_at=None)
    prompts = [random_prompt(seed, (seed + 4) * 4 * BLOCK) for seed in range(5)]
    for prompt in prompts:
        runner.run(prompt, "full")
        # A token takes a second to compute, whatever this machine does.
        runner.cache.cost_model.record_prefill(len(prompt), float(len(prompt)))
    runner.flush()
    reports = [runner.run(np.concatenate([prompt, prompt[:BLOCK]]), "full").report for prompt in prompts]
    assert [report.refused for report in reports] == [None] * 4 + [refused]
    least = [size / bytes_per_s for size, _ in runner.cache.cost_model._restores]
    measured = [seconds for _, seconds in runner.cache.cost_model._restores]
    assert all(seconds >= 0.999 * size for seconds, size in zip(measured, least, strict=True))
    runner.close()


def test_more_threads_read_for_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    for cores, expected in ((None, 2), (2, 2), (8, 4), (64, 8)):
        monkeypatch.setattr("os.cpu_count", lambda cores=cores: cores)
        assert loading.reader_threads(is_direct=True) == 2
        assert loading.reader_threads(is_direct=False) == expected
