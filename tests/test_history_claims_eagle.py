"""The checks of the study notes on EAGLE: they come out as listed on a history like SGLang's, and otherwise on another.

The history is a small one of our own words: as many commits as the checks ask for, each with what they look at.
"""

from __future__ import annotations

import ast
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from functools import partial
from pathlib import Path

import pytest
from history_image import Image, make_image, make_images, seconds
from small_history import FOLDER, START, Step, counted_git
from small_history import clone as cloned

from refspec.history import catalogue
from refspec.history.claims import eagle_arrival
from refspec.history.claims.checking import CANNOT_SAY, Finding
from refspec.history.claims.evidence import Defined
from refspec.history.claims.verdicts import verdicts
from refspec.history.claims.walk import UNKNOWN, Walk, walk
from refspec.history.clone import Clone, HistoryError

MAIN = catalogue.reach().commit[:10]
SRT = "python/sglang/srt"
WORKER, TREES = f"{FOLDER}/eagle_worker.py", f"{FOLDER}/eagle_utils.py"
SCHEDULER, SERVER = f"{SRT}/managers/scheduler.py", f"{SRT}/server_args.py"
MODES, GRAPHS = f"{SRT}/model_executor/forward_batch_info.py", f"{SRT}/model_executor/cuda_graph_runner.py"
BACKENDS, MODELS = f"{SRT}/layers/attention", f"{SRT}/models"
DEEPSEEK, MLA, FA3 = (
    f"{MODELS}/deepseek_v2.py",
    f"{BACKENDS}/flashinfer_mla_backend.py",
    f"{BACKENDS}/flashattention_backend.py",
)
KERNELS, KERNEL = "sgl-kernel", "__global__ void build_tree()\n"
BUILDER = f"{FOLDER}/build_eagle_tree.py"
REGISTRY = f"{FOLDER}/spec_registry.py"
RUNNER = f"{FOLDER}/eagle_draft_cuda_graph_runner.py"

FIRST_WORKER = """
class EAGLEWorker(TpModelWorker):
    def forward_batch_speculative_generation(self, batch):
        if batch.forward_mode.is_decode():
            for step in range(self.server_args.speculative_num_steps):
                self.one_step(batch)
            batch.drafted.clear_draft_cache(slots)
            self.target_worker.forward_batch_generation(tree)
            self.one_step(batch)

    def one_step(self, batch):
        self.model_runner.forward(batch)

    def finish_request(self, given):
        for req in given:
            self.pool.free(req.slots[: len(req) - self.finish_extend_len[req.rid]])
"""

LATER_WORKER = """
class EAGLEWorker(TpModelWorker):
    def __init__(self, server_args, target_worker):
        self.target_worker = target_worker or self
        super().__init__(server_args=server_args, is_draft_worker=True)

    def init_cuda_graphs(self):
        if not self.wants_graphs:
            return
        self.cuda_graph_runner = EAGLEDraftCudaGraphRunner(self, batch=1)

    @property
    def draft_model_runner(self):
        return self.model_runner

    def forward_batch_speculative_generation(self, batch):
        if batch.forward_mode.is_decode():
            given, backup = self.draft(batch)
            out, verified = self.verify(batch, given)
            if batch.spec_info.verified_id is not None:
                self.extend_after(batch)
            return out, sum(verified.accept_length_per_req_cpu)
        elif batch.forward_mode.is_idle():
            out = self.target_worker.forward_batch_generation(batch)
            return out, 0
        else:
            out = self.target_worker.forward_batch_generation(batch)
            self.extend_after(batch)
            return out, 0

    def draft(self, batch):
        count = batch.batch_size()
        if self.page_size < 2:
            slots, backup = batch.alloc_token_slots(count * self.topk * self.speculative_num_steps, backup_state=True)
        elif self.topk > 1:
            raise NotImplementedError("not yet")
        if self.cuda_graph_runner and self.cuda_graph_runner.can_run(batch):
            scores = self.cuda_graph_runner.replay(batch)
        else:
            scores = self.draft_forward(batch)
        self.allocator.restore_state(backup)
        given = EagleVerifyInput.create(scores, self.topk, self.server_args.speculative_num_draft_tokens)
        return given, backup

    def draft_forward(self, batch):
        scores = []
        for step in range(self.speculative_num_steps):
            scores.append(select_top_k_tokens(step, batch.topk_p, batch.scores, self.topk))
            if step == self.speculative_num_steps - 1:
                break
            self.draft_model_runner.model.forward(batch)
        return scores

    def verify(self, batch, given):
        out = self.target_worker.forward_batch_generation(batch, skip_sample=True)
        if torch.any(torch.isnan(out)):
            logger.error("not a number")
            raise ValueError("not a number")
        return out, given.verify(batch, out)

    def extend_after(self, batch):
        self.draft_model_runner.forward(batch)
"""
STOP = """            if step == self.speculative_num_steps - 1:
                break
"""
REFUSED = """        elif self.topk > 1:
            raise NotImplementedError("not yet")
"""
IDLE = """        elif batch.forward_mode.is_idle():
            out = self.target_worker.forward_batch_generation(batch)
            return out, 0
"""
RESTORED = """        self.allocator.restore_state(backup)
"""

