"""The example of the lessons: that it shows what the lessons say it shows, and that other code agrees."""

from __future__ import annotations

import pytest

from refspec.course.example import NUM_DRAFT_TOKENS, TABLES, WORDS, outcome, work_out

SEEN = work_out()


def words(ids: list[int]) -> list[str]:
    return [WORDS[token] for token in ids]


def test_the_pool_is_that_of_the_made_up_draft() -> None:
    assert words(SEEN.tokens) == ["cat", "dog", "sat", "ran", "ran", "sat", "down", "still", "off", "home"]
    assert SEEN.scores == pytest.approx([0.6, 0.25, 0.3, 0.15, 0.15, 0.025, 0.15, 0.075, 0.12, 0.015])


def test_a_branch_dies_and_a_tie_goes_to_the_lower_index() -> None:
    assert SEEN.chosen[:2] == [[0, 1], [2, 3]]  # both of level 1 are children of cat; 4 has the score of 3
    assert SEEN.scores[3] == SEEN.scores[4]


def test_the_tree_is_what_one_draws_by_hand() -> None:
    assert SEEN.parent_list == [-1, 0, 1, 2, 3]
    assert SEEN.top_scores_index == [0, 1, 2, 3, 4, 6]
    assert words(SEEN.rows) == ["the", "cat", "dog", "sat", "ran", "ran", "down"]
    assert SEEN.retrieve_next_token == [1, 3, 5, 6, -1, -1, -1]
    assert SEEN.retrieve_next_sibling == [-1, 2, -1, 4, -1, -1, -1]
    assert SEEN.positions == [4, 5, 5, 6, 6, 6, 7]
    ancestors = [[column for column in range(NUM_DRAFT_TOKENS) if row[column]] for row in SEEN.tree_mask]
    assert ancestors == [[0], [0, 1], [0, 2], [0, 1, 3], [0, 1, 4], [0, 2, 5], [0, 1, 3, 6]]


def test_the_walk_takes_the_second_child_and_brings_a_bonus() -> None:
    assert SEEN.accept_index == [0, 1, 4, -1]
    assert SEEN.accept_token_num == 2
    assert [WORDS[SEEN.predict[row]] for row in (0, 1, 4)] == ["cat", "ran", "home"]
    assert "commits 3 tokens: *cat*, *ran*, *home*" in outcome()


def test_home_was_in_the_pool_and_not_in_the_tree() -> None:
    """As the lesson remarks."""
    assert 9 not in SEEN.top_scores_index
    assert WORDS[SEEN.tokens[9]] == "home"
    assert SEEN.parent_list[9 // 2] == 3


@pytest.mark.parametrize("name", [name for name in TABLES if name != "outcome"])
def test_tables_are_square(name: str) -> None:
    rows = TABLES[name]().splitlines()
    assert len(rows) > 3
    assert len({row.count("|") for row in rows}) == 1
