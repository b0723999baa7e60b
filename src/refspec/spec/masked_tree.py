"""Phase 2 for guesses that were looked up: they come with a mask, and there is no pool to choose from.

The mask says who hangs under whom, and so everything else. It is made on the host, by whoever looked the guesses up.

Source: SGLang: python/sglang/srt/speculative/ngram_worker.py:NGRAMWorker._prepare_for_speculative_decoding @0.5.23.
"""

from __future__ import annotations

from torch import Tensor

from refspec.contracts import VerifyInput
from refspec.kernels import links_from_mask
from refspec.requests.request import RunningBatch


def tree_from_mask(batch: RunningBatch, draft_tokens: Tensor, tree_mask: Tensor) -> VerifyInput:
    """What the target is to check.

    draft_tokens i64 (b, N): column 0 the bonus token. tree_mask bool (b, N, N): row c true at node c and at its
    ancestors, who stand in earlier columns.

    Trees of fewer than N nodes are filled up, at the end, with nodes that see only themselves. Such a node hangs
    nowhere: it stands at the root's position, and no walk reaches it. (In SGLang it is a child of the root that holds
    token 0. For a greedy walk that is right, and it may even be accepted; one that throws coins counts each of them.)
    """
    index, first_child, next_sibling = links_from_mask(tree_mask)
    ancestors = tree_mask.sum(2) - 1
    positions = batch.seq_lens.unsqueeze(1) + ancestors
    no_pool = index[:, :0]
    links = index, first_child, next_sibling
    return VerifyInput(
        draft_tokens.flatten(), positions.flatten(), tree_mask.flatten(), no_pool, *links, looked_up=True
    )
