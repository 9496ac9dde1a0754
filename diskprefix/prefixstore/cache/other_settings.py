"""State of the same model that was stored with other options of `serve`, which this start does not find."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from itertools import permutations
from typing import cast, get_args

from msgspec import Struct

from diskprefix.errors import StoreCorrupt
from diskprefix.identity import has_same_weights, identity_of_tenant
from diskprefix.prefixstore.cache.policy.select import StateKind
from diskprefix.prefixstore.store.schema import ModelRecord, OptionValue
from diskprefix.prefixstore.store.snapshot import Snapshot
from diskprefix.setting import flag_of
from diskprefix.tokens import root_hash


class StoredOtherwise(Struct, frozen=True):
    """The first `num_tokens` tokens of a prompt are stored, by a start with other `options`: their values then, by
    flag."""

    num_tokens: int = 0
    options: Mapping[str, str] = {}


def differing_options(theirs: Mapping[str, OptionValue], ours: Mapping[str, OptionValue]) -> dict[str, str]:
    """Returns their values of the options by which two identities of a model differ, by flag. An option counts if the
    model uses another value of it. If no other value was given for any, as where a device has gone, the values in use
    are returned."""
    used = [name for name in ours if name in theirs and theirs[name].used != ours[name].used]
    given = [name for name in used if theirs[name].given != ours[name].given]
    return {flag_of(name): theirs[name].given for name in given} or {flag_of(name): theirs[name].used for name in used}


def options_text(options: Mapping[str, str]) -> str:
    """Returns options as people write them: `--kv-type auto --runtime grid`."""
    return " ".join(f"{flag} {value}" if value else f"no {flag}" for flag, value in options.items())


def other_models(
    snapshot: Snapshot, identity: str, options: Mapping[str, OptionValue]
) -> Iterator[tuple[ModelRecord, dict[str, str]]]:
    """Yields the records of the model of an `identity`, with its weights, that was served with other options than
    these, each with the values of those that differ."""
    for _, model in snapshot.models() if options else ():
        if has_same_weights(model.identity, identity) and (others := differing_options(model.options, options)):
            yield model, others


class OtherRoot(Struct, frozen=True):
    """A root of the same model and tenant with other `options`: their values, by flag. `block_size` is in tokens."""

    name: bytes
    block_size: int
    state: StateKind
    options: Mapping[str, str]


def other_roots(
    snapshot: Snapshot, identity: str, tenant: str, options: Mapping[str, OptionValue]
) -> Iterator[OtherRoot]:
    """Yields the roots of a tenant below which starts with other options have stored the state of a model."""
    for model, others in other_models(snapshot, identity, options):
        name = root_hash(identity_of_tenant(model.identity, tenant))
        if model.state_kind in get_args(StateKind):
            block_size, state = int(model.options["block_size"].used), cast(StateKind, model.state_kind)
            yield OtherRoot(name, block_size, state, others)


def count_stored_otherwise(
    snapshot: Snapshot, identity: str, options: Mapping[str, OptionValue]
) -> list[tuple[int, str]]:
    """Returns how many saved prompts of the model of an identity, of all tenants, were made with which other options,
    the most first. Raises `StoreCorrupt`."""
    texts = {model.identity: options_text(others) for model, others in other_models(snapshot, identity, options)}
    of_roots = dict[bytes, str]()
    for root, record in snapshot.roots() if texts else ():
        with suppress(ValueError):
            if (text := texts.get(identity_of_tenant(record.identity, ""))) is not None:
                of_roots[root] = text
    counts = Counter(of_roots[entry.root] for _, entry in snapshot.entries() if entry.root in of_roots)
    return [(count, text) for text, count in counts.most_common()]


def models_of_roots(snapshot: Snapshot, roots: Iterable[bytes]) -> dict[bytes, ModelRecord]:
    """Returns the records of the models whose state is stored below some roots. Leaves out roots without a sound one,
    such as those of other engines."""
    models = dict[bytes, ModelRecord]()
    for root in roots:
        with suppress(StoreCorrupt, ValueError):
            record = snapshot.root(root)
            model = None if record is None else snapshot.model(identity_of_tenant(record.identity, ""))
            if model is not None:
                models[root] = model
    return models


def telling_options(models: Iterable[ModelRecord]) -> dict[str, dict[str, str]]:
    """Returns the options that tell each model from the others with its weights, by its identity: their values by
    flag."""
    different = {model.identity: model for model in models}.values()
    telling = {model.identity: dict[str, str]() for model in different}
    for model, other in permutations(different, 2):
        if has_same_weights(model.identity, other.identity):
            telling[model.identity] |= differing_options(model.options, other.options)
    return telling