LATER_TREES = """
class EagleVerifyInput:
    draft_token: object
    draft_token_num: int

    @classmethod
    def create(cls, scores, topk, num_verify_tokens):
        return cls(build(scores, topk, num_verify_tokens), num_verify_tokens)

    def verify(self, batch, out):
        rejected = torch.full_like(slots, True)
        rejected[accept_index] = False
        token_to_kv_pool_allocator.free(slots[rejected])
        batch.out_cache_loc = slots[accept_index]
        return batch.seq_lens.add_(accept_length + 1)


def select_top_k_tokens(i, topk_p, scores, topk):
    if i == 0:
        tree_info = (topk_p.unsqueeze(1), None)
    else:
        expanded = torch.mul(scores.unsqueeze(2), topk_p.reshape(-1, topk, topk))
        tree_info = (expanded, None)
    return tree_info
"""
TREE_BUILDER = """
def build_tree_kernel_efficient_preprocess(score_list, num_verify_tokens):
    return torch.topk(torch.cat(score_list, dim=1), num_verify_tokens - 1, dim=-1)
"""

PLAIN_SCHEDULER = """
class Scheduler:
    def run_batch(self, batch):
        return self.tp_worker.forward_batch_generation(batch)

    def prepare_dp_attn_batch(self, batch):
        return gathered(batch)
"""
LATER_SCHEDULER = """
class Scheduler:
    def run_batch(self, batch):
        if self.spec_algorithm.is_none():
            out = self.tp_worker.forward_batch_generation(batch)
        else:
            out, accepted = self.draft_worker.forward_batch_speculative_generation(batch)
            self.total_accepted_tokens += accepted + batch.batch_size()

    def retract(self, batch):
        self.drafting.finish_request(retracted_reqs)
        if self.spec_algorithm.is_none() and token:
            req.output_ids.append(token)

    def prepare_dp_attn_batch(self, batch):
        return gathered(batch)
"""

SERVER_WITHOUT_CACHE = """
class ServerArgs:
    speculative_algorithm: str = None
    chunked_prefill_size: int = None
    disable_radix_cache: bool = False

    def __post_init__(self):
        if not self.chunked_prefill_size:
            self.chunked_prefill_size = 100
        if self.speculative_algorithm in ("EAGLE",):
            self.disable_radix_cache = True
            self.chunked_prefill_size = 0
"""
LATER_SERVER = """
class ServerArgs:
    speculative_algorithm: str = None
    disable_radix_cache: bool = False
    page_size: int = 1

    def __post_init__(self):
        memory = found_memory()
        if memory < 25_000:
            self.other = 1
        if self.speculative_algorithm in ("EAGLE",):
            if self.page_size > 1 < self.speculative_eagle_topk:
                self.speculative_eagle_topk //= 2


def auto_choose_speculative_params(self):
    if self.is_fast:
        return (5, 4, 8)
    return (5, 4, 8)
"""


def modes(*members: str, graph: str = "DECODE") -> str:
    body = "".join(f"    {member} = auto()\n" for member in members)
    return f"class ForwardMode:\n{body}\n    def is_cuda_graph(self):\n        return self in ({graph},)\n"


def runner(asks: bool, derives: bool) -> str:
    ask = "        if not batch.forward_mode.is_cuda_graph():\n            return False\n" if asks else ""
    number = "raw_bs * self.num_tokens_per_bs" if derives else "batch.input_ids.numel()"
    return (
        f"class CudaGraphRunner:\n    def can_run(self, batch):\n{ask}        return True\n\n"
        f"    def replay(self, batch):\n        raw_num_token = {number}\n"
    )


def on(day: str) -> int:
    """For Step.seconds: the small hours of a day."""
    return seconds(f"{day}T00:30+00:00")


WORKERS = "\n\n".join(
    f"class {name}({base}):\n    pass\n"
    for name, base in (("EAGLEWorkerV2", "BaseSpecWorker"), ("StandaloneWorkerV2", "EAGLEWorkerV2"))
)
CREATES = """
class SpeculativeAlgorithm(Enum):
    EAGLE = auto()
    STANDALONE = auto()
    NONE = auto()

    def create_worker(self):
        if self.is_eagle():
            return EAGLEWorkerV2
        return StandaloneWorkerV2
"""

