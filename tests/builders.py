"""What many tests build, and what they ask of it afterwards.

Two kinds of models: scripted ones, whose next word is a function of the whole text before it and therefore tells
every bookkeeping error, and LLaMA-style ones with random weights, in float64 and in odd sizes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

from refspec import Engine, Generation, SamplingParams, SpecConfig
from refspec.contracts import ForwardBatch
from refspec.models.checkpoint import save_checkpoint
from refspec.models.eagle import EagleHead
from refspec.models.eagle3 import Eagle3Config, Eagle3Head
from refspec.models.frozen_kv import FrozenKVAssistant
from refspec.models.llama import LlamaConfig, LlamaForCausalLM
from refspec.models.mtp import MTPLayers
from refspec.models.scripted import ScriptedModel
from refspec.trace import Round, TreeRequest

NextLogits = Callable[[list[int]], Sequence[float]]

# --- scripted models ----------------------------------------------------------------------------------------------


def hash_of(context: Sequence[int], salt: int = 0) -> int:
    """A number that any change of the context changes."""
    return hash((salt, *context)) & 0xFFFFFFFFFFFFFFFF


def random_logits(vocab_size: int, salt: int = 0) -> NextLogits:
    """Logits between 0 and 4 that look random, another set for every context."""

    @functools.cache
    def of(context: tuple[int, ...]) -> list[float]:
        state, logits = hash_of(context, salt), []
        for _ in range(vocab_size):
            state = (state * 6364136223846793005 + 1442695040888963407) & 0xFFFFFFFFFFFFFFFF
            logits.append((state >> 33) / 2**29)
        return logits

    return lambda context: of(tuple(context))


def peaked_logits(vocab_size: int, salt: int = 0) -> NextLogits:
    """As random_logits, but one id has a probability above 0.99: the others share what is left."""
    below = random_logits(vocab_size, salt)

    def next_logits(context: list[int]) -> list[float]:
        logits = list(below(context))
        logits[hash_of(context, salt + 1) % vocab_size] = 16.0
        return logits

    return next_logits


def agreeing_now_and_then(target: NextLogits, other: NextLogits, one_in: int = 4) -> NextLogits:
    """A draft that knows the target's words, but in one of so many contexts says something else."""
    return lambda context: other(context) if hash_of(context, 7) % one_in == 0 else target(context)


def text_logits(text: Sequence[int], vocab_size: int) -> NextLogits:
    """The model that knows one text by heart: position p is followed by text[p + 1], whatever stands at p."""
    return lambda context: [
        9.0 if token == (text[len(context)] if len(context) < len(text) else 0) else 0.0 for token in range(vocab_size)
    ]


def scripted_engine(next_logits: NextLogits, vocab_size: int, spec: SpecConfig | None, **settings: object) -> Engine:
    """Target, and draft where there is one, both say next_logits."""
    model_settings = {name: settings.pop(name) for name in ("max_context", "eos_token_ids") if name in settings}
    model = ScriptedModel(next_logits, vocab_size, **model_settings)  # type: ignore[arg-type]
    return Engine(model, model if spec else None, spec, **settings)  # type: ignore[arg-type]


