"""`diskprefix/TOUR.md` shows the values that a real request has on its way, and names a file for each noun."""

from __future__ import annotations

import json
import re
import textwrap
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from pathlib import Path
from typing import Any, NamedTuple, cast
from unittest.mock import patch

import httpx
import pytest

import diskprefix
from diskprefix.daemon.api.openai_chat import Chat
from diskprefix.daemon.api.parsed_request import ParsedRequest
from diskprefix.daemon.app import load_engine
from diskprefix.daemon.chat import renderer
from diskprefix.daemon.chat.draft import PromptDraft
from diskprefix.daemon.chat.messages import Conversation, TextPart
from diskprefix.daemon.engine.sampler import Sampler
from diskprefix.daemon.engine.scheduler import Chunk, Scheduler
from diskprefix.daemon.server import daemon
from diskprefix.daemon.settings import Settings
from diskprefix.prefixstore.cache import choosing
from diskprefix.prefixstore.cache.matching import Matcher, RestoreResult
from diskprefix.prefixstore.cache.restore import Restore
from diskprefix.prefixstore.cache.tiers.tier import View
from diskprefix.prefixstore.store.save import Save
from diskprefix.prefixstore.store.store import Publication
from diskprefix.prefixstore.store.writer import Writer
from diskprefix.tokens import Logits
from diskprefix.values import Selection
from tests.daemon.server.chat_model import write_chat_model
from tests.daemon.server.daemon_process import reply_to, text_of, wait_until
from tests.daemon.server.scripted import started_app
from tests.runtimes import RUNTIME

ROOT = Path(diskprefix.__file__).parent
PAGE = ROOT / "TOUR.md"
SENTENCE = "You are a careful assistant that answers questions about rivers, mountains and cities. "
TIMES = 40
SYSTEM = SENTENCE * TIMES
FIELDS = {"max_tokens": 4, "temperature": 0, "stream": True, "prefix_cache": {"scope": "auto:30"}}
STOP = re.compile(r"^## \d+\. `([^`]+)`\n.*?^```\w*\n(.*?)\n```$", re.MULTILINE | re.DOTALL)
"""A stop on the page: its file, and its values."""
NOUN = re.compile(r"^\| ([a-z ]+) \| [^|]+ \| `([^`]+)` \|$", re.MULTILINE)
QUESTION = re.compile(r"^\| ([^|]+\?) \| ([^|]+) \| ([^|]+) \|$", re.MULTILINE)
"""A question of who changes the code: the sections that answer it, and the files to open then."""
NAME = re.compile(r"\b[0-9a-f]{8}\b")
LOGIT = re.compile(r"-?\d+\.\d+")
TOLERANCE = 0.05
"""Logits differ in their last bits from one kind of processor to the next."""

Values = dict[str, list[str]]
"""By file: the lines that are shown for it."""

AT_BLOCKS: Values = {
    "prefixstore/cache/restore.py": [
        "3819804c: 256 tokens",
        "174d5b86: 256 tokens",
        "512 tokens from the tier disk, 131072 bytes",
        "3 pages of the group: (4, 1, 256, 32), float16",
    ],
    "prefixstore/cache/policy/select.py": [
        "common 665, recent 1, reason continues",
        "kept 512 of 692, saves_reply True",
    ],
    "daemon/engine/scheduler.py": [
        "tokens 512 to 692",
        *(f"tokens {start} to {start + 1}" for start in (692, 693, 694)),
    ],
    "prefixstore/store/writer.py": ["entry: True, prompt: True"],
    "daemon/server/streaming.py": [
        ": diskprefix",
        'data: … {"delta": {"content": "therpar"}}',
        'data: … {"finish_reason": "length"}',
        'data: … {"prefix_cache": {"scope": "auto:30", "restored": 512, "source": "disk", "boundary": 512, '
        '"boundary_reason":',
        '"continues", "saved": "stored", "replayed": 1}}',
        "data: [DONE]",
    ],
}
"""What is not as on the page if the same model is exact at multiples of the block size alone, and its rows are
float16. The reply is computed again in idle time, which is off."""


def listed(numbers: Any) -> str:
    values = [int(number) for number in numbers]
    if len(values) <= 10:
        return " ".join(map(str, values))
    return f"{' '.join(map(str, values[:5]))} … {' '.join(map(str, values[-5:]))}"


def short(name: bytes) -> str:
    return name.hex()[:8]


def shortened(text: str) -> str:
    """A text with the sentence of the system message written once."""
    return text.replace(SYSTEM, f"{SENTENCE}…")


def wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, 118, break_long_words=False, break_on_hyphens=False)


# What is shown of a call: its result, then its arguments.


def conversation(asked: ParsedRequest, *_: Any) -> list[str]:
    assert isinstance(asked.prompt, Conversation)
    said = [(message.role, cast("TextPart", message.content[0]).text) for message in asked.prompt.messages]
    return [
        *(f"{role}: {shortened(text)}" for role, text in said),
        f"max_tokens {asked.sampling.max_tokens}, temperature {asked.sampling.temperature:g}",
    ]


def text(draft: PromptDraft, *_: Any) -> list[str]:
    return shortened(draft.rendering.text).splitlines()


def token_ids(draft: PromptDraft, *_: Any) -> list[str]:
    ids = draft.prompt.token_ids
    return [f"{len(ids)} tokens: {listed(ids)}", f"replayed replies: {draft.prompt.replayed}"]


def boundaries(draft: PromptDraft, *_: Any) -> list[str]:
    return [f"boundaries: {listed(draft.prompt.boundaries)}", f"system_end: {draft.prompt.system_end}"]


def names(_: None, matcher: Matcher[View]) -> list[str]:
    nodes, size = matcher.nodes, matcher.nodes.block_size
    blocks = [f"{short(name)}: tokens {i * size} to {(i + 1) * size}" for i, name in enumerate(nodes.path.block_names)]
    return [f"{short(nodes.path.root)}: root", *blocks]


def restored(result: RestoreResult | None, restore: Restore) -> list[str]:
    if result is None:
        # It was matched, and is to be loaded.
        return []
    part = result.partial_match
    tail = [] if part is None else [(part.node, part.end - part.node.position)]
    (table,), (page, *_others) = restore.sequence.tables, restore.sequence.pages()
    assert page is not None
    return [
        *(f"{short(node.name)}: {node.num_tokens} tokens" for node in result.blocks),
        *(f"{short(node.name)}: {count} of its {node.num_tokens} tokens" for node, count in tail),
        f"{result.num_tokens} tokens from the tier {result.source}, {result.num_bytes} bytes",
        f"{len(table.pages)} pages of the group: {tuple(page.tensor.shape)}, {table.group.dtype}",
    ]


def selection(chosen: Selection, *_: Any) -> list[str]:
    return [
        f"common {chosen.common}, recent {chosen.recent}, reason {chosen.reason}",
        f"kept {chosen.kept} of {chosen.prompt_tokens}, saves_reply {chosen.saves_reply}",
    ]


def step(chunks: list[Chunk[Any]], *_: Any) -> list[str]:
    return [f"tokens {chunk.start} to {chunk.end}" for chunk in chunks]


def sampled(token: int, _: Sampler, logits: Logits, *_given: Any) -> list[str]:
    best = ", ".join(f"{i} has {logits[i]:.2f}" for i in (-logits).argsort(kind="stable")[:2])
    return [f"of {len(logits)} logits, {best}: token {token}"]


def events(response: str) -> list[str]:
    """The server-sent events without identifiers and times. How much text an event has depends on who is faster."""
    lines = [line for line in response.split("\n\n") if line]
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    content = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
    last = chunks[-1]
    return [
        lines[0],
        f"data: … {json.dumps({'delta': {'content': content}})}",
        f"data: … {json.dumps({'finish_reason': last['choices'][0]['finish_reason']})}",
        *wrapped(f"data: … {json.dumps({'prefix_cache': last['prefix_cache']})}"),
        lines[-1],
    ]


def published(_: None, __: Writer, ___: Save, publication: Publication, *____: Any) -> list[str]:
    nodes = [
        f"{short(node.name)}: tokens {node.position} to {node.position + len(node.token_ids)}"
        for node in publication.nodes
    ]
    return [*nodes, f"entry: {publication.entry is not None}, prompt: {publication.prompt is not None}"]


class Tap(NamedTuple):
    """A function, where it is looked up, and how a call of it is shown."""

    file: str
    owner: Any
    function: str
    show: Callable[..., list[str]]


TAPS = (
    Tap("daemon/api/openai_chat.py", Chat, "read", conversation),
    Tap("daemon/chat/template.py", renderer, "render", text),
    Tap("daemon/chat/encoder.py", renderer, "encode", token_ids),
    Tap("daemon/chat/boundaries.py", renderer, "bound", boundaries),
    Tap("prefixstore/cache/tiers/nodes.py", Matcher, "match", names),
    Tap("prefixstore/cache/restore.py", Restore, "_restore", restored),
    Tap("prefixstore/cache/policy/select.py", choosing, "select", selection),
    Tap("daemon/engine/scheduler.py", Scheduler, "schedule", step),
    Tap("daemon/engine/sampler.py", Sampler, "sample", sampled),
    Tap("prefixstore/store/writer.py", Writer, "queue_publication", published),
)


