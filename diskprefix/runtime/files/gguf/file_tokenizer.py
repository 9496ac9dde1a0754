"""The tokenizer that the metadata of a `.gguf` file describe.

The added tokens, the special tokens and the cuts of a text follow llama.cpp's `src/llama-vocab.cpp`. Where it has two
spellings of a pattern, ours is the spelling of the models' `tokenizer.json`. In two things the models are followed, not
llama.cpp: characters are composed (`_COMPOSED`), and an ordinary token is no control token for its text alone (Qwen's
vocabularies have `</s>`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from diskprefix.errors import ModelError
from diskprefix.printable import first_line
from diskprefix.runtime.files.chat_template import fault_of_template
from diskprefix.runtime.files.gguf.gguf_header import GgufHeader
from diskprefix.runtime.files.gguf.gguf_strings import StringPiece
from diskprefix.runtime.files.gguf.metadata import ENDS_OF_TURN, Metadata, shown
from diskprefix.runtime.files.gguf.vocabulary_parts import VocabularyParts, pair_of
from diskprefix.runtime.files.string_hashes import LONGEST
from diskprefix.runtime.files.tokenizer import Tokenizer, set_ends

if TYPE_CHECKING:
    from tokenizers import AddedToken
    from tokenizers import Tokenizer as Backend

_PREFIX = "tokenizer.ggml."
_OTHERS = ("tokenizer.huggingface.json", "tokenizer.rwkv.world")
"""Keys of further tokenizers that the format allows. They may differ from the first one."""
_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4
"""The types of tokens that a text is searched for before it is cut."""
_TEMPLATES = {"default": "tokenizer.chat_template", "tool_use": "tokenizer.chat_template.tool_use"}
"""The keys of templates by transformers' names. Templates with other names are not used."""
_SPECIAL = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
_KEEPS_BLANKS = frozenset({"<unk>", "<s>", "<|endoftext|>"})
"""Special tokens of Phi 3 that do not include the blanks after them. All others do; files do not say so."""
_OF_OLD_FILES = {"bos": 1, "eos": 2, "unknown": 0}

_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_BEFORE, _ENDING = r"[^\r\n\p{L}\p{N}]?", "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"


def _words(digits: str) -> str:
    return rf"{_ENDING}|{_BEFORE}\p{{L}}+|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"


def _cased(ending: str, others: str, upper: str = _UPPER, lower: str = _LOWER) -> str:
    return f"{_BEFORE}{upper}*{lower}+{ending}|{_BEFORE}{upper}+{lower}*{ending}|{others}|{_SPACES}"


