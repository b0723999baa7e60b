"""One operation per file: the PyTorch reference, the Triton kernel, then the dispatcher of the same name.

The engine runs all of them but six, in whose place it does something else; these are for the oracle and the bench.
`append_boundary_rows` and `widened_extend_inputs`: workers/multi_layer.py has ragged rows, as many as were committed.
`next_roots`: in v2 `padded_extend_inputs` names the row of the bonus. `gather_rows`: RunningBatch.keep indexes field by
field. `ragged_extend_inputs`: v1's host knows what was committed. `draft_kv_indices`: `paged_kv_indices` serves all
forwards.

Sources name SGLang's files and functions: @v0.4.6 and @v0.5.5 as of these tags of its repository, @0.5.23 as of the
published wheel, which the oracle fetches (in it the folder python/sglang is called sglang).
"""

from refspec.kernels.align_evict_mask_to_page_size import align_evict_mask_to_page_size
from refspec.kernels.append_boundary_rows import append_boundary_rows
from refspec.kernels.assign_draft_cache_locs import assign_draft_cache_locs
from refspec.kernels.assign_extend_cache_locs import assign_extend_cache_locs
from refspec.kernels.assign_req_to_token import assign_req_to_token
from refspec.kernels.build_chain_tree import build_chain_tree
from refspec.kernels.build_tree import build_tree
from refspec.kernels.chain_rejection_sampling import chain_rejection_sampling
from refspec.kernels.compact_to_front import compact_to_front
from refspec.kernels.compaction_moves import compaction_moves
from refspec.kernels.draft_kv_indices import draft_kv_indices
from refspec.kernels.draft_topk1 import draft_topk1
from refspec.kernels.duplicate_prefix_tail import duplicate_prefix_tail
from refspec.kernels.gather_rows import gather_rows
from refspec.kernels.launches import launches
from refspec.kernels.links_from_mask import links_from_mask
from refspec.kernels.move_kv_cache import move_kv_cache
from refspec.kernels.next_roots import next_roots
from refspec.kernels.padded_extend_inputs import padded_extend_inputs
from refspec.kernels.paged_kv_indices import paged_kv_indices
from refspec.kernels.ragged_extend_inputs import ragged_extend_inputs
from refspec.kernels.rotate_input_ids import rotate_input_ids
from refspec.kernels.stable_topk import stable_topk
from refspec.kernels.tree_attention import tree_attention
from refspec.kernels.tree_sampling_target_only import tree_sampling_target_only
from refspec.kernels.verify_tree_greedy import verify_tree_greedy
from refspec.kernels.widened_extend_inputs import widened_extend_inputs

__all__ = [
    "align_evict_mask_to_page_size",
    "append_boundary_rows",
    "assign_draft_cache_locs",
    "assign_extend_cache_locs",
    "assign_req_to_token",
    "build_chain_tree",
    "build_tree",
    "chain_rejection_sampling",
    "compact_to_front",
    "compaction_moves",
    "draft_kv_indices",
    "draft_topk1",
    "duplicate_prefix_tail",
    "gather_rows",
    "launches",
    "links_from_mask",
    "move_kv_cache",
    "next_roots",
    "padded_extend_inputs",
    "paged_kv_indices",
    "ragged_extend_inputs",
    "rotate_input_ids",
    "stable_topk",
    "tree_attention",
    "tree_sampling_target_only",
    "verify_tree_greedy",
    "widened_extend_inputs",
]
