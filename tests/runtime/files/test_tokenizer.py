"""A folder's tokenizer and its chat templates give what transformers gives, without an import of transformers."""

from __future__ import annotations

import json
import math
import random
import sys
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from jinja2.exceptions import TemplateError
from tokenizers import AddedToken, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from transformers.models.auto import tokenization_auto

from diskprefix.runtime.files import folder_tokenizer, template_sandbox
from diskprefix.runtime.files.chat_template import render_template
from diskprefix.runtime.files.read_tokenizer import read_tokenizer
from diskprefix.runtime.files.template_sandbox import BoundedSandbox
from diskprefix.runtime.files.tokenizer import Tokenizer
from diskprefix.thread_work import NobodyWaits, ThreadWork, doing
from tests.daemon.chat.families.families import folder as sources
from tests.daemon.server.chat_model import write_tokenizer

TEXTS = [
    "",
    " ",
    "a",
    "  Hello,  world!\n\n\tIt's 12345.67 \r\n\n x = [1];{}  ",
    "Zürich e\u0301 \ufb01 ＜s＞ 日本語 가 กำ \u00a0\u200b\u3000.",
    "\U0001f642\u200d\U0001f467\U0001f3fd \u2028 \ufffd \x00 \x7f",
    "<s> </s><|im_start|>system\n<|im_end|> <bos><eos>▁a ▁▁<0x0A><|endoftext|><unk> [INST]",
    "don't DON'T we'LL <|eot_id|>" * 20,
    " " * 300 + "\n" * 50,
    "".join(random.Random(7).choices("ab cde\n.é1 日🦀<|>", k=30_000)),
]
MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What's the weather in Oslo & Rome? <b>ü</b> "},
    {
        "role": "assistant",
        "content": "I look.",
        "reasoning_content": "Hm.",
        "tool_calls": [
            {"id": "call12345", "type": "function", "function": {"name": "weather", "arguments": {"city": "Oslo ü"}}}
        ],
    },
    {"role": "tool", "tool_call_id": "call12345", "name": "weather", "content": "rain", "tool_calls": None},
    {"role": "assistant", "content": "It rains. "},
]
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


def assert_equal(folder: Path) -> Tokenizer:
    """Compares a tokenizer with transformers' own, which the first may not need."""
    found, wanted = folder_tokenizer._made(folder), AutoTokenizer.from_pretrained(folder)
    for text, adds in product(TEXTS, (True, False)):
        ids = wanted(text, add_special_tokens=adds)["input_ids"]
        assert found.encode(text, add_special_tokens=adds) == ids, text[:80]
        (one,) = found.backend_tokenizer.encode_batch([text], add_special_tokens=adds)
        assert one.offsets == wanted(text, add_special_tokens=adds, return_offsets_mapping=True)["offset_mapping"]
        assert found.decode(ids) == wanted.decode(ids)
        assert found.decode(ids, skip_special_tokens=True) == wanted.decode(ids, skip_special_tokens=True)
    chosen = random.Random(5)
    for _ in range(50):
        # Pieces of characters, which no text gives.
        ids = [chosen.randrange(len(wanted)) for _ in range(12)]
        assert found.decode(ids) == wanted.decode(ids)
    assert len(found) == len(wanted)
    assert found.get_vocab() == wanted.get_vocab()
    assert found.get_added_vocab() == wanted.get_added_vocab()
    added, of_wanted = found.added_tokens_decoder, wanted.added_tokens_decoder
    assert {i: repr(token) for i, token in added.items()} == {i: repr(token) for i, token in of_wanted.items()}
    names = ("special_tokens_map", "all_special_tokens", "all_special_ids", "extra_special_tokens", "chat_template")
    for name in (
        *names,
        "bos_token",
        "eos_token",
        "bos_token_id",
        "eos_token_id",
        "name_or_path",
        "split_special_tokens",
    ):
        assert getattr(found, name) == getattr(wanted, name), name
    return found