@contextmanager
def tapped(values: Values) -> Iterator[None]:
    def wrapped(tap: Tap) -> Callable[..., Any]:
        function = getattr(tap.owner, tap.function)

        @wraps(function)
        def call(*arguments: Any, **named: Any) -> Any:
            result = function(*arguments, **named)
            shown = tap.show(result, *arguments)
            # A prompt is matched again before it is loaded.
            values[tap.file] += shown if shown != values[tap.file] else []
            return result

        return call

    with ExitStack() as stack:
        for tap in TAPS:
            stack.enter_context(patch.object(tap.owner, tap.function, wrapped(tap)))
        yield


@pytest.fixture(scope="module")
def values(tmp_path_factory: pytest.TempPathFactory) -> Values:
    folder = tmp_path_factory.mktemp("tour")
    key = folder / "key"
    key.touch(mode=0o600)
    key.write_text("a secret of the tour", encoding="utf-8")
    model = write_chat_model(folder / "tiny-chat", seed=14)
    # Whether a guess is worth its row is measured, and another thing each time.
    flags = {"kv_cache_dir": folder / "kv", "namespace_key_file": key, "fingerprint": "portable", "speculative": "off"}

    @contextmanager
    def running() -> Iterator[httpx.Client]:
        # The daemon renders conversations of its own once the model is loaded.
        own = patch.object(daemon, "_log_template_cost")
        with own, started_app(model, load_engine, max_sequences=Settings().max_sequences, **flags) as server:
            server.wait_ready()
            with server.client() as client:
                yield client

    found: Values = defaultdict(list)
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "Name three rivers."}]
    with running() as client:
        said = text_of(reply_to(client, {"messages": messages, "max_tokens": 8, "temperature": 0}))
    messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "And three cities?"}]
    body = {"messages": messages, **FIELDS}
    found["daemon/server/answer.py"] = wrapped(shortened(json.dumps(body)))
    with running() as client, tapped(found):
        response = client.post("/v1/chat/completions", json=body).raise_for_status()
        # With the reply there is a publication of its own.
        num_lines = 1 if RUNTIME == "llama" else 3
        wait_until(lambda: len(found["prefixstore/store/writer.py"]) == num_lines, "the state is written")
    found["daemon/server/streaming.py"] = events(response.text)
    return found


def shown_on(page: str) -> Values:
    return {file: block.splitlines() for file, block in STOP.findall(page)}


def same(text: str) -> tuple[str, list[float]]:
    """A text with its names numbered and its logits taken out, and the logits."""
    numbers: dict[str, str] = {}
    text = NAME.sub(lambda name: numbers.setdefault(name[0], f"name {len(numbers)}"), text)
    return LOGIT.sub("#", text), [float(number) for number in LOGIT.findall(text)]


def test_the_page_shows_the_values_of_a_real_request(values: Values) -> None:
    page = shown_on(PAGE.read_text(encoding="utf-8"))
    assert len(page) == 12
    page |= AT_BLOCKS if RUNTIME == "llama" else {}
    shown, real = ("\n".join(f"{file}\n" + "\n".join(of[file]) for file in page) for of in (page, values))
    assert same(shown)[0] == same(real)[0], f"the values of now:\n{real}"
    assert same(shown)[1] == pytest.approx(same(real)[1], abs=TOLERANCE)


def test_the_files_of_the_nouns_define_them() -> None:
    rows = NOUN.findall(PAGE.read_text(encoding="utf-8"))
    assert len(rows) == 26
    for noun, file in rows:
        assert noun.split()[-1] in (ROOT / file).read_text(encoding="utf-8").lower(), f"{noun} in {file}"


def test_the_page_leads_each_question_to_a_section() -> None:
    rows = QUESTION.findall(PAGE.read_text(encoding="utf-8"))
    assert len(rows) == 16
    for question, pages, files in rows:
        assert re.fullmatch(r"\[[a-z ]+\]\([^)#]+#[^)]+\)(, \[[a-z ]+\]\([^)#]+#[^)]+\))*", pages), question
        missing = [file for file in re.findall(r"`([^`]+)`", files) if not (ROOT / file).is_file()]
        assert (len(files.split(", ")) <= 3, missing) == (True, []), question
