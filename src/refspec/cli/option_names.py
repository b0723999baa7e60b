"""The library speaks of its own names; whoever reads its errors on a command line has given options."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

# The library's words, and the options that set them.
OPTIONS = {
    "num_draft_tokens": "--draft-tokens",
    "num_steps": "--steps",
    "topk": "--topk",
    "max_new_tokens": "--max-new-tokens",
    "stop_token_ids": "--stop-token-id",
    "temperature": "--temperature",
    "top_k": "--top-k",
    "top_p": "--top-p",
    "min_p": "--min-p",
    "repetition_penalty": "--repetition-penalty",
    "frequency_penalty": "--frequency-penalty",
    "presence_penalty": "--presence-penalty",
    "logit_bias": "--logit-bias",
    "logprobs": "--logprobs",
    "seed": "--seed",
    "sampler": "--sampler",
    "threshold_single": "--threshold-single",
    "threshold_acc": "--threshold-acc",
    "exact_branch_kv": "--exact-branch-kv",
    "exact_penalties": "--exact-penalties",
    "adaptive_steps": "--adaptive-steps",
    "ngram_max_trie_depth": "--ngram-max-trie-depth",
    "ngram_max_bfs_breadth": "--ngram-max-bfs-breadth",
    "ngram_match_type": "--ngram-match-type",
    "ngram_capacity": "--ngram-capacity",
    "kv_slots": "--kv-slots",
    "graphs=False": "--no-graphs",
    "spec.page_size": "--page-size",
    "page_size": "--page-size",
    "chunk_size": "--chunk-size",
    "retraction": "--retraction",
    "max_running": "--max-running",
}


@contextmanager
def option_names(error_type: type[ValueError]) -> Iterator[None]:
    """Errors of the library, in the command line's words.

    What stands in quotes is the user's own, and errors with a type of their own speak of files, not of options.
    """
    try:
        yield
    except ValueError as error:
        if type(error) is not ValueError:
            raise
        raise error_type(with_option_names(str(error))) from None


def with_option_names(text: str) -> str:
    """The library's words replaced by the options that set them, but for what stands in quotes."""
    words = r"(?<!\w)'[^']*'|\b(?:" + "|".join(OPTIONS) + r")\b"
    return re.sub(words, lambda found: OPTIONS.get(found[0], found[0]), text)
