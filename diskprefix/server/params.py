"""Converts a validated body to the engine's parameters, with the checks that need the model: vocabulary, positions."""

from __future__ import annotations

from diskprefix.cache_options import CacheOptions, group_of
from diskprefix.engine.request import SamplingParams
from diskprefix.errors import ContextTooLong, InvalidRequest
from diskprefix.policy.scope import Scope
from diskprefix.prompt import Prompt
from diskprefix.server.schemas import ChatRequest, CompletionRequest, PrefixCacheOptions, SamplingBody
from diskprefix.tenant import Tenant

_GREEDY_BELOW = 1e-5
"""Temperatures below are greedy, as in vLLM: logits divided by less may overflow float32."""

_RETENTION_S = {"in_memory": 3600.0, "in-memory": 3600.0, "24h": 86400.0}
"""The longest time for which OpenAI keeps a prompt under each of these names."""


def sampling_params(body: ChatRequest | CompletionRequest, vocab_size: int) -> SamplingParams:
    """Raises `InvalidRequest` for fields that contradict each other, and for unknown token ids."""
    if body.stream_options is not None and not body.stream:
        raise InvalidRequest("stream_options: needs stream: true", param="stream_options")
    max_tokens, logprobs = body.max_tokens, body.logprobs
    if isinstance(body, ChatRequest):
        if body.top_logprobs is not None and not body.logprobs:
            raise InvalidRequest("top_logprobs: needs logprobs: true", param="top_logprobs")
        max_tokens = body.max_completion_tokens or max_tokens
        logprobs = (body.top_logprobs or 0) if body.logprobs else None
    elif body.best_of not in (None, body.n or 1):
        raise InvalidRequest("best_of: must be equal to n", param="best_of")
    temperature = 1.0 if body.temperature is None else body.temperature
    stop = body.stop or ()
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=temperature if temperature >= _GREEDY_BELOW else 0.0,
        top_p=1.0 if body.top_p is None else body.top_p,
        top_k=max(body.top_k or 0, 0),
        min_p=body.min_p or 0.0,
        seed=body.seed,
        repetition_penalty=1.0 if body.repetition_penalty is None else body.repetition_penalty,
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        logit_bias=_logit_bias(body.logit_bias or {}, vocab_size),
        stop=(stop,) if isinstance(stop, str) else tuple(stop),
        # The alternatives cannot be more than the vocabulary.
        logprobs=None if logprobs is None else min(logprobs, vocab_size),
        n=body.n or 1,
    )


def _logit_bias(bias: dict[str, float], vocab_size: int) -> dict[int, float]:
    valid = {}
    for key, value in bias.items():
        if not (key.isascii() and key.isdigit() and len(key) < 10 and int(key) < vocab_size):
            raise InvalidRequest(
                f"logit_bias: {key[:20]!r} is not a token id of this model (0 to {vocab_size - 1})", param="logit_bias"
            )
        valid[int(key)] = value
    return valid


def cache_options(body: SamplingBody, *, scope: Scope, caller: Tenant, reuse_generated: bool) -> CacheOptions:
    """Returns what `body` asks of the disk cache. `scope` and `reuse_generated` are the daemon's own, as defaults.

    Raises `InvalidScope` for a window with a scope that has none, and `InvalidRequest` for two salts that differ.
    """
    asked = body.prefix_cache or PrefixCacheOptions()
    scope = asked.scope or scope
    return CacheOptions(
        scope=scope if asked.window is None else scope.with_window(asked.window),
        tenant=tenant_of(body, caller),
        group=b"" if body.prompt_cache_key is None else group_of(body.prompt_cache_key),
        save=asked.save,
        ttl_s=_RETENTION_S.get(body.prompt_cache_retention or "") if asked.ttl is None else asked.ttl,
        reuse_generated=reuse_generated if asked.reuse_generated is None else asked.reuse_generated,
    )


def tenant_of(body: SamplingBody, caller: Tenant) -> Tenant:
    """Returns the tenant of a request: the caller, or the user of the caller whom a salt names.

    Raises `InvalidRequest` for two salts that differ.
    """
    salt = body.prefix_cache.salt if body.prefix_cache else None
    if salt is not None and body.cache_salt not in (None, salt):
        raise InvalidRequest("cache_salt: differs from prefix_cache.salt; send one of them", param="cache_salt")
    salt = salt or body.cache_salt
    return caller if salt is None else caller.with_salt(salt)


def check_context(prompt: Prompt, body: SamplingBody, max_positions: int) -> None:
    """Raises `ContextTooLong` if prompt and reply exceed the model's positions."""
    of_chat = body.max_completion_tokens if isinstance(body, ChatRequest) else None
    param, max_tokens = ("max_completion_tokens", of_chat) if of_chat else ("max_tokens", body.max_tokens)
    num_tokens = len(prompt.token_ids)
    if max_tokens is not None and num_tokens + max_tokens > max_positions:
        raise ContextTooLong(
            f"{param}: {num_tokens} tokens of prompt and {max_tokens} of reply are {num_tokens + max_tokens}, and "
            f"this model has {max_positions} positions for both together",
            param=param,
        )
