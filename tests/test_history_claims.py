"""Checks of claims decide from what they read: on a history that is otherwise, the verdict is otherwise."""

from __future__ import annotations

import json
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import pytest
from history_image import Image, make_image, make_images, seconds
from small_history import FOLDER, Step, clone, counted_git, git, make_history
from typer.testing import CliRunner, Result

from refspec.cli.history import claims as command
from refspec.cli.main import app
from refspec.history import catalogue
from refspec.history.claims import evidence
from refspec.history.claims.checking import BEYOND_GIT, CANNOT_SAY, CHECKS, Part, check, verdict_of
from refspec.history.claims.verdicts import Verdict, verdicts
from refspec.history.clone import Clone, LacksError
from refspec.history.sources import Source

HOOK = "python/sglang/srt/arg_groups/speculative_hook.py"
POOLS = "python/sglang/srt/mem_cache/memory_pool.py"
SCHEDULER = "python/sglang/srt/managers/scheduler.py"
TOPK_TEST = "test/registered/spec/eagle/test_spec_eagle_topk.py"
STRESS_TEST = "test/registered/spec/eagle/test_spec_eagle_stress.py"

# Sources of our own, that have of SGLang's what the checks look at.
DRAFT = """
class EAGLEWorker:
    def draft_forward(self, batch):
        for step in range(self.steps):
            batch.positions.add_(1)
            logits = self.model_runner.model.forward(batch)
"""
DRAFT_MENDED = """
class EAGLEWorker:
    def draft_forward(self, batch):
        for step in range(self.steps):
            logits = self.model_runner.model.forward(batch)
            batch.positions.add_(1)
"""
VERIFY = """
class EagleVerifyInput:
    def verify(self, batch, logits_output):
        predict = best(logits_output.next_token_logits)
        accept_index = accepted(self.draft_token, predict)
        verified_id = kept = predict[accept_index]
        return verified_id
"""
WORKER = """
class EagleDraftWorker:
    def __init__(self):
        self.speculative_num_steps = 3
    def _rebuild_topk1_chain_buffers(self):
        pass
    def _draft_extend_for_decode(self):
        return EagleDraftInput(num_tokens_per_req=self.speculative_num_steps + 1)
class EAGLEWorkerV2:
    def move_accepted_tokens_to_target_kvcache(self, batch):
        size = self.speculative_num_draft_tokens * len(batch)
    def _override_worker_state(self, steps):
        self.speculative_num_steps = steps
"""
FINALIZE = """    def _finalize_accepted_tree_path(self, batch):
        self.move_accepted_tokens_to_target_kvcache(batch)
"""
WORKER_TREE = WORKER.replace("self.speculative_num_draft_tokens", "accept_index.shape[1]") + FINALIZE
WORKER_AGAIN = WORKER_TREE.replace("self.speculative_num_steps + 1", "self.speculative_num_draft_tokens")
HOOK_TEXT = """
def _handle_eagle_family(args):
    spec_v1_reason = None
    if args.speculative_eagle_topk > 1 and (args.page_size > 1 or is_mamba_state_model):
        args.disable_overlap_schedule = True
        spec_v1_reason = "no"
    if args.disable_overlap_schedule:
        logger.warning("v1 because %s", spec_v1_reason or "so")
"""
HOOK_PAGED = """
def _handle_eagle_family(args):
    BACKENDS = ("flashinfer", "fa3", "triton")
    if args.speculative_eagle_topk > 1 and args.page_size > 1 and args.backend not in BACKENDS:
        raise ValueError("no")
"""
POOLS_TEXT = """
class MHATokenToKVPool:
    def move_kv_cache(self):
        pass
class MLATokenToKVPool:
    pass
class DSATokenToKVPool(MLATokenToKVPool):
    pass
"""
POOLS_AGAIN = """
class MHATokenToKVPool:
    def move_kv_cache(self):
        pass
class MLATokenToKVPool:
    def move_kv_cache(self):
        pass
class DSATokenToKVPool(MLATokenToKVPool):
    def move_kv_cache(self):
        pass
"""
FROZEN_STUB = """
class FrozenKVMTPWorkerV2(FrozenKVMTPWorker):
    def __init__(self):
        raise NotImplementedError("not yet")
"""
FROZEN_V2 = """
class FrozenKVMTPDraftWorker(BaseDraftWorker, Worker):
    def draft(self):
        pass
class FrozenKVMTPWorkerV2(EAGLEWorkerV2):
    def forward_batch_generation(self):
        pass
"""
FROZEN_UTILS = "def select_last_verified_seed():\n    pass\ndef capture_for_decode():\n    pass\n"
FROZEN_INFO = (
    "class EagleDraftInput(EagleDraftInputV2Mixin):\n    pass\nFrozenKVMTPVerifyOutput = VerifyOutput\n"
    "def _to_frozen_kv_mtp_draft_extend_input():\n    pass\n"
)
RUNNER = "from frozen_kv_mtp_worker import FrozenKVMTPWorker\ndef run(worker: FrozenKVMTPWorker):\n    pass\n"
SPEC_INFO = """
class SpeculativeAlgorithm:
    def supports_spec_v2(self):
        return self.is_eagle() and not self.is_frozen()
    def create_worker(self):
        return FrozenKVMTPWorker
"""
ENVIRONMENT = 'def env():\n    return {"SGLANG_ENABLE_SPEC_V2": "0"}\n'
BASE_WORKER = """
class EagleDraftWorkerBase:
    def _rebuild_topk1_chain_buffers(self):
        num_steps = self.steps
        parent_width = num_steps + 0 if num_steps > 1 else 0
        self._topk1_parents_prealloc = torch.arange(-1, parent_width - 1).repeat(max_bs, 1)
"""
MULTI_LAYER = """
class MultiLayerEagleDraftWorker:
    def __init__(self):
        self.speculative_num_steps = 3
    def draft_forward(self, topk_index):
        scores = torch.topk(torch.cat(score_list), 3)
        return torch.gather(tokens, torch.sort(scores))
"""
MULTI_LAYER_CHAIN = """
class MultiLayerEagleDraftWorker:
    def __init__(self):
        self.speculative_num_steps = 3
    def draft_forward(self, topk_index):
        parents_prealloc = self.rows
        if parents_prealloc is not None and topk_index.shape[0] <= parents_prealloc.shape[0]:
            return parents_prealloc[:bs]
        return self._draft_forward_organize(topk_index)
    def _draft_forward_organize(self, topk_index):
        return organize_draft_results(score_list)
"""
STANDALONE = "class StandaloneDraftWorker(EagleDraftWorker):\n    def __init__(self):\n        self.prealloc = None\n"


