"""The metadata of an exported file, and the tensors that the file must hold. `entry_file` documents the format.

A manifest is made from the store or from a file. One from a file is checked here: its fields must agree with each
other, and it must be one that an export writes.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, TypeAlias, TypeVar

import msgspec

from diskprefix.errors import StoreCorrupt
from diskprefix.nouns import Tenant
from diskprefix.store.pieces import DTYPES, LayoutText
from diskprefix.store.schema import Kind
from diskprefix.tokens import root_hash

LOGITS, TOKEN_IDS, CHECKSUMS, PREFILL_S = "logits", "token_ids", "nodes.checksum", "nodes.prefill_s"

_Position: TypeAlias = Annotated[int, msgspec.Meta(ge=1, le=1 << 24)]
_Text: TypeAlias = Annotated[str, msgspec.Meta(max_length=10_000)]
_SHOWN_CHARS = 80

Decoded = TypeVar("Decoded")


class Identity(msgspec.Struct, frozen=True):
    """The fields of a root's identity text that are used here. `salt` is the tenant."""

    fingerprint: dict[str, str]
    block_size: int
    layout_version: int
    layout: str
    salt: str

    @classmethod
    def parse(cls, text: str) -> Identity:
        """Raises `StoreCorrupt`."""
        return decode_json(text, cls, "identity")

    @property
    def fields(self) -> dict[str, str]:
        """The fields without the tenant."""
        others = {name: str(getattr(self, name)) for name in ("block_size", "layout_version", "layout")}
        return self.fingerprint | others


@dataclass(frozen=True)
class NodeSpan:
    """The part of the prompt that a node holds: `num_tokens` tokens from `position` on. `states` is the number of its
    row in the file's state tensors, None for a block."""

    position: int
    num_tokens: int
    kind: Kind
    states: int | None = None

    def __str__(self) -> str:
        if self.kind == Kind.CHECKPOINT:
            return f"at token {self.position}"
        return f"tokens {self.position} to {self.position + self.num_tokens}"


