"""`diskprefix serve` whose replies are prepared: the model computes as always, and then other tokens are taken.

The server, the chat template, the tokenizer, prefill, decoding, parsing of calls and the cache are the real ones. Only
`Sampler.sample` is replaced, in the processes of a router's models too. DISKPREFIX_SCRIPT names a JSON file:

    model          the folder of the model, or of one of them
    tasks          a list of {"task", "calls", "last", "said", "thought"}
    records        a folder for `Records`, or null
    works_always   whether work ahead goes on while other programs want the CPUs

A request is answered for the task whose text comes last in its prompt: with the `calls` of its turns, then with the
text `last`. An agent without tools has the one reply `said`. A `thought` comes before each call and before `last`.
Replies are written as the model's chat template writes them.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from diskprefix.daemon.cli import main
from diskprefix.daemon.engine import active_requests
from diskprefix.daemon.engine.idle import ahead_jobs
from diskprefix.daemon.engine.idle.cpu_waits import CpuWaits
from diskprefix.daemon.engine.request import SamplingParams
from diskprefix.daemon.engine.sampler import Sampler
from diskprefix.daemon.engine.thought_limit import ThoughtLimit
from diskprefix.daemon.router import worker_program, workers
from diskprefix.daemon.server.process.router_line import RouterLine
from diskprefix.daemon.settings import Settings
from diskprefix.tokens import Logits, TokenIds
from tools.real_agents.records import Records

SIDE_REPLY = "Mending a sum"
"""The reply to titles, summaries and whatever else is not a turn of a task."""
TOOLS_OFFERED = re.compile(r"<tools>|\[AVAILABLE_TOOLS\]|namespace functions \{")
TOOL_RESULT = re.compile(r"<tool_response>|\[TOOL_RESULTS\]|<\|start\|>functions\.\S+ to=assistant")
"""As the chat templates of Qwen2.5, Mistral and gpt-oss write them."""
_QUESTION = {"role": "user", "content": "A question?"}
_CALL_ID = "diskprefx"
"""Nine letters, which Mistral's templates demand."""
_WORKER = "worker"

Written = Callable[[str, Sequence[Any] | None, str], str]
"""Writes a reply: its text, its call (name and arguments) or None, its thought or an empty text."""


def prepared_reply(prompt: str, tasks: Sequence[Mapping[str, Any]], written: Written) -> str:
    """Returns the reply to a rendered prompt: the next call of its task if it has tools, and the results before."""
    task = max(tasks, key=lambda each: prompt.rfind(each["task"]))
    # Agents may repeat the text of a task.
    began = prompt.find(task["task"])
    if began >= 0 and task.get("said"):
        return written(task["said"], None, "")
    if began < 0 or not TOOLS_OFFERED.search(prompt):
        return written(SIDE_REPLY, None, "")
    turn = len(TOOL_RESULT.findall(prompt, began))
    thought = task.get("thought", "")
    if turn >= len(task["calls"]):
        return written(task["last"], None, thought)
    return written("", task["calls"][turn], thought)


def reply_writer(tokenizer: Any) -> Written:
    """Returns a function that writes a reply as the tokenizer's chat template does."""

    def written(text: str, call: Sequence[Any] | None, thought: str) -> str:
        message: dict[str, Any] = {"role": "assistant", "content": text}
        if call is not None:
            function = {"name": call[0], "arguments": call[1]}
            message["tool_calls"] = [{"id": _CALL_ID, "type": "function", "function": function}]
        if thought:
            message |= {"thinking": thought, "reasoning_content": thought}
        asked, answered = (
            tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=len(messages) == 1)
            for messages in ([_QUESTION], [_QUESTION, message])
        )
        assert answered.startswith(asked)
        return str(answered.removeprefix(asked).partition(tokenizer.eos_token)[0])

    return written


def _go_on(_left: int) -> None:
    """Lets the next token come at once."""


def prepared_sampler(
    reply_to: Callable[[Sequence[int]], list[int]],
    records: Records | None = None,
    before: Callable[[int], None] = _go_on,
) -> type[Sampler]:
    """Returns a class of samplers that take the tokens of `reply_to` of the prompt's tokens, one after the other.
    `before` is called before each one, with the number of tokens that are left."""

    class PreparedSampler(Sampler):
        def __init__(self, params: SamplingParams, prompt: TokenIds, *others: Any) -> None:
            super().__init__(params, prompt, *others)
            self._prepared = deque(reply_to(prompt.tolist()))
            self._reply = None if records is None else records.begin(prompt.tolist())

        def sample(self, logits: Logits, limit: ThoughtLimit | None = None) -> int:
            del limit
            before(len(self._prepared))
            if self._reply is not None:
                self._reply.add(logits)
            return self._prepared.popleft() if len(self._prepared) > 1 else self._prepared[0]

    return PreparedSampler


class PatientWaits(CpuWaits):
    """The waits of work ahead that goes on while other programs want the CPUs: a count must not depend on them."""

    def are_long(self) -> bool:
        return False


def prepare(script: Mapping[str, Any], model: str) -> None:
    """Replaces the samplers of this process, which serves the `model` of this name."""
    from transformers import AutoTokenizer, GenerationConfig

    tokenizer = AutoTokenizer.from_pretrained(script["model"])
    written = reply_writer(tokenizer)
    ends = GenerationConfig.from_pretrained(script["model"]).eos_token_id
    ends = [ends] if isinstance(ends, int) else ends

    def reply_to(prompt: Sequence[int]) -> list[int]:
        reply = prepared_reply(tokenizer.decode(prompt), script["tasks"], written)
        ids: list[int] = tokenizer.encode(reply, add_special_tokens=False)
        return ids if ids[-1] in ends else [*ids, tokenizer.eos_token_id]

    records = None if script.get("records") is None else Records(Path(script["records"]), model)
    active_requests.Sampler = prepared_sampler(reply_to, records)  # type: ignore[attr-defined]
    if script.get("works_always"):
        ahead_jobs.CpuWaits = PatientWaits  # type: ignore[attr-defined]


def run() -> None:
    script = json.loads(Path(os.environ["DISKPREFIX_SCRIPT"]).read_text(encoding="utf-8"))
    if sys.argv[1:2] == [_WORKER]:

        def serve(settings: Settings, router: RouterLine) -> None:
            prepare(script, Path(str(settings.model)).name)
            worker_program.serve_model(settings, router)

        worker_program.main(serve)
    workers.program = [sys.executable, "-P", "-m", "tools.real_agents.scripted_daemon", _WORKER]
    prepare(script, Path(script["model"]).name)
    main()


if __name__ == "__main__":
    run()
