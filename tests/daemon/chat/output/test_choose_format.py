"""The formats that real chat templates are found to write; each was verified by parsing a known call back."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import pytest
from jinja2.exceptions import TemplateError
from transformers.utils.chat_template_utils import render_jinja_template

from diskprefix.daemon.api.parsed_request import ParsedRequest, thought_budget_of
from diskprefix.daemon.chat.messages import Conversation, JsonObject
from diskprefix.daemon.chat.output.choose_format import Chosen, Render, choose_format
from diskprefix.daemon.chat.output.format import ThoughtTags
from diskprefix.daemon.chat.replay import Turn
from diskprefix.daemon.engine.constraints.constrained_reply import ConstraintCompiler
from diskprefix.daemon.engine.request import Constraint, SamplingParams
from tests.daemon.chat.families.families import folder
from tests.daemon.chat.output.replies import read, tool
from tests.runtime.plan import tiny

FORMATS = {
    "hermes": (
        "MiMo-VL NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use NousResearch-Hermes-3-Llama-3.1-8B-tool_use "
        "Qwen-QwQ-32B "
        "Qwen-Qwen2.5-7B-Instruct Qwen-Qwen3-0.6B Reka-Edge Bielik-11B-v3.0-Instruct ibm-granite-granite-4.0 "
        "ibm-granite-granite-4.1"
    ),
    "qwen3-coder": "Qwen3-Coder Qwen3.5-4B StepFun3.5-Flash NVIDIA-Nemotron-3-Nano-30B-A3B-BF16",
    "seed-oss": "ByteDance-Seed-OSS",
    "glm": "GLM-4.6 inclusionai-ling-3.0-flash poolside-Laguna-XS.2",
    "glm-4.7": "GLM-4.7-Flash Spark2.5 poolside-Laguna-S-2.1",
    "minimax": "MiniMax-M2",
    "deepseek": "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B deepseek-ai-DeepSeek-R1-Distill-Llama-8B",
    "deepseek-v3.1": "deepseek-ai-DeepSeek-V3.1",
    "deepseek-v3.2": "deepseek-ai-DeepSeek-V3.2",
    "deepseek-v4": "deepseek-ai-DeepSeek-V4 deepseek-ai-DeepSeek-V4-Flash-0731",
    "mistral": "Mistral-Small-3.2-24B-Instruct-2506 mistralai-Ministral-3-14B-Reasoning-2512 "
    "unsloth-mistral-Devstral-Small-2507",
    "mistral-array": "mistralai-Mistral-Nemo-Instruct-2407",
    "llama-3": "meta-llama-Llama-3.1-8B-Instruct meta-llama-Llama-3.2-3B-Instruct meta-llama-Llama-3.3-70B-Instruct",
    "gemma-4": "google-gemma-4-31B-it google-gemma-4-31B-it-interleaved",
    "harmony": "openai-gpt-oss-120b",
    "kimi": "moonshotai-Kimi-K2",
    "command-r": "CohereForAI-c4ai-command-r-plus-tool_use",
    "command-r7b": "Cohere2MoE CohereForAI-c4ai-command-r7b-12-2024-tool_use",
    "tool-calls": "MiniMax-M1 unsloth-Apriel-1.5 Apriel-1.6-15b-Thinker-fixed",
    "nemotron": "NVIDIA-Nemotron-Nano-v2",
    "solar": "upstage-Solar-Open-100B",
    "minicpm": "openbmb-MiniCPM5-1B",
    "functionary": "meetkai-functionary-medium-v3.1",
    "apertus": "Apertus-8B-Instruct",
    "lfm2": "LFM2.5-8B-A1B",
    "gigachat": "GigaChat3.1-10B-A1.8B",
    "gigachat-3": "GigaChat3-10B-A1.8B",
    "kimi-3": "Kimi-K3",
    "minimax-3": "MiniMax-M3",
    "muse": "muse-glimmer",
    "hunyuan-3": "tencent-Hy3",
    "functionary-3.2": "meetkai-functionary-medium-v3.2",
    "none": "google-gemma-2-2b-it microsoft-Phi-3.5-mini-instruct command-r llama-cpp-rwkv-world "
    "HuggingFaceTB-SmolLM3-3B",
}
NAMED = {
    "kimi": "Kimi-K2-Instruct Kimi-K2-Thinking",
    "granite": "ibm-granite-granite-3.3-2B-Instruct",
    "functools": "fireworks-ai-llama-3-firefunction-v2",
    "deepseek": "llama-cpp-deepseek-r1",
    "lfm2": "LFM2-8B-A1B LFM2.5-Instruct",
}
"""Those that write no calls, or cannot be rendered with them."""
SPECIAL = {
    "LFM2-8B-A1B": ["<|tool_call_start|>", "<|tool_call_end|>"],
    "LFM2.5-Instruct": ["<|tool_call_start|>", "<|tool_call_end|>"],
    "Mistral-Small-3.2-24B-Instruct-2506": ["</s>"],
    "mistralai-Ministral-3-14B-Reasoning-2512": ["</s>"],
    "unsloth-mistral-Devstral-Small-2507": ["</s>"],
    "GigaChat3.1-10B-A1.8B": ["<|message_sep|>"],
    "meetkai-functionary-medium-v3.2": ["<|eot_id|>"],
}
"""Special tokens of their tokenizers that matter here."""
WRITTEN = [(format, name) for format, names in FORMATS.items() for name in names.split()]
TAKING = [name for format, name in WRITTEN if format != "none"]


def template_named(name: str) -> str:
    return (folder() / "templates" / f"{name}.jinja").read_text(encoding="utf-8")


def renderer_of(template: str) -> Render:
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

    return render


def chosen(template: str, special: Sequence[str] = ()) -> Chosen:
    added = {token: index for index, token in enumerate(special)}
    return choose_format(template, renderer_of(template), special=special, added=added)


@pytest.mark.cases(20)
@pytest.mark.parametrize(
    ("format", "name"), [*WRITTEN, *((format, name) for format, names in NAMED.items() for name in names.split())]
)
def test_the_written_call_or_else_the_tags_choose_the_format(format: str, name: str) -> None:
    assert chosen(template_named(name), SPECIAL.get(name, ())).format.name == format


OTHER_FORMS = {
    *("ByteDance-Seed-OSS", "LFM2.5-8B-A1B", "MiniMax-M1", "Mistral-Small-3.2-24B-Instruct-2506"),
    *(
        "CohereForAI-c4ai-command-r-plus-tool_use",
        "deepseek-ai-DeepSeek-R1-Distill-Llama-8B",
        "upstage-Solar-Open-100B",
    ),
    *("inclusionai-ling-3.0-flash", "mistralai-Mistral-Nemo-Instruct-2407", "Apriel-1.6-15b-Thinker-fixed"),
}
"""Templates that write ids, other quotes, other blanks or an end that the grammar of their format does not have."""


@pytest.mark.parametrize("name", [name for _, name in WRITTEN])
def test_the_grammar_of_calls_takes_the_call_as_the_template_writes_it(name: str) -> None:
    assert chosen(template_named(name), SPECIAL.get(name, ())).format.holds_calls == (name not in OTHER_FORMS)


def test_equal_openings_are_told_apart_by_their_ends() -> None:
    template = "{{ tools }}{% for message in messages %}{{ message.content }}{% endfor %}"
    tags = ["<|tool_call|>", "<|/tool_call|>"]
    assert chosen(template, tags).format.name == "phi-4-mini"
    assert chosen(template, tags[:1]).format.name == "granite"
    assert chosen(template.removeprefix("{{ tools }}"), tags).format.name == "none"


OF_NO_PACKAGE = """{{- tools | tojson }}
{%- for message in messages %}
    {%- if message.role == "assistant" %}{{ "[assistant]" }}{% else %}{{ "[other]" + message.content }}{% endif %}
    {%- for call in message.tool_calls | map(attribute="function") %}{{ BEGIN if loop.first else "\\n" }}
        {%- set json = call.arguments | tojson %}{{ CALL }}{{ END if loop.last }}
    {%- else %}{% if message.role == "assistant" %}{{ ANSWER }}{% endif %}{% endfor %}
{%- endfor %}
{%- if add_generation_prompt %}{{ "[assistant]" }}{% endif %}"""
# What the templates of other models write: before calls, for each, behind them, and as an answer.
OTHERS = {
    "hunyuan": (
        '"<tool_calls>"',
        '"<tool_call>" ~ call.name ~ "\\n```json\\n" ~ json ~ "\\n```</tool_call>"',
        '"</tool_calls>"',
        "message.content",
    ),
    "olmo-3": (
        '"<function_calls>"',
        'call.name ~ "(text=\\"" ~ call.arguments.text ~ "\\", count=" ~ call.arguments.count ~ ")"',
        '"</function_calls>"',
        "message.content",
    ),
    "longcat": (
        '""',
        """'<longcat_tool_call>\\n{"name": "' ~ call.name ~ '", "arguments": ' ~ json ~ "}\\n</longcat_tool_call>\"""",
        '""',
        "message.content",
    ),
    "longcat-2": (
        '""',
        '"<longcat_tool_call>" ~ call.name ~ "\\n<longcat_arg_key>text</longcat_arg_key>\\n<longcat_arg_value>" '
        '~ call.arguments.text ~ "</longcat_arg_value>\\n<longcat_arg_key>count</longcat_arg_key>" '
        '~ "\\n<longcat_arg_value>" '
        '~ call.arguments.count ~ "</longcat_arg_value>\\n</longcat_tool_call>"',
        '""',
        "message.content",
    ),
    "step-3": (
        '"<｜tool_calls_begin｜>\\n"',
        """'<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="' ~ call.name"""
        """ ~ '">\\n<steptml:parameter name="text">' ~ call.arguments.text ~ '</steptml:parameter>\\n'"""
        """ ~ '<steptml:parameter name="count">'"""
        """ ~ call.arguments.count ~ '</steptml:parameter>\\n</steptml:invoke><｜tool_call_end｜>'""",
        '"\\n<｜tool_calls_end｜>"',
        "message.content",
    ),
    # Llama 4.
    "llama-3": (
        '"<|start|><|end|>"',
        """'{"name": "' ~ call.name ~ '", "parameters": ' ~ json ~ "}\"""",
        '""',
        "message.content",
    ),
    # ERNIE 4.5.
    "hermes": (
        '""',
        '"<tool_call>\\n" ~ call | tojson ~ "\\n</tool_call>"',
        '""',
        '"<response>\\n" ~ message.content ~ "\\n</response>\\n"',
    ),
}


