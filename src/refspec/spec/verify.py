"""Phase 3: the target reads the whole tree in one forward, and the walk finds how much of it stands.

Every node gets a slot, and attends the committed tokens, its ancestors and itself: what the target says at a node
is just what it would have said had the path to it been decoded token by token. So each accepted token is the
target's own, and where the walk ends the target's choice comes on top, as the bonus.

Source: SpecInfer (Miao et al. 2024, section 4, token tree verification); SGLang:
python/sglang/srt/speculative/eagle_info.py:EagleVerifyInput.verify @v0.5.5
"""

from __future__ import annotations

from refspec.config import SpecConfig
from refspec.contracts import ForwardBatch, VerifyInput, VerifyOutput
from refspec.kernels import verify_tree_greedy
from refspec.memory.allocator import SlotAllocator
from refspec.requests.request import RunningBatch
from refspec.runtime.runner import ModelRunner, greedy_choice


def verify(
    batch: RunningBatch, tree: VerifyInput, target_runner: ModelRunner, allocator: SlotAllocator, config: SpecConfig
) -> VerifyOutput:
    """One target forward over b·N rows. Afterwards b·N slots more are taken; commit gives back what fell.

    Raises OutOfSlots, with nothing taken, if they are not free.
    """
    # region verify_tree
    b, n = len(batch), config.num_draft_tokens
    out_slots = allocator.alloc(b * n)
    out = target_runner.forward(
        ForwardBatch(
            input_ids=tree.draft_token,
            positions=tree.positions,
            out_slots=out_slots,
            q_lens=[n] * b,
            prefix_slots=batch.prefix_slots(),
            prefix_lens=batch.prefix_lens,
            tail_slots=out_slots.view(b, n),
            tail_mask=tree.tree_mask.view(b, n, n),
        ),
        phase="target",
    )
    target_predict = greedy_choice(out.logits)
    predict, accept_index, accept_token_num = verify_tree_greedy(
        tree.draft_token.view(b, n),
        tree.retrieve_index,
        tree.retrieve_next_token,
        tree.retrieve_next_sibling,
        target_predict.view(b, n),
        config.num_steps,
    )
    return VerifyOutput(out_slots, out.hidden_states, target_predict, predict, accept_index, accept_token_num)
    # endregion verify_tree
