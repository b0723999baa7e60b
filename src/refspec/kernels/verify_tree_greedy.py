"""The walk: how far down the tree did the draft say what the target says?

From the root, among the children of the last accepted node, look for the one whose token is the target's choice
at that node; accept it and go on. Where none fits, the target's own choice is the bonus token. So a round commits
accept_token_num drafts and one bonus.

Bytes moved for each request: 4·N integers in (8 each), N + D + 1 out (4 each). That is little; a walk that reads as
it goes waits for memory at each link, and this waiting is its cost. The kernel reads everything first, in one go, and
walks in registers.

Source: SGLang: python/sglang/kernels/ops/speculative/spec_tree.py:verify_tree_greedy_func @0.5.23
"""

from __future__ import annotations

import torch
from torch import Tensor

from refspec.config import MOST_NODES
from refspec.kernels.backend import choose, tl, triton
from refspec.kernels.checks import check_bounds, check_size, check_tensor, device_of, values_are_checked
from refspec.kernels.launches import count_launch

Walk = tuple[Tensor, Tensor, Tensor]  # predict, accept_index, accept_token_num


def verify_tree_greedy_torch(
    candidates: Tensor,
    retrieve_index: Tensor,
    retrieve_next_token: Tensor,
    retrieve_next_sibling: Tensor,
    target_predict: Tensor,
    num_steps: int,
) -> Walk:
    """The reference of `verify_tree_greedy`."""
    b, n = candidates.shape
    # One trip to the host each; the walk itself is a chain of tiny decisions.
    tokens, index, choice = candidates.tolist(), retrieve_index.tolist(), target_predict.tolist()
    first_child, next_sibling = retrieve_next_token.tolist(), retrieve_next_sibling.tolist()
    predict = [0] * (b * n)
    accept_index = [[-1] * (num_steps + 1) for _ in range(b)]
    accept_token_num = [0] * b
    for r in range(b):
        node = 0
        accept_index[r][0] = index[r][0]
        for depth in range(1, num_steps + 1):
            wanted = choice[r][node]
            child = first_child[r][node]
            while child != -1 and tokens[r][child] != wanted:
                child = next_sibling[r][child]
            if child == -1:
                break
            predict[index[r][node]] = wanted
            accept_index[r][depth] = index[r][child]
            accept_token_num[r] = depth
            node = child
        predict[index[r][node]] = choice[r][node]  # the bonus
    i32, device = torch.int32, candidates.device
    return (
        torch.tensor(predict, dtype=i32, device=device),
        torch.tensor(accept_index, dtype=i32, device=device).view(b, num_steps + 1),
        torch.tensor(accept_token_num, dtype=i32, device=device),
    )


@triton.jit
def _verify_tree_greedy_kernel(
    candidates,
    retrieve_next_token,
    retrieve_next_sibling,
    target_predict,
    predict,
    accept_index,
    accept_token_num,
    n,
    num_steps,
    N_UPPER: tl.constexpr,
    D_UPPER: tl.constexpr,
):
    """Program r walks request r's tree. It is one warp: what a thread asks of another does not leave the registers.

    Which child fits is asked for all nodes at once, so the many siblings of one level cost no more than the most
    that one node has; after that a step of the walk is one look-up.
    """
    r = tl.program_id(0).to(tl.int64)
    node = tl.arange(0, N_UPPER)
    row = r * n + node
    token = tl.load(candidates + row, node < n, other=0)
    wanted = tl.load(target_predict + row, node < n, other=0)
    sibling = tl.load(retrieve_next_sibling + row, node < n, other=-1).to(tl.int32)

    # next_node: the child that holds what the target wants after the node, -1 if none does.
    next_node = tl.load(retrieve_next_token + row, node < n, other=-1).to(tl.int32)
    wrong = (next_node >= 0) & (tl.gather(token, tl.maximum(next_node, 0), 0) != wanted)
    asked = 1
    while (tl.max(wrong.to(tl.int32), 0) > 0) & (asked < n):  # no node has n children: links in a ring end here
        next_node = tl.where(wrong, tl.gather(sibling, tl.maximum(next_node, 0), 0), next_node)
        wrong = (next_node >= 0) & (tl.gather(token, tl.maximum(next_node, 0), 0) != wanted)
        asked += 1
    next_node = tl.where(wrong, -1, next_node)

    depth = tl.arange(0, D_UPPER)
    path = tl.where(depth == 0, 0, -1)
    is_accepted = node == 0
    accepted = 0
    at = tl.sum(tl.where(node == 0, next_node, 0), 0)
    while (at >= 0) & (accepted < num_steps):
        accepted += 1
        path = tl.where(depth == accepted, at, path)
        is_accepted = is_accepted | (node == at)
        at = tl.sum(tl.where(node == at, next_node, 0), 0)

    tl.store(predict + row, tl.where(is_accepted, wanted, 0).to(tl.int32), node < n)
    global_row = tl.where(path >= 0, r * n + path, -1)
    tl.store(accept_index + r * (num_steps + 1) + depth, global_row.to(tl.int32), depth <= num_steps)
    tl.store(accept_token_num + r, accepted)


