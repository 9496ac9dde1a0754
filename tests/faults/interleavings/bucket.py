"""A bucket in memory, in the place of obstore: answers take virtual time, fail, never come, or are not what was
written."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from tests.faults.interleavings.threads import scheduler


class GenericError(Exception):
    """The network fails."""


@dataclass
class Got:
    """The answer to `get`."""

    data: bytes
    meta: dict[str, Any]

    def bytes(self) -> bytes:
        return self.data


@dataclass
class SimulatedBucket:
    """Has the functions of obstore that the package calls. `store` is of no use to them."""

    failing: float = 0.0
    slow_s: float = 0.01
    damaging: float = 0.0
    """The share of objects that are not read as they were written."""
    objects: dict[str, tuple[bytes, float]] = field(default_factory=dict)

    def get(self, _store: object, path: str) -> Got:
        data, _ = self._found(path)
        chance = scheduler().random
        if self.damaging and chance.random() < self.damaging:
            at = chance.randrange(len(data))
            data = data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :] if chance.random() < 0.7 else data[:at]
        return Got(data, self._meta(path) | {"size": len(data)})

    def head(self, _store: object, path: str) -> dict[str, Any]:
        self._found(path)
        return self._meta(path)

    def put(self, _store: object, path: str, data: bytes, *, use_multipart: bool = False) -> object:  # noqa: ARG002
        self._answer()
        self.objects[path] = bytes(data), scheduler().now
        return {}

    def delete(self, _store: object, paths: Sequence[str]) -> object:
        self._answer()
        for path in paths:
            self.objects.pop(path, None)
        return {}

    def list(self, _store: object, prefix: str) -> Iterator[Sequence[dict[str, Any]]]:
        self._answer()
        for path in sorted(self.objects):
            if path.startswith(prefix) and path in self.objects:
                yield [self._meta(path)]

    def _found(self, path: str) -> tuple[bytes, float]:
        self._answer()
        if path not in self.objects:
            raise FileNotFoundError(path)
        return self.objects[path]

    def _meta(self, path: str) -> dict[str, Any]:
        data, modified_at = self.objects[path]
        return {"path": path, "size": len(data), "last_modified": datetime.fromtimestamp(modified_at, UTC)}

    def _answer(self) -> None:
        """Waits for the network, which may fail."""
        one = scheduler()
        one.block(one.random.random() * self.slow_s)
        if self.failing and one.random.random() < self.failing:
            raise GenericError("the network fails, as it was asked to")