HISTORY: dict[str, Step] = {
    "printed": Step("Only one rank prints (#2124)", {SCHEDULER: PLAIN_SCHEDULER}, seconds=on("2024-11-22")),
    "reverted": Step('Revert "Only one rank prints" (#2130)', {SERVER: "x = 1\n"}, seconds=on("2024-11-23")),
    "simpler": Step(
        "Simpler batches (#2154)",
        {
            MODES: modes("DECODE", "IDLE"),
            GRAPHS: runner(asks=False, derives=False),
            f"{BACKENDS}/flashinfer_backend.py": "x = 1\n",
        },
        seconds=on("2024-11-24"),
    ),
    "3815b23ccb": Step(
        "Wrappers (#2638)",
        {MODES: modes("DECODE", "IDLE", "TARGET_VERIFY"), f"{FOLDER}/spec_info.py": "x = 1\n"},
        seconds=on("2024-12-28"),
    ),
    "9c05c6898e": Step("Add llama_eagle.py (#2640)", {f"{MODELS}/llama_eagle.py": "x = 1\n"}, seconds=on("2024-12-29")),
    "f44d143949": Step(
        "Backends verify (#2678)",
        {f"{BACKENDS}/flashinfer_backend.py": "mode.is_target_verify()\n", GRAPHS: runner(asks=True, derives=False)},
        seconds=on("2024-12-30"),
    ),
    "b0524c3789": Step(
        "Eagle part 2: no hang (#2684)",
        {
            MODES: modes("DECODE", "IDLE", "TARGET_VERIFY", graph="DECODE, IDLE"),
            GRAPHS: runner(asks=True, derives=True),
        },
        seconds=on("2024-12-31"),
    ),
    "ad20b7957e": Step(
        "Eagle part 3: the scheduler (#2709)",
        {SCHEDULER: LATER_SCHEDULER, SERVER: SERVER_WITHOUT_CACHE},
        seconds=on("2025-01-01"),
    ),
    "815dce0554": Step(
        "Eagle part 4: a worker (#2150)",
        {
            WORKER: FIRST_WORKER,
            TREES: "a = 1\nfinish_extend_len = 1\nb = 1\n",
            BUILDER: f'KERNELS = """{KERNEL}"""\n',
        },
        seconds=on("2025-01-02"),
    ),
    "8c8779cd05": Step(
        "Fix retract (#2711)",
        {TREES: "a = 1\nb = 1\nfinish_extend_len = 1\n"},
        seconds=on("2025-01-02") + 12 * 3600,
        zone="+1200",
    ),
    "a47bf39123": Step("Fix concurrent requests (#2730)", {"x": "1"}, seconds=on("2025-01-10")),
    "287d07a669": Step("Fixes (flush_cache, CPU overhead) (#3014)", {"x": "2"}, seconds=on("2025-01-20")),
    "b730aa6b9e": Step("Fix when max token = 1 (#2939)", {"x": "3"}, seconds=on("2025-01-21")),
    "013021b6a1": Step(
        "refactor EAGLE 2 (#3269)",
        {
            WORKER: LATER_WORKER.replace(STOP, "").replace(RESTORED, "        self.token_to_kv_pool.free(slots)\n"),
            RUNNER: "class EAGLEDraftCudaGraphRunner:\n    def __init__(self, worker):\n"
            "        self.num_tokens_per_bs = worker.server_args.speculative_eagle_topk\n",
        },
        seconds=on("2025-02-03"),
    ),
    "f9905d59a8": Step(
        "Kernels (#3373)",
        {
            BUILDER: "x = 1\n",
            f"{KERNELS}/src/sgl-kernel/csrc/eagle_utils.cu": KERNEL,
            f"{KERNELS}/src/sgl-kernel/csrc/speculative_sampling.cu": "x\n",
            f"{KERNELS}/csrc/speculative/eagle_utils.cu": KERNEL,
        },
        seconds=on("2025-02-07"),
    ),
    "d23cb9a01e": Step("One forward less (#3468)", {WORKER: LATER_WORKER.replace(RESTORED, "")}),
    "862dd76c76": Step(
        "NextN (#3582)",
        {f"{MODELS}/deepseek_nextn.py": "x = 1\n", DEEPSEEK: "class Model:\n    pass\n"},
        seconds=on("2025-02-15"),
    ),
    "9fafa62db7": Step(
        "Share (#4033)",
        {DEEPSEEK: "class Model:\n    def set_embed_and_head(self):\n        pass\n"},
        seconds=on("2025-03-04"),
    ),
    "plain backends": Step("Backends", {MLA: "x = 1\n", FA3: "x = 1\n"}),
    "d3d4d76758": Step(
        "Refactor (#3986)",
        {
            WORKER: LATER_WORKER.replace(RESTORED, "").replace(
                "            if batch.spec",
                "            self.token_to_kv_pool_allocator.free(backup)\n            if batch.spec",
            ),
            SERVER: LATER_SERVER,
        },
    ),
    "9fb48f951f": Step(
        "NextN on MLA (#4218)", {MLA: "class FlashInferMLAMultiStepDraftBackend:\n    pass\n"}, seconds=on("2025-03-09")
    ),
    "52a34d7448": Step(
        "Greedy (#4383)",
        {f"{KERNELS}/csrc/speculative/eagle_utils.cu": f"{KERNEL}VerifyTreeGreedy\n"},
        seconds=on("2025-03-16"),
    ),
    "b26bc86b36": Step("Support page size > 1 (#4908)", {WORKER: LATER_WORKER}, seconds=on("2025-03-30")),
    "e983e43248": Step(
        "EAGLE on FA3 (#4951)", {FA3: "class FlashAttentionMultiStepBackend:\n    pass\n"}, seconds=on("2025-04-02")
    ),
    "v0.4.6": Step("Release", {TREES: LATER_TREES, BUILDER: TREE_BUILDER}, seconds=on("2025-04-27")),
    "d2e0881a34": Step("PD (#6507)", {"x": "4"}, seconds=on("2025-05-23")),
    "b1286a116a": Step("Pages (#7213)", {WORKER: LATER_WORKER.replace(REFUSED, "")}, seconds=on("2025-06-16")),
    "10d60cd41b": Step(
        "DP attention (#6081)", {WORKER: LATER_WORKER.replace(REFUSED, "").replace(IDLE, "")}, seconds=on("2025-06-17")
    ),
    "v0.5.0rc0": Step(
        "Release", {f"{FOLDER}/eagle_draft_extend_cuda_graph_runner.py": "x = 1\n"}, seconds=on("2025-08-01")
    ),
    "8cda5a622c": Step("Standalone (#10090)", {f"{FOLDER}/standalone_worker.py": "x = 1\n"}, seconds=on("2025-09-07")),
    "e7bc600304": Step(
        "Lookahead (#9873)",
        {f"{FOLDER}/lookahead_worker.py": "x = 1\n", f"{FOLDER}/cpp_lookahead/lookahead.cpp": "x\n"},
        seconds=on("2025-09-19"),
    ),
    "24f7cb1ece": Step(
        "Ngram (#11010)",
        {f"{FOLDER}/lookahead_worker.py": None, f"{FOLDER}/ngram_worker.py": "x = 1\n"},
        seconds=on("2025-09-29"),
    ),
    "20a6c0a63d": Step("Overlap (#11398)", {f"{FOLDER}/eagle_worker_v2.py": "x = 1\n"}, seconds=on("2025-10-12")),
    "cde5a6e30f": Step(
        "Abstract (#11643)",
        {f"{FOLDER}/base_spec_worker.py": "class BaseSpecWorker:\n    pass\n"},
        seconds=on("2025-10-17"),
    ),
    "18fb51583f": Step(
        "Real pages (#7725)",
        {
            WORKER: LATER_WORKER.replace(REFUSED, "").replace(
                RESTORED, f"        self.pool.move_kv_cache(slots)\n{RESTORED}"
            )
        },
    ),
    "7518dc3532": Step(
        "Standalone again (#12625)", {f"{FOLDER}/standalone_worker_v2.py": "x = 1\n"}, seconds=on("2025-12-30")
    ),
    "9d9537fbd3": Step("Corpus (#21920)", {f"{FOLDER}/cpp_lookahead/lookahead.cpp": None}, seconds=on("2026-04-02")),
    "f08726fd56": Step("DFlash (#22077)", {f"{FOLDER}/dflash_worker.py": "x = 1\n"}, seconds=on("2026-04-07")),
    "95fb722dd2": Step(
        "A registry (#23991)",
        {f"{FOLDER}/spec_registry.py": 'class CustomSpecAlgo:\n    pass\n\n\nRESERVED = ("NEXTN",)\n'},
        seconds=on("2026-05-07"),
    ),
    "84ca0ffb8c": Step("Trees and pages (#26972)", {f"{FOLDER}/eagle_info_v2.py": "pool.move_kv_cache(a, b)\n"}),
    "28c1a3cb45": Step("The first worker goes (#25464)", {WORKER: None}, seconds=on("2026-06-08")),
    "6cc9352dfe": Step(
        "DSpark (#30261)", {f"{FOLDER}/dspark_components/__init__.py": "x = 1\n"}, seconds=on("2026-07-12")
    ),
    MAIN: Step(
        "The last",
        {f"{FOLDER}/eagle_worker_v2.py": WORKERS, f"{FOLDER}/spec_info.py": CREATES},
        seconds=on("2026-08-22"),
    ),
}