def of_no_package(format: str) -> str:
    template = OF_NO_PACKAGE
    for word, written in zip(("BEGIN", "CALL", "END", "ANSWER"), OTHERS[format], strict=True):
        template = template.replace(word, written)
    return template


@pytest.mark.parametrize("format", OTHERS)
def test_a_template_of_no_package_writes_the_format_that_is_chosen_for_it(format: str) -> None:
    assert chosen(of_no_package(format), ["<|start|>", "<|end|>"]).format.name == format


HYPERCLOVA = """{%- if tools %}<|im_start|>tool_list\n{{ tools | map(attribute="function") | list | tojson }}<|im_end|>
{% endif %}
{%- for message in messages %}
    {%- if message.tool_calls %}{{ "<|im_start|>assistant -> tool/function_call\\n[" }}
        {%- for call in message.tool_calls | map(attribute="function") %}
            {{- '{"name": "' ~ call.name ~ '", "arguments": ' ~ (call.arguments | tojson) ~ "}" }}
            {{- ", " if not loop.last }}
        {%- endfor %}{{ "]<|im_end|><|stop|>\\n" }}
    {%- else %}{% set role = "tool/function_call" if message.role == "tool" else message.role %}
        {{- "<|im_start|>" ~ role ~ "\\n" ~ message.content ~ "<|im_end|>\\n" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ "<|im_start|>assistant" }}{% endif %}"""