@dataclass(frozen=True)
class Tensor:
    """A tensor of the file. `dtype` is the name that safetensors uses, `itemsize` its size in bytes. One that has
    a part for each token is cut into `rows`, each with its part of all tokens."""

    dtype: str
    itemsize: int
    shape: tuple[int, ...]
    rows: int = 1

    @property
    def num_bytes(self) -> int:
        return self.itemsize * math.prod(self.shape)


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """`with_logits`: the entry ends with its prompt, so its last node is a tail.

    `states` are the positions, in tokens, at which the file holds the states of a layout that has any: those of its
    checkpoints, ascending, then `num_tokens` for the tail.
    """

    root: bytes
    identity: str
    layout: str
    block_size: Annotated[int, msgspec.Meta(ge=1, le=1 << 16)]
    model: _Text
    tenant: str
    scope: Annotated[str, msgspec.Meta(pattern=r"^[a-z0-9:]{1,24}\Z")]
    preview: _Text
    created_at: float
    num_tokens: _Position
    with_logits: bool
    states: tuple[_Position, ...] = ()

    @classmethod
    def checked(cls, fields: Mapping[str, object]) -> Manifest:
        """Returns the manifest with these fields. Raises `StoreCorrupt` for those that no export writes."""
        try:
            manifest = msgspec.convert(fields, cls, strict=False, builtin_types=(bytes,))
        except msgspec.ValidationError as error:
            raise StoreCorrupt(f"its metadata cannot be read: {shown(str(error))}") from error
        manifest._check()
        return manifest

    @classmethod
    def of_metadata(cls, metadata: Mapping[str, str], *, with_logits: bool) -> Manifest:
        """The inverse of `metadata`. Raises `StoreCorrupt` for metadata that no export writes."""
        fields: dict[str, object] = {**metadata, "with_logits": with_logits}
        if "states" in metadata:
            fields["states"] = metadata["states"].split(",")
        try:
            fields["root"] = bytes.fromhex(metadata.get("root", ""))
        except ValueError as error:
            raise StoreCorrupt(f"its metadata cannot be read: {error}") from error
        return cls.checked(fields)

    def metadata(self) -> dict[str, str]:
        """Returns the metadata of the file: texts by name."""
        values = msgspec.structs.asdict(self)
        states = ",".join(map(str, values.pop("states")))
        texts = {name: str(value) for name, value in values.items() if name != "with_logits"}
        return texts | {"root": self.root.hex()} | ({"states": states} if states else {})

    @property
    def checkpoints(self) -> tuple[int, ...]:
        """The positions of the checkpoints, in tokens."""
        return self.states[: len(self.states) - self.with_logits]

    @property
    def num_nodes(self) -> int:
        return len(self.spans)

    @property
    def spans(self) -> list[NodeSpan]:
        """The nodes in the order of their positions. A checkpoint comes after the last block before it."""
        spans: list[NodeSpan] = []
        rest = self.num_tokens % self.block_size
        ahead = deque(enumerate(self.checkpoints))
        for start in range(0, self.num_tokens + 1, self.block_size):
            while ahead and ahead[0][1] < start + self.block_size:
                number, end = ahead.popleft()
                spans.append(NodeSpan(start, end - start, Kind.CHECKPOINT, number))
            if start + self.block_size <= self.num_tokens:
                spans.append(NodeSpan(start, self.block_size, Kind.BLOCK))
        if self.with_logits:
            spans.append(NodeSpan(self.num_tokens - rest, rest, Kind.TAIL, len(self.checkpoints)))
        elif rest and not self.states:
            spans.append(NodeSpan(self.num_tokens - rest, rest, Kind.BLOCK))
        return spans

    def token_tensors(self) -> dict[str, Tensor]:
        """Returns the per-token tensors by name, in the order of a payload. Raises `StoreCorrupt`."""
        groups = self._parsed_layout().groups
        return _named(
            (name, _tensor(group.dtype, group.shape(self.num_tokens), group.rows_each))
            for group in groups
            for name in group.tensors
        )

    def state_tensors(self) -> dict[str, Tensor]:
        """Returns the tensors of states by name, in the order of a payload. Raises `StoreCorrupt`."""
        groups = self._parsed_layout().states
        return _named(
            (name, _tensor(group.dtype, (len(self.states), *group.shape))) for group in groups for name in group.tensors
        )

    def logits_tensor(self) -> Tensor:
        """Returns the next-token logits, with which the payload of a tail ends. Raises `StoreCorrupt`."""
        vocab_size, dtype = self._parsed_layout().logits
        return _tensor(dtype, (vocab_size,))

    def tensors(self) -> dict[str, Tensor]:
        """Returns all tensors of the file by name. The widest elements come first, so that each is aligned."""
        tokens, states = self.token_tensors(), self.state_tensors()
        if not (tokens or states) or tokens.keys() & states.keys():
            raise StoreCorrupt("its layout holds no tensor, or one twice")
        table = (tokens | states) | {
            TOKEN_IDS: Tensor("I32", 4, (self.num_tokens,)),
            CHECKSUMS: Tensor("U64", 8, (self.num_nodes,)),
            PREFILL_S: Tensor("F64", 8, (self.num_nodes,)),
        }
        if self.with_logits:
            table[LOGITS] = self.logits_tensor()
        return dict(sorted(table.items(), key=lambda item: -item[1].itemsize))

    def _check(self) -> None:
        """Raises `StoreCorrupt` if fields do not agree."""
        if not math.isfinite(self.created_at):
            raise StoreCorrupt("its time of creation is out of range")
        self._check_states()
        self._check_pages()
        if root_hash(self.identity) != self.root:
            raise StoreCorrupt("its root is not the hash of its identity")
        self._check_identity(Identity.parse(self.identity))

    def _check_states(self) -> None:
        groups = self._parsed_layout().states
        if any(group.rows < 1 or math.prod(group.shape) % group.rows for group in groups):
            raise StoreCorrupt("its layout splits states into rows that do not fit")
        if bool(self.states) != bool(groups):
            raise StoreCorrupt("its layout has states and it has none, or the other way round")
        points, end = self.checkpoints, self.states[len(self.checkpoints) :]
        ends_at = self.num_tokens if self.with_logits else max(points, default=0)
        if groups and self.num_tokens % self.block_size and ends_at != self.num_tokens:
            raise StoreCorrupt("it ends within a block and has no states there")
        are_inside = all(position <= self.num_tokens for position in points)
        if not are_inside or list(points) != sorted(set(points)) or end not in ((), (self.num_tokens,)):
            raise StoreCorrupt("its states are at impossible positions")

    def _check_pages(self) -> None:
        for group in self._parsed_layout().groups:
            try:
                group.check()
            except ValueError as error:
                raise StoreCorrupt(f"its layout has {shown(str(error))}") from error
            if self.num_tokens % group.page or self.block_size % group.page:
                raise StoreCorrupt(f"its blocks are not whole pages of {group.page} tokens")

    def _check_identity(self, identity: Identity) -> None:
        for name, told, found in (
            ("layout", identity.layout, self.layout),
            ("block size", identity.block_size, self.block_size),
            ("tenant", identity.salt, self.tenant),
        ):
            if told != found:
                raise StoreCorrupt(f"its {name} is not the one in its identity")
        try:
            Tenant.parse(self.tenant)
        except ValueError as error:
            raise StoreCorrupt("its tenant is not the text of one") from error

    def _parsed_layout(self) -> LayoutText:
        return decode_json(self.layout, LayoutText, "layout")


def decode_json(text: str | bytes, type_: type[Decoded], what: str) -> Decoded:
    """Returns the decoded JSON. Raises `StoreCorrupt` if it is not JSON of this type."""
    try:
        return msgspec.json.decode(text, type=type_)
    except (ValueError, RecursionError) as error:
        raise StoreCorrupt(f"its {what} cannot be read: {shown(str(error))}") from error


def shown(text: str) -> str:
    """Returns a text from a file for use in a message: printable and not too long."""
    line = repr(text)[1:-1]
    return line if len(line) <= _SHOWN_CHARS else f"{line[:_SHOWN_CHARS]}…"


def _named(tensors: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """Returns the tensors by their names in the file. Raises `StoreCorrupt` for a name that occurs twice."""
    found = [(f"layers.{name}", tensor) for name, tensor in tensors]
    if len(dict(found)) != len(found):
        raise StoreCorrupt("its layout holds a tensor twice")
    return dict(found)


def _tensor(dtype: str, shape: tuple[int, ...], rows: int = 1) -> Tensor:
    if dtype not in DTYPES or min(shape) < 1:
        raise StoreCorrupt(f"its layout has a tensor of {shown(dtype)} of shape {shape}")
    itemsize, _, name = DTYPES[dtype]
    return Tensor(name, itemsize, shape, rows)
