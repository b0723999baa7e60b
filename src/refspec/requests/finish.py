"""When a request ends.

A round commits several tokens at once, so the question is asked of each token, in order, as it is appended. What
comes after the token that ends the request is dropped: from the output, the cache, and every count.

Order of the rules: a stop wins over the budget, and the budget over the context, wherever two meet at one token.
"""

from __future__ import annotations

from collections.abc import Iterable

from refspec.requests.request import Request


def append_tokens(request: Request, tokens: Iterable[int]) -> int:
    """Append tokens up to the one that ends the request, and note why it ended. Returns how many were kept."""
    kept = 0
    for token in tokens:
        request.output_ids.append(token)
        kept += 1
        request.finish_reason = finish_reason(request)
        if request.finish_reason:
            break
    return kept


def finish_reason(request: Request) -> str | None:
    """Why the request ends with its newest token; None while it goes on."""
    if request.output_ids[-1] in request.stop_token_ids:
        return "stop"
    if len(request.output_ids) >= request.params.max_new_tokens:
        return "length"
    if len(request.prompt_ids) + len(request.output_ids) >= request.max_total_len:
        return "length"
    return None
