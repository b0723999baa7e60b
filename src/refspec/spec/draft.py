"""Phase 1: the draft guesses a tree of continuations.

The draft runs one row for each of its k branches and keeps, of the k·k children they have, the k with the best
path probability as the next branches. All children, kept or not, go into the pool of candidates. The first level
is there already, from the last extend, and the last level's children need no row of their own: S levels cost
S - 1 forwards.

Two of the samplers want drafts that were drawn, not chosen: then k = 1, each level's only child is drawn from the
draft's law, and the laws go on to verification.

The rows need slots for their keys and values. They are reserved from the allocator, used, and given back *before*
the target verifies: nothing of the draft's cache outlives its loop, since the extend writes the accepted tokens'
rows anew, from the target's hidden states.

Source: EAGLE-2 (Li et al. 2024, section 4.1, expansion); SGLang: python/sglang/srt/speculative/eagle_worker.py:
EAGLEWorker.draft_forward @v0.4.6
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from refspec.config import SpecConfig
from refspec.contracts import Candidates, DraftInput, ForwardBatch
from refspec.kernels import assign_draft_cache_locs, assign_req_to_token, duplicate_prefix_tail, stable_topk
from refspec.kernels.assign_draft_cache_locs import first_draft_positions
from refspec.memory.allocator import SlotAllocator
from refspec.requests.request import RunningBatch
from refspec.requests.sampling import DRAFT, draw
from refspec.runtime.runner import ModelRunner

# (scores (b, parents, k), tokens (b, parents·k), parents (b, ...)) of one level
TreeInfo = tuple[Tensor, Tensor, Tensor]


class Branches(NamedTuple):
    """The slots of the draft loop, and what its rows see beside them."""

    slots: Tensor  # (b, k, S) branch-major: forward i of branch j writes slots[:, j, i]
    prefix_lens: list[int]  # tokens that all branches see, by the request table
    copies: Tensor  # (b, C) slots behind these that were written before the loop; 0: none
    sees_copy: Tensor  # bool (b, k, C) which branch sees which of them
    lens: Tensor | None = None  # as of a ForwardBatch, for the prefix_lens


DraftLoop = Callable[..., Candidates]  # with the arguments of draft_loop


def draft(
    batch: RunningBatch,
    draft_runner: ModelRunner,
    allocator: SlotAllocator,
    config: SpecConfig,
    loop: DraftLoop | None = None,
) -> Candidates:
    """S - 1 draft forwards, by `draft_loop` or another that does the same. Afterwards the allocator is as it was.

    Needs batch.draft_input. Raises OutOfSlots, with nothing taken, if the slots up to each draft_end are not
    free.
    """
    start = batch.draft_input
    assert start is not None
    # region reserve_draft_slots
    state = allocator.backup_state()
    ends = [config.draft_end(kv_len) for kv_len in batch.prefix_lens]
    slots = batch.alloc_up_to(ends, allocator)
    if config.page_size > 1 and config.topk > 1:
        end = torch.tensor(ends, dtype=torch.int64, device=slots.device)
        assign_req_to_token(batch.req_to_token, batch.rows, batch.seq_lens, end, slots)
        branches = split_into_pages(batch, batch.prefix_lens, batch.seq_lens, draft_runner, config)
    else:
        slots = slots.view(len(batch), config.topk, config.num_steps)
        branches = Branches(slots, batch.prefix_lens, slots[:, 0, :0], slots[:, :, :0].bool())
    # endregion reserve_draft_slots
    # region return_draft_slots
    candidates = (loop or draft_loop)(batch, start, branches, batch.seq_lens, draft_runner, config)
    allocator.restore_state(state)
    return candidates
    # endregion return_draft_slots


def draft_loop(
    batch: RunningBatch,
    start: DraftInput,
    branches: Branches,
    positions: Tensor,
    draft_runner: ModelRunner,
    config: SpecConfig,
    recurrent: bool = True,
) -> Candidates:
    """S - 1 draft forwards over slots that are the caller's to reserve and to give back.

    start: the first level. positions i64 (b): where forward 0 runs; the others follow it. recurrent: a row is fed the
    hidden state that its parent's row gave, beside its token; False: the draft reads tokens alone.
    """
    # region draft_loop
    k, steps, b = config.topk, config.num_steps, len(batch)
    slots, prefix_lens, copies, tail_mask, lens = branches
    tail_slots = torch.cat([copies, slots.transpose(1, 2).flatten(1)], dim=1)  # behind the copies k columns a step
    own_column = torch.eye(k, dtype=torch.bool, device=slots.device).expand(b, k, k)
    first_positions = positions.repeat_interleave(k)
    topk_p, topk_index, hidden_states = start.topk_p, start.topk_index, start.hidden_states
    laws, scores, levels = [start.draft_probs], topk_p, list[TreeInfo]()
    for i in range(steps):
        input_ids, hidden_states, scores, level = select_top_k_tokens(i, topk_p, topk_index, hidden_states, scores, k)
        levels.append(level)
        if i == steps - 1:
            break
        if config.exact_branch_kv and i > 0:
            tail_mask = _follow_parents(tail_mask, level[2], k)
        tail_mask = torch.cat([tail_mask, own_column], dim=-1)
        out = draft_runner.forward(
            ForwardBatch(
                input_ids=input_ids,
                positions=first_positions + i,
                out_slots=slots[:, :, i].flatten(),
                q_lens=[k] * b,
                req_to_token=batch.req_to_token,
                rows=batch.rows,
                prefix_lens=prefix_lens,
                tail_slots=tail_slots[:, : copies.shape[1] + (i + 1) * k],
                tail_mask=tail_mask if k > 1 else None,  # a lone branch sees all of its past
                hidden_states=hidden_states if recurrent else None,
                lens=lens,
                selection=start.selection,
            ),
            phase="draft",
        )
        topk_p, topk_index, law = propose(batch, out.logits, i + 1, config, draft_runner)
        laws.append(law)
        hidden_states = out.hidden_states
    # endregion draft_loop
    return candidates_of(levels, laws, slots)


def candidates_of(levels: list[TreeInfo], laws: list[Tensor | None], slots: Tensor) -> Candidates:
    """What the levels come to; laws: those that their tokens were drawn from, None where they were not."""
    score_list, token_list, parents_list = (list(column) for column in zip(*levels, strict=True))
    drawn_from = [law for law in laws if law is not None]
    draft_probs = torch.stack(drawn_from, dim=1) if drawn_from else None
    return Candidates(score_list, token_list, parents_list, slots, draft_probs)


def split_into_pages(
    batch: RunningBatch, lens: list[int], seq_lens: Tensor, draft_runner: ModelRunner, config: SpecConfig
) -> Branches:
    """Each branch in pages of its own, where pages hold several tokens: the layout of `assign_draft_cache_locs`.

    lens, and seq_lens i64 (b), the same on the device: tokens of each request that the draft has read. The slots behind
    them, up to draft_end, stand in the request table. Each branch gets copies of the tokens in the last, partly filled
    page, k·(page - 1) columns in all. What all branches share ends before it.
    """
    k, steps, page, table, rows = config.topk, config.num_steps, config.page_size, batch.req_to_token, batch.rows
    duplicate_prefix_tail(draft_runner.pool, table, rows, seq_lens, k, steps, page)
    slots = assign_draft_cache_locs(table, rows, seq_lens, k, steps, page).view(-1, k, steps)

    begun = (seq_lens % page).view(-1, 1, 1)
    place = torch.arange(page - 1, device=rows.device)
    first_of_page = first_draft_positions(seq_lens, k, steps, page).unsqueeze(2) - begun
    copies = table[rows.view(-1, 1, 1), first_of_page + place].where(place < begun, 0)
    own_copies = torch.eye(k, dtype=torch.bool, device=rows.device)[:, :, None] & (place < begun).unsqueeze(1)
    whole_pages = [length // page * page for length in lens]
    lens_then = None if batch.lens is None else seq_lens // page * page
    return Branches(slots, whole_pages, copies.flatten(1), own_copies.flatten(2), lens_then)


def reserved_branches(batch: RunningBatch, draft_runner: ModelRunner, config: SpecConfig) -> Branches:
    """The branches' slots where the request table holds them already, up to each draft_end."""
    if config.page_size > 1 and config.topk > 1:
        return split_into_pages(batch, batch.prefix_lens, batch.seq_lens, draft_runner, config)
    k, steps = config.topk, config.num_steps
    slots = assign_draft_cache_locs(batch.req_to_token, batch.rows, batch.seq_lens, k, steps).view(-1, k, steps)
    return Branches(slots, batch.prefix_lens, slots[:, 0, :0], slots[:, :, :0].bool(), batch.lens)


