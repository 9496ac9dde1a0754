"""Which models are loaded, wait and go, without processes. Sizes are in units of one byte, times in seconds."""

from __future__ import annotations

import contextlib
import random
from typing import Any

import pytest

from diskprefix.daemon.router.swaps import PATIENCE_S, NeverFits, Phase, Slot, Swaps


class Models:
    """Swaps with a clock, and workers that load and end at once when `settle` is called."""

    def __init__(self, limit: int | None) -> None:
        self.swaps = Swaps(list[Slot](), limit)
        self.now = 0.0
        self.log: list[str] = []

    def ask(self, model: str, needed: int = 4, caller: str = "a", **more: Any) -> Slot:
        """A request for a model."""
        slot = self.swaps.find(model)
        if slot is None:
            more = {"waits_since": self.now} | more
            slot = Slot(model=model, needed_bytes=needed, shares={caller}, **more)
            self.swaps.require_room(slot, ["weights 3", "KV 1"])
            self.swaps.slots.append(slot)
        self.swaps.begin_request(slot, caller)
        return slot

    def answer(
        self, slot: Slot, keep_alive_s: float | None = None, caller: str = "a", *, overrides: bool = False
    ) -> None:
        slot.num_active -= 1
        slot.record_use(caller, self.now, keep_alive_s, overrides=overrides)

    def use(
        self, model: str, *, keep_alive_s: float | None = None, caller: str = "a", overrides: bool = False, **more: Any
    ) -> Slot:
        """A request that is answered at once."""
        slot = self.ask(model, caller=caller, **more)
        self.settle()
        self.answer(slot, keep_alive_s, caller, overrides=overrides)
        return slot

    def take(self, what: str, name: str, *fields: str) -> None:
        """Takes a step of a script: `at TIME`, or `ask`, `use` or `answer` with a model."""
        more: dict[str, Any] = dict(field.split("=") for field in fields)
        more = {key: value if key == "caller" else float(value) for key, value in more.items()}
        if what == "at":
            self.now = float(name)
        elif what == "answer":
            active = [slot for slot in self.swaps.slots if slot.model == name and slot.num_active]
            self.answer(min(active, key=lambda slot: slot.phase is not Phase.READY), **more)
        else:
            getattr(self, what)(name, **more)

    def settle(self) -> None:
        """Decides until nothing changes."""
        while True:
            load, unload = self.swaps.decide(self.now)
            for slot in load:
                self.log.append(f"+{slot.model}")
                self.swaps.set_ready(slot, self.now)
            for slot in unload:
                self.log.append(f"-{slot.model}")
                self.swaps.slots.remove(slot)
            if not (load or unload):
                return


SCRIPTS: dict[str, tuple[int | None, str]] = {
    "models that fit together stay together": (8, "use x: +x, use y: +y, use x, use y"),
    "the one that was idle for longest makes room, and one that answers never": (
        12,
        "ask busy: +busy, use old: +old, at 1, use newer: +newer, at 2, use next: -old +next",
    ),
    "idle models that would not be enough are not unloaded for nothing": (
        8,
        "use small: +small, ask busy: +busy, ask large needed=8",
    ),
    "a model that is never idle takes requests for a while, then lets others in": (
        4,
        "ask busy: +busy, ask other, ask busy, at 15, ask busy, answer busy, answer busy: -busy +other, "
        "answer other: -other +busy",
    ),
    "callers take turns, whoever asked first": (
        4,
        "ask held caller=x: +held, at 1, ask a1 caller=a, at 2, ask a2 caller=a, at 3, ask b1 caller=b, "
        "answer held: -held +a1, answer a1: -a1 +b1, answer b1: -b1 +a2",
    ),
    "a model is not unloaded before it served those it was loaded for": (
        4,
        "ask first: +first, ask first, ask second caller=c, answer first, answer first: -first +second",
    ),
    "a model that nobody waits for any more is not loaded, but one that was ordered": (
        4,
        "ask held: +held, ask left, answer left: -left, ask ordered is_ordered=1, answer ordered, "
        "answer held: -held +ordered",
    ),
    "a model that yielded takes requests again when nobody waits for its memory any more": (
        4,
        "ask busy: +busy, ask other, at 15, answer other: -other, ask busy, answer busy, answer busy",
    ),
    "a model that yielded ends when its requests have, and others wait for it again": (
        4,
        "ask busy: +busy, ask other, at 15, ask busy, answer other: -other, answer busy: -busy +busy",
    ),
    "the model that was asked to yield first goes on yielding": (
        8,
        "ask p: +p, ask p, at 1, ask q: +q, ask r, at 16, answer p, ask q, answer q, answer q: -q +r",
    ),
    "what a request says is for its own caller, and the model stays for the one who keeps it longest": (
        None,
        "use never caller=b: +never, use never keep_alive_s=0, "
        "use timed caller=b idle_unload_s=30: +timed, at 10, use timed keep_alive_s=0, at 29.9, at 30: -timed, "
        "use last keep_alive_s=inf: +last, use last keep_alive_s=0: -last, at 1000",
    ),
    "what a request says is at most the daemon's time": (
        None,
        "use long idle_unload_s=30 keep_alive_s=inf: +long, at 30: -long",
    ),
    "the owner's request overrides for all": (
        None,
        "use gone idle_unload_s=30 caller=b: +gone, use gone keep_alive_s=0 overrides=1: -gone, "
        "use stays idle_unload_s=30 keep_alive_s=inf overrides=1: +stays, at 1000",
    ),
    "a request does not unload what was ordered": (
        None,
        "ask ordered is_ordered=1 idle_unload_s=30: +ordered, answer ordered keep_alive_s=0, at 29, at 30: -ordered",
    ),
    "an idle model goes after its time, or as the last request said": (
        None,
        "ask timed idle_unload_s=30: +timed, ask stays idle_unload_s=30: +stays, "
        "use brief keep_alive_s=0: +brief -brief, "
        "answer timed, answer stays keep_alive_s=inf overrides=1, at 29.9, at 30: -timed, at 1000",
    ),
    "who waits and can never fit beside what was pinned meanwhile lets others pass": (
        10,
        "ask held needed=10: +held, ask large needed=8 caller=b waits_since=1, ask pinned is_pinned=1 caller=c, "
        "ask small needed=6 caller=d waits_since=2, answer held: -held +pinned -large +small",
    ),
    "what a request says is not for pinned models": (10, "use pinned is_pinned=1 keep_alive_s=0: +pinned, at 1000"),
}


