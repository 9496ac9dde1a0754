"""A prompt as the library takes it, in any of the forms that transformers and its tokenizers use."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from diskprefix.errors import InvalidRequest
from diskprefix.tokens import TokenIds, as_token_ids

Ids: TypeAlias = "torch.Tensor | npt.NDArray[Any] | Sequence[int] | Mapping[str, Any] | str"
"""A prompt: token ids as a list or a tensor of shape [n] or [1, n], what a tokenizer returns, or text."""


def unpacked(input_ids: Ids, tokenizer: Any) -> tuple[TokenIds, dict[str, Any]]:
    """Returns the token ids, and what else a tokenizer returned with them.

    Raises `InvalidRequest` unless it is one prompt of at least one token. Text needs a `tokenizer`.
    """
    if isinstance(input_ids, str):
        if tokenizer is None:
            raise InvalidRequest("input_ids: text needs a session with a tokenizer", param="input_ids")
        return _one_prompt(tokenizer(input_ids)["input_ids"]), {}
    if isinstance(input_ids, Mapping):
        others = {name: value for name, value in input_ids.items() if name != "input_ids"}
        return _one_prompt(input_ids["input_ids"]), others
    return _one_prompt(input_ids), {}


def _one_prompt(value: Any) -> TokenIds:
    """Returns the token ids. Raises `InvalidRequest` unless `value` is one non-empty list of them."""
    ids = in_main_memory(value)
    if ids.ndim == 2 and len(ids) == 1:
        ids = ids[0]
    if ids.ndim != 1 or not ids.size or not np.issubdtype(ids.dtype, np.integer):
        raise InvalidRequest(
            f"input_ids: one prompt of at least one token id is needed, not {ids.dtype} of shape {list(ids.shape)}",
            param="input_ids",
        )
    if ids.min() < 0 or ids.max() > np.iinfo(np.int32).max:
        raise InvalidRequest("input_ids: some ids are negative or too large for any vocabulary", param="input_ids")
    return as_token_ids(ids)


def in_main_memory(value: Any) -> npt.NDArray[Any]:
    """Returns an array, or a tensor on any device, as a numpy array. Raises `InvalidRequest` for ragged lists."""
    try:
        return np.asarray(value.cpu() if isinstance(value, torch.Tensor) else value)
    except ValueError as error:
        raise InvalidRequest("input_ids: prompts of several lengths; a session takes one", param="input_ids") from error
