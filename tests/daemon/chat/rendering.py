"""The tests' tokenizer with a chat template, its renderer, and texts that are hard to cut."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from diskprefix.daemon.chat.encoder import Encoder
from diskprefix.daemon.chat.messages import Conversation
from diskprefix.daemon.chat.renderer import PromptRenderer
from diskprefix.runtime.files.read_tokenizer import read_tokenizer
from diskprefix.values import Prompt
from tests.daemon.server.chat_model import CHAT_TEMPLATE, POSITIONS, VOCAB_SIZE, write_tokenizer


def tokenizer_with(folder: Path, template: str | None = CHAT_TEMPLATE) -> Any:
    write_tokenizer(folder, chat_template=template)
    return read_tokenizer(folder, None)


def renderer_of(tokenizer: Any, *, max_positions: int = POSITIONS, **options: Any) -> PromptRenderer:
    return PromptRenderer(tokenizer, vocab_size=VOCAB_SIZE, max_positions=max_positions, **options)


def rendered(renderer: PromptRenderer, conversation: Conversation) -> Prompt:
    return renderer.replay(conversation, None).prompt


PIECES = [
    "a", "word", "  two blanks", " \n\n ", "\t", "Zürich", "\U0001f642\u200d\U0001f467", "e\u0301", "1234567", "it's",
    "<", "<|", "|>", "[", "]", '{"x": [1]}', "日本語", "\u00a0", "\u200b", "\r\n", "\ufb01", " ", "x" * 40,
]  # fmt: skip


def encoder_of(tokenizer: Any) -> Encoder:
    return Encoder(tokenizer, vocab_size=len(tokenizer), max_positions=1 << 20)


def some_text(chosen: random.Random, added: list[str]) -> str:
    pieces = [chosen.choice(added) if chosen.random() < 0.3 else chosen.choice(PIECES) for _ in range(120)]
    return "".join(pieces)


def assert_whole(tokenizer: Any, text: str, encoder: Encoder | None = None) -> None:
    (whole,) = tokenizer.backend_tokenizer.encode_batch([text], add_special_tokens=False)
    encoding = (encoder or encoder_of(tokenizer)).encode(text, param="prompt")
    assert encoding.token_ids.tolist() == whole.ids, text
    assert encoding.offsets.tolist() == [list(span) for span in whole.offsets], text
    (with_added,) = tokenizer.backend_tokenizer.encode_batch([text])
    encoding = (encoder or encoder_of(tokenizer)).encode(text, adds_special=True, param="prompt")
    assert encoding.token_ids.tolist() == with_added.ids, text
    assert encoding.offsets.tolist() == [list(span) for span in with_added.offsets], text
