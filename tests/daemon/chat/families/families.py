"""The families: which vocabulary and which template belong together, and what is known of them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from diskprefix.daemon.chat.renderer import PromptRenderer
from diskprefix.runtime.files.tokenizer import Tokenizer
from tests.daemon.chat.families.sources import SourcesMissing, sources

POSITIONS = 32_768


@dataclass(frozen=True)
class Family:
    """A model family's tokenizer and chat template.

    `vocabulary` and `template` name files of `sources`. `special` and `plain` are added tokens that the vocabulary-only
    file lacks and the published tokenizer has (`plain`: not marked special there). `first_turn` is how the template
    begins the turn of the first user, `reply` the turn of the assistant: the text up to and with its last marker.
    """

    name: str
    vocabulary: str
    template: str
    bos: str | None
    eos: str
    first_turn: str
    reply: str
    special: tuple[str, ...] = ()
    plain: tuple[str, ...] = ()
    tool_template: str | None = None
    """A template of its own for conversations with tools."""
    takes_system: bool = True
    takes_tools: bool = True
    own_vocabulary: bool = True
    """False: only the template is real; the vocabulary is another family's with this one's control tokens."""


QWEN_PLAIN = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
QWEN_SPECIAL = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>")
HARMONY = ("<|start|>", "<|message|>", "<|channel|>", "<|end|>", "<|call|>", "<|return|>", "<|constrain|>")
LLAMA_3_TURN = "<|start_header_id|>user<|end_header_id|>"
LLAMA_3_REPLY = "<|start_header_id|>assistant<|end_header_id|>"

FAMILIES = (
    Family(
        "qwen2.5", "qwen2", "Qwen-Qwen2.5-7B-Instruct", None, "<|im_end|>", "<|im_start|>", "<|im_start|>",
        special=QWEN_SPECIAL, plain=QWEN_PLAIN[:2],
    ),
    Family(
        "qwen3", "qwen2", "Qwen-Qwen3-0.6B", None, "<|im_end|>", "<|im_start|>", "<|im_start|>",
        special=QWEN_SPECIAL, plain=QWEN_PLAIN,
    ),
    Family(
        "qwen3.5", "qwen2", "Qwen3.5-4B", None, "<|im_end|>", "<|im_start|>", "<|im_start|>",
        special=QWEN_SPECIAL, plain=QWEN_PLAIN,
    ),
    Family(
        "llama-3.1", "llama-bpe", "meta-llama-Llama-3.1-8B-Instruct", "<|begin_of_text|>", "<|eot_id|>", LLAMA_3_TURN,
        LLAMA_3_REPLY, special=("<|python_tag|>", "<|eom_id|>"),
    ),
    Family(
        "llama-3.2", "llama-bpe", "meta-llama-Llama-3.2-3B-Instruct", "<|begin_of_text|>", "<|eot_id|>", LLAMA_3_TURN,
        LLAMA_3_REPLY, special=("<|python_tag|>", "<|eom_id|>"),
    ),
    Family("gemma-4", "gemma-4", "google-gemma-4-31B-it", "<bos>", "<eos>", "<|turn>", "<|turn>"),
    Family(
        "gemma-2", "gemma-4", "google-gemma-2-2b-it", "<bos>", "<eos>", "<start_of_turn>", "<start_of_turn>",
        special=("<start_of_turn>", "<end_of_turn>"), takes_system=False, takes_tools=False, own_vocabulary=False,
    ),
    Family(
        "mistral-nemo", "mistral-nemo", "mistralai-Mistral-Nemo-Instruct-2407", "<s>", "</s>", "[INST]", "[/INST]",
    ),
    Family(
        "phi-3.5", "phi-3", "microsoft-Phi-3.5-mini-instruct", "<s>", "<|endoftext|>", "<|user|>", "<|assistant|>",
        takes_tools=False,
    ),
    Family(
        "deepseek-v3.1", "deepseek-v3", "deepseek-ai-DeepSeek-V3.1", "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>",
        "<｜User｜>", "<｜Assistant｜>",
    ),
    Family(
        "command-r", "command-r", "command-r", "<BOS_TOKEN>", "<|END_OF_TURN_TOKEN|>",
        "<|START_OF_TURN_TOKEN|><|USER_TOKEN|>", "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>",
        tool_template="CohereForAI-c4ai-command-r-plus-tool_use",
    ),
    Family(
        "gpt-oss", "gpt-2", "openai-gpt-oss-120b", None, "<|return|>", "<|start|>user<|message|>", "<|start|>",
        special=HARMONY, own_vocabulary=False,
    ),
)  # fmt: skip


def named(name: str) -> Family:
    return next(family for family in FAMILIES if family.name == name)


@cache
def _found() -> Path | SourcesMissing:
    try:
        return sources()
    except SourcesMissing as error:
        return error


def folder() -> Path:
    """The sources; skips the test where they cannot be had, which is tried once."""
    sources = _found()
    if isinstance(sources, SourcesMissing):
        pytest.skip(f"the tokenizers of the model families are not here: {sources}")
    return sources


@cache
def tokenizer_of(family: Family) -> Any:
    """As the daemon makes it."""
    backend = Backend.from_file(str(folder() / f"{family.vocabulary}.json"))
    named = {"bos_token": family.bos, "eos_token": family.eos}
    tokenizer = Tokenizer(backend, {name: text for name, text in named.items() if text is not None})
    backend.add_tokens([AddedToken(text, special=True) for text in tokenizer.special_tokens_map.values()])
    added = [AddedToken(text, special=True, normalized=False) for text in family.special]
    added += [AddedToken(text, special=False, normalized=False) for text in family.plain]
    backend.add_tokens(added)
    tokenizer.chat_template = template = _template(family.template)
    if family.tool_template:
        tokenizer.chat_template = {"default": template, "tool_use": _template(family.tool_template)}
    # Each encoder reads it, and each time a hundred thousand strings would be made.
    tokenizer.get_vocab = cache(tokenizer.get_vocab)  # type: ignore[method-assign]
    return tokenizer


def _template(name: str) -> str:
    return (folder() / "templates" / f"{name}.jinja").read_text(encoding="utf-8")


@cache
def renderer_of(family: Family) -> PromptRenderer:
    tokenizer = tokenizer_of(family)
    return PromptRenderer(tokenizer, vocab_size=len(tokenizer), max_positions=POSITIONS)