def propose(
    batch: RunningBatch, logits: Tensor, level: int, config: SpecConfig, draft_runner: ModelRunner
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The draft's children below each row of its logits: probabilities f32 (b·k, k), ids i64 (b·k, k), their law.

    The k likeliest, and None. Or, if the sampler wants drafts that were drawn, a single one, drawn from the draft's
    law as the request's temperature and filters make it, and that law, f32 (b, V); of a greedy request it is a
    one-hot. level, from 0, counts within the round that begins behind batch.seq_lens.

    logits (b·k, columns): where the draft has a vocabulary of its own, its columns become the target's ids here, once
    and for all. What is behind this, the next draft step too, knows the target's ids only.
    """
    ids = draft_runner.draft_to_target
    if not config.drafts_are_drawn:
        topk_p, topk_index = best_tokens(logits, config.topk)
        return topk_p, topk_index if ids is None else ids[topk_index], None
    law = batch.sampling.probabilities(logits, logits.max(dim=-1).indices)
    if ids is not None:
        law = law.new_zeros(len(law), draft_runner.vocab_size).index_copy_(1, ids, law)
    coins = batch.sampling.coins(batch.seq_lens + 1, DRAFT, range(level, level + 1))
    tokens = draw(law, coins.squeeze(1)).unsqueeze(1)
    return law.gather(1, tokens), tokens, law


def best_tokens(logits: Tensor, topk: int) -> tuple[Tensor, Tensor]:
    """logits (n, V) -> the k likeliest ids of each row, i64 (n, k), and their probabilities, f32 (n, k)."""
    return stable_topk(torch.softmax(logits.float(), dim=-1), topk)


def select_top_k_tokens(
    i: int, topk_p: Tensor, topk_index: Tensor, hidden_states: Tensor, scores: Tensor, topk: int
) -> tuple[Tensor, Tensor, Tensor, TreeInfo]:
    """Choose the k branches of level i (from 0) among the children of level i - 1.

    topk_p f32, topk_index i64: the children's probabilities and ids; (b, k) at level 0, where the root is the only
    parent, then (b·k, k). hidden_states: the parents', (b, H), then (b·k, H). scores f32 (b, k): the parents'.

    Returns input_ids i64 (b·k) and hidden_states (b·k, H), the chosen children with their parents' hidden states:
    the rows of the next draft forward; scores f32 (b, k), theirs; and the level for the pool: all children's
    scores, all ids, and the entries that the level adds to parent_list (-1 for the root and then the pool indices
    of the chosen).

    Source: SGLang: python/sglang/srt/speculative/spec_utils.py:select_top_k_tokens @0.5.23
    """
    b = len(topk_index) if i == 0 else len(topk_index) // topk
    if i == 0:
        entries = torch.arange(-1, topk, device=topk_index.device).expand(b, -1)
        level = (topk_p.unsqueeze(1), topk_index, entries)
        return topk_index.flatten(), hidden_states.repeat_interleave(topk, dim=0), topk_p, level

    child_scores = scores.unsqueeze(2) * topk_p.view(b, topk, topk)
    child_tokens = topk_index.view(b, topk * topk)
    scores, chosen = stable_topk(child_scores.flatten(1), topk)
    first_of_level = topk + (i - 1) * topk * topk
    parent_row = chosen // topk + torch.arange(0, b * topk, topk, device=chosen.device).unsqueeze(1)
    level = (child_scores, child_tokens, chosen + first_of_level)
    return child_tokens.gather(1, chosen).flatten(), hidden_states[parent_row.flatten()], scores, level


def _follow_parents(tail_mask: Tensor, entries: Tensor, topk: int) -> Tensor:
    """Let each chosen branch see the columns that its parent's branch saw: bool (b, k, columns so far)."""
    parent_branch = (entries - topk) % (topk * topk) // topk  # pool index -> place in its level -> parent's branch
    return tail_mask.gather(1, parent_branch.unsqueeze(2).expand(-1, -1, tail_mask.shape[2]))
