"""The control tokens among the added tokens of a tokenizer: no text of a client may spell them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import AddedToken

IN_SYSTEM_MESSAGES = {
    # It turns thinking on: ai.google.dev/gemma/docs/core/prompt-formatting-gemma4, "Thinking mode".
    "Gemma 4": ("<|think|>",),
    # The default system message in the chat template of mistralai/Ministral-3-14B-Reasoning-2512.
    "Magistral and Ministral": ("[THINK]", "[/THINK]"),
    # The model card of microsoft/Phi-4-mini-instruct, "Tool-enabled function-calling format".
    "Phi-4-mini": ("<|tool|>", "<|/tool|>"),
    # prompt_assets/sys_prompt.yml of github.com/NousResearch/Hermes-Function-Calling. Qwen2.5 and Qwen3 have the same
    # tokens of calls.
    "Hermes": ("<tools>", "</tools>", "<tool_call>", "</tool_call>"),
}
"""Control tokens that the documentation of a family of models tells users to write into system messages."""

_MARKUP = {
    f"<{slash}{name}>"
    for slash in ("", "/")
    for name in (
        *("a", "b", "blockquote", "caption", "code", "em", "h1", "h2", "h3", "h4", "h5", "h6", "i", "img", "li", "ol"),
        *("strong", "sub", "sup", "table", "tbody", "td", "tfoot", "th", "thead", "tr", "u", "ul"),
    )
}
"""HTML tags, which are tokens in Gemma's vocabulary: a text about HTML may spell them."""


def control_texts(added: Mapping[int, AddedToken]) -> frozenset[str]:
    """Returns the texts of control tokens: all special tokens, and other added tokens with signs."""
    return frozenset(
        token.content
        for token in added.values()
        if token.content.strip("▁ \t\r\n") and (token.special or _is_control(token.content))
    )


def looks_like_a_marker(text: str) -> bool:
    """Returns whether `text` has letters and signs. Words and blanks may be added tokens, but do not separate."""
    return any(map(str.isalpha, text)) and bool(_signs(text))


def _is_control(text: str) -> bool:
    return (looks_like_a_marker(text) or len(_signs(text)) > 1) and text not in _MARKUP


def _signs(text: str) -> set[str]:
    return {char for char in text if not (char.isalnum() or char.isspace() or char in "_▁")}