def in_folder(**texts: str | None) -> dict[str, str | None]:
    return {f"{FOLDER}/{name}.py": text for name, text in texts.items()}


def at(when: str, subject: str, **rest: object) -> Step:
    return Step(subject, seconds=seconds(when), zone=when[-6:].replace(":", ""), **rest)


FIRST_TRY = "Support spec v2 tree drafting (eagle topk>1) (#26866)"
HISTORY = {
    "013021b6a1": at(
        "2025-02-03T20:52+08:00", "refactor (#3269)", files=in_folder(eagle_worker=DRAFT, eagle_utils=VERIFY)
    ),
    "v0.4.6": at("2025-04-27T12:00+00:00", "Bump (#5795)"),
    "v0.5.0rc0": at("2025-08-01T12:00+00:00", "Bump (#9000)"),
    "48fc26a814": at("2026-05-12T14:04-07:00", "Fix positions (#25015)", files=in_folder(eagle_worker=DRAFT_MENDED)),
    "before": at(
        "2026-05-30T12:00+00:00",
        "Much else (#26000)",
        files=in_folder(
            eagle_worker_v2=WORKER,
            multi_layer_eagle_worker_v2=MULTI_LAYER,
            base_spec_worker="class EagleDraftWorkerBase:\n    pass\n",
            standalone_worker_v2=STANDALONE,
            eagle_utils=VERIFY + "def organize_draft_results(score_list):\n    pass\n",
            frozen_kv_mtp_worker="class FrozenKVMTPWorker:\n    pass\n" * 100,
            frozen_kv_mtp_worker_v2=FROZEN_STUB,
            frozen_kv_mtp_utils=FROZEN_UTILS,
            frozen_kv_mtp_info=FROZEN_INFO,
            frozen_kv_mtp_cuda_graph_runner=RUNNER,
            spec_info=SPEC_INFO,
        )
        | {HOOK: HOOK_TEXT, POOLS: POOLS_TEXT, SCHEDULER: "x = 1\n# FrozenKVMTPWorker\n"}
        | {TOPK_TEST: "\n", STRESS_TEST: "\n"}
        | {f"test/registered/spec/test_{name}.py": ENVIRONMENT for name in ("a", "b", "c")},
    ),
    "1d4ee060c2": at("2026-06-01T15:37-07:00", FIRST_TRY, files=in_folder(eagle_worker_v2=WORKER_TREE)),
    "f6d0beaca8": at(
        "2026-06-01T17:16-07:00", f'Revert "{FIRST_TRY}" (#26981)', files=in_folder(eagle_worker_v2=WORKER)
    ),
    "ac99794e64": at(
        "2026-06-03T15:40-04:00",
        "Reland spec v2 tree drafting (#26866) (#26997)",
        files=in_folder(eagle_worker_v2=WORKER_AGAIN)
        | {
            POOLS: POOLS_AGAIN,
            TOPK_TEST: "class TestEagle3Topk16SpecV2:\n    pass\n",
            STRESS_TEST: "class TestEagle3Topk16V2Retract:\n    pass\n",
        },
    ),
    "84ca0ffb8c": at("2026-06-06T12:00-07:00", "Spec v2 with page_size>1 (#26972)", files={HOOK: HOOK_PAGED}),
    "d145a6127a": at("2026-06-09T14:25+08:00", "fix: stop strings (#23802)"),
    "2218622f50": at("2026-06-09T15:32+08:00", "Fix stop boundary (#25980)"),
    "decb88e0e3": at(
        "2026-06-09T15:30-07:00",
        "Support spec v2 for Frozen-KV MTP (#27607)",
        files=in_folder(
            frozen_kv_mtp_worker=None,
            frozen_kv_mtp_worker_v2=FROZEN_V2,
            frozen_kv_mtp_utils="\n",
            frozen_kv_mtp_info="class EagleDraftInput(EagleDraftInputV2Mixin):\n    pass\n",
            frozen_kv_mtp_cuda_graph_runner=RUNNER.replace("KVMTPWorker", "KVMTPDraftWorker").replace(
                "worker import", "worker_v2 import"
            ),
            spec_info=SPEC_INFO.replace(" and not self.is_frozen()", "").replace("KVMTPWorker", "KVMTPWorkerV2"),
        )
        | {SCHEDULER: "x = 1\n# NGRAM\n"}
        | {f"test/registered/spec/test_{name}.py": "\n" for name in ("a", "b", "c")},
    ),
    "313a518bee": at(
        "2026-07-29T19:22-07:00", "Trace (#32850)", files=in_folder(multi_layer_eagle_worker_v2=MULTI_LAYER + "# x\n")
    ),
    "9f56553408": at(
        "2026-07-30T02:55:21-07:00",
        "[Perf] Fast path (#32887)",
        files=in_folder(
            base_spec_worker=BASE_WORKER,
            eagle_utils=VERIFY + "def organize_draft_results(score_list):\n    # n\n    pass\n",
            eagle_worker_v2=WORKER_AGAIN.replace("    def _rebuild_topk1_chain_buffers(self):\n        pass\n", ""),
            multi_layer_eagle_worker_v2=MULTI_LAYER_CHAIN,
            standalone_worker_v2=STANDALONE.replace("        self.prealloc = None\n", "        pass\n"),
        ),
    ),
    "d315eb7250": at("2026-08-22T12:00+00:00", "The last (#35000)"),
}
CHAIN, TREE, AGAIN, PAGED, FROZEN = "9f56553408", "1d4ee060c2", "ac99794e64", "84ca0ffb8c", "decb88e0e3"
NEW_FILE = {"test/registered/unit/test_chain.py": "\n"}

