"""Captures wait for room in the buffer; nobody else does."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from diskprefix.kv.capturer import Capture, Capturer


class Buffer:
    """Room for `room` bytes, and what was done with each capture."""

    def __init__(self) -> None:
        self.room = 0
        self.errors = 0
        self.done: list[str] = []
        self.asked = threading.Semaphore(0)
        self.capturer = Capturer(self.reserve, self.fail)

    def reserve(self, size: int) -> bool:
        self.asked.release()
        if size > self.room:
            return False
        self.room -= size
        return True

    def fail(self) -> None:
        self.errors += 1

    def make_room(self, size: int) -> None:
        self.room += size
        self.capturer.wake()

    def submit(self, memory: object, name: str, size: int = 1, is_void: bool = False) -> None:
        copied, dropped = f"{name} copied", f"{name} dropped"
        self.capturer.submit(
            Capture(
                memory,
                size,
                lambda: self.done.append(copied),
                lambda: self.done.append(dropped),
                lambda: is_void,
            )
        )

    def wait_until_asked(self) -> None:
        """Until the thread has found no room."""
        assert self.asked.acquire(timeout=30)


@pytest.fixture
def buffer() -> Iterator[Buffer]:
    buffer = Buffer()
    yield buffer
    buffer.capturer.close(0)


A, B = object(), object()


def test_captures_wait_for_room_and_keep_their_order(buffer: Buffer) -> None:
    buffer.submit(A, "a", 2)
    buffer.submit(B, "b", 1)
    buffer.wait_until_asked()
    buffer.make_room(1)
    assert not buffer.capturer.settle(timeout_s=0.01)
    assert buffer.done == [], "a small one does not overtake a large one"
    buffer.make_room(2)
    assert buffer.capturer.settle(timeout_s=30)
    assert buffer.done == ["a copied", "b copied"]


def test_a_memory_that_is_wanted_is_not_waited_for_and_others_keep_their_captures(buffer: Buffer) -> None:
    buffer.submit(B, "b", 3)
    buffer.submit(A, "a1", 1)
    buffer.submit(A, "a2", 2)
    buffer.wait_until_asked()
    assert buffer.capturer.settle(A, drop=True)
    assert buffer.done == ["a1 dropped", "a2 dropped"]
    buffer.make_room(3)
    assert buffer.capturer.settle(B, timeout_s=30)
    assert buffer.done == ["a1 dropped", "a2 dropped", "b copied"]


def test_of_a_memory_that_is_wanted_what_has_room_is_copied(buffer: Buffer) -> None:
    buffer.submit(B, "b", 9)
    buffer.submit(A, "a1", 1)
    buffer.submit(A, "a2", 2)
    buffer.wait_until_asked()
    buffer.make_room(2)
    assert buffer.capturer.settle(A, drop=True)
    assert buffer.done == ["a1 copied", "a2 dropped"]


def test_what_is_void_needs_no_room(buffer: Buffer) -> None:
    buffer.submit(A, "a", 5, is_void=True)
    assert buffer.capturer.settle(A, timeout_s=30)
    assert buffer.done == ["a dropped"]


def test_settling_one_memory_does_not_wait_for_another(buffer: Buffer) -> None:
    buffer.submit(B, "b", 1)
    assert buffer.capturer.settle(A, timeout_s=0)
    assert not buffer.capturer.settle(B, timeout_s=0.01)


def test_a_capture_that_fails_is_counted_and_the_next_one_is_made(
    buffer: Buffer, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> None:
        raise MemoryError("none left")

    buffer.capturer.submit(Capture(A, 0, fail, fail))
    buffer.submit(A, "a", 0)
    assert buffer.capturer.settle(A, timeout_s=30)
    assert (buffer.errors, buffer.done) == (1, ["a copied"])
    assert "none left" in caplog.text


def test_closing_drops_what_has_no_room_in_time(buffer: Buffer) -> None:
    buffer.submit(A, "a", 1)
    buffer.capturer.close(0)
    assert buffer.done == ["a dropped"]
