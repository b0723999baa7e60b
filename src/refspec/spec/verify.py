"""Phase 3: the target reads the whole tree in one forward, and the walk finds how much of it stands.

Every node gets a slot, and attends the committed tokens, its ancestors and itself: what the target says at a node
is just what it would have said had the path to it been decoded token by token. So each accepted token is the
target's own, and where the walk ends the target's choice comes on top, as the bonus.

A greedy request's choice is the likeliest token, and the walk looks for it among a node's children. One that samples
has its choices drawn: the walk asks of each child, by a coin, whether it is what the target would have sampled. The
target's law comes out, whatever was drafted. `SpecConfig.sampler` says how that is done; `sample_walk` does it.
Only guesses that were looked up are never judged: what plain decoding would draw after each node is drawn, and the walk
looks for it as for a greedy choice (see workers/ngram.py).

Source: SpecInfer (Miao et al. 2024, section 4, token tree verification); SGLang:
python/sglang/srt/speculative/eagle_info.py:EagleVerifyInput.verify @v0.5.5
"""

from __future__ import annotations

import torch
from torch import Tensor

from refspec.config import SpecConfig
from refspec.contracts import ForwardBatch, VerifyInput, VerifyOutput
from refspec.kernels import chain_rejection_sampling, tree_sampling_target_only, verify_tree_greedy
from refspec.kernels.verify_tree_greedy import Walk
from refspec.memory.allocator import SlotAllocator
from refspec.requests.request import RunningBatch
from refspec.requests.sampling import FINAL, JUDGE
from refspec.runtime.runner import ModelRunner, likeliest


def verify(
    batch: RunningBatch, tree: VerifyInput, target_runner: ModelRunner, allocator: SlotAllocator, config: SpecConfig
) -> VerifyOutput:
    """One target forward over b·N rows. Afterwards the slots of these rows are taken; commit gives back what fell.

    Raises OutOfSlots, with nothing taken, if they are not free.
    """
    out_slots = batch.alloc_up_to([config.tree_end(kv_len) for kv_len in batch.prefix_lens], allocator)
    return judge(batch, tree, out_slots, target_runner, config)


def judge(
    batch: RunningBatch, tree: VerifyInput, out_slots: Tensor, target_runner: ModelRunner, config: SpecConfig
) -> VerifyOutput:
    """One target forward over b·N rows, whose keys and values go to out_slots, i64 (b·N); then the walk.

    Nothing waits for the device, but for requests with rules (`RunningBatch.ruled`).
    """
    # region verify_tree
    b, n = len(batch), config.num_draft_tokens
    out = target_runner.forward(
        ForwardBatch(
            input_ids=tree.draft_token,
            positions=tree.positions,
            out_slots=out_slots,
            q_lens=[n] * b,
            req_to_token=batch.req_to_token,
            rows=batch.rows,
            prefix_lens=batch.prefix_lens,
            tail_slots=out_slots.view(b, n),
            tail_mask=tree.tree_mask.view(b, n, n),
            lens=batch.lens,
        ),
        phase="target",
    )
    logits = batch.ruled(out.logits, tree, config.exact_penalties)
    target_predict, finite = likeliest(logits)
    if tree.looked_up:
        target_predict = batch.sampling.next_tokens(logits, target_predict, tree.positions.view(b, n) + 1)
    if tree.looked_up or batch.sampling.all_greedy:
        walk = verify_tree_greedy(
            tree.draft_token.view(b, n),
            tree.retrieve_index,
            tree.retrieve_next_token,
            tree.retrieve_next_sibling,
            target_predict.view(b, n),
            config.longest_path - 1,
        )
    else:
        walk = sample_walk(batch, tree, batch.sampling.probabilities(logits, target_predict), config)
        target_predict = _as_drawn(target_predict, *walk[:2])
    return VerifyOutput(out_slots, out.hidden_states, target_predict, *walk, out.logits, finite)
    # endregion verify_tree


def sample_walk(batch: RunningBatch, tree: VerifyInput, target_probs: Tensor, config: SpecConfig) -> Walk:
    """The walk of a batch in which somebody samples. target_probs f32 (b·N, V): the target's law after each node.

    Where every drafted token is the draft's likeliest, there is one coin for each node, and the draft's law plays no
    part. Where drafts were drawn, they are judged by how likely both models held them, tree.draft_probs being the law
    that they were drawn from, to the bit. Of a greedy request both laws are one-hots: then it is `verify_tree_greedy`.

    Returns what `verify_tree_greedy` does: predict, accept_index, accept_token_num.
    """
    b, n = len(batch), config.num_draft_tokens
    candidates, target_probs = tree.draft_token.view(b, n), target_probs.view(b, n, -1)
    first = batch.seq_lens + 1  # the position of the first token that the round can bring
    final_coins = batch.sampling.coins(first, FINAL, range(1)).squeeze(1)
    if config.drafts_are_drawn:
        assert tree.draft_probs is not None
        coins = batch.sampling.coins(first, JUDGE, range(config.num_steps))
        return chain_rejection_sampling(
            candidates, target_probs, tree.draft_probs, coins, final_coins, config.sampler == "block"
        )
    return tree_sampling_target_only(
        candidates,
        tree.retrieve_index,
        tree.retrieve_next_token,
        tree.retrieve_next_sibling,
        target_probs,
        batch.sampling.coins(first, JUDGE, range(n)),
        final_coins,
        config.longest_path - 1,
        # Not 0: what a request cannot say, a greedy one among them, has probability 0 and must not be accepted.
        threshold_single=max(config.threshold_single, torch.finfo(torch.float32).tiny),
        threshold_acc=config.threshold_acc,
    )


def _as_drawn(target_predict: Tensor, predict: Tensor, accept_index: Tensor) -> Tensor:
    """The target's choice after each node, i64 (b·N): on the accepted path the token that was drawn there."""
    on_path = torch.zeros_like(target_predict, dtype=torch.bool)
    on_path[accept_index.clamp(min=0).flatten().long()] = True  # the padding's row 0 is a root, and so on the path
    return torch.where(on_path, predict, target_predict)
