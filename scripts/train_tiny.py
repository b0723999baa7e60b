"""Train the weights that refspec ships: tokenizer, target, and every draft model.

    python scripts/train_tiny.py all                    # everything, about three hours on two cores
    python scripts/train_tiny.py target --steps 1750    # one stage; run again to go on where it stopped
    python scripts/train_tiny.py publish                # measure, then write src/refspec/models/tiny

The stages, in their order: target, unloop, write, eagle, joint, standalone, publish; then, for the target as `publish`
has left it, which stays as it is: write-again, eagle3, mtp, frozen-kv, publish-drafts; and
measure-drafts.

The corpus is the Python standard library that comes with the interpreter, without its tests, so no download
is needed. Every stage keeps a checkpoint in the work folder after every few minutes, draws its batches from
(seed, step) alone, and writes its losses to CSV and PNG: stopped and started again, it takes the same steps.
"""

from __future__ import annotations

import csv
import hashlib
import json
import math
import shutil
import sysconfig
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import torch.nn.functional as F
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn

from refspec import Engine, SamplingParams, SpecConfig
from refspec.bench.engine import LOOP_THRESHOLD, SHAPES, distinct_4gram_ratio
from refspec.models.checkpoint import SHIPPED_FOLDER, load_eagle, load_target, load_tokenizer, save_checkpoint
from refspec.models.eagle import EagleHead
from refspec.models.eagle3 import Eagle3Config, Eagle3Head, FusedTarget
from refspec.models.frozen_kv import FrozenKVAssistant
from refspec.models.llama import Attend, LlamaConfig, LlamaForCausalLM
from refspec.models.mtp import MTPLayer, MTPLayers

VOCAB_SIZE = 1024
END_OF_TEXT = "<|endoftext|>"
SEED = 20260
# Left out: tests and tables of constants, whose endless near-repetition a small model would learn first.
LEFT_OUT = {"site-packages", "test", "tests", "idle_test", "encodings", "pydoc_data", "__pycache__", "config"}

TARGET = LlamaConfig(
    vocab_size=VOCAB_SIZE, hidden_size=192, intermediate_size=512, num_hidden_layers=12, num_attention_heads=6,
    num_key_value_heads=2, head_dim=32, max_position_embeddings=1024, eos_token_ids=(0,),
)  # fmt: skip
EAGLE = LlamaConfig(
    vocab_size=VOCAB_SIZE, hidden_size=192, intermediate_size=512, num_hidden_layers=1, num_attention_heads=6,
    num_key_value_heads=2, head_dim=32, max_position_embeddings=1024, eos_token_ids=(0,),
)  # fmt: skip
# An EAGLE-3 head knows its token by attention alone, so it gets six more heads than EAGLE's, each with keys and values.
EAGLE3 = replace(EAGLE, num_attention_heads=12, num_key_value_heads=12)
FEATURE_LAYERS = (2, 6, 12)  # the high feature is what the last layer leaves
DRAFT_VOCAB_SIZE = 640  # with which 99.3 % of the tokens that the target writes can be said
MTP_LAYERS = 3
FROZEN_KV = replace(EAGLE, num_hidden_layers=2)
FROZEN_KV_LAYERS = (10, 11)
STANDALONE = LlamaConfig(
    vocab_size=VOCAB_SIZE, hidden_size=128, intermediate_size=384, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=32, max_position_embeddings=1024, eos_token_ids=(0,),
)  # fmt: skip

console = Console()
app = typer.Typer(add_completion=False, help=__doc__.splitlines()[0] if __doc__ else None)
WorkFolder = Annotated[Path, typer.Option("--work", help="checkpoints, tokens and loss curves")]


# --- the corpus ---------------------------------------------------------------------------------------------


def corpus_files() -> Iterator[tuple[str, Path]]:
    """(relative name, path) of every source file that is used, in a fixed order."""
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root)
        if not LEFT_OUT.intersection(name.parts):
            yield name.as_posix(), path


def is_held_out(name: str) -> bool:
    """One file in twenty, chosen by its name, is never trained on."""
    return hashlib.sha256(name.encode()).digest()[0] < 13


def read_source(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace").expandtabs(8)


def prepare(work: Path) -> Tokenizer:
    """Train the tokenizer, then write the corpus as token ids: train.npy and held_out.npy. Done once."""
    work.mkdir(parents=True, exist_ok=True)
    file = work / "tokenizer.json"
    if file.is_file() and (work / "held_out.npy").is_file():
        return Tokenizer.from_file(str(file))
    texts = {
        held: [read_source(path) for name, path in corpus_files() if is_held_out(name) == held]
        for held in (False, True)
    }
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE, special_tokens=[END_OF_TEXT], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )  # fmt: skip
    tokenizer.train_from_iterator(texts[False], trainer)
    for held, name in ((False, "train"), (True, "held_out")):
        ids: list[int] = []
        for encoding in tokenizer.encode_batch(texts[held]):
            ids += [0, *encoding.ids]
        np.save(work / f"{name}.npy", np.asarray(ids, dtype=np.uint16))
        size = sum(len(text.encode()) for text in texts[held])
        (work / f"{name}.bytes").write_text(str(size / len(ids)))
        console.print(f"{name}: {len(texts[held])} files, {size / 1e6:.1f} MB, {len(ids) / 1e6:.2f} M tokens")
    tokenizer.save(str(file))
    return tokenizer


def batch_at(tokens: np.ndarray, step: int, seed: int, length: int, batch: int) -> Tensor:
    """The (batch, length + 1) ids that a step trains on: a function of the arguments alone."""
    starts = np.random.default_rng([seed, step]).integers(0, len(tokens) - length - 1, batch)
    return torch.from_numpy(np.stack([tokens[s : s + length + 1] for s in starts]).astype(np.int64))


# --- the models, seen by training -----------------------------------------------------------------------------


