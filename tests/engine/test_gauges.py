"""When the engine's thread counts as hanging."""

from __future__ import annotations

from diskprefix.engine.gauges import SLOWEST_ROW_S, Heartbeat


class Watched:
    """A heartbeat, and the time that it reads."""

    def __init__(self) -> None:
        self.now = 0.0
        self.heartbeat = Heartbeat(clock=lambda: self.now)

    def stopped_after(self, seconds: float) -> bool:
        self.now += seconds
        return self.heartbeat.has_stopped()


def test_an_engine_that_waits_for_requests_has_not_stopped_however_long_it_waits() -> None:
    watched = Watched()
    watched.heartbeat.beat()
    watched.heartbeat.rest()
    assert not any(watched.stopped_after(3600) for _ in range(3))
    assert watched.heartbeat.working_s == 0


def test_an_engine_that_gets_on_has_not_stopped_however_long_its_steps_take() -> None:
    watched = Watched()
    for _ in range(3):
        watched.heartbeat.beat(num_rows=1)
        assert not watched.stopped_after(3600)


def test_a_step_that_does_not_end_has_stopped_from_the_second_look_on_until_it_ends() -> None:
    watched = Watched()
    watched.heartbeat.beat(num_rows=1)
    assert not watched.stopped_after(30), "it may have begun just now"
    assert watched.stopped_after(30)
    assert watched.stopped_after(30)
    assert watched.heartbeat.working_s == 90
    watched.heartbeat.beat()
    assert not watched.stopped_after(30)


def test_a_step_of_many_rows_may_take_longer() -> None:
    watched = Watched()
    watched.heartbeat.beat(num_rows=1000)
    assert not any(watched.stopped_after(SLOWEST_ROW_S * 100) for _ in range(10))
    assert watched.stopped_after(1)
