"""Which format real chat templates are found to write; each was verified by parsing a known call back."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from jinja2.exceptions import TemplateError
from transformers.utils.chat_template_utils import render_jinja_template

from diskprefix.chat.output.choose import choose_format
from diskprefix.chat.output.format import OutputFormat
from tests.chat.families.families import folder

FORMATS = {
    "hermes": (
        "MiMo-VL NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use NousResearch-Hermes-3-Llama-3.1-8B-tool_use "
        "Qwen-QwQ-32B "
        "Qwen-Qwen2.5-7B-Instruct Qwen-Qwen3-0.6B Reka-Edge Bielik-11B-v3.0-Instruct ibm-granite-granite-4.0 "
        "ibm-granite-granite-4.1"
    ),
    "qwen3-coder": "Qwen3-Coder Qwen3.5-4B StepFun3.5-Flash NVIDIA-Nemotron-3-Nano-30B-A3B-BF16",
    "seed-oss": "ByteDance-Seed-OSS",
    "glm": "GLM-4.6",
    "minimax": "MiniMax-M2",
    "deepseek": "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B",
    "deepseek-v3.1": "deepseek-ai-DeepSeek-V3.1",
    "deepseek-v4": "deepseek-ai-DeepSeek-V4 deepseek-ai-DeepSeek-V4-Flash-0731",
    "mistral": "Mistral-Small-3.2-24B-Instruct-2506 mistralai-Ministral-3-14B-Reasoning-2512 "
    "unsloth-mistral-Devstral-Small-2507",
    "mistral-array": "mistralai-Mistral-Nemo-Instruct-2407",
    "llama-3": "meta-llama-Llama-3.1-8B-Instruct meta-llama-Llama-3.2-3B-Instruct meta-llama-Llama-3.3-70B-Instruct",
    "gemma-4": "google-gemma-4-31B-it google-gemma-4-31B-it-interleaved",
    "harmony": "openai-gpt-oss-120b",
    "kimi": "moonshotai-Kimi-K2",
    "command-r7b": "Cohere2MoE CohereForAI-c4ai-command-r7b-12-2024-tool_use",
    "tool-calls": "MiniMax-M1 unsloth-Apriel-1.5 Apriel-1.6-15b-Thinker-fixed",
    "nemotron": "NVIDIA-Nemotron-Nano-v2",
    "solar": "upstage-Solar-Open-100B",
    "minicpm": "openbmb-MiniCPM5-1B",
    "functionary": "meetkai-functionary-medium-v3.1",
    "apertus": "Apertus-8B-Instruct",
    "lfm2": "LFM2.5-8B-A1B",
    "gigachat": "GigaChat3.1-10B-A1.8B",
    "none": "google-gemma-2-2b-it microsoft-Phi-3.5-mini-instruct command-r llama-cpp-rwkv-world Kimi-K3",
}


def template_named(name: str) -> str:
    return (folder() / "templates" / f"{name}.jinja").read_text(encoding="utf-8")


def chosen(template: str, special: dict[str, int] | None = None) -> OutputFormat:
    def render(messages: list[Any], tools: list[Any], add_generation_prompt: bool) -> str:
        try:
            texts, _ = render_jinja_template(
                [messages],
                tools=tools,
                chat_template=template,
                add_generation_prompt=add_generation_prompt,
                bos_token="<s>",
                eos_token="</s>",
            )
        except (TemplateError, TypeError, ValueError, KeyError, AttributeError, IndexError):
            return ""
        return str(texts[0])

    return choose_format(template, render, special or {})


@pytest.mark.parametrize(("format", "name"), [(name, one) for name, all_ in FORMATS.items() for one in all_.split()])
def test_a_template_writes_the_format_that_is_chosen_for_it(format: str, name: str) -> None:
    assert chosen(template_named(name)).name == format


@pytest.mark.parametrize(
    ("name", "tags"),
    [
        ("Qwen-Qwen3-0.6B", ("<think>", "</think>")),
        ("ByteDance-Seed-OSS", ("<seed:think>", "</seed:think>")),
        ("mistralai-Ministral-3-14B-Reasoning-2512", ("[THINK]", "[/THINK]")),
        ("google-gemma-4-31B-it", ("<|channel>thought", "<channel|>")),
        ("openai-gpt-oss-120b", (None, "<|channel|>final<|message|>")),
        ("Qwen-Qwen2.5-7B-Instruct", None),
        ("microsoft-Phi-3.5-mini-instruct", None),
    ],
)
def test_the_tags_of_reasoning_are_those_of_the_template(name: str, tags: tuple[str | None, str] | None) -> None:
    assert chosen(template_named(name)).thought == tags


def test_only_special_tokens_that_are_tags_of_the_format_are_shown() -> None:
    special = {"[TOOL_CALLS]": 5, "[INST]": 3, "[ARGS]": 32, "</s>": 2}
    format = chosen(template_named("unsloth-mistral-Devstral-Small-2507"), special)
    assert format.special_tokens == {"[TOOL_CALLS]", "[ARGS]"}


def test_a_format_that_does_not_give_the_call_back_is_not_used(caplog: pytest.LogCaptureFixture) -> None:
    template = template_named("Qwen-Qwen2.5-7B-Instruct").replace('"arguments": ', '"wants": ')
    assert template != template_named("Qwen-Qwen2.5-7B-Instruct")
    with caplog.at_level(logging.WARNING, "diskprefix"):
        assert chosen(template).name == "none"
    assert len(caplog.records) == 1
    assert "format that is not known" in caplog.text
