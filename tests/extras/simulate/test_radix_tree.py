"""Where prompts part: each place is found, and what is kept is bounded."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from diskprefix.extras.simulate.radix_tree import RadixNode, RadixTree
from diskprefix.tokens import as_token_ids, common_prefix_length

ROOT = b"root"


def add(radix_tree: RadixTree, *tokens: int, root: bytes = ROOT) -> tuple[list[int], RadixNode | None]:
    way, left = radix_tree.add(root, as_token_ids(tokens))
    return [place.position for place in way], left


def test_a_prompt_passes_the_places_where_others_end_and_part() -> None:
    radix_tree = RadixTree()
    assert add(radix_tree, 1, 2, 3) == ([3], None)
    positions, left = add(radix_tree, 1, 2, 9, 9)
    assert left is not None
    assert (positions, left.position) == ([2, 4], 3)
    assert add(radix_tree, 1, 2, 3, 4, 5) == ([2, 3, 5], None)
    assert add(radix_tree, 1, 2, 7) == ([2, 3], None), "others parted there already"
    assert add(radix_tree, 1, 2, 3) == ([2, 3], None)


def test_a_beginning_of_a_prompt_ends_within_it() -> None:
    radix_tree = RadixTree()
    add(radix_tree, 1, 2, 3)
    positions, left = add(radix_tree, 1, 2)
    assert left is not None
    assert (positions, left.position) == ([2], 3)


def test_an_empty_prompt_passes_nothing() -> None:
    assert add(RadixTree()) == ([], None)


def test_roots_share_nothing() -> None:
    radix_tree = RadixTree()
    add(radix_tree, 1, 2, 3)
    assert add(radix_tree, 1, 2, 4, root=b"other") == ([3], None)


def test_what_was_not_passed_for_longest_is_forgotten() -> None:
    radix_tree = RadixTree(max_tokens=9)
    add(radix_tree, 1, 1, 1)
    add(radix_tree, 2, 2, 2)
    add(radix_tree, 3, 3, 3)
    add(radix_tree, 1, 1, 1)
    add(radix_tree, 4)
    assert add(radix_tree, 2, 2, 9) == ([3], None)
    assert add(radix_tree, 1, 1, 9)[1] is not None


def test_a_prompt_larger_than_the_bound_is_known_until_the_next() -> None:
    radix_tree = RadixTree(max_tokens=3)
    add(radix_tree, 1, 2, 3, 4, 5)
    assert add(radix_tree, 1, 2, 3, 4, 5) == ([5], None)
    add(radix_tree, 7, 8)
    assert add(radix_tree, 1, 2) == ([2], None)


@given(st.lists(st.lists(st.integers(-1, 0), max_size=8), max_size=12), st.integers(1, 30))
def test_places_are_where_prompts_end_and_part(prompts: list[list[int]], max_tokens: int) -> None:
    everything, bounded = RadixTree(), RadixTree(max_tokens)
    for number, tokens in enumerate(prompts):
        positions, left = add(everything, *tokens)
        shared = {common_prefix_length(as_token_ids(tokens), as_token_ids(other)) for other in prompts[:number]}
        assert set(positions) >= (shared | {len(tokens)}) - {0}
        assert (left is None) or left.parent is not None
        add(bounded, *tokens)
        kept = sum(len(end.tokens) for end in _places(bounded))
        assert kept == bounded._num_tokens <= max(max_tokens, *map(len, prompts))


def _places(radix_tree: RadixTree) -> list[RadixNode]:
    found: list[RadixNode] = []
    waiting = list(radix_tree._roots.values())
    while waiting:
        place = waiting.pop()
        found.append(place)
        waiting.extend(place.children.values())
    return found
