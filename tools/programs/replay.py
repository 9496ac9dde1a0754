"""The replay benchmark: what the next turn restores of a reply, when clients format its tool calls anew.

50 recorded conversations with tools (tau-bench, PydanticAI) are held again, turn by turn, by the daemon's own renderer
and output parser. The reply of each turn is the recorded one, written as Qwen's models write calls, with the arguments
as they were recorded. Clients send it back in several forms. Nothing is computed: a turn restores the longest prefix
that its prompt shares with the prompt and the reply of an earlier turn, as a model does that is exact at every token.

Exits with 1 if a form restores another share with replay than the unchanged one.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from diskprefix.api.openai_chat import ChatRequest
from diskprefix.chat.renderer import PromptRenderer
from diskprefix.chat.replay import ReplyMemory, Turn
from diskprefix.server.body import parse_json
from diskprefix.tokens import TokenIds, as_token_ids, common_prefix_length
from tools.measuring.options import DATA, JSON
from tools.measuring.report import new_table, print_report
from tools.measuring.workspace import model_folder

Json = dict[str, Any]
Form = Callable[[str], str | Json]
"""What a client makes of the JSON text of a call's arguments."""

NUM_CONVERSATIONS = 50
NUM_CASSETTES = 15
POSITIONS = 1 << 30


def _in_another_order(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _in_another_order(member) for name, member in reversed(value.items())}
    return [_in_another_order(member) for member in value] if isinstance(value, list) else value


FORMS: dict[str, Form] = {
    "unchanged": lambda text: text,
    "keys in another order": lambda text: json.dumps(_in_another_order(json.loads(text))),
    "other blanks": lambda text: json.dumps(json.loads(text), indent=2, ensure_ascii=False),
    "as an object": json.loads,
}


@dataclass(frozen=True)
class Conversation:
    """Messages and tools as OpenAI's chat API has them."""

    messages: list[Json]
    tools: list[Json]


def conversations(data: Path) -> list[Conversation]:
    """Returns `NUM_CONVERSATIONS` recorded conversations in which tools are called."""
    found = list(_cassettes(data))[:NUM_CASSETTES]
    return [*found, *_tau_bench(data)][:NUM_CONVERSATIONS]


def _tau_bench(data: Path) -> Iterator[Conversation]:
    folder = data / "tau-bench"
    tools = json.loads((folder / "tools_airline.json").read_text(encoding="utf-8"))
    for recorded in json.loads((folder / "gpt-4o-airline.share.json").read_text(encoding="utf-8")):
        if any(message.get("tool_calls") for message in recorded["traj"]):
            yield Conversation(recorded["traj"], tools)


def _cassettes(data: Path) -> Iterator[Conversation]:
    """The last request of each cassette with at least two replies, one of them a call; it has all turns before it."""
    last: dict[str, Json] = {}
    for line in (data / "pydantic-ai-cassettes" / "chat_requests.jsonl").read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        last[record["cassette"]] = record["request"]
    for request in last.values():
        messages = request.get("messages", [])
        replies = [message for message in messages if message["role"] == "assistant"]
        is_text = all(isinstance(message.get("content") or "", str) for message in messages)
        if is_text and request.get("tools") and len(replies) > 1 and any(map(_calls, replies)):
            yield Conversation(messages, request["tools"])


def _calls(message: Json) -> list[Json]:
    return [call["function"] for call in message.get("tool_calls") or []]


class Turns(dict[str, bytes]):
    """What is remembered of one conversation."""

    def put(self, id_: str, record: bytes) -> None:
        self[id_] = record


@dataclass
class Share:
    """Of all turns but the first of each conversation: tokens of their prompts, and how many of them are restored.

    `whole`: the turns that go on from all of the reply before them.
    """

    turns: int = 0
    prompt_tokens: int = 0
    restored: int = 0
    whole: int = 0

    def add(self, prompt: TokenIds, states: list[TokenIds]) -> None:
        if states:
            restored = max(common_prefix_length(prompt, state) for state in states)
            self.turns += 1
            self.prompt_tokens += len(prompt)
            self.restored += restored
            self.whole += common_prefix_length(prompt, states[-1]) == len(states[-1])


