"""Sets how the tokenizer of a GGUF file cuts text before it merges bytes, where transformers does not know it.

The file has only a name for that, `tokenizer.ggml.pre`. transformers takes GPT-2's rule for all names that it does not
know. What the names mean is in llama.cpp's `src/llama-vocab.cpp`, and in the `tokenizer.json` of the models.
"""

from __future__ import annotations

from typing import Any

from diskprefix.progress import Report

_AS_GPT2 = frozenset({"default", "gpt-2", "gpt2", "mpt", "olmo", "jais", "trillion", "granite-docling"})
_DIGITS_FIRST = frozenset({"smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"})
_AS_LLAMA_3 = frozenset({"glm4", "chatglm-bpe"})
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_DEEPSEEK = (
    r"[\r\n]",
    # The model's own list of letters lacks those of Armenian and Georgian in lower case.
    r"\s?[\p{Lu}\p{Ll}\p{Lt}&&[^\p{Armenian}\p{Georgian}]]+",
    r"\s?[!-/:-~\x{ff01}-\x{ff0f}\x{ff1a}-\x{ff5e}\x{2018}-\x{201f}\x{3000}-\x{3002}]+",
    r"\s+$",
    r"[\x{800}-\x{9fa5}\x{ac00}-\x{d7ff}]+",
    r"\p{N}+",
)
_DEEPSEEK_3 = (
    r"\p{N}{1,3}",
    r"[\x{4e00}-\x{9fa5}\x{3040}-\x{309f}\x{30a0}-\x{30ff}]+",
    rf"[!-/:-@\[-`{{-~][A-Za-z]+|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}",
)
_UPPER, _LOWER = (rf"[{kind}\p{{Lm}}\p{{Lo}}\p{{M}}&&[^\p{{Han}}]]" for kind in (r"\p{Lu}\p{Lt}", r"\p{Ll}"))
_BEFORE, _ENDING = r"[^\r\n\p{L}\p{N}]?", "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_KIMI = (
    rf"\p{{Han}}+|{_BEFORE}{_UPPER}*{_LOWER}+{_ENDING}|{_BEFORE}{_UPPER}+{_LOWER}*{_ENDING}"
    rf"|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}",
)
_PATTERNS = {"deepseek-llm": _DEEPSEEK, "deepseek-v3": _DEEPSEEK_3, "joyai-llm": _DEEPSEEK_3, "kimi-k2": _KIMI}
"""Each pattern cuts the pieces that the one before leaves."""


def set_splits(tokenizer: Any, name: str | None, report: Report) -> None:
    """Sets how a byte-level `tokenizer` of transformers cuts text, if it took GPT-2's rule. `name` is in the file."""
    from tokenizers import Regex, pre_tokenizers
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    backend = tokenizer.backend_tokenizer
    if not isinstance(backend.pre_tokenizer, pre_tokenizers.ByteLevel):
        return
    patterns = (GGUF_PRE_TOKENIZER_SPLITS["llama3"],) if name in _AS_LLAMA_3 else _PATTERNS.get(name or "", ())
    if patterns:
        splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns]
        bytewise = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        backend.pre_tokenizer = pre_tokenizers.Sequence([*splits, bytewise])
    elif name in _DIGITS_FIRST:
        digits = pre_tokenizers.Digits(individual_digits=True)
        backend.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    elif name is not None and name not in _AS_GPT2:
        report(f"warning: the tokenizer's rule {name!r} is not known; some text may give other tokens")
