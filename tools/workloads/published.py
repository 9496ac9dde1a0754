"""Published workloads as traces. Each one's data, as its authors publish them, lie in a folder of its name."""

from __future__ import annotations

import json
import lzma
import random
import re
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from diskprefix.prefixstore.simulate.trace import Trace, TraceRequest
from diskprefix.prefixstore.simulate.trace_formats import read_trace
from diskprefix.values import Prompt
from tools.workloads.conversation import LANES, Message, Turn, in_turns, trace_of_turns

Json: TypeAlias = dict[str, Any]

_SESSION_PAUSE_S = 60.0
_WEKA_BLOCK_TOKENS = 64
_SEED = 0
_MAX_BIG_BENCH = 3000
_ROLES = "system", "user", "assistant", "tool"
_BFCL_CLASSES = {
    "GorillaFileSystem": "gorilla_file_system.json",
    "MathAPI": "math_api.json",
    "MessageAPI": "message_api.json",
    "TicketAPI": "ticket_api.json",
    "TradingBot": "trading_bot.json",
    "TravelAPI": "travel_booking.json",
    "TwitterAPI": "posting_api.json",
    "VehicleControlAPI": "vehicle_control.json",
}
_BFCL_MORE = "I have added functions that you can choose from. What about now?"


def _mooncake(data: Path) -> Trace:
    """Blocks of 512 tokens; an id stands for a block and all before it."""
    return read_trace(data / "mooncake" / "synthetic_trace.jsonl", name="mooncake")


def _weka(data: Path) -> Trace:
    """Sessions of a coding agent and its subagents: blocks of 64 tokens, whose ids are those of one session.

    When a session began is not known: `LANES` of them go on at the same time, each followed by the next one of its lane
    after a pause. Prompts are cut down to whole blocks, as nothing is known of the rest.
    """
    with lzma.open(data / "weka-claude-code" / "traces_A.jsonl.xz", "rt", encoding="utf-8") as file:
        sessions = [json.loads(line) for line in file]
    starts = [0.0] * LANES
    requests: list[tuple[float, list[int], int, int]] = []
    for number, session in enumerate(sessions):
        lane = number % LANES
        own = [(*row, number) for row in _session(session, starts[lane])]
        starts[lane] = max((row[0] for row in own), default=starts[lane]) + _SESSION_PAUSE_S
        requests += own
    requests.sort(key=lambda row: row[0])
    number_of: dict[tuple[int, int], int] = {}

    def replay() -> Iterator[TraceRequest]:
        for when, ids, system_end, session in requests:
            numbers = [number_of.setdefault((session, at), len(number_of)) for at in ids]
            yield TraceRequest(when, Prompt(np.repeat(np.array(numbers, np.int32), _WEKA_BLOCK_TOKENS), (), system_end))

    return Trace("weka-claude-code", len(requests), replay)


