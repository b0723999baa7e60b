"""Weights in the Hugging Face layout: a folder with `config.json`, safetensors and, for a target, `tokenizer.json`.

Two differences lie between the file and the model. Files keep q, k, v and gate, up apart, the model runs each
group as one product. And files pair rotary dimension i with i + dim/2, the model keeps a pair side by side
(see `llama.rotate`). Both are settled here, so that no other module has to know.

A folder that does not fit is refused with a CheckpointError that names the file, the tensor and the remedy;
nothing is guessed, filled in or ignored.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor, nn

from refspec.config import require_int
from refspec.models.eagle import EagleHead
from refspec.models.eagle3 import Eagle3Config, Eagle3Head, check_d2t
from refspec.models.frozen_kv import FrozenKVAssistant
from refspec.models.llama import LlamaConfig, LlamaForCausalLM
from refspec.models.mtp import MTPLayers

TARGET_ARCHITECTURE = "LlamaForCausalLM"
EAGLE_ARCHITECTURE = "LlamaForCausalLMEagle"
EAGLE3_ARCHITECTURE = "LlamaForCausalLMEagle3"
MTP_ARCHITECTURE = "LlamaForCausalLMNextN"
FROZEN_KV_ARCHITECTURE = "LlamaAssistantForCausalLM"
ARCHITECTURES: dict[str, type[nn.Module]] = {
    TARGET_ARCHITECTURE: LlamaForCausalLM,
    EAGLE_ARCHITECTURE: EagleHead,
    EAGLE3_ARCHITECTURE: Eagle3Head,
    MTP_ARCHITECTURE: MTPLayers,
    FROZEN_KV_ARCHITECTURE: FrozenKVAssistant,
}

# The weights that come with the package, by the name that Engine(target=..., draft=...) takes.
SHIPPED_FOLDER = Path(__file__).parent / "tiny"
SHIPPED = {
    "tiny": "target",
    "tiny-eagle": "eagle",
    "tiny-standalone": "standalone",
    "tiny-eagle3": "eagle3",
    "tiny-mtp": "mtp",
    "tiny-frozen-kv": "frozen-kv",
}

AnyModel = LlamaForCausalLM | EagleHead | Eagle3Head | MTPLayers | FrozenKVAssistant
Model = TypeVar("Model", bound=AnyModel)


class CheckpointError(ValueError):
    """A model folder that cannot be loaded as it is."""


def find_checkpoint(name_or_folder: str | Path) -> Path:
    """The folder of a shipped model's name, or of a path. Raises CheckpointError when there is none."""
    if str(name_or_folder) in SHIPPED:
        folder = SHIPPED_FOLDER / SHIPPED[str(name_or_folder)]
        remedy = "reinstall refspec, or train the weights with scripts/train_tiny.py"
    else:
        folder = Path(name_or_folder).expanduser()
        remedy = f"give a folder in the Hugging Face layout, or one of the shipped models: {', '.join(SHIPPED)}"
    if not folder.is_dir():
        raise CheckpointError(f"no model folder at {folder}: {remedy}")
    return folder


def load_target(folder: Path, dtype: torch.dtype, device: torch.device) -> LlamaForCausalLM:
    """A LLaMA-style causal language model, ready for inference. Raises CheckpointError."""
    config = read_config(folder, TARGET_ARCHITECTURE)
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    weights = dict(read_tensors(folder))
    if config.tie_word_embeddings:
        weights.pop("lm_head.weight", None)  # some writers store the tied matrix twice
    return _fill(model, config, weights, folder, dtype, device)


def load_eagle(folder: Path, target: LlamaForCausalLM, dtype: torch.dtype, device: torch.device) -> EagleHead:
    """An EAGLE-1/2 head over `target`, whose embedding and lm_head it shares. Raises CheckpointError."""
    config = read_config(folder, EAGLE_ARCHITECTURE)
    try:
        with torch.device("meta"):
            model = EagleHead(config, target)
    except ValueError as error:
        raise CheckpointError(f"{folder}: {error}") from None
    weights = dict(read_tensors(folder))
    # Published heads often carry a copy of the target's embedding; the target's own is used.
    weights.pop("embed_tokens.weight", None)
    return _fill(model, config, weights, folder, dtype, device)


