"""The cache that a session returns for a state-space model."""

from __future__ import annotations

from transformers import DynamicCache, PreTrainedConfig

from diskprefix.errors import InvalidRequest


class StateSpaceCache(DynamicCache):  # type: ignore[misc]
    """The cache of a model whose layers all keep states only. `generate` refuses it, because that would add the whole
    prompt to the state once more."""

    def __init__(self, config: PreTrainedConfig, num_tokens: int, argument: str) -> None:
        super().__init__(config=config)
        self._argument = argument
        self._num_tokens = num_tokens

    def get_seq_length(self, layer_idx: int = 0) -> int:  # noqa: ARG002 (as transformers' own)
        """Returns the number of tokens in the state, which transformers does not count."""
        return self._num_tokens

    @property
    def _is_user_defined(self) -> bool:
        return False

    @_is_user_defined.setter
    def _is_user_defined(self, _value: bool) -> None:
        """Raises `InvalidRequest`: transformers' `generate` sets this on each cache that it gets."""
        raise InvalidRequest(
            f"{self._argument}: generate() cannot continue a state-space model's cache; call session.generate, or the "
            "model itself with the tokens from cache.get_seq_length() on",
            param=self._argument,
        )
