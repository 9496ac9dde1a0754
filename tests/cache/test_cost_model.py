"""The gate decides by what was measured: numbers from a script, no clock and no disk."""

from __future__ import annotations

import json
import logging
import math
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from diskprefix.cache.cost_model import CostLine, CostModel
from diskprefix.memo import Memo
from diskprefix.settings import cache_home
from tests.runner import Runner, tiny_llama, tiny_settings

BYTES_PER_TOKEN = 23_040
ENOUGH = 4
KEY = "root cpu store"


def model_of(
    bytes_per_token: int = BYTES_PER_TOKEN, *, state_bytes: int = 0, windows: dict[int, int] | None = None
) -> Callable[[int], int]:
    """The bytes that a model loads for a number of tokens; `windows`: bytes a token of layers by their window."""

    def loaded_bytes(num_tokens: int) -> int:
        under = sum(size * min(num_tokens, window - 1) for window, size in (windows or {}).items())
        return state_bytes + bytes_per_token * num_tokens + under

    return loaded_bytes


def gate(mode: str = "auto", loaded_bytes: Callable[[int], int] | None = None, *, key: str = "") -> CostModel:
    return CostModel(mode, loaded_bytes or model_of(), key=key)


@pytest.fixture(autouse=True)
def _own_cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def feed(
    worth: CostModel,
    *,
    token_s: float,
    byte_s: float,
    fixed_s: float,
    step_s: float = 0.0,
    times: int = 2,
    noise: float = 0,
) -> CostModel:
    """Tell of prefills and restores of several sizes, with the times that the given speeds would take."""
    rng = np.random.default_rng(1)
    for _ in range(times):
        for num_tokens in (256, 700, 1500, 4000):
            worth.record_prefill(num_tokens, (step_s + token_s * num_tokens) * (1 + noise * rng.uniform(-1, 1)))
            num_bytes = num_tokens * BYTES_PER_TOKEN
            worth.record_restore(num_bytes, (fixed_s + byte_s * num_bytes) * (1 + noise * rng.uniform(-1, 1)))
    return worth


def slow_disk(mode: str = "auto", key: str = "") -> CostModel:
    """Computing a token takes 10 µs; reading one, 23 µs."""
    return feed(gate(mode, key=key), token_s=1e-5, byte_s=1e-9, fixed_s=1e-3)


def test_everything_is_allowed_until_enough_is_measured() -> None:
    worth = gate()
    assert worth.allows(1)
    for count in range(ENOUGH):
        assert not worth.is_known
        assert worth.as_dict()["state"] == "measuring"
        assert worth.as_dict()["break_even_tokens"] is None
        assert all(worth.allows(1, use="save") for _ in range(100))
        worth.record_prefill(1000 * (count + 1), 1e-6 * (count + 1))
        worth.record_restore(10**6 * (count + 1), 1.0)
    assert worth.is_known
    assert not worth.allows(1)


def test_a_checkpoint_is_paid_once() -> None:
    # 50 MB at 1 GB/s: 50 ms more, and nothing by token.
    worth = feed(gate("auto", model_of(0, state_bytes=50_000_000)), token_s=1e-3, byte_s=1e-9, fixed_s=1e-2)
    assert worth.break_even_tokens == 61


def test_what_would_pay_beyond_any_prompt_never_pays() -> None:
    # A token is restored 1 ns faster than computed: 10 ms are won back after 10 million. Then 1 ps: after 10 billion.
    worth = feed(gate("auto", model_of(999_999)), token_s=1e-3, byte_s=1e-9, fixed_s=1e-2)
    assert worth.break_even_tokens == pytest.approx(10**7, rel=0.01)
    worth = feed(gate("auto", model_of(999_999)), token_s=1e-3 - 1e-9 + 1e-12, byte_s=1e-9, fixed_s=1e-2)
    assert worth.break_even_tokens is None


