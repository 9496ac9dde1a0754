"""A `.gguf` file's tokenizer is what its metadata say, or the file is refused in one line with the key."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from gguf import GGUFReader, GGUFWriter
from transformers import AutoTokenizer

from diskprefix.daemon.engine.constraints.constrained_reply import ConstraintCompiler
from diskprefix.daemon.engine.request import Constraint
from diskprefix.daemon.engine.token_bytes import TokenBytes
from diskprefix.errors import ModelError
from diskprefix.runtime.files.folder_tokenizer import copy_for_transformers
from diskprefix.runtime.files.gguf.file_tokenizer import _merges_by_score, make_tokenizer
from diskprefix.runtime.files.gguf.gguf_header import FileArray, GgufHeader, read_header
from diskprefix.runtime.files.gguf.gguf_strings import PIECE_BYTES, StringPiece
from diskprefix.runtime.files.gguf.metadata import Metadata
from tests.runtime.files.gguf.test_gguf_refusals import write_sample
from tests.runtime.plan import tiny

TEXT = "Don't count 12345 café!\n\n  x=(y)\t你好Hi あカ '90s/\n q̂ iPHone  7"
PIECES = {
    "default": "Don|'|t| count| |123|45| café|!|\n\n | x|=(|y|)|\t|你好Hi| あカ| |'|90|s|/|\n| q|̂| iPHone| | |7",
    "gpt-2": "Don|'t| count| 12345| café|!|\n\n | x|=(|y|)|\t|你好Hi| あカ| '|90|s|/|\n| q|̂| iPHone| | 7",
    "smollm": "Don|'t| count| |1|2|3|4|5| café|!|\n\n | x|=(|y|)|\t|你好Hi| あカ| '|9|0|s|/|\n| q|̂| iPHone|  |7",
    "llama-bpe": "Don|'t| count| |123|45| café|!\n\n| | x|=(|y|)|\t你好Hi| あカ| '|90|s|/\n| q|̂| iPHone| | |7",
    "qwen2": "Don|'t| count| |1|2|3|4|5| café|!\n\n| | x|=(|y|)|\t你好Hi| あカ| '|9|0|s|/\n| q|̂| iPHone| | |7",
    "qwen35": "Don|'t| count| |1|2|3|4|5| café|!\n\n| | x|=(|y|)|\t你好Hi| あカ| '|9|0|s|/\n| q̂| iPHone| | |7",
    "laguna": "Don|'t| count| |1|2|3|4|5| café|!|\n\n| | x|=(|y|)|\t你好Hi| あカ| '|9|0|s|/|\n| q|̂| iPHone| | |7",
    "minicpm5": "Don|'t| count| |123|45| café|!\n\n| | x|=(|y|)|\t你好Hi| あカ| '|90|s|/\n| q|̂| iPHone|  |7",
    "tekken": "Don|'t| count| |1|2|3|4|5| café|!\n\n| | x|=(|y|)|\t你好Hi| あカ| '|9|0|s|/\n| q̂| i|PHone| | |7",
    "gpt-4o": "Don't| count| |123|45| café|!\n\n| | x|=(|y|)|\t你好Hi| あカ| '|90|s|/\n| q̂| i|PHone| | |7",
    "tiny_aya": "Don't| count| |12|345| café|!\n\n| | x|=(|y|)|\t你好Hi| あカ| '|90|s|/\n| q̂| i|PHone|  |7",
    # llama.cpp joins what stands before digits with the first group of them, where no tokenizer does.
    "afmoe": "Don|'t| count| |12|345| café|!\n\n| | x|=(|y|)|\t|你好|Hi| |あカ| '|90|s|/\n| q̂| iPHone|  |7",
    "exaone-moe": "Don|'t| count| |1|2|3|4|5| café|!\n|\n| | x|=(|y|)|\t你好Hi あカ| '|9|0|s|/\n| q̂ iPHone| | |7",
    "jais-2": "Don|'t| count| |123|45| café|!\n\n| | x|=(|y|)|\t你好Hi| あカ| '|90|s|/\n| q|̂| iPHone| | |7",
    # A later pattern has the plain letters, and cuts words again.
    "deepseek-llm": "Don|'|t| count| |12345| caf|é|!|\n|\n| | x|=(|y|)|\t|你好|Hi| |あカ| '|90|s|/|\n| q|̂| iPHone|  |7",
    "deepseek-coder": (
        "Don|'|t| count| |1|2|3|4|5| café|!|\n|\n| | x|=|(|y|)|\t|你好|Hi| |あカ| '|9|0|s|/|\n| q|̂| iPHone|  |7"
    ),
    "deepseek-v3": "Don|'t| count| |123|45| café|!\n\n| | x|=(|y|)|\t|你好|Hi| |あカ| '|90|s|/\n| q̂| iPHone|  |7",
    "youtu": "Don't| count| |1|2|3|4|5| café|!\n\n| | x|=(|y|)|\t|你好|Hi| |あカ| '|9|0|s|/\n| q̂| i|PHone| | |7",
    "kimi-k2": "Don't| count| |123|45| café|!\n\n| | x|=(|y|)|\t|你好|Hi| あカ| '|90|s|/\n| q̂| i|PHone| | |7",
    "superbpe": "Don't count |12|345| café!\n\n  x=(y)\t你好Hi あカ '|90|s/\n q̂ iPHone  |7",
    "bailingmoe": "Don|'t| count| |1|2|3|4|5| café|!\n\n| | x|=(|y|)|\t你好Hi| あカ| '|9|0|s|/\n| q|̂| iPHone| | |7",
    "seed-coder": "Don|'t| count| |1|2|3|4|5| café|!|\n\n| | x|=(|y|)|\t你好Hi| あカ| '|9|0|s|/|\n| q|̂| iPHone| | |7",
    "viking": "Don't| count| |1|2|3|4|5| café|!\n\n | x=|(|y|)\t|你好Hi| あカ| '|9|0|s/|\n| q̂| iPHone| | |7",
}

WORDS = tiny.tokens()
BYTES: dict[str, Any] = {
    "model": "gpt2",
    "pre": "gpt-2",
    "tokens": [*WORDS, "<think>", "<｜User｜>", "<unk>", ""],
    "token_type": [3] * 3 + [1] * (len(WORDS) - 3) + [4, 3, 2, 5],
    "merges": tiny.MERGES,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
PIECES_OF_TEXT = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b", "ab", "▁a", "▁ab"]
SENTENCES: dict[str, Any] = {
    "model": "llama",
    "tokens": [*PIECES_OF_TEXT, "abab", "[INST]", "  "],
    "scores": [0.0] * 262 + [-2.0, -1.0, -3.0, -4.0, 0.0, 0.0],
    "token_type": [2, 3, 3] + [6] * 256 + [1] * 7 + [3, 4],
}
A, B, AB, BLANK_A, BLANK_AB, INST, TWO_BLANKS = 260, 261, 262, 263, 264, 266, 267
BLANK = 259


def header(path: Path, values: dict[str, Any], **others: Any) -> GgufHeader:
    architecture = others.pop("general.architecture", "llama")
    writer = GGUFWriter(path / "tiny.gguf", architecture)
    keys = {f"tokenizer.ggml.{key}": value for key, value in values.items()} | others
    for key, value in keys.items():
        if value is not None:
            tiny.add_value(writer, key, value)
    tiny.finish(writer)
    return read_header(path / "tiny.gguf")


def ids(tokenizer: Any, text: str, *, alone: bool = True) -> list[int]:
    found: list[int] = tokenizer.encode(text, add_special_tokens=not alone)
    return found


@pytest.mark.parametrize("pre", PIECES)
def test_text_is_cut_as_the_models_own_tokenizer_cuts_it(pre: str, tmp_path: Path) -> None:
    cut = make_tokenizer(header(tmp_path, BYTES | {"pre": pre})).backend_tokenizer.pre_tokenizer
    found = "|".join(TEXT[first:last] for _, (first, last) in cut.pre_tokenize_str(TEXT))
    assert found == PIECES[pre]


@pytest.mark.parametrize(
    ("pre", "composes"), [("qwen2", True), ("qwen35", False), ("command-r", True), ("gpt-2", False)]
)
def test_characters_are_composed_as_the_models_own_tokenizer_does(pre: str, composes: bool, tmp_path: Path) -> None:
    tokenizer = make_tokenizer(header(tmp_path, BYTES | {"pre": pre}))
    composed, apart = (tokenizer.encode(f"caf{end} x", add_special_tokens=False) for end in ("\u00e9", "e\u0301"))
    assert (composed == apart) == composes
    assert tokenizer.decode(apart) == ("caf\u00e9 x" if composes else "cafe\u0301 x")


def test_a_file_without_a_rule_is_cut_as_llama_cpp_cuts_it(tmp_path: Path) -> None:
    plain = make_tokenizer(header(tmp_path, BYTES | {"pre": None})).backend_tokenizer.pre_tokenizer
    named = make_tokenizer(header(tmp_path, BYTES | {"pre": "default"})).backend_tokenizer.pre_tokenizer
    assert plain.pre_tokenize_str(TEXT) == named.pre_tokenize_str(TEXT)


def test_marked_tokens_are_found_first_and_only_control_tokens_are_special(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(header(tmp_path, BYTES))
    count = len(WORDS)
    assert ids(tokenizer, "<think><｜User｜><unk><|im_end|>") == [count, count + 1, count + 2, 2]
    assert tokenizer.get_vocab()["[EMPTY_266]"] == count + 3 == 266
    found = tokenizer.added_tokens_decoder
    assert {number for number, token in found.items() if token.special} == {0, 1, 2, count + 1, count + 2}
    assert tokenizer.decode([count, *ids(tokenizer, "é x")]) == "<think>é x"


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, "{}"),
        ({"pre": "llama-bpe"}, "<|im_start|>{}"),
        ({"pre": "tekken"}, "<|im_start|>{}"),
        ({"pre": "llama-bpe", "add_bos_token": False}, "{}"),
        ({"add_bos_token": True, "add_eos_token": True}, "<|im_start|>{}<|im_end|>"),
    ],
    ids=str,
)
def test_a_text_begins_and_ends_as_the_file_says(values: dict[str, Any], expected: str, tmp_path: Path) -> None:
    tokenizer = make_tokenizer(header(tmp_path, BYTES | values))
    assert tokenizer.decode(ids(tokenizer, "he", alone=False)) == expected.format("he")


def test_a_text_of_gemma_4_begins_with_its_token_whatever_the_file_says(tmp_path: Path) -> None:
    values = SENTENCES | {"model": "gemma4", "merges": ["▁ a"], "bos_token_id": 1, "add_bos_token": False}
    begun, plain = (ids(make_tokenizer(header(tmp_path, values)), "a", alone=alone) for alone in (False, True))
    assert begun == [1, *plain]


@pytest.mark.parametrize(("pre", "expected"), [("llama-bpe", ["Ġhe"]), ("qwen2", ["Ġ", "he"])])
def test_a_word_that_is_a_token_needs_merges_only_in_some_vocabularies(
    pre: str, expected: list[str], tmp_path: Path
) -> None:
    values = BYTES | {"pre": pre, "tokens": [*WORDS, "Ġhe"], "token_type": None}
    assert (
        make_tokenizer(header(tmp_path, values)).backend_tokenizer.encode(" he", add_special_tokens=False).tokens
        == expected
    )


@pytest.mark.parametrize(
    ("values", "text", "expected"),
    [
        ({}, "ab", [BLANK_AB]),
        ({}, " ab", [BLANK, BLANK_AB]),
        # By score: `ab` before `▁a`.
        ({}, "aba", [BLANK_AB, A]),
        ({"add_space_prefix": False}, "ab a", [AB, BLANK_A]),
        ({"add_space_prefix": False}, "abab", [265]),
        ({"add_space_prefix": False}, "é\n", [0xC3 + 3, 0xA9 + 3, 10 + 3]),
        ({"add_space_prefix": False}, "a  ab", [A, TWO_BLANKS, AB]),
        ({}, "a[INST]b", [BLANK_A, INST, BLANK, B]),
        ({"model": "gemma4", "merges": ["▁ a"]}, "ab a", [A, B, BLANK_A]),
    ],
    ids=str,
)
def test_pieces_are_merged_by_their_scores(
    values: dict[str, Any], text: str, expected: list[int], tmp_path: Path
) -> None:
    tokenizer = make_tokenizer(header(tmp_path, SENTENCES | values))
    assert ids(tokenizer, text) == expected
    assert tokenizer.decode(expected) == (text if "INST" not in text else "a[INST] b")


def naive_merges(tokens: list[str], scores: list[float]) -> list[tuple[str, str]]:
    """Every cut of every token, whose time grows with the square of a token's length."""
    found = []
    for number in sorted(range(len(tokens)), key=lambda one: -scores[one]):
        cuts = ((tokens[number][:at], tokens[number][at:]) for at in range(len(tokens[number]) - 1, 0, -1))
        found += [(left, right) for left, right in cuts if left in tokens and right in tokens]
    return found


