"""Templates that refuse two turns of one speaker in a row, in the forms in which they do it."""

from __future__ import annotations

_HEAD = (
    "{%- set start = 1 if messages[0].role == 'system' else 0 %}{%- set turns = namespace(number=0) %}"
    "{%- if start %}[S]{{ messages[0].content }}[/S]{% endif %}"
)
_REFUSE = "{{ raise_exception('conversation roles must alternate') }}"
_TEXT = (
    "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
    "{% if part.type == 'text' %}{{ part.text | trim }}{% else %}<|image|>{% endif %}{% endfor %}{% endif %}"
)
_WRITE = (
    f"<|im_start|>{{{{ message.role }}}}\n{_TEXT}{{% for call in message.tool_calls or [] %}}<call>"
    "{{ call.function.name }}{{ call.id }}</call>{% endfor %}{{ message.tool_call_id }}<|im_end|>\n"
)
_REPLY = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"


def _alternating(counts: str, also: str = "") -> str:
    """A template that counts the messages for which the expression `counts` is true."""
    check = f"{{% if (message.role == 'user') != (turns.number % 2 == 0) %}}{_REFUSE}{{% endif %}}"
    counted = f"{{% if {counts} %}}{check}{{% set turns.number = turns.number + 1 %}}{{% endif %}}"
    return f"{_HEAD}{{% for message in messages[start:] %}}{counted}{also}{_WRITE}{{% endfor %}}{_REPLY}"


_PLAIN = "not message.tool_calls and message.role != 'tool'"
_EMPTY = "message.role != 'tool' and not message.content and not message.tool_calls"
_EMPTY_REPLY = f"message.role == 'assistant' and {_EMPTY}"


def _refusing(condition: str) -> str:
    return f"{{% if {condition} %}}{_REFUSE}{{% endif %}}"


_SYSTEM_IN_QUESTION = (
    "{% set rules = '' %}{% if messages[0].role == 'system' %}{% set rules = messages[0].content ~ '\n\n' %}"
    "{% set messages = messages[1:] %}{% endif %}{% for message in messages %}"
    f"{{% if (message.role == 'user') != (loop.index0 % 2 == 0) %}}{_REFUSE}{{% endif %}}"
    "<|im_start|>{{ message.role }}\n{% if loop.first %}{{ rules }}{% endif %}"
    f"{_TEXT}<|im_end|>\n{{% endfor %}}{_REPLY}"
)

ALTERNATING = {
    "without-calls": _alternating(_PLAIN),
    "all": _alternating("true"),
    "all-but-results": _alternating("message.role != 'tool'"),
    "no-empty-reply": _alternating(_PLAIN, _refusing(_EMPTY_REPLY)),
    "no-empty-reply-but-thoughts": _alternating(_PLAIN, _refusing(f"{_EMPTY_REPLY} and not message.reasoning_content")),
    "no-empty": _alternating(_PLAIN, _refusing(_EMPTY)),
    "system-in-question": _SYSTEM_IN_QUESTION,
    "no-system": "{% if messages[0].role == 'system' %}" + _REFUSE + "{% endif %}" + _alternating("true"),
}
"""Templates by what they count and refuse, as those of Mistral, Ministral, Gemma 2 and Gemma 3, and some in between."""
