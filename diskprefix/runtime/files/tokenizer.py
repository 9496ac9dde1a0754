"""A tokenizer with its chat template."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from threading import Lock
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend
from tokenizers.processors import TemplateProcessing

if TYPE_CHECKING:
    from numpy.typing import NDArray

_CLEANED = (" .", " ?", " !", " ,", " ' ", " n't", " 'm", " 's", " 've", " 're")


class Parts(Protocol):
    """Makes tokenizers with parts of a vocabulary."""

    def __len__(self) -> int: ...

    def whole(self) -> Backend:
        """Returns the tokenizer with the whole vocabulary."""

    def of_texts(self, texts: Sequence[str]) -> Backend | None:
        """Returns a tokenizer that encodes these texts as the whole does; None if the whole should do it."""

    def of_ids(self, ids: Iterable[int]) -> Backend:
        """Returns a tokenizer that decodes these ids as the whole does."""


class Tokenizer:
    """A tokenizer of the library `tokenizers`, the names of its special tokens, and its chat templates.

    The names of attributes and methods are transformers'. `special_tokens_map` has the named special tokens, which
    templates see; `extra_special_tokens` have no names. With `cleans_up`, decoded text has no blanks before signs. With
    `parts`, the library's tokenizer is made when it is needed or `make_whole` is called, and `backend` is one like it
    with the added tokens. Thread-safe.
    """

    def __init__(
        self,
        backend: Backend,
        special_tokens_map: Mapping[str, str],
        *,
        extra_special_tokens: Sequence[str] = (),
        chat_template: str | dict[str, str] | None = None,
        name_or_path: str = "",
        cleans_up: bool = False,
        parts: Parts | None = None,
    ) -> None:
        # A file may ask for them.
        backend.no_padding()
        backend.no_truncation()
        self._named, self._parts, self._making = backend, parts, Lock()
        self.special_tokens_map = dict(special_tokens_map)
        self.extra_special_tokens = list(extra_special_tokens)
        self.chat_template = chat_template
        self.name_or_path = name_or_path
        self._cleans_up = cleans_up

    @property
    def is_in_parts(self) -> bool:
        """False once the library's tokenizer is made."""
        return self._parts is not None

    @property
    def backend_tokenizer(self) -> Backend:
        """The library's tokenizer."""
        if self._parts is not None:
            with self._making:
                if self._parts is not None:
                    self._named, self._parts = self._parts.whole(), None
        return self._named

    def make_whole(self) -> None:
        """Makes the library's tokenizer."""
        _ = self.backend_tokenizer

    def backend_for(self, texts: Sequence[str]) -> Backend:
        """Returns a tokenizer of the library that encodes these texts as `backend_tokenizer` does, and perhaps no
        others."""
        parts = self._parts
        part = None if parts is None else parts.of_texts(texts)
        return self.backend_tokenizer if part is None else part

    def backend_with(self, ids: Iterable[int]) -> Backend:
        """Returns a tokenizer of the library that decodes these ids as `backend_tokenizer` does."""
        parts = self._parts
        return self._named if parts is None else parts.of_ids(ids)

    def __len__(self) -> int:
        parts = self._parts
        return self._named.get_vocab_size() if parts is None else len(parts)

    @property
    def bos_token(self) -> str | None:
        return self.special_tokens_map.get("bos_token")

    @property
    def eos_token(self) -> str | None:
        return self.special_tokens_map.get("eos_token")

    @property
    def bos_token_id(self) -> int | None:
        return self._id_of("bos_token")

    @property
    def eos_token_id(self) -> int | None:
        return self._id_of("eos_token")

    def _id_of(self, name: str) -> int | None:
        token = self.special_tokens_map.get(name)
        return None if token is None else self._named.token_to_id(token)

    @property
    def all_special_tokens(self) -> list[str]:
        return list(dict.fromkeys([*self.special_tokens_map.values(), *self.extra_special_tokens]))

    @property
    def all_special_ids(self) -> list[int]:
        ids = map(self._named.token_to_id, self.all_special_tokens)
        return [index for index in ids if index is not None]

    @property
    def split_special_tokens(self) -> bool:
        """True if special tokens in a text are text."""
        return self._named.encode_special_tokens

    @property
    def has_normalizer(self) -> bool:
        """True if texts are changed before they are cut."""
        return self._named.normalizer is not None

    @property
    def added_tokens_decoder(self) -> dict[int, AddedToken]:
        """The tokens that are found in a text before it is cut."""
        return self._named.get_added_tokens_decoder()

    def get_added_vocab(self) -> dict[str, int]:
        return {token.content: index for index, token in sorted(self.added_tokens_decoder.items())}

    def get_vocab(self) -> dict[str, int]:
        return self.backend_tokenizer.get_vocab()

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        # Other threads run meanwhile, unlike in the method for one text.
        (encoding,) = self.backend_for([text]).encode_batch([text], add_special_tokens=add_special_tokens)
        return encoding.ids

    def decode(self, token_ids: Sequence[int] | NDArray[Any], *, skip_special_tokens: bool = False) -> str:
        ids = np.asarray(token_ids, np.int64).tolist()
        text = self.backend_with(ids).decode(ids, skip_special_tokens=skip_special_tokens)
        for spaced in _CLEANED if self._cleans_up else ():
            text = text.replace(spaced, spaced.strip())
        return text

    def get_chat_template(self, tools: object = None) -> str:
        """Returns the template for conversations with or without `tools`. Raises `ValueError` if there is none."""
        if not isinstance(templates := self.chat_template, dict):
            templates = {} if templates is None else {"default": templates}
        name = "tool_use" if tools is not None and "tool_use" in templates else "default"
        if name not in templates:
            raise ValueError(f"there is no chat template with the name default, but {sorted(templates)}")
        return templates[name]


def set_ends(backend: Backend, bos: str | None, eos: str | None) -> None:
    """Has each text begin with `bos` and end with `eos`."""
    begin, end = ("" if token is None else f"{token}:0" for token in (bos, eos))
    ends = [(token, backend.token_to_id(token)) for token in (bos, eos) if token is not None]
    single = " ".join(filter(None, (begin, "$A:0", end)))
    backend.post_processor = TemplateProcessing(single=single, pair=f"{single} $B:1", special_tokens=ends)
