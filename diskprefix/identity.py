"""The canonical text of an identity. Its hash is the root of all state of one model for one tenant."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from msgspec import Struct

_OF_BUILD = frozenset(
    {"bits", "build", "code", "golden", "torch_version", "transformers_version", "gguf_version", "numpy_version"}
)
"""The fields that an upgrade changes."""


class Fingerprint(Struct, frozen=True):
    """Everything that changes the numbers of a model, by name. The root lacks the fields in `left_out`."""

    named: Mapping[str, str]
    left_out: frozenset[str]

    def identity(self, block_size: int, layout_version: int, layout: str, salt: str = "") -> str:
        """Returns `identity_text` of the fields that count."""
        counting = {name: value for name, value in self.named.items() if name not in self.left_out}
        return identity_text(counting, block_size, layout_version, layout, salt)

    def as_dict(self) -> dict[str, Any]:
        """Returns every field, for `/props`. Fields of canonical JSON are unpacked."""
        return {name: json.loads(value) if value[:1] == "{" else value or None for name, value in self.named.items()}


def identity_text(
    fingerprint: Mapping[str, str], block_size: int, layout_version: int, layout: str, salt: str = ""
) -> str:
    """Returns the text whose hash (`tokens.root_hash`) is the root, the parent of every first block.

    `fingerprint` has everything that changes the model's numbers. `layout` describes a block's payload,
    `layout_version` its byte format. `salt` separates tenants.
    """
    own = {"block_size": block_size, "layout_version": layout_version, "layout": layout, "salt": salt}
    return canonical({"fingerprint": fingerprint} | own)


def identity_of_tenant(identity: str, tenant: str) -> str:
    """Returns an identity with another tenant. Raises `ValueError` for a text that is no identity."""
    values = json.loads(identity)
    if not isinstance(values, dict):
        raise ValueError("not an identity")
    return canonical(values | {"salt": tenant})


def identity_of_build(identity: str, build: str) -> str:
    """Returns an identity with a build, for state whose bits only this build computes."""
    values = json.loads(identity)
    return canonical(values | {"fingerprint": values["fingerprint"] | {"build": build}})


def identity_fields(text: str) -> dict[str, str]:
    """Returns the fields of an identity, without the tenant. Raises `ValueError` for a text that is no identity."""
    try:
        values = json.loads(text)
        others = {name: str(values[name]) for name in ("block_size", "layout_version", "layout")}
        return {name: str(value) for name, value in values["fingerprint"].items()} | others
    except (KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"not an identity: {error}") from error


def has_same_weights(a: str, b: str) -> bool:
    """Returns whether two identities are of the same weights, however they are computed."""
    with suppress(ValueError):
        digests = [identity_fields(text).get("weights_digest") for text in (a, b)]
        return digests[0] is not None and digests[0] == digests[1]
    return False


def is_outdated(identity: str, own: Iterable[str]) -> bool:
    """Returns whether an identity differs from one of our `own` only by the build: this build cannot use its state.
    Tenants may differ."""
    with suppress(ValueError):
        fields = identity_fields(identity)
        changes = [set(differing(fields, identity_fields(text))) for text in own]
        return all(changes) and any(names <= _OF_BUILD for names in changes)
    return False


def differing(a: Mapping[str, str], b: Mapping[str, str]) -> list[str]:
    """Returns the names of the fields in which two identities differ, sorted."""
    return sorted(name for name in a.keys() | b.keys() if a.get(name) != b.get(name))


def canonical(values: Mapping[str, Any]) -> str:
    """Returns JSON with sorted keys, or "" for no values. A round trip through a file (tuples, 1.0) changes nothing."""
    return json.dumps(plain(values), sort_keys=True, separators=(",", ":")) if values else ""


def plain(value: Any) -> Any:
    """Returns a value in JSON types. Other types become their text, without the name of torch."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, set | frozenset):
        return sorted(plain(item) for item in value)
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [plain(item) for item in value]
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return str(value).removeprefix("torch.")