@given(
    token_s=st.floats(1e-7, 1e-2),
    byte_s=st.floats(1e-11, 1e-7),
    fixed_s=st.floats(1e-5, 1.0),
    bytes_per_token=st.integers(0, 10**6),
    state_bytes=st.integers(0, 10**9),
    windows=st.dictionaries(st.integers(2, 10**5), st.integers(1, 10**6), max_size=2),
    num_tokens=st.integers(1, 10**6),
)
def test_a_yes_means_that_restoring_is_estimated_faster(
    token_s: float,
    byte_s: float,
    fixed_s: float,
    bytes_per_token: int,
    state_bytes: int,
    windows: dict[int, int],
    num_tokens: int,
) -> None:
    loaded_bytes = model_of(bytes_per_token, state_bytes=state_bytes, windows=windows)
    worth = feed(gate("auto", loaded_bytes), token_s=token_s, byte_s=byte_s, fixed_s=fixed_s)
    report = worth.as_dict()
    assert report["prefill_s_per_token"] is not None
    assert report["restore_fixed_s"] is not None
    assert report["restore_s_per_byte"] is not None
    computing_s = report["prefill_s_per_token"] * num_tokens
    restoring_s = report["restore_fixed_s"] + report["restore_s_per_byte"] * loaded_bytes(num_tokens)
    if not math.isclose(computing_s, restoring_s, rel_tol=1e-6):
        assert worth.allows(num_tokens) == (restoring_s < computing_s)


