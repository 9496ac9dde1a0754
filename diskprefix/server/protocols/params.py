"""Converts the fields that the APIs share to the engine's parameters."""

from __future__ import annotations

from collections.abc import Sequence

from diskprefix.engine.request import SamplingParams
from diskprefix.errors import InvalidRequest
from diskprefix.nouns import CacheOptions, Scope, Tenant
from diskprefix.server.protocols.fields import CacheFields, PrefixCacheOptions, SamplingFields
from diskprefix.tenant_ids import group_of

_GREEDY_BELOW = 1e-5
"""Temperatures below are greedy, as in vLLM: logits divided by less may overflow float32."""

_RETENTION_S = {"in_memory": 3600.0, "in-memory": 3600.0, "24h": 86400.0}
"""The longest time for which OpenAI keeps a prompt under each of these names."""


def sampling_params(
    fields: SamplingFields,
    vocab_size: int,
    *,
    max_tokens: int | None = None,
    stop: Sequence[str] = (),
    logprobs: int | None = None,
    n: int | None = None,
) -> SamplingParams:
    """Raises `InvalidRequest` for unknown token ids. Each API has other names for what `fields` does not hold."""
    temperature = 1.0 if fields.temperature is None else fields.temperature
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=temperature if temperature >= _GREEDY_BELOW else 0.0,
        top_p=1.0 if fields.top_p is None else fields.top_p,
        top_k=max(fields.top_k or 0, 0),
        min_p=fields.min_p or 0.0,
        seed=fields.seed,
        repetition_penalty=1.0 if fields.repetition_penalty is None else fields.repetition_penalty,
        presence_penalty=fields.presence_penalty or 0.0,
        frequency_penalty=fields.frequency_penalty or 0.0,
        logit_bias=_logit_bias(fields.logit_bias or {}, vocab_size),
        stop=tuple(stop),
        # The alternatives cannot be more than the vocabulary.
        logprobs=None if logprobs is None else min(logprobs, vocab_size),
        n=n or 1,
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


def cache_options(body: CacheFields, *, scope: Scope, caller: Tenant, reuse_generated: bool) -> CacheOptions:
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
        replay=asked.replay,
    )


def tenant_of(body: CacheFields, caller: Tenant) -> Tenant:
    """Returns the tenant of a request: the caller, or the user of the caller whom a salt names.

    Raises `InvalidRequest` for two salts that differ.
    """
    salt = body.prefix_cache.salt if body.prefix_cache else None
    if salt is not None and body.cache_salt not in (None, salt):
        raise InvalidRequest("cache_salt: differs from prefix_cache.salt; send one of them", param="cache_salt")
    salt = salt or body.cache_salt
    return caller if salt is None else caller.with_salt(salt)
