"""One operation per file: the PyTorch reference, then the dispatcher of the same name."""

from refspec.kernels.assign_req_to_token import assign_req_to_token
from refspec.kernels.build_tree import build_tree
from refspec.kernels.launches import launches
from refspec.kernels.stable_topk import stable_topk
from refspec.kernels.verify_tree_greedy import verify_tree_greedy

__all__ = ["assign_req_to_token", "build_tree", "launches", "stable_topk", "verify_tree_greedy"]
