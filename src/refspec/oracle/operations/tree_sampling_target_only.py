"""Sampling down the tree: SGLang's kernel is CUDA, in the package sgl_kernel; there is none in Triton."""

from __future__ import annotations

import random
from collections.abc import Callable

import torch
from torch import Tensor

from refspec.kernels import tree_sampling_target_only
from refspec.oracle.operation import Inputs, Operation, Outputs, Size


def draw(rng: random.Random, size: Size) -> Inputs:
    """Any tree, any thresholds; most drafted tokens are likely ones."""
    nodes = rng.randint(1, size.nodes)
    vocab = rng.choice([5, 7, 33, rng.randint(2, 1000)])
    inputs = case(rng, rng.randint(1, size.batch), nodes, vocab, num_steps=rng.randint(0, nodes))
    if rng.random() < 0.3:
        inputs["threshold_acc"], inputs["threshold_single"] = rng.uniform(0.3, 1), rng.uniform(0.3, 1)
    inputs["reuse_coin"] = rng.random() < 0.1
    return inputs


def edges() -> dict[str, Inputs]:
    """No requests, roots alone, no steps, a long vocabulary, coins of 0, thresholds of 0, siblings that are equal."""
    rng = random.Random(0)
    zero_coins, equal_siblings = case(rng, 3, 6, 5, 5), case(rng, 3, 6, 7, 5)
    zero_coins["coins"].zero_()
    zero_coins["final_coins"].zero_()
    equal_siblings["candidates"][:] = 3
    return {
        "no requests": case(rng, 0, 4, 5, 2),
        "roots alone": case(rng, 2, 1, 5, 3),
        "no steps": case(rng, 2, 4, 5, 0),
        "two nodes, one step": case(rng, 3, 2, 33, 1),
        "fewer steps than levels": case(rng, 3, 8, 5, 2),
        "a long vocabulary": case(rng, 2, 6, 5000, 4),
        "coins of 0": zero_coins,
        "thresholds of 0": {**case(rng, 2, 5, 5, 4), "threshold_acc": 0.0, "threshold_single": 0.0},
        "equal siblings": equal_siblings,
    }


