"""Fill-in-the-middle prompts of code editors, with the tags that llama.cpp's server knows (`llama-vocab.cpp`)."""

from __future__ import annotations

from collections.abc import Callable, Collection

from msgspec import Struct
from msgspec.structs import replace

from diskprefix.errors import InvalidRequest


class FillIn(Struct, frozen=True):
    """A text with a gap between `prefix` and `suffix`; the filling starts with `beginning`. `files`, pairs of name and
    text, are context. Errors name `path`. With `special_tokens_in_text`, texts may spell control tokens."""

    prefix: str
    suffix: str
    path: str
    files: tuple[tuple[str, str], ...] = ()
    beginning: str = ""
    special_tokens_in_text: bool = False

    def changed(self, change: Callable[[str], str]) -> FillIn:
        """Returns the gap with each text changed."""
        files = tuple((change(name), change(text)) for name, text in self.files)
        prefix, suffix, beginning = map(change, (self.prefix, self.suffix, self.beginning))
        return replace(self, prefix=prefix, suffix=suffix, beginning=beginning, files=files)


class FillInTags(Struct, frozen=True):
    """The tags of a family of models. With `suffix_first`, the suffix comes first. `file` precedes a file's name."""

    prefix: str
    suffix: str
    middle: str = ""
    suffix_first: bool = False
    file: str = ""
    ends: tuple[str, ...] = ()
    """Added tokens that end a reply, besides the model's own."""

    def text_of(self, gap: FillIn) -> str:
        prefix, suffix = self.prefix + gap.prefix, self.suffix + gap.suffix
        parts = (suffix, prefix) if self.suffix_first else (prefix, suffix)
        files = [f"{self.file}{name}\n{text}\n" for name, text in gap.files] if self.file else []
        return "".join([*files, self.file if files else "", *parts, self.middle, gap.beginning])


_PADS = ("<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "<fim_pad>", "<fim-pad>")
_KNOWN = (
    FillInTags("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", file="<|file_sep|>", ends=_PADS),
    FillInTags("<fim_prefix>", "<fim_suffix>", "<fim_middle>", file="<file_sep>", ends=(*_PADS, "<file_sep>")),
    FillInTags("<fim-prefix>", "<fim-suffix>", "<fim-middle>", ends=_PADS),
    FillInTags("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
    FillInTags("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),
    FillInTags("<|prefix|>", "<|suffix|>", "<|middle|>"),
    FillInTags("▁<PRE>", "▁<SUF>", "▁<MID>", ends=("▁<EOT>",)),
    FillInTags("<[fim-prefix]>", "<[fim-suffix]>", "<[fim-middle]>", suffix_first=True),
    FillInTags("[PREFIX]", "[SUFFIX]", suffix_first=True),
)


def fill_in_tags(added: Collection[str], gap: FillIn) -> FillInTags:
    """Returns the tags whose texts are all `added` tokens. Raises `InvalidRequest` if the model has none."""
    for tags in _KNOWN:
        if all(tag in added for tag in (tags.prefix, tags.suffix, tags.middle) if tag):
            file = tags.file if tags.file in added else ""
            return replace(tags, file=file, ends=tuple(end for end in tags.ends if end in added))
    problem = "this model's tokenizer names no tokens for filling in; serve one that was trained for it, such as "
    raise InvalidRequest.at(gap.path, f"{problem}Qwen2.5-Coder", code="unsupported")
