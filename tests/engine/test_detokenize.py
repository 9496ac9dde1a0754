from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from diskprefix.engine import detokenize
from diskprefix.engine.detokenize import TextStream, special_tokens
from tests.model.tiny import SPECIAL_TOKENS, tokenizer

_tokenizer: Any = tokenizer()


def ids(text: str) -> list[int]:
    encoded: list[int] = _tokenizer(text, add_special_tokens=False)["input_ids"]
    return encoded


def stream(text: str, *stop: str) -> tuple[str, str | None]:
    """The text of a reply that stops where a stop string is complete, and that string."""
    out = TextStream(_tokenizer, stop, ())
    pieces = []
    for token in ids(text):
        pieces.append(out.push(token))
        if out.stopped_by:
            return "".join(pieces), out.stopped_by
    return "".join(pieces) + out.finish(), None


@given(st.text(alphabet="ab é€😀\n", max_size=20))
def test_pieces_join_to_the_whole_text(text: str) -> None:
    assert stream(text) == (text, None)


def test_a_character_of_several_tokens_is_never_shown_in_part() -> None:
    out = TextStream(_tokenizer, (), ())
    tokens = ids("😀")
    assert len(tokens) == 4
    assert [out.push(token) for token in tokens] == ["", "", "", "😀"]


@pytest.mark.parametrize(
    ("text", "stop", "expected"),
    [
        ("one END two", ("END",), ("one ", "END")),
        ("one EN two", ("END",), ("one EN two", None)),
        ("one EN", ("END",), ("one EN", None)),
        ("a, b\n\nc", ("\n\n", ","), ("a", ",")),
        ("aab", ("ab",), ("a", "ab")),
        ("ENEND", ("END",), ("EN", "END")),
        ("stop", ("stop",), ("", "stop")),
    ],
)
def test_stop_strings_end_the_text_before_them(
    text: str, stop: tuple[str, ...], expected: tuple[str, str | None]
) -> None:
    assert stream(text, *stop) == expected


@given(st.text(alphabet="ab", max_size=12), st.lists(st.text(alphabet="ab", min_size=1, max_size=3), max_size=3))
def test_stopping_equals_cutting_the_whole_text(text: str, stops: list[str]) -> None:
    """Token by token the earliest complete stop string wins; its text never appears."""
    shown, stopped = stream(text, *stops)
    assert (stopped is not None) == any(stop in text for stop in stops)
    assert text.startswith(shown)
    assert not any(stop in shown for stop in stops)


def test_only_special_tokens_that_are_not_hidden_have_text() -> None:
    special = special_tokens(_tokenizer)
    assert set(special) == set(SPECIAL_TOKENS)
    out = TextStream(_tokenizer, (), {special["<|im_end|>"]})
    pieces = [out.push(token) for token in ids("a<|im_end|>b<|im_start|>c")]
    assert pieces == ["a", "", "b", "<|im_start|>", "c"]
    assert out.finish() == ""


def test_a_stop_string_is_found_in_special_tokens_that_are_shown() -> None:
    assert stream("a<|im_start|>b", "<|im_start|>b") == ("a", "<|im_start|>b")


_WORDS = ["▁a", "b", "▁", "▁the", "日", "é", "🦀"]


def byte_fallback() -> Any:
    """A tokenizer as SentencePiece models have it: words, and bytes for all else."""
    vocab = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *_WORDS]
    backend = Tokenizer(
        models.BPE(vocab={piece: i for i, piece in enumerate(vocab)}, merges=[], unk_token="<unk>", byte_fallback=True)
    )
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return SimpleNamespace(backend_tokenizer=backend)


def streamed(*pieces: str | int, stop: tuple[str, ...] = ()) -> str:
    """The text of words (as in the vocabulary) and bytes."""
    out = TextStream(_byte_fallback, stop, ())
    tokens = [1 + piece if isinstance(piece, int) else 257 + _WORDS.index(piece) for piece in pieces]
    return "".join(out.push(token) for token in tokens) + out.finish()


_byte_fallback = byte_fallback()
_SUN = tuple("日".encode())


