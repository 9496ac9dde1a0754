"""Traces are read from files of each format, and wrong files are refused with the reason."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diskprefix.daemon.settings import Settings
from diskprefix.errors import SettingsError
from diskprefix.prefixstore.recording.recording import RequestRecorder
from diskprefix.prefixstore.simulate.geometry import Geometry
from diskprefix.prefixstore.simulate.trace import RecordedDaemon, Trace, TraceRequest
from diskprefix.prefixstore.simulate.trace_formats import JsonObject, read_trace
from diskprefix.tokens import as_token_ids, common_prefix_length
from diskprefix.values import CacheOptions, CacheReport, Mark, Prompt, Scope, Selection

BLOCK = 16
ROOT, OTHER_ROOT = b"r" * 16, b"o" * 16
DEFAULT = CacheOptions(scope=Scope("auto", 30))
CHOSEN = Selection(scope=DEFAULT.scope, prompt_tokens=50, reason="no_match")
MOONCAKE: JsonObject = {"timestamp": 0, "input_length": 700, "output_length": 3, "hash_ids": [0, 1]}
RECORDED: JsonObject = {
    "version": 1,
    "when": 5.0,
    "root": "00",
    "scope": "full",
    "block_size": 4,
    "min_tokens": 4,
    "prompt_tokens": 6,
    "cuts": [4, 6],
    "hashes": ["aa", "bb"],
}


def write(path: Path, *lines: JsonObject | str) -> Path:
    path.write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines))
    return path


def test_a_mooncake_trace_has_its_blocks_times_and_lengths(tmp_path: Path) -> None:
    second = MOONCAKE | {"timestamp": 1500, "input_length": 1024, "hash_ids": [0, 2**64]}
    trace = read_trace(write(tmp_path / "day.jsonl", second, "", MOONCAKE))
    first, other = trace
    assert (trace.name, len(trace), trace.daemon) == ("day", 2, None)
    assert (first.when, other.when) == (0.0, 1.5)
    assert (len(first.prompt.token_ids), len(other.prompt.token_ids)) == (700, 1024)
    assert common_prefix_length(first.prompt.token_ids, other.prompt.token_ids) == 512
    assert (first.prompt.boundaries, first.scope, first.save) == ((), None, True)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"hash_ids": [0]}, "hash_ids: 1 blocks of 512 tokens are not the 700 of input_length"),
        ({"hash_ids": [0, 1, 2]}, "hash_ids: 3 blocks"),
        ({"hash_ids": [0, -1]}, "`int` >= 0 - at `$.hash_ids[1]`"),
        ({"input_length": 0}, "`int` >= 1 - at `$.input_length`"),
        ({"input_length": 10**12}, "`int` <= 16777216 - at `$.input_length`"),
        ({"timestamp": -1}, "`float` >= 0.0 - at `$.timestamp`"),
        ({"block_size": 256}, "block_size: 256 is not the 512 of the lines before"),
        ({"block_size": 0}, "block_size"),
    ],
)
def test_a_bad_mooncake_line_is_reported_with_its_place(tmp_path: Path, change: JsonObject, reason: str) -> None:
    assert reason in refusal(tmp_path, MOONCAKE, MOONCAKE | change)


def refusal(folder: Path, *lines: JsonObject) -> str:
    path = write(folder / "t.jsonl", "", *lines)
    with pytest.raises(SettingsError) as raised:
        read_trace(path)
    assert raised.value.message.startswith(f"{path}:{1 + len(lines)}: ")
    return raised.value.message


@pytest.mark.parametrize("line", [MOONCAKE, RECORDED], ids=["mooncake", "recording"])
@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('{"a": ' * 5000 + "1" + "}" * 5000, "it is nested too deeply"),
        ("[1]", "Expected `object`, got `array`"),
    ],
)
def test_a_line_of_another_kind_is_named(tmp_path: Path, line: JsonObject, text: str, reason: str) -> None:
    path = write(tmp_path / "t.jsonl", line, text)
    with pytest.raises(SettingsError) as raised:
        read_trace(path)
    assert raised.value.message == f"{path}:2: {reason}"


def test_a_line_that_is_no_text_is_left_out_with_a_warning(tmp_path: Path) -> None:
    path, warnings = write(tmp_path / "t.jsonl", RECORDED, RECORDED | {"root": "zz"}), list[str]()
    path.write_bytes(path.read_bytes().replace(b'"zz"', b'"\xe4"'))
    assert len(read_trace(path, warn=warnings.append)) == 1
    assert warnings == [f"{path}:2: the line is no JSON, and is left out"]


@pytest.mark.parametrize("line", [MOONCAKE, RECORDED], ids=["mooncake", "recording"])
def test_a_line_that_is_no_json_is_left_out_with_a_warning(tmp_path: Path, line: JsonObject) -> None:
    warnings = list[str]()
    for broken in (json.dumps(line)[:9], '{"a": }'):
        path = write(tmp_path / "t.jsonl", line, broken, line)
        path.write_bytes(path.read_bytes()[:-1])
        assert len(read_trace(path, warn=warnings.append)) == 2, "the end of a line may be missing"
    assert warnings == [f"{path}:2: the line is no JSON, and is left out"] * 2


@pytest.mark.parametrize(
    "text", ["", "\n\n", "no json\n", "[1]\n", '{"prompt": "a"}\n', '{"a": 1}\n', '{"hash_ids": [', "\xff\n"]
)
def test_a_file_of_another_kind_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(text, encoding="latin-1")
    with pytest.raises(SettingsError, match=r"t\.jsonl"):
        read_trace(path)


def open_recorder(path: Path, block_size: int = BLOCK, min_tokens: int = BLOCK) -> RequestRecorder:
    scope = str(DEFAULT.scope)
    settings = Settings(block_size=block_size, kv_cache_min_tokens=min_tokens, disk_prefix_cache=scope)
    return RequestRecorder(path, settings, lambda: 7)


def record(path: Path, *prompts: Prompt, options: CacheOptions = DEFAULT, root: bytes = ROOT, **more: Any) -> Path:
    recorder = open_recorder(path)
    report = more.pop("report", CacheReport(selection=CHOSEN))
    details: dict[str, Any] = {"when": 100.0, "prefill_ms": 1.0, "remembered": True}
    details |= {"reply": as_token_ids([])} | more
    for prompt in prompts:
        recorder.record_request(prompt, options, report, root=root, **details)
    recorder.close()
    return path


def test_a_recording_is_replayed_with_all_that_was_asked(tmp_path: Path) -> None:
    prompt = Prompt(as_token_ids(range(50)), (3, 20, 48), 20, marks=(Mark(33, 300.0),))
    options = CacheOptions(scope=Scope("tokens", 40), group=b"grouped!", save=False, ttl_s=60.0)
    path = record(tmp_path / "r.jsonl", Prompt(as_token_ids([1])))
    record(path, prompt, options=options, when=107.5, remembered=False)
    plain, request = read_trace(path)
    assert (request.when, plain.when) == (7.5, 0.0)
    assert len(request.prompt.token_ids) == 50
    assert request.prompt.token_ids.dtype == np.int32
    assert (request.prompt.boundaries, request.prompt.system_end) == ((3, 20, 48), 20)
    assert request.prompt.marks == (Mark(33, 300.0),)
    assert (request.scope, plain.scope) == (Scope("tokens", 40), None)
    assert (len(request.group), request.save, request.ttl_s, request.remembered) == (8, False, 60.0, False)
    assert (plain.group, plain.save, plain.ttl_s, plain.remembered) == (b"", True, None, True)
    assert (request.tenant, request.is_trusted) == (plain.tenant, True)


def test_the_markers_of_a_recording_are_alike_and_its_texts_are_not(tmp_path: Path) -> None:
    prompts = [Prompt(as_token_ids([1, 7, 7, 2, *text, 2]), (1, 4, 4 + len(text) + 1)) for text in ([5, 6], [8, 9, 9])]
    prompts += [Prompt(as_token_ids([1, 3]), (1, 2)), Prompt(as_token_ids([1, 4, 4]), (1, 2))]
    replayed = [request.prompt.token_ids for request in read_trace(record(tmp_path / "r.jsonl", *prompts))]
    marked = [[ids[position - 1] for position in p.boundaries] for ids, p in zip(replayed, prompts, strict=True)]
    assert marked[:2] == [[-1, -1, -1]] * 2
    assert sorted([marked[2][1], marked[3][1]]) == [-2, -1], "they part there"
    for ids, prompt in zip(replayed[:2], prompts, strict=False):
        assert sum(ids < 0) == len(prompt.boundaries)


def test_a_recording_says_what_its_daemon_was_like(tmp_path: Path) -> None:
    prompt = Prompt(as_token_ids(range(100)))
    path = record(tmp_path / "r.jsonl", prompt, prefill_ms=500.0)
    assert read_trace(path).daemon == RecordedDaemon(block_size=BLOCK, min_tokens=BLOCK, tokens_per_s=200.0)
    recorder = open_recorder(path, block_size=32, min_tokens=64)
    recorder.describe(bytes_per_token=640, state_bytes=0, logits_bytes=800, exact_at="token")
    for report, prefill_ms in (
        (CacheReport(selection=CHOSEN, restored=60), 300.0),
        (CacheReport(selection=CHOSEN), 0.0),
    ):
        recorder.record_request(
            prompt,
            DEFAULT,
            report,
            root=ROOT,
            when=200.0,
            reply=as_token_ids([]),
            prefill_ms=prefill_ms,
            remembered=True,
        )
    recorder.close()
    trace = read_trace(path)
    geometry = Geometry(bytes_per_token=640, logits_bytes=800, exact_at="token")
    # 100 tokens in 0.5 s, 40 in 0.3 s, and a request that was not computed.
    assert trace.daemon == RecordedDaemon(block_size=32, min_tokens=64, geometry=geometry, tokens_per_s=175.0)


def test_recorded_requests_are_replayed_in_the_order_in_which_they_came(tmp_path: Path) -> None:
    path = record(tmp_path / "r.jsonl", Prompt(as_token_ids([1, 2])), when=20.0)
    record(path, Prompt(as_token_ids([1])), when=10.0)
    assert [(r.when, len(r.prompt.token_ids)) for r in read_trace(path)] == [(0.0, 1), (10.0, 2)]


@settings(max_examples=60)
@given(
    lengths=st.lists(st.integers(1, 90), min_size=1, max_size=6),
    forks=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 90), st.integers(1, 60)), max_size=6),
    boundaries=st.sets(st.integers(1, 150), max_size=5),
)
def test_recorded_prompts_share_the_tokens_that_the_real_ones_did(
    tmp_path_factory: pytest.TempPathFactory,
    lengths: list[int],
    forks: list[tuple[int, int, int]],
    boundaries: set[int],
) -> None:
    """Some prompts are made anew, others leave an earlier one somewhere; each keeps the boundaries that fit in it."""
    random = np.random.default_rng(len(lengths))
    ids = [random.integers(0, 3, length).astype(np.int32) for length in lengths]
    for index, at, more in forks:
        earlier = ids[index % len(ids)]
        # Some tokens are those of pictures.
        ids.append(np.concatenate([earlier[:at], random.integers(-2, 3, more).astype(np.int32)]))
    prompts = [Prompt(token_ids, tuple(sorted(b for b in boundaries if b <= len(token_ids)))) for token_ids in ids]
    path = record(tmp_path_factory.mktemp("recording") / "r.jsonl", *prompts)
    replayed = [request.prompt for request in read_trace(path)]
    for mine, was in zip(replayed, prompts, strict=True):
        assert (len(mine.token_ids), mine.boundaries) == (len(was.token_ids), was.boundaries)
        for other, other_was in zip(replayed, prompts, strict=True):
            common = common_prefix_length(was.token_ids, other_was.token_ids)
            assert common_prefix_length(mine.token_ids, other.token_ids) == common


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"version": 99}, "version 99"),
        ({"cuts": [4]}, "cuts"),
        ({"cuts": [], "hashes": [], "prompt_tokens": 0}, "cuts"),
        ({"cuts": [6, 4]}, "cuts"),
        ({"hashes": ["aa"]}, "cuts"),
        ({"hashes": ["cc", "aa"]}, "hashes: 'aa' stands at 6 here and at 4 elsewhere"),
        ({"hashes": ["aa", ""]}, "hashes"),
        ({"scope": "most"}, "scope"),
        ({"group": "xyz"}, "group"),
        ({"when": 1e300}, "at `$.when`"),
        ({"exact_at": "end"}, "Invalid enum value 'end' - at `$.exact_at`"),
        ({"cuts": [4, 10**12], "prompt_tokens": 10**12}, "`int` <= 16777216 - at `$.prompt_tokens`"),
        ({"boundaries": [7]}, "boundaries: must ascend and lie within the prompt"),
        ({"marks": [["x", 1.0]]}, "Expected `int`, got `str` - at `$.marks[0][0]`"),
        ({"marks": [[7, None]]}, "marks: must"),
        ({"marks": [[3, -5.0]]}, "at `$.marks"),
        ({"cuts": [6, 6]}, "cuts"),
        ({"cuts": [0, 6]}, "cuts"),
        ({"prompt_tokens": 7}, "cuts"),
        ({"parted_at": 5}, "parted_at"),
        ({"boundaries": [5, 4]}, "boundaries"),
        ({"boundaries": [-1]}, "boundaries"),
        ({"system_end": 7}, "system_end"),
        ({"root": 1}, "at `$.root`"),
        ({"when": -1.0}, "at `$.when`"),
        ({"block_size": 0}, "at `$.block_size`"),
        ({"min_tokens": -1}, "at `$.min_tokens`"),
        ({"ttl_s": -1.0}, "at `$.ttl_s`"),
        ({"reply_tokens": -1}, "at `$.reply_tokens`"),
        ({"bytes_per_token": 2**31}, "at `$.bytes_per_token`"),
        ({"state_bytes": 2**41}, "at `$.state_bytes`"),
    ],
)
def test_a_bad_recorded_line_is_reported_with_its_place(tmp_path: Path, change: JsonObject, reason: str) -> None:
    message = refusal(tmp_path, RECORDED, RECORDED | change)
    assert reason in message
    assert "\n" not in message


def request(when: float, *token_ids: int) -> TraceRequest:
    return TraceRequest(when=when, prompt=Prompt(as_token_ids(token_ids)))


def tokens(trace: Trace) -> list[list[int]]:
    return [request.prompt.token_ids.tolist() for request in trace]


def test_a_trace_can_be_iterated_again_and_several_times_at_once() -> None:
    trace = Trace.of("t", [request(0, 1), request(1, 2, 3)])
    assert tokens(trace) == tokens(trace) == [[1], [2, 3]]
    assert [(a.when, b.when) for a, b in zip(trace, trace, strict=True)] == [(0, 0), (1, 1)]