"""As the page of HyperCLOVA X SEED Think 14B describes it."""


def test_the_header_of_a_message_that_the_prompt_begins_is_read_to_its_end() -> None:
    special = ["<|im_start|>", "<|im_end|>", "<|stop|>", "<|endofturn|>"]
    format = chosen(HYPERCLOVA, special).format
    assert (format.name, format.holds_calls, format.special_tokens) == ("hyperclova", True, frozenset(special))
    prompt = renderer_of(HYPERCLOVA)([{"role": "user", "content": "A question"}], [], True)
    reply = "/think\nI must look.<|im_end|>\n<|im_start|>assistant -> tool/function_call\n"
    turn = read(
        format, f'{reply}[{{"name": "get_weather", "arguments": {{"city": "Oslo"}}}}]', [tool("get_weather")], prompt
    )
    assert (turn.reasoning, turn.parsed_calls) == ("I must look.", [("get_weather", {"city": "Oslo"})])


ONLY_IDS = """{%- for message in messages %}
    {%- set name = message.name or message.role %}
    {%- if message.role == "assistant" %}<|im_assistant|>{{ name }}<|im_middle|>{{ message.content }}
        {%- if message.tool_calls %}<|tool_calls_section_begin|>
            {%- for call in message.tool_calls %}<|tool_call_begin|>{{ call.id }}<|tool_call_argument_begin|>
                {%- set arguments = call.function.arguments %}
                {{- arguments if arguments is string else arguments | tojson }}
                {{- "<|tool_call_end|>" }}
            {%- endfor %}<|tool_calls_section_end|>
        {%- endif %}
    {%- elif message.role == "tool" %}<|im_system|>{{ name }}<|im_middle|>## Return of {{ message.tool_call_id }}
{{ message.content }}
    {%- else %}<|im_user|>{{ name }}<|im_middle|>{{ message.content }}
    {%- endif %}<|im_end|>
{%- endfor %}
{%- if add_generation_prompt %}<|im_assistant|>assistant<|im_middle|>{% endif %}"""
"""As the templates of Kimi K2 0905, Kimi K2.5 and Kimi Linear: of a call, they write the id and the arguments."""


