"""A long text is encoded in parts, which stay in memory and give the tokens of the whole text."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers
from tokenizers.processors import TemplateProcessing

from diskprefix.daemon.chat import encoder as encoder_module
from diskprefix.daemon.chat.encoder import Encoder, TextParts
from diskprefix.daemon.chat.known_parts import Encoding, KnownParts, OwnedParts
from diskprefix.errors import ContextTooLong, InvalidRequest
from diskprefix.runtime.files.tokenizer import Tokenizer as FolderTokenizer
from tests.daemon.chat.rendering import assert_whole, encoder_of


@pytest.fixture(autouse=True)
def _short_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoder_module, "PART_CHARS", 16)


def made_up(*added: AddedToken, **options: Any) -> Any:
    letters = {letter: index for index, letter in enumerate(["▁", "?", *"abcdefgh<|>:e "])}
    backend = Tokenizer(models.BPE(vocab=letters, merges=[], unk_token="?"))
    backend.pre_tokenizer = options.get("pre_tokenizer") or pre_tokenizers.Split("|", "isolated")
    if "normalizer" in options:
        backend.normalizer = options["normalizer"]
    backend.add_tokens(list(added))
    backend.add_tokens([AddedToken("?", special=True)])
    return FolderTokenizer(backend, {"unk_token": "?"})


def token(text: str, **options: Any) -> AddedToken:
    return AddedToken(
        text, special=options.pop("special", True), normalized=options.pop("normalized", False), **options
    )


def test_a_token_that_has_to_do_with_what_stands_before_it_begins_no_part() -> None:
    """Each of these would give other tokens than the whole text."""
    plain, text = token("<:>"), "abc abc <:> abc " * 12
    assert len(TextParts(made_up(plain)).of(text)) > 4
    for other in (
        token("<:>", lstrip=True),
        token("<:>", single_word=True),
        token("<:>", normalized=True),
        token("<:>", special=False),
    ):
        assert TextParts(made_up(other)).of(text) == [text], other
        assert_whole(made_up(other), text)
    for beside in (token("<:> a", lstrip=True), token("<:> abc", single_word=True), token("c <"), token("c <:> ab")):
        tokenizer = made_up(plain, beside)
        assert not any(part.startswith("<:>") for part in TextParts(tokenizer).of(text)), beside
        assert_whole(tokenizer, text)


def test_single_word_tokens_are_the_same_in_parts_and_whole() -> None:
    """A token that must be a word of its own is none where the next part goes on with a letter."""
    word, text = token("abc", single_word=True), "abc abcde:abc abc " * 12
    assert TextParts(made_up(word, token("de:"))).of(text) == [text]
    assert len(TextParts(made_up(word, token(":a"))).of(text)) > 4
    for separator in ("de:", ":a"):
        assert_whole(made_up(word, token(separator)), text)


def test_a_part_of_a_text_is_not_its_beginning() -> None:
    """A tokenizer puts nothing before a part that it puts before a text."""
    first = pre_tokenizers.Metaspace(prepend_scheme="first")
    always = pre_tokenizers.Metaspace(prepend_scheme="always")
    prepended = normalizers.Prepend("▁")
    for tokenizer in (
        made_up(token("<:>"), pre_tokenizer=first),
        made_up(token("<:>"), pre_tokenizer=always),
        made_up(token("<:>"), normalizer=prepended),
        made_up(token("<:>"), normalizer=normalizers.Strip()),
    ):
        for text in ("abc abc abc abc <:> abc" * 5, "<:><:>abc <:>  abc" * 5, " <:> " * 9):
            assert_whole(tokenizer, text)


def test_added_tokens_surround_the_parts() -> None:
    tokenizer = made_up(token("<:>"), token("<a>"), token("<b>"))
    ids = [(text, tokenizer.backend_tokenizer.token_to_id(text)) for text in ("<a>", "<b>")]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<a> $A <b> <a>", special_tokens=ids)
    for text in ("", "a", "<a>abc<b>", "abcd" * 10 + "<:>abc"):
        if text:
            assert_whole(tokenizer, text)
        encoding = encoder_of(tokenizer).encode(text, adds_special=True, param="prompt")
        assert (encoding.token_ids[0], encoding.token_ids[-2:].tolist()) == (ids[0][1], [ids[1][1], ids[0][1]])


def test_a_tokenizer_that_is_told_to_cut_special_tokens_has_no_parts() -> None:
    tokenizer = made_up(token("<:>"))
    tokenizer.backend_tokenizer.encode_special_tokens = True
    assert TextParts(tokenizer).of("abc abc abc abc <:> abc" * 5) == ["abc abc abc abc <:> abc" * 5]


def test_a_tokenizer_whose_parts_turn_out_different_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rule above is right for the tokenizers that are known; another one is tried."""
    monkeypatch.setattr(encoder_module, "_separating", lambda added: [each.content for each in added])
    text = "abc abc <:> abc " * 12
    assert len(TextParts(made_up(token("<:>"))).of(text)) > 4
    assert TextParts(made_up(token("<:>", lstrip=True))).of(text) == [text]


