"""The figures that replies report and metrics count, and the gate's figures in `/props` and `/metrics`."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from prometheus_client.parser import text_string_to_metric_families

from diskprefix.daemon.api.figures import figures_reply
from diskprefix.daemon.engine.gauges import Distribution, EngineFigures
from diskprefix.daemon.engine.idle.ahead_jobs import AheadJobs
from diskprefix.daemon.engine.request import DoneEvent, Timings, Usage
from diskprefix.daemon.server import serving as serving_module
from diskprefix.daemon.server.log_context import OUTCOMES, LogContext
from diskprefix.daemon.server.metrics import _COUNTERS, ServerMetrics
from diskprefix.daemon.server.serving import CacheCounts, Serving
from diskprefix.daemon.server.threads import Threads
from diskprefix.prefixstore.cache.cost_model import CostModel
from tests.daemon.server.scripted import KV_MEMORY, STATS, ScriptedEngine, done

Sample = tuple[str, tuple[tuple[str, str], ...]]


class Scraped:
    """The metrics of a daemon that computes nothing."""

    def __init__(self) -> None:
        self.metrics = ServerMetrics()
        self.figures = EngineFigures()
        self.stats: dict[str, Any] = dict.fromkeys(_COUNTERS, 0) | {
            "misses": Counter(),
        }

    def scrape(self) -> dict[Sample, float]:
        return samples_of(self.text())

    def text(self) -> str:
        heartbeat = SimpleNamespace(working_s=0.0)
        serving = SimpleNamespace(
            engine=SimpleNamespace(
                ahead=AheadJobs(0),
                figures=self.figures,
                memory_stats=lambda: dict(KV_MEMORY),
                device="cpu",
                dtype="bfloat16",
            ),
            inbox=SimpleNamespace(num_running=1, queue_depth=2, heartbeat=heartbeat),
            model_name="a model",
            fingerprint="fp_0",
            counts=CacheCounts(Threads(), lambda: STATS | self.stats),
        )
        return asyncio.run(self.metrics.render(cast("Serving", serving))).decode()


def samples_of(text: str) -> dict[Sample, float]:
    families = text_string_to_metric_families(text)
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in families
        for sample in family.samples
        if sample.name.startswith("diskprefix_")
    }


def is_monotonic(name: str) -> bool:
    return name.endswith(("_total", "_count", "_sum", "_bucket"))


times_ms = st.floats(0, 1e5, allow_nan=False)


@st.composite
def done_events(draw: st.DrawFn) -> DoneEvent:
    prompt, reply = draw(st.integers(1, 5000)), draw(st.integers(0, 500))
    restored = draw(st.integers(0, prompt))
    drafted = draw(st.integers(0, 100))
    source = draw(st.sampled_from(["memory", "disk"])) if restored else "none"
    event = done(restored=restored, source=source, miss_reason=None if restored else "not_stored")
    phases = ("queue", "lookup", "restore", "prefill", "ttft", "decode")
    times: dict[str, Any] = {f"{phase}_ms": draw(times_ms) for phase in phases}
    timings = Timings(
        **times,
        decode_tokens_per_s=1.0,
        drafted_tokens=drafted,
        accepted_tokens=draw(st.integers(0, drafted)),
    )
    return DoneEvent(Usage(prompt_tokens=prompt, completion_tokens=reply, cached_tokens=restored), event.cache, timings)


@pytest.mark.parametrize(
    ("prompt_tokens", "restored", "outcome"),
    [(511, 511, "short"), (512, 255, "miss"), (512, 256, "hit"), (10_000, 24, "miss")],
)
def test_the_few_tokens_that_all_prompts_begin_with_are_no_hit(prompt_tokens: int, restored: int, outcome: str) -> None:
    event = done(restored=restored)
    event = replace(event, usage=Usage(prompt_tokens=prompt_tokens, completion_tokens=1, cached_tokens=restored))
    assert event.outcome == outcome


@settings(max_examples=15)
@given(
    rounds=st.lists(
        st.lists(st.tuples(done_events(), st.lists(times_ms, max_size=3)), max_size=4), min_size=1, max_size=4
    )
)
def test_counters_never_go_back_and_histograms_agree_with_the_responses(
    rounds: list[list[tuple[DoneEvent, list[float]]]],
) -> None:
    scraped, said, gaps = Scraped(), [], []
    before = scraped.scrape()
    for events in rounds:
        for event, gaps_ms in events:
            record = LogContext(status=200, wants_reply=True, done=event)
            scraped.metrics.count_generation(event)
            scraped.metrics.count_request("/v1/chat/completions", record)
            said.append(figures_reply(event, None) | {"usage": event.usage})
            for gap_ms in gaps_ms:
                scraped.figures.gap_s.observe(gap_ms / 1e3)
                gaps.append(gap_ms / 1e3)
            scraped.figures.record_step(3, 0.1)
        after = scraped.scrape()
        lost = before.keys() - after.keys()
        back = [name for name in before if is_monotonic(name[0]) and after.get(name, 0) < before[name]]
        assert (lost, back) == (set(), [])
        before = after
    agree(before, said)
    check_histogram(before, "inter_token_seconds", gaps)
    check_histogram(before, "step_rows", [3.0] * len(said))


def agree(scraped: dict[Sample, float], said: list[dict[str, Any]]) -> None:
    def told(kind: str, cache: str | None = None) -> list[float]:
        chosen = [reply for reply in said if cache is None or outcome(reply) == cache]
        return [reply["timings"][f"{kind}_ms"] / 1e3 for reply in chosen]

    def outcome(reply: dict[str, Any]) -> str:
        num_tokens, restored = reply["usage"].prompt_tokens, reply["prefix_cache"]["restored"]
        return "short" if num_tokens < 512 else "hit" if restored >= num_tokens / 2 else "miss"

    for cache in ("hit", "miss", "short"):
        check_histogram(scraped, "time_to_first_token_seconds", told("ttft", cache), cache=cache)
    times = [reply["timings"] for reply in said if reply["prefix_cache"]["restored"]]
    restores = [(timings["restore_ms"] + timings.get("late_restore_ms", 0)) / 1e3 for timings in times]
    check_histogram(scraped, "restore_seconds", restores)
    for phase in ("queue", "prefill", "decode"):
        check_histogram(scraped, f"{phase}_seconds", told(phase))
    restored = Counter[str]()
    for reply in said:
        restored[reply["prefix_cache"].get("source", "none")] += reply["prefix_cache"]["restored"]
    for source in ("memory", "disk"):
        assert scraped["diskprefix_prompt_tokens_total", (("source", source),)] == restored[source]
    computed = sum(reply["usage"].prompt_tokens - reply["prefix_cache"]["restored"] for reply in said)
    assert scraped["diskprefix_prompt_tokens_total", (("source", "computed"),)] == computed
    assert scraped["diskprefix_generation_tokens_total", ()] == sum(reply["usage"].completion_tokens for reply in said)
    assert scraped["diskprefix_requests_total", (("outcome", "completed"),)] == len(said)


def check_histogram(scraped: dict[Sample, float], name: str, values: list[float], **labels: str) -> None:
    """Checks count, sum and each bucket of a histogram. What is said is rounded, so a bucket's edge is blurred."""
    full = f"diskprefix_{name}"
    key = tuple(sorted(labels.items()))
    assert scraped[f"{full}_count", key] == len(values)
    assert scraped[f"{full}_sum", key] == pytest.approx(sum(values), abs=1e-5 * (len(values) + 1), rel=1e-6)
    for (sample, its_labels), count in scraped.items():
        if sample == f"{full}_bucket" and set(key) <= set(its_labels):
            bound = float(dict(its_labels)["le"])
            least, most = (sum(value <= bound + edge for value in values) for edge in (-1e-5, 1e-5))
            assert least <= count <= most