_GPT_2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_DIGITS_APART = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?![^\s\p{N}])|\s+"
"""GPT-2's pattern, with each digit cut off. One pattern is faster than two."""
_GPT_4O = _cased(f"{_ENDING}?", r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*")
_DEEPSEEK_LLM = (
    r"[\r\n]",
    # The model's own list of letters lacks the lower case of Armenian and Georgian.
    r"\s?[\p{Lu}\p{Ll}\p{Lt}&&[^\p{Armenian}\p{Georgian}]]+",
    r"\s?[!-/:-~\x{ff01}-\x{ff0f}\x{ff1a}-\x{ff5e}\x{2018}-\x{201f}\x{3000}-\x{3002}]+",
    r"\s+$",
    r"[\x{800}-\x{9fa5}\x{ac00}-\x{d7ff}]+",
    r"\p{N}+",
)
_DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", r"[\x{800}-\x{9fa5}\x{ac00}-\x{d7ff}]+", r"\p{N}")
_DEEPSEEK_3 = (
    r"\p{N}{1,3}",
    r"[\x{4e00}-\x{9fa5}\x{3040}-\x{309f}\x{30a0}-\x{30ff}]+",
    rf"[!-/:-@\[-`{{-~][A-Za-z]+|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}",
)
_GROUPED_DIGITS = r"\p{N}{1,2}(?=(?:\p{N}{3})*(?!\p{N}))|\p{N}{3}"
"""Digits in groups of three, counted from the last."""
_ASIAN = (
    r"\x{4e00}-\x{9fff}\x{3400}-\x{4dbf}\x{f900}-\x{faff}\x{3040}-\x{30ff}\x{ff65}-\x{ff9f}\x{2f00}-\x{2fdf}"
    r"\x{0e40}-\x{0e7f}\x{0e80}-\x{0eff}\x{1780}-\x{17ff}\x{1000}-\x{109f}\x{aa60}-\x{aa7f}\x{a9e0}-\x{a9ff}"
    r"\x{ac00}-\x{d7af}\x{1100}-\x{11ff}"
)
_EXAONE_MOE = (
    rf"{_ENDING}|{_BEFORE}(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]?"
    r"|\s*[\r\n]|\s+(?!\S)|\s+"
)
_BLANKS = "".join(rf"|\s{{{count}}}(?!\S)" for count in (512, 256, 128, 64, 32, 16, 8, 4))
_JAIS_2 = (
    rf"{_ENDING}|{_BEFORE}\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+{_BLANKS}"
    r"|\s{1,2}(?!\S)|\s"
)
_YOUTU = "[가-힣ㄱ-ㆎ]+|[！…“”‘’—：；，、-〿︰-﹏]+|[ㄅ-ㄯ]+|[一-龥぀-ゟ゠-ヿ]+"
_KIMI_CASES = [f"{letters[:-1]}&&[^\\p{{Han}}]]" for letters in (_UPPER, _LOWER)]
_KIMI = r"\p{Han}+|" + _cased(f"{_ENDING}?", r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*", *_KIMI_CASES)
_QWEN_35 = rf"{_ENDING}|{_BEFORE}[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}"
_BAILING = r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
_LLAMA_3 = "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano"

_CUTS: Sequence[tuple[str, tuple[str, ...]]] = (
    ("default", (r"[\p{P}\$\+<=>\^~\|]+", _GPT_2, r"\p{N}+", "[0-9][0-9][0-9]")),
    ("gpt-2 phi-2 gigachat a.x-4.0 mellum mpt olmo jais trillion granite-docling exaone4", (_GPT_2,)),
    ("smollm starcoder refact command-r codeshell exaone minerva-7b mellum2", (_DIGITS_APART,)),
    (f"{_LLAMA_3} dbrx smaug-bpe chatglm-bpe glm4 glm5", (_words(r"\p{N}{1,3}"),)),
    ("qwen2 deepseek-r1-qwen kormo f2llmv2 megrez stablelm2 hunyuan solar-open grok-2", (_words(r"\p{N}"),)),
    ("qwen35", (_QWEN_35,)),
    # Line ends are always separate.
    ("laguna", (r"[^\n]+|[\n]+", _words(r"\p{N}"))),
    ("minicpm5", (r"\p{N}{1,3}", _words(r"\p{N}+"))),
    ("tekken", (_cased("", r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*"),)),
    ("gpt-4o llama4 kanana2 talkie minimax-m2", (_GPT_4O,)),
    ("tiny_aya cohere2moe", (r"\d{1,3}(?=(?:\d{3})*\b)", _GPT_4O)),
    ("afmoe", (_GROUPED_DIGITS, f"[{_ASIAN}]+", _DEEPSEEK_3[-1])),
    ("exaone-moe", (_EXAONE_MOE,)),
    ("jais-2", (_JAIS_2,)),
    ("deepseek-llm", _DEEPSEEK_LLM),
    ("deepseek-coder", _DEEPSEEK_CODER),
    ("deepseek-v3 hunyuan-dense joyai-llm hy_v4", _DEEPSEEK_3),
    ("youtu", (_YOUTU, _cased(f"{_ENDING}?", r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*"))),
    ("kimi-k2", (_KIMI,)),
    ("superbpe", (r"\p{N}+", r"(?=(\d{3})+(?!\d))")),
    ("bailingmoe bailingmoe2 llada-moe", (_BAILING,)),
    ("seed-coder", (rf"{_ENDING}|{_BEFORE}\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_SPACES}",)),
    ("viking", (r" ?[^(\s|.,!?…。，、।۔،)]+", r"\p{N}")),
)
"""Values of `tokenizer.ggml.pre`, and their patterns. Each pattern cuts the pieces of the previous one."""
_PATTERNS = {name: patterns for names, patterns in _CUTS for name in names.split()}
_COMPOSED = frozenset({"qwen2", "command-r"})
"""Values of `tokenizer.ggml.pre` whose models were trained on composed characters: é is one, also if a text has e and
an accent (the normalizer NFC of their `tokenizer.json`)."""
_ADDS_BOS = frozenset({*_LLAMA_3.split(), "tekken"})
"""Tokenizers that begin each text with the BOS token, unless the file says otherwise."""
_TAKES_WORDS = _ADDS_BOS | {"minicpm5", "youtu", "glm4", "glm5"}
"""Tokenizers in which a word that is a token needs no merges."""

_SAMPLES = (
    "The quick brown fox, he's 12345 times over it!\n\n\t  for (i = 0; i < 10; ++i) {}\r\n   ",
    "Größe naïve e\u0301 ½ ﬁ 日本語のテキスト 한국어 текст עברית नमस्ते 🙂👩‍👩‍👧\u200b\u0000\uffff",
    "<|im_start|>user\n<|eot_id|></s> <|endoftext|>x"
    + " " * 300
    + "https://example.org/?q=aGVsbG8gd29ybGQ"
    + "ab" * 200,
)
"""Texts of many kinds."""


class _Keys:
    """The tokenizer's keys in a file, by names without their prefix."""

    def __init__(self, header: GgufHeader) -> None:
        self.architecture = header.values.get("general.architecture")
        self._values, self._arrays = header.values, header.arrays
        self._metadata = Metadata(header, ())

    def __contains__(self, name: str) -> bool:
        return _PREFIX + name in self._arrays

    def get(self, name: str, default: Any = None) -> Any:
        """Returns a number or a string, or `default`. Raises `ModelError` for an array."""
        if name in self:
            raise ModelError(f"the file's {_PREFIX}{name} is an array")
        return self._values.get(_PREFIX + name, default)

    def flag(self, name: str, *, default: bool) -> bool:
        return self._metadata.tokenizer_flag(name, default=default)

    def strings(self, name: str) -> StringPiece:
        """Returns strings without making them. Raises `ModelError` for anything else."""
        array = self._arrays.get(_PREFIX + name)
        if array is None or (strings := array.strings) is None:
            raise ModelError(f"the file's {_PREFIX}{name} are not strings")
        return strings

    def array(self, name: str, count: int | None = None) -> Any:
        """Returns strings, or with `count` that many numbers. Raises `ModelError` for anything else."""
        if name not in self:
            raise ModelError(f"the file lacks the array {_PREFIX}{name}")
        content = self._arrays[_PREFIX + name].content
        if isinstance(content, list) != (count is None) or count not in (None, len(content)):
            raise ModelError(f"the file's {_PREFIX}{name} are not {f'{count} numbers' if count else 'strings'}")
        return content


def make_tokenizer(header: GgufHeader, *, in_parts: bool = False) -> Tokenizer:
    """Returns the tokenizer of a file, with its chat template. Raises `ModelError` with the name of a wrong key.

    With `in_parts`, a byte-level vocabulary is not made whole before it is needed, and neither it nor the templates are
    checked: only for a file that `parts_are_exact`.
    """
    keys = _Keys(header)
    kind = keys.get("model", "")
    if kind not in _KINDS:
        raise ModelError(
            f"the file's {_PREFIX}model is {shown(kind) if kind else 'missing'}; {', '.join(_KINDS)} are read"
        )
    if other := next((key for key in _OTHERS if key in header.values), None):
        raise ModelError(f"the file has two tokenizers: {_PREFIX}model and {other}")
    strings = keys.strings("tokens") if in_parts and kind == "gpt2" else None
    tokens: Sequence[str] | StringPiece
    if strings is not None:
        tokens, mark, numbers = strings, "", strings.numbers_of(ENDS_OF_TURN)
    else:
        tokens, mark = _distinct([token or f"[EMPTY_{number}]" for number, token in enumerate(keys.array("tokens"))])
        numbers = dict(zip(tokens, range(len(tokens)), strict=True))
    special = _special(Metadata(header, ()), tokens)
    added = _added_tokens(keys, tokens, [*special.values(), *(token for token in ENDS_OF_TURN if token in numbers)])
    make = partial(_make, keys, mark, special, added)
    if strings is None:
        merges = _merges_by_score(keys, numbers) if kind == "llama" and "merges" not in keys else _merges(keys)
        return Tokenizer(make(numbers, merges), special, chat_template=_templates(header))
    parts = VocabularyParts(strings, keys.strings("merges"), [token.content for token in added], make)
    return Tokenizer(parts.letters, special, chat_template=_templates(header), parts=parts)


def _make(
    keys: _Keys,
    mark: str,
    special: Mapping[str, str],
    added: list[AddedToken],
    vocabulary: dict[str, int],
    merges: list[tuple[str, str]],
) -> Backend:
    """Returns a tokenizer of the library with these tokens and merges. `mark` is as in `_distinct`."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models

    made, kind = Backend(models.BPE()), keys.get("model")
    decoded = _KINDS[kind](made, keys, vocabulary, merges, special.get("unk_token"))
    decoded = [decoders.Replace(mark, ""), *decoded] if mark else decoded
    made.decoder = decoders.Sequence(decoded) if len(decoded) > 1 else decoded[0]
    made.add_tokens([token for token in added if token.content in vocabulary])
    # Files of Gemma 4 from before April 2026 say that it is not added, and without it the model writes nonsense.
    adds_bos = keys.flag("add_bos_token", default=kind != "gpt2" or keys.get("pre") in _ADDS_BOS) or kind == "gemma4"
    adds_eos = keys.flag("add_eos_token", default=False)
    ends = (("bos_token", adds_bos), ("eos_token", adds_eos))
    bos, eos = (special.get(name) if is_added and special.get(name) in vocabulary else None for name, is_added in ends)
    set_ends(made, bos, eos)
    return made


def parts_are_exact(header: GgufHeader, whole: Tokenizer) -> bool:
    """Returns whether parts of the vocabulary of a file give the tokens and texts of the `whole`."""
    from tokenizers.pre_tokenizers import ByteLevel

    keys = _Keys(header)
    if keys.get("model") != "gpt2":
        return False
    tokens, merges = keys.array("tokens"), keys.array("merges")
    if "" in tokens or len(set(tokens)) < len(tokens):
        return False
    if keys.get("pre") in _TAKES_WORDS and not set(ByteLevel.alphabet()) <= set(tokens):
        # Without a letter's own token, the library drops the letter before the whole word is seen.
        return False
    if max(len(text.encode()) for text in (*tokens, *merges)) > LONGEST:
        return False
    in_parts = make_tokenizer(header, in_parts=True)
    if not in_parts.is_in_parts or len(in_parts) != len(whole):
        return False
    template = whole.chat_template
    for text in (*_SAMPLES, *(template.values() if isinstance(template, dict) else [template or ""])):
        [part], [expected] = (made.backend_for([text]).encode_batch([text]) for made in (in_parts, whole))
        if (part.ids, part.offsets) != (expected.ids, expected.offsets):
            return False
        if in_parts.decode(part.ids) != whole.decode(part.ids):
            return False
    return True


def _distinct(tokens: list[str]) -> tuple[list[str], str]:
    """Returns the texts of tokens, made distinct, and the mark that does it, "" if none is needed. Each repeated text
    has marks appended. So a text becomes the first of its tokens; the decoder removes the marks."""
    if len(set(tokens)) == len(tokens):
        return tokens, ""
    letters = set().union(*tokens)
    mark = next(chr(code) for code in range(0x10FFFD, 0x100000, -1) if chr(code) not in letters)
    seen: Counter[str] = Counter()
    distinct = []
    for token in tokens:
        distinct.append(token + mark * seen[token])
        seen[token] += 1
    return distinct, mark


def _byte_level(
    made: Backend, keys: _Keys, vocabulary: dict[str, int], merges: list[tuple[str, str]], _unknown: str | None
) -> list[Any]:
    """Sets up merges of pairs of bytes, which are written as characters. As all kinds, returns the decoders."""
    from tokenizers import Regex, decoders, normalizers, pre_tokenizers

    name = keys.get("pre", "default")
    if name not in _PATTERNS:
        raise ModelError(f"the file's {_PREFIX}pre is {shown(name)}, and nothing here knows how that cuts text")
    made.model = _merging(vocabulary, merges, ignore_merges=name in _TAKES_WORDS)
    if name in _COMPOSED:
        made.normalizer = normalizers.NFC()
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in _PATTERNS[name]]
    bytewise = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.pre_tokenizer = pre_tokenizers.Sequence([*splits, bytewise])
    return [decoders.ByteLevel()]


def _sentence_pieces(
    made: Backend, keys: _Keys, vocabulary: dict[str, int], merges: list[tuple[str, str]], unknown: str | None
) -> list[Any]:
    """Sets up merges of pairs of characters. A blank is ▁. Characters without a token are written as bytes."""
    from tokenizers import decoders, normalizers

    made.model = _merging(vocabulary, merges, byte_fallback=True, fuse_unk=True, unk_token=unknown)
    normal: list[Any] = [normalizers.Replace(" ", "▁")]
    decoded: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if keys.flag("add_space_prefix", default=keys.get("model") == "llama"):
        normal.insert(0, normalizers.Prepend("▁"))
        decoded.append(decoders.Strip(" ", left=1))
    made.normalizer = normalizers.Sequence(normal)
    return decoded


_KINDS: Mapping[str, Callable[[Backend, _Keys, dict[str, int], list[tuple[str, str]], str | None], list[Any]]] = {
    "gpt2": _byte_level,
    "llama": _sentence_pieces,
    "gemma4": _sentence_pieces,
}
"""By `tokenizer.ggml.model`. No supported architecture has another kind."""


def _merging(vocabulary: dict[str, int], merges: list[tuple[str, str]], **options: Any) -> Any:
    from tokenizers import models

    try:
        return models.BPE(vocab=vocabulary, merges=merges, **options)
    except Exception as error:  # tokenizers raises nothing narrower
        raise ModelError(f"the file's {_PREFIX}merges: {first_line(error)}") from error


def _merges(keys: _Keys) -> list[tuple[str, str]]:
    return list(map(pair_of, keys.array("merges")))


def _merges_by_score(keys: _Keys, vocabulary: dict[str, int]) -> list[tuple[str, str]]:
    """Returns the pairs of tokens that make a token, best first. Equals are in the order of tokens, then of the length
    of the left part, longest first, as in each `tokenizer.json` made from such a vocabulary."""
    tokens, merges = list(vocabulary), []
    scores = keys.array("scores", len(tokens)).astype(np.float64)
    lefts, rights = _longest_beginnings(tokens), _longest_beginnings([token[::-1] for token in tokens])
    for number in np.argsort(-scores, kind="stable").tolist():
        endings = {len(tokens[part]): tokens[part] for part in _followed(rights, number)}
        pairs = ((tokens[part], len(tokens[number]) - len(tokens[part])) for part in _followed(lefts, number))
        merges += [(left, endings[rest]) for left, rest in pairs if rest in endings]
    return merges


def _longest_beginnings(tokens: Sequence[str]) -> list[int]:
    """Returns for each token the number of the longest other token that it begins with, or -1. The time grows with the
    sum of the lengths, because a file may have a token of megabytes."""
    longest, beginnings = [-1] * len(tokens), list[int]()
    # In sorted order, a token comes after its prefixes, with only other tokens with the same prefix between.
    for number in sorted(range(len(tokens)), key=tokens.__getitem__):
        while beginnings and not tokens[number].startswith(tokens[beginnings[-1]]):
            beginnings.pop()
        longest[number] = beginnings[-1] if beginnings else -1
        beginnings.append(number)
    return longest


def _followed(links: Sequence[int], number: int) -> Iterator[int]:
    while (number := links[number]) >= 0:
        yield number


def _special(metadata: Metadata, tokens: Sequence[str] | StringPiece) -> dict[str, str]:
    """Returns the texts of special tokens by transformers' names."""
    is_old = metadata.header.values.get(f"{_PREFIX}model") == "llama"
    numbers = {name: metadata.token(key, _OF_OLD_FILES.get(key) if is_old else None) for name, key in _SPECIAL.items()}
    return {name: tokens[number] for name, number in numbers.items() if number is not None}


def _added_tokens(keys: _Keys, tokens: Sequence[str] | StringPiece, special: Collection[str]) -> list[AddedToken]:
    """Returns the tokens that a text is searched for before it is cut: tokens of some types, and `special` ones."""
    from tokenizers import AddedToken

    kinds = dict.fromkeys(special, _CONTROL)
    if "token_type" in keys:
        types = keys.array("token_type", len(tokens))
        first = np.flatnonzero(np.isin(types, (_UNKNOWN, _CONTROL, _USER_DEFINED)))
        kinds = {tokens[number]: int(types[number]) for number in first.tolist()} | kinds
    takes_blanks = kinds.keys() - _KEEPS_BLANKS if keys.architecture == "phi3" and keys.get("model") == "llama" else ()
    return [
        AddedToken(token, special=kind != _USER_DEFINED, normalized=False, rstrip=token in takes_blanks)
        for token, kind in kinds.items()
    ]


def _templates(header: GgufHeader) -> str | dict[str, str] | None:
    """Returns the chat template, or two by name if the file has one for tools. Raises `ModelError` for a template that
    does not parse."""
    templates: dict[str, str] = {}
    for name, key in _TEMPLATES.items():
        template: Any = header.arrays.get(key) or header.values.get(key)
        if template is None:
            continue
        not_text = "it is not UTF-8" if isinstance(template, bytes) else "it is not text"
        if fault := fault_of_template(template) if isinstance(template, str) else not_text:
            raise ModelError(f"the file's {key}: {fault}")
        templates[name] = template
    return templates if len(templates) > 1 else next(iter(templates.values()), None)
