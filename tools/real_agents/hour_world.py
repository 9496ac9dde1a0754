"""The accidents of a daemon in an hour: kills, and a disk that is full."""

from __future__ import annotations

import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from tools.measuring.answers import LiveServerError
from tools.measuring.environments import NotInstalled
from tools.measuring.live_server import LiveServer
from tools.real_agents.tap import Exchange, Tap

_POLL_S = 0.002
_PIECE_BYTES = 1 << 20
_LONG_TOKENS = 2048
"""The fewest tokens of a prefill that is long enough to be met in its middle."""


@contextmanager
def small_disk(folder: Path, num_bytes: int) -> Iterator[Path]:
    """Gives a file system of its own at `folder`. Raises `NotInstalled` without the rights."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={num_bytes},mode=0700", "diskprefix-hour", str(folder)]
    try:
        subprocess.run(mount, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise NotInstalled("a disk that is full needs root, who may mount a file system") from error
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


def fill(disk: Path) -> None:
    """Takes all room of a disk, as another program would."""
    with (disk / "of another program").open("wb", buffering=0) as file:
        for size in (_PIECE_BYTES, 512):
            with suppress(OSError):
                # Bound: the disk has an end.
                while file.write(bytes(size)) == size:
                    pass


def make_room(disk: Path) -> None:
    (disk / "of another program").unlink()


@dataclass(frozen=True, kw_only=True)
class Kill:
    """A SIGKILL. Tokens are of the requests that it cut off: `computed` are those of the prompt that were computed."""

    question: int
    moment: str
    detail: str
    requests: int = 0
    sent: int = 0
    restored: int = 0
    computed: int = 0


class Killer:
    """Kills the daemon of `server` at chosen moments, and starts it again at once, while new requests wait at `tap`.

    `arm` chooses the next moment: `saving`, `reply`, `prefill` or `ahead`; others are the caller's, who calls `kill`.
    """

    def __init__(self, server: LiveServer, tap: Tap) -> None:
        self.kills: list[Kill] = []
        self.failure: Exception | None = None
        """Why the daemon did not start again."""
        self._server, self._tap = server, tap
        self._armed: str | None = None
        self._question = 0
        self._lock = threading.Lock()
        self._ended_ahead, self._tokens_ahead = 0, -1
        self._starting: threading.Thread | None = None
        tap.on_piece = self._piece

    def arm(self, moment: str, question: int) -> None:
        self._armed, self._question = moment, question
        self._tokens_ahead = -1
        looks = {
            "saving": self._look_for_bytes_to_save,
            "prefill": self._look_for_prefill,
            "ahead": self._look_for_work_ahead,
        }
        if moment in looks:
            threading.Thread(target=self._watch, args=(moment, looks[moment]), daemon=True).start()

    @property
    def is_armed(self) -> bool:
        return self._armed is not None

    def kill(self, moment: str, question: int, detail: str) -> None:
        """Returns when the daemon is dead. It starts on a thread."""
        self._tap.hold(True)
        states = self.states()
        for exchange in self._tap.running:
            exchange.met_kill = True
        self._server.kill()
        running = [each for state in states.values() for each in state["running"]]
        sent, restored, ready = (
            sum(each[key] for each in running) for key in ("prompt_tokens", "restored_tokens", "computed_tokens")
        )
        self._ended_ahead += _ahead_tokens(states)
        self.kills.append(
            Kill(
                question=question,
                moment=moment,
                detail=detail,
                requests=len(running),
                sent=sent,
                restored=restored,
                computed=max(0, ready - restored),
            )
        )
        starting = threading.Thread(target=self._start)
        starting.start()
        # Not before: another thread may join it.
        self._starting = starting

    def wait_until_started(self) -> None:
        """Waits for the end of all requests, with which a kill may come. Raises `LiveServerError` if the daemon did not
        start."""
        self._tap.wait_until_idle()
        if self._starting is not None:
            self._starting.join()
        if self.failure is not None:
            raise self.failure

    def ahead_tokens(self) -> int:
        """Returns the tokens that were computed ahead by all processes so far; of a killed one, those up to a moment
        before its end."""
        return self._ended_ahead + _ahead_tokens(self.states())

    def states(self) -> dict[str, dict[str, Any]]:
        """Returns the properties of each model that is loaded; none while the daemon starts."""
        states = {}
        with suppress(httpx.HTTPError):
            for each in self._server.props()["models"]:
                if each["phase"] == "ready":
                    states[each["model"]] = self._server.props(each["model"])
        return states

    def _start(self) -> None:
        try:
            self._server.start()
        except (LiveServerError, OSError) as error:
            self.failure = error
        finally:
            self._tap.hold(False)

    def _disarm(self, moment: str) -> bool:
        """Returns whether this moment was chosen. It is chosen once."""
        with self._lock:
            is_chosen = self._armed == moment
            if is_chosen:
                self._armed = None
            return is_chosen

    def _piece(self, exchange: Exchange) -> None:
        if exchange.is_turn and exchange.reply.has_token and self._disarm("reply"):
            self.kill("in a reply", self._question, "after its first tokens")

    def _watch(self, moment: str, look: Callable[[dict[str, dict[str, Any]]], None]) -> None:
        # Bound: the moment is met or given up.
        while self._armed == moment:
            look(self.states())
            time.sleep(_POLL_S)

    def _look_for_bytes_to_save(self, states: dict[str, dict[str, Any]]) -> None:
        pending = sum(pending_bytes(state) for state in states.values())
        if pending and not self._tap.running and self._disarm("saving"):
            self.kill("while saving", self._question, f"{pending:,} bytes not written")

    def _look_for_prefill(self, states: dict[str, dict[str, Any]]) -> None:
        for each in (each for state in states.values() for each in state["running"]):
            total, ready, restored = (each[key] for key in ("prompt_tokens", "computed_tokens", "restored_tokens"))
            is_inside = each["state"] == "prefilling" and restored < ready < total
            if is_inside and total - restored >= _LONG_TOKENS and self._disarm("prefill"):
                self.kill("in a prefill", self._question, f"after {ready:,} of {total:,} tokens")

    def _look_for_work_ahead(self, states: dict[str, dict[str, Any]]) -> None:
        """Kills between two steps of one job: tokens were added since the last look, and the job is not done."""
        before, self._tokens_ahead = self._tokens_ahead, _ahead_tokens(states)
        is_going_on = any(state["ahead"]["waiting"] for state in states.values())
        num_running = sum(len(state["running"]) for state in states.values())
        if is_going_on and not num_running and 0 <= before < self._tokens_ahead and self._disarm("ahead"):
            self.kill("in work ahead", self._question, f"{self._tokens_ahead - before:,} tokens after a look at it")


def pending_bytes(state: dict[str, Any]) -> int:
    return int(state["full_cache"]["state"]["pending_bytes"])


def _ahead_tokens(states: dict[str, dict[str, Any]]) -> int:
    return sum(int(state["ahead"]["tokens"]) for state in states.values())