def test_a_text_is_not_cut_off_or_padded_as_the_tokenizers_file_says() -> None:
    backend = made_up(token("<:>")).backend_tokenizer
    backend.enable_truncation(5)
    backend.enable_padding(length=200)
    tokenizer = FolderTokenizer(backend, {})
    assert len(encoder_of(tokenizer).encode("abcd" * 10 + "<:>abc", param="prompt").token_ids) == 44


def test_parts_of_an_earlier_prompt_are_not_encoded_again(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer, known = made_up(token("<:>")), KnownParts()
    texts = ["abcd" * 10, "<:>" + "efgh" * 10, "<:>" + "hgfe" * 10]
    encoder, encoded = encoder_of(tokenizer), []
    whole = encoder._encoded

    def noted(texts: list[str]) -> list[Encoding]:
        encoded.extend(texts)
        return whole(texts)

    monkeypatch.setattr(encoder, "_encoded", noted)
    first = encoder.encode("".join(texts[:2]), param="prompt", known=OwnedParts(known, "me", 60))
    again = encoder.encode("".join(texts), param="prompt", known=OwnedParts(known, "me", 60, keeps=False))
    assert encoded == texts
    assert again.token_ids[: len(first.token_ids)].tolist() == first.token_ids.tolist()
    # What is not kept is encoded again, and so is a short end, faster than it is found, and what another caller had.
    encoder.encode("".join(texts) + "<:>abc", param="prompt", known=OwnedParts(known, "me", 60))
    assert (encoded[3:], len(known)) == ([texts[2], "<:>abc"], 3)
    encoder.encode(texts[0], param="prompt", known=OwnedParts(known, "you", 60))
    assert encoded[5:] == texts[:1]
    assert_whole(tokenizer, "".join(texts))


def test_a_prompt_that_is_refused_leaves_nothing() -> None:
    tokenizer, known = made_up(token("<:>")), KnownParts()
    small = Encoder(tokenizer, vocab_size=len(tokenizer), max_positions=40)
    mine = OwnedParts(known, "me", 60)
    with pytest.raises(ContextTooLong):
        small.encode("abcd" * 10 + "<:>abc", param="prompt", known=mine)
    with pytest.raises(InvalidRequest, match=r"prompt: half of a surrogate pair .*character 40"):
        small.encode("abcd" * 10 + "\ud800" + "abcd" * 10, param="prompt", known=mine)
    assert not len(known)


def test_known_parts_go_by_their_last_use_their_time_and_their_owner(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr("diskprefix.daemon.chat.known_parts.time.monotonic", lambda: now[0])
    monkeypatch.setattr("diskprefix.daemon.chat.known_parts._KNOWN_TOKENS", 20)
    known, part = KnownParts(), Encoding(np.arange(8, dtype=np.int32), np.zeros((8, 2), np.int32))
    for text in ("a", "b"):
        known.put("me", text, part, 60)
    assert known.get("me", "a") is part
    known.put("me", "c", part, 10)
    assert [text for text in "abc" if known.get("me", text)] == ["a", "c"]
    now[0] += 10
    assert known.get("me", "c") is None
    known.forget(lambda owner: owner == "you")
    assert len(known) == 1
    known.put("you", "d", part, 60, "another share")
    for number in range(9):
        known.put(f"me with salt {number}", "e", part, 60)
    assert known.get("you", "d") is part
    known.forget(lambda owner: owner != "you")
    assert len(known) == 1