@pytest.mark.parametrize(("limit", "script"), SCRIPTS.values(), ids=SCRIPTS)
def test_a_script_of_requests_loads_and_unloads_the_expected_models(limit: int | None, script: str) -> None:
    models = Models(limit)
    for step in script.split(", "):
        words, _, expected = step.partition(": ")
        before = len(models.log)
        models.take(*words.split())
        models.settle()
        assert models.log[before:] == expected.split(), step


def test_the_next_decision_is_due_when_a_model_was_idle_for_its_time_or_one_waited_long_enough() -> None:
    models = Models(4)
    models.use("first", idle_unload_s=30.0)
    assert models.swaps.due_at(models.now) == 30
    busy = models.ask("first")
    waiting = models.ask("other")
    assert models.swaps.due_at(models.now) == PATIENCE_S
    models.answer(waiting)
    models.settle()
    assert models.swaps.due_at(models.now) is None
    assert busy.takes_requests


def test_memory_is_free_when_a_process_has_ended_and_not_before() -> None:
    models = Models(4)
    first = models.use("first")
    waiting = models.ask("second")
    assert models.swaps.decide(models.now) == ([], [first])
    assert models.swaps.decide(models.now) == ([], [])
    models.swaps.slots.remove(first)
    assert models.swaps.decide(models.now) == ([waiting], [])


def test_a_model_that_never_fits_is_refused_with_its_table_and_the_pinned_models() -> None:
    models = Models(10)
    models.use("pinned", is_pinned=True)
    with pytest.raises(
        NeverFits, match=r"large does not fit: 7 B of memory needed \(weights 3, KV 1\).*10 B; pinned is"
    ):
        models.ask("large", 7)
    models.ask("small", 6)
    models.settle()
    assert models.log == ["+pinned", "+small"]


@pytest.mark.parametrize("limit", [None, 100])
def test_a_model_is_not_loaded_twice_at_a_time(limit: int | None) -> None:
    models = Models(limit)
    first = models.use("first")
    first.is_closed = True
    assert models.swaps.decide(models.now) == ([], [first])
    again, other = models.ask("first"), models.ask("other")
    assert models.swaps.decide(models.now) == ([other], [])
    models.swaps.slots.remove(first)
    assert models.swaps.decide(models.now) == ([again], [])


@pytest.mark.parametrize("seed", range(20))
def test_every_request_is_answered_and_the_limit_holds(seed: int) -> None:
    rng = random.Random(seed)
    sizes = {name: rng.randint(1, 6) for name in "pqrst"}
    models = Models(6)
    asked: list[tuple[Slot, float]] = []
    for _ in range(200):
        models.now += rng.random() * 4
        if rng.random() < 0.6:
            name = rng.choice("pqrst")
            with contextlib.suppress(NeverFits):
                caller = rng.choice("abc")
                asked.append((models.ask(name, sizes[name], caller, is_pinned=name == "p"), models.now))
        models.settle()
        assert models.swaps.used_bytes <= 6
        ready = [item for item in asked if item[0].phase is Phase.READY]
        if ready and rng.random() < 0.7:
            asked.remove(item := rng.choice(ready))
            models.answer(item[0])
    for _ in range(200):
        models.now += 1
        models.settle()
        for item in [item for item in asked if item[0].phase is Phase.READY]:
            asked.remove(item)
            models.answer(item[0])
    assert [item for item in asked if item[0].phase is not Phase.LEAVING] == []