def test_ids_of_calls_have_the_name_if_the_template_writes_no_other() -> None:
    format, form = chosen(ONLY_IDS)
    assert (format.name, format.holds_calls, form.call_ids) == ("kimi", True, "named")
    call = {"id": "call_0", "type": "function", "function": {"name": "get_weather", "arguments": {"city": "Oslo"}}}
    messages: list[JsonObject] = [
        {"role": "user", "content": "A question"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_0", "content": "RESULT"},
    ]
    text = renderer_of(ONLY_IDS)(form.applied(messages), [], True)
    assert "<|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>" in text
    assert "## Return of functions.get_weather:0\nRESULT" in text
    reply = text.partition("<|im_assistant|>assistant<|im_middle|>")[2].partition("<|im_end|>")[0]
    assert read(format, [reply], [tool("get_weather")]).parsed_calls == [("get_weather", {"city": "Oslo"})]


def test_tags_around_each_answer_of_a_template_are_left_out() -> None:
    reply = "<response>\nUse `<b>`.\n</response>\n"
    assert read(chosen(of_no_package("hermes")).format, [reply], []).content == "Use `<b>`."
    assert read(chosen(of_no_package("hunyuan")).format, [reply], []).content == reply


@pytest.mark.parametrize("name", [*TAKING, "only ids"])
def test_a_call_is_written_whatever_its_id_and_arguments_are(name: str) -> None:
    template, call_id = ONLY_IDS if name == "only ids" else template_named(name), "call_0-long.id"
    form = chosen(template, SPECIAL.get(name, ())).form
    both: tuple[object, ...] = ({}, "{?")
    for arguments in both:
        function = {"name": "get_weather", "arguments": arguments}
        messages: list[JsonObject] = [
            {"role": "user", "content": "A question"},
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [{"id": call_id, "type": "function", "function": function}],
            },
            {"role": "tool", "tool_call_id": call_id, "content": "RESULT"},
        ]
        text = renderer_of(template)(form.applied(messages), [], False)
        assert "RESULT" in text.partition("get_weather")[2]


def test_a_template_that_refuses_results_without_the_tools_name_gets_it() -> None:
    """As FunctionGemma's: "Invalid tool response: 'name' must be provided."."""
    template = of_no_package("hermes")
    nameless = "{% for m in messages if m.role == 'tool' and not m.name %}{{ raise_exception('no name') }}{% endfor %}"
    assert [chosen(text).form.named_results for text in (template, nameless + template)] == [False, True]