# Of each claim: facts that are made otherwise, and the verdict to which that leads. A fact is a commit and what is
# replaced in its title or in one of its files; a commit and files that it has besides; or a commit and its moment.
STEPS_SET = ("9f56553408", "eagle_worker_v2", "        self.speculative_num_steps = steps", "        pass")
CALLS = "torch.cat(torch.topk(torch.sort(torch.gather(0))))"
FLAG = {"test/registered/spec/test_a.py": 'a = ["--disable-overlap-schedule"]\n'}
OTHER_FLAG = {"test/registered/spec/test_a.py": 'a = ["--speculative-algorithm"]\n'}
BOTH = "def verify(self):\n        pass\n    def forward_batch_generation"
ALTERED = {
    "C1": ([(CHAIN, "2026-07-30T02:56:21-07:00")], "false"),
    "C2": ([(CHAIN, {"test/registered/unit/test_chain.py": "\n"})], "false"),
    "C3": (
        [
            ("before", "standalone_worker_v2", "__init__", "_rebuild_topk1_chain_buffers"),
            (CHAIN, "standalone_worker_v2", "__init__", "init"),
        ],
        "true",
    ),
    "C4": ([(CHAIN, "base_spec_worker", " if num_steps > 1 else 0", "")], "true"),
    "C5": ([(CHAIN, "multi_layer_eagle_worker_v2", "organize_draft_results(score_list)", CALLS)], "true"),
    "C6": ([STEPS_SET], "true"),
    "C7": ([(CHAIN, "multi_layer_eagle_worker_v2", "topk_index.shape[0] <= parents", "True or parents")], "false"),
    "C8": ([("313a518bee", "", "#32850", "#32851")], "false"),
    "T1": ([("f6d0beaca8", "eagle_worker_v2", "steps = 3", "steps = 4")], "false"),
    "T3": ([(TREE, "eagle_worker_v2", "_finalize_accepted_tree_path", "_finalize")], "true"),
    "T4": ([("before", "eagle_worker_v2", "move_accepted_tokens_to_target_kvcache", "move_accepted")], "true"),
    "T5": ([(AGAIN, "eagle_worker_v2", "num_tokens_per_req=self", "num_tokens=self")], "false"),
    "T6": ([(AGAIN, POOLS, "class MHATokenToKVPool", "class MemoryPool")], "true"),
    "T7": (
        [(AGAIN, POOLS, "(MLATokenToKVPool):\n    def move_kv_cache", "(MLATokenToKVPool):\n    def move")],
        "false",
    ),
    "T8": ([("before", HOOK, 'spec_v1_reason or "so"', '"so"')], "true"),
    "T9": ([("before", HOOK, " or is_mamba_state_model", "")], "false"),
    "T10": ([(PAGED, HOOK, '("flashinfer", "fa3", "triton")', "()")], "no"),
    "T11": ([(AGAIN, STRESS_TEST, "V2Retract", "Retract")], "false"),
    "F1": ([(FROZEN, "2026-06-09T15:31-07:00")], "false"),
    "F2": ([(FROZEN, in_folder(frozen_kv_mtp_worker="class Other:\n    pass\n"))], "false"),
    "F3": ([("before", in_folder(frozen_kv_mtp_worker="class FrozenKVMTPWorker:\n    pass\n" * 410))], "true"),
    "F4": ([("before", "frozen_kv_mtp_worker_v2", "raise NotImplementedError", "return print")], "false"),
    "F5": ([("before", FLAG), (FROZEN, OTHER_FLAG)], "true"),
    "F6": ([(FROZEN, SCHEDULER, "1", "2"), (FROZEN, "frozen_kv_mtp_cuda_graph_runner", "pass", "return 1")], "true"),
    "F7": ([(FROZEN, "frozen_kv_mtp_worker_v2", "def draft", BOTH)], "true"),
    "F8": ([(FROZEN, "frozen_kv_mtp_worker_v2", "(BaseDraftWorker, ", "(EagleDraftInputV2Mixin, ")], "true"),
    "F9": ([(FROZEN, "frozen_kv_mtp_worker_v2", "(EAGLEWorkerV2)", "(FrozenKVMTPWorker)")], "false"),
    "F10": ([("before", "spec_info", " and not self.is_frozen()", "")], "false"),
    "F11": ([(FROZEN, "frozen_kv_mtp_info", "    pass", "    pass\nFrozenKVMTPVerifyOutput = 1")], "false"),
    "F12": ([(FROZEN, SCHEDULER, "NGRAM", "FrozenKVMTPWorker")], "false"),
    "F13": ([("2218622f50", "", "#25980", "#25981")], "false"),
    "P1": ([("v0.5.0rc0", in_folder(eagle_worker=DRAFT_MENDED))], "false"),
}


