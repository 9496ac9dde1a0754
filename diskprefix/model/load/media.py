"""What reads the pictures and sounds of a request for a multimodal model. An extra does it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias

from diskprefix.nouns import MediaKind, Medium

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast, ProcessorMixin

    from diskprefix.model.gguf.encoders import PictureSettings

Detail: TypeAlias = Literal["auto", "low", "high"]
"""How closely the model shall look at a picture, as OpenAI's clients say it."""


class MediaProcessor(Protocol):
    """Reads the media of one model. Safe to call from several threads.

    `kinds` are those of the media that the model takes; `problem` says why it takes none. A text must not contain
    `placeholders`. By kind, `marks` has the text that the chat template writes for a medium, and `token_ids` the token
    that stands for a row of the encoder's output.
    """

    problem: str | None
    kinds: frozenset[MediaKind]
    placeholders: frozenset[str]
    marks: Mapping[MediaKind, str]
    token_ids: Mapping[MediaKind, int]

    def read_image(
        self, content: bytes, *, detail: Detail, param: str, beside: Sequence[Medium] = ()
    ) -> Medium:
        """Returns a picture, of which only the header is read. `param` is the path of its content. Raises `InvalidRequest` if it is none, or too large with the media `beside`."""

    def read_audio(self, content: bytes, *, param: str, beside: Sequence[Medium] = ()) -> Medium:
        """Returns a sound. Raises `InvalidRequest` if it is none, or too long with the media `beside`."""


def make_processor(pictures: PictureSettings, tokenizer: PreTrainedTokenizerFast) -> ProcessorMixin:
    """Returns transformers' processor of a `.gguf` model, with the model's tokenizer. Raises what its parts raise."""
    import transformers

    image_class, wanted = (getattr(transformers, name) for name in pictures.processors)

    def check(self: Any, name: str, part: Any) -> Any:
        # Videos need torchvision, and sounds another encoder.
        return None if part is None else wanted.check_argument_for_proper_class(self, name, part)

    tokenizer._set_model_specific_special_tokens(dict(pictures.tokens))
    tokenizer.add_tokens([*pictures.tokens.values()], special_tokens=True)
    lenient: Any = type(wanted.__name__, (wanted,), {"check_argument_for_proper_class": check})
    parts = {"tokenizer": tokenizer, "image_processor": image_class(**pictures.images)}
    missing = dict.fromkeys(set(wanted.get_attributes()) - parts.keys())
    found: ProcessorMixin = lenient(**parts, **missing, **pictures.settings)
    return found
