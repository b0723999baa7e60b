"""What one phase hands to the next. Shapes and dtypes stand beside the fields; there is no logic here.

Symbols: b = batch, k = topk, S = num_steps, N = num_draft_tokens (the root counts), H = hidden size,
V = vocabulary, D = S + 1 (longest path, root included), pool = k + (S-1)·k², n = rows of a forward.
Integers are i64 unless said.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from torch import Tensor


class ForwardMode(Enum):
    """What a worker is asked to do with a batch."""

    EXTEND = "extend"  # who has a prompt to read: the target reads it, then the draft, on the target's hidden states
    DECODE = "decode"  # one speculative round
    IDLE = "idle"  # no requests, but other ranks may have some: pass through every phase with zero rows


@dataclass
class ForwardBatch:
    """The rows of one model forward, and what each may attend. Made by spec/*, read by runtime/runner.py.

    Request r owns q_lens[r] consecutive rows. A row attends every committed token of its request (the
    prefix), and of the tail's columns those that tail_mask shows it. Prefill, decode, draft step, verify and
    extend differ in nothing but these fields.
    """

    input_ids: Tensor  # (n)
    positions: Tensor  # (n)
    out_slots: Tensor  # (n) where the row's keys and values go; 0 = nowhere
    q_lens: list[int]  # b entries, sum n
    req_to_token: Tensor  # the request table: the slots of request r's committed tokens are
    rows: Tensor  # (b)     req_to_token[rows[r], :prefix_lens[r]]; what stands behind them is not read
    prefix_lens: list[int]  # b entries
    tail_slots: Tensor  # (b, T) slots that this forward, or an earlier draft step, writes
    tail_mask: Tensor | None  # bool (b, Q, T), Q = max(q_lens): row q of request r sees column t; None: sees all
    hidden_states: Tensor | None = None  # (n, H), only for a draft: those of the token before each row's
    # (b) the lengths of the prefixes, where the device alone knows them: prefix_lens are what they are at most
    lens: Tensor | None = None
    # (b, layers, t), only for a draft whose attention is sparse: the slots of the committed tokens that each request's
    # rows attend, 0 = none; None: they choose anew
    selection: Tensor | None = None


@dataclass
class ForwardOutput:
    """What a forward gives back. Made by runtime/runner.py."""

    logits: Tensor  # (rows asked for, V), the model's dtype
    hidden_states: Tensor  # (n, H)
    # (rows asked for, layers, t), of a model that keeps it: slots that each row attended
    selection: Tensor | None = None


@dataclass
class DraftInput:
    """What the draft starts a round from. Made by spec/extend.py, one row per running request."""

    topk_p: Tensor  # f32 (b, k) the draft's best k for the token after the bonus token
    topk_index: Tensor  # (b, k) their ids
    hidden_states: Tensor  # (b, H) that feeds the first draft step
    draft_probs: Tensor | None = None  # f32 (b, V) the law that topk_index was drawn from; None: it was not drawn
    # (b, layers, t) what the newest token's row attended, for the draft loop's to reuse
    selection: Tensor | None = None


@dataclass
class Candidates:
    """All that the draft came up with, one list entry for each level. Made by spec/draft.py."""

    score_list: list[Tensor]  # f32 (b, 1, k), then (b, k, k): product of the probabilities on the path from the root
    token_list: list[Tensor]  # (b, k), then (b, k*k)
    # The levels' shares of parent_list, whose entry g is the pool index of the node that the candidates i with
    # i // k == g hang under: (b, k+1), -1 for the root first, then (b, k).
    parents_list: list[Tensor]
    slots: Tensor  # (b, k, S) branch-major; reserved for the loop, and free again
    draft_probs: Tensor | None = None  # f32 (b, S, V) the law that each level's token was drawn from; None: not drawn


@dataclass
class VerifyInput:
    """The tree that the target checks. Row 0 of each request is the bonus token.

    Made by spec/tree.py, spec/chain.py, or, where guesses were looked up, spec/masked_tree.py: nobody has scored or
    drawn these, and top_scores_index is (b, 0).
    """

    draft_token: Tensor  # (b*N)
    positions: Tensor  # (b*N) seq_len + depth
    tree_mask: Tensor  # bool (b*N*N), QLEN form: who may attend whom within the tree
    top_scores_index: Tensor  # (b, N-1) ascending: the kept candidates
    retrieve_index: Tensor  # (b, N) global row = request*N + column
    retrieve_next_token: Tensor  # (b, N) row-local first child, -1 = none
    retrieve_next_sibling: Tensor  # (b, N) row-local next sibling, -1 = none
    draft_probs: Tensor | None = None  # f32 (b, S, V) the law that column i+1 was drawn from; None: not drawn
    looked_up: bool = False


@dataclass
class VerifyOutput:
    """What the target accepted. Made by spec/verify.py."""

    out_slots: Tensor  # (b*N) the slots that hold the tree's keys and values
    hidden_states: Tensor  # (b*N, H) the target's, for the extend
    # (b*N) the target's choice after each node: on the accepted path what predict says, elsewhere its likeliest token,
    # or, if guesses were looked up, what it draws there
    target_predict: Tensor
    predict: Tensor  # i32 (b*N) its choice at every accepted node, 0 elsewhere
    accept_index: Tensor  # i32 (b, D) global rows of the accepted path, root first, -1 padded
    accept_token_num: Tensor  # i32 (b) accepted drafts, the bonus excluded
    logits: Tensor  # (b*N, V) the target's, before any rule of a request
    finite: Tensor  # bool () every row had a likeliest token; else nothing of all this means anything


@dataclass
class CommitOutput:
    """What became of it. Made by spec/commit.py; lists are on the host, one entry per request."""

    accept_lens: list[int]  # tokens committed, bonus included, after a stop cut the block
    kept_rows: list[list[int]]  # global rows whose slots stay: the first accept_lens of the path
    freed_slots: Tensor  # slots that went back to the pool
