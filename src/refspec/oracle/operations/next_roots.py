"""Where the next round starts: SGLang's kernel of 0.5.23, which finds the bonus and the lengths."""

from __future__ import annotations

import random

import torch
from torch import Tensor

from refspec.kernels import next_roots
from refspec.oracle.operation import Inputs, Operation, Outputs, Size
from refspec.oracle.sources import Sources


def draw(rng: random.Random, size: Size) -> Inputs:
    """Any paths of at least the root, through blocks of any size."""
    n = rng.randint(1, size.nodes)
    return case(rng, [draw_path(rng, n) for _ in range(rng.randint(1, size.batch))], n)


def edges() -> dict[str, Inputs]:
    """No requests; the root alone; everything accepted; more than one program of either kernel."""
    rng = random.Random(0)
    return {
        "no requests": case(rng, [], 4),
        "the root alone": case(rng, [[0], [0]], 4),
        "everything accepted": case(rng, [list(range(8))] * 2, 8),
        "blocks of one": case(rng, [[0], [0]], 1),
        "many requests": case(rng, [draw_path(rng, 3) for _ in range(150)], 3),
    }


def draw_path(rng: random.Random, n: int) -> list[int]:
    """An accepted path, as columns of its block of n."""
    return [0, *sorted(rng.sample(range(1, n), rng.randint(0, n - 1)))]


def accept_index_of(rng: random.Random, paths: list[list[int]], n: int) -> Tensor:
    """These paths as global rows, -1 padded."""
    width = rng.randint(max(map(len, paths), default=1), n)
    index = [[r * n + c for c in path] + [-1] * (width - len(path)) for r, path in enumerate(paths)]
    return torch.tensor(index, dtype=torch.int32).view(len(paths), width)


def case(rng: random.Random, paths: list[list[int]], n: int) -> Inputs:
    """What verification gave: one path for each request."""
    return {
        "predict": torch.tensor(rng.choices(range(10**5), k=len(paths) * n), dtype=torch.int32),
        "accept_index": accept_index_of(rng, paths, n),
        "accept_token_num": torch.tensor([len(path) - 1 for path in paths], dtype=torch.int32),
        "seq_lens": torch.tensor([rng.choice([0, rng.randint(0, 10**6)]) for _ in paths], dtype=torch.int64),
    }


def ours(inputs: Inputs, backend: str) -> Outputs:
    """All three."""
    accept_lens, seq_lens, bonus_tokens = next_roots(**inputs, backend=backend)
    return {"accept_lens": accept_lens, "seq_lens": seq_lens, "bonus_tokens": bonus_tokens}


def sglang(sources: Sources, inputs: Inputs) -> Outputs:
    """The same by prepare_verify_commit_outputs, which is told how many tokens were accepted, the bonus included."""
    accept_lens = inputs["accept_token_num"] + 1
    seq_lens, bonus_tokens = sources.module("kernels/ops/speculative/eagle.py").prepare_verify_commit_outputs(
        inputs["predict"], inputs["accept_index"], accept_lens, inputs["seq_lens"]
    )
    return {"accept_lens": accept_lens, "seq_lens": seq_lens, "bonus_tokens": bonus_tokens.long()}


OPERATION = Operation(
    name="next_roots",
    draw=draw,
    edges=edges,
    ours=ours,
    sglang=sglang,
    sglang_source="kernels/ops/speculative/eagle.py:prepare_verify_commit_outputs @0.5.23",
)