def test_the_speeds_are_found_again_among_noise_and_outliers() -> None:
    worth = feed(gate(), token_s=1e-3, byte_s=2e-9, fixed_s=5e-3, step_s=0.02, noise=0.05, times=6)
    for size in (3 * 10**6, 9 * 10**6, 2 * 10**7):
        worth.record_restore(size, 4.0)
        worth.record_prefill(size // BYTES_PER_TOKEN, 60.0)
    report = worth.as_dict()
    assert report["prefill_s_per_token"] == pytest.approx(1e-3, rel=0.1)
    assert report["restore_s_per_byte"] == pytest.approx(2e-9, rel=0.1)
    assert report["restore_fixed_s"] == pytest.approx(5e-3, rel=0.5)


def test_the_fixed_part_of_a_step_is_not_taken_for_the_price_of_tokens() -> None:
    # On a GPU a short remainder takes as long as a whole step.
    worth = feed(gate(), token_s=1e-5, byte_s=1e-10, fixed_s=1e-3, step_s=0.05)
    assert worth.as_dict()["prefill_s_per_token"] == pytest.approx(1e-5)


def test_restores_of_one_size_do_not_close_the_gate_for_longer_ones() -> None:
    worth = gate()
    for _ in range(8):
        worth.record_prefill(1000, 0.01)
        worth.record_restore(1000 * BYTES_PER_TOKEN, 0.02)
    assert not worth.allows(1000)
    assert worth.break_even_tokens == pytest.approx(2000, abs=1)
    assert worth.allows(2001)


def test_restores_of_one_size_do_not_close_the_gate_for_shorter_ones() -> None:
    # By bytes 2000 tokens are restored in 23 ms. That their restore takes 700 ms too was not seen.
    worth = gate()
    for _ in range(8):
        worth.record_prefill(60_000, 18.0)
        worth.record_restore(60_000 * BYTES_PER_TOKEN, 0.7)
    assert worth.break_even_tokens == 1
    assert all(worth.allows(2000, use) for use in ("restore", "save") for _ in range(20))
    assert worth.as_dict()["reason"] == (
        "computing takes 300 µs a token, restoring 700 ms for 1.3 GiB and more: restoring is faster for every prompt"
    )
    # Once shorter ones are seen to take as long, the gate closes for them.
    for _ in range(8):
        worth.record_restore(2000 * BYTES_PER_TOKEN, 0.7)
    assert not worth.allows(2000)
    assert worth.break_even_tokens == pytest.approx(0.7 / 3e-4, abs=1)


@given(
    size=st.integers(1, 10**9),
    seconds=st.floats(1e-6, 100),
    share=st.floats(0, 1),
    asked=st.integers(0, 10**10),
)
def test_samples_of_one_size_allow_what_any_line_through_them_would(
    size: int, seconds: float, share: float, asked: int
) -> None:
    line = CostLine.through([(size, seconds)] * 5, if_alike="fixed")
    assert line.at(size) == seconds
    assert line.at(asked) <= (share + (1 - share) * asked / size) * seconds * (1 + 1e-9)


def test_the_report_says_what_the_gate_does_where_layers_have_windows() -> None:
    # Beyond 1024 tokens only 5 kB a token are loaded: 5 µs. Up to there 55 µs, which computing in 10 µs beats.
    loaded_bytes = model_of(5000, windows={1024: 50_000})
    worth = feed(gate("auto", loaded_bytes), token_s=1e-5, byte_s=1e-9, fixed_s=1e-3)
    report = worth.as_dict()
    assert report["break_even_tokens"] == pytest.approx((1e-3 + 1023 * 5e-5) / 5e-6, abs=2)
    assert (report["state"], report["reason"]) == (
        "open",
        "computing takes 10 µs a token, restoring 1 ms and 55 µs a token: restoring is "
        f"faster from {report['break_even_tokens']} tokens on",
    )
    assert worth.break_even_tokens is not None
    assert not worth.allows(worth.break_even_tokens - 1)
    assert worth.allows(worth.break_even_tokens)


def test_a_larger_restore_that_took_less_time_does_not_make_bytes_cheaper_than_free() -> None:
    line = CostLine.through([(100, 4.0), (1000, 2.0), (10_000, 1.0)], if_alike="fixed")
    assert line == CostLine(2.0, 0.0, holds_from=100)
    assert CostLine.through([(100, 4.0), (1000, 2.0)], if_alike="per_unit").s_per_unit > 0


def test_samples_of_nearly_the_same_size_do_not_tell_the_parts_apart() -> None:
    # Through the noise of the first three, a byte would seem to take a thousand times as long.
    line = CostLine.through([(1000, 1.0), (1001, 2.0), (1002, 3.0), (4000, 5.0)], if_alike="fixed")
    assert line.s_per_unit == pytest.approx(1e-3, rel=0.02)


def test_a_line_never_starts_below_zero() -> None:
    line = CostLine.through([(1000, 1.0), (4000, 16.0), (2000, 4.0)], if_alike="fixed")
    assert line.fixed_s == 0
    assert line.s_per_unit == pytest.approx(0.002)


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
    assert (report["prefill_samples"], report["restore_samples"]) == (0, 0)


def test_computing_a_few_tokens_says_nothing_about_long_prompts() -> None:
    worth = gate()
    for _ in range(8):
        worth.record_prefill(1, 0.04)
    assert worth.as_dict()["prefill_samples"] == 0


def test_a_closed_gate_lets_every_sixteenth_case_of_each_use_through() -> None:
    worth = slow_disk()
    # Alternating, as requests do: neither use may take the other's turn.
    answers = [(worth.allows(1000), worth.allows(1000, "save")) for _ in range(48)]
    assert [number for number, answer in enumerate(answers, start=1) if answer == (True, True)] == [16, 32, 48]
    assert [answer for answer in answers if answer[0] != answer[1]] == []
    report = worth.as_dict()
    assert (report["skipped_restores"], report["skipped_saves"]) == (45, 45)


def test_the_gate_opens_again_when_the_disk_is_fast_again() -> None:
    worth = slow_disk()
    num_restores = 0
    for number in range(600):
        if worth.allows(1000 + 3000 * (number % 2)):
            num_restores += 1
            num_bytes = (1000 + 3000 * (num_restores % 2)) * BYTES_PER_TOKEN
            worth.record_restore(num_bytes, 1e-3 + 1e-10 * num_bytes)
    report = worth.as_dict()
    assert report["state"] == "open"
    assert report["restore_s_per_byte"] == pytest.approx(1e-10)
    assert worth.allows(1000)


def test_a_part_of_a_block_pays_where_loading_the_whole_block_is_faster_than_computing_the_part() -> None:
    block_bytes = 256 * BYTES_PER_TOKEN
    worth = gate()
    assert worth.pays(1, block_bytes)
    feed(worth, token_s=1e-3, byte_s=1e-9, fixed_s=0.01)
    few = math.floor(block_bytes * 1e-9 / 1e-3)
    assert (few, worth.pays(few, block_bytes), worth.pays(few + 1, block_bytes)) == (5, False, True)
    assert feed(gate("off"), token_s=1e-3, byte_s=1e-9, fixed_s=0.01).pays(1, block_bytes)


def test_old_measurements_are_forgotten() -> None:
    worth = slow_disk()
    feed(worth, token_s=1e-2, byte_s=1e-10, fixed_s=1e-3, times=8)
    assert worth.as_dict()["prefill_s_per_token"] == pytest.approx(1e-2)
    assert worth.as_dict()["prefill_samples"] == 32


def test_off_allows_everything_and_still_says_what_was_measured() -> None:
    worth = slow_disk("off")
    assert all(worth.allows(1) for _ in range(100))
    report = worth.as_dict()
    assert (report["mode"], report["state"], report["skipped_restores"]) == ("off", "open", 0)
    assert report["prefill_s_per_token"] == pytest.approx(1e-5)
    assert "--kv-cache-gate off" in report["reason"]


@pytest.mark.parametrize(
    ("token_s", "computing", "state", "break_even", "faster"),
    [
        (1e-3, "1 ms", "open", 11, "restoring is faster from 11 tokens on"),
        (1e-5, "10 µs", "closed", None, "computing is faster for every prompt"),
        (1.0, "1 s", "open", 1, "restoring is faster for every prompt"),
    ],
)
def test_the_reason_names_the_numbers(
    token_s: float, computing: str, state: str, break_even: int | None, faster: str
) -> None:
    worth = feed(gate(), token_s=token_s, byte_s=1e-9, fixed_s=1e-2)
    report = worth.as_dict()
    assert (report["state"], report["break_even_tokens"]) == (state, break_even)
    assert report["reason"] == f"computing takes {computing} a token, restoring 10 ms and 23 µs a token: {faster}"
    assert worth.allows(10**6) == (state == "open")


def test_while_measuring_the_reason_says_how_much_is_missing() -> None:
    worth = gate()
    worth.record_prefill(1000, 1.0)
    report = worth.as_dict()
    assert report["reason"] == (
        "1 of 4 prefills and 0 of 4 restores are measured: until then everything is saved and restored"
    )
    for _ in range(9):
        worth.record_prefill(1000, 1.0)
    assert worth.as_dict()["reason"].startswith("4 of 4 prefills and 0 of 4 restores")


def test_a_gate_that_closes_or_opens_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="diskprefix"):
        worth = slow_disk()
        for _ in range(40):
            worth.allows(1000)
        feed(worth, token_s=1e-2, byte_s=1e-10, fixed_s=1e-3, times=8)
        for _ in range(40):
            worth.allows(1000)
    assert [record.getMessage().partition(":")[0] for record in caplog.records] == [
        "[disk-cache] gate=closed",
        "[disk-cache] gate=open",
    ]


