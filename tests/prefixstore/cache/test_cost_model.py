"""The gate decides by what was measured: numbers from a script, no clock and no disk."""

from __future__ import annotations

import logging
import math
from bisect import bisect_left
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from diskprefix.prefixstore.cache.cost_model import CostLine, CostModel
from diskprefix.prefixstore.cache.tiers.tier import Prefetched
from diskprefix.values import CacheOptions, Prompt, Scope
from tests.runner import BLOCK, Runner, random_prompt, tiny_llama, tiny_settings

BYTES_PER_TOKEN = 23_040
ENOUGH = 4


def model_of(
    bytes_per_token: int = BYTES_PER_TOKEN, *, state_bytes: int = 0, windows: dict[int, int] | None = None
) -> Callable[[int], int]:
    """The bytes that a model loads for a number of tokens; `windows`: bytes a token of layers by their window."""

    def loaded_bytes(num_tokens: int) -> int:
        under = sum(size * min(num_tokens, window - 1) for window, size in (windows or {}).items())
        return state_bytes + bytes_per_token * num_tokens + under

    return loaded_bytes


def gate(mode: str = "auto", loaded_bytes: Callable[[int], int] | None = None) -> CostModel:
    return CostModel(mode, loaded_bytes or model_of())


def break_even(worth: CostModel) -> int | None:
    """The fewest tokens that are restored faster than computed; None if there are none."""
    num_tokens = bisect_left(range(2**31), True, key=worth._is_faster)
    return num_tokens if num_tokens < 2**31 else None


def feed(
    worth: CostModel, *, token_s: float, byte_s: float, fixed_s: float, times: int = 2, noise: float = 0.0
) -> CostModel:
    """Tells of prefills and restores of several sizes, with the times that the given speeds would take."""
    rng = np.random.default_rng(1)
    for _ in range(times):
        for num_tokens in (256, 700, 1500, 4000):
            worth.record_prefill(num_tokens, token_s * num_tokens * (1 + noise * rng.uniform(-1, 1)))
            num_bytes = num_tokens * BYTES_PER_TOKEN
            worth.record_restore(num_bytes, (fixed_s + byte_s * num_bytes) * (1 + noise * rng.uniform(-1, 1)))
    return worth


def slow_disk(mode: str = "auto") -> CostModel:
    """Computing a token takes 10 µs; reading one, 23 µs."""
    return feed(gate(mode), token_s=1e-5, byte_s=1e-9, fixed_s=1e-3)


def test_everything_is_allowed_until_enough_is_measured() -> None:
    worth = gate()
    assert worth.allows(1)
    for count in range(ENOUGH):
        assert worth.as_dict()["state"] == "measuring"
        assert worth.allows(1)
        worth.record_prefill(1000 * (count + 1), 1e-6 * (count + 1))
        worth.record_restore(10**6 * (count + 1), 1.0)
    assert worth.as_dict()["state"] != "measuring"
    assert not worth.allows(1)


@given(
    speeds=st.fixed_dictionaries(
        {"token_s": st.floats(1e-7, 1e-2), "byte_s": st.floats(1e-11, 1e-7), "fixed_s": st.floats(1e-5, 1.0)}
    ),
    loaded_bytes=st.builds(
        model_of,
        st.integers(0, 10**6),
        state_bytes=st.integers(0, 10**9),
        windows=st.dictionaries(st.integers(2, 10**5), st.integers(1, 10**6), max_size=2),
    ),
    num_tokens=st.integers(1, 10**6),
)
def test_a_yes_means_that_restoring_is_estimated_faster(
    speeds: dict[str, Any], loaded_bytes: Callable[[int], int], num_tokens: int
) -> None:
    worth = feed(gate("auto", loaded_bytes), **speeds)
    report = worth.as_dict()
    computing_s = report["prefill_s_per_token"] * num_tokens
    restoring_s = report["restore_fixed_s"] + report["restore_s_per_byte"] * loaded_bytes(num_tokens)
    if not math.isclose(computing_s, restoring_s, rel_tol=1e-6):
        assert worth.allows(num_tokens) == (restoring_s < computing_s)


@pytest.mark.parametrize(("gain_s", "state"), [(1e-9, "open"), (1e-12, "closed")])
def test_what_would_pay_beyond_any_prompt_never_pays(gain_s: float, state: str) -> None:
    """Each token is restored so much faster than computed: 10 ms are won back after 10 million, or 10 billion."""
    worth = feed(gate("auto", model_of(999_999)), token_s=1e-9 * 999_999 + gain_s, byte_s=1e-9, fixed_s=1e-2)
    assert worth.as_dict()["state"] == state


