"""The tests' tokenizer with a chat template, its renderer, and prompts without remembered replies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from diskprefix.chat.messages import Conversation
from diskprefix.chat.renderer import PromptRenderer
from diskprefix.nouns import Prompt
from tests.server.chat_model import CHAT_TEMPLATE, POSITIONS, VOCAB_SIZE, write_tokenizer


def tokenizer_with(folder: Path, template: str | None = CHAT_TEMPLATE) -> Any:
    from transformers import AutoTokenizer

    write_tokenizer(folder, chat_template=template)
    return AutoTokenizer.from_pretrained(folder)


def renderer_of(tokenizer: Any, *, max_positions: int = POSITIONS, **options: Any) -> PromptRenderer:
    return PromptRenderer(tokenizer, vocab_size=VOCAB_SIZE, max_positions=max_positions, **options)


def rendered(renderer: PromptRenderer, conversation: Conversation) -> Prompt:
    """Returns the prompt of a conversation, all of it as the template writes it."""
    return renderer.replay(conversation, None).prompt