CLAIMS = {claim.id: claim for claim in catalogue.claims() if claim.id.startswith("E")}

Alteration = Callable[[dict[str, Step]], None]


def file(revision: str, path: str, new: str | None, old: str | None = None) -> Alteration:
    """In a commit, another text of a file; where `old` is given, instead of that. None: the file is not in it."""

    def alter(steps: dict[str, Step]) -> None:
        files = dict(steps[revision].files)
        if old is None and new is None:
            del files[path]
        elif old is None:
            files[path] = new
        else:
            text = str(files[path])
            assert old in text, "the trap is set"
            files[path] = text.replace(old, new or "")
        steps[revision] = replace(steps[revision], files=files)

    return alter


def title(revision: str, old: str, new: str) -> Alteration:
    def alter(steps: dict[str, Step]) -> None:
        subject = str(steps[revision].subject)
        assert old in subject, "the trap is set"
        steps[revision] = replace(steps[revision], subject=subject.replace(old, new))

    return alter


def day(revision: str, to: str) -> Alteration:
    def alter(steps: dict[str, Step]) -> None:
        steps[revision] = replace(steps[revision], seconds=on(to), zone="+0000")

    return alter


def base_commit(count: int) -> Alteration:
    """The commit that the notes are about, with that many files, 11 of them workers."""

    def alter(steps: dict[str, Step]) -> None:
        gone = {path: None for step in steps.values() for path in step.files if path.startswith(FOLDER)}
        names = [f"uno_worker_{n}" for n in range(11)] + ["dflash_info", "dspark_info"]
        names += [f"more_{n}" for n in range(count - len(names))]
        steps["29f6d408c0"] = Step("The base", gone | {f"{FOLDER}/{name}.py": "x = 1\n" for name in names})

    return alter


