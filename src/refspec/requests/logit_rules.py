"""What a request may change about the target's logits before a token is chosen by them, greedily or by a coin.

The rules of a request, in the order in which they apply:

1. frequency_penalty, times how often its output holds the token, and presence_penalty, if it holds it at all, come off
   the token's logit.
2. repetition_penalty divides what is positive then, and multiplies what is negative, of the tokens that it holds.
3. logit_bias is added.
4. The ids that its grammar does not allow get -inf.

"Its output" is just that. The prompt is not counted: so it is in SGLang, for all three penalties, and in OpenAI's API,
which has the first two. (In Hugging Face's transformers and in vLLM the repetition penalty counts the prompt as well.)

With speculation, the target is asked for logits at every node of a tree. Token by token, the output at a node would be
what is committed, and the drafts on the path from the root down to the node. (The root itself is committed: it is the
newest token of the output.) So that is what is counted there, and that is how far the grammar's automaton is moved: the
rules hold exactly, and speculation says what plain decoding says. The tree mask knows the paths: row i sees column j if
node j is an ancestor of node i, or the node itself.

SGLang relaxes this for the penalties: all nodes get those of the root, so that a token which a block repeats is not
counted before the block's end. `SpecConfig.exact_penalties` = False does the same. (SGLang goes further: of each block
only the newest token is ever counted. Here the whole block is, once it is committed.) Its masks, too, are exact.

The draft follows no rules. Whatever it drafts, the output is right; only more of its drafts would be accepted if it
knew. Nor do the log-probabilities that a request asks for: they are the model's own.

What a step costs: for the penalties, a few passes over the logits of the requests that have rules, and N² per request
for the paths; never anything that grows with the length of a text, since counts are kept, and only brought up to date.
A grammar costs the host one mask for each node whose path it allows, and a wait for the tree. A batch in which nobody
has rules pays nothing.

Source: SGLang: python/sglang/srt/speculative/eagle_utils.py:eagle_sample and eagle_prepare_for_decode, the first part
of each @v0.5.23; python/sglang/srt/sampling/penaltylib/ @v0.5.23; for the masks
python/sglang/srt/speculative/spec_utils.py:generate_token_bitmask @v0.5.23. The repetition penalty goes back to CTRL
(Keskar et al. 2019, section 4.1), which divides whatever the sign. Multiplying what is negative, so that it too becomes
less likely, came with Hugging Face's transformers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from refspec.config import Matcher, SamplingParams
from refspec.contracts import VerifyInput

if TYPE_CHECKING:
    from refspec.requests.request import Request


def has_penalties(params: SamplingParams) -> bool:
    """Does what a request has said change what it may say?"""
    return (params.frequency_penalty, params.presence_penalty, params.repetition_penalty) != (0, 0, 1)


def has_rules(params: SamplingParams) -> bool:
    """Does the request change logits at all?"""
    return has_penalties(params) or bool(params.logit_bias) or params.grammar is not None


@dataclass(frozen=True)
class BatchRules:
    """The rules of a batch. r = how many of its requests have some; the tensors are on its device."""

    requests: list[Request]  # the r
    places: Tensor  # i64 (r) which of the batch they are
    batch_size: int
    any_penalty: bool
    frequency: Tensor  # f64 (r, 1, 1)
    presence: Tensor  # f64 (r, 1, 1)
    repetition: Tensor  # f64 (r, 1, 1)
    biased: Tensor  # i64 (m) which of the r each bias belongs to
    bias_ids: Tensor  # i64 (m)
    bias: Tensor  # f64 (m)

    @staticmethod
    def of(batch: Sequence[Request], device: torch.device) -> BatchRules | None:
        """None: nobody has rules."""
        places = [i for i, request in enumerate(batch) if has_rules(request.params)]
        if not places:
            return None
        requests = [batch[i] for i in places]
        params = [request.params for request in requests]
        biases = [(i, token, bias) for i, p in enumerate(params) for token, bias in p.logit_bias.items()]

        def integers(values: list[int]) -> Tensor:
            return torch.tensor(values, dtype=torch.int64, device=device)

        def numbers(values: list[float]) -> Tensor:
            return torch.tensor(values, dtype=torch.float64, device=device)

        return BatchRules(
            requests=requests,
            places=integers(places),
            batch_size=len(batch),
            any_penalty=any(map(has_penalties, params)),
            frequency=numbers([p.frequency_penalty for p in params]).view(-1, 1, 1),
            presence=numbers([p.presence_penalty for p in params]).view(-1, 1, 1),
            repetition=numbers([p.repetition_penalty for p in params]).view(-1, 1, 1),
            biased=integers([i for i, _, _ in biases]),
            bias_ids=integers([token for _, token, _ in biases]),
            bias=numbers([bias for _, _, bias in biases]),
        )

    def apply(self, logits: Tensor, tree: VerifyInput | None = None, exact_penalties: bool = True) -> Tensor:
        """The logits as the rules leave them.

        logits (b·n, V): with a tree, those of its n = N nodes; without one n = 1, and they follow the whole output.
        They stay as they are. What is returned is at least float32; rows of requests without rules hold the same.
        """
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32)).view(self.batch_size, -1, logits.shape[1])
        mine = wide[self.places]
        if self.any_penalty:
            mine = self._penalise(mine, self._held(mine, tree if exact_penalties else None))
        if len(self.bias):
            mine[self.biased, :, self.bias_ids] += self.bias.to(mine.dtype)[:, None]
        if any(request.matcher for request in self.requests):
            allowed = self._allowed(mine, tree)
            # A row that is left nothing to say stays as it is. On the way that is taken, the matcher will refuse what
            # is chosen there; on others, nobody will ever know.
            sayable = (allowed & mine.isfinite()).any(-1, keepdim=True)
            mine = mine.masked_fill(~allowed & sayable, -torch.inf)
        return wide.index_copy(0, self.places, mine).flatten(0, 1)

    def _penalise(self, logits: Tensor, held: Tensor) -> Tensor:
        """logits (r, n, V), held (r, n or 1, V) -> (r, n, V)."""
        frequency, presence, repetition = (x.to(logits.dtype) for x in (self.frequency, self.presence, self.repetition))
        logits = logits - frequency * held - presence * (held > 0)
        repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
        return torch.where(held > 0, repeated, logits)

    def _held(self, logits: Tensor, tree: VerifyInput | None) -> Tensor:
        """How often the output holds each id, f32 (r, n, V): at each node of the tree, or without one (r, 1, V)."""
        committed = self._output_counts(logits.shape[2], logits.device).unsqueeze(1)
        if tree is None:
            return committed
        n = logits.shape[1]
        drafts = tree.draft_token.view(-1, n)[self.places, 1:]
        on_path = tree.tree_mask.view(-1, n, n)[self.places, :, 1:]
        return committed.repeat(1, n, 1).scatter_add_(2, drafts.unsqueeze(1).expand(-1, n, -1), on_path.float())

    def _output_counts(self, vocab_size: int, device: torch.device) -> Tensor:
        """f32 (r, V), of what is committed. What came since the last time is counted now; requests keep the result."""
        none = torch.zeros(vocab_size, device=device)
        counts = torch.stack([none if r.output_counts is None else r.output_counts for r in self.requests])
        new = [(i, token) for i, r in enumerate(self.requests) for token in r.output_ids[r.counted_tokens :]]
        if new:
            which, tokens = torch.tensor(new, device=device).unbind(1)
            counts.index_put_((which, tokens), torch.ones(len(new), device=device), accumulate=True)
        for request, row in zip(self.requests, counts, strict=True):
            request.output_counts, request.counted_tokens = row, len(request.output_ids)
        return counts

    def _allowed(self, logits: Tensor, tree: VerifyInput | None) -> Tensor:
        """What may come after each node, bool (r, n, V) on the device of logits; all of it where no grammar says."""
        allowed = torch.ones(logits.shape, dtype=torch.bool)
        if tree is None:
            tokens = first_child = next_sibling = [[-1]] * self.batch_size
        else:
            tokens = tree.draft_token.view(self.batch_size, -1).tolist()
            first_child, next_sibling = tree.retrieve_next_token.tolist(), tree.retrieve_next_sibling.tolist()
        for rows, place, request in zip(allowed, self.places.tolist(), self.requests, strict=True):
            if request.matcher:
                _allow_along_the_tree(request.matcher, rows, tokens[place], first_child[place], next_sibling[place])
        return allowed.to(logits.device)


def _allow_along_the_tree(
    matcher: Matcher, rows: Tensor, tokens: list[int], first_child: list[int], next_sibling: list[int]
) -> None:
    """Set in rows, bool (n, V), what may come after each node. The matcher stands at the root, also afterwards.

    Depth first, so that it never goes back further than to a node's parent. Two kinds of nodes are not visited, and
    keep their rows, since no walk goes on from there: those that the grammar has ended at, and those below a token that
    it does not allow.
    """
    moved, to_visit = 0, [(0, 0)]  # node, depth
    while to_visit:
        node, depth = to_visit.pop()
        if depth:
            if moved >= depth:
                matcher.rollback(moved - depth + 1)
            matcher.accept(tokens[node])
            moved = depth
        if matcher.finished:
            continue
        rows[node] = False
        matcher.allow(rows[node])
        child = first_child[node]
        while child != -1:
            if rows[node, tokens[child]]:
                to_visit.append((child, depth + 1))
            child = next_sibling[child]
    if moved:
        matcher.rollback(moved)
