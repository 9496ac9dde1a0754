"""The published workloads, from data made up in their forms."""

from __future__ import annotations

import json
import lzma
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from diskprefix.extras.simulate.trace import Trace
from diskprefix.extras.simulate.trace_formats import read_trace
from diskprefix.tokens import common_prefix_length
from tests.server.chat_model import write_tokenizer
from tools.programs import workloads

TOOL = {"type": "function", "function": {"name": "find", "description": "Finds.", "parameters": {"type": "object"}}}


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return tmp_path / "data"


@pytest.fixture
def tokenizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A small one instead of the embedded model's, and a cache folder of the test's own."""
    from transformers import AutoTokenizer

    write_tokenizer(tmp_path / "tokenizer", chat_template=workloads.TEMPLATE)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "tokenizer")
    monkeypatch.setattr(workloads, "_tokenizer", lambda: tokenizer)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tokenizer


def write(path: Path, content: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content, encoding="utf-8")


def written(data: Path, name: str) -> str:
    answer = CliRunner().invoke(workloads.main, ["write", name, "--data", str(data)])
    assert answer.exit_code == 0, answer.output
    return answer.stdout


def shared(trace: Trace) -> list[list[int]]:
    """For each prompt, how many tokens it shares with each one before it."""
    prompts = [request.prompt.token_ids for request in trace]
    return [[common_prefix_length(prompt, other) for other in prompts[:i]] for i, prompt in enumerate(prompts)]


def test_mooncake(data: Path) -> None:
    lines = [{"timestamp": 10 * i, "input_length": 600, "output_length": 1, "hash_ids": [5, 6 + i]} for i in range(2)]
    write(data / "mooncake" / "synthetic_trace.jsonl", "".join(f"{json.dumps(line)}\n" for line in lines))
    trace = workloads.open_workload("mooncake", data)
    assert (trace.name, len(trace), shared(trace)) == ("mooncake", 2, [[], [512]])
    assert [json.loads(line)["block_size"] for line in written(data, "mooncake").splitlines()] == [512, 512]


def weka_request(t: float, *hash_ids: int) -> dict[str, Any]:
    return {"t": t, "type": "n", "in": 64 * len(hash_ids) + 5, "out": 9, "hash_ids": list(hash_ids)}


def weka_session(*requests: dict[str, Any]) -> dict[str, Any]:
    return {"id": "s", "block_size": 64, "tool_tokens": 100, "system_tokens": 28, "requests": list(requests)}


@pytest.fixture
def weka(data: Path) -> Path:
    helper = weka_session(weka_request(0.0, 7, 8, 9)) | {"t": 4.0, "type": "subagent"}
    sessions = [
        weka_session(weka_request(0.0, 1, 2, 3), helper, weka_request(30.0, 1, 2, 3, 4), weka_request(40.0, 5, 6)),
        weka_session(weka_request(1.0, 1, 2, 3)),
    ]
    (data / "weka-claude-code").mkdir(parents=True)
    with lzma.open(data / "weka-claude-code" / "traces_A.jsonl.xz", "wt", encoding="utf-8") as file:
        file.writelines(f"{json.dumps(session)}\n" for session in sessions)
    return data


def test_weka_sessions_go_on_side_by_side_and_share_no_blocks(weka: Path) -> None:
    trace = workloads.open_workload("weka-claude-code", weka)
    assert [request.when for request in trace] == [0.0, 1.0, 4.0, 30.0, 40.0]
    assert [len(request.prompt.token_ids) for request in trace] == [192, 192, 192, 256, 128]
    assert shared(trace) == [[], [0], [0, 0], [192, 0, 0], [0, 0, 0, 0]]


def test_weka_prompts_end_their_system_part_where_they_have_that_of_their_agent(weka: Path) -> None:
    trace = workloads.open_workload("weka-claude-code", weka)
    assert [request.prompt.system_end for request in trace] == [128, 128, 128, 128, 0]


def test_weka_sessions_of_one_lane_follow_each_other(weka: Path) -> None:
    assert [request.when for request in workloads.weka(weka, lanes=1)] == [0.0, 4.0, 30.0, 40.0, 101.0]


def test_what_is_written_of_a_trace_is_read_as_the_same_trace(weka: Path, tmp_path: Path) -> None:
    write(tmp_path / "weka.jsonl", written(weka, "weka-claude-code"))
    trace, again = workloads.open_workload("weka-claude-code", weka), read_trace(tmp_path / "weka.jsonl")
    assert [(r.when, r.output_tokens) for r in trace] == [(r.when, r.output_tokens) for r in again]
    assert shared(trace) == shared(again)


def message(role: str, content: str | None, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


@pytest.fixture
def tau_bench(data: Path) -> Path:
    call = {"id": "1", "type": "function", "function": {"name": "find", "arguments": '{"id": 7}'}}
    conversations = []
    for number in range(5):
        turns = [message("system", "Rules."), message("user", f"I am {number}."), message("assistant", "Hello.")]
        turns += [message("user", "Find it."), message("assistant", None, tool_calls=[call])]
        turns += [message("tool", "found", tool_call_id="1", name="find"), message("assistant", "There.")]
        conversations.append({"traj": turns[: 3 if number == 1 else None]})
    write(data / "tau-bench" / "tools_airline.json", json.dumps([TOOL]))
    write(data / "tau-bench" / "gpt-4o-airline.share.json", json.dumps(conversations))
    return data


def test_tau_bench_asks_for_each_reply_and_four_conversations_take_turns(tau_bench: Path) -> None:
    turns = list(workloads.tau_bench(tau_bench))
    first_words = [(turn.body["messages"][1]["content"], len(turn.body["messages"])) for turn in turns]
    expected = [("0", 2), ("1", 2), ("2", 2), ("3", 2), ("0", 4), ("2", 4), ("3", 4), ("0", 6), ("2", 6), ("3", 6)]
    assert first_words == [(f"I am {n}.", count) for n, count in [*expected, ("4", 2), ("4", 4), ("4", 6)]]
    assert turns[0].reply == "Hello."
    assert '"find"' in turns[4].reply


def test_rendered_conversations_continue_their_earlier_prompts_token_by_token(tau_bench: Path, tokenizer: Any) -> None:
    trace = workloads.open_workload("tau-bench", tau_bench)
    prompts = [request.prompt for request in trace]
    for earlier, later in ((0, 4), (4, 7), (2, 5), (5, 8)):
        common = common_prefix_length(prompts[earlier].token_ids, prompts[later].token_ids)
        assert common == len(prompts[earlier].token_ids)
    text = tokenizer.decode(prompts[7].token_ids)
    assert text.startswith("<|im_start|>system\nRules.\n\n")
    assert '<tools>\n{"type": "function", "function": {"name": "find"' in text
    assert (
        '<|im_start|>assistant\n<tool_call>\n{"name": "find", "arguments": {"id": 7}}\n</tool_call><|im_end|>' in text
    )
    assert text.endswith("<|im_start|>tool\nfound<|im_end|>\n<|im_start|>assistant\n")
    assert tokenizer.decode(prompts[0].token_ids[: prompts[0].system_end]).endswith("</tools><|im_end|>\n<|im_start|>")
    assert [request.when for request in trace.head(3)] == [0.0, 5.0, 10.0]


def test_what_was_rendered_once_is_kept(tau_bench: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert tokenizer
    before = workloads.open_workload("tau-bench", tau_bench)
    monkeypatch.setattr(workloads, "renderer", None)
    after = workloads.open_workload("tau-bench", tau_bench)
    for a, b in zip(before, after, strict=True):
        assert a.prompt.token_ids.tolist() == b.prompt.token_ids.tolist()
        assert (a.prompt.boundaries, a.prompt.system_end) == (b.prompt.boundaries, b.prompt.system_end)
        assert a.output_tokens == b.output_tokens > 0


def test_the_bodies_that_are_written_make_the_same_prompts(tau_bench: Path, tokenizer: Any, tmp_path: Path) -> None:
    assert tokenizer
    write(tmp_path / "t.jsonl", written(tau_bench, "tau-bench"))
    again = read_trace(tmp_path / "t.jsonl", workloads.renderer())
    for a, b in zip(workloads.open_workload("tau-bench", tau_bench), again, strict=True):
        assert (a.when, a.prompt.token_ids.tolist()) == (b.when, b.prompt.token_ids.tolist())


def test_openhands_prompts_are_parted_into_messages(data: Path) -> None:
    rule = "\n\n----------\n\n"
    log = rule.join(["", "Rules.", "An example.", "A task.", "<run>", "OBSERVATION:\nran\n\nREMINDER"])
    folder = data / "openhands-mock" / "v" / "Agent" / "test_a"
    write(folder / "prompt_002.log", log)
    write(folder / "prompt_001.log", rule + "All in one.")
    write(folder / "response_002.log", "done\n")
    first, second = workloads.openhands(data)
    assert first.body["messages"] == [message("user", "All in one.")]
    assert [m["role"] for m in second.body["messages"]] == ["system", "user", "user", "assistant", "user"]
    assert second.body["messages"][3]["content"] == "<run>"
    assert (first.reply, second.reply) == ("", "done")


@pytest.fixture
def bfcl(data: Path) -> Path:
    entry = {
        "id": "1",
        "question": [[message("user", "Sort it.")], [], [message("user", "And now?")]],
        "involved_classes": ["MathAPI"],
        "missed_function": {"1": ["mean"]},
        "excluded_function": ["sum"],
    }
    functions = [{"name": name, "parameters": {"type": "dict"}} for name in ("mean", "sum", "sqrt")]
    write(data / "bfcl" / "BFCL_v4_multi_turn_miss_func.json", json.dumps(entry))
    write(data / "bfcl" / "multi_turn_func_doc" / "math_api.json", "\n".join(map(json.dumps, functions)))
    return data


def test_bfcl_offers_functions_that_were_missing_from_their_turn_on(bfcl: Path) -> None:
    turns = [turn.body for turn in workloads.bfcl(bfcl)]
    assert [[tool["function"]["name"] for tool in body["tools"]] for body in turns] == [
        ["sqrt"],
        ["sqrt", "mean"],
        ["sqrt", "mean"],
    ]
    assert [len(body["messages"]) for body in turns] == [1, 3, 5]
    assert turns[1]["messages"][2]["content"] == workloads.BFCL_MORE


@pytest.fixture
def big_bench_hard(data: Path) -> Path:
    for task in ("snarks", "navigate"):
        examples = {"examples": [{"input": f"{task} {i}?", "target": "A"} for i in range(9)]}
        write(data / "big-bench-hard" / "bbh" / f"{task}.json", json.dumps(examples))
        write(
            data / "big-bench-hard" / "cot-prompts" / f"{task}.txt", f"canary\n-----\nThe task {task}.\n\nQ: a\nA: b\n"
        )
    return data


def test_big_bench_hard_puts_the_worked_examples_before_each_question(big_bench_hard: Path) -> None:
    shuffled = [turn.body["prompt"] for turn in workloads.big_bench_hard(big_bench_hard)]
    assert len(shuffled) == 18
    assert shuffled != sorted(shuffled)
    assert min(shuffled) == "The task navigate.\n\nQ: a\nA: b\n\nQ: navigate 0?\nA: Let's think step by step."
    assert shuffled == [turn.body["prompt"] for turn in workloads.big_bench_hard(big_bench_hard)]


def test_the_template_can_be_printed_for_a_daemon() -> None:
    assert CliRunner().invoke(workloads.main, ["template"]).stdout == workloads.TEMPLATE


def test_every_workload_has_a_way_to_be_opened_and_written() -> None:
    assert set(workloads.NAMES) == set(workloads.TRACES) | set(workloads.CONVERSATIONS)
    assert workloads.BLOCK_TOKENS.keys() == workloads.TRACES.keys()


def test_data_that_are_not_there_are_named(data: Path) -> None:
    data.mkdir()
    answer = CliRunner().invoke(workloads.main, ["write", "tau-bench", "--data", str(data)])
    assert answer.exit_code == 1
    assert str(data / "tau-bench" / "tools_airline.json") in answer.stderr
    assert len(answer.stderr.splitlines()) == 1
