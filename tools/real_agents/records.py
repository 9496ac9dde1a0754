"""Records of a daemon with prepared replies: the token ids of each prompt, and a digest of the logits of each token.

A record survives SIGKILL: a file for each reply, with a line of JSON, and then a line for each token.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from diskprefix.tokens import Logits


class ReplyRecord:
    """The record of one reply that is being computed."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def add(self, logits: Logits) -> None:
        """Adds the logits of the next token, shape [vocab]."""
        digest = hashlib.blake2b(logits.tobytes(), digest_size=16).hexdigest()
        with self._path.open("a", encoding="ascii") as file:
            file.write(digest + "\n")


class Records:
    """Writes the records of the replies of `model` into `folder`."""

    def __init__(self, folder: Path, model: str) -> None:
        self._folder, self._model = folder, model
        self._numbers = itertools.count()

    def begin(self, prompt: Sequence[int]) -> ReplyRecord:
        """Records a prompt of token ids."""
        # This time orders the records of all processes, also if their clock is a false one.
        path = self._folder / f"{time.monotonic_ns():020}-{os.getpid()}-{next(self._numbers)}"
        path.write_text(json.dumps({"model": self._model, "prompt": list(prompt)}) + "\n", encoding="ascii")
        return ReplyRecord(path)


@dataclass(frozen=True)
class Recorded:
    """A reply as it was recorded. `digests` are of the logits of its tokens, as far as it came."""

    path: Path
    model: str
    prompt: list[int]
    digests: list[str]

    @property
    def began_ns(self) -> int:
        return int(self.path.name.partition("-")[0])


def recorded(folder: Path) -> list[Recorded]:
    """Returns all records, in the order in which they began. Those of which no token was computed are left out."""
    records = []
    for path in sorted(folder.iterdir()):
        first, *digests = path.read_text(encoding="ascii").splitlines()
        if digests:
            said = json.loads(first)
            records.append(Recorded(path, said["model"], said["prompt"], digests))
    return records