def write(folder: Path, tokenizer: Path | Backend, model_type: str | None = None, **settings: Any) -> Path:
    folder.mkdir(exist_ok=True)
    if isinstance(tokenizer, Path):
        (folder / "tokenizer.json").symlink_to(tokenizer)
    else:
        tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps({"model_type": model_type or "llama"}))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


SMALL = ("gpt-2", "llama-spm", "phi-3")
PUBLISHED = [
    ("command-r", "cohere", "CohereTokenizerFast", {}),
    ("deepseek-coder", "llama", "LlamaTokenizerFast", {"bos_token": "<｜begin▁of▁sentence｜>"}),
    ("deepseek-llm", "llama", "PreTrainedTokenizerFast", {}),
    ("deepseek-v3", "deepseek_v3", "LlamaTokenizerFast", {"pad_token": {"__type": "AddedToken", "content": "<pad>"}}),
    ("gemma-4", "gemma3", "GemmaTokenizer", {"boi_token": "<start_of_image>"}),
    ("gpt-2", "gpt2", "GPT2Tokenizer", {"add_prefix_space": True}),
    ("gpt-2", "olmo", "GPTNeoXTokenizerFast", {}),
    ("llama-bpe", "llama", "PreTrainedTokenizerFast", {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"}),
    ("llama-spm", "llama", "LlamaTokenizer", {"bos_token": "<s>", "legacy": False}),
    ("llama-spm", "llama", "LlamaTokenizerFast", {"legacy": True, "clean_up_tokenization_spaces": True}),
    ("llama-spm", "mistral", "LlamaTokenizer", {"add_prefix_space": False}),
    ("mistral-nemo", "mistral", "PreTrainedTokenizerFast", {"bos_token": "<s>", "eos_token": "</s>"}),
    ("phi-3", "phi3", "LlamaTokenizer", {"eos_token": "<|endoftext|>"}),
    ("qwen2", "qwen2", "LlamaTokenizerFast", {"additional_special_tokens": ["<|im_start|>", "<|new|>"]}),
    ("qwen2", "qwen3", "Qwen2Tokenizer", {"eos_token": "<|im_end|>", "add_bos_token": True}),
    ("qwen35", "qwen3_5", "Qwen2Tokenizer", {"eos_token": "<|im_end|>", "image_token": "<|image_pad|>"}),
    ("refact", "gpt_bigcode", "GPT2TokenizerFast", {}),
    ("starcoder", "starcoder2", "GPT2Tokenizer", {"split_special_tokens": True}),
]


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    ("vocabulary", "model_type", "class_name", "settings"),
    [pytest.param(*one, marks=[] if one[0] in SMALL else [pytest.mark.slow]) for one in PUBLISHED],
)
def test_published_tokenizers_give_the_tokens_of_transformers(
    vocabulary: str, model_type: str, class_name: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    file = sources() / f"{vocabulary}.json"
    assert_equal(write(tmp_path / "made", file, model_type, tokenizer_class=class_name, **settings))


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("small")
    write_tokenizer(folder)
    return folder / "tokenizer.json"


def added(*texts: str, **options: Any) -> dict[str, Any]:
    base = {"lstrip": False, "rstrip": False, "normalized": False, "single_word": False, "special": True}
    return {str(300 + number): {"content": text} | base | options for number, text in enumerate(texts)}


SETTINGS: list[dict[str, Any]] = [
    {},
    {"add_bos_token": True, "bos_token": "<|im_start|>"},
    {"bos_token": "<new>", "eos_token": "<new>", "pad_token": None, "cls_token": "<cls>"},
    {"bos_token": {"__type": "AddedToken", "content": "<new>", "lstrip": True, "normalized": True}},
    {"extra_special_tokens": ["<b>", "<a>"], "eos_token": "<a>"},
    {"extra_special_tokens": {"image_token": "<image>", "boi_token": "<boi>"}, "eoi_token": "<eoi>"},
    {"additional_special_tokens": ["<b>", "<|im_end|>"], "extra_special_tokens": []},
    {"model_specific_special_tokens": {"image_token": "<image>"}},
    {"model_specific_special_tokens": {"image_token": "<image>"}, "boi_token": "<boi>"},
    {"added_tokens_decoder": added("<b>", "<a>", rstrip=True) | added("x", special=False), "eos_token": "x"},
    {"added_tokens_decoder": added("<|im_end|>", "a", special=False, normalized=True), "unk_token": "<a>"},
    {"add_prefix_space": True},
    {"add_prefix_space": False, "legacy": True, "split_special_tokens": True},
    {"chat_template": [{"name": "default", "template": "a"}, {"name": "tool_use", "template": "b"}]},
    {"padding_side": "left", "model_max_length": 3, "truncation_side": "left", "unknown": {"x": [1]}},
]
CLASSES = (
    *("PreTrainedTokenizerFast", "TokenizersBackend", "LlamaTokenizer", "GemmaTokenizer", "Qwen2Tokenizer"),
    *("Qwen3_5Tokenizer", "GPT2Tokenizer", "GPTNeoXTokenizer", "CohereTokenizer"),
)
TYPES = ("llama", "qwen2", "qwen3", "granite", "mistral", "falcon", "gpt_neox")


@pytest.mark.cases(27)
@pytest.mark.parametrize("class_name", CLASSES)
@pytest.mark.parametrize("number", range(len(SETTINGS)))
def test_settings_of_a_folder_change_the_tokens_as_in_transformers(
    class_name: str, number: int, small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules[__name__], "TEXTS", TEXTS[:-1])
    model_type = TYPES[number % len(TYPES)]
    settings = ({"unk_token": "<|endoftext|>"} if class_name == "GemmaTokenizer" else {}) | SETTINGS[number]
    assert_equal(write(tmp_path / "made", small, model_type, tokenizer_class=class_name, **settings))


@pytest.mark.cases(2)
@pytest.mark.parametrize("class_name", ["PreTrainedTokenizerFast", "LlamaTokenizer", "CohereTokenizer"])
def test_files_beside_the_settings_of_older_folders_add_tokens(class_name: str, small: Path, tmp_path: Path) -> None:
    folder = write(tmp_path / "made", small, "falcon", tokenizer_class=class_name, additional_special_tokens=["<c>"])
    named = {"eos_token": {"content": "<e>", "lstrip": True}, "pad_token": "<p>", "image_token": "<i>"}
    more = {"additional_special_tokens": ["<d>"], "extra_special_tokens": ["<x>", {"content": "<y>"}]}
    (folder / "special_tokens_map.json").write_text(json.dumps(named | more))
    (folder / "added_tokens.json").write_text(json.dumps({"<e>": 400, "<q>": 401}))
    assert_equal(folder)


@pytest.mark.parametrize("padded", [False, True])
def test_a_file_may_ask_for_anything(padded: bool, tmp_path: Path) -> None:
    """Other kinds of vocabularies, blanks that decoding drops, padding, truncation, and tokens that are normalised."""
    backend = Backend(models.Unigram([("<unk>", 0.0), ("▁", -1.0), *((letter, -2.0) for letter in "abc.,'nt!")], 0))
    backend.normalizer = normalizers.NFKC()
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.add_tokens([AddedToken("<s>", special=True), AddedToken("<call>", normalized=True, lstrip=True)])
    if padded:
        backend.enable_padding(length=20)
        backend.enable_truncation(3)
    folder = write(tmp_path / "made", backend, "mistral", unk_token="<unk>", clean_up_tokenization_spaces=True)
    found = assert_equal(folder)
    assert found.decode(found.encode("a . b n't <call>!")) == AutoTokenizer.from_pretrained(folder).decode(
        found.encode("a . b n't <call>!")
    )


def test_the_types_of_models_have_the_classes_of_transformers() -> None:
    names = {
        kind: (name or "").removesuffix("Fast") for kind, name in tokenization_auto.TOKENIZER_MAPPING_NAMES.items()
    }
    as_in_file = {kind for kind, name in names.items() if name == "TokenizersBackend"}
    decoders = set(folder_tokenizer._TYPES_AS_IN_FILE.split())
    assert decoders <= as_in_file
    wrong = tokenization_auto.MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS
    of_one = {kind: names[kind] for kind in wrong if names[kind] in folder_tokenizer._REBUILT}
    assert of_one == folder_tokenizer._TYPES_OF_ONE_CLASS
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as OF_TEXT

    assert as_in_file & set(OF_TEXT) <= decoders


def test_templates_of_their_own_come_before_the_settings(small: Path, tmp_path: Path) -> None:
    folder = write(tmp_path / "made", small, tokenizer_class="PreTrainedTokenizerFast", chat_template="of the settings")
    (folder / "chat_template.jinja").write_text("one")
    assert assert_equal(folder).chat_template == "one"
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("two")
    found = assert_equal(folder)
    assert (found.get_chat_template(), found.get_chat_template([TOOL])) == ("one", "two")


UNKNOWN: list[Callable[[Path], object]] = [
    lambda folder: (folder / "tokenizer_config.json").write_text(
        '{"tokenizer_class": "CodeLlamaTokenizer", "unk_token": "<|endoftext|>"}'
    ),
    lambda folder: (folder / "tokenizer_config.json").write_text("{}"),
]


@pytest.mark.parametrize("change", UNKNOWN)
def test_transformers_reads_tokenizers_that_are_unknown_here(
    change: Callable[[Path], object], small: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = write(tmp_path / "made", small)
    change(folder)
    caplog.set_level("INFO", "diskprefix")
    found, wanted = read_tokenizer(folder, None), AutoTokenizer.from_pretrained(folder)
    (line,) = caplog.messages
    assert line.startswith(f"transformers reads the tokenizer of {folder}: ")
    assert found.encode(TEXTS[3]) == wanted(TEXTS[3])["input_ids"]
    assert found.special_tokens_map == wanted.special_tokens_map


# Templates.


def written(write_text: Callable[[], str]) -> tuple[type[BaseException] | None, str]:
    """Returns a text, or the error instead."""
    try:
        return None, write_text()
    except Exception as error:  # noqa: BLE001 (a template raises anything)
        return type(error), str(error)


def assert_rendered(template: str, messages: list[dict[str, Any]], **options: Any) -> tuple[Any, str]:
    variables = options.pop("variables", {})
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Backend(models.BPE()), chat_template=template)
    wanted = written(lambda: str(tokenizer.apply_chat_template(messages, tokenize=False, **options, **variables)))
    found = written(lambda: render_template(template, messages, variables=variables, **options))
    assert found == wanted
    return found


def templates() -> list[Path]:
    return sorted((sources() / "templates").glob("*.jinja"))


@pytest.mark.slow
def test_templates_write_what_they_write_in_transformers() -> None:
    texts = 0
    variables = {"bos_token": "<s>", "eos_token": "</s>", "enable_thinking": True, "documents_of_mine": [{"x": 1}]}
    for path in templates():
        template = path.read_text(encoding="utf-8")
        for messages, tools in product((MESSAGES, MESSAGES[:2], MESSAGES[1:2], MESSAGES[1:], []), (None, [TOOL], [])):
            for ending in ("add_generation_prompt", "continue_final_message", "none"):
                options = {} if ending == "none" else {ending: True}
                error, _ = assert_rendered(template, messages, tools=tools, variables=variables, **options)
                texts += error is None
        in_parts = [message | {"content": [{"type": "text", "text": message["content"]}]} for message in MESSAGES[:2]]
        for continues in (True, False):
            assert_rendered(template, in_parts, continue_final_message=continues)
    assert texts > 500


GIVEN = [
    "{{ messages | tojson }}{{ messages | tojson(indent=2, sort_keys=true) }}{{ '<&>ü' | tojson(ensure_ascii=true) }}",
    "{% for m in messages %}{% if loop.index == 2 %}{% break %}{% endif %}{{ m.content }}{% endfor %}",
    "{% for m in messages %}\n  {% generation %}\n{{ m.content }}{% endgeneration %}\n{% endfor %}",
    "{% generation %}{% set x = 1 %}{% endgeneration %}{{ x }}{{ strftime_now('%Y %Z') }}",
    "{% set ns = namespace(self=1, a=2) %}{% set ns.a = 3 %}{{ ns.self }}{{ ns.a }}{{ dict(a=1) }}",
    "{{ dict.fromkeys('ab') }}",
    "{{ tools is none }}{{ documents is none }}{{ bos_token is defined }}{{ messages[2] }}{{ messages[3] }}",
    "{{ '{0.__class__}'.format(messages) }}",
    "{{ messages[-1].content | trim }}|",
    "no c0ntent",
    "{{ messages[-1].content | upper }}",
]
REFUSED = [
    "{{ raise_exception('no ' ~ messages[0].role) }}",
    "{% set ns = namespace(_a=1) %}",
    "{% set ns = namespace() %}{% set ns._a = 1 %}",
    "{{ messages.append(1) }}",
    "{{ dict.__class__ }}",
    "{{ ().__class__.__mro__ }}",
    "{{ namespace.__init__.__globals__ }}",
    "{{ raise_exception.__globals__ }}",
    "{{ strftime_now.__globals__ }}",
    "{{ cycler.__init__.__globals__.os }}",
    "{{ messages[0].update(a=1) }}",
    "{{ range(40000) | length }}",
    "{{ lipsum() | length > 0 }}{% include 'x' %}",
    "{{ undefined_one.attribute }}",
]


@pytest.mark.parametrize("template", GIVEN + REFUSED)
@pytest.mark.parametrize("continues", [False, True])
def test_the_sandbox_gives_and_refuses_what_transformers_does(template: str, continues: bool) -> None:
    found = assert_rendered(template, MESSAGES, continue_final_message=continues)
    assert found[0] is not None or template in GIVEN or found[1] == ""


@pytest.mark.parametrize("last", [{"role": "assistant"}, {"role": "user", "content": [{"type": "image"}]}])
def test_a_message_without_text_is_not_continued(last: dict[str, Any]) -> None:
    error, _ = assert_rendered("{{ messages[-1].content }}", [*MESSAGES, last], continue_final_message=True)
    assert error is ValueError


LONG = "{% for i in range(9000) %}{% for k in range(9000) %}{% endfor %}{% endfor %}"
TWICE = "{% macro twice(n) %}{{ twice(n - 1) ~ twice(n - 1) if n else '' }}{% endmacro %}{{ twice(60) }}"
AGAIN = "{{ loop([n]) if loop.depth < 50 }}"


@pytest.mark.parametrize(
    "template",
    [
        pytest.param(LONG, id="loops"),
        pytest.param(TWICE, id="macros"),
        pytest.param(
            "{% macro f() %}{{ caller() }}{% endmacro %}{% call f() %}" + LONG + "{% endcall %}", id="callers"
        ),
        pytest.param("{% for n in [1] recursive %}" + AGAIN + AGAIN + "{% endfor %}", id="recursive loops"),
        pytest.param("{% generation %}" + LONG + "{% endgeneration %}", id="tags"),
    ],
)
@pytest.mark.parametrize("is_wanted", [True, False])
def test_a_template_that_never_ends_is_ended(monkeypatch: pytest.MonkeyPatch, template: str, is_wanted: bool) -> None:
    monkeypatch.setattr(template_sandbox, "LIMIT_S", 0.05 if is_wanted else math.inf)
    work = ThreadWork()
    work.is_wanted = is_wanted
    with doing(work), pytest.raises(TemplateError if is_wanted else NobodyWaits, match=r"ended after|has left"):
        render_template(template, MESSAGES)
    # Nothing is left of the limit.
    assert BoundedSandbox().from_string("{% for i in range(3) %}{{ i }}{% endfor %}").render() == "012"


def test_a_template_makes_no_more_than_its_bound() -> None:
    with pytest.raises(OverflowError):
        render_template("{{ 'x' * 2**31 }}", MESSAGES)
    with pytest.raises(TemplateError, match="_a"):
        BoundedSandbox().from_string("{% set ns = namespace(_a=1) %}").render()