def altered(facts: list[tuple[object, ...]]) -> dict[str, Step]:
    history = dict(HISTORY)
    for name, *what in facts:
        step = history[name]
        match what:
            case [str(when)]:
                step = replace(step, seconds=seconds(when))
            case [dict(files)]:
                step = replace(step, files=step.files | files)
            case ["", old, new]:
                assert old in step.subject, "the trap is set"
                step = replace(step, subject=step.subject.replace(old, new))
            case [file, old, new]:
                path = file if "/" in file else f"{FOLDER}/{file}.py"
                assert old in step.files[path], "the trap is set"
                step = replace(step, files=step.files | {path: step.files[path].replace(old, new)})
        history[name] = step
    return history


def found(clone_: Clone, *ids: str) -> dict[str, Verdict]:
    claims = [claim for claim in catalogue.claims() if claim.id in (ids or ALTERED)]
    return {one.claim.id: one for one in verdicts(clone_, claims)}


def listed() -> dict[str, str]:
    return {claim.id: claim.verdict for claim in catalogue.claims() if claim.id in ALTERED}


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Image:
    return make_image(tmp_path_factory.mktemp("image") / "image.git", HISTORY)


# --- what checks find


def test_each_claim_has_a_check_or_is_beyond_git() -> None:
    verdicts(None, [])  # which brings all checks
    assert CHECKS.keys() | BEYOND_GIT.keys() == {claim.id for claim in catalogue.claims()}
    assert not CHECKS.keys() & BEYOND_GIT.keys()
    assert all(BEYOND_GIT.values())


