"""Prompts and their state, each a function of its number, so that a process can check what another one stored."""

from __future__ import annotations

import json

import msgspec
import numpy as np
from msgspec.structs import replace

from diskprefix.prefixstore.store.store import Publication, Store
from diskprefix.tokens import TokenIds, root_hash
from tests.prefixstore.store import building
from tests.prefixstore.store.building import BLOCK, layout_of

_FAMILY = 5
"""The number of consecutive prompts that share a beginning and a model."""
_LAYOUTS = (layout_of(4 << 10), layout_of(32 << 10), layout_of(768 << 10))
"""Of the models, whose blocks take about 4 KiB, 32 KiB and 768 KiB."""


def layout(number: int) -> str:
    return _LAYOUTS[number // _FAMILY % len(_LAYOUTS)]


def identity(number: int) -> str:
    """The text that a daemon would give for such a model."""
    values = {
        "fingerprint": {"weights_digest": "power", "dtype": "bfloat16"},
        "block_size": BLOCK,
        "layout_version": 1,
        "layout": layout(number),
        "salt": "",
    }
    return json.dumps(values, sort_keys=True, separators=(",", ":"))


def root(number: int) -> bytes:
    return root_hash(identity(number))


def token_ids(number: int) -> TokenIds:
    """20 to 110 tokens, the first of them shared with the prompts of the same family."""
    shared = np.random.default_rng([1, number // _FAMILY])
    own = np.random.default_rng([2, number])
    parts = [shared.integers(0, 1000, shared.integers(16, 64)), own.integers(0, 1000, own.integers(4, 48))]
    return np.concatenate(parts).astype(np.int32)


def last_node(store: Store, number: int) -> bytes:
    """The node that a prompt's entry ends with."""
    name = publication(store, number).last_node
    assert name is not None
    return name


def publication(store: Store, number: int) -> Publication:
    """Returns the publication of a prompt: nodes, entry and history."""
    pub = building.publication(store, token_ids(number), root=root(number), layout=layout(number))
    record = msgspec.structs.replace(pub.root_record, identity=identity(number))
    return replace(pub, root_record=record)