def load_eagle3(folder: Path, target: LlamaForCausalLM, dtype: torch.dtype, device: torch.device) -> Eagle3Head:
    """An EAGLE-3 head over `target`, whose embedding it shares. Raises CheckpointError.

    Of the published tables, d2t holds offsets (draft id to target id), and t2d says which of the target's ids are meant
    at all; the second only repeats the first, and has to agree with it.
    """
    config = read_config(folder, EAGLE3_ARCHITECTURE)
    raw = _read_json(folder / "config.json")
    weights = {
        # Some writers count the one layer.
        name.replace("layers.0.", "midlayer.", 1) if name.startswith("layers.0.") else name: tensor
        for name, tensor in read_tensors(folder)
    }
    weights.pop("embed_tokens.weight", None)  # as in EAGLE's
    try:
        eagle3 = _eagle3_config(config, raw)
        with torch.device("meta"):
            model = Eagle3Head(eagle3, target)
        d2t = _take_d2t(weights, eagle3)
    except ValueError as error:
        raise CheckpointError(f"{folder}: {error}") from None
    _fill(model, config, weights, folder, dtype, device)
    model.d2t = d2t.to(device)
    return model


def load_mtp(folder: Path, target: LlamaForCausalLM, dtype: torch.dtype, device: torch.device) -> MTPLayers:
    """The MTP layers of a folder over `target`, whose embedding and lm_head they share. Raises CheckpointError.

    Their number is num_nextn_predict_layers of config.json. Where that is absent, null or 0, there are none, and a
    folder of MTP layers without any is refused.
    """
    config = read_config(folder, MTP_ARCHITECTURE)
    count = _read_json(folder / "config.json").get("num_nextn_predict_layers") or 0
    try:
        require_int("num_nextn_predict_layers", count, at_least=0)
        if not count:
            raise ValueError("num_nextn_predict_layers is absent, null or 0: the folder holds no MTP layers")
        with torch.device("meta"):
            model = MTPLayers(config, target, count)
    except ValueError as error:
        raise CheckpointError(f"{folder / 'config.json'}: {error}") from None
    weights = dict(read_tensors(folder))
    for i in range(count):  # DeepSeek's come with copies of the target's own
        for copy in ("embed_tokens", "shared_head.head"):
            weights.pop(f"model.layers.{i}.{copy}.weight", None)
    return _fill(model, config, weights, folder, dtype, device)


def load_frozen_kv(
    folder: Path, target: LlamaForCausalLM, dtype: torch.dtype, device: torch.device
) -> FrozenKVAssistant:
    """A frozen-KV assistant over `target`, whose embedding, lm_head and cache it shares. Raises CheckpointError."""
    config = read_config(folder, FROZEN_KV_ARCHITECTURE)
    layers = _read_json(folder / "config.json").get("target_layers")
    try:
        with torch.device("meta"):
            model = FrozenKVAssistant(config, target, _layer_ids("target_layers", layers))
    except ValueError as error:
        raise CheckpointError(f"{folder}: {error}") from None
    return _fill(model, config, dict(read_tensors(folder)), folder, dtype, device)


def _eagle3_config(config: LlamaConfig, raw: dict[str, Any]) -> Eagle3Config:
    """What an EAGLE-3 folder says beside the layer's sizes. Raises ValueError.

    eagle_aux_hidden_state_layer_ids, where given, names the layers whose outputs are the features.
    """
    own = raw.get("eagle_config") or {}
    for flag in ("norm_before_fc", "fc_norm", "use_aux_norm", "norm_output", "bias"):
        if own.get(flag) or raw.get(flag):
            raise ValueError(f"{flag} is set, which this model code does not compute")
    if (theirs := raw.get("target_hidden_size")) not in (None, config.hidden_size):
        raise ValueError(f"target_hidden_size is {theirs}, hidden_size {config.hidden_size}: they must be equal here")
    size = raw.get("draft_vocab_size")
    if size is not None and (isinstance(size, bool) or not isinstance(size, int)):
        raise ValueError(f"draft_vocab_size is {size!r}, it must be a whole number")
    outputs = own.get("eagle_aux_hidden_state_layer_ids")
    layers = None
    if outputs is not None:
        layers = tuple(layer + 1 for layer in _layer_ids("eagle_aux_hidden_state_layer_ids", outputs))
    return Eagle3Config(config, config.vocab_size if size is None else size, layers)


