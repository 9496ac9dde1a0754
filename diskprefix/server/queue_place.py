"""What a request takes before it is queued: a place among those that arrive, and memory for its body."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, field, replace

from diskprefix.nouns import Tenant
from diskprefix.server.threads import Kind


@dataclass
class QueuePlace:
    """A context, at whose end all is given back. `memory` may be closed before: when the prompt is rendered."""

    caller: Tenant
    """The user of the API key, whatever salt the request has."""
    is_large: bool = False
    """Whether the body is much larger than those of agents: then its threads let others go first."""
    taken: ExitStack = field(default_factory=ExitStack)
    memory: ExitStack = field(default_factory=ExitStack)

    @property
    def rendering(self) -> Kind:
        """The threads in which the prompt is rendered."""
        return "large" if self.is_large else "rendering"

    def __enter__(self) -> QueuePlace:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Gives back what was not given back yet."""
        with self.taken:
            self.memory.close()

    def pop_all(self) -> QueuePlace:
        """Returns a place to which everything belongs that belonged to this one."""
        return replace(self, taken=self.taken.pop_all(), memory=self.memory.pop_all())
