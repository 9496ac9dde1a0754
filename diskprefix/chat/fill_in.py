"""A text with a gap, as code editors send it, written with the tags that a tokenizer names for it.

The tags are those that llama.cpp's server knows (`llama-vocab.cpp`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace

from diskprefix.errors import InvalidRequest


@dataclass(frozen=True)
class FillIn:
    """A text with a gap behind `before`. `files` are others, by name, that the model may look at. `begun` is the
    beginning of what is written into the gap. `path` is the field of the request that asks for it. With
    `special_tokens_in_text`, the texts may spell control tokens."""

    before: str
    behind: str
    path: str
    files: tuple[tuple[str, str], ...] = ()
    begun: str = ""
    special_tokens_in_text: bool = False

    def changed(self, change: Callable[[str], str]) -> FillIn:
        """Returns the gap with each of its texts changed."""
        files = tuple((change(name), change(text)) for name, text in self.files)
        before, behind, begun = map(change, (self.before, self.behind, self.begun))
        return replace(self, before=before, behind=behind, begun=begun, files=files)


@dataclass(frozen=True)
class FillInTags:
    """The tags of a family of models. With `behind_first`, what is behind the gap comes first. `file` separates files,
    each of which begins with its name."""

    before: str
    behind: str
    middle: str = ""
    behind_first: bool = False
    file: str = ""
    ends: tuple[str, ...] = ()
    """Added tokens that end a reply, besides the model's own."""

    def text_of(self, gap: FillIn) -> str:
        before, behind = self.before + gap.before, self.behind + gap.behind
        parts = (behind, before) if self.behind_first else (before, behind)
        files = [f"{self.file}{name}\n{text}\n" for name, text in gap.files] if self.file else []
        return "".join([*files, self.file if files else "", *parts, self.middle, gap.begun])


_PADS = ("<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "<fim_pad>", "<fim-pad>")
_KNOWN = (
    FillInTags("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", file="<|file_sep|>", ends=_PADS),
    FillInTags("<fim_prefix>", "<fim_suffix>", "<fim_middle>", file="<file_sep>", ends=(*_PADS, "<file_sep>")),
    FillInTags("<fim-prefix>", "<fim-suffix>", "<fim-middle>", ends=_PADS),
    FillInTags("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
    FillInTags("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),
    FillInTags("<|prefix|>", "<|suffix|>", "<|middle|>"),
    FillInTags("▁<PRE>", "▁<SUF>", "▁<MID>", ends=("▁<EOT>",)),
    FillInTags("<[fim-prefix]>", "<[fim-suffix]>", "<[fim-middle]>", behind_first=True),
    FillInTags("[PREFIX]", "[SUFFIX]", behind_first=True),
)


def fill_in_tags(added: Collection[str], gap: FillIn) -> FillInTags:
    """Returns the tags for `gap`, of which `added`, the tokenizer's added tokens, has all. Raises `InvalidRequest` if
    the model was not trained to fill a gap."""
    for tags in _KNOWN:
        if all(tag in added for tag in (tags.before, tags.behind, tags.middle) if tag):
            file = tags.file if tags.file in added else ""
            ends = tuple(end for end in tags.ends if end in added)
            return FillInTags(tags.before, tags.behind, tags.middle, tags.behind_first, file, ends)
    raise InvalidRequest.at(
        gap.path,
        "this model's tokenizer names no tokens for filling in; serve one that was trained for it, such as "
        "Qwen2.5-Coder",
        code="unsupported",
    )
