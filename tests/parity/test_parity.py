"""Our kernels against SGLang's own, from its published wheels, in Triton's interpreter (and compiled, on a GPU).

Without the wheels, and without a network to get them, these tests are skipped at a desk, and fail where CI is true.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from refspec.oracle import wheel
from refspec.oracle.check import Cases, Jury, check, module_of, operation_names
from refspec.oracle.opinions import versions_named
from refspec.oracle.sources import Sources

pytest.importorskip("triton")

# DESIGN.md, section 5: file, version, and what of it is called. Where only the kernels are listed, the file cannot be
# loaded whole.
LOADED = {
    "kernels/ops/speculative/spec_tree.py": ["sgl_build_tree_kernel_triton", "verify_tree_greedy_triton"],
    "kernels/ops/speculative/reject_sampling.py": ["chain_speculative_sampling_triton"],
    "kernels/ops/speculative/topk1.py": ["draft_topk1_postprocess", "draft_topk1_argmax_only"],
    "kernels/ops/speculative/eagle.py": [
        "build_chain_tree",
        "fill_accept_out_cache_loc",
        "fill_bonus_tokens",
        "prepare_draft_extend_inputs",
        "prepare_draft_extend_lengths",
        "prepare_verify_commit_outputs",
    ],
    "kernels/ops/speculative/cache_locs.py": [
        "assign_draft_cache_locs_contiguous",
        "assign_extend_cache_locs",
        "assign_extend_cache_locs_uniform",
        "fill_front_out_cache_loc_func",
        "generate_draft_decode_kv_indices",
    ],
    "kernels/ops/speculative/gather_spec_extras.py": ["gather_spec_extras"],
    "kernels/ops/speculative/multi_layer_eagle.py": [
        "compute_widened_draft_extend_locs_positions_triton",
        "fill_draft_extend_prepare_buffers_triton",
        "fill_widened_draft_extend_inputs_triton",
        "rotate_input_ids",
        "stash_append_boundary_state_triton",
    ],
    "kernels/ops/speculative/reconstruct_tree.py": ["reconstruct_indices_from_tree_mask_triton"],
    "kernels/ops/kvcache/cache_move.py": ["copy_all_layer_kv_cache_tiled"],
}
CUT_OUT = {
    ("0.5.23", "srt/mem_cache/allocation.py"): ["assign_req_to_token_pool"],
    ("0.4.6", "srt/speculative/eagle_utils.py"): [
        "align_evict_mask_to_page_size",
        "assign_draft_cache_locs",
        "assign_req_to_token_pool",
        "create_extend_spec_info",
        "generate_draft_decode_kv_indices",
    ],
}


@pytest.fixture(scope="session")
def wheels() -> list[str]:
    """The versions that are ready, which are all."""
    try:
        return [state.version for state in wheel.fetch()]
    except (wheel.WheelError, OSError) as error:
        if os.environ.get("CI") == "true":
            pytest.fail(str(error))
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def jury(wheels: list[str]) -> Iterator[Jury]:
    with Jury(wheel.folders(), jobs=1) as jury:  # tests run side by side already
        yield jury


@pytest.mark.parametrize("name", operation_names())
def test_opinions_agree(name: str, jury: Jury) -> None:
    """100 small cases, two medium ones, and the edges."""
    cases = Cases(module_of(name), seed=0)
    operation = cases.operation
    assert operation.name == name
    report = check(cases, cases.labels(), jury)
    assert [fault.sentence for fault in (*report.differences, *report.failures)] == []
    assert report.cases >= 102
    # Whatever the machine, the references and the interpreter have a say; and SGLang's kernel, where there is one.
    assert report.opinions["torch"].answered == report.cases
    assert report.opinions["triton-interpret"].answered == report.cases
    if operation.sglang is not None:
        sglang = report.opinions["sglang-interpret"]
        assert sglang.answered + sglang.not_asked == report.cases
        assert sglang.answered > report.cases / 2, "cases that SGLang does not take are the exception"
    assert report.borderline_cases <= report.cases / 10


@pytest.mark.parametrize("name", operation_names())
def test_an_oracle_says_where_it_comes_from(name: str) -> None:
    operation = Cases(module_of(name), seed=0).operation
    assert set(versions_named(operation.sglang_source)) <= set(wheel.WHEELS)
    assert bool(versions_named(operation.sglang_source)) == (operation.sglang is not None)


@pytest.mark.parametrize("path", LOADED)
def test_files_that_load_beside_stand_ins(path: str, wheels: list[str]) -> None:
    module = Sources(wheel.folders()).module(path)
    assert [name for name in LOADED[path] if not callable(getattr(module, name, None))] == []


@pytest.mark.parametrize(("version", "path"), CUT_OUT)
def test_kernels_that_are_cut_out(version: str, path: str, wheels: list[str]) -> None:
    kernels = Sources(wheel.folders()).jit_functions(path, version)
    assert [name for name in CUT_OUT[version, path] if not hasattr(kernels, name)] == []
