"""Outputs that are JSON of a schema: a grammar for SamplingParams, through the library llguidance.

llguidance knows JSON, and which tokens of a tokenizer keep a text within it; the states of its matchers are what
refspec.config.Matcher asks for. It is a wheel without dependencies for Linux, macOS and Windows; xgrammar, which SGLang
uses as a rule, wants transformers beside it.

The text is compact: no spaces between its parts, since a small model would write nothing else. Where an output is
complete but could go on, as a number can, the model's end-of-text id ends it, and is allowed.

Source: llguidance: python/llguidance/_lib.pyi:LLMatcher @v1.9.1; SGLang:
python/sglang/srt/constrained/llguidance_backend.py:GuidanceGrammar @v0.5.23
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor


class JsonGrammar:
    """A JSON schema, in the tokens of one tokenizer.

    schema: an object, as json.loads gives it; an empty one is any JSON. vocab_size: of the engine; eos_token_ids: the
    model's, at least one.

    Raises ValueError, with one line, if llguidance is not installed or cannot follow the schema, and without an
    end-of-text id.
    """

    def __init__(
        self, schema: Mapping[str, Any], tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Sequence[int]
    ) -> None:
        try:
            from llguidance import LLMatcher, LLTokenizer
        except ImportError:
            raise ValueError(
                "a JSON schema is followed by the package llguidance, which is not installed: pip install llguidance"
            ) from None
        if not eos_token_ids:
            raise ValueError("this model names no end-of-text id, and JSON could not always end without one")
        self.vocab_size = vocab_size
        try:
            vocabulary = LLTokenizer(tokenizer.to_str(), n_vocab=vocab_size, eos_token=list(eos_token_ids))
            grammar = LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides={"whitespace_flexible": False})
            complaint = LLMatcher.validate_grammar(grammar, vocabulary)
        except (TypeError, ValueError, RecursionError) as error:
            complaint = str(error)
        if complaint:
            reason = " ".join(complaint.split())
            raise ValueError(f"the JSON schema cannot be followed with this tokenizer: {reason}")
        self._start = LLMatcher(vocabulary, grammar, log_level=0)
        # What nests without end is found out by the first token only.
        trial, row = self._start.deep_copy(), torch.zeros(vocab_size, dtype=torch.bool)
        JsonMatcher(trial, vocab_size).allow(row)
        if not trial.consume_token(int(row.int().argmax())):
            first_line = [*trial.get_error().splitlines(), "it allows no first token"][0]
            raise ValueError(f"the JSON schema cannot be followed with this tokenizer: {first_line}")

    def matcher(self) -> JsonMatcher:
        """A new one, at the start of an output."""
        return JsonMatcher(self._start.deep_copy(), self.vocab_size)


class JsonMatcher:
    """refspec.config.Matcher, as llguidance does it."""

    def __init__(self, matcher: Any, vocab_size: int) -> None:
        self._matcher, self._vocab_size = matcher, vocab_size

    @property
    def finished(self) -> bool:
        """Nothing can follow, or the end-of-text id was accepted."""
        return bool(self._matcher.is_stopped())

    def allow(self, row: Tensor) -> None:
        """See Matcher.allow."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        row.copy_(torch.from_numpy(np.unpackbits(bits, count=self._vocab_size, bitorder="little")))

    def accept(self, token: int) -> bool:
        """See Matcher.accept. After a token that was refused, llguidance's matcher is of no further use."""
        return bool(self._matcher.consume_token(token))

    def rollback(self, count: int) -> None:
        """See Matcher.rollback."""
        self._matcher.rollback(count)
