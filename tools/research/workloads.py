"""Published workloads as traces for the simulator.

Each workload's data, as its authors publish them, lie in a folder of its name below the folder of all data.
Chats are rendered with the embedded model's tokenizer and the ChatML template below, because the model's own template
omits tools.
"""

from __future__ import annotations

import hashlib
import json
import lzma
import random
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from diskprefix.extras.simulate.trace import BlockRequest, Trace, TraceRequest, block_trace
from diskprefix.extras.simulate.trace_formats import read_trace
from diskprefix.nouns import Prompt

Json: TypeAlias = dict[str, Any]

TEMPLATE = """\
{%- set first = messages[0] -%}
<|im_start|>system
{% if first.role == 'system' %}{{ first.content }}{% else %}You are a helpful assistant.{% endif %}
{%- if tools %}{{ '\\n\\nTo call a function, answer with a JSON object inside <tool_call></tool_call>.\\n<tools>' }}
{%- for tool in tools %}{{ '\\n' }}{{ tool | tojson }}{% endfor %}{{ '\\n</tools>' }}{% endif %}<|im_end|>
{% for message in (messages[1:] if first.role == 'system' else messages) -%}
<|im_start|>{{ message.role }}
{%- if message.content or not message.tool_calls %}{{ '\\n' + message.content }}{% endif %}
{%- for call in message.tool_calls or [] %}
{{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- call.function.arguments | tojson }}{{ '}\\n</tool_call>' }}
{%- endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
"""A reply that is only a tool call begins with a newline, as the generation prompt ends, and so continues a prompt."""

PAUSE_S = 5.0
"""Seconds between two requests of a workload without times."""
LANES = 4
"""The number of conversations at the same time."""
SESSION_PAUSE_S = 60.0
SEED = 0
WEKA_BLOCK_TOKENS = 64

BFCL_CLASSES = {
    "GorillaFileSystem": "gorilla_file_system.json",
    "MathAPI": "math_api.json",
    "MessageAPI": "message_api.json",
    "TicketAPI": "ticket_api.json",
    "TradingBot": "trading_bot.json",
    "TravelAPI": "travel_booking.json",
    "TwitterAPI": "posting_api.json",
    "VehicleControlAPI": "vehicle_control.json",
}
BFCL_REPLY = "Done."
BFCL_MORE = "I have added functions that you can choose from. What about now?"


@dataclass(frozen=True, eq=False)
class Turn:
    """A request body and the text of its reply."""

    body: Json
    reply: str = ""


# Traces of block ids.


def mooncake(data: Path) -> Trace:
    """Returns the synthetic trace of Mooncake: blocks of 512 tokens; an id stands for a block and all before it."""
    return read_trace(data / "mooncake" / "synthetic_trace.jsonl", name="mooncake")


def weka(data: Path, lanes: int = LANES) -> Trace:
    """Returns sessions of a coding agent and its subagents: blocks of 64 tokens, whose ids are those of one session.

    When a session began is not known: `lanes` of them go on at the same time, each followed by the next one of its lane
    after a pause. Prompts are cut down to whole blocks, as nothing is known of the rest. All models of a session count
    as one.
    """
    with lzma.open(data / "weka-claude-code" / "traces_A.jsonl.xz", "rt", encoding="utf-8") as file:
        sessions = [json.loads(line) for line in file]
    starts = [0.0] * lanes
    requests: list[BlockRequest] = []
    for number, session in enumerate(sessions):
        lane = number % lanes
        own = list(_session(session, number << 32, starts[lane]))
        starts[lane] = max(request.when for request in own) + SESSION_PAUSE_S
        requests += own
    return block_trace("weka-claude-code", requests, WEKA_BLOCK_TOKENS)


def _session(agent: Json, id_base: int, start: float) -> Iterator[BlockRequest]:
    """Gives the requests of an agent and of its subagents; each begins with the tools and the system message."""
    system_tokens = agent["tool_tokens"] + agent["system_tokens"]
    system: list[int] | None = None
    for row in agent["requests"]:
        when = start + row["t"]
        if "requests" in row:
            yield from _session(row, id_base, when)
            continue
        ids = row["hash_ids"]
        head = ids[: system_tokens // WEKA_BLOCK_TOKENS]
        system = head if system is None else system
        if ids:
            yield BlockRequest(
                when=when,
                block_ids=np.array(ids, np.int64) + id_base,
                num_tokens=len(ids) * WEKA_BLOCK_TOKENS,
                output_tokens=row["out"],
                # Side requests of the client, such as for a title, have other system messages.
                system_end=system_tokens if head == system and len(ids) * WEKA_BLOCK_TOKENS >= system_tokens else 0,
            )


# Conversations.


def tau_bench(data: Path) -> Iterator[Turn]:
    """An airline's agent with tools: one request for each reply; four conversations take turns."""
    folder = data / "tau-bench"
    tools = json.loads((folder / "tools_airline.json").read_text(encoding="utf-8"))
    recorded = json.loads((folder / "gpt-4o-airline.share.json").read_text(encoding="utf-8"))
    return in_turns([list(_replies(conversation["traj"], tools)) for conversation in recorded])