worker = partial(file, "b26bc86b36", WORKER)  # that of v0.4.6
ACCEPTED = """            out, verified = self.verify(batch, given)
"""
ALTERED: list[tuple[str, str, Sequence[Alteration]]] = [
    ("E1", "imprecise", [title("f44d143949", "Backends", "Eagle's backends")]),
    ("E1", "false", [day("815dce0554", "2025-01-03")]),
    ("E1", "false", [file("9c05c6898e", f"{MODELS}/llama_eagle.py", None)]),
    ("E2", "true", [title("9c05c6898e", "Add", "Eagle part 1: add")]),
    ("E2", "false", [title("ad20b7957e", "part 3: ", "")]),
    ("E3", "false", [title("815dce0554", "#2150", "#3150")]),
    ("E3", "false", [title("815dce0554", " (#2150)", "")]),
    ("E4", "false", [day("printed", "2024-10-30")]),
    ("E4", "false", [day("simpler", "2024-12-01")]),
    ("E4", "false", [title("815dce0554", "#2150", "#2151")]),
    ("E5", "false", [file("815dce0554", WORKER, None)]),
    (
        "E5",
        "true",
        [
            file("3815b23ccb", f"{FOLDER}/spec_info.py", None),
            file("3815b23ccb", MODES, "", "    TARGET_VERIFY = auto()\n"),
            file("f44d143949", f"{BACKENDS}/flashinfer_backend.py", "x = 2\n"),
        ],
    ),
    ("E6", "false", [title("862dd76c76", "NextN", "Nextn")]),
    ("E6", "false", [day("862dd76c76", "2025-02-14")]),
    ("E7", "true", [day("8c8779cd05", "2025-01-03")]),
    ("E8", "false", [file("v0.4.6", f"{FOLDER}/a_worker.py", "")]),
    ("E9", "true", [base_commit(62)]),
    ("E9", "false", [base_commit(61)]),
    ("E10", "true", [base_commit(62)]),
    ("E10", "false", [base_commit(62), lambda steps: steps["29f6d408c0"].files.pop(f"{FOLDER}/dflash_info.py")]),
    ("E11", "false", [file("v0.4.6", f"{FOLDER}/a_worker.py", "")]),
    (
        "E12",
        "true",
        [
            worker("is_draft_worker=False", "is_draft_worker=True"),
            worker("return self.own_runner", "return self.model_runner"),
        ],
    ),
    ("E12", CANNOT_SAY, [worker("class class", "class")]),
    ("E12", CANNOT_SAY, [worker("\0class", "class")]),
    ("E13", "true", [file("v0.4.6", SCHEDULER, PLAIN_SCHEDULER)]),
    ("E14", "false", [file("ad20b7957e", SCHEDULER, "pass", "req.output_ids.append(token)")]),
    ("E14", "true", [file("ad20b7957e", SCHEDULER, "req.output_ids += accept[stream][seq_lens]\n")]),
    ("E15", "false", [worker("", IDLE)]),
    (
        "E15",
        "false",
        [worker("self.draft(batch)\n            return out, 0\n        else", "return out, 0\n        else")],
    ),
    ("E16", "false", [worker("0", "sum(verified.accept_length_per_req_cpu)")]),
    ("E16", "imprecise", [file("v0.4.6", TREES, "add_(accept_length)", "add_(accept_length + 1)")]),
    ("E17", "true", [worker("", STOP)]),
    ("E17", CANNOT_SAY, [worker("range(batch.steps)", "range(self.speculative_num_steps)")]),
    ("E18", "true", [worker("", STOP)]),
    ("E18", CANNOT_SAY, [worker("range(batch.steps)", "range(self.speculative_num_steps)")]),
    ("E19", "false", [worker(ACCEPTED + ACCEPTED, ACCEPTED)]),
    (
        "E20",
        "true",
        [
            file(
                "v0.4.6", TREES, "scores.unsqueeze(1)", "torch.mul(scores.unsqueeze(2), topk_p.reshape(-1, topk, topk))"
            ),
            file("v0.4.6", BUILDER, "num_verify_tokens + 4", "num_verify_tokens - 1"),
        ],
    ),
    ("E20", CANNOT_SAY, [file("v0.4.6", TREES, "torch.outer(", "torch.mul(")]),
    ("E21", "true", [file("d3d4d76758", SERVER, "(5, 4, 69)", "(5, 4, 8)")]),
    ("E21", CANNOT_SAY, [worker("found()", "self.server_args.speculative_num_draft_tokens")]),
    ("E22", "false", [worker("count * self", "count * self.topk * self")]),
    ("E22", "imprecise", [worker("backup_state=False", "backup_state=True")]),
    ("E22", CANNOT_SAY, [worker("found()", "count * self.topk * self.speculative_num_steps")]),
    (
        "E23",
        "true",
        [
            worker("", RESTORED),
            worker(f"{ACCEPTED}            self.allocator.restore_state(verified.left)\n", ACCEPTED),
        ],
    ),
    ("E24", "false", [file("v0.4.6", TREES, "", "        rejected[accept_index] = False\n")]),
    ("E25", "true", [worker("", REFUSED), worker(f"        self.pool.move_kv_cache(slots)\n{RESTORED}", RESTORED)]),
    ("E26", "true", [file("815dce0554", WORKER, "restore_state", "clear_draft_cache")]),
    ("E26", "false", [worker("", RESTORED)]),
    ("E27", "true", [file("ad20b7957e", SERVER, "", "            self.disable_radix_cache = True\n")]),
    ("E27", "false", [file("v0.4.6", SERVER, SERVER_WITHOUT_CACHE)]),
    ("E27", CANNOT_SAY, [file("v0.4.6", SERVER, SERVER_WITHOUT_CACHE.replace("= True", "= found()"))]),
    ("E28", "true", [file("8c8779cd05", TREES, "a = 1\npool.free(b)\n", "a = 1\n")]),
    ("E29", "false", [title("a47bf39123", "#2730", "#2731")]),
    ("E29", "imprecise", [day("b730aa6b9e", "2025-01-01")]),
    ("E30", "false", [day("013021b6a1", "2025-02-04")]),
    ("E31", "false", [file("f9905d59a8", BUILDER, None)]),
    ("E32", "false", [file("862dd76c76", f"{MODELS}/deepseek_nextn.py", None)]),
    ("E33", "true", [day("9fafa62db7", "2025-02-28")]),
    ("E33", "false", [file("9fafa62db7", DEEPSEEK, "set_other", "set_embed_and_head")]),
    ("E34", "true", [day("e983e43248", "2025-03-31")]),
    ("E35", "true", [day("20a6c0a63d", "2025-04-01"), day("10d60cd41b", "2025-04-02")]),
    ("E35", "false", [day("b26bc86b36", "2025-04-01")]),
    ("E36", "true", [file("815dce0554", WORKER, "x = 1\n" * 655)]),
    ("E37", "false", [day("cde5a6e30f", "2026-01-01")]),
    ("E37", "false", [file("cde5a6e30f", f"{FOLDER}/base_spec_worker.py", None)]),
    ("E38", "true", [day("95fb722dd2", "2025-12-31")]),
    ("E39", "true", [file("95fb722dd2", REGISTRY, '"EAGLE", "STANDALONE"', '"NEXTN",')]),
    ("E40", "false", [file("e7bc600304", f"{FOLDER}/cpp_lookahead/lookahead.cpp", None)]),
    ("E41", "false", [day("7518dc3532", "2026-01-01")]),
    ("E42", "false", [file(MAIN, f"{FOLDER}/eagle_worker_v2.py", "V2(object)", "V2(BaseSpecWorker)")]),
    ("E43", "true", [file("b0524c3789", SCHEDULER, PLAIN_SCHEDULER.replace("gathered", "padded"))]),
    ("E44", "false", [worker("None", "EAGLEDraftCudaGraphRunner(self, batch=1)")]),
    ("E44", "imprecise", [file("013021b6a1", RUNNER, "found()", "worker.server_args.speculative_eagle_topk")]),
]