def ragged_prompts(count: int, longest: int, vocab_size: int) -> list[list[int]]:
    """Prompts of 1 to `longest` ids; the first has just so many."""
    lens = [longest, *(1 + (37 * i + longest // 2) % longest for i in range(1, count))]
    return [[hash_of([p, i]) % vocab_size for p in range(length)] for i, length in enumerate(lens)]


def prefix_slots(batch: ForwardBatch) -> list[list[int]]:
    """Of each request of a forward, the slots of its committed tokens."""
    return [
        batch.req_to_token[row, :length].tolist()
        for row, length in zip(batch.rows.tolist(), batch.prefix_lens, strict=True)
    ]


# --- models with random weights -----------------------------------------------------------------------------------


def llama_config(**changed: object) -> LlamaConfig:
    sizes: dict[str, object] = {
        "vocab_size": 23,
        "hidden_size": 24,
        "intermediate_size": 20,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 6,
        "max_position_embeddings": 512,
    }
    return LlamaConfig(**{**sizes, **changed})  # type: ignore[arg-type]


def random_llama(
    config: LlamaConfig | None = None, seed: int = 0, dtype: torch.dtype = torch.float64
) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    model = LlamaForCausalLM(config or llama_config()).to(dtype)
    _shake_norms(model)
    return model.requires_grad_(False).eval()


def random_head(target: LlamaForCausalLM, seed: int = 1, **changed: object) -> EagleHead:
    torch.manual_seed(seed)
    ours = target.config
    config = llama_config(vocab_size=ours.vocab_size, hidden_size=ours.hidden_size, num_hidden_layers=1)
    config = LlamaConfig(**{**vars(config), **changed})  # type: ignore[arg-type]
    head = EagleHead(config, target).to(target.lm_head.weight.dtype)
    _shake_norms(head)
    return head.requires_grad_(False).eval()


def random_eagle3(target: LlamaForCausalLM, ids: Sequence[int] = (2, 5, 6, 11), seed: int = 3) -> Eagle3Head:
    """A head that can propose the target's ids `ids` only. Its target is to be served as FusedTarget(target)."""
    torch.manual_seed(seed)
    ours = target.config
    layer = llama_config(vocab_size=ours.vocab_size, hidden_size=ours.hidden_size, num_hidden_layers=1)
    head = Eagle3Head(Eagle3Config(layer, len(ids)), target).to(target.lm_head.weight.dtype)
    head.d2t = torch.tensor(ids) - torch.arange(len(ids))
    _shake_norms(head)
    return head.requires_grad_(False).eval()


def random_mtp(target: LlamaForCausalLM, count: int = 3, seed: int = 4) -> MTPLayers:
    torch.manual_seed(seed)
    ours = target.config
    config = llama_config(vocab_size=ours.vocab_size, hidden_size=ours.hidden_size, num_hidden_layers=1)
    layers = MTPLayers(config, target, count).to(target.lm_head.weight.dtype)
    _shake_norms(layers)
    return layers.requires_grad_(False).eval()


def random_assistant(target: LlamaForCausalLM, layers: Sequence[int] = (0, 1), seed: int = 5) -> FrozenKVAssistant:
    torch.manual_seed(seed)
    config = replace(target.config, num_hidden_layers=len(layers))
    assistant = FrozenKVAssistant(config, target, layers).to(target.lm_head.weight.dtype)
    _shake_norms(assistant)
    return assistant.requires_grad_(False).eval()


def _shake_norms(model: torch.nn.Module) -> None:
    """Norm weights start as ones, and ones hide a weight that is not used."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)


def transparent_pair(seed: int = 2, vocab_size: int = 23) -> tuple[LlamaForCausalLM, EagleHead]:
    """A target, and an EAGLE head over it that guesses every hidden state right, in direction: draft = target.

    Prompts must begin with id 0, and id 0 is never the target's choice. The weights are random but for this:

    - Embeddings have the root mean square that the input norm leaves as it is, so a head without one sees the same.
    - The head's fc passes the embedding on, and its layer is the target's.
    - The head has no row for the first token, so the target must not attend it: dimension 2 of all queries is 1, that
      of the first token's keys (whose embedding alone has dimension 1) is very low. The rotation leaves both alone,
      since at this rope_theta the second pair of dimensions hardly turns.
    - The head has no final norm: its logits are the target's but for a positive factor for each row.

    Attention, positions, slots and masks matter here as they do in any model; the hidden states that the head is fed
    do not.
    """
    config = llama_config(
        vocab_size=vocab_size,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=4,
        rope_theta=1e30,
    )
    target = LlamaForCausalLM(config).double()
    torch.manual_seed(seed)
    layer, size = target.layers[0], config.hidden_size
    with torch.no_grad():
        for parameter in target.parameters():
            if parameter.ndim == 2:
                parameter.normal_(std=parameter.shape[1] ** -0.5)
        embedding = target.embed_tokens.weight
        embedding[:, 0], embedding[:, 1], embedding[0, 1] = 1, 0, 1
        rest = embedding[:, 2:]
        rest *= ((size * (1 - config.rms_norm_eps) - embedding[:, :2].square().sum(1)) / rest.square().sum(1)).sqrt()[
            :, None
        ]
        q, k, v = layer.self_attn.qkv_proj.weight.split([8, 4, 4])
        q = q.unflatten(0, (2, 4))
        q[:, 2:], k[2:] = 0, 0
        q[:, 2, 0], k[2, 1] = 1, -1e4
        for turned in (q[:, :2], k[:2], v):  # strong enough that who is attended decides what is said
            turned *= 4
        target.lm_head.weight *= 100  # so that every choice is a sure one
        target.lm_head.weight[0] = 0
        head = EagleHead(config, target).double()
        head.fc.weight.copy_(torch.cat([torch.eye(size), torch.zeros(size, size)], dim=1))
        head.layers[0].load_state_dict({n: p for n, p in layer.state_dict().items() if n != "input_layernorm.weight"})
    return target.requires_grad_(False).eval(), head.requires_grad_(False).eval()


# --- folders ------------------------------------------------------------------------------------------------------


def byte_tokenizer() -> Tokenizer:
    """256 ids, one for each byte: id b is byte b."""
    return tokenizer_of([bytes([byte]) for byte in range(256)])


def tokenizer_of(tokens: Sequence[bytes]) -> Tokenizer:
    """Id i stands for the bytes tokens[i], which need not be whole characters. Only single bytes can be encoded."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    symbols = {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}
    tokenizer = Tokenizer(BPE({"".join(symbols[byte] for byte in token): i for i, token in enumerate(tokens)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def saved_target(folder: Path, model: LlamaForCausalLM, **extra: object) -> Path:
    """A model folder as it stands on disk, with a tokenizer where the vocabulary has one id for each byte."""
    save_checkpoint(model, folder, dict(extra), model.lm_head.weight.dtype)
    if model.config.vocab_size >= 256:
        byte_tokenizer().save(str(folder / "tokenizer.json"))
    return folder


def saved_head(folder: Path, head: EagleHead) -> Path:
    save_checkpoint(head, folder, dtype=head.fc.weight.dtype)
    return folder


# --- running, and what must hold ----------------------------------------------------------------------------------


class Watcher:
    """An observer that keeps the rounds, and after each of them asks the engine to check itself."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.rounds: list[Round] = []

    def __call__(self, round_: Round) -> None:
        self.engine.check()
        self.rounds.append(round_)

    @property
    def requests(self) -> list[TreeRequest]:
        """Every request's part of every round."""
        return [request for round_ in self.rounds for request in round_.requests]


def generate_watched(
    engine: Engine, prompts: Sequence[Sequence[int]], params: SamplingParams | Sequence[SamplingParams]
) -> tuple[list[Generation], Watcher]:
    """Generate with a check after every round; afterwards nothing may be held."""
    watcher = Watcher(engine)
    generations = engine.generate(list(prompts), params, watcher)
    assert_all_free(engine)
    return generations, watcher


def assert_all_free(engine: Engine) -> None:
    engine.check()
    assert engine.allocator.available() == engine.allocator.size
    assert sorted(engine.table.free_rows) == list(range(1, engine.table.req_to_token.shape[0]))
    assert not engine.scheduler.waiting
    assert not engine.scheduler.running.requests
    assert engine.scheduler.in_flight is None
    assert engine.scheduler.leaving == []


def assert_same_output(plain: Sequence[Generation], spec: Sequence[Generation]) -> None:
    assert [g.token_ids for g in spec] == [g.token_ids for g in plain]
    assert [g.finish_reason for g in spec] == [g.finish_reason for g in plain]
    assert [g.text for g in spec] == [g.text for g in plain]


def candidates_of(topk: int, num_steps: int) -> int:
    """Sizes as the literature gives them, counted level by level."""
    return sum(topk if level == 0 else topk * topk for level in range(num_steps))


# --- stop strings, the slow way -----------------------------------------------------------------------------------


def naive_stop(
    decode: Callable[[Sequence[int]], str], ids: Sequence[int], stops: Sequence[str], include: bool = False
) -> tuple[int, str, str | None]:
    """Everything is decoded again after each token: how many tokens are kept, their text, and the stop string."""
    for kept in range(1, len(ids) + 1):
        text = decode(ids[:kept])
        for start in range(len(text)):
            for stop in sorted(stops, key=len):
                if text.startswith(stop, start):
                    return kept, text[: start + len(stop) * include], stop
    return len(ids), decode(ids), None


def undecided_end(text: str, stops: Sequence[str]) -> int:
    """Characters at the end of a text that may still change, or turn out to be the start of a stop string."""
    decided = text.rstrip("\ufffd")
    held = [n for stop in stops for n in range(1, len(stop)) if decided.endswith(stop[:n])]
    return len(text) - len(decided) + max(held, default=0)
