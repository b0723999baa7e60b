"""Exercise: walk the tree that the target has verified.

To check it:  refspec grade walk_tree      For a hint:  refspec hint walk_tree
"""

from __future__ import annotations

import torch


def walk_tree(
    candidates: torch.Tensor,
    retrieve_index: torch.Tensor,
    retrieve_next_token: torch.Tensor,
    retrieve_next_sibling: torch.Tensor,
    target_predict: torch.Tensor,
    num_steps: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Accept the drafts that the target agrees with, from the root down.

    b is the number of requests, N that of the nodes in each one's tree. No request has to do with another one.

    What comes in, int64 (b, N) (and must not be changed):
        candidates             each node's token; column 0 is the root
        retrieve_index         each node's global row: request * N + column
        retrieve_next_token    the column of each node's first child, -1 if it has none
        retrieve_next_sibling  the column of each node's next sibling, -1 if it is the last
        target_predict         the token that the target wants after each node
        num_steps              an int: at most so many drafts are accepted, even where the tree is deeper

    The columns but the first may come in any order: only the links say who is whose child. The children of one node
    hold different tokens.

    The rule. The walk begins at the root. If a child of the node where it stands holds the token that the target
    wants after this node, the child is accepted, and the walk goes on from it. Where no child does, or num_steps
    children have been accepted, the walk ends, and what the target wants after its last node is the bonus.

    What goes out, a tuple of three:
        predict           integers (b*N), by global row: what the target wants after each node on the walk's path, the
                          root and the last node included; 0 for all other nodes
        accept_index      integers (b, num_steps + 1): the global rows of the path, the root first; -1 behind its end
        accept_token_num  integers (b): how many children were accepted; neither the root nor the bonus counts
    Lists or NumPy arrays are as good as tensors, and int32 is as good as int64.

    For example, one request, N = 4, num_steps = 2:

        column 0, token 5 -+- column 1, token 6            after column 0 the target wants 7: column 2 holds it
                           `- column 2, token 7 --- column 3, token 9      after column 2 it wants 9: column 3
                                                           after column 3 it wants 4: the bonus

    >>> tokens, wanted = torch.tensor([[5, 6, 7, 9]]), torch.tensor([[7, 1, 9, 4]])
    >>> first_child, sibling = torch.tensor([[1, -1, 3, -1]]), torch.tensor([[-1, 2, -1, -1]])
    >>> answer = walk_tree(tokens, torch.tensor([[0, 1, 2, 3]]), first_child, sibling, wanted, 2)
    >>> [part.tolist() for part in answer]
    [[7, 0, 9, 4], [[0, 2, 3]], [2]]
    """
    raise NotImplementedError
