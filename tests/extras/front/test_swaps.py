"""Which models are loaded, wait and go, without processes. Sizes are in units of one byte, times in seconds."""

from __future__ import annotations

import contextlib
import random
from typing import Any

import pytest

from diskprefix.extras.front.swaps import PATIENCE_S, NeverFits, Phase, Place, Swaps


class Models:
    """Swaps with a clock, and workers that load and end at once when `settle` is called."""

    def __init__(self, limit: int | None) -> None:
        self.swaps = Swaps(limit)
        self.now = 0.0
        self.log: list[str] = []

    def ask(self, model: str, needed: int = 4, caller: str = "a", **more: Any) -> Place:
        """A request for a model."""
        place = self.swaps.of(model)
        if place is None:
            place = Place(model=model, needed_bytes=needed, waits_since=self.now, callers={caller}, **more)
            self.swaps.require_room(place, ["weights 3", "KV 1"])
            self.swaps.add(place)
        self.swaps.begin_request(place, caller)
        return place

    def answer(self, place: Place, keep_alive_s: float | None = None) -> None:
        self.swaps.end_request(place, self.now, keep_alive_s)

    def use(self, model: str, *, keep_alive_s: float | None = None, **more: Any) -> Place:
        """A request that is answered at once."""
        place = self.ask(model, **more)
        self.settle()
        self.answer(place, keep_alive_s)
        return place

    def settle(self) -> None:
        """Decides until nothing changes."""
        while True:
            decision = self.swaps.decide(self.now)
            for place in decision.load:
                self.log.append(f"+{place.model}")
                place.phase, place.used_at = Phase.READY, self.now
            for place in decision.unload:
                self.log.append(f"-{place.model}")
                self.swaps.remove(place)
            if not (decision.load or decision.unload):
                return


def test_models_that_fit_together_stay_together() -> None:
    models = Models(8)
    for name in "xyxy":
        place = models.ask(name)
        models.settle()
        models.answer(place)
    assert models.log == ["+x", "+y"]


def test_the_model_that_was_idle_for_longest_makes_room_and_one_that_answers_never() -> None:
    models = Models(12)
    busy = models.ask("busy")
    for models.now, name in enumerate("old"):
        place = models.ask(name)
        models.settle()
        models.answer(place)
    assert models.log == ["+busy", "+o", "+l", "-o", "+d"]
    assert models.swaps.of("busy") is busy


def test_memory_is_free_when_a_process_has_ended_and_not_before() -> None:
    models = Models(4)
    first = models.use("first")
    waiting = models.ask("second")
    decision = models.swaps.decide(models.now)
    assert (decision.load, decision.unload, decision.next_one) == ([], [first], waiting)
    assert models.swaps.decide(models.now).load == []
    models.swaps.remove(first)
    assert models.swaps.decide(models.now).load == [waiting]


def test_idle_models_that_would_not_be_enough_are_not_unloaded_for_nothing() -> None:
    models = Models(8)
    models.use("small")
    models.ask("busy")
    models.settle()
    models.ask("large", 8)
    models.settle()
    assert models.log == ["+small", "+busy"]


def test_a_model_that_is_never_idle_lets_others_in_after_a_while() -> None:
    models = Models(4)
    busy = models.ask("busy")
    models.settle()
    models.ask("other")
    models.settle()
    assert models.ask("busy") is busy, "for a while it takes new requests"
    models.now = PATIENCE_S
    models.settle()
    assert models.swaps.of("busy") is None
    later = models.ask("busy")
    for _ in range(2):
        models.answer(busy)
    models.settle()
    assert models.log == ["+busy", "-busy", "+other"]
    models.answer(models.swaps.places[0])
    models.settle()
    assert models.log[-2:] == ["-other", "+busy"]
    assert later.num_active == 1


def test_callers_take_turns_whoever_asked_first() -> None:
    models = Models(4)
    held = models.ask("held", caller="x")
    models.settle()
    for name, caller in (("a1", "a"), ("a2", "a"), ("b1", "b")):
        models.now += 1
        models.ask(name, caller=caller)
    models.answer(held)
    while any(place.num_active for place in models.swaps.places):
        models.settle()
        models.answer(next(place for place in models.swaps.places if place.phase is Phase.READY))
    assert [name for name in models.log if name[0] == "+"] == ["+held", "+a1", "+b1", "+a2"]