def test_each_claim_on_pull_requests_is_tried_here() -> None:
    assert {claim.id for claim in catalogue.claims() if claim.id[0] in "CTFP"} == ALTERED.keys() | {"T2"}


def test_a_history_in_sglangs_image_bears_the_verdicts_out(image: Image) -> None:
    assert {id_: one.finding.verdict for id_, one in found(image).items()} == listed()


@pytest.fixture(scope="module")
def otherwise(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Image]:
    """Of each claim, the history in which the facts that decide it are altered."""
    return make_images(tmp_path_factory.mktemp("otherwise"), {id_: altered(ALTERED[id_][0]) for id_ in ALTERED})


@pytest.mark.parametrize("id_", ALTERED)
def test_with_a_fact_altered_the_verdict_is_another(id_: str, otherwise: dict[str, Image]) -> None:
    verdict = ALTERED[id_][1]
    one = found(otherwise[id_], id_)[id_]
    assert verdict != one.claim.verdict
    assert one.finding.verdict == verdict, one.finding


def test_what_the_history_lacks_makes_a_claim_false_and_is_named(tmp_path: Path) -> None:
    one = found(make_image(tmp_path, altered([("before", {HOOK: None})])), "T8")["T8"]
    assert one.finding.verdict == "false"
    assert one.finding.parts[0].found == "ac99794e64 has no python/sglang/srt/arg_groups"


# --- any kind of clone


def test_no_check_decides_anything_about_another_repository(tmp_path: Path) -> None:
    """And each says which commands would show a reader what it looks at."""
    make_history(tmp_path / "other", [Step("one", {"a.py": "x = 1\n"})])
    with counted_git(tmp_path) as calls:
        every = verdicts(Clone(tmp_path / "other"), catalogue.claims())
    assert len(every) == 77
    for one in every:
        if one.finding:
            assert one.finding.verdict == CANNOT_SAY, one.claim.id
            assert "lacks" in one.finding.note or "ends too early" in one.finding.note
            assert one.finding.commands, one.claim.id
        else:
            assert one.beyond_git
    assert len(calls) <= 12, "they are asked for together"