def test_a_distribution_counts_a_value_on_a_bound_below_it() -> None:
    distribution = Distribution((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 2.0, 3.0):
        distribution.observe(value)
    assert distribution.cumulative() == [2, 4, 5]
    assert distribution.sum == 8.0


@pytest.mark.parametrize(
    ("status", "has_error", "outcome"),
    [
        (200, False, "completed"),
        (499, False, "cancelled"),
        (503, True, "rejected"),
        (429, True, "rejected"),
        (400, True, "invalid"),
        (413, True, "invalid"),
        (500, True, "failed"),
        (200, True, "failed"),
    ],
)
def test_each_request_for_a_reply_has_one_outcome(status: int, has_error: bool, outcome: str) -> None:
    record = LogContext(status=status, wants_reply=True, done=None if has_error or status != 200 else done())
    assert record.outcome == outcome
    assert outcome in OUTCOMES
    assert LogContext(status=status).outcome is None, "a request for /health is none"


def test_names_follow_the_conventions_and_each_has_a_help() -> None:
    units = ("_seconds", "_bytes", "_info", "_rows", "_tokens", "_ready", "_degraded", "_sequences", "_requests")
    plain = ("_running", "_waiting", "_entries", "_blocks", "_per_token", "_per_byte")
    for family in text_string_to_metric_families(Scraped().text()):
        if not family.name.startswith("diskprefix_"):
            continue
        assert family.documentation.endswith("."), family.name
        assert not family.name.endswith(("_ms", "_milliseconds", "_mb", "_count", "_sum")), family.name
        if family.type == "counter":
            assert all(sample.name.endswith("_total") for sample in family.samples), family.name
        else:
            assert family.name.endswith((*units, *plain)), family.name


def test_counts_of_the_cache_are_told_under_the_names_of_their_metrics() -> None:
    daemon = Scraped()
    daemon.stats = {"saved_s": 17.5, "saved_tokens": 11, "restored_bytes": 10}
    scraped = daemon.scrape()
    names = ("saved_seconds", "store_written_tokens", "store_read_bytes")
    assert [scraped[f"diskprefix_{name}_total", ()] for name in names] == [17.5, 11, 10]


@pytest.mark.parametrize(
    ("costs", "counted"),
    [
        (
            {"encode_ms": 1500.0, "image_tokens": 900, "images_encoded": 2, "images_restored": 3},
            {("images_encoded", ()): 4, ("images_restored", ()): 6, ("image_encode_seconds", ()): 3.0},
        ),
        (
            {"drafted_tokens": 40, "accepted_tokens": 30, "drafted_by": "ngram"},
            {("draft_tokens", (("result", "accepted"),)): 60, ("draft_tokens", (("result", "rejected"),)): 20},
        ),
    ],
    ids=["images", "guesses"],
)
def test_costs_are_reported_and_counted_only_if_a_reply_had_them(
    costs: dict[str, Any], counted: dict[Sample, float]
) -> None:
    plain = done(completion_tokens=50)
    costly = replace(plain, timings=replace(plain.timings, ttft_ms=2000.0, **costs))
    told = figures_reply(costly, None)["timings"]
    assert told.items() >= costs.items()
    assert told["others_ms"] <= 2000 - told.get("encode_ms", 0)
    assert not {*costs, "draft_ms"} & figures_reply(plain, None)["timings"].keys()
    scraped = Scraped()
    for event in (costly, costly, plain):
        scraped.metrics.count_generation(event)
    samples = scraped.scrape()
    assert {key: samples[f"diskprefix_{key[0]}_total", key[1]] for key in counted} == counted


def gate(*, is_measured: bool) -> CostModel:
    """Computing takes 1 ms a token; restoring 10 ms, and 2 ms a token. 20 restores and 3 savings were asked for."""
    worth = CostModel("auto", lambda num_tokens: 1000 * num_tokens)
    if is_measured:
        for num_tokens in (100, 300, 900, 2700):
            worth.record_prefill(num_tokens, 1e-3 * num_tokens)
            worth.record_restore(1000 * num_tokens, 1e-2 + 2e-3 * num_tokens)
        for _ in range(20):
            worth.lets_through("restore")
        for _ in range(3):
            worth.lets_through("save")
    return worth


@pytest.mark.parametrize(
    ("is_measured", "state", "speeds", "skipped"),
    [(False, "measuring", [None] * 3, (0, 0, 0)), (True, "closed", [1e-3, 2e-6, 1e-2], (0, 19, 3))],
)
def test_the_gate_is_reported_and_unmeasured_speeds_are_none(
    client: httpx.Client,
    engine: ScriptedEngine,
    monkeypatch: pytest.MonkeyPatch,
    is_measured: bool,
    state: str,
    speeds: list[float | None],
    skipped: tuple[int, ...],
) -> None:
    worth = gate(is_measured=is_measured)
    monkeypatch.setitem(engine.stats, "gate", worth.as_dict())
    cache = client.get("/props").json()["full_cache"]
    assert cache["gate"] == worth.as_dict()
    assert cache["gate"]["state"] == state
    assert "gate" not in cache["state"]
    samples = samples_of(client.get("/metrics").text)
    names = ("prefill_seconds_per_token", "restore_seconds_per_byte", "restore_fixed_seconds")
    told = [samples.get((f"diskprefix_gate_{name}", ())) for name in names]
    assert told == [speed and pytest.approx(speed) for speed in speeds]
    uses = ("fetch", "restore", "save")
    assert tuple(samples["diskprefix_gate_skipped_total", (("use", use),)] for use in uses) == skipped


class Counted:
    """Counts that are the numbers of their readings. The later ones wait for `goes_on`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(serving_module, "_PATIENCE_S", 0.01)
        self.readings, self.goes_on = 0, threading.Event()
        self.goes_on.set()
        self.counts = CacheCounts(Threads(), self.read)

    def read(self) -> dict[str, Any]:
        self.readings += 1
        number = self.readings
        assert self.goes_on.wait(30)
        return {"number": number}


def test_scrapes_within_two_seconds_read_the_disk_once(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scrape() -> None:
        counted = Counted(monkeypatch)
        for _ in range(3):
            assert await counted.counts.newest(1e9) == {"number": 1}
        while (await counted.counts.newest(0.0))["number"] == 1:
            pass
        assert await counted.counts.newest(1e9) == counted.counts.last

    asyncio.run(scrape())


def test_a_slow_reading_is_waited_for_a_moment_and_not_begun_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scrape() -> None:
        counted = Counted(monkeypatch)
        counted.goes_on.clear()
        assert [await counted.counts.newest(0.0) for _ in range(3)] == [{"number": 1}] * 3
        counted.goes_on.set()
        while await counted.counts.newest(1e9) == {"number": 1}:
            pass
        assert counted.readings == 2

    asyncio.run(scrape())