def test_a_model_is_not_unloaded_before_it_served_those_it_was_loaded_for() -> None:
    models = Models(4)
    first = models.ask("first", caller="a")
    models.ask("first", caller="b")
    models.settle()
    models.ask("second", caller="c")
    models.answer(first)
    models.settle()
    assert models.log == ["+first"]
    models.answer(first)
    models.settle()
    assert models.log == ["+first", "-first", "+second"]


def test_what_can_never_fit_is_refused_with_its_table_and_what_is_pinned() -> None:
    models = Models(10)
    models.use("pinned", is_pinned=True)
    with pytest.raises(
        NeverFits, match=r"large does not fit: 7 B of memory needed \(weights 3, KV 1\).*10 B; pinned is"
    ):
        models.ask("large", 7)
    models.ask("small", 6)
    models.settle()
    assert models.log == ["+pinned", "+small"]


def test_an_idle_model_goes_after_its_time_or_as_the_last_request_said() -> None:
    models = Models(None)
    timed = models.ask("timed", idle_unload_s=30.0)
    forever = models.ask("forever", idle_unload_s=30.0)
    models.use("at once", keep_alive_s=0)
    models.settle()
    models.answer(timed)
    models.answer(forever, keep_alive_s=float("inf"))
    assert models.swaps.due_at(models.now) == 30
    models.now = 29.9
    models.settle()
    assert models.log == ["+timed", "+forever", "+at once", "-at once"]
    models.now = 30
    models.settle()
    assert models.log[-1] == "-timed"
    assert models.swaps.of("forever") is not None


def test_a_model_that_nobody_waits_for_any_more_is_not_loaded() -> None:
    models = Models(4)
    held = models.ask("held")
    models.settle()
    models.answer(models.ask("left"))
    models.ask("ordered", is_ordered=True).num_active = 0
    models.answer(held)
    models.settle()
    assert models.log == ["+held", "-left", "-held", "+ordered"]


def one_that_yields() -> tuple[Models, Place, Place]:
    """Returns models, the busy one that was asked to yield, and the one that waits for its memory."""
    models = Models(4)
    busy = models.ask("busy")
    models.settle()
    other = models.ask("other")
    models.now = PATIENCE_S
    models.settle()
    return models, busy, other


def test_a_model_that_yielded_takes_requests_again_when_nobody_waits_for_its_memory_any_more() -> None:
    models, busy, other = one_that_yields()
    assert not busy.takes_requests
    models.answer(other)
    models.settle()
    assert models.ask("busy") is busy
    assert models.swaps.due_at(models.now) is None


@pytest.mark.parametrize("limit", [None, 100])
def test_a_model_is_not_loaded_twice_at_a_time(limit: int | None) -> None:
    models = Models(limit)
    first = models.use("first")
    first.is_closed = True
    assert models.swaps.decide(models.now).unload == [first]
    again, other = models.ask("first"), models.ask("other")
    decision = models.swaps.decide(models.now)
    assert (decision.load, decision.next_one) == ([other], again)
    models.swaps.remove(first)
    assert models.swaps.decide(models.now).load == [again]


def test_a_model_that_yielded_ends_when_its_requests_have_and_others_wait_for_it_again() -> None:
    models, busy, other = one_that_yields()
    models.ask("busy")
    models.answer(other)
    models.settle()
    assert not busy.takes_requests
    models.answer(busy)
    models.settle()
    assert models.log == ["+busy", "-other", "-busy", "+busy"]


def test_who_waits_and_can_never_fit_beside_what_was_pinned_meanwhile_lets_others_pass() -> None:
    models = Models(10)
    held = models.ask("held", 10)
    models.settle()
    models.ask("large", 8, caller="b").waits_since = 1
    pinned = models.ask("pinned", 4, is_pinned=True, caller="c")
    models.ask("small", 6, caller="d").waits_since = 2
    models.answer(held)
    models.settle()
    assert models.log == ["+held", "-held", "+pinned", "-large", "+small"]
    with pytest.raises(NeverFits):
        models.ask("large", 8)
    models.answer(pinned, keep_alive_s=0)
    models.settle()
    assert models.swaps.of("pinned") is pinned, "what a request says is not for pinned models"


@pytest.mark.parametrize("seed", range(20))
def test_every_request_is_answered_and_the_limit_holds(seed: int) -> None:
    rng = random.Random(seed)
    sizes = {name: rng.randint(1, 6) for name in "pqrst"}
    models = Models(6)
    asked: list[tuple[Place, float]] = []
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