@pytest.mark.parametrize("letters", ["a", "ab", "abcdefgh", "ａ🙂\ue000b"])
def test_merges_by_scores_are_all_cuts_into_two_tokens(letters: str) -> None:
    rng = random.Random(letters)
    for _ in range(200):
        texts = {"".join(rng.choices(letters, k=rng.randint(1, 9))) for _ in range(rng.randint(1, 60))}
        tokens = rng.sample(sorted(texts), len(texts))
        scores = [float(rng.randint(-3, 3)) for _ in tokens]
        assert merges(tokens, scores) == naive_merges(tokens, scores)


def test_a_token_of_megabytes_is_cut_at_once() -> None:
    # Each of its cuts would copy half of it on average.
    long = "ab" * 1_000_000
    assert merges(["a", "b", long[:-1], long, "ab"], [0.0] * 5) == [(long[:-1], "b"), ("a", "b")]


def merges(tokens: list[str], scores: list[float]) -> list[tuple[str, str]]:
    keys = SimpleNamespace(array=lambda _name, _count: np.array(scores, np.float32))
    return _merges_by_score(keys, {token: number for number, token in enumerate(tokens)})  # type: ignore[arg-type]


def test_most_special_tokens_of_phi_3_include_the_blanks_after_them(tmp_path: Path) -> None:
    phi = make_tokenizer(header(tmp_path, SENTENCES, **{"general.architecture": "phi3"}))
    assert ids(phi, "</s> \na<s> b") == [2, BLANK_A, 1, BLANK, BLANK, B]
    assert ids(make_tokenizer(header(tmp_path, SENTENCES)), "</s> a") == [2, BLANK, BLANK_A]


