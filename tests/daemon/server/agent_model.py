"""A chat template for the tiny model that writes calls and thoughts in Qwen's form, and replies in this form."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from diskprefix.daemon.engine.request import FinishEvent, FinishReason, GenerateRequest, TextEvent
from tests.daemon.server.scripted import Emit, Script, done

TEMPLATE = """\
{%- if tools %}<|im_start|>system
You may call these functions inside <tool_call></tool_call>:{% for tool in tools %}
{{ tool | tojson }}{% endfor %}<|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>{{ 'user' if message.role == 'tool' else message.role }}
{% if message.role == 'tool' %}<tool_response>
{{ message.content }}
</tool_response>{% else %}
{%- if message.reasoning_content %}<think>
{{ message.reasoning_content }}
</think>

{% endif %}{{ message.content }}
{%- for call in message.tool_calls or [] %}{% if message.content or not loop.first %}
{% endif %}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}
{%- endif %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and not enable_thinking %}<think>

</think>

{% endif %}{% endif %}"""


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def thought(text: str) -> str:
    return f"<think>\n{text}\n</think>\n\n"


def saying(*replies: str, piece: int = 3, reason: FinishReason = "stop") -> Script:
    """Answers with these texts, one for each choice, in pieces of this many characters."""

    def script(request: GenerateRequest, emit: Emit, _is_cancelled: Callable[[], bool]) -> None:
        num_tokens = 0
        for choice, text in enumerate(replies[: request.sampling.n]):
            for token, part in enumerate(pieces(text, piece)):
                emit(TextEvent(choice, part, (token,)))
                num_tokens += 1
            emit(FinishEvent(choice, reason))
        emit(done(num_tokens))

    return script


def pieces(text: str, size: int) -> Sequence[str]:
    return [text[start : start + size] for start in range(0, len(text), size)]