@pytest.mark.parametrize(
    ("pieces", "text"),
    [
        (("▁the", *_SUN, *_SUN, "▁a", *_SUN), "the日日 a日"),
        ((*_SUN, 0xFF, "▁the", "▁a"), "日� the a"),
        ((*_SUN, 0xFF, *_SUN[:2], "b", *_SUN), "日���b日"),
        ((*_SUN, 0xFF), "日�"),
        (("▁a", *_SUN, _SUN[0], "▁the", _SUN[0], "日"), "a日� the�日"),
        ((0xFF, "▁the", "▁the"), "� the the"),
    ],
)
def test_bytes_that_make_no_character_do_not_end_the_reply(pieces: tuple[str | int, ...], text: str) -> None:
    assert streamed(*pieces) == text


@pytest.mark.parametrize("word", ["b", "▁the"])
@pytest.mark.parametrize("num", [16, 17, 18, 19, 40])
def test_many_bytes_that_make_no_character_are_shown_before_the_next_one(num: int, word: str) -> None:
    text = "b" + "�" * num + word.replace("▁", " ")
    assert streamed("b", *[0xFF] * num, word) == text
    assert streamed("b", *[0xFF] * num, *_SUN, word).endswith(word.replace("▁", " "))


@pytest.mark.parametrize("num", range(1, 30))
def test_the_character_that_stands_for_broken_bytes_is_shown_as_it_is(num: int) -> None:
    assert stream("a" + "�" * num + "日b") == ("a" + "�" * num + "日b", None)
    bytes_of = tuple("�".encode())
    assert streamed("b", *bytes_of * num, "▁the") == "b" + "�" * num + " the"


class CountingBackend:
    """Counts the tokens that are decoded. A stream of it decodes what it has not shown."""

    def __init__(self, backend: Any) -> None:
        self.backend = backend
        self.num_decoded = 0

    def decode(self, ids: list[int], *, skip_special_tokens: bool) -> str:
        self.num_decoded += len(ids)
        text: str = self.backend.decode(ids, skip_special_tokens=skip_special_tokens)
        return text


def test_broken_bytes_are_not_decoded_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    class Stream:
        def __init__(self, ids: tuple[int, ...] = (), **_: bool) -> None:
            self.ids = list(ids)

        def step(self, backend: CountingBackend, token: int) -> None:
            self.ids.append(token)
            backend.decode(self.ids, skip_special_tokens=False)

    monkeypatch.setattr(detokenize, "DecodeStream", Stream)
    counts = []
    for num in (1000, 2000):
        backend = CountingBackend(_byte_fallback.backend_tokenizer)
        out = TextStream(SimpleNamespace(backend_tokenizer=backend), (), ())
        for _ in range(num):
            out.push(1 + 0xFF)
        counts.append(backend.num_decoded)
    assert counts[1] < 3 * counts[0]


class CountedText(str):
    """Counts how often a character of it is looked at, and how much of it is copied."""

    looked_at = 0

    def __getitem__(self, place: Any) -> str:
        part = super().__getitem__(place)
        CountedText.looked_at += max(1, len(part))
        return part


def test_a_stop_string_that_is_held_is_not_compared_again_for_each_token() -> None:
    CountedText.looked_at = 0
    stops = ("a" * 1000 + "x", *(CountedText("a" * num + "b" + "c" * 900) for num in range(1, 16)))
    out = TextStream(_tokenizer, stops, ())
    for token in ids("a" * 500):
        out.push(token)
    assert CountedText.looked_at < 500 * len(stops) * 8


def test_a_stop_string_is_found_after_broken_bytes() -> None:
    assert streamed(*_SUN, 0xFF, "▁the", stop=(" the",)) == "日�"


@given(st.lists(st.one_of(st.sampled_from(_WORDS), st.integers(0, 255)), max_size=40))
def test_whatever_bytes_come_the_words_are_kept(pieces: list[str | int]) -> None:
    text = streamed("b", *pieces)
    at = 0
    for piece in pieces:
        if isinstance(piece, str):
            word = piece.replace("▁", " ")
            at = text.index(word, at) + len(word)