def case(rng: random.Random, b: int, nodes: int, vocab: int, num_steps: int) -> Inputs:
    """b random trees. A child's token is drawn from its parent's row, and siblings differ while there are tokens."""
    torch.manual_seed(rng.randrange(2**31))
    probs = random_rows(b, nodes, vocab)
    candidates = torch.zeros(b, nodes, dtype=torch.int64)
    first_child, next_sibling = torch.full((b, nodes), -1), torch.full((b, nodes), -1)
    for r in range(b):
        children: list[list[int]] = [[] for _ in range(nodes)]
        for column in range(1, nodes):
            children[rng.choice([rng.randrange(column), column - 1, (column - 1) // 2])].append(column)
        for parent, columns in enumerate(children):
            weights = probs[r, parent].clone() + 1e-3
            for place, column in enumerate(columns):
                candidates[r, column] = token = int(torch.multinomial(weights, 1))
                weights[token] = 0 if bool((weights > 0).sum() > 1) else 1
                if place:
                    next_sibling[r, columns[place - 1]] = column
                else:
                    first_child[r, parent] = column
    return {
        "candidates": candidates,
        "retrieve_index": torch.arange(b * nodes).view(b, nodes),
        "retrieve_next_token": first_child,
        "retrieve_next_sibling": next_sibling,
        "target_probs": probs,
        "coins": torch.rand(b, nodes),
        "final_coins": torch.rand(b),
        "num_steps": num_steps,
        "threshold_single": 1.0,
        "threshold_acc": 1.0,
        "reuse_coin": False,
    }


def random_rows(b: int, rows: int, vocab: int) -> Tensor:
    """Rows that sum to 1, f32 (b, rows, vocab): flat ones and steep ones, with about a third of the entries 0."""
    logits = torch.randn(b, rows, vocab) * torch.tensor([0.5, 2.0, 8.0])[torch.randint(3, (b, rows, 1))]
    lost = torch.rand(b, rows, vocab) < 0.33
    lost[:, :, 0] &= ~lost.all(-1)
    return logits.masked_fill(lost, -torch.inf).softmax(-1)


def ours(inputs: Inputs, backend: str) -> Outputs:
    """The three results, by name."""
    return _outputs(*tree_sampling_target_only(**inputs, backend=backend))


def sgl_kernel(sample: Callable[..., None], inputs: Inputs) -> Outputs:
    """The same by tree_speculative_sampling_target_only, which notes struck-out tokens in draft_probs."""
    candidates = inputs["candidates"]
    b, n = candidates.shape
    predict = candidates.new_zeros(b * n, dtype=torch.int32)
    accept_index = candidates.new_full((b, inputs["num_steps"] + 1), -1, dtype=torch.int32)
    accept_token_num = candidates.new_zeros(b, dtype=torch.int32)
    sample(
        predict,
        accept_index,
        accept_token_num,
        candidates,
        inputs["retrieve_index"],
        inputs["retrieve_next_token"],
        inputs["retrieve_next_sibling"],
        inputs["coins"],
        inputs["final_coins"],
        inputs["target_probs"],
        torch.zeros_like(inputs["target_probs"]),
        inputs["threshold_single"],
        inputs["threshold_acc"],
        True,
    )
    return _outputs(predict, accept_index, accept_token_num)


def _outputs(predict: Tensor, accept_index: Tensor, accept_token_num: Tensor) -> Outputs:
    return {"predict": predict, "accept_index": accept_index, "accept_token_num": accept_token_num}


def in_float64(inputs: Inputs) -> tuple[Outputs, bool]:
    """The answer, one request and one node after the other; and did a coin come near a border on the way?"""
    b, n = inputs["candidates"].shape
    steps = inputs["num_steps"]
    predict, accept_index, accept_token_num = [0] * (b * n), [[-1] * (steps + 1) for _ in range(b)], [0] * b
    border = False
    for r in range(b):
        token, index, first_child, next_sibling, coins = (
            inputs[name][r].tolist()
            for name in ("candidates", "retrieve_index", "retrieve_next_token", "retrieve_next_sibling", "coins")
        )
        probs = inputs["target_probs"][r].double()
        path, rejected = [0], set[int]()
        child = first_child[0] if steps else -1
        passed = 0.0
        while child != -1:
            node = path[-1]
            p = float(probs[node, token[child]])
            passed += p
            border |= near(coins[node] * inputs["threshold_acc"], passed)
            if coins[node] * inputs["threshold_acc"] < passed or p >= inputs["threshold_single"]:
                predict[index[node]] = token[child]
                path.append(child)
                passed, rejected = 0.0, set()
                child = first_child[child] if len(path) <= steps else -1
            else:
                rejected.add(token[child])
                child = next_sibling[child]
        row = probs[path[-1]]
        rest = row.clone()
        rest[list(rejected)] = 0.0
        coin = coins[path[-1]] if inputs["reuse_coin"] else float(inputs["final_coins"][r])
        predict[index[path[-1]]], near_border = draw_one(rest, row, coin)
        border |= near_border
        accept_index[r][: len(path)] = [index[node] for node in path]
        accept_token_num[r] = len(path) - 1
    i32 = torch.int32
    outputs = _outputs(
        torch.tensor(predict, dtype=i32),
        torch.tensor(accept_index, dtype=i32).view(b, steps + 1),
        torch.tensor(accept_token_num, dtype=i32),
    )
    return outputs, border


def draw_one(rest: Tensor, row: Tensor, coin: float) -> tuple[int, bool]:
    """The token that owns the coin, by looking at one after the other; and is the coin near a border?"""
    weights = [float(weight) for weight in (rest if float(rest.sum()) > 0 else row)]
    goal, running, drawn, border = coin * sum(weights), 0.0, -1, False
    for token, weight in enumerate(weights):
        running += weight
        if weight > 0:
            border |= near(goal, running)
            if drawn == -1 and running > goal:
                drawn = token
    return drawn, border


def near(x: float, border: float) -> bool:
    """Closer than float32 sums in another order can be told apart: within 1e-5, relative."""
    return abs(x - border) <= 1e-5 * abs(border)


OPERATION = Operation(
    name="tree_sampling_target_only",
    draw=draw,
    edges=edges,
    ours=ours,
    borderline=lambda inputs: in_float64(inputs)[1],
    sgl_kernel=sgl_kernel,
    sgl_kernel_function="tree_speculative_sampling_target_only",
    sgl_kernel_takes=lambda inputs: len(inputs["candidates"]) > 0 and not inputs["reuse_coin"],
)
