"""The room of results in memory is bounded, and no share takes the part of another."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from diskprefix.fair_cache import FairCache

SIZES = st.integers(0, 12)


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 30), SIZES), max_size=60))
def test_all_results_fit_and_the_last_one_of_each_share_is_found(puts: list[tuple[str, int, int]]) -> None:
    cache = FairCache[int, str](20)
    for share, key, size in puts:
        cache.put(key, f"{share} {key}", share, size)
        assert cache.size <= 20
        if size <= 20 // 3:
            assert cache.get(key) == f"{share} {key}"
    found = [key for key in range(31) if cache.get(key) is not None]
    assert len(found) == len(cache)
    assert cache.remove_if(lambda key, _: key in found[::2]) == bool(found)
    assert [key for key in range(31) if cache.get(key) is not None] == found[1::2]
    cache.clear()
    assert (len(cache), cache.size) == (0, 0)


@given(st.lists(st.tuples(SIZES, st.booleans()), max_size=60))
def test_what_a_flood_of_one_share_adds_leaves_another_its_part(flood: list[tuple[int, bool]]) -> None:
    cache = FairCache[object, str](20)
    for number in range(5):
        cache.put(number, "mine", "me", 2)
    for number, (size, also_uses) in enumerate(flood):
        cache.put(f"salt {number}", "theirs", "them", size)
        if also_uses:
            cache.get(f"salt {number - 1}")
    assert all(cache.get(number) == "mine" for number in range(5))


def test_one_share_alone_has_all_of_the_room_and_its_oldest_result_goes_first() -> None:
    cache = FairCache[str, int](3)
    for number, key in enumerate("abc"):
        cache.put(key, number, "me")
    assert cache.get("a") == 0
    cache.put("d", 3, "me")
    assert [key for key in "abcd" if cache.get(key) is not None] == ["a", "c", "d"]
    assert cache.get_or_make("b", "me", lambda: 7) == cache.get_or_make("b", "me", lambda: 8) == 7


def test_results_that_grow_are_measured_again() -> None:
    cache = FairCache[str, list[int]](6)
    growing = list[int]()
    cache.put("growing", growing, "them", 0)
    cache.put("other", [], "them", 3)
    cache.put("mine", [1, 2, 3], "me", 3)
    growing += range(9)
    cache.measure_again(len)
    assert [key for key in ("growing", "other", "mine") if cache.get(key) is not None] == ["other", "mine"]
    assert cache.size == 3
