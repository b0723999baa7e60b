"""The likeliest ids beside a token's log-probability: which they are, and in what order."""

from __future__ import annotations

import pytest
import torch

from refspec.config import SamplingParams
from refspec.requests.logprobs import append_logprobs
from refspec.requests.request import Request


def likeliest(logits: torch.Tensor, count: int) -> list[list[tuple[int, float]]]:
    """As of a request that has said id 0 after each row."""
    rows = range(len(logits))
    request = Request(0, [1], SamplingParams(logprobs=count), frozenset(), 100, output_ids=[0 for _ in rows])
    append_logprobs([request], logits, [rows])
    return request.top_logprobs


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_they_are_the_first_of_the_whole_sorted_vocabulary(dtype: torch.dtype) -> None:
    """Ties are everywhere, among them ids that cannot be said at all."""
    generator = torch.Generator().manual_seed(7)
    for distinct in (1, 2, 5, 1000):
        logits = torch.randint(distinct, (6, 40), generator=generator).to(dtype)
        logits[:3, ::3] = -torch.inf
        law = torch.log_softmax(logits.to(torch.promote_types(dtype, torch.float32)), dim=-1).tolist()
        for count in (1, 2, 7, 39, 40):
            expected = [sorted(enumerate(row), key=lambda entry: (-entry[1], entry[0]))[:count] for row in law]
            assert likeliest(logits, count) == expected


def test_none_are_noted_where_none_are_asked_for() -> None:
    assert likeliest(torch.zeros(2, 5), 0) == [[], []]
