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


@given(st.lists(st.lists(st.integers(-1, 0), max_size=8), max_size=12), st.integers(1, 30))
def test_places_are_where_prompts_end_and_part(prompts: list[list[int]], max_tokens: int) -> None:
    everything, bounded = RadixTree(), RadixTree(max_tokens)
    for number, tokens in enumerate(prompts):
        positions, left = add(everything, *tokens)
        shared = {common_prefix_length(as_token_ids(tokens), as_token_ids(other)) for other in prompts[:number]}
        assert positions == sorted((shared | {len(tokens)}) - {0})
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