def test_a_template_is_not_run_to_see_whether_it_parses(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(header(tmp_path, BYTES, **{"tokenizer.chat_template": ENDLESS}))
    assert tokenizer.chat_template == ENDLESS


def test_old_files_have_the_special_tokens_that_llama_had(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(header(tmp_path, SENTENCES))
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (1, 2)
    assert tokenizer.get_vocab()[tokenizer.special_tokens_map["unk_token"]] == 0
    assert ids(tokenizer, "ab", alone=False) == [1, BLANK_AB]


def test_a_saved_tokenizer_equals_the_original(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(
        header(tmp_path, BYTES | {"add_bos_token": True}, **{"tokenizer.chat_template": tiny.CHAT_TEMPLATE})
    )
    copy_for_transformers(tokenizer).save_pretrained(tmp_path)
    saved = AutoTokenizer.from_pretrained(tmp_path)
    assert saved(TEXT)["input_ids"] == tokenizer.encode(TEXT)
    assert (saved.bos_token, saved.eos_token, saved.pad_token) == ("<|im_start|>", "<|im_end|>", None)
    assert saved.chat_template == tiny.CHAT_TEMPLATE


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_text_becomes_the_first_of_its_tokens_and_all_are_decoded(kind: str, tmp_path: Path) -> None:
    """Published files of Gemma 4 have such tokens, and were refused."""
    known = BYTES if kind == "gpt2" else SENTENCES
    tokens, types = [*known["tokens"]], known.get("token_type")
    (word,) = ids(make_tokenizer(header(tmp_path, known)), "he" if kind == "gpt2" else "ab")[-1:]
    more = {"tokens": [*tokens, tokens[word], tokens[word]]}
    more |= {"token_type": [*types, 1, 1]} if types else {}
    more |= {"scores": [*known["scores"], -9.0, -9.0]} if "scores" in known else {}
    tokenizer = make_tokenizer(header(tmp_path, known | more))
    text = "he" if kind == "gpt2" else "ab"
    assert ids(tokenizer, text)[-1] == word
    bytes_of = TokenBytes(tokenizer.backend_tokenizer)
    for token in (word, len(tokens), len(tokens) + 1):
        assert tokenizer.decode([word, token]) == tokenizer.decode([word, word])
        assert bytes_of(token) == bytes_of(word)
        assert bytes_of(word).decode().strip() == text
    compiler = ConstraintCompiler(tokenizer, set(), len(tokens) + 2)
    matcher = compiler.matcher(Constraint(kind="choice", source=json.dumps([bytes_of(word).decode()])))
    assert matcher.validate_tokens([word]) == 1
    compiler.close()


TURN = ["a", "<|im_end|>", "<|end|>", "<turn|>"]


@pytest.mark.parametrize(
    ("tokens", "values", "expected"),
    [
        (TURN, {}, 1),
        (TURN, {"eot_token_id": 0}, 0),
        (TURN, {"eos_token_id": 1}, 2),
        # Messages within a reply end with it.
        ([*TURN, "<|call|>"], {"eos_token_id": 1}, 3),
        (["a", "b"], {}, None),
        (None, {}, None),
    ],
)
def test_the_token_that_ends_a_turn_is_found_by_its_text(
    tokens: list[str] | None, values: dict[str, Any], expected: int | None, tmp_path: Path
) -> None:
    assert Metadata(header(tmp_path, {"tokens": tokens, **values}), []).token("eot") == expected


def test_an_end_of_turn_in_a_text_becomes_its_token_whatever_its_type(tmp_path: Path) -> None:
    values = {"tokens": [*WORDS, "<turn|>"], "token_type": [1] * 264}
    tokenizer = make_tokenizer(header(tmp_path, BYTES | values))
    assert ids(tokenizer, "he<turn|>")[-1] == 263
    assert tokenizer.added_tokens_decoder[263].special


@pytest.mark.parametrize(("value", "said"), [("2", "'2', and it has 4"), (4, "4, and it has 4"), (0.5, "0.5,")])
def test_an_invalid_token_id_is_refused_by_name(value: Any, said: str, tmp_path: Path) -> None:
    metadata = Metadata(header(tmp_path, {"tokens": TURN, "eom_token_id": value}), [])
    with pytest.raises(ModelError, match=f"tokenizer.ggml.eom_token_id is {said}"):
        metadata.token("eom")


def test_conversations_with_tools_use_the_template_for_tools(tmp_path: Path) -> None:
    plain, tools, others = "tokenizer.chat_template", "tokenizer.chat_template.tool_use", "tokenizer.chat_template.rag"
    tokenizer = make_tokenizer(header(tmp_path, BYTES, **{plain: "a", tools: "b", others: "{%"}))
    copy_for_transformers(tokenizer).save_pretrained(tmp_path / "saved")
    for one in (tokenizer, AutoTokenizer.from_pretrained(tmp_path / "saved")):
        assert (one.get_chat_template(), one.get_chat_template(tools=[{}])) == ("a", "b")
    alone = make_tokenizer(header(tmp_path, BYTES, **{tools: "b"}))
    assert (alone.get_chat_template(), alone.get_chat_template(tools=[{}])) == ("b", "b")


LOOP = "{% for i in range(30000) %}"
ENDLESS = LOOP * 4 + "{% endfor %}" * 4 + "{{ 'x' * 2**31 }}"
WRONG: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"model": None}, {}, "tokenizer.ggml.model is missing"),
    ({"model": "bert"}, {}, "tokenizer.ggml.model is 'bert'"),
    ({"pre": "of-tomorrow"}, {}, "tokenizer.ggml.pre is 'of-tomorrow'"),
    ({}, {"tokenizer.huggingface.json": "{}"}, "two tokenizers: tokenizer.ggml.model and tokenizer.huggingface.json"),
    ({}, {"tokenizer.chat_template": "a\n{% for"}, "tokenizer.chat_template: line 2: "),
    ({}, {"tokenizer.chat_template": f"{ENDLESS}{{% for"}, "tokenizer.chat_template: line 1: "),
    ({}, {"tokenizer.chat_template": "{{ " + "(" * 100_000}, "tokenizer.chat_template: it is nested too deeply"),
    ({}, {"tokenizer.chat_template": 7}, "tokenizer.chat_template: it is not text"),
    ({}, {"tokenizer.chat_template.tool_use": "{% if"}, "tokenizer.chat_template.tool_use: line 1: "),
    ({"tokens": None}, {}, "lacks the array tokenizer.ggml.tokens"),
    ({"tokens": [1, 2]}, {}, "tokenizer.ggml.tokens are not strings"),
    ({"token_type": [1, 3]}, {}, "tokenizer.ggml.token_type are not 267 numbers"),
    ({"token_type": ["1"] * 267}, {}, "tokenizer.ggml.token_type are not 267 numbers"),
    ({"merges": None}, {}, "lacks the array tokenizer.ggml.merges"),
    ({"merges": ["h e", "xy z"]}, {}, "tokenizer.ggml.merges: "),
    ({"eos_token_id": 267}, {}, "tokenizer.ggml.eos_token_id is 267, and it has 267 tokens"),
    ({"eos_token_id": [2]}, {}, "tokenizer.ggml.eos_token_id is an array"),
    ({"model": ["gpt2"]}, {}, "tokenizer.ggml.model is an array"),
    ({"pre": ["smollm"]}, {}, "tokenizer.ggml.pre is an array"),
    ({"add_bos_token": "false"}, {}, "tokenizer.ggml.add_bos_token is 'false', which is neither true nor false"),
    ({"add_eos_token": [True]}, {}, "tokenizer.ggml.add_eos_token is an array, which is neither"),
    ({}, {"tokenizer.chat_template": ["a"]}, "tokenizer.chat_template: it is not text"),
    ({"model": "llama", "merges": None}, {}, "lacks the array tokenizer.ggml.scores"),
]


