"""When a request ends.

A round commits several tokens at once, so the question is asked of each token, in order, as it is appended. What
comes after the token that ends the request is dropped: from the output, the cache, and every count.

Order of the rules: a stop wins over the end of a grammar, that over the budget, and the budget over the context,
wherever two meet at one token.

Two things are a stop. A *stop token* (the model's end of text, or an id that the request names) is compared with the
token. A *stop string* is looked for in the text of the output, as it stands with this token:

- The text is what Engine.decode makes of the output's ids, from the first of them on. The prompt is no part of it: a
  stop string that would begin in the prompt does not match. Nor are special tokens, which are not decoded, and bytes
  that do not make up a character.
- Where a stop string begins or ends within a token, or a character of it is spread over several, makes no difference:
  the output ends with the token that completes it. That token is kept, and so is in the cache and in every count; the
  text is cut before the stop string, or behind it if the request asks for that.
- Of several stop strings, the one that an earlier token completes wins; of those that one token completes, the one
  that begins first; of those that begin at one place, the shortest.
- A token that is a stop token and completes a stop string is reported as the string, whose text is then cut: a text
  never holds a stop string that was not asked for.

Source: SGLang: python/sglang/srt/managers/schedule_batch.py:Req.update_finish_state @v0.5.23. There the strings are
looked for in the end of the text once a step, over a window that grows with the accepted block, and the token is
found again afterwards; and of several strings the one that the request names first wins.
"""

from __future__ import annotations

from collections.abc import Iterable

from refspec.requests.request import Request


def append_tokens(request: Request, tokens: Iterable[int]) -> int:
    """Append tokens up to the one that ends the request, and note why it ended. Returns how many were kept.

    That may be none: a token that the grammar does not allow is no output. It is chosen only where the grammar, without
    being finished, allows nothing that the model can say: a dead end.
    """
    kept = 0
    for token in tokens:
        if request.matcher and not request.matcher.accept(token):
            request.finish_reason = "dead_end"
            break
        request.output_ids.append(token)
        if request.text:
            request.text.append(token)
        kept += 1
        request.finish_reason = finish_reason(request)
        if request.finish_reason:
            break
    return kept


def finish_reason(request: Request) -> str | None:
    """Why the request ends with its newest token; None while it goes on."""
    if matched_stop(request) is not None:
        return "stop"
    if request.matcher and request.matcher.finished:
        return "stop"
    if len(request.output_ids) >= request.params.max_new_tokens:
        return "length"
    if len(request.prompt_ids) + len(request.output_ids) >= request.max_total_len:
        return "length"
    return None


def matched_stop(request: Request) -> int | str | None:
    """The stop that the newest token is (its id) or completes (the string); None if it does neither."""
    if request.text and request.text.matched_stop is not None:
        return request.text.matched_stop
    newest = request.output_ids[-1]
    return newest if newest in request.stop_token_ids else None