def _layer_ids(name: str, given: object) -> list[int]:
    """Raises ValueError, naming the field, unless it is a list of whole numbers."""
    if not isinstance(given, list) or any(isinstance(layer, bool) or not isinstance(layer, int) for layer in given):
        raise ValueError(f"{name} is {given!r}, it must be a list of layers")
    return given


def _take_d2t(weights: dict[str, Tensor], config: Eagle3Config) -> Tensor:
    """Take the tables out of `weights`: d2t, i64 (draft_vocab_size). Raises ValueError for one that makes no sense."""
    size, d2t, t2d = config.draft_vocab_size, weights.pop("d2t", None), weights.pop("t2d", None)
    if d2t is None:
        if size != config.vocab_size:
            raise ValueError(
                f"draft_vocab_size is {size}, vocab_size {config.vocab_size}, and there is no table d2t between them"
            )
        return torch.zeros(size, dtype=torch.int64)
    if d2t.dtype not in (torch.int32, torch.int64) or d2t.shape != (size,):
        raise ValueError(f"d2t is {d2t.dtype} {tuple(d2t.shape)}, it must be whole numbers, draft_vocab_size = {size}")
    d2t = d2t.long()
    check_d2t(d2t, config.vocab_size)
    if t2d is not None:
        meant = torch.zeros(config.vocab_size, dtype=torch.bool)
        meant[d2t + torch.arange(size)] = True
        if not torch.equal(t2d.bool(), meant):
            raise ValueError("t2d names other ids than d2t leads to")
    return d2t


def load_tokenizer(folder: Path) -> Tokenizer | None:
    """The tokenizer of a model folder; None where it has none, and prompts must be ids. Raises CheckpointError."""
    file = folder / "tokenizer.json"
    if not file.is_file():
        return None
    try:
        return Tokenizer.from_file(str(file))
    except Exception as error:  # tokenizers raises bare Exception
        raise CheckpointError(f"{file} is no tokenizer that can be read: {error}") from None


def architecture_of(folder: Path) -> str:
    """One of the architectures above. Raises CheckpointError for a folder of another one."""
    found = str((_read_json(folder / "config.json").get("architectures") or ["(none given)"])[0])
    if found not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise CheckpointError(f"{folder / 'config.json'}: architecture {found}, which is none of: {known}")
    return found