def causal_attention(batch: int) -> Attend:
    """Attention for `batch` texts of equal length laid end to end, every token seeing those before it."""

    def attend(layer_id: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        groups = q.shape[1] // k.shape[1]
        # fp32, and heads repeated by hand: on a CPU twice as fast as bf16 with enable_gqa.
        q, k, v = (x.float().unflatten(0, (batch, -1)).transpose(1, 2) for x in (q, k, v))
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(0, 1)

    return attend


def positions_of(ids: Tensor) -> Tensor:
    return torch.arange(ids.shape[1]).repeat(ids.shape[0])


def hidden_of(model: LlamaForCausalLM, ids: Tensor) -> Tensor:
    """ids (batch, length) -> the model's final hidden states, flat (batch * length, H)."""
    return model(ids.flatten(), positions_of(ids), causal_attention(ids.shape[0]))


def language_loss(model: LlamaForCausalLM, ids: Tensor) -> Tensor:
    """Mean cross-entropy of each token after those before it, in nats. ids i64 (batch, length + 1)."""
    logits = model.logits(hidden_of(model, ids[:, :-1]))
    return F.cross_entropy(logits.float(), ids[:, 1:].flatten())


class UnrolledAttention:
    """Attention of an EAGLE head's row at unroll step j, as the draft loop will see it.

    A row drafted j levels past the last committed token attends the *extend* rows (step 0) of the tokens up to
    there, and its own ancestors' rows of steps 1..j: one each, on the diagonal that lies j - i tokens back.
    Source: HASS (Zhang et al. 2024, section 3.2); EAGLE-3 (Li et al. 2025, section 3.2, training-time test).
    """

    def __init__(self, batch: int) -> None:
        self.batch = batch
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def __call__(self, layer_id: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        groups = q.shape[1] // k.shape[1]
        q, k, v = (x.unflatten(0, (self.batch, -1)).transpose(1, 2) for x in (q, k, v))
        self.keys.append(k.repeat_interleave(groups, dim=1))
        self.values.append(v.repeat_interleave(groups, dim=1))
        step, length, scale = len(self.keys) - 1, q.shape[2], q.shape[3] ** -0.5
        scores = q @ self.keys[0].transpose(2, 3) * scale
        seen = torch.ones(length, length, dtype=torch.bool).tril(-step)
        scores = scores.float().masked_fill(~seen, -torch.inf)
        # Row r of step i stands j - i tokens before row r of step j.
        back = [step - i for i in range(1, step + 1)]
        shifted_keys = [F.pad(self.keys[i], (0, 0, b, 0))[:, :, :length] for i, b in enumerate(back, start=1)]
        shifted_values = [F.pad(self.values[i], (0, 0, b, 0))[:, :, :length] for i, b in enumerate(back, start=1)]
        diagonal = [((q * key).sum(-1, keepdim=True) * scale).float() for key in shifted_keys]
        weights = torch.cat([scores, *diagonal], dim=-1).softmax(-1).to(v.dtype)
        out = weights[..., :length] @ self.values[0]
        for i, value in enumerate(shifted_values):
            out = out + weights[..., length + i, None] * value
        return out.transpose(1, 2).flatten(0, 1)


# --- optimisers -----------------------------------------------------------------------------------------------


class Muon(torch.optim.Optimizer):
    """Momentum, orthogonalised by a few Newton-Schulz steps in fp32 (Jordan et al. 2024).

    torch.optim.Muon iterates in bf16 matrix by matrix, which is several times slower on a CPU of this size.
    """

    def __init__(
        self, params: list[nn.Parameter], lr: float, momentum: float = 0.95, weight_decay: float = 0.01
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[nn.Parameter]] = {}
            for p in group["params"]:
                by_shape.setdefault(p.shape, []).append(p)
            for shape, params in by_shape.items():
                updates = []
                for p in params:
                    momentum = self.state[p].setdefault("momentum", torch.zeros_like(p))
                    momentum.lerp_(p.grad, 1 - group["momentum"])
                    updates.append(p.grad.lerp(momentum, group["momentum"]))
                scale = max(1.0, shape[0] / shape[1]) ** 0.5
                for p, update in zip(params, orthogonalise(torch.stack(updates)), strict=True):
                    p.mul_(1 - group["lr"] * group["weight_decay"]).add_(update, alpha=-group["lr"] * scale)


def orthogonalise(matrices: Tensor) -> Tensor:
    """(n, rows, columns) -> about the nearest orthogonal matrix of each."""
    tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.transpose(1, 2) if tall else matrices
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(5):
        gram = x @ x.transpose(1, 2)
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x.transpose(1, 2) if tall else x


def optimisers_for(model: nn.Module, lr_scale: float = 1.0) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside, AdamW for embeddings, output head and norms."""
    inner, outer = [], []
    for name, p in model.named_parameters():
        (inner if p.ndim == 2 and not name.startswith(("embed", "lm_head")) else outer).append(p)
    both: list[torch.optim.Optimizer] = [Muon(inner, lr=0.02 * lr_scale)]
    if outer:
        both.append(torch.optim.AdamW(outer, lr=2e-3 * lr_scale, betas=(0.9, 0.95), weight_decay=0.0))
    return both


def learning_rate_factor(step: int, steps: int) -> float:
    """Warm up over 2 %, hold, then fall in a line to 2 % over the last 45 %."""
    return min(1.0, (step + 1) / (0.02 * steps), 0.02 + 0.98 * (steps - step) / (0.45 * steps))


# --- one training loop for all --------------------------------------------------------------------------------


def train(
    name: str, model: nn.Module, loss_at: Callable[[int], Tensor], held_out: Callable[[int], dict[str, float]],
    steps: int, work: Path, save_every: int = 100, optimisers: list[torch.optim.Optimizer] | None = None,
) -> None:  # fmt: skip
    """Take `steps` steps, or what is left of them. Losses go to NAME.csv and NAME.png in the work folder."""
    optimisers = optimisers or optimisers_for(model)
    base = [group["lr"] for optimiser in optimisers for group in optimiser.param_groups]
    file, first = work / f"{name}.pt", 0
    rows: list[dict[str, float]] = []
    if file.is_file():
        state = torch.load(file, weights_only=True)
        model.load_state_dict(state["model"])
        for optimiser, saved in zip(optimisers, state["optimisers"], strict=True):
            optimiser.load_state_dict(saved)
        first, rows = state["step"], state["rows"]
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[losses]}"),
    )
    with Progress(*columns, console=console) as progress:
        task = progress.add_task(name, total=steps, completed=first, losses="")
        running: list[float] = []
        started = time.perf_counter()
        for step in range(first, steps):
            groups = [group for optimiser in optimisers for group in optimiser.param_groups]
            for group, lr in zip(groups, base, strict=True):
                group["lr"] = lr * learning_rate_factor(step, steps)
            loss = loss_at(step)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for optimiser in optimisers:
                optimiser.step()
                optimiser.zero_grad()
            running.append(loss.item())
            if (step + 1) % save_every == 0 or step + 1 == steps:
                seconds = (time.perf_counter() - started) / len(running)
                row = {
                    "step": step + 1,
                    "train_loss": sum(running) / len(running),
                    **held_out(step),
                    "seconds_per_step": seconds,
                }
                rows.append(row)
                shown = "  ".join(f"{key} {value:.4g}" for key, value in row.items() if key != "step")
                progress.update(task, losses=shown)
                if not console.is_terminal:
                    console.print(f"{name} {step + 1}/{steps}  {shown}", highlight=False)
                save_training(file, model, optimisers, step + 1, rows)
                draw_curves(name, rows, work)
                running, started = [], time.perf_counter()
            progress.update(task, completed=step + 1)


def save_training(
    file: Path, model: nn.Module, optimisers: list[torch.optim.Optimizer], step: int, rows: list[dict[str, float]]
) -> None:
    """Written beside and then renamed, so that a stop in the middle leaves the old checkpoint whole."""
    beside = file.with_suffix(".part")
    torch.save(
        {"model": model.state_dict(), "optimisers": [o.state_dict() for o in optimisers], "step": step, "rows": rows},
        beside,
    )
    beside.replace(file)


def draw_curves(name: str, rows: list[dict[str, float]], work: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    with (work / f"{name}.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    figure, axes = pyplot.subplots(figsize=(7, 4))
    for key in rows[0]:
        if key not in ("step", "seconds_per_step"):
            axes.plot([row["step"] for row in rows], [row[key] for row in rows], label=key.replace("_", " "))
    axes.set(xlabel="step", title=name)
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(work / f"{name}.png", dpi=120, bbox_inches="tight")
    pyplot.close(figure)


# --- the stages -----------------------------------------------------------------------------------------------


def language_model_stage(name: str, config: LlamaConfig, steps: int, work: Path, texts: list[str]) -> None:
    """Train a language model on the token files `texts`, one step on each in turn."""
    corpora, unseen = [np.load(work / f"{text}.npy") for text in texts], np.load(work / "held_out.npy")
    bytes_per_token = float((work / "held_out.bytes").read_text())
    torch.manual_seed(SEED)
    model = LlamaForCausalLM(config)
    for parameter_name, p in model.named_parameters():
        if p.ndim == 2:
            nn.init.normal_(p, std=0.02 if parameter_name.startswith(("embed", "lm_head")) else p.shape[1] ** -0.5)
        if parameter_name.endswith(("o_proj.weight", "down_proj.weight")):
            nn.init.zeros_(p)

    def loss_on(ids: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return language_loss(model, ids)

    def held_out(step: int) -> dict[str, float]:
        with torch.no_grad():
            loss = sum(loss_on(batch_at(unseen, i, SEED + 1, 512, 8)).item() for i in range(4)) / 4
        return {"held_out_loss": loss, "held_out_bits_per_byte": loss / math.log(2) / bytes_per_token}

    def loss_at(step: int) -> Tensor:
        tokens = corpora[step % len(corpora)]
        # Most of the time on short windows, which cost half the attention; then the length that is served.
        length, batch = (256, 16) if step < 0.7 * steps else (512, 8)
        return loss_on(batch_at(tokens, step, SEED, length, batch))

    train(name, model, loss_at, held_out, steps, work)


def repeats(ids: np.ndarray, start: int, length: int = 8) -> np.ndarray:
    """bool (len(ids)): at these places, from `start` on, the last `length` ids have stood in this text before."""
    seen: set[tuple[int, ...]] = set()
    flags = np.zeros(len(ids), dtype=bool)
    for end in range(max(start, length), len(ids) + 1):
        gram = tuple(ids[end - length : end])
        flags[end - 1] = gram in seen
        seen.add(gram)
    return flags


def unlikelihood_loss(ids: Tensor, repeated: Tensor, logits: Tensor) -> Tensor:
    """-log(1 - p) of the tokens that continue a loop. ids i64, repeated bool (batch, length); logits of every id.

    Source: Neural text generation with unlikelihood training (Welleck et al. 2020, section 5.2, sequence level).
    """
    before = logits.float().unflatten(0, (ids.shape[0], -1))[:, :-1]
    p = before.softmax(-1).gather(2, ids[:, 1:, None])[:, :, 0]
    chosen = repeated[:, 1:]
    return -(torch.log1p(-p.clamp(max=0.999)) * chosen).sum() / chosen.sum().clamp(min=1)


def unrolled(head: nn.Module, ids: Tensor, states: Tensor, levels: int) -> Iterator[Tensor]:
    """What a head says at each draft level: hidden states (batch, length - 1, H), `levels` times.

    ids i64 (batch, length); states (batch, length, width): the target's at each of them.

    Row t holds token t, t >= 1, beside the hidden state of token t - 1: the target's at level 0, after that the
    head's own guess of the level before. A row drafted `level` levels past the last committed token has that many
    ancestors: of each level, the first `level` rows mean nothing.
    """
    batch, tokens = ids.shape[0], ids[:, 1:]
    positions, attend, fed = positions_of(tokens), UnrolledAttention(batch), states[:, :-1]
    for _ in range(levels):
        guess = head(tokens.flatten(), positions, attend, fed.flatten(0, 1)).unflatten(0, (batch, -1))
        yield guess
        fed = F.pad(guess, (0, 0, 1, 0))[:, :-1]


def surprise_at(guess_logits: Tensor, goal_probs: Tensor) -> Tensor:
    """Cross-entropy of each row to the target's distribution: (..., V) twice -> (...)."""
    return -(goal_probs * guess_logits.log_softmax(-1)).sum(-1)


def agreement_of(guess_ids: Tensor, goal_logits: Tensor) -> float:
    """How often the head's best token is the target's."""
    return (guess_ids == goal_logits.argmax(-1)).float().mean().item()


def eagle_loss(
    head: EagleHead, ids: Tensor, states: Tensor, logits: Tensor, unroll: int = 5
) -> tuple[Tensor, list[float]]:
    """Smooth L1 to the target's hidden states and cross-entropy to its distribution, at `unroll` draft levels.

    ids i64 (batch, length); states (batch * length, H) and logits (batch * length, V): the target's at each of them.
    Also returns how often each level's best token is the target's.
    Source: EAGLE (Li et al. 2024, section 4.2); the unrolling: HASS and EAGLE-3, see UnrolledAttention.
    """
    states, logits = (x.float().unflatten(0, (len(ids), -1)) for x in (states, logits))
    total, agreement = torch.zeros(()), []
    for level, guess in enumerate(unrolled(head, ids, states, unroll)):
        guess, goal, goal_logits = guess[:, level:].float(), states[:, level + 1 :], logits[:, level + 1 :]
        guess_logits = head.logits(guess).float()
        surprise = surprise_at(guess_logits, goal_logits.softmax(-1)).mean()
        total = total + 0.8**level * (0.5 * F.smooth_l1_loss(guess, goal) + surprise)
        agreement.append(agreement_of(guess_logits.argmax(-1), goal_logits))
    return total, agreement


def eagle3_loss(
    head: Eagle3Head, ids: Tensor, states: Tensor, logits: Tensor, unroll: int = 4
) -> tuple[Tensor, list[float]]:
    """Cross-entropy to the target's distribution over the head's vocabulary, where its best token is one of these.

    As eagle_loss, but states are (batch * length, 4H), and nothing says what the head's own are to be.
    Source: EAGLE-3 (Li et al. 2025, section 3.2).
    """
    states, logits = (x.float().unflatten(0, (len(ids), -1)) for x in (states, logits))
    ids_of_head = head.draft_to_target
    total, agreement = torch.zeros(()), []
    for level, guess in enumerate(unrolled(head, ids, states, unroll)):
        guess_logits, goal_logits = head.logits(guess[:, level:]).float(), logits[:, level + 1 :]
        within = torch.isin(goal_logits.argmax(-1), ids_of_head)
        surprise = surprise_at(guess_logits, goal_logits[..., ids_of_head].softmax(-1))
        total = total + 0.8**level * (surprise * within).sum() / within.sum()
        agreement.append(agreement_of(ids_of_head[guess_logits.argmax(-1)], goal_logits))
    return total, agreement


def chained(layers: MTPLayers, ids: Tensor, first: Tensor) -> Iterator[Tensor]:
    """What layers 1, 2, ... say: row p of layer i is fed token p + 1 + i beside what layer i - 1 said at row p.

    ids i64 (batch, length); first (batch, length - 1, H): what layer 0 said. Yields (batch, length - 1 - i, H).
    """
    said = first
    for i in range(1, len(layers)):
        tokens, fed = ids[:, 1 + i :], said[:, :-1].flatten(0, 1)
        said = layers[i](tokens.flatten(), positions_of(tokens), causal_attention(len(ids)), fed)
        said = said.unflatten(0, (len(ids), -1))
        yield said


def mtp_loss(
    layers: MTPLayers, ids: Tensor, states: Tensor, logits: Tensor, unroll: int = 4
) -> tuple[Tensor, list[float]]:
    """Cross-entropy to the target's distribution: of layer 0 at `unroll` draft levels, and of the others in the chain.

    Also returns how often the best token is the target's: of layer 0's levels, then of layers 1, 2, ...
    Source: DeepSeek-V3 (2024, section 2.2), for the chain; layer 0 is unrolled as EAGLE's head is, because it also
    drafts alone.
    """
    states, logits = (x.float().unflatten(0, (len(ids), -1)) for x in (states, logits))
    by_level = list(unrolled(layers[0], ids, states, unroll))
    # As each level's first rows mean nothing, so layer i has i rows less: the goal begins at the same place.
    said = [(level, guess[:, level:]) for level, guess in enumerate(by_level)]
    said += enumerate(chained(layers, ids, by_level[0]), start=1)
    total, agreement = torch.zeros(()), []
    for ahead, guess in said:
        guess_logits, goal_logits = layers[0].logits(guess).float(), logits[:, 1 + ahead :]
        total = total + 0.8**ahead * surprise_at(guess_logits, goal_logits.softmax(-1)).mean()
        agreement.append(agreement_of(guess_logits.argmax(-1), goal_logits))
    return total, agreement


class KeptAttention:
    """The target's attention, which keeps its keys and values; and the assistant's, which reads them.

    rows: the assistant has so many at the front of each text, row t at position t; it sees the keys up to there.
    """

    def __init__(self, batch: int, rows: int) -> None:
        self.batch, self.rows, self.attend = batch, rows, causal_attention(batch)
        self.kept: dict[int, tuple[Tensor, Tensor]] = {}

    def __call__(self, layer_id: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self.kept[layer_id] = k, v
        return self.attend(layer_id, q, k, v)

    def read_only(self, layer_id: int, q: Tensor) -> Tensor:
        k, v = (x.unflatten(0, (self.batch, -1))[:, : self.rows].flatten(0, 1) for x in self.kept[layer_id])
        return self.attend(layer_id, q, k, v)


def from_frozen_kv(
    assistant: FrozenKVAssistant, ids: Tensor, states: Tensor, attend: KeptAttention, levels: int
) -> Iterator[Tensor]:
    """What the assistant says at each draft level, each time from where the target has read to t: (batch, rows, H).

    Row t of level j is fed token t + 1 + j beside the target's hidden state of token t, or what the row said at the
    level before; it stays at position t. attend: has seen the target's forward over ids.
    """
    said = states[:, : attend.rows].flatten(0, 1)
    for level in range(levels):
        tokens = ids[:, 1 + level : 1 + level + attend.rows]
        said = assistant(tokens.flatten(), positions_of(tokens), attend, said)
        yield said.unflatten(0, (len(ids), -1))


def frozen_kv_loss(
    assistant: FrozenKVAssistant, ids: Tensor, states: Tensor, logits: Tensor, attend: KeptAttention, unroll: int = 4
) -> tuple[Tensor, list[float]]:
    """Cross-entropy to the target's distribution, at `unroll` draft levels. As mtp_loss, but for the attention."""
    states, logits = (x.float().unflatten(0, (len(ids), -1)) for x in (states, logits))
    total, agreement = torch.zeros(()), []
    for level, guess in enumerate(from_frozen_kv(assistant, ids, states, attend, unroll)):
        guess_logits, goal_logits = assistant.logits(guess).float(), logits[:, 1 + level : 1 + level + attend.rows]
        total = total + 0.8**level * surprise_at(guess_logits, goal_logits.softmax(-1)).mean()
        agreement.append(agreement_of(guess_logits.argmax(-1), goal_logits))
    return total, agreement


class LoudEmbedding(nn.Module):
    """The target's embedding, as loud as its hidden states (which here are 19 times louder).

    A head that is fed both cannot hear the token otherwise, and its first thousand steps go into turning it up. The
    factor is folded into `fc` when the head is published.
    """

    def __init__(self, target: LlamaForCausalLM, states: Tensor) -> None:
        super().__init__()
        self.weight = target.embed_tokens.weight
        self.factor = (states.square().mean() / self.weight.square().mean()).sqrt().item()

    def forward(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self.weight) * self.factor


def loud_embedding(target: LlamaForCausalLM, work: Path) -> LoudEmbedding:
    with torch.no_grad():
        ids = batch_at(np.load(work / "train.npy"), 0, SEED, 256, 8)
        return LoudEmbedding(target, hidden_of(target, ids))


def load_trained(name: str, config: LlamaConfig, work: Path) -> LlamaForCausalLM:
    model = LlamaForCausalLM(config)
    model.load_state_dict(torch.load(work / f"{name}.pt", weights_only=True)["model"])
    return model.requires_grad_(False).eval()


@app.command()
def target(steps: int = 1750, work: WorkFolder = Path("build/train_tiny")) -> None:
    """The target model: 12 layers x 192."""
    prepare(work)
    language_model_stage("target", TARGET, steps, work, ["train"])


# Up to which step: how much the head's loss weighs for both, and the punishment of loops. A head that is easy to
# please pulls the target into loops, so the two grew together.
JOINT_WEIGHTS = ((120, 0.2, 1.0), (380, 0.1, 4.0), (math.inf, 0.2, 8.0))


class OwnText:
    """What a model writes greedily after pieces of the training text, 128 texts at a time, with its loops marked."""

    def __init__(self, model: LlamaForCausalLM, tokens: np.ndarray) -> None:
        self.engine, self.tokens = Engine(model, kv_slots=128 * 260, max_running=128), tokens
        self.block, self.texts, self.repeated = -1, torch.empty(0), torch.empty(0)

    def batch_at(self, batch: int) -> tuple[Tensor, Tensor]:
        """ids i64 and marks bool, both (8, 256). Every 16 batches the model, as it is by then, writes anew."""
        if batch // 16 != self.block:
            self.block = batch // 16
            starts = np.random.default_rng([SEED, 2, self.block]).integers(0, len(self.tokens) - 64, 128)
            prompts = [self.tokens[s : s + 64].tolist() for s in starts]
            outputs = self.engine.generate(prompts, SamplingParams(max_new_tokens=192, ignore_eos=True))
            texts = np.array([p + o.token_ids for p, o in zip(prompts, outputs, strict=True)])
            self.texts = torch.from_numpy(texts)
            self.repeated = torch.from_numpy(np.stack([repeats(text, 64) for text in texts]))
        rows = slice(batch % 16 * 8, batch % 16 * 8 + 8)
        return self.texts[rows], self.repeated[rows]

    def repeated_share(self) -> float:
        return self.repeated[:, 64:].float().mean().item()


@app.command()
def unloop(steps: int = 192, work: WorkFolder = Path("build/train_tiny")) -> None:
    """Teach the target not to repeat itself: half source text, half its own greedy text with the loops punished."""
    tokens, unseen = np.load(work / "train.npy"), np.load(work / "held_out.npy")
    model = load_trained("target", TARGET, work).requires_grad_(True)
    own = OwnText(model, tokens)

    def loss_at(step: int) -> Tensor:
        source = batch_at(tokens, step, SEED + 3, 256, 8)
        ids, repeated = own.batch_at(step)
        with torch.autocast("cpu", torch.bfloat16):
            return language_loss(model, source) + unlikelihood_loss(ids, repeated, model.logits(hidden_of(model, ids)))

    def held_out(step: int) -> dict[str, float]:
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            loss = language_loss(model, batch_at(unseen, 0, SEED + 1, 512, 8)).item()
        return {"held_out_loss": loss, "repeated_share": own.repeated_share()}

    train("unlooped", model, loss_at, held_out, steps, work, 16, optimisers_for(model, lr_scale=0.1))


@app.command()
def standalone(steps: int = 900, work: WorkFolder = Path("build/train_tiny")) -> None:
    """The standalone draft model: 2 layers x 128, the target's tokenizer."""
    language_model_stage("standalone", STANDALONE, steps, work, ["train", "written"])


def write_text(model: LlamaForCausalLM, prompts: Path, count: int, seed: int, file: Path) -> None:
    """`count` pieces of the token file `prompts`, each with what the model writes greedily after it, end to end."""
    tokens, rng = np.load(prompts), np.random.default_rng([SEED, seed])
    engine = Engine(model, kv_slots=64 * 400, max_running=64)
    prompt_lens, starts = rng.integers(16, 160, count), rng.integers(0, len(tokens) - 200, count)
    pieces = [tokens[s : s + n].tolist() for s, n in zip(starts, prompt_lens, strict=True)]
    texts: list[np.ndarray] = []
    with Progress(console=console) as progress:
        for i in progress.track(range(0, count, 64), description=file.name):
            outputs = engine.generate(pieces[i : i + 64], SamplingParams(max_new_tokens=192, ignore_eos=True))
            texts += [np.array(p + o.token_ids) for p, o in zip(pieces[i : i + 64], outputs, strict=True)]
    np.save(file, np.concatenate(texts).astype(np.uint16))


@app.command()
def write(count: int = 1536, work: WorkFolder = Path("build/train_tiny")) -> None:
    """Let the target write the text that half of the drafts' lessons are taken from: written.npy.

    A draft is judged on the target's own greedy text, so it should know that (as in EAGLE's and SpecForge's data).
    """
    write_text(load_trained("unlooped", TARGET, work), work / "train.npy", count, 1, work / "written.npy")


@app.command()
def eagle(steps: int = 1100, work: WorkFolder = Path("build/train_tiny")) -> None:
    """The EAGLE head, on the frozen target's hidden states."""
    corpora = [np.load(work / f"{text}.npy") for text in ("train", "written")]
    unseen, model = np.load(work / "held_out.npy"), load_trained("unlooped", TARGET, work)
    torch.manual_seed(SEED)
    head = EagleHead(EAGLE, model)
    head.shared = (loud_embedding(model, work), model.lm_head)
    with torch.no_grad():
        # At first the head repeats the hidden state that it is fed.
        head.fc.weight.copy_(torch.cat([torch.zeros(192, 192), torch.eye(192)], dim=1))
        for name, p in head.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                p.zero_()
            elif p.ndim == 2 and not name.startswith("fc"):
                nn.init.normal_(p, std=p.shape[1] ** -0.5)

    def loss_on(ids: Tensor) -> tuple[Tensor, list[float]]:
        with torch.autocast("cpu", torch.bfloat16):
            with torch.no_grad():
                states = hidden_of(model, ids)
                logits = model.logits(states)
            return eagle_loss(head, ids, states, logits)

    def loss_at(step: int) -> Tensor:
        return loss_on(batch_at(corpora[step % 2], step, SEED, 256, 8))[0]

    def held_out(step: int) -> dict[str, float]:
        with torch.no_grad():
            return mean_agreement([loss_on(batch_at(unseen, i, SEED + 1, 256, 8)) for i in range(4)])

    train("eagle", head, loss_at, held_out, steps, work)


def mean_agreement(results: list[tuple[Tensor, list[float]]]) -> dict[str, float]:
    levels = zip(*(agreement for _, agreement in results), strict=True)
    means = {f"agreement_{level + 1}": sum(values) / len(values) for level, values in enumerate(levels)}
    return {"held_out_loss": sum(loss.item() for loss, _ in results) / len(results), **means}


@app.command()
def joint(steps: int = 600, work: WorkFolder = Path("build/train_tiny")) -> None:
    """Target and head together, so that what the target says is also easier to foresee.

    The head's loss reaches the target through its hidden states and its distribution; cross-entropy on source text
    and the punishment of loops keep the target a language model meanwhile.
    Source: Medusa (Cai et al. 2024, section 2.2.2, training heads and backbone together).
    """
    tokens, unseen = np.load(work / "train.npy"), np.load(work / "held_out.npy")
    model = load_trained("unlooped", TARGET, work).requires_grad_(True)
    head = EagleHead(EAGLE, model)
    head.load_state_dict(torch.load(work / "eagle.pt", weights_only=True)["model"])
    head.shared = (loud_embedding(load_trained("unlooped", TARGET, work), work), model.lm_head)
    head.shared[0].weight = model.embed_tokens.weight
    both, own = nn.ModuleDict({"target": model, "head": head}), OwnText(model, tokens)

    def losses_at(step: int, ids: Tensor) -> tuple[Tensor, Tensor, list[float]]:
        with torch.autocast("cpu", torch.bfloat16):
            states = hidden_of(model, ids)
            logits = model.logits(states)
            return logits, *eagle_loss(head, ids, states, logits)

    def loss_at(step: int) -> Tensor:
        eagle_weight, loop_weight = next(weights for end, *weights in JOINT_WEIGHTS if step < end)
        if step % 2:
            ids, repeated = own.batch_at(step // 2)
            logits, foresight, _ = losses_at(step, ids)
            return loop_weight * unlikelihood_loss(ids, repeated, logits) + eagle_weight * foresight
        ids = batch_at(tokens, step, SEED + 5, 256, 8)
        logits, foresight, _ = losses_at(step, ids)
        before = logits.float().unflatten(0, (8, -1))[:, :-1].flatten(0, 1)
        return F.cross_entropy(before, ids[:, 1:].flatten()) + eagle_weight * foresight

    def held_out(step: int) -> dict[str, float]:
        with torch.no_grad():
            results = [losses_at(step, batch_at(unseen, i, SEED + 1, 256, 8))[1:] for i in range(2)]
            language = language_loss(model, batch_at(unseen, 0, SEED + 1, 512, 8)).item()
        return {**mean_agreement(results), "language_loss": language, "repeated_share": own.repeated_share()}

    optimisers = [*optimisers_for(model, lr_scale=0.1), *optimisers_for(head, lr_scale=0.5)]
    train("joint", both, loss_at, held_out, steps, work, 40, optimisers)


# --- more drafts for the target as it is shipped ------------------------------------------------------------------


def shipped_target() -> LlamaForCausalLM:
    return load_target(SHIPPED_FOLDER / "target", torch.float32, torch.device("cpu"))


@app.command()
def write_again(count: int = 1536, work: WorkFolder = Path("build/train_tiny")) -> None:
    """As `write`, by the target as it is shipped: shipped_text.npy, for the stages that follow."""
    prepare(work)
    write_text(shipped_target(), work / "train.npy", count, 6, work / "shipped_text.npy")


def load_draft(name: str, draft: nn.Module, work: Path) -> None:
    draft.load_state_dict(torch.load(work / f"{name}.pt", weights_only=True)["model"])
    draft.requires_grad_(False).eval()


def draft_stage(
    name: str, draft: nn.Module, loss_on: Callable[[Tensor], tuple[Tensor, list[float]]], steps: int, work: Path,
    lr_scale: float = 1.0, batch: int = 8,
) -> None:  # fmt: skip
    """Train a draft model of the shipped target, one step on source text and one on the target's own in turn."""
    corpora = [np.load(work / f"{text}.npy") for text in ("train", "shipped_text")]
    unseen = np.load(work / "held_out.npy")

    def loss_at(step: int) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return loss_on(batch_at(corpora[step % 2], step, SEED, 256, batch))[0]

    def held_out(step: int) -> dict[str, float]:
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            return mean_agreement([loss_on(batch_at(unseen, i, SEED + 1, 256, 8)) for i in range(2)])

    train(name, draft, loss_at, held_out, steps, work, 25, optimisers_for(draft, lr_scale))


def start_from_nothing(draft: nn.Module) -> None:
    """Random matrices, but a layer that adds nothing to what comes in."""
    for name, p in draft.named_parameters():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            nn.init.zeros_(p)
        elif p.ndim == 2:
            nn.init.normal_(p, std=p.shape[1] ** -0.5)


def frequent_ids(work: Path, count: int) -> Tensor:
    """The `count` ids that are most frequent in what the drafts are trained on, ascending."""
    shares = [
        np.bincount(tokens, minlength=VOCAB_SIZE) / len(tokens)
        for tokens in (np.load(work / f"{text}.npy") for text in ("train", "shipped_text"))
    ]
    return torch.from_numpy(np.sort(np.argsort(-sum(shares), kind="stable")[:count]))


def new_eagle3(model: LlamaForCausalLM) -> Eagle3Head:
    return Eagle3Head(Eagle3Config(EAGLE3, DRAFT_VOCAB_SIZE, FEATURE_LAYERS), model)


@torch.no_grad()
def feature_scale(fused: FusedTarget, work: Path) -> Tensor:
    """(3H): what makes each of the target's three features as loud as 1; as they come, they are 36 to 126.

    Beside those, what a layer adds in its first thousand steps would not be heard. The factors are folded into `fc`
    when the head is published.
    """
    ids = batch_at(np.load(work / "train.npy"), 0, SEED, 256, 8)
    features = fused(ids.flatten(), positions_of(ids), causal_attention(8)).unflatten(1, (4, -1))[:, :3]
    return features.square().mean(dim=(0, 2)).rsqrt().repeat_interleave(features.shape[2])


@torch.no_grad()
def rebuild_eagle(head: Eagle3Head, fused: FusedTarget, scale: Tensor, work: Path) -> None:
    """Begin with what the EAGLE head knows, as far as EAGLE-3's form can say it: about two thirds of its guesses.

    EAGLE: x = A e + B h; y = x + attention(x). EAGLE-3: y = r + attention(e, r), normed, where r is the residual, made
    of features or fed back. So fc makes the high feature the final hidden state h, as well as one product can; six
    heads attend their own row, and bring A e + (B - 1) h from there; the other six are EAGLE's. A head attends its own
    row if queries and keys are the same for all tokens, but for their rotation: w makes about 1 of every token.
    """
    eagle, size = (
        load_eagle(SHIPPED_FOLDER / "eagle", fused.target, torch.float32, torch.device("cpu")),
        TARGET.hidden_size,
    )
    ids = batch_at(np.load(work / "train.npy"), 0, SEED, 256, 8)
    states = (fused(ids.flatten(), positions_of(ids), causal_attention(8)) * scale).unflatten(0, (8, -1))
    high, final = states[..., 2 * size :].split(size, dim=-1)
    embeds = fused.target.embed_tokens(ids[:, 1:])
    head.fc.weight.zero_()
    head.fc.weight[:, 2 * size :] = torch.linalg.lstsq(high.flatten(0, 1), final.flatten(0, 1)).solution.T

    layer, theirs = head.midlayer, eagle.layers[0]
    fed = []
    for norm, inside in ((layer.input_layernorm, embeds), (layer.hidden_norm, final[:, :-1])):
        nn.init.constant_(norm.weight, inside.square().mean().sqrt().item())
        fed.append(norm(inside).flatten(0, 1))
    both = torch.cat(fed, dim=1)
    little = 1e-3 * len(both) * both.square().mean(dim=0).diag()
    w = torch.linalg.solve(both.T @ both + little, both.sum(dim=0))
    turning = torch.zeros(EAGLE3.head_dim)
    turning[:8:2] = (8 * EAGLE3.head_dim**0.5) ** 0.5  # in the four fastest pairs, so that the own row stands out
    own_row = torch.outer(turning, w).repeat(6, 1)
    mixed = eagle.fc.weight.clone()  # [A | B]
    q, k, v = (theirs.self_attn.qkv_proj.weight @ mixed).split([192, 64, 64])
    k, v = (x.unflatten(0, (2, -1)).repeat_interleave(3, dim=0).flatten(0, 1) for x in (k, v))
    mixed[:, size:] -= torch.eye(size)
    layer.self_attn.qkv_proj.weight.copy_(torch.cat([own_row, q, own_row, k, mixed, v]))
    layer.self_attn.o_proj.weight.copy_(torch.cat([torch.eye(size), theirs.self_attn.o_proj.weight], dim=1))
    layer.post_attention_layernorm.load_state_dict(theirs.post_attention_layernorm.state_dict())
    layer.mlp.load_state_dict(theirs.mlp.state_dict())
    head.lm_head.weight.copy_(fused.target.lm_head.weight[head.draft_to_target])
    nn.init.constant_(head.norm.weight, final.square().mean().sqrt().item())


@app.command()
def eagle3(steps: int = 700, work: WorkFolder = Path("build/train_tiny")) -> None:
    """The EAGLE-3 head, which begins as the EAGLE head in another form."""
    torch.manual_seed(SEED)
    model = shipped_target()
    fused, head = FusedTarget(model, FEATURE_LAYERS), new_eagle3(model)
    scale = F.pad(feature_scale(fused, work), (0, TARGET.hidden_size), value=1.0)
    head.d2t.copy_(frequent_ids(work, DRAFT_VOCAB_SIZE) - torch.arange(DRAFT_VOCAB_SIZE))
    rebuild_eagle(head, fused, scale, work)

    def loss_on(ids: Tensor) -> tuple[Tensor, list[float]]:
        with torch.no_grad():
            states = fused(ids.flatten(), positions_of(ids), causal_attention(len(ids)))
            logits = fused.logits(states)
        return eagle3_loss(head, ids, states * scale, logits)

    draft_stage("eagle3", head, loss_on, steps, work, lr_scale=0.5)


@torch.no_grad()
def start_from_eagle(draft: MTPLayer | FrozenKVAssistant, model: LlamaForCausalLM, work: Path) -> None:
    """Make a draft that says about what the EAGLE head says; the assistant, which attends otherwise, less so.

    It has norms where the head has none. Each gets as weight the loudness of what the head has there.
    """
    head = load_eagle(SHIPPED_FOLDER / "eagle", model, torch.float32, torch.device("cpu"))
    ids = batch_at(np.load(work / "train.npy"), 0, SEED, 256, 8)
    states = hidden_of(model, ids).unflatten(0, (8, -1))
    embeds, said = model.embed_tokens(ids[:, 1:]), next(unrolled(head, ids, states, 1))
    mixed = head.fc(torch.cat([embeds, states[:, :-1]], dim=-1))
    norms = [(draft.enorm, embeds), (draft.hnorm, states), (draft.norm, said)]
    if isinstance(draft, MTPLayer):
        norms.append((draft.decoder.input_layernorm, mixed))
        draft.eh_proj.load_state_dict(head.fc.state_dict())
        draft.decoder.load_state_dict(head.layers[0].state_dict(), strict=False)
    else:
        start_from_nothing(draft)
        draft.pre_projection.load_state_dict(head.fc.state_dict())
        draft.layers[0].mlp.load_state_dict(head.layers[0].mlp.state_dict())
        draft.layers[0].post_attention_layernorm.load_state_dict(head.layers[0].post_attention_layernorm.state_dict())
    for norm, inside in norms:
        nn.init.constant_(norm.weight, inside.square().mean().sqrt().item())


@app.command()
def mtp(steps: int = 600, work: WorkFolder = Path("build/train_tiny")) -> None:
    """Three MTP layers, which begin as copies of the EAGLE head."""
    torch.manual_seed(SEED)
    model = shipped_target()
    layers = MTPLayers(EAGLE, model, MTP_LAYERS)
    for i in range(MTP_LAYERS):
        start_from_eagle(layers[i], model, work)

    def loss_on(ids: Tensor) -> tuple[Tensor, list[float]]:
        with torch.no_grad():
            states = hidden_of(model, ids)
            logits = model.logits(states)
        return mtp_loss(layers, ids, states, logits)

    draft_stage("mtp", layers, loss_on, steps, work, lr_scale=0.5)


def new_assistant(model: LlamaForCausalLM) -> FrozenKVAssistant:
    return FrozenKVAssistant(FROZEN_KV, model, FROZEN_KV_LAYERS)


@app.command()
def frozen_kv(steps: int = 500, work: WorkFolder = Path("build/train_tiny")) -> None:
    """The frozen-KV assistant, over the keys and values of two of the target's layers."""
    torch.manual_seed(SEED)
    model = shipped_target()
    assistant, unroll = new_assistant(model), 4
    start_from_eagle(assistant, model, work)

    def loss_on(ids: Tensor) -> tuple[Tensor, list[float]]:
        with torch.no_grad():
            attend = KeptAttention(len(ids), rows=ids.shape[1] - unroll)
            states = model(ids.flatten(), positions_of(ids), attend)
            logits = model.logits(states)
        return frozen_kv_loss(assistant, ids, states, logits, attend, unroll)

    draft_stage("frozen_kv", assistant, loss_on, steps, work)


# --- measure and publish --------------------------------------------------------------------------------------


def held_out_prompts(tokenizer: Tokenizer, count: int, length: int = 64) -> list[list[int]]:
    """Pieces of files that were never trained on, from the start of a line, spread over all of them."""
    rng = np.random.default_rng([SEED, 4])
    texts = [read_source(path).splitlines(keepends=True) for name, path in corpus_files() if is_held_out(name)]
    texts = [lines for lines in texts if len(lines) > 30]
    prompts = []
    while len(prompts) < count:
        lines = texts[len(prompts) % len(texts)]
        start = int(rng.integers(0, len(lines) - 20))
        prompts.append(tokenizer.encode("".join(lines[start : start + 40])).ids[:length])
    return prompts


MEASURED = SamplingParams(max_new_tokens=128, ignore_eos=True)


def loopless(target: Path | str, prompts: list[list[int]]) -> tuple[list[float], list[list[int]]]:
    """Distinct 4-grams in the target's greedy text, their share after each prompt; and the prompts that do not loop."""
    ratios = [distinct_4gram_ratio(output.token_ids) for output in Engine(target).generate(prompts, MEASURED)]
    return ratios, [prompt for prompt, ratio in zip(prompts, ratios, strict=True) if ratio > LOOP_THRESHOLD]


def accept_length(target: Path | str, draft: Path | None, spec: SpecConfig, prompts: list[list[int]]) -> float:
    """Tokens for each round, bonus included: the mean over the prompts of each one's mean."""
    outputs = Engine(target, draft, spec, kv_slots=32768).generate(prompts, MEASURED)
    return sum(sum(output.accept_lens) / len(output.accept_lens) for output in outputs) / len(outputs)


def measure(target_folder: Path, draft_folder: Path, prompts: list[list[int]]) -> dict[str, Any]:
    """Loops of the target's greedy text, and accept lengths on the prompts whose text does not loop."""
    ratios, calm = loopless(target_folder, prompts)
    lengths = {
        (k, steps, n, exact): accept_length(
            target_folder,
            draft_folder,
            SpecConfig(topk=k, num_steps=steps, num_draft_tokens=n, exact_branch_kv=exact),
            calm,
        )
        for exact in (False, True)
        for k, steps, n in SHAPES
    }
    return {"ratios": ratios, "calm": len(calm), "accept_lengths": lengths}


def load_joint(work: Path) -> tuple[LlamaForCausalLM, EagleHead]:
    """Target and head as they came out of `joint`, the embedding's factor folded into the head."""
    state = torch.load(work / "joint.pt", weights_only=True)["model"]
    target_model = LlamaForCausalLM(TARGET)
    head = EagleHead(EAGLE, target_model)
    for part, name in ((target_model, "target."), (head, "head.")):
        part.load_state_dict({k.removeprefix(name): v for k, v in state.items() if k.startswith(name)})
        part.requires_grad_(False).eval()
    # The factor that the head was trained with is that of the target before the joint stage.
    head.fc.weight[:, : EAGLE.hidden_size] *= loud_embedding(load_trained("unlooped", TARGET, work), work).factor
    return target_model, head


@app.command()
def publish(
    work: WorkFolder = Path("build/train_tiny"), out: Path = SHIPPED_FOLDER, curves: Path = Path("docs/training")
) -> None:
    """Write the shipped folders and the loss curves; print the figures that the model cards give."""
    tokenizer = prepare(work)
    target_model, head = load_joint(work)
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    save_checkpoint(target_model, out / "target", ends)
    save_checkpoint(head, out / "eagle", ends)
    save_checkpoint(load_trained("standalone", STANDALONE, work), out / "standalone", ends)
    for folder in ("target", "standalone"):
        shutil.copyfile(work / "tokenizer.json", out / folder / "tokenizer.json")
    curves.mkdir(parents=True, exist_ok=True)
    for stage in ("target", "unlooped", "eagle", "joint", "standalone"):
        for kind in ("csv", "png"):
            shutil.copyfile(work / f"{stage}.{kind}", curves / f"{stage}.{kind}")
    figures = measure(out / "target", out / "eagle", held_out_prompts(tokenizer, 64))
    console.print(figures)
    (work / "figures.json").write_text(json.dumps({str(key): str(value) for key, value in figures.items()}))


@app.command()
def publish_drafts(
    work: WorkFolder = Path("build/train_tiny"), out: Path = SHIPPED_FOLDER, curves: Path = Path("docs/training")
) -> None:
    """Write the folders and the loss curves of EAGLE-3, MTP and frozen-KV."""
    model = shipped_target()
    head, layers, assistant = new_eagle3(model), MTPLayers(EAGLE, model, MTP_LAYERS), new_assistant(model)
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    for name, draft in (("eagle3", head), ("mtp", layers), ("frozen_kv", assistant)):
        load_draft(name, draft, work)
        if draft is head:
            head.fc.weight *= feature_scale(FusedTarget(model, FEATURE_LAYERS), work)
        save_checkpoint(draft, out / name.replace("_", "-"), ends)
        for kind in ("csv", "png"):
            shutil.copyfile(work / f"{name}.{kind}", curves / f"{name}.{kind}")


@app.command()
def measure_drafts(algorithms: str = "eagle,eagle3,mtp,multi-layer,frozen-kv", count: int = 64) -> None:
    """Print the accept lengths that the drafts' cards give, of the weights as they are shipped."""
    tokenizer = load_tokenizer(SHIPPED_FOLDER / "target")
    assert tokenizer
    _, calm = loopless("tiny", held_out_prompts(tokenizer, count))
    console.print(f"{len(calm)} of {count} prompts do not loop")
    for algorithm in algorithms.split(","):
        for k, steps, n in ((1, 3, 4),) if algorithm == "multi-layer" else ((1, 3, 4), *SHAPES):
            spec = SpecConfig(algorithm=algorithm, topk=k, num_steps=steps, num_draft_tokens=n)
            console.print(f"{algorithm} {k}, {steps}, {n}: {accept_length('tiny', None, spec, calm):.2f}")


@app.command(name="all")
def every_stage(work: WorkFolder = Path("build/train_tiny")) -> None:
    """All stages, one after the other; those that are done are passed over."""
    target(work=work)
    unloop(work=work)
    if not (work / "written.npy").is_file():
        write(work=work)
    eagle(work=work)
    joint(work=work)
    standalone(work=work)
    publish(work=work)
    if not (work / "shipped_text.npy").is_file():
        write_again(work=work)
    eagle3(work=work)
    mtp(work=work)
    frozen_kv(work=work)
    publish_drafts(work=work)
    measure_drafts()


if __name__ == "__main__":
    app()
