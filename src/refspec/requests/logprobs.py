"""Log-probabilities of what requests have said, where they ask for them.

They are the model's own: the log-softmax of its logits, before temperature, filters and the rules of logit_rules.py. So
they say what the model holds of a text, whatever made it write that text, and mean the same in every request. (That is
vLLM's default, and SGLang's for a greedy request without rules. SGLang writes penalties, biases and masks into the
logits before it takes their log-softmax, and divides a sampled request's by the temperature, unless
SGLANG_RETURN_ORIGINAL_LOGPROB is set. Neither counts the filters.)

A round asks for them when its tokens are committed, so that what a stop has cut off has none.

Source: SGLang: python/sglang/srt/layers/logprob_processor.py:OutputLogprobProcessor @v0.5.23
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from refspec.requests.request import Request


def append_logprobs(requests: Sequence[Request], logits: Tensor, chosen_at: Sequence[Sequence[int]]) -> None:
    """Note them for the newest tokens of the requests that ask for log-probabilities.

    logits (n, V): the target's. chosen_at: for each request the rows of logits that its newest tokens were chosen from,
    in their order; empty for one that has no new token. Afterwards such a request has one log-probability, and one list
    of likeliest ids, for every token of its output. Nothing is computed where nobody asks.
    """
    asking = [
        (request, rows)
        for request, rows in zip(requests, chosen_at, strict=True)
        if rows and request.params.logprobs is not None
    ]
    if not asking:
        return
    pairs = [pair for request, rows in asking for pair in zip(rows, request.output_ids[-len(rows) :], strict=True)]
    rows, tokens = torch.tensor(pairs, device=logits.device).unbind(1)
    law = torch.log_softmax(logits[rows].to(torch.promote_types(logits.dtype, torch.float32)), dim=-1)
    values = law.gather(1, tokens[:, None]).squeeze(1).tolist()
    likeliest = _likeliest(law, max(request.params.logprobs or 0 for request, _ in asking))
    owners = [request for request, rows in asking for _ in rows]
    for request, value, best in zip(owners, values, likeliest, strict=True):
        request.logprobs.append(value)
        request.top_logprobs.append(best[: request.params.logprobs])


def _likeliest(law: Tensor, count: int) -> list[list[tuple[int, float]]]:
    """Of each row of law (m, V) the first so many (id, value), ties to the lower id."""
    if count == 0:
        return [[] for _ in law]
    # torch.topk leaves open which of equal values it takes, but not what the last of them is.
    last = law.topk(count, dim=-1).values[:, -1:]
    above, ties = law > last, law == last
    chosen = above | (ties & (ties.cumsum(dim=-1) <= count - above.sum(dim=-1, keepdim=True)))
    ids = chosen.nonzero()[:, 1].view(-1, count)  # ascending: a stable sort leaves ties in this order
    values, order = law.gather(1, ids).sort(dim=-1, descending=True, stable=True)
    return [list(zip(*row, strict=True)) for row in zip(ids.gather(1, order).tolist(), values.tolist(), strict=True)]