@pytest.mark.parametrize(("values", "others", "said"), WRONG, ids=str)
def test_a_wrong_tokenizer_is_refused_in_one_line(
    values: dict[str, Any], others: dict[str, Any], said: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelError) as caught:
        make_tokenizer(header(tmp_path, BYTES | values, **others))
    assert said in caught.value.message
    assert "\n" not in caught.value.message


def test_arrays_are_read_as_the_library_reads_them(tmp_path: Path) -> None:
    path = write_sample(tmp_path / "sample.gguf")
    fields, arrays = GGUFReader(path).fields, read_header(path).arrays
    assert len(arrays) == 12
    for key, array in arrays.items():
        assert list(array.content) == fields[key].contents()


def with_strings(path: Path, strings: list[str] | list[bytes]) -> Path:
    """Writes a header with the array `list.strings`, and a value after it."""
    writer = GGUFWriter(path, "llama")
    writer.add_array("list.strings", strings)
    writer.add_string("behind", "them")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("odd", [[], [""], ["x" * 255], ["x" * 256], ["\0" * 7], ["a\0"], ["\0a"], ["é" * 127]])
@pytest.mark.parametrize("at", [0, 7, 20])
def test_strings_of_all_lengths_are_read(odd: list[str], at: int, tmp_path: Path) -> None:
    strings = [chr(97 + number) * (number + 1) for number in range(20)]
    strings[at:at] = odd
    found = read_header(with_strings(tmp_path / "m.gguf", strings))
    assert (found.arrays["list.strings"].content, found.values["behind"]) == (strings, "them")