def _replies(messages: Sequence[Json], tools: list[Json]) -> Iterator[Turn]:
    for index, message in enumerate(messages):
        if message["role"] == "assistant" and index:
            reply = (message.get("content") or "") + (json.dumps(calls) if (calls := message.get("tool_calls")) else "")
            yield Turn({"messages": list(messages[:index]), "tools": tools}, reply)


def in_turns(conversations: Sequence[Sequence[Turn]], lanes: int = LANES) -> Iterator[Turn]:
    """Gives the first request of each of `lanes` conversations, then the second of each, and so on."""
    for start in range(0, len(conversations), lanes):
        rounds = zip_longest(*conversations[start : start + lanes])
        yield from (turn for turn in chain.from_iterable(rounds) if turn is not None)


def openhands(data: Path) -> Iterator[Turn]:
    """Tests of a coding agent, one after the other, with each prompt as it was sent."""
    for folder in sorted({path.parent for path in (data / "openhands-mock").rglob("prompt_*.log")}):
        for path in sorted(folder.glob("prompt_*.log")):
            reply = path.with_name(path.name.replace("prompt", "response"))
            text = reply.read_text(encoding="utf-8") if reply.exists() else ""
            yield Turn({"messages": _logged_messages(path.read_text(encoding="utf-8"))}, text.strip())


def _logged_messages(log: str) -> list[Json]:
    """The log does not name the roles: a message that an observation follows is the agent's."""
    texts = [text.strip() for text in re.split(r"^-{10}$", log, flags=re.MULTILINE) if text.strip()]
    answers = [text.startswith(("OBSERVATION:", "Observation:")) for text in texts]
    roles = ["assistant" if answered else "user" for answered in [*answers[1:], False]]
    roles[0] = "system" if len(texts) > 1 else "user"
    return [{"role": role, "content": text} for role, text in zip(roles, texts, strict=True)]


def bfcl(data: Path) -> Iterator[Turn]:
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
    known = [tool for name in entry["involved_classes"] for tool in _functions(documents / BFCL_CLASSES[name])]
    known = [tool for tool in known if tool["function"]["name"] not in excluded]
    late = {name for names in missed.values() for name in names}
    offered = [tool for tool in known if tool["function"]["name"] not in late]
    messages: list[Json] = []
    for number, question in enumerate(entry["question"]):
        now = missed.get(str(number), ())
        offered += [tool for tool in known if tool["function"]["name"] in now]
        messages += question or [{"role": "user", "content": BFCL_MORE}]
        yield Turn({"messages": list(messages), "tools": list(offered)}, BFCL_REPLY)
        messages.append({"role": "assistant", "content": BFCL_REPLY})


@cache
def _functions(path: Path) -> list[Json]:
    lines = path.read_text(encoding="utf-8").splitlines()
    return [{"type": "function", "function": json.loads(line)} for line in lines]