def test_a_blobless_clone_answers_from_commits_alone(image: Image, tmp_path: Path) -> None:
    bare = clone(image.folder, tmp_path / "blobless.git", "--bare", "--filter=blob:none")
    partial = Image(bare, image.stands_for)
    assert partial.filter == "blob:none"
    every = {id_: one.finding for id_, one in found(partial).items()}
    assert {id_ for id_, one in every.items() if one.verdict != CANNOT_SAY} == {"C1", "C8", "F1", "F13"}
    assert all(one.verdict in (listed()[id_], CANNOT_SAY) for id_, one in every.items())
    assert every["C4"].note.startswith(
        f"this clone lacks the contents of {FOLDER}/base_spec_worker.py at 9f56553408: it was"
    )
    assert "--filter=blob:none" in every["F12"].note


def test_a_treeless_clone_lacks_the_lists_of_files_as_well(image: Image, tmp_path: Path) -> None:
    bare = clone(image.folder, tmp_path / "treeless.git", "--bare", "--filter=tree:0")
    every = {id_: one.finding for id_, one in found(Image(bare, image.stands_for)).items()}
    assert {id_ for id_, one in every.items() if one.verdict != CANNOT_SAY} == {"C1", "F1", "F13"}
    assert every["F4"].note.startswith("this clone lacks the list of files of decb88e0e3^")


def test_a_shallow_clone_does_not_credit_its_first_commit_with_all_there_is(image: Image, tmp_path: Path) -> None:
    bare = clone(image.folder, tmp_path / "shallow.git", "--bare", "--depth=2")
    every = {id_: one.finding for id_, one in found(Image(bare, image.stands_for)).items()}
    assert {id_: one.verdict for id_, one in every.items() if one.verdict != CANNOT_SAY} == {
        id_: listed()[id_] for id_ in ("C1", "C4", "C6", "C7")
    }
    assert every["C2"].note.startswith("this clone lacks the commit before 9f56553408 (it is shallow")


def test_a_damaged_object_spoils_what_needs_it_alone(image: Image, tmp_path: Path) -> None:
    bare = clone(image.folder, tmp_path / "damaged.git", "--bare", "-c", "transfer.unpackLimit=10000")
    blob = git(bare, "rev-parse", f"{image.stands_for[CHAIN]}:{FOLDER}/base_spec_worker.py")
    for pack in (bare / "objects" / "pack").glob("*.pack"):
        pack.rename(tmp_path / pack.name)
        git(bare, "unpack-objects", "-q", stdin=(tmp_path / pack.name).read_bytes())
    loose = bare / "objects" / blob[:2] / blob[2:]
    loose.chmod(0o644)
    loose.write_bytes(b"damaged")
    every = {id_: one.finding for id_, one in found(Image(bare, image.stands_for)).items()}
    assert {id_ for id_, one in every.items() if one.verdict == CANNOT_SAY} == {"C2", "C3", "C4"}
    assert every["C2"].note.startswith(f"git cannot answer from {bare}: ")


def test_hashes_of_sha256_are_read_as_well(tmp_path: Path) -> None:
    image = make_image(tmp_path, HISTORY, object_format="sha256")
    assert {id_: one.finding.verdict for id_, one in found(image).items()} == listed()


def test_a_branch_named_like_a_commit_is_not_taken_for_it(tmp_path: Path) -> None:
    make_history(tmp_path / "trap", [Step("one", {"a.py": "x = 1\n"})])
    for name in ("9f56553408", "v0.4.6"):
        git(tmp_path / "trap", "branch", name)
        with pytest.raises(LacksError, match=f"lacks the commit {name}"):
            evidence.commit(Clone(tmp_path / "trap"), name)


# --- evidence


