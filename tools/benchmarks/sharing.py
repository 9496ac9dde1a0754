"""What a store takes for conversations with agents, whose every turn sends all earlier ones again."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from diskprefix.kv.layout import Layout
from diskprefix.model.embedded import embedded_folder
from diskprefix.policy.history import History
from diskprefix.policy.scope import DEFAULT_WINDOW, Scope
from diskprefix.policy.select import Selection, select
from diskprefix.prefix_cache.nodes import Node, PromptNodes
from diskprefix.prompt import Prompt, raw_boundaries
from diskprefix.settings import Settings
from diskprefix.store.changes import node_bytes
from diskprefix.store.pieces import PayloadLayout
from diskprefix.store.schema import Kind
from diskprefix.tokens import TokenIds, as_token_ids
from tools.measuring.kv_sample import BLOCK_SIZE

_SPECIAL = ("<|im_start|>", "<|im_end|>")
_WORDS = re.compile(r"<\|im_(?:start|end)\|>|\s?\w{1,6}|[^\w\s]|\s+")
_DEFAULTS = Settings()
_RECORDED_PROMPT = re.compile(r"prompt_\d+\.log")


@dataclass(frozen=True, kw_only=True)
class Sharing:
    """What the prompts of a workload take under a scope."""

    name: str
    scope: str
    requests: int
    prompt_tokens: int
    snapshot_bytes: int
    """Each prompt's state as a file of its own."""
    stored_bytes: int
    """What the store takes without compression, whole pages and records included."""

    @property
    def ratio(self) -> float:
        return self.snapshot_bytes / self.stored_bytes


@dataclass(frozen=True, eq=False)
class Tokenizer:
    """`special_ids`: of the tokens that begin and end a turn."""

    name: str
    encode: Callable[[str], TokenIds]
    special_ids: frozenset[int]


def word_tokenizer() -> Tokenizer:
    """An approximation: words, long ones in parts, and signs are numbered as they come."""
    ids: dict[str, int] = {}

    def encode(text: str) -> TokenIds:
        return as_token_ids([ids.setdefault(word, len(ids)) for word in _WORDS.findall(text)])

    return Tokenizer("words and signs", encode, frozenset(encode("".join(_SPECIAL)).tolist()))


def embedded_tokenizer(report: Callable[[str], None]) -> Tokenizer:
    """The embedded model's own. Raises `ModelError`."""
    from transformers import AutoTokenizer

    folder = embedded_folder(report)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    special_ids = frozenset(tokenizer.convert_tokens_to_ids(list(_SPECIAL)))
    return Tokenizer(folder.name, lambda text: as_token_ids(tokenizer(text, verbose=False)["input_ids"]), special_ids)


def prompts(path: Path, tokenizer: Tokenizer) -> list[Prompt]:
    """The prompt of every request recorded under `path`, rendered as ChatML, in order.

    Known are JSON lists of conversations (`traj`), trajectories (`*.traj`, `history`), and prompts as they were sent
    (`prompt_*.log`). Raises `ValueError` if there is nothing of the kind.
    """
    files = [path] if path.is_file() else sorted(path.rglob("*"))
    encoded = [tokenizer.encode(text) for file in files for text in _prompts_in(file)]
    if not encoded:
        raise ValueError(f"{path} holds no conversations (*.json with traj, *.traj, prompt_*.log)")
    return [Prompt(token_ids, raw_boundaries(token_ids, tokenizer.special_ids)) for token_ids in encoded]


def measure(name: str, requests: Sequence[Prompt], scope: Scope, layout: Layout) -> Sharing:
    """Name the nodes that the policy keeps of every prompt, as the store does, and count each name once."""
    payloads = PayloadLayout.parse(layout.describe())
    history = History(max_prompts=DEFAULT_WINDOW, max_tokens=1 << 22)
    stored: dict[bytes, int] = {}
    for prompt in requests:
        selection = _select(scope, prompt, history)
        for node in _kept(PromptNodes(0, bytes(16), prompt.token_ids, BLOCK_SIZE, payloads), selection):
            if node.name not in stored:
                pieces = payloads.pieces(node.num_tokens, node.kind)
                stored[node.name] = node_bytes(node.num_tokens, [piece.most_bytes for piece in pieces])
        if len(prompt.token_ids) >= _DEFAULTS.kv_cache_min_tokens:
            history.add(prompt.token_ids)
    lengths = [len(prompt.token_ids) for prompt in requests]
    return Sharing(
        name=name,
        scope=str(scope),
        requests=len(requests),
        prompt_tokens=sum(lengths),
        snapshot_bytes=sum(payloads.payload_bytes(length, Kind.TAIL) for length in lengths),
        stored_bytes=sum(stored.values()),
    )


def _select(scope: Scope, prompt: Prompt, history: History) -> Selection:
    return select(
        scope,
        prompt,
        history.recent(scope.value if scope.kind == "auto" else DEFAULT_WINDOW),
        block_size=BLOCK_SIZE,
        min_tokens=_DEFAULTS.kv_cache_min_tokens,
        cold_max=_DEFAULTS.kv_cache_cold_max,
        interval=_DEFAULTS.kv_cache_interval,
    )


def _kept(nodes: PromptNodes, selection: Selection) -> Iterator[Node]:
    parent, num_blocks = nodes.root, selection.aligned // BLOCK_SIZE
    for index in range(num_blocks):
        node = nodes.block(parent, index)
        yield node
        parent = node.name
    if selection.keep_tail:
        yield nodes.tail(parent, num_blocks)


def _prompts_in(file: Path) -> Iterator[str]:
    if file.suffix == ".traj":
        yield from _turns(json.loads(file.read_text(encoding="utf-8"))["history"])
    elif _RECORDED_PROMPT.fullmatch(file.name):
        yield file.read_text(encoding="utf-8")
    elif file.suffix == ".json":
        recorded = json.loads(file.read_text(encoding="utf-8"))
        for conversation in recorded if isinstance(recorded, list) else []:
            yield from _turns(conversation["traj"] if isinstance(conversation, dict) and "traj" in conversation else [])


def _turns(messages: Sequence[dict[str, Any]]) -> Iterator[str]:
    """What was sent for each of the assistant's messages: all that came before it."""
    rendered = ""
    for is_reply, group in groupby(messages, key=lambda message: message["role"] == "assistant"):
        if is_reply and rendered:
            yield rendered + "<|im_start|>assistant\n"
        for message in group:
            rendered += f"<|im_start|>{message['role']}\n{_content(message)}<|im_end|>\n"


def _content(message: dict[str, Any]) -> str:
    calls = message.get("tool_calls") or message.get("function_call")
    return (message.get("content") or "") + (json.dumps(calls) if calls else "")
