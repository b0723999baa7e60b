"""Exercise: choose the next beams of the draft.

To check it:  refspec grade next_beams      For a hint:  refspec hint next_beams
"""

from __future__ import annotations

import torch

from refspec.kernels import stable_topk  # noqa: F401 - yours to use: the k largest of each row, and where they are

Level = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # child_scores, child_tokens, entries


def next_beams(
    i: int,
    topk_p: torch.Tensor,
    topk_index: torch.Tensor,
    hidden_states: torch.Tensor,
    scores: torch.Tensor,
    topk: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, Level]:
    """Choose the k beams of level i among the children of all beams of level i - 1.

    b is the number of requests, k = topk, H the width of a hidden state. No request has to do with another one.

    What comes in (and must not be changed):
        i              the level of the children, from 0
        topk_p         float32, each child's own probability, best first: (b, k) at level 0, where the root is the
                       only parent; then (b*k, k), in which row r*k + j holds the children of beam j of request r
        topk_index     int64, of the same shape: their token ids
        hidden_states  float32, one row for each parent: (b, H) at level 0, then (b*k, H)
        scores         float32 (b, k), the path scores of the parent beams, best first; at level 0 there are no parent
                       beams, and it is not to be used
        topk           k

    The rule. A child's path score is its beam's path score times its own probability (at level 0: its own
    probability). The new beams of a request are the k children with the highest path scores, best first; of equal
    ones, that which comes first: beam 0's children in their order, then beam 1's, and so on. One beam may go on with
    several children, and another with none; children of two beams may hold the same token, and are two children all
    the same. At level 0 there are just k children: all become beams, as they come.

    The pool. All children of all levels are kept as candidates, whether chosen or not. A request's are numbered as
    they come: 0 .. k-1 at level 0, then k*k more at each level, k .. k + k*k - 1 at level 1, and so on.

    What goes out, a tuple of four:
        input_ids      integers (b*k): the tokens of the new beams, request after request
        hidden_states  floats (b*k, H): for each new beam, the hidden state of its parent
        scores         floats (b, k): the path scores of the new beams
        level          what the pool gets, a tuple of three:
            child_scores  floats (b, k, k) as [request, beam, child], at level 0 (b, 1, k): all path scores
            child_tokens  integers (b, k*k), at level 0 (b, k): all token ids, in pool order
            entries       integers (b, k): the pool index of each new beam; at level 0 (b, k+1): in front of them
                          stands -1, which means the root
    Lists or NumPy arrays are as good as tensors, and int32 is as good as int64.

    For example, level 1, one request, k = 2:

        root -- beam 0, score 0.5 --- child 0  token 11  0.5   ->  0.5 * 0.5   = 0.25    becomes beam 0, pool index 2
             |                    `-- child 1  token 12  0.5   ->  0.5 * 0.5   = 0.25    becomes beam 1, pool index 3
             `- beam 1, score 0.25 -- child 0  token 13  0.75  ->  0.25 * 0.75 = 0.1875
                                  `-- child 1  token 14  0.25  ->  0.25 * 0.25 = 0.0625

    >>> p, tokens = torch.tensor([[0.5, 0.5], [0.75, 0.25]]), torch.tensor([[11, 12], [13, 14]])
    >>> states, beam_scores = torch.tensor([[1.0], [2.0]]), torch.tensor([[0.5, 0.25]])
    >>> input_ids, hidden_states, scores, level = next_beams(1, p, tokens, states, beam_scores, 2)
    >>> input_ids.tolist(), hidden_states.tolist(), scores.tolist()
    ([11, 12], [[1.0], [1.0]], [[0.25, 0.25]])
    >>> [part.tolist() for part in level]
    [[[[0.25, 0.25], [0.1875, 0.0625]]], [[11, 12, 13, 14]], [[2, 3]]]
    """
    raise NotImplementedError