def _session(agent: Json, start: float) -> Iterator[tuple[float, list[int], int]]:
    """Yields time, blocks and end of the system message of each request of an agent and of its subagents."""
    system_tokens = agent["tool_tokens"] + agent["system_tokens"]
    system: list[int] | None = None
    for row in agent["requests"]:
        if "requests" in row:
            yield from _session(row, start + row["t"])
        elif ids := row["hash_ids"]:
            head = ids[: system_tokens // _WEKA_BLOCK_TOKENS]
            system = head if system is None else system
            # Side requests, such as for a title, have other system messages.
            has_system = head == system and len(ids) * _WEKA_BLOCK_TOKENS >= system_tokens
            yield start + row["t"], ids, system_tokens if has_system else 0


def _tau_bench(data: Path) -> list[Turn]:
    """An airline's agent with tools: one request for each reply; four conversations take turns."""
    folder = data / "tau-bench"
    tools = json.loads((folder / "tools_airline.json").read_text(encoding="utf-8"))
    recorded = json.loads((folder / "gpt-4o-airline.share.json").read_text(encoding="utf-8"))
    return in_turns([list(_replies(conversation["traj"], tools)) for conversation in recorded])


def _replies(messages: Sequence[Json], tools: Sequence[Json] = ()) -> Iterator[Turn]:
    """Yields a request for each reply of a conversation."""
    texts = [Message(message["role"], _text(message)) for message in messages]
    if tools and texts[0].role == "system":
        texts[0] = Message("system", texts[0].text + "\n\n# Tools\n" + "\n".join(map(json.dumps, tools)))
    for index, message in enumerate(texts):
        if message.role == "assistant" and index:
            yield Turn(texts[:index], message.text)


def _text(message: Json) -> str:
    content = message.get("content") or ""
    if not isinstance(content, str):
        content = "\n".join(part.get("text") or "" for part in content)
    calls = [call["function"] for call in message.get("tool_calls") or ()]
    return content + "".join(f"\n<tool_call>\n{json.dumps(call)}\n</tool_call>" for call in calls)


def _swe_agent(data: Path) -> list[Turn]:
    """Demonstrations and runs of a coding agent, one after the other."""
    turns = []
    for path in sorted((data / "swe-agent").rglob("*.traj")):
        history = json.loads(path.read_text(encoding="utf-8"))["history"]
        turns += list(_replies([message for message in history if message["role"] in _ROLES]))
    return turns


def _openhands(data: Path) -> list[Turn]:
    """Tests of a coding agent, one after the other, with each prompt as it was sent."""
    turns = []
    for folder in sorted({path.parent for path in (data / "openhands-mock").rglob("prompt_*.log")}):
        for path in sorted(folder.glob("prompt_*.log")):
            reply = path.with_name(path.name.replace("prompt", "response"))
            text = reply.read_text(encoding="utf-8") if reply.exists() else ""
            turns.append(Turn(_logged_messages(path.read_text(encoding="utf-8")), text.strip()))
    return turns


def _logged_messages(log: str) -> list[Message]:
    """The log does not name the roles: a message that an observation follows is the agent's."""
    texts = [text.strip() for text in re.split(r"^-{10}$", log, flags=re.MULTILINE) if text.strip()]
    are_answers = [text.startswith(("OBSERVATION:", "Observation:")) for text in texts]
    roles = ["assistant" if is_followed else "user" for is_followed in [*are_answers[1:], False]]
    roles[0] = "system" if len(texts) > 1 else "user"
    return [Message(role, text) for role, text in zip(roles, texts, strict=True)]


def _bfcl(data: Path) -> list[Turn]:
    """Multi-turn function calling: one request for each turn of the user; four conversations take turns.

    The data have no replies, so one word stands for each. Functions that come later are added behind the others, as in
    the benchmark.
    """
    folder = data / "bfcl"
    paths = sorted(folder.glob("BFCL_v4_multi_turn_*.json"))
    entries = [json.loads(line) for path in paths for line in path.read_text(encoding="utf-8").splitlines()]
    return in_turns([list(_asked(entry, folder / "multi_turn_func_doc")) for entry in entries])


def _asked(entry: Json, documents: Path) -> Iterator[Turn]:
    excluded, missed = set(entry.get("excluded_function") or ()), entry.get("missed_function") or {}
    known = [line for name in entry["involved_classes"] for line in _functions(documents / _BFCL_CLASSES[name])]
    known = [line for line in known if json.loads(line)["name"] not in excluded]
    late = {name for names in missed.values() for name in names}
    offered = [line for line in known if json.loads(line)["name"] not in late]
    messages: list[Message] = []
    for number, question in enumerate(entry["question"]):
        now = missed.get(str(number), ())
        offered += [line for line in known if json.loads(line)["name"] in now]
        asked = [Message(m["role"], m["content"]) for m in question] or [Message("user", _BFCL_MORE)]
        messages += asked
        system = Message("system", "You are a helpful assistant.\n\n# Tools\n" + "\n".join(offered))
        yield Turn([system, *messages], "Done.")
        messages.append(Message("assistant", "Done."))


@cache
def _functions(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines()


def _big_bench_hard(data: Path) -> list[Turn]:
    """27 tasks in any order, each with three worked examples before the question, as raw prompts."""
    turns = []
    for path in sorted((data / "big-bench-hard" / "bbh").glob("*.json")):
        worked = (data / "big-bench-hard" / "cot-prompts" / f"{path.stem}.txt").read_text(encoding="utf-8")
        examples = Message("user", worked.split("-----\n", 1)[1].strip() + "\n\n")
        for example in json.loads(path.read_text(encoding="utf-8"))["examples"]:
            question = Message("user", f"Q: {example['input']}\nA: Let's think step by step.")
            turns.append(Turn([examples, question], is_raw=True))
    random.Random(_SEED).shuffle(turns)
    return turns[:_MAX_BIG_BENCH]


def _mt_bench_101(data: Path) -> list[Turn]:
    """Chats without a system message; four take turns."""
    chats = []
    for line in (data / "mt-bench-101" / "mtbench101.jsonl").read_text(encoding="utf-8").splitlines():
        messages: list[Message] = []
        turns = []
        for exchange in json.loads(line)["history"]:
            messages.append(Message("user", exchange["user"]))
            turns.append(Turn(list(messages), exchange["bot"]))
            messages.append(Message("assistant", exchange["bot"]))
        chats.append(turns)
    return in_turns(chats)


def _cassettes(data: Path) -> list[Turn]:
    """Recorded requests of an agent library's tests, in their order: many short conversations."""
    turns = []
    for line in (data / "pydantic-ai-cassettes" / "chat_requests.jsonl").read_text(encoding="utf-8").splitlines():
        recorded = json.loads(line)
        body, reply = recorded["request"], recorded.get("response_message") or {}
        messages = [Message(m.get("role") or "user", _text(m)) for m in body["messages"]]
        if tools := body.get("tools"):
            system = "\n".join(map(json.dumps, tools))
            if messages[0].role == "system":
                messages[0] = Message("system", f"{messages[0].text}\n\n# Tools\n{system}")
            else:
                messages.insert(0, Message("system", f"# Tools\n{system}"))
        turns.append(Turn(messages, _text(reply)))
    return turns


def _presets_of_cline(data: Path) -> list[Turn]:
    """The system prompts of a coding agent for its models, in turn, eight times, each time with another question."""
    systems = [path.read_text(encoding="utf-8") for path in sorted((data / "cline-prompts").glob("*-basic.snap"))]
    systems += [path.read_text(encoding="utf-8") for path in sorted((data / "cline-prompts").glob("*-no-mcp.snap"))]
    return [
        Turn(
            [
                Message("system", text),
                Message("user", f"Question {number}: what does file {number * 7} of this project do?"),
            ]
        )
        for number in range(8)
        for text in systems
    ]


_TURNS: dict[str, Callable[[Path], list[Turn]]] = {
    "tau-bench": _tau_bench,
    "swe-agent": _swe_agent,
    "openhands-mock": _openhands,
    "bfcl": _bfcl,
    "big-bench-hard": _big_bench_hard,
    "mt-bench-101": _mt_bench_101,
    "pydantic-ai-cassettes": _cassettes,
    "cline-prompts": _presets_of_cline,
}
_TRACES: dict[str, Callable[[Path], Trace]] = {"mooncake": _mooncake, "weka-claude-code": _weka}
PUBLISHED = (*_TURNS, *_TRACES)


def published(name: str, data: Path) -> Trace:
    """Returns the workload `name` of `PUBLISHED`, whose data are in a folder of this name below `data`."""
    return _TRACES[name](data) if name in _TRACES else trace_of_turns(name, _TURNS[name](data))
