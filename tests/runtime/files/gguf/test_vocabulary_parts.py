"""A part of a vocabulary gives the tokens, places and texts of the whole, and is made without making the whole."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from functools import cache
from itertools import accumulate, product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import tokenizers
from tokenizers import Tokenizer as Backend
from tokenizers import models

from diskprefix.daemon.engine.detokenize import TextStream
from diskprefix.runtime.files import read_tokenizer, string_hashes
from diskprefix.runtime.files.gguf.file_tokenizer import make_tokenizer, parts_are_exact
from diskprefix.runtime.files.gguf.gguf_strings import StringPiece
from diskprefix.runtime.files.gguf.vocabulary_parts import VocabularyParts
from diskprefix.runtime.files.string_hashes import LONGEST, among, hashes_of, hashes_of_pairs, hashes_of_parts
from diskprefix.runtime.files.tokenizer import Tokenizer
from tests.daemon.chat.families.families import folder
from tests.daemon.chat.families.sources import PARTED_BY
from tests.runtime.files.gguf.test_tokenizer import BYTES, SENTENCES, header

REAL = ("command-r", "deepseek-coder", "deepseek-v3", "gpt-2", "llama-bpe", "mistral-nemo", "qwen2", "qwen35", "refact")
"""Byte-level vocabularies: with and without a normalizer, several cuts in turn, words that need no merges."""
LETTERS = [
    *map(chr, range(32, 127)),
    *"\n\n\t    éß½ﬁİſ日本語한국עमस्👩\u200d👧🙂\u0301\u0300\u00a0\u2028\u0000\uffff￼",
]


def test_a_long_string_takes_no_more_steps_than_a_page_has_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = []
    monkeypatch.setattr(string_hashes, "_add", lambda _sums, content: steps.append(len(content)))
    hashes_of([b"x" * 1_000_000, b"yes"])
    assert len(steps) == LONGEST
    monkeypatch.undo()
    assert len(set(hashes_of([b"x" * LONGEST, b"x" * LONGEST + b"y"]))) == 1, "the rest does not count"


class Real(NamedTuple):
    whole: Tokenizer
    parts: VocabularyParts
    texts: list[str]

    @property
    def in_parts(self) -> Tokenizer:
        return Tokenizer(self.parts.letters, {}, parts=self.parts)


def strings(texts: Sequence[str]) -> StringPiece:
    """The texts as an array of a `.gguf` file has them."""
    written = [len(text.encode()).to_bytes(8, "little") + text.encode() for text in texts]
    return StringPiece.with_ends(b"".join(written), np.array(list(accumulate(map(len, written))), np.int64))


@cache
def real(name: str) -> Real:
    whole = Backend.from_file(str(folder() / f"{name}.json"))
    model = json.loads(whole.to_str())["model"]
    added = whole.get_added_tokens_decoder()

    def make(vocabulary: dict[str, int], merges: list[tuple[str, str]]) -> Backend:
        made = Backend(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=model["ignore_merges"]))
        made.normalizer, made.pre_tokenizer, made.decoder = whole.normalizer, whole.pre_tokenizer, whole.decoder
        made.add_tokens([added[index] for index in sorted(added) if added[index].content in vocabulary])
        return made

    tokens: dict[int, str] = {index: text for text, index in whole.get_vocab().items()}
    parts = VocabularyParts(
        strings([tokens.get(index, f"[NONE_{index}]") for index in range(max(tokens) + 1)]),
        strings([" ".join(pair) for pair in model["merges"]]),
        [token.content for token in added.values()],
        make,
    )
    texts, file = [], folder() / f"{name}.inp"
    if file.exists():
        texts = file.read_text(encoding="utf-8").split(PARTED_BY)
    return Real(Tokenizer(whole, {}), parts, [*texts, *made_up(name, [token.content for token in added.values()])])


def made_up(name: str, added: Sequence[str]) -> list[str]:
    source = random.Random(name)
    page = Path(__file__).read_text(encoding="utf-8")
    mixed = ["".join(source.choices([*LETTERS, *added[:40]], k=source.randint(1, 400))) for _ in range(20)]
    long = ["a" * 500, " " * 700 + "x", "ab1" * 300, "é" * 200, "日本語" * 60, "\n" * 300, "".join(added[:40])]
    return [page, *mixed, *long, ""]


@pytest.mark.parametrize("name", REAL)
def test_a_part_encodes_as_the_whole(name: str) -> None:
    whole, parts, texts = real(name)
    for text in texts:
        part = parts.of_texts([text])
        assert part is not None
        (found,), (expected,) = (one.encode_batch([text]) for one in (part, whole.backend_tokenizer))
        assert found.ids == expected.ids, repr(text)
        assert found.offsets == expected.offsets
        assert found.special_tokens_mask == expected.special_tokens_mask


@pytest.mark.parametrize("name", REAL)
def test_one_part_encodes_many_texts_as_the_whole(name: str) -> None:
    whole, parts, texts = real(name)
    texts = [text for text in texts if len(text) < 200][:60]
    part = parts.of_texts(texts)
    assert part is not None
    found, expected = (one.encode_batch(texts) for one in (part, whole.backend_tokenizer))
    assert [one.ids for one in found] == [one.ids for one in expected]


@pytest.mark.parametrize("name", REAL)
def test_a_part_decodes_as_the_whole_token_by_token(name: str) -> None:
    known, source = real(name), random.Random(name)
    in_parts, num_tokens = known.in_parts, len(known.whole)
    for _ in range(20):
        ids = source.sample(range(num_tokens), 60)
        assert in_parts.decode(ids) == known.whole.decode(ids)
        streamed = []
        for one in (in_parts, known.whole):
            stream = TextStream(one, (), ())
            streamed.append([*map(stream.push, ids), stream.finish()])
        assert streamed[0] == streamed[1]
    assert in_parts.is_in_parts


@pytest.mark.parametrize("name", ["gpt-2", "qwen2"])
def test_the_whole_of_the_parts_is_the_tokenizer(name: str) -> None:
    known = real(name)
    made = known.in_parts
    assert (made.is_in_parts, len(made)) == (True, len(known.whole))
    expected = json.loads(known.whole.backend_tokenizer.to_str())
    found = json.loads(made.backend_tokenizer.to_str())
    assert found["model"]["merges"] == expected["model"]["merges"]
    assert found["model"]["vocab"].items() >= expected["model"]["vocab"].items()
    assert not made.is_in_parts
    # From then on it is the one that encodes.
    assert made.backend_for(["x"]) is made.backend_with([1]) is made.backend_tokenizer


def test_a_text_whose_parts_are_too_many_is_left_to_the_whole() -> None:
    known = real("gpt-2")
    assert known.parts.of_texts(["a b " * 24_000]) is not None
    assert known.parts.of_texts(["a b " * 25_000]) is None
    assert known.parts.of_texts(["ab" * 20_000]) is None
    made = known.in_parts
    assert made.encode("ab" * 20_000) == known.whole.encode("ab" * 20_000)
    assert not made.is_in_parts


def test_equal_texts_have_equal_hashes_however_they_are_made() -> None:
    source = random.Random(5)
    texts = ["".join(source.choices("ab é", k=source.randint(0, 12))).encode() for _ in range(300)]
    hashes = dict(zip(texts, hashes_of(texts).tolist(), strict=True))
    assert len(set(hashes.values())) == len(hashes)
    longest = 5
    parts = hashes_of_parts(texts, longest, 1 << 20)
    assert parts is not None
    expected = {
        text[a:b] for text in texts for a in range(len(text)) for b in range(a + 1, len(text) + 1) if b - a <= 5
    }
    assert sorted(parts.tolist()) == sorted(
        int(hashes_of([text[a:b]])[0])
        for text in texts
        for a in range(len(text))
        for b in range(a + 1, min(a + longest, len(text)) + 1)
    )
    assert {*parts.tolist()} == {*hashes_of([*expected]).tolist()}
    assert hashes_of_parts(texts, longest, len(parts)) is not None
    assert hashes_of_parts(texts, longest, len(parts) - 1) is None
    lefts, rights = texts[::2], texts[1::2]
    joined = hashes_of_pairs(hashes_of(lefts), hashes_of(rights), np.array([*map(len, rights)]))
    assert joined.tolist() == hashes_of([a + b for a, b in zip(lefts, rights, strict=True)]).tolist()


@pytest.mark.parametrize("count", [0, 1, 7, 5_000])
def test_all_wanted_hashes_are_found_and_few_others(count: int) -> None:
    # Many differ in their last letter alone.
    hashes = hashes_of(["".join(letters).encode() for letters in product("abcdefghijklmnopqrstuvwxyz", repeat=3)])
    found = among(hashes, hashes[:count])
    assert {*range(count)} <= {*found.tolist()}
    assert len(found) - count < 0.01 * len(hashes)


TOKENS: dict[str, Any] = BYTES | {"tokens": [*BYTES["tokens"][:-1], "<|im_end|> "]}


def test_a_file_in_parts_has_the_tokenizer_of_the_whole(tmp_path: Path) -> None:
    read = header(tmp_path, TOKENS | {"add_bos_token": True, "add_eos_token": True})
    whole, in_parts = make_tokenizer(read), make_tokenizer(read, in_parts=True)
    assert in_parts.is_in_parts
    for name in ("special_tokens_map", "bos_token_id", "eos_token_id", "all_special_ids", "split_special_tokens"):
        assert getattr(in_parts, name) == getattr(whole, name)
    assert in_parts.get_added_vocab() == whole.get_added_vocab()
    assert in_parts.has_normalizer == whole.has_normalizer
    for text in ("he <think>he said", "<|im_start|>x", ""):
        assert in_parts.encode(text) == whole.encode(text)
        assert in_parts.encode(text, add_special_tokens=False) == whole.encode(text, add_special_tokens=False)
    assert in_parts.is_in_parts
    assert in_parts.get_vocab() == whole.get_vocab()
    assert in_parts.backend_tokenizer.to_str() == whole.backend_tokenizer.to_str()


@pytest.mark.parametrize(
    ("values", "is_exact"),
    [
        (TOKENS, True),
        # Equal and empty tokens are made distinct in the whole.
        (BYTES, False),
        (TOKENS | {"tokens": [*TOKENS["tokens"], "<think>"], "token_type": None}, False),
        (SENTENCES, False),
        # Words need no merges, and a letter has no token.
        (TOKENS | {"pre": "llama-bpe", "tokens": [t for t in TOKENS["tokens"] if t != "q"], "token_type": None}, False),
        (TOKENS | {"tokens": [*TOKENS["tokens"], "x" * (LONGEST + 1)], "token_type": None}, False),
    ],
)
def test_only_distinct_tokens_of_bytes_are_taken_in_parts(
    values: dict[str, Any], is_exact: bool, tmp_path: Path
) -> None:
    read = header(tmp_path, values)
    assert parts_are_exact(read, make_tokenizer(read)) is is_exact


WITH_OVER = {"merges": ["o v", "e r", "ov er"], "tokens": [*TOKENS["tokens"], "ov", "er", "over"], "token_type": None}


def test_parts_that_give_other_tokens_are_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = header(tmp_path, TOKENS | WITH_OVER)
    assert parts_are_exact(read, make_tokenizer(read))
    monkeypatch.setattr(VocabularyParts, "_merges_within", lambda *_: [])
    assert not parts_are_exact(read, make_tokenizer(read))


@pytest.mark.usefixtures("cache")
def test_the_second_start_takes_parts_and_the_first_does_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    header(tmp_path, TOKENS)
    file = tmp_path / "tiny.gguf"

    def start(digest: str | None) -> Tokenizer:
        return read_tokenizer.read_tokenizer(file, None, digest)

    first = start("1")
    assert not first.is_in_parts
    read_tokenizer.check_parts(file, first, "1")
    second = start("1")
    assert second.is_in_parts
    assert [start(digest).is_in_parts for digest in (None, "2")] == [False, False]
    # It is checked once, and again for another library.
    monkeypatch.setattr(read_tokenizer, "parts_are_exact", lambda *_: pytest.fail("it is known"))
    read_tokenizer.check_parts(file, second, "1")
    monkeypatch.setattr(tokenizers, "__version__", "another")
    assert not start("1").is_in_parts


@pytest.mark.usefixtures("cache")
def test_a_file_that_is_gone_is_not_checked(tmp_path: Path) -> None:
    header(tmp_path, TOKENS)
    file = tmp_path / "tiny.gguf"
    whole = read_tokenizer.read_tokenizer(file, None, "1")
    file.rename(tmp_path / "other.gguf")
    read_tokenizer.check_parts(file, whole, "1")
    file.write_bytes(b"GGUF and then nothing")
    read_tokenizer.check_parts(file, whole, "1")
    (tmp_path / "other.gguf").rename(file)
    assert not read_tokenizer.read_tokenizer(file, None, "1").is_in_parts