def named(number: int) -> str:
    return f"{number}-{ALTERED[number][0]}-{ALTERED[number][1].replace(' ', '-')}"


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Image]:
    """HISTORY, as "main", and what it is in each case of ALTERED."""
    histories = {"main": dict(HISTORY)}
    for number, (_, _, alterations) in enumerate(ALTERED):
        steps = histories[named(number)] = dict(HISTORY)
        for alter in alterations:
            alter(steps)
    return make_images(tmp_path_factory.mktemp("images"), histories)


@pytest.fixture
def image(images: dict[str, Image]) -> Image:
    return images["main"]


def found(clone: Clone, claim_id: str) -> Finding:
    (verdict,) = verdicts(clone, [CLAIMS[claim_id]])
    assert verdict.finding is not None
    return verdict.finding


@pytest.fixture
def catalogued(monkeypatch: pytest.MonkeyPatch) -> Callable[[Image], None]:
    """Lets the catalogue know, of what stands for its commits in an image, the days and titles of HISTORY."""

    def know(image: Image) -> None:
        twelve = [HISTORY[name] for name in eagle_arrival.TWELVE]
        told = [(local_day(step), step.subject) for step in twelve]
        known = dict(zip(image.resolve(*eagle_arrival.TWELVE), told, strict=True))
        monkeypatch.setattr(eagle_arrival, "_catalogued", lambda: known)

    return know