@pytest.fixture(scope="module")
def odd(tmp_path_factory: pytest.TempPathFactory) -> tuple[Clone, str]:
    """A repository whose second commit has what a reader of diffs may trip over, and that commit's hash."""
    hashes = make_history(
        tmp_path_factory.mktemp("odd") / "odd",
        [
            Step("first", {"a.txt": "-- old\nsame\n", "b/gone.txt": "x\n" * 9, "c.txt": "", "b/d/e.txt": "1"}),
            Step(
                "a title\nover two lines (#12)",
                {
                    "a.txt": f"++ b/new\nsame\n{'0' * 40}\ndiff --git a/x b/x\n",
                    "b/gone.txt": None,
                    "b/moved.txt": "x\n" * 9 + "y\n",
                    "c.txt": None,
                    "b/d/e.txt": "1\n",
                },
                body=b"caf\xe9",
                seconds=0,
                zone="-0330",
            ),
        ],
    )
    return Clone(tmp_path_factory.getbasetemp() / "odd0" / "odd"), hashes[1]


def test_a_diff_is_read_by_its_counts_and_not_by_its_looks(odd: tuple[Clone, str]) -> None:
    changes = {one.path: one for one in evidence.changes(*odd)}
    assert {path: one.status for path, one in changes.items()} == {
        "a.txt": "M",
        "b/moved.txt": "R",
        "c.txt": "D",
        "b/d/e.txt": "M",
    }
    assert changes["a.txt"].removed == ((1, "-- old"),)
    assert changes["a.txt"].added == ((1, "++ b/new"), (3, "0" * 40), (4, "diff --git a/x b/x"))
    assert (changes["b/moved.txt"].old_path, changes["b/moved.txt"].plus) == ("b/gone.txt", ["y"])
    assert changes["b/d/e.txt"].plus == changes["b/d/e.txt"].minus == ["1"]
    assert sorted(evidence.touched(*odd)) == ["a.txt", "b/d/e.txt", "b/gone.txt", "b/moved.txt", "c.txt"]
    with pytest.raises(evidence.NotThereError, match="does not touch"):
        evidence.change(*odd, "/b/gone.txt")


def test_a_commit_has_the_days_of_who_made_it(odd: tuple[Clone, str]) -> None:
    facts = evidence.commit(*odd)
    assert (facts.author_date, facts.committer_date) == ("2024-12-30T04:00:00-03:30", "2024-12-30T07:30:00+00:00")
    assert (facts.subject, facts.pr, facts.body) == ("a title over two lines (#12)", 12, "caf\ufffd")


def test_files_and_folders_are_listed_from_where_they_are(odd: tuple[Clone, str]) -> None:
    clone_, second = odd
    assert evidence.files(clone_, second, "/") == ["a.txt", "b/d/e.txt", "b/moved.txt"]
    assert evidence.files(clone_, second, "/b") == ["d/e.txt", "moved.txt"]
    assert [evidence.exists(clone_, second, path) for path in ("/b/d", "/x/y", "/a.txt")] == [True, False, True]
    assert evidence.text(clone_, f"{second}^", "/c.txt") == ""
    with pytest.raises(evidence.NotThereError, match=r"has no b/gone\.txt"):
        evidence.text(clone_, second, "/b/gone.txt")
    with pytest.raises(evidence.NotThereError, match=r"a\.txt at .* is no folder"):
        evidence.files(clone_, second, "/a.txt")


def test_definitions_are_named_with_their_classes(image: Image) -> None:
    found_ = evidence.definitions(image, CHAIN, "base_spec_worker.py")
    assert [(one.name, one.first, one.last) for one in found_.values()] == [
        ("EagleDraftWorkerBase", 2, 6),
        ("EagleDraftWorkerBase._rebuild_topk1_chain_buffers", 3, 6),
    ]
    assert evidence.where(image, CHAIN, "base_spec_worker.py", "num_steps") == [4, 5]


# --- verdicts


def test_a_verdict_follows_from_the_parts() -> None:
    yes, no, detail = Part("a", True, ""), Part("b", False, ""), Part("c", False, "", core=False)
    assert [verdict_of(parts) for parts in ([yes], [yes, detail], [no, yes], [no, detail])] == [
        "true",
        "imprecise",
        "false",
        "false",
    ]
    with pytest.raises(ValueError, match="decides nothing"):
        verdict_of([])
    import_module("refspec.history.claims.chain_rows")  # has the one of C1
    with pytest.raises(ValueError, match="C1 has two checks"):
        check("C1")(lambda _: [yes])


# --- the command