def big_bench_hard(data: Path) -> Iterator[Turn]:
    """27 tasks in any order, each with three worked examples before the question, as raw prompts."""
    turns = []
    for path in sorted((data / "big-bench-hard" / "bbh").glob("*.json")):
        worked = (data / "big-bench-hard" / "cot-prompts" / f"{path.stem}.txt").read_text(encoding="utf-8")
        examples = worked.split("-----\n", 1)[1].strip()
        for example in json.loads(path.read_text(encoding="utf-8"))["examples"]:
            question = f"Q: {example['input']}\nA: Let's think step by step."
            turns.append(Turn({"prompt": f"{examples}\n\n{question}"}))
    random.Random(SEED).shuffle(turns)
    return iter(turns)


CONVERSATIONS: dict[str, Callable[[Path], Iterator[Turn]]] = {
    "tau-bench": tau_bench,
    "openhands-mock": openhands,
    "bfcl": bfcl,
    "big-bench-hard": big_bench_hard,
}
TRACES: dict[str, Callable[[Path], Trace]] = {
    "mooncake": mooncake,
    "weka-claude-code": weka,
}


def open_workload(name: str, data: Path) -> Trace:
    """Returns the workload `name` of `NAMES` in the folder `data`. Conversations are rendered once and then cached."""
    if name in TRACES:
        return TRACES[name](data)
    return rendered(name, list(CONVERSATIONS[name](data)))


def rendered(name: str, turns: Sequence[Turn]) -> Trace:
    kept = _kept_in(name, turns)
    if not (kept / "done").exists():
        _render_into(kept, turns)
    tokens = np.load(kept / "tokens.npy", mmap_mode="r")
    ends = np.load(kept / "ends.npy")
    facts: list[tuple[int, list[int], int]] = json.loads((kept / "facts.json").read_text(encoding="utf-8"))

    def replay() -> Iterator[TraceRequest]:
        for index, (system_end, boundaries, output_tokens) in enumerate(facts):
            token_ids = np.array(tokens[ends[index] : ends[index + 1]])
            yield TraceRequest(
                when=index * PAUSE_S,
                prompt=Prompt(token_ids=token_ids, boundaries=tuple(boundaries), system_end=system_end),
                output_tokens=output_tokens,
            )

    return Trace(name, len(facts), replay)


def _kept_in(name: str, turns: Sequence[Turn]) -> Path:
    """Returns the folder of the rendered prompts, named after all that they depend on."""
    from diskprefix.settings import cache_home

    digest = hashlib.sha256(TEMPLATE.encode())
    for turn in turns:
        digest.update(json.dumps([turn.body, turn.reply]).encode())
    return cache_home() / "workloads" / f"{name}-{digest.hexdigest()[:16]}"


def _render_into(folder: Path, turns: Sequence[Turn]) -> None:
    render, count = renderer(), token_counter()
    prompts: list[np.ndarray[Any, np.dtype[np.int32]]] = []
    facts = []
    for index, turn in enumerate(turns):
        prompt = render(turn.body)
        prompts.append(prompt.token_ids)
        facts.append((prompt.system_end, list(prompt.boundaries), count(turn.reply)))
        if index % 100 == 99:
            print(f"{folder.name}: {index + 1} of {len(turns)} prompts rendered", file=sys.stderr)
    folder.mkdir(parents=True, exist_ok=True)
    np.save(folder / "tokens.npy", np.concatenate(prompts))
    np.save(folder / "ends.npy", np.cumsum([0, *map(len, prompts)]))
    (folder / "facts.json").write_text(json.dumps(facts), encoding="utf-8")
    (folder / "done").touch()


@cache
def _tokenizer() -> Any:
    from transformers import AutoTokenizer

    from diskprefix.model.load.embedded import embedded_folder

    tokenizer = AutoTokenizer.from_pretrained(embedded_folder(partial(print, file=sys.stderr)))
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def renderer() -> Callable[[Json], Prompt]:
    """Returns a function that renders a request body as the server does, of any length."""
    from diskprefix.chat.renderer import PromptRenderer
    from diskprefix.extras.request_bodies import parse_body

    of_any_length = PromptRenderer(_tokenizer(), vocab_size=len(_tokenizer()), max_positions=1 << 30)
    return lambda body: parse_body(body).prompt(of_any_length)


def token_counter() -> Callable[[str], int]:
    """Returns a function that counts the tokens of a text."""
    return lambda text: len(_tokenizer()(text, verbose=False)["input_ids"]) if text else 0