class Bench:
    """Holds conversations. `renderer` is that of a model whose calls stand between <tool_call> tags."""

    def __init__(self, renderer: PromptRenderer) -> None:
        self._renderer = renderer

    def shares(self, recorded: Sequence[Conversation]) -> list[Json]:
        """Returns what is restored of all conversations, with and without replay, for each form."""
        rows = []
        for replay in (False, True):
            for name, form in FORMS.items():
                share = Share()
                for conversation in recorded:
                    self.hold(conversation, form, share, replay=replay)
                rows.append({"replay": replay, "client": name, **vars(share)})
        return rows

    def hold(self, recorded: Conversation, form: Form, share: Share, *, replay: bool) -> None:
        """Holds a conversation. The client sends back each reply with the arguments of its calls in `form`."""
        sent: list[Json] = []
        states: list[TokenIds] = []
        turns = Turns()
        for message in recorded.messages:
            if message["role"] != "assistant":
                sent.append(message)
                continue
            if sent and sent[-1]["role"] != "assistant":
                states.append(self._reply(recorded, sent, message, turns, share, states, replay=replay))
            sent.append(_formed(message, form))

    def _reply(
        self,
        recorded: Conversation,
        sent: list[Json],
        message: Json,
        turns: Turns,
        share: Share,
        states: list[TokenIds],
        *,
        replay: bool,
    ) -> TokenIds:
        """Renders the prompt of a turn and has its reply remembered. Returns the tokens that have state then."""
        body = json.dumps({"messages": sent, "tools": recorded.tools}).encode()
        conversation = parse_json(body, ChatRequest).conversation
        prompt, origin = self._renderer.replay(conversation, turns if replay else None)
        share.add(prompt.token_ids, states)
        text = written(message)
        sampled = self._renderer.tokenize(text, add_special_tokens=False)
        parser = self._renderer.output_format.parser(recorded.tools, self._renderer.end_of(prompt))
        turn = Turn.of_deltas([*parser.feed(text), *parser.finish()])
        if len(turn.calls) != len(_calls(message)):
            name = self._renderer.output_format.name
            raise click.ClickException(f"the output format {name!r} of this model does not read {text!r}")
        if origin is not None:
            memory = ReplyMemory(turns, origin, self._renderer.end_ids)
            ids = [call["id"] for call in message.get("tool_calls") or []]
            memory.remember(turn, ids, [*sampled, min(self._renderer.end_ids)])
        return as_token_ids([*prompt.token_ids.tolist(), *sampled])


def written(message: Json) -> str:
    """Returns a reply as a model writes it whose calls stand between <tool_call> tags."""
    calls = [
        f'<tool_call>\n{{"name": {json.dumps(call["name"])}, "arguments": {call["arguments"]}}}\n</tool_call>'
        for call in _calls(message)
    ]
    return "\n".join([*filter(None, [message.get("content")]), *calls])


def _formed(message: Json, form: Form) -> Json:
    if not _calls(message):
        return message
    calls = [
        call | {"function": call["function"] | {"arguments": form(call["function"]["arguments"])}}
        for call in message["tool_calls"]
    ]
    return message | {"tool_calls": calls}


@click.command()
@DATA
@click.option(
    "--model", default="qwen2.5-coder-0.5b", show_default=True, help="Whose tokenizer and template: a name or a folder."
)
@JSON
def main(data: Path, model: str, as_json: bool) -> None:
    """How much of a reply the next turn restores when clients format its tool calls anew."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_folder(model, Console(stderr=True)))
    renderer = PromptRenderer(tokenizer, vocab_size=len(tokenizer), max_positions=POSITIONS)
    renderer.warm_up()
    recorded = conversations(data)
    rows = Bench(renderer).shares(recorded)
    report = {
        "conversations": len(recorded),
        "calls": sum(len(_calls(message)) for one in recorded for message in one.messages),
        "rows": rows,
    }
    print_report(report, as_json, _show)
    if len({row["restored"] / row["prompt_tokens"] for row in rows if row["replay"]}) > 1:
        sys.exit(1)


def _show(report: Json, console: Console) -> None:
    title = f"{report['conversations']} conversations, {report['calls']} calls"
    right = ("turns", "from the reply's end", "prompt tokens", "computed", "restored")
    table = new_table(title, left=("replay", "client sends arguments"), right=right)
    for row in report["rows"]:
        table.add_row(
            "on" if row["replay"] else "off",
            row["client"],
            str(row["turns"]),
            str(row["whole"]),
            f"{row['prompt_tokens']:,}",
            f"{row['prompt_tokens'] - row['restored']:,}",
            f"{row['restored'] / row['prompt_tokens']:.2%}",
        )
    console.print(table)