def verify_tree_greedy_triton(
    candidates: Tensor,
    retrieve_index: Tensor,
    retrieve_next_token: Tensor,
    retrieve_next_sibling: Tensor,
    target_predict: Tensor,
    num_steps: int,
) -> Walk:
    """The kernel's launch. retrieve_index is not read: what it must hold, request·N + column, is sooner computed."""
    (b, n), i32, device = candidates.shape, torch.int32, candidates.device
    predict = torch.empty(b * n, dtype=i32, device=device)
    accept_index = torch.empty(b, num_steps + 1, dtype=i32, device=device)
    accept_token_num = torch.empty(b, dtype=i32, device=device)
    if b:
        _verify_tree_greedy_kernel[(b,)](
            candidates,
            retrieve_next_token,
            retrieve_next_sibling,
            target_predict,
            predict,
            accept_index,
            accept_token_num,
            n,
            num_steps,
            N_UPPER=triton.next_power_of_2(n),
            D_UPPER=triton.next_power_of_2(num_steps + 1),
            num_warps=1,
        )
    return predict, accept_index, accept_token_num


def verify_tree_greedy(
    candidates: Tensor,
    retrieve_index: Tensor,
    retrieve_next_token: Tensor,
    retrieve_next_sibling: Tensor,
    target_predict: Tensor,
    num_steps: int,
    backend: str = "auto",
) -> Walk:
    """candidates i64 (b, N), column 0 the root; links as `build_tree` gives them, the columns but the root in any
    order; target_predict i64 (b, N): the target's greedy choice after each node. num_steps, 0 or more: at most so many
    drafts are accepted. N is 512 at most, num_steps 511.

    Returns (predict i32 (b*N): the choice at each accepted node, 0 elsewhere; accept_index i32 (b, num_steps+1):
    global rows of the accepted path, root first, -1 padded; accept_token_num i32 (b): bonus excluded).

    Raises ValueError for other shapes or types, and, where values are checked, for links that lead out of the row,
    or twice to the same column.
    """
    run = choose(backend, device_of("candidates", candidates), verify_tree_greedy_torch, verify_tree_greedy_triton)
    check_size("num_steps", num_steps, at_least=0, at_most=MOST_NODES - 1)
    check_tensor("candidates", candidates, (None, None))
    (b, n), device = candidates.shape, candidates.device
    check_size("candidates' last size", n, at_most=MOST_NODES)
    check_tensor("retrieve_index", retrieve_index, (b, n), device=device)
    check_tensor("retrieve_next_token", retrieve_next_token, (b, n), device=device)
    check_tensor("retrieve_next_sibling", retrieve_next_sibling, (b, n), device=device)
    check_tensor("target_predict", target_predict, (b, n), device=device)
    check_bounds("retrieve_next_token", retrieve_next_token, -1, n)
    check_bounds("retrieve_next_sibling", retrieve_next_sibling, -1, n)
    if values_are_checked(device):
        check_retrieve_index(retrieve_index)
        _check_links(retrieve_next_token, retrieve_next_sibling)
    count_launch("verify_tree_greedy")
    return run(candidates, retrieve_index, retrieve_next_token, retrieve_next_sibling, target_predict, num_steps)


def check_retrieve_index(retrieve_index: Tensor) -> None:
    """Entry (r, c) is the global row r·N + c. Raises ValueError."""
    if retrieve_index.flatten().tolist() != [*range(retrieve_index.numel())]:
        raise ValueError(f"retrieve_index has other entries than request * {retrieve_index.shape[1]} + column")


def _check_links(retrieve_next_token: Tensor, retrieve_next_sibling: Tensor) -> None:
    """No link leads to the root, and at most one to any other column: then no walk comes back. Raises ValueError."""
    for children, siblings in zip(retrieve_next_token.tolist(), retrieve_next_sibling.tolist(), strict=True):
        led_to = [column for column in (*children, *siblings) if column != -1]
        if 0 in led_to or len(set(led_to)) < len(led_to):
            raise ValueError(
                "retrieve_next_token and retrieve_next_sibling lead to the root, or twice to the same column"
            )
