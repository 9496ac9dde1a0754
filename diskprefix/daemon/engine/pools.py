"""The threads beside an engine's own thread. They start before it, so that it never starts one."""

from __future__ import annotations

from concurrent.futures import Executor
from typing import Literal, TypeAlias

from diskprefix.prefixstore.cache.restore import Step
from diskprefix.prefixstore.cache.tiers.loading import MAX_LOADS
from diskprefix.thread_pool import ThreadPool

StepKind: TypeAlias = Step | Literal["draft", "picture"]
"""The kind of a step of a reading job: one step of a restore, a whole restore for the draft model, or the rows of a
picture."""


class EnginePools:
    """The pools of one engine."""

    def __init__(self, max_sequences: int) -> None:
        """Raises `RuntimeError` if the system refuses a thread."""
        self.steps: dict[StepKind, Executor] = {
            "prefetch": ThreadPool(max_sequences, "kv-prefetch").start(),
            "seen": ThreadPool(1, "kv-seen").start(),
            "match": ThreadPool(1, "kv-match").start(),
            "load": ThreadPool(MAX_LOADS, "kv-load").start(),
            "draft": ThreadPool(1, "draft-fetch").start(),
            "picture": ThreadPool(1, "picture-load").start(),
        }
        self.idle = ThreadPool(1, "idle").start()
        """The thread of idle work: it reads and writes the store (except for restores), renders prompts, and returns
        free memory to the system. It may hang, because nothing waits for it without a limit."""
        self.encoder = ThreadPool(1, "encoder").start()
        self.preparer = ThreadPool(1, "picture-prepare").start()
        """The thread that decodes pictures."""

    def close(self) -> None:
        """Drops the work that has not begun, and accepts no more. Does not wait."""
        for pool in (*self.steps.values(), self.idle, self.encoder, self.preparer):
            pool.shutdown(wait=False, cancel_futures=True)