def local_day(step: Step) -> str:
    """The author's."""
    hours = int(step.zone[:3])
    return str(datetime.fromtimestamp(START + (step.seconds or 0), timezone(timedelta(hours=hours))).date())


@pytest.mark.parametrize("claim_id", CLAIMS)
def test_on_a_history_like_sglangs_a_claim_comes_out_as_listed(
    image: Image, claim_id: str, catalogued: Callable[[Image], None]
) -> None:
    if claim_id in ("E6", "E7"):
        catalogued(image)
    finding = found(image, claim_id)
    assert finding.verdict == CLAIMS[claim_id].verdict, [part for part in finding.parts if not part.holds]
    assert finding.commands
    shown = [*finding.commands, *(part.command for part in finding.parts if part.command)]
    assert all(command.startswith("git ") for command in shown)


@pytest.mark.parametrize("number", range(len(ALTERED)), ids=named)
def test_on_another_history_it_comes_out_otherwise(
    images: dict[str, Image], number: int, catalogued: Callable[[Image], None]
) -> None:
    claim_id, verdict, _ = ALTERED[number]
    assert verdict != CLAIMS[claim_id].verdict
    if claim_id in ("E6", "E7"):
        catalogued(images[named(number)])
    finding = found(images[named(number)], claim_id)
    assert finding.verdict == verdict, finding


def test_every_claim_on_eagle_is_altered_at_least_once() -> None:
    assert {claim_id for claim_id, _, _ in ALTERED} == set(CLAIMS)


@pytest.mark.parametrize("options", [("--depth=1",), ("--filter=blob:none",), ("--filter=tree:0",)])
def test_what_a_clone_lacks_is_said(tmp_path: Path, image: Image, options: tuple[str, ...]) -> None:
    """What a lesser clone can tell it tells as a whole one does; of the rest it says that it cannot."""
    lesser = Image(
        cloned(image.folder, tmp_path / "lesser", "--bare", "--no-tags", *options),
        dict(zip(HISTORY, map(str, image.resolve(*HISTORY)), strict=True)),
    )
    on_catalogue = {"E6", "E7"}  # they compare hashes that only SGLang's own commits have
    claims = [claim for claim in CLAIMS.values() if claim.id not in on_catalogue]
    told = {verdict.claim.id: verdict for verdict in verdicts(lesser, claims)}
    unknown = {name for name, verdict in told.items() if verdict.agrees is None}
    assert all(verdict.agrees for name, verdict in told.items() if name not in unknown)
    assert {"E12", "E17", "E23", "E36"} <= unknown
    for name in unknown:
        finding = told[name].finding
        assert finding is not None
        assert finding.note.startswith("this clone "), finding


def test_the_number_of_git_processes_does_not_grow_with_the_history(tmp_path: Path, image: Image) -> None:
    more = make_image(tmp_path / "more", {f"more {n}": Step(f"One more ({n})") for n in range(200)} | HISTORY)
    counts = []
    for number, one in enumerate((image, more)):
        again = Image(one.folder, one.stands_for)  # of which nothing has been read
        (tmp_path / str(number)).mkdir()
        with counted_git(tmp_path / str(number)) as calls:
            verdicts(again, list(CLAIMS.values()))
        counts.append(len(calls))
    assert counts[0] == counts[1]
    assert 5 < counts[0] < 50


# --- following a function


def walked(source: str, known: dict[str, object] | None = None, name: str = "W.f") -> Walk:
    made: dict[str, Defined] = {}
    for outer in ast.parse(textwrap.dedent(source)).body:
        inside = outer.body if isinstance(outer, ast.ClassDef) else [outer]
        for node in inside:
            assert isinstance(node, ast.FunctionDef)
            full = f"{outer.name}.{node.name}" if isinstance(outer, ast.ClassDef) else node.name
            made[full] = Defined(full, node.lineno, node.end_lineno or 0, (), "", node)
    return walk(made, name, known or {})