@pytest.mark.parametrize(
    ("name", "tags"),
    [
        ("Qwen-Qwen3-0.6B", ("<think>", "</think>")),
        ("ByteDance-Seed-OSS", ("<seed:think>", "</seed:think>")),
        ("mistralai-Ministral-3-14B-Reasoning-2512", ("[THINK]", "[/THINK]")),
        ("google-gemma-4-31B-it", ("<|channel>thought", "<channel|>")),
        ("openai-gpt-oss-120b", (None, "<|channel|>final<|message|>", "<|end|><|start|>assistant")),
        ("Qwen-Qwen2.5-7B-Instruct", None),
        ("microsoft-Phi-3.5-mini-instruct", None),
    ],
)
def test_the_tags_of_reasoning_are_those_of_the_template(name: str, tags: tuple[Any, ...] | None) -> None:
    format = chosen(template_named(name)).format
    assert format.thought == (None if tags is None else ThoughtTags(*tags))
    if format.thought is not None:
        # What ends a thought whose budget is spent is read as its end.
        begin = format.thought.begin or "<|channel|>analysis<|message|>"
        closed = f"{begin}I must{format.thought.before_end}{format.thought.end}The answer"
        turn = Turn.of_deltas(format.parser([], "").feed(closed))
        assert (turn.reasoning.strip(), turn.content) == ("I must", "The answer")
        # And seen at once, though the parser says nothing of it: a budget that is spent here closes nothing twice.
        request = ParsedRequest(
            prompt=Conversation([], tools=[tool("get_weather")]), sampling=SamplingParams(), thinking_budget=9
        )
        budget = thought_budget_of(request, format, "", lambda text: [len(text)], ())
        assert budget is not None
        see, see_call = budget.new_watch(), budget.new_watch()
        see(begin)
        assert see("I must")
        assert not see(format.thought.before_end or format.thought.end)
        assert not budget.new_watch()(closed)
        if name.startswith("Qwen"):
            # The reply may end with a call inside a thought. A thought that goes on is one.
            assert see_call(f"{begin}I must")
            assert not see_call('\n<tool_call>\n{"name": "get_weather", "arguments": {"a": 1')
            assert not see_call("}}\n</tool_call>\n")
            assert see_call("so")


def test_only_special_tokens_that_are_tags_of_the_format_are_shown() -> None:
    special = ["[TOOL_CALLS]", "[INST]", "[ARGS]", "</s>"]
    format = chosen(template_named("unsloth-mistral-Devstral-Small-2507"), special).format
    assert format.special_tokens == {"[TOOL_CALLS]", "[ARGS]"}


def test_a_tag_in_the_system_part_is_no_reasoning_tag() -> None:
    special = ["<|think|>", "<|channel>", "<channel|>"]
    assert chosen(template_named("google-gemma-4-31B-it"), special).format.special_tokens == {
        "<|channel>",
        "<channel|>",
    }


def test_a_format_that_does_not_give_the_call_back_is_not_used(caplog: pytest.LogCaptureFixture) -> None:
    template = template_named("Qwen-Qwen2.5-7B-Instruct").replace('"arguments": ', '"wants": ')
    assert template != template_named("Qwen-Qwen2.5-7B-Instruct")
    with caplog.at_level(logging.WARNING, "diskprefix"):
        assert chosen(template).format.name == "none"
    assert len(caplog.records) == 1
    assert "format that is not known" in caplog.text


@pytest.mark.parametrize("name", ["Qwen-Qwen2.5-7B-Instruct", "Qwen3-Coder"])
def test_calls_can_be_forced_with_added_tokens_as_tags(name: str) -> None:
    """Those of Qwen are. Forced as letters they were refused as soon as the model had written the tokens."""
    tokenizer = tiny.tokenizer()
    tokenizer.add_tokens(["<tool_call>", "</tool_call>"])
    added = {token.content: index for index, token in tokenizer.added_tokens_decoder.items()}
    format = choose_format(template_named(name), renderer_of(template_named(name)), special=[], added=added).format
    weather = tool("get_weather", city={"enum": ["Oslo"]})
    compiler = ConstraintCompiler(tokenizer, {tokenizer.eos_token_id}, len(tokenizer))
    reply = compiler.begin_reply(Constraint(kind="lark", source=format.call_grammar([weather], many=False)))
    tokens: list[int] = []
    while not reply.is_complete:
        forbidden = reply.forbidden()
        assert forbidden is not None
        tokens.append(int((~forbidden).nonzero()[0][-1]))
        assert reply.accept_token(tokens[-1])
    compiler.close()
    assert read(format, [tokenizer.decode(tokens)], [weather]).parsed_calls == [("get_weather", {"city": "Oslo"})]
    assert added["<tool_call>"] in tokens