def test_prompts_of_different_lengths_log_nothing(caplog: pytest.LogCaptureFixture) -> None:
    worth = feed(gate("auto", model_of(5000, windows={1024: 50_000})), token_s=1e-5, byte_s=1e-9, fixed_s=1e-3)
    caplog.clear()
    with caplog.at_level(logging.INFO):
        answers = [worth.allows(num_tokens) for num_tokens in (100, 20_000) * 5]
        feed(worth, token_s=1e-5, byte_s=1e-9, fixed_s=1e-3)
    assert answers == [False, True] * 5
    assert caplog.records == []


def test_off_logs_nothing(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        slow_disk("off")
    assert caplog.records == []


def test_what_was_just_enough_is_known_after_a_kill() -> None:
    before = gate(key=KEY)
    for number in range(1, ENOUGH + 1):
        assert not gate(key=KEY).is_known
        before.record_prefill(1000 * number, 1e-5 * number)
        before.record_restore(10**6 * number, 1.0 * number)
        before.remember_due()
    after = gate(key=KEY)
    assert after.is_known
    assert not after.allows(1000)


def test_another_model_device_or_store_is_measured_anew() -> None:
    slow_disk(key=KEY).remember()
    assert not gate(key=KEY + "2").is_known
    assert not gate().is_known


def test_a_device_measures_for_itself_what_several_share(tmp_path: Path) -> None:
    # As under `--fingerprint portable`: another device, the same root and store.
    runner = Runner(tiny_llama(), tiny_settings(tmp_path / "kv", kv_cache_gate="auto"))
    feed(runner.cache.cost_model, token_s=1e-3, byte_s=1e-9, fixed_s=1e-2)
    known = []
    for device in ("cuda some GPU", "cpu"):
        runner.close()
        runner.device = device
        runner.open()
        known.append(runner.cache.cost_model.is_known)
    runner.close()
    assert known == [False, True]


def test_the_cache_asks_and_reports_for_what_its_model_loads(tmp_path: Path) -> None:
    runner = Runner(tiny_llama(), tiny_settings(tmp_path / "kv", kv_cache_gate="auto"))
    feed(runner.cache.cost_model, token_s=1e-3, byte_s=1e-6, fixed_s=1.0)
    gain_s = 1e-3 - 1e-6 * runner.layout.bytes_per_token
    break_even = runner.cache.stats()["gate"]["break_even_tokens"]
    assert break_even == pytest.approx(1.0 / gain_s, abs=1)
    assert not runner.cache.cost_model.allows(break_even - 1, use="save")
    assert runner.cache.cost_model.allows(break_even, use="save")
    runner.close()


@pytest.mark.parametrize(("mode", "key"), [("off", KEY), ("auto", "")])
def test_off_and_an_empty_key_remember_nothing(mode: str, key: str) -> None:
    slow_disk(mode, key).remember()
    assert not cache_home().exists()
    slow_disk(key=KEY).remember()
    assert not gate(mode, key=key).is_known


def test_a_daemon_that_measured_nothing_writes_nothing() -> None:
    slow_disk(key=KEY).remember()
    file = cache_home() / "worth.json"
    file.unlink()
    gate(key=KEY).remember()
    assert not file.exists()


def test_measurements_are_written_down_in_between_too() -> None:
    worth = gate(key=KEY)
    for _ in range(64):
        worth.remember_due()
        worth.record_restore(1000, 1e-3)
    worth.remember_due()
    assert gate(key=KEY).as_dict()["restore_samples"] == 32


def test_the_thread_that_measures_writes_nothing_and_the_stores_writer_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = Runner(tiny_llama(), tiny_settings(tmp_path / "kv", kv_cache_gate="auto"))
    threads: set[str] = set()
    put = Memo.put

    def seen(self: Memo, key: str, value: object) -> None:
        threads.add(threading.current_thread().name)
        put(self, key, value)

    monkeypatch.setattr(Memo, "put", seen)
    feed(runner.cache.cost_model, token_s=1e-3, byte_s=1e-9, fixed_s=1e-2, times=20)
    runner.wait_for(lambda: bool(threads))
    assert threads == {"kv-writer"}
    runner.close()


@pytest.mark.parametrize(
    "record",
    [
        None,
        [],
        "text",
        {"prefills": 3, "restores": {"a": 1}},
        {"prefills": [[1000, -1.0]] * 8, "restores": [[1000, "fast"], [1000], None, 5, [0, 1.0], [1000.5, 1.0]]},
        {"prefills": [[1000, math.inf]] * 8, "restores": [[1000, math.nan]] * 8},
        {"prefills": [[10**400, 1.0]] * 8, "restores": [[1000, 1e308], [10**400, 1e-308]] * 8},
    ],
)
def test_a_damaged_memory_is_no_measurement(record: object) -> None:
    cache_home().mkdir(parents=True)
    memory = {"format": 1, "records": {KEY: record}}
    (cache_home() / "worth.json").write_text(json.dumps(memory), encoding="utf-8")
    worth = gate(key=KEY)
    report = worth.as_dict()
    assert (report["prefill_samples"], report["restore_samples"], report["state"]) == (0, 0, "measuring")


def test_a_folder_that_cannot_be_written_to_does_no_harm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    slow_disk(key=KEY).remember()
    assert not gate(key=KEY).is_known


def test_the_report_can_be_read_while_measurements_come_in() -> None:
    worth = gate()
    failures: list[Exception] = []
    stopped = threading.Event()

    def read() -> None:
        while not stopped.is_set():
            try:
                worth.as_dict()
            except Exception as error:  # noqa: BLE001  # whatever it is
                failures.append(error)

    reader = threading.Thread(target=read)
    reader.start()
    feed(worth, token_s=1e-3, byte_s=1e-9, fixed_s=1e-2, times=50)
    stopped.set()
    reader.join()
    assert failures == []


def test_what_a_token_takes_is_told_from_one_long_prefill_until_more_are_measured() -> None:
    model = CostModel("auto", lambda tokens: 100 * tokens)
    told = [model.measured_s_per_token]
    # The first one is short: it tells what a step takes.
    for size, seconds in ((20, 1.0), (1000, 2.0)):
        model.record_prefill(size, seconds)
        told.append(model.measured_s_per_token)
    assert told == [None, None, 0.002]
    for size in (500, 1500, 2000):
        model.record_prefill(size, size / 1000)
    assert model.measured_s_per_token == model.prefill_s_per_token