def names(way: Walk) -> list[str]:
    return [call.name for call in way.calls]


def method(body: str) -> str:
    return "class W:\n    def f(self, x):\n" + textwrap.indent(textwrap.dedent(body).strip(), " " * 8) + "\n"


@pytest.mark.parametrize(
    ("body", "known", "calls"),
    [
        ("a(b(), c())", {}, ["b", "c", "a"]),
        ("if self.n > 2:\n    a()\nelse:\n    b()", {"self.n": 3}, ["a"]),
        ("if self.n > 2:\n    a()\nelse:\n    b()", {"self.n": 1}, ["b"]),
        ("if self.n > 2:\n    a()\n    b()\nelse:\n    c()", {}, ["a", "b"]),
        ("if self.n:\n    a()\n    return\nb()", {}, ["b"]),
        ("if self.n:\n    a()\n    b()\n    raise E\nc()", {}, ["c"]),
        ("for i in range(self.n):\n    a(i)", {"self.n": 3}, ["range", "a", "a", "a"]),
        ("for i in range(self.n):\n    if i == 1:\n        break\n    a(i)\nb()", {"self.n": 3}, ["range", "a", "b"]),
        ("for i in range(self.n):\n    if i == 1:\n        continue\n    a(i)", {"self.n": 3}, ["range", "a", "a"]),
        ("for one in x:\n    a(one)", {}, ["a"]),
        ("n = self.n + 1\nn -= 2\nif n == 2:\n    a()", {"self.n": 3}, ["a"]),
        ("self.n = found()\nif self.n == 3:\n    a()\nelse:\n    b()\n    b()", {"self.n": 3}, ["found", "b", "b"]),
        (
            "x.mode = 1\nif x.mode.is_a():\n    a()\nelse:\n    b()\n    b()",
            {"x.mode.is_a()": True},
            ["x.mode.is_a", "b", "b"],
        ),
        ("if self.n and self.m:\n    a()\nelse:\n    b()\n    b()", {"self.m": False}, ["b", "b"]),
        ("if self.n or self.m:\n    a()\nelse:\n    b()\n    b()", {"self.m": True}, ["a"]),
        ("if self.n in ('p', 'q'):\n    a()", {"self.n": "r"}, []),
        ("try:\n    a()\n    raise E\nexcept E:\n    b()\nfinally:\n    c()", {}, ["a", "b", "c"]),
        ("with a() as n:\n    b(n)", {"n": 1}, ["a", "b"]),
        ("g = lambda: a()\nb(g)", {}, ["b"]),
        ("n, m = 1, 2\nif m == 2:\n    a()", {}, ["a"]),
        ("while x:\n    a()\n    break\nb()", {}, ["a", "b"]),
    ],
)
def test_a_walk_goes_where_the_values_lead(body: str, known: dict[str, object], calls: list[str]) -> None:
    assert names(walked(method(body), known)) == calls


def test_a_walk_enters_methods_and_functions_and_takes_values_along() -> None:
    way = walked(
        """
        class W:
            def f(self, batch):
                self.g(batch, 2)
                if self.seen:
                    last()

            def g(self, b, n):
                if b.mode.is_idle():
                    idle(n)
                self.seen = True
                self.f(b)
                helper(n)


        def helper(m):
            if m == 2:
                two()
        """,
        {"batch.mode.is_idle()": True},
    )
    assert names(way) == ["self.g", "b.mode.is_idle", "idle", "self.f", "helper", "two", "last"]
    assert [call.arguments for call in way.named("idle")] == [(2,)]
    assert way.values["self.seen"] is True


def test_a_walk_tells_how_it_ends_and_what_it_does_not_know() -> None:
    way = walked(method("for one in x:\n    a(one)\nb(self.n, c=1)\nreturn self.n, 2"), {"self.m": 1})
    assert [call.name for call in way.repeated] == ["a"]
    assert way.calls[1].arguments == (UNKNOWN,)
    assert way.calls[1].keywords == {"c": 1}
    assert way.returned is not None
    assert ast.unparse(way.returned) == "(self.n, 2)"
    raising = method("self.g()\nb()") + "\n    def g(self):\n        raise NotYet('no')\n"
    assert walked(raising).raised == "NotYet"
    assert names(walked(raising)) == ["self.g"]
    with pytest.raises(HistoryError, match=r"W\.h is to be followed, and is not defined"):
        walked(method("a()"), name="W.h")


def test_names_of_calls_end_in_whole_words() -> None:
    way = walked(method("self.forward()\nmy_forward()\nself.model.forward()"))
    assert [call.name for call in way.named("forward")] == ["self.forward", "self.model.forward"]
    assert way.at("model.forward") == [2]
