"""What a simulated object store is asked, and what that costs, by hand."""

from __future__ import annotations

import pytest

from diskprefix.extras.simulate.object_store import SimulatedBucket, most_swept, sweep_s

NAMES = [bytes([number]) for number in range(20)]


def filled(num_objects: int) -> SimulatedBucket:
    store = SimulatedBucket()
    for name in NAMES[:num_objects]:
        store.put(name, 10, 0.0)
    return store


@pytest.mark.parametrize("num_stored", range(21))
@pytest.mark.parametrize("num_asked", [0, 1, 2, 7, 20])
def test_the_first_objects_that_are_stored_are_found(num_stored: int, num_asked: int) -> None:
    assert filled(num_stored).find(NAMES[:num_asked], 0.0) == min(num_stored, num_asked)


@pytest.mark.parametrize(
    ("num_stored", "heads"),
    [
        (0, 1),  # 0 is missing
        (1, 3),  # 0; 2 is missing; 1 is missing
        (5, 5),  # 0, 2; 6 is missing; 4; 5 is missing
        (20, 5),  # 0, 2, 6, 14, 19
    ],
)
def test_few_requests_find_them(num_stored: int, heads: int) -> None:
    store = filled(num_stored)
    store.find(NAMES, 3.7)
    assert (store.traffic.heads, store.traffic.reads_at) == (heads, {3: heads})


def test_the_busiest_second_of_reads_and_of_writes_counts() -> None:
    store = SimulatedBucket()
    for name, now in zip(NAMES, (0.1, 0.9, 1.0, 1.1, 1.2), strict=False):
        store.put(name, 10, now)
    store.get(11, 500, 7.5)
    traffic = store.traffic
    assert (traffic.writes_per_s, traffic.reads_per_s, traffic.headroom) == (3, 11, 5500 / 11)
    store.get(0, 0, 8.0)
    for _ in range(5):
        store.put(NAMES[0], 10, 1.5)
    assert traffic.headroom == 3500 / 8
    assert (traffic.puts, traffic.gets, traffic.put_bytes, traffic.got_bytes) == (10, 11, 100, 500)
    assert store.stored_bytes == 50, "each object once"


def test_a_store_that_nobody_asks_has_room_without_end() -> None:
    assert SimulatedBucket().traffic.headroom == float("inf")
    assert SimulatedBucket().traffic.dollars == 0


def test_requests_cost_what_the_price_list_says() -> None:
    traffic = SimulatedBucket().traffic
    traffic.gets, traffic.heads, traffic.puts = 600_000, 400_000, 1_000_000
    assert traffic.dollars == pytest.approx(0.4 + 5.0)


def test_a_sweep_lists_a_thousand_keys_a_request() -> None:
    assert [sweep_s(number) for number in (0, 1, 1000, 1001)] == pytest.approx([0, 0.1, 0.1, 0.2])
    assert most_swept(3600) == 36_000_000