def read_config(folder: Path, architecture: str) -> LlamaConfig:
    """What the models read of `config.json`. Raises CheckpointError."""
    raw = _read_json(folder / "config.json")
    found = (raw.get("architectures") or ["(none given)"])[0]
    if found != architecture:
        raise CheckpointError(f"{folder / 'config.json'}: architecture {found} where {architecture} is needed")

    def number(name: str, value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise ValueError(f"{name} is {value!r}, it must be a number")
        return value

    def whole(name: str, value: Any) -> int:
        if number(name, value) != int(value):
            raise ValueError(f"{name} is {value!r}, it must be a whole number")
        return int(value)

    def require(condition: bool, complaint: str) -> None:
        if not condition:
            raise CheckpointError(f"{folder / 'config.json'}: {complaint}, which this model code does not compute")

    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    require(isinstance(rope, dict), f"rope_scaling is {rope!r}")
    require(raw.get("hidden_act", "silu") == "silu", f"hidden_act is {raw.get('hidden_act')!r} (not silu)")
    require(rope.get("rope_type", rope.get("type", "default")) == "default", f"rotary embeddings are scaled ({rope})")
    for flag in ("attention_bias", "mlp_bias"):
        require(not raw.get(flag), f"{flag} is set")
    try:
        heads = whole("num_attention_heads", raw["num_attention_heads"])
        config = LlamaConfig(
            vocab_size=whole("vocab_size", raw["vocab_size"]),
            hidden_size=whole("hidden_size", raw["hidden_size"]),
            intermediate_size=whole("intermediate_size", raw["intermediate_size"]),
            num_hidden_layers=whole("num_hidden_layers", raw["num_hidden_layers"]),
            num_attention_heads=heads,
            num_key_value_heads=whole("num_key_value_heads", raw.get("num_key_value_heads") or heads),
            head_dim=whole("head_dim", raw.get("head_dim") or whole("hidden_size", raw["hidden_size"]) // heads),
            max_position_embeddings=whole("max_position_embeddings", raw["max_position_embeddings"]),
            rms_norm_eps=number("rms_norm_eps", raw.get("rms_norm_eps", 1e-6)),
            rope_theta=number("rope_theta", rope.get("rope_theta", raw.get("rope_theta", 10000.0))),
            tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
            eos_token_ids=_eos_token_ids(folder, raw),
        )
    except KeyError as error:
        raise CheckpointError(f"{folder / 'config.json'}: the field {error} is missing") from None
    except (TypeError, ValueError, ZeroDivisionError) as error:
        raise CheckpointError(f"{folder / 'config.json'}: {error}") from None
    return config


def read_tensors(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of the folder's safetensors, one file or shards by index. Raises CheckpointError."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        weight_map = _read_json(index).get("weight_map", {})
        files = [folder / name for name in sorted(set(weight_map.values()))]
    else:
        files = [folder / "model.safetensors"]
    for file in files:
        if not file.is_file():
            raise CheckpointError(f"no weights at {file}: only safetensors are read")
        try:
            with safe_open(file, framework="pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118 - safe_open is no mapping
                    if not name.endswith("rotary_emb.inv_freq"):  # a constant that old writers stored
                        yield name, tensors.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{file} is damaged or cut short ({error}): fetch it again") from None


def save_checkpoint(
    model: AnyModel,
    folder: Path,
    extra: dict[str, Any] | None = None,
    dtype: torch.dtype = torch.float16,
) -> None:
    """Write `config.json` and `model.safetensors` so that the loaders above read the same model back.

    extra: further fields for config.json (bos_token_id, eos_token_id, ...).
    Raises ValueError for a model with sliding windows, which would be read back without them.
    """
    config = model.config.layer if isinstance(model, Eagle3Head) else model.config
    if config.windows:
        raise ValueError(
            f"windows is {config.windows}, but config.json has no field for them here: nothing was written"
        )
    tensors: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        for part in _file_parts(model, name, len(parameter), config):
            tensors[part.name] = part.to_file(parameter.detach()).to("cpu", dtype).contiguous()
    raw = {
        "architectures": [name for name, kind in ARCHITECTURES.items() if isinstance(model, kind)],
        "model_type": "llama",
        "hidden_act": "silu",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "tie_word_embeddings": config.tie_word_embeddings,
        "torch_dtype": str(dtype).removeprefix("torch."),
    }
    if isinstance(model, Eagle3Head):
        raw["draft_vocab_size"] = model.config.draft_vocab_size
        if model.config.feature_layers is not None:
            outputs = [layer - 1 for layer in model.config.feature_layers]
            raw["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": outputs}
        tensors["d2t"] = model.d2t.cpu()
        tensors["t2d"] = torch.zeros(config.vocab_size, dtype=torch.bool)
        tensors["t2d"][model.draft_to_target.cpu()] = True
    if isinstance(model, MTPLayers):
        raw["num_nextn_predict_layers"] = len(model)
    if isinstance(model, FrozenKVAssistant):
        raw["target_layers"] = list(model.target_layers)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**raw, **(extra or {})}, indent=2) + "\n", encoding="utf-8")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@dataclass(frozen=True)
class _FilePart:
    """One tensor of the file: rows `start` to `stop` of a model parameter, its rotary pairs in the file's order."""

    name: str
    start: int
    stop: int
    rotary_dim: int = 0

    def to_model(self, tensor: Tensor) -> Tensor:
        if not self.rotary_dim:
            return tensor
        return tensor.unflatten(0, (-1, 2, self.rotary_dim // 2)).transpose(1, 2).flatten(0, 2)

    def to_file(self, parameter: Tensor) -> Tensor:
        rows = parameter[self.start : self.stop]
        if not self.rotary_dim:
            return rows
        return rows.unflatten(0, (-1, self.rotary_dim // 2, 2)).transpose(1, 2).flatten(0, 2)


def _file_name(model: AnyModel, name: str) -> str:
    """What the model's parameter `name` is called in the file, but for those that are kept there in parts."""
    if isinstance(model, LlamaForCausalLM):
        return name if name.startswith("lm_head") else f"model.{name}"
    if isinstance(model, MTPLayers):  # as in DeepSeek's: layers.0.norm is layers.0.shared_head.norm there
        name = name.replace(".decoder.", ".")
        return "model." + re.sub(r"^(layers\.\d+)\.norm\.", r"\1.shared_head.norm.", name)
    return name


def _file_parts(model: AnyModel, name: str, rows: int, config: LlamaConfig) -> list[_FilePart]:
    """Which tensors of the file make up the `rows` rows of the model's parameter `name`, in order."""
    full = _file_name(model, name)
    if "qkv_proj" in name:
        q_rows = config.num_attention_heads * config.head_dim
        kv_rows = config.num_key_value_heads * config.head_dim
        return [
            _FilePart(full.replace("qkv_proj", "q_proj"), 0, q_rows, config.head_dim),
            _FilePart(full.replace("qkv_proj", "k_proj"), q_rows, q_rows + kv_rows, config.head_dim),
            _FilePart(full.replace("qkv_proj", "v_proj"), q_rows + kv_rows, q_rows + 2 * kv_rows),
        ]
    if "q_proj" in name:
        return [_FilePart(full, 0, rows, config.head_dim)]
    if "gate_up_proj" in name:
        return [
            _FilePart(full.replace("gate_up_proj", "gate_proj"), 0, rows // 2),
            _FilePart(full.replace("gate_up_proj", "up_proj"), rows // 2, rows),
        ]
    return [_FilePart(full, 0, rows)]


def _fill(
    model: Model,
    config: LlamaConfig,
    weights: dict[str, Tensor],
    folder: Path,
    dtype: torch.dtype,
    device: torch.device,
) -> Model:
    """Give every parameter of `model` (on the meta device) its values; use up every tensor of `weights`."""
    state = {}
    for name, parameter in model.named_parameters():
        values = []
        for part in _file_parts(model, name, len(parameter), config):
            if part.name not in weights:
                raise CheckpointError(f"{folder}: the tensor {part.name} is missing")
            tensor = weights.pop(part.name)
            expected = (part.stop - part.start, *parameter.shape[1:])
            if tuple(tensor.shape) != expected:
                raise CheckpointError(
                    f"{folder}: the tensor {part.name} has shape {tuple(tensor.shape)}, config.json asks for {expected}"
                )
            if not torch.isfinite(tensor).all():
                raise CheckpointError(f"{folder}: the tensor {part.name} holds NaN or infinite values")
            tensor = tensor.to(device, dtype)
            if not torch.isfinite(tensor).all():
                raise CheckpointError(f"{folder}: the tensor {part.name} holds values too large for {dtype}")
            values.append(part.to_model(tensor))
        whole = torch.cat(values)
        # Products of few rows, which is what decoding is made of, run faster on matrices stored by columns.
        state[name] = whole.t().contiguous().t() if whole.ndim == 2 and "embed" not in name else whole
    if weights:
        raise CheckpointError(
            f"{folder}: {len(weights)} tensors have no place in this architecture, the first is {sorted(weights)[0]}"
        )
    model.load_state_dict(state, assign=True, strict=False)
    if isinstance(model, LlamaForCausalLM) and model.config.tie_word_embeddings:
        model.lm_head.weight = model.embed_tokens.weight
    model.requires_grad_(False).eval()
    return model


def _eos_token_ids(folder: Path, raw: dict[str, Any]) -> tuple[int, ...]:
    """The ids that end a text: those of config.json and, where it exists, of generation_config.json."""
    found: list[int] = []
    generation = folder / "generation_config.json"
    for source in (raw, _read_json(generation) if generation.is_file() else {}):
        ids = source.get("eos_token_id")
        for token in ids if isinstance(ids, list) else [] if ids is None else [ids]:
            if not isinstance(token, int) or isinstance(token, bool):
                raise CheckpointError(f"{folder}: eos_token_id is {ids!r}, it must be an id or a list of ids")
            found.append(token)
    return tuple(sorted(set(found)))


def _read_json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        raise CheckpointError(f"no {file.name} in {file.parent}: this is no model folder in the Hugging Face layout")
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{file} is not valid JSON: {error}") from None
    if not isinstance(found, dict):
        raise CheckpointError(f"{file} holds no JSON object")
    return found