def run(*arguments: str, source: Source | None = None, monkeypatch: pytest.MonkeyPatch | None = None) -> Result:
    if source and monkeypatch:
        monkeypatch.setattr(command, "source_of", lambda *_: source)
    return CliRunner().invoke(app, ["history", "claims", *arguments])


def test_without_a_clone_the_verdicts_are_shown_as_not_checked() -> None:
    done = run("--catalogue", "--source", "#32887")
    assert done.exit_code == 0
    lines = done.stdout.splitlines()
    assert lines[1] == "C1   true       not checked    Merged 2026-07-30 17:55"
    assert lines[-1].startswith("8 claims as listed; nothing was checked: ")
    document = json.loads(run("--catalogue", "--json", "T2").stdout)
    (only,) = document["claims"]
    assert (only["listed"], only["found"], only["agrees"], only["commands"]) == ("imprecise", None, None, [])
    assert "page of a pull request" in only["beyond_git"]


def test_the_table_shows_what_is_listed_and_what_is_found(image: Image, monkeypatch: pytest.MonkeyPatch) -> None:
    done = run("--source", "T", source=Source(image, "for this test"), monkeypatch=monkeypatch)
    assert done.exit_code == 0, done.output
    assert "T3   imprecise  imprecise  ✓  _finalize_accepted_tree_path is new in this PR" in done.stdout
    assert "T2   imprecise  beyond git    Reverted because of DP attention and mamba misbehaviour" in done.stdout
    assert done.stdout.splitlines()[-1] == "11 claims: 10 checked and as listed; 1 beyond git: T2."


def test_a_verdict_that_differs_ends_with_status_1(
    otherwise: dict[str, Image], monkeypatch: pytest.MonkeyPatch
) -> None:
    done = run("--source", "C", source=Source(otherwise["C4"], "for this test"), monkeypatch=monkeypatch)
    assert done.exit_code == 1
    assert "C4   imprecise  true      ✗  parents is" in done.stdout
    assert done.stdout.splitlines()[-1] == "8 claims: 7 checked and as listed; 1 found to be otherwise: C4."


def test_one_claim_is_shown_with_its_parts_and_commands(image: Image, monkeypatch: pytest.MonkeyPatch) -> None:
    done = run("c4", source=Source(image, "for this test"), monkeypatch=monkeypatch)
    assert done.exit_code == 0
    assert "  ✓ a row of parents is -1, 0, .., S-2 for S steps\n" in done.stdout
    assert "  ✗ there are S columns, whatever S is (a detail)\n    S=1 gives 0 columns\n" in done.stdout
    assert f"  git show 9f56553408:{FOLDER}/base_spec_worker.py | sed -n '3,6p'\n" in done.stdout
    (only,) = json.loads(run("C4", "--json").stdout)["claims"]
    assert [(part["holds"], part["core"]) for part in only["parts"]] == [(True, True), (False, False)]
    assert (only["listed"], only["found"], only["agrees"]) == ("imprecise", "imprecise", True)


def test_titles_do_nothing_to_the_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loud = make_image(tmp_path, altered([("313a518bee", "", "Trace", "\x1b[31mTrace")]))
    done = run("C8", source=Source(loud, "for this test"), monkeypatch=monkeypatch)
    assert "\\x1b[31mTrace (#32850)" in done.stdout
    assert "\x1b" not in done.stdout


@pytest.mark.parametrize("columns", [40, 80])
def test_nothing_but_commands_is_wider_than_the_terminal(
    columns: int, image: Image, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    for arguments in (["--no-pager"], ["C3", "T2", "T9"]):
        done = run(*arguments, source=Source(image, "for this test"), monkeypatch=monkeypatch)
        assert [line for line in done.stdout.splitlines() if len(line) > columns and "  git " not in line] == []


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["X9"], "refspec: no claim X9: there are E1 to E44, C1 to C8, T1 to T11, F1 to F13, P1"),
        (["--verdict", "maybe"], "refspec: no such claim. Sources are E: study notes"),
    ],
)
def test_a_claim_that_there_is_not_is_refused(arguments: list[str], complaint: str) -> None:
    done = run("--catalogue", *arguments)
    assert done.exit_code == 2
    assert done.stderr.startswith(complaint)
    assert done.stderr.count("\n") == 1