@pytest.mark.parametrize("longest", [20, 300, 3 * PIECE_BYTES])
@pytest.mark.parametrize("letters", ["ab", "aé你\U0001f600", "a\0"])
def test_strings_across_pieces_are_read(longest: int, letters: str, tmp_path: Path) -> None:
    source = random.Random(longest)
    lengths = [source.randrange(20) for _ in range(20_000)] + [longest, longest - 9] * 3
    source.shuffle(lengths)
    strings = ["".join(source.choices(letters, k=length)) for length in lengths]
    found = read_header(with_strings(tmp_path / "m.gguf", strings))
    assert (found.arrays["list.strings"].content, found.values["behind"]) == (strings, "them")


@pytest.mark.parametrize("changed", [["a", "bcd", "ef"], ["abc", "d", "ef", "g"], ["abc"]])
def test_strings_that_changed_after_the_header_was_read_are_refused(changed: list[str], tmp_path: Path) -> None:
    array = read_header(with_strings(tmp_path / "m.gguf", ["ab", "cd", "ef"])).arrays["list.strings"]
    with_strings(tmp_path / "m.gguf", changed)
    with pytest.raises(ModelError, match="was changed while it was read"):
        _ = array.content


def test_a_header_is_read_without_making_the_strings_of_its_long_arrays(tmp_path: Path, monkeypatch: Any) -> None:
    path = with_strings(tmp_path / "m.gguf", [f"token {number}" for number in range(20_000)])
    monkeypatch.setattr(StringPiece, "texts", lambda _self: pytest.fail("strings are made"))
    array = read_header(path).arrays["list.strings"]
    assert (array.count, array.undecoded) == (20_000, None)


