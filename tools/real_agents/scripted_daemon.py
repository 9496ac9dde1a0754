"""`diskprefix serve` whose replies are prepared: the model computes as always, and then other tokens are taken.

The server, the chat template, the tokenizer, prefill, decoding, parsing of calls and the cache are the real ones. Only
`Sampler.sample` is replaced. DISKPREFIX_SCRIPT names a JSON file with the model's folder (`model`), the calls of the
turns (`calls`), the request that is answered with them (`task`), the text of the last reply (`last`) and, for an agent
without tools, that of the only one (`said`). Calls are written as the model's chat template writes them.
"""

from __future__ import annotations

import json
import os
import re
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from diskprefix.cli import main
from diskprefix.engine import active_requests
from diskprefix.engine.request import SamplingParams
from diskprefix.engine.sampler import Sampler
from diskprefix.engine.thought_limit import ThoughtLimit
from diskprefix.tokens import Logits, TokenIds

SIDE_REPLY = "Mending a sum"
"""The reply to titles, summaries and whatever else is not a turn of the task."""
TOOLS_OFFERED = re.compile(r"<tools>|\[AVAILABLE_TOOLS\]")
TOOL_RESULT = re.compile(r"<tool_response>|\[TOOL_RESULTS\]")
"""As the chat templates of Qwen2.5 and Mistral write them."""
_QUESTION = {"role": "user", "content": "A question?"}
_CALL_ID = "diskprefx"
"""Nine letters, which Mistral's templates demand."""


def prepared_reply(prompt: str, script: dict[str, Any], written: Callable[[str, dict[str, Any]], str]) -> str:
    """Returns the reply to a rendered prompt: the next call if it has the task, tools, and the results before.

    `written` returns the text of a call.
    """
    _, has_task, since = prompt.partition(script["task"])
    if has_task and script.get("said"):
        return str(script["said"])
    if not has_task or not TOOLS_OFFERED.search(prompt):
        return SIDE_REPLY
    turn = len(TOOL_RESULT.findall(since))
    if turn >= len(script["calls"]):
        return str(script["last"])
    return written(*script["calls"][turn])


def call_writer(tokenizer: Any) -> Callable[[str, dict[str, Any]], str]:
    """Returns a function that writes a call, by its name and arguments, as the tokenizer's chat template does."""

    def written(name: str, arguments: dict[str, Any]) -> str:
        call = {"id": _CALL_ID, "type": "function", "function": {"name": name, "arguments": arguments}}
        message = {"role": "assistant", "content": "", "tool_calls": [call]}
        asked, answered = (
            tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=len(messages) == 1)
            for messages in ([_QUESTION], [_QUESTION, message])
        )
        assert answered.startswith(asked)
        return str(answered.removeprefix(asked).partition(tokenizer.eos_token)[0])

    return written


def prepared_sampler(reply_to: Callable[[Sequence[int]], list[int]]) -> type[Sampler]:
    """Returns a class of samplers that take the tokens of `reply_to` of the prompt's tokens, one after the other."""

    class PreparedSampler(Sampler):
        def __init__(self, params: SamplingParams, prompt: TokenIds, *others: Any) -> None:
            super().__init__(params, prompt, *others)
            self._prepared = deque(reply_to(prompt.tolist()))

        def sample(self, logits: Logits, limit: ThoughtLimit | None = None) -> int:
            del logits, limit
            return self._prepared.popleft() if len(self._prepared) > 1 else self._prepared[0]

    return PreparedSampler


def run() -> None:
    from transformers import AutoTokenizer

    script = json.loads(Path(os.environ["DISKPREFIX_SCRIPT"]).read_text(encoding="utf-8"))
    tokenizer = AutoTokenizer.from_pretrained(script["model"])
    written = call_writer(tokenizer)

    def reply_to(prompt: Sequence[int]) -> list[int]:
        reply = prepared_reply(tokenizer.decode(prompt), script, written)
        return [*tokenizer.encode(reply, add_special_tokens=False), tokenizer.eos_token_id]

    active_requests.Sampler = prepared_sampler(reply_to)  # type: ignore[attr-defined]
    main()


if __name__ == "__main__":
    run()