def test_the_speeds_are_found_again_among_noise_and_outliers() -> None:
    worth = feed(gate(), token_s=1e-3, byte_s=2e-9, fixed_s=5e-3, noise=0.05, times=6)
    for size in (3 * 10**6, 9 * 10**6, 2 * 10**7):
        worth.record_restore(size, 4.0)
        worth.record_prefill(size // BYTES_PER_TOKEN, 60.0)
    report = worth.as_dict()
    assert report["prefill_s_per_token"] == pytest.approx(1e-3, rel=0.1)
    assert report["restore_s_per_byte"] == pytest.approx(2e-9, rel=0.1)
    assert report["restore_fixed_s"] == pytest.approx(5e-3, rel=0.5)


@pytest.mark.parametrize(
    ("samples", "fixed_s", "s_per_unit"),
    [
        # On a GPU a short remainder takes as long as a whole step.
        ([(n, 0.05 + 1e-5 * n) for n in (256, 700, 1500, 4000)], 0.05, 1e-5),
        # Through the noise of the first three, a unit would seem to take a thousand times as long.
        ([(1000, 1.0), (1001, 2.0), (1002, 3.0), (4000, 5.0)], 0.998, 1e-3),
        # A line never starts below zero.
        ([(1000, 1.0), (4000, 16.0), (2000, 4.0), (2000, 4.0)], 0.0, 2e-3),
    ],
    ids=["a fixed part", "nearly of one size", "below zero"],
)
def test_the_parts_of_a_time_are_told_apart(
    samples: list[tuple[int, float]], fixed_s: float, s_per_unit: float
) -> None:
    line = CostLine.through(samples)
    assert line is not None
    assert line.fixed_s == pytest.approx(fixed_s, rel=0.02)
    assert line.s_per_unit == pytest.approx(s_per_unit, rel=0.02)


def test_restores_of_one_size_do_not_close_the_gate_for_shorter_ones() -> None:
    # By bytes 2000 tokens are restored in 23 ms. That their restore takes 700 ms too was not seen.
    worth = gate()
    for _ in range(8):
        worth.record_prefill(60_000, 18.0)
        worth.record_restore(60_000 * BYTES_PER_TOKEN, 0.7)
    assert break_even(worth) == 1
    # Once shorter ones are seen to take as long, the gate closes for them.
    for _ in range(8):
        worth.record_restore(2000 * BYTES_PER_TOKEN, 0.7)
    assert break_even(worth) == pytest.approx(0.7 / 3e-4, abs=1)


@given(
    size=st.integers(1, 10**9),
    seconds=st.floats(1e-6, 100),
    share=st.floats(0, 1),
    asked=st.integers(0, 10**10),
)
def test_samples_of_one_size_allow_what_any_line_through_them_would(
    size: int, seconds: float, share: float, asked: int
) -> None:
    line = CostLine.through([(size, seconds)] * 5)
    assert line is not None
    assert line.at(size) == seconds
    assert line.at(asked) <= (share + (1 - share) * asked / size) * seconds * (1 + 1e-9)


@pytest.mark.parametrize(
    ("size", "seconds"),
    [
        (0, 1.0),
        (-5, 1.0),
        pytest.param(10**400, 1.0, id="huge"),
        (1000, 0.0),
        (1000, -1.0),
        (1000, 1e300),
        (1000, math.inf),
        (1000, math.nan),
    ],
)
def test_what_cannot_be_a_measurement_is_not_one(size: int, seconds: float) -> None:
    worth = gate()
    for _ in range(8):
        worth.record_prefill(size, seconds)
        worth.record_restore(size, seconds)
    report = worth.as_dict()
    assert (report["state"], report["prefill_s_per_token"], report["restore_s_per_byte"]) == ("measuring", None, None)


def test_what_a_token_takes_is_told_from_one_long_prefill_until_more_are_measured() -> None:
    model, told = gate(), []
    # The first two are too short to tell.
    for size, seconds in ((1, 0.04), (20, 0.02), (1000, 2.0), (500, 0.5), (1500, 1.5), (2000, 2.0)):
        model.record_prefill(size, seconds)
        told.append(model.prefill_s_per_token)
    assert told == [None, None, 0.002, 0.002, pytest.approx(0.001), pytest.approx(0.001)]


def test_a_closed_gate_lets_every_sixteenth_case_of_each_use_through() -> None:
    worth = slow_disk()
    # Alternating, as requests do: neither use may take the other's turn.
    answers = [(worth.lets_through("restore"), worth.lets_through("save")) for _ in range(48)]
    assert [number for number, answer in enumerate(answers, start=1) if answer == (True, True)] == [16, 32, 48]
    assert [answer for answer in answers if answer[0] != answer[1]] == []
    report = worth.as_dict()
    assert (report["skipped_restores"], report["skipped_saves"]) == (45, 45)


def test_a_part_of_a_block_pays_where_loading_the_whole_block_is_faster_than_computing_the_part() -> None:
    block_bytes = 256 * BYTES_PER_TOKEN
    worth = gate()
    assert worth.pays(1, block_bytes)
    feed(worth, token_s=1e-3, byte_s=1e-9, fixed_s=0.01)
    few = math.floor(block_bytes * 1e-9 / 1e-3)
    assert (few, worth.pays(few, block_bytes), worth.pays(few + 1, block_bytes)) == (5, False, True)
    assert feed(gate("off"), token_s=1e-3, byte_s=1e-9, fixed_s=0.01).pays(1, block_bytes)


def test_fetching_pays_where_the_measured_network_is_faster_than_the_model() -> None:
    worth = CostModel("auto", lambda num_tokens: 1000 * num_tokens)
    assert worth.pays_remote(100, 100_000), "while nothing is known"
    for num_tokens in (200, 400, 800, 1600):
        worth.record_prefill(num_tokens, 0.001 * num_tokens)
        # 50 ms, and 1 MB a second.
        worth.record_prefetch(Prefetched(num_bytes=1000 * num_tokens, seconds=0.05 + 0.0005 * num_tokens))
    assert worth.pays_remote(1000, 1_000_000)
    assert not worth.pays_remote(50, 50_000)
    figures = worth.as_dict()
    assert figures["remote_fixed_s"] == pytest.approx(0.05)
    assert figures["remote_s_per_byte"] == pytest.approx(5e-7)
    assert sum(worth.lets_through("fetch") for _ in range(32)) == 2, "measured again now and then"
    assert worth.as_dict()["skipped_fetches"] == 30


def test_off_allows_everything_logs_nothing_and_still_says_what_was_measured(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        worth = slow_disk("off")
    assert all(worth.allows(1) for _ in range(100))
    report = worth.as_dict()
    assert (report["mode"], report["state"], report["skipped_restores"]) == ("off", "open", 0)
    assert report["prefill_s_per_token"] == pytest.approx(1e-5)
    assert caplog.records == []


def test_a_gate_that_closes_or_opens_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="diskprefix"):
        worth = slow_disk()
        for _ in range(40):
            worth.allows(1000)
        feed(worth, token_s=1e-2, byte_s=1e-10, fixed_s=1e-3, times=8)
    assert worth.as_dict()["prefill_s_per_token"] == pytest.approx(1e-2), "old measurements are forgotten"
    states = [record.getMessage() for record in caplog.records]
    assert ["are not used" in states[0], "are used" in states[1], len(states)] == [True, True, 2]


def test_the_cache_asks_and_reports_for_what_its_model_loads(tmp_path: Path) -> None:
    runner = Runner(tiny_llama(), tiny_settings(tmp_path / "kv", kv_cache_gate="auto"))
    feed(runner.cache.cost_model, token_s=1e-3, byte_s=1e-6, fixed_s=1.0)
    gain_s = 1e-3 - 1e-6 * runner.layout.bytes_per_token
    fewest = break_even(runner.cache.cost_model) or 0
    assert fewest == pytest.approx(1.0 / gain_s, abs=1)
    assert not runner.cache.cost_model.allows(fewest - 1)
    assert runner.cache.cost_model.allows(fewest)
    runner.close()


def test_a_request_asks_a_closed_gate_once_and_every_sixteenth_restores_and_is_measured(tmp_path: Path) -> None:
    runner = Runner(tiny_llama(), tiny_settings(tmp_path / "kv", kv_cache_gate="auto"))
    prompt, options = Prompt(random_prompt(1, 4 * BLOCK)), CacheOptions(scope=Scope("full"))
    runner.run_prompt(prompt, options)
    assert runner.cache.writer.flush(30)
    model = feed(runner.cache.cost_model, token_s=1e-6, byte_s=1e-3, fixed_s=1.0)
    assert runner.cancelled(Prompt(random_prompt(2, 4 * BLOCK)), options, steps=2).saved == "none"
    assert model.as_dict()["skipped_saves"] == 1
    reports = [runner.run_prompt(prompt, options).report for _ in range(32)]
    assert [number for number, report in enumerate(reports, start=1) if report.restored] == [16, 32]
    assert {report.refused for report in reports} == {None, "faster_to_compute"}
    assert model.as_dict()["skipped_restores"] == 30
    runner.close()