@pytest.mark.parametrize("at", [0, 9_999, 19_998])
@pytest.mark.parametrize("count", [10, 20_000])
def test_a_beginning_of_a_character_before_the_length_that_would_end_it_is_not_utf_8(
    at: int, count: int, tmp_path: Path
) -> None:
    strings = [b"a"] * count
    # The length of the second one, 0x85, would end the character that the first one begins.
    strings[at : at + 2] = [b"\xc3", b"b" * 0x85]
    array = read_header(with_strings(tmp_path / "m.gguf", strings)).arrays["list.strings"]
    assert array.undecoded == strings.index(b"\xc3")
    with pytest.raises(ModelError, match=rf"list.strings is not UTF-8 in element {array.undecoded}"):
        _ = array.content


@pytest.mark.parametrize("damage", [b"", b"\xff" * 200, b"\x02" + b"\0" * 7 + b"\xff" * 200])
def test_strings_that_are_damaged_are_refused(damage: bytes, tmp_path: Path) -> None:
    path = write_sample(tmp_path / "sample.gguf")
    array = read_header(path).arrays["list.STRING"]
    path.write_bytes(path.read_bytes()[: array.begin] + damage)
    with pytest.raises(ModelError, match=r"it is cut short|has \d+ bytes|not UTF-8"):
        read_header(path)


def shorter_by_one(array: FileArray, content: bytearray) -> None:
    content[array.begin] -= 1


def no_utf_8(array: FileArray, content: bytearray) -> None:
    content[array.end - 1] = 0xFF


@pytest.mark.parametrize("change", [lambda _array, content: content.clear(), shorter_by_one, no_utf_8])
@pytest.mark.parametrize("count", [5, 20_000])
def test_strings_of_a_file_that_changes_are_refused(
    change: Callable[[FileArray, bytearray], None], count: int, tmp_path: Path
) -> None:
    array = read_header(with_strings(path := tmp_path / "m.gguf", ["abc"] * count)).arrays["list.strings"]
    change(array, content := bytearray(path.read_bytes()))
    path.write_bytes(content)
    with pytest.raises(ModelError, match="it was changed"):
        _ = array.content


def test_numbers_of_a_file_that_changes_are_refused(tmp_path: Path) -> None:
    path = write_sample(tmp_path / "sample.gguf")
    numbers = read_header(path).arrays["list.FLOAT64"]
    path.write_bytes(b"")
    with pytest.raises(ModelError, match="it was changed"):
        np.asarray(numbers.content)
