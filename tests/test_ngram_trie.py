"""The trie guesses what has followed before, latest or most frequent first, and keeps to its bounds."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from refspec.spec.ngram_trie import GuessTree, NgramTrie, Node

NO_LIMIT = 10**9
texts = st.lists(st.integers(0, 3), min_size=1, max_size=40)


def trie_of(*inserted: Sequence[int], max_depth: int = 8, capacity: int = NO_LIMIT) -> NgramTrie:
    trie = NgramTrie(max_depth, capacity)
    for text in inserted:
        trie.insert(text)
    return trie


def paths_of(tree: GuessTree) -> list[list[int]]:
    """The tokens from below the root down to each node."""
    paths: list[list[int]] = [[]]
    for token, parent in zip(tree.tokens[1:], tree.parents[1:], strict=True):
        paths.append([*paths[parent], token])
    return paths[1:]


def nodes_of(trie: NgramTrie) -> Iterator[Node]:
    to_visit = [trie.root]
    while to_visit:
        node = to_visit.pop()
        to_visit += node.children.values()
        if node is not trie.root:
            yield node


def text_of(node: Node) -> tuple[int, ...]:
    return (*text_of(node.parent), node.token) if node.parent else ()


def pieces_of(inserted: Sequence[int], max_depth: int) -> Counter[tuple[int, ...]]:
    """How often each piece of at most so many tokens stands in a text."""
    lengths = range(1, max_depth + 1)
    return Counter(tuple(inserted[begin : begin + n]) for n in lengths for begin in range(len(inserted) - n + 1))


# --- which match wins ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("history", "guess"),
    [([1, 2, 3, 4, 1, 2, 3, 5, 1, 2, 3], [5, 1, 2]), ([7, 8, 9, 7, 8], [9, 7, 8])],
    ids=["the latest wins", "the end of the text is no match"],
)
def test_NGR_01_which_match_wins(history: list[int], guess: list[int]) -> None:
    tree = trie_of(history).guess(history, 4, max_breadth=1, match_type="BFS")
    assert (tree.tokens, tree.parents) == ([history[-1], *guess], [-1, 0, 1, 2])


def test_NGR_01_by_frequency_if_asked_for() -> None:
    """After 1 2 came 4 twice, then 5 once. Where both are as frequent, the latest."""
    trie = trie_of([1, 2, 4], [1, 2, 4], [1, 2, 5])
    assert trie.guess([1, 2], 2, 1, "BFS").tokens == [2, 5]
    assert trie.guess([1, 2], 2, 1, "PROB").tokens == [2, 4]
    trie.insert([1, 2, 5])
    assert trie.guess([1, 2], 2, 1, "PROB").tokens == [2, 5]


def test_NGR_01_a_text_that_was_never_seen_gives_no_guess() -> None:
    assert trie_of([1, 2, 3]).guess([1, 2, 3], 4, 8, "BFS").tokens == [3]
    assert trie_of().guess([5], 4, 8, "PROB").tokens == [5]
    assert trie_of([1, 2, 3]).guess([9], 4, 8, "BFS").tokens == [9]


def test_the_longest_match_comes_first_and_shorter_ones_fill_the_rest() -> None:
    """1 2 was followed by 3, long ago; 2 alone by 4, since."""
    trie = trie_of([1, 2, 3], [9, 2, 4])
    assert paths_of(trie.guess([1, 2], 9, 8, "BFS")) == [[3], [4]]
    assert paths_of(trie.guess([7, 2], 9, 8, "BFS")) == [[4], [3]]
    assert paths_of(trie.guess([1, 2], 2, 8, "BFS")) == [[3]]


def test_what_two_matches_guess_alike_stands_in_the_tree_once() -> None:
    """0 1 and 1 were both followed by 2 3; the shorter match knows how it went on."""
    trie = trie_of([0, 1, 2, 3, 4, 5], max_depth=4)
    assert paths_of(trie.guess([0, 1], 9, 8, "BFS")) == [[2], [2, 3], [2, 3, 4]]


def test_breadth_falls_from_the_widest_at_one_token_to_one_at_the_longest() -> None:
    trie = NgramTrie(max_depth=6, capacity=NO_LIMIT)
    for number in range(40):  # after 0 0 0 0 0 came everything
        trie.insert([0] * 5 + [100 + number])
    node, widths = trie.root, []
    while 0 in node.children:
        node = node.children[0]
        widths.append(trie._breadth(node, 9))
    assert widths == [9, 7, 5, 3, 1]
    assert len(trie.guess([1, 0], 1000, 9, "BFS").parents) - 1 >= 9


# --- what it holds ------------------------------------------------------------------------------------------------


@given(texts=st.lists(texts, min_size=1, max_size=3), cuts=st.lists(st.integers(1, 9)), max_depth=st.integers(2, 6))
def test_it_holds_every_piece_and_counts_it_once_however_it_came(
    texts: list[list[int]], cuts: list[int], max_depth: int
) -> None:
    trie, expected = NgramTrie(max_depth, NO_LIMIT), Counter[tuple[int, ...]]()
    for text in texts:
        start = 0
        for length in [*cuts, len(text)]:  # block by block, as rounds commit them
            end = min(len(text), start + length)
            trie.insert(text[:end], start)
            start = end
        expected += pieces_of(text, max_depth)
    assert {text_of(node): node.times for node in nodes_of(trie)} == expected
    assert len(trie) == len(expected)
    assert {node.depth for node in nodes_of(trie)} <= set(range(1, max_depth + 1))
    assert all(node.depth == len(text_of(node)) for node in nodes_of(trie))


@given(
    inserted=st.lists(texts, min_size=1, max_size=3),
    end=st.lists(st.integers(0, 4), max_size=6),
    max_depth=st.integers(2, 7),
    size=st.integers(2, 12),
    max_breadth=st.integers(1, 4),
    match_type=st.sampled_from(["BFS", "PROB"]),
    capacity=st.sampled_from([NO_LIMIT, 30, 5]),
)
def test_whatever_it_guesses_has_followed_the_text_s_end_before(
    inserted: list[list[int]],
    end: list[int],
    max_depth: int,
    size: int,
    max_breadth: int,
    match_type: str,
    capacity: int,
) -> None:
    text = [*inserted[-1], *end]
    trie = trie_of(*inserted[:-1], text, max_depth=max_depth, capacity=capacity)
    tree = trie.guess(text, size, max_breadth, match_type)
    paths = paths_of(tree)
    seen = [pieces_of(other, len(other)) for other in [*inserted[:-1], text]]
    for path in paths:
        assert any(tuple(text[-length:] + path) in pieces for pieces in seen for length in range(1, len(text) + 1))
    assert len({tuple(path) for path in paths}) == len(paths)  # no two siblings alike
    assert len(tree) <= size
    assert all(parent < place for place, parent in enumerate(tree.parents))
    if capacity == NO_LIMIT and tuple(text[-1:]) in pieces_of(text[:-1], 1):
        assert paths  # the last token has been there before, and something followed it


@given(text=texts, max_depth=st.integers(2, 7))
def test_the_first_guess_is_what_followed_the_latest_occurrence_of_the_longest_match(
    text: list[int], max_depth: int
) -> None:
    tree = trie_of(text, max_depth=max_depth).guess(text, 2, 1, "BFS")
    for length in range(min(max_depth - 1, len(text)), 0, -1):
        followed = [p + length for p in range(len(text) - length) if text[p : p + length] == text[-length:]]
        if followed:
            assert tree.tokens[1:] == [text[followed[-1]]]
            return
    assert tree.tokens[1:] == []


# --- bounds -------------------------------------------------------------------------------------------------------


@given(texts=st.lists(texts, max_size=5), max_depth=st.integers(2, 6), capacity=st.integers(1, 40))
def test_eviction_keeps_the_capacity_and_every_node_its_parent(
    texts: list[list[int]], max_depth: int, capacity: int
) -> None:
    trie = NgramTrie(max_depth, capacity)
    for text in texts:
        for end in range(1, len(text) + 1):
            trie.insert(text[:end], end - 1)
            assert len(trie) <= capacity
    assert Counter(nodes_of(trie)) == Counter(list(trie._by_use))  # those within reach, each once


def test_what_was_not_walked_over_for_the_longest_time_goes_first() -> None:
    trie = trie_of([1, 2], [3, 4], max_depth=2, capacity=6)  # nodes 1, 1 2, 2, 3, 3 4, 4
    trie.insert([1, 2])
    trie.insert([5])
    assert {text_of(node) for node in nodes_of(trie)} == {(1,), (1, 2), (2,), (3,), (4,), (5,)}  # the end of 3 4


class Token(int):
    """An id that counts how often one is looked up."""

    looked_up = 0

    def __hash__(self) -> int:
        Token.looked_up += 1
        return int(self)


def test_NGR_03_the_cost_of_a_token_does_not_grow_with_the_history() -> None:
    """10000 random tokens, one at a time as rounds commit them, and all at once; depth 8, 20000 nodes."""
    rng = random.Random(0)
    text = [Token(rng.randrange(1000)) for _ in range(10_000)]
    trie, costs = NgramTrie(max_depth=8, capacity=20_000), []
    for half in (range(5000), range(5000, 10_000)):
        before = Token.looked_up
        for place in half:
            trie.insert(text[max(0, place - 7) : place + 1], min(place, 7))
        costs.append(Token.looked_up - before)
        assert len(trie) <= min(8 * (place + 1), 20_000)
    assert len(trie) == 20_000  # so nodes were evicted, and it went on
    assert costs[1] / costs[0] < 3

    before, trie = Token.looked_up, NgramTrie(max_depth=8, capacity=20_000)
    trie.insert(text)
    assert (Token.looked_up - before) / len(text) < 4 * 8  # made, found, taken as the latest, evicted
