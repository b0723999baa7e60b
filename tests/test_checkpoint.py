"""Model folders: what is saved is read back, and what does not fit is refused with the file and the thing named."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import (
    llama_config,
    random_assistant,
    random_eagle3,
    random_head,
    random_llama,
    random_mtp,
    saved_head,
    saved_target,
)
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from refspec.models.checkpoint import (
    SHIPPED,
    CheckpointError,
    architecture_of,
    find_checkpoint,
    load_eagle,
    load_eagle3,
    load_frozen_kv,
    load_mtp,
    load_target,
    load_tokenizer,
    save_checkpoint,
)
from refspec.models.llama import LlamaForCausalLM

CPU = torch.device("cpu")
F32 = torch.float32


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return saved_target(tmp_path / "model", random_llama(dtype=F32))


def load(folder: Path, dtype: torch.dtype = F32) -> LlamaForCausalLM:
    return load_target(folder, dtype, CPU)


def change_config(folder: Path, **fields: Any) -> None:
    """Set fields; None deletes one."""
    file = folder / "config.json"
    raw = {**json.loads(file.read_text()), **fields}
    file.write_text(json.dumps({name: value for name, value in raw.items() if value is not None}))


def change_tensors(folder: Path, change: Callable[[dict[str, Tensor]], None]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def refusal(folder: Path, dtype: torch.dtype = F32) -> str:
    with pytest.raises(CheckpointError) as error:
        load(folder, dtype)
    assert "\n" not in str(error.value)
    assert str(folder) in str(error.value)
    return str(error.value)


def assert_same_parameters(one: nn.Module, other: nn.Module) -> None:
    ours, theirs = dict(one.named_parameters()), dict(other.named_parameters())
    assert list(ours) == list(theirs)
    for name in ours:
        assert torch.equal(ours[name], theirs[name]), name


# --- there and back -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "sizes",
    [
        {},
        {"tie_word_embeddings": True},
        {"num_key_value_heads": 1, "head_dim": 10},
        {"num_hidden_layers": 1, "rope_theta": 500.0, "rms_norm_eps": 0.25, "max_position_embeddings": 7},
    ],
    ids=str,
)
def test_target_round_trip_is_exact(sizes: dict[str, object], tmp_path: Path) -> None:
    model = random_llama(llama_config(**sizes), dtype=F32)
    loaded = load(saved_target(tmp_path, model))
    assert_same_parameters(loaded, model)
    assert loaded.config == model.config
    assert not any(p.requires_grad for p in loaded.parameters())
    assert not any(p.is_meta for p in loaded.parameters())
    assert (loaded.lm_head.weight is loaded.embed_tokens.weight) == bool(sizes.get("tie_word_embeddings"))


def test_head_round_trip_is_exact(tmp_path: Path) -> None:
    target = random_llama(dtype=F32)
    head = random_head(target, num_hidden_layers=2)
    loaded = load_eagle(saved_head(tmp_path, head), target, F32, CPU)
    assert_same_parameters(loaded, head)
    assert loaded.shared == (target.embed_tokens, target.lm_head)


def test_file_has_the_names_and_shapes_of_hugging_face(folder: Path) -> None:
    shapes = {name: tuple(tensor.shape) for name, tensor in load_file(folder / "model.safetensors").items()}
    layer = "model.layers.1."
    assert {name.removeprefix(layer): shape for name, shape in shapes.items() if name.startswith(layer)} == {
        "input_layernorm.weight": (24,),
        "self_attn.q_proj.weight": (24, 24),
        "self_attn.k_proj.weight": (12, 24),
        "self_attn.v_proj.weight": (12, 24),
        "self_attn.o_proj.weight": (24, 24),
        "post_attention_layernorm.weight": (24,),
        "mlp.gate_proj.weight": (20, 24),
        "mlp.up_proj.weight": (20, 24),
        "mlp.down_proj.weight": (24, 20),
    }
    assert {name: shape for name, shape in shapes.items() if ".layers." not in name} == {
        "model.embed_tokens.weight": (23, 24),
        "model.norm.weight": (24,),
        "lm_head.weight": (23, 24),
    }


def test_rotary_rows_are_reordered_and_others_are_not(folder: Path) -> None:
    """File rows 0..5 of a head of dim 6 pair 0 with 3, 1 with 4, 2 with 5; the model has them side by side."""
    tensors = load_file(folder / "model.safetensors")
    fused = load(folder).layers[0].self_attn.qkv_proj.weight
    q, k, v = (tensors[f"model.layers.0.self_attn.{name}_proj.weight"] for name in "qkv")
    side_by_side = [0, 3, 1, 4, 2, 5]
    rows_q = [6 * head + row for head in range(4) for row in side_by_side]
    rows_k = [6 * head + row for head in range(2) for row in side_by_side]
    assert torch.equal(fused, torch.cat([q[rows_q], k[rows_k], v]))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_weights_are_loaded_in_the_dtype_asked_for(folder: Path, dtype: torch.dtype) -> None:
    assert {p.dtype for p in load(folder, dtype).parameters()} == {dtype}


def test_nothing_is_drawn_for_weights_that_are_loaded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To draw on the meta device, torch imports its compiler, and every command would take a second longer."""

    def draw(*_: object) -> None:
        raise AssertionError("drawn")

    monkeypatch.setattr("torch.nn.init.normal_", draw)
    load_target(folder, torch.float32, torch.device("cpu"))
    with pytest.raises(AssertionError, match="drawn"):
        nn.Embedding(2, 2)


def test_shards_by_index(folder: Path, tmp_path: Path) -> None:
    whole = load(folder)
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    shards = {"a-00001.safetensors": names[:5], "a-00002.safetensors": names[5:]}
    for file, part in shards.items():
        save_file({name: tensors[name] for name in part}, folder / file)
    weight_map = {name: file for file, part in shards.items() for name in part}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert_same_parameters(load(folder), whole)

    (folder / "a-00002.safetensors").unlink()
    assert "a-00002.safetensors" in refusal(folder)


def test_tied_matrix_that_was_stored_twice(tmp_path: Path) -> None:
    model = random_llama(llama_config(tie_word_embeddings=True), dtype=F32)
    folder = saved_target(tmp_path, model)
    change_tensors(folder, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    assert_same_parameters(load(folder), model)


def test_constant_that_old_writers_stored_is_passed_over(folder: Path) -> None:
    change_tensors(folder, lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(3)}))
    load(folder)


def test_copy_of_the_targets_embedding_in_a_head_is_passed_over(tmp_path: Path) -> None:
    target = random_llama(dtype=F32)
    folder = saved_head(tmp_path, random_head(target))
    change_tensors(folder, lambda t: t.update({"embed_tokens.weight": torch.zeros(23, 24)}))
    head = load_eagle(folder, target, F32, CPU)
    assert head.shared[0] is target.embed_tokens


# --- weights that do not fit --------------------------------------------------------------------------------------

Q = "model.layers.0.self_attn.q_proj.weight"


def test_missing_tensor_is_named(folder: Path) -> None:
    change_tensors(folder, lambda t: t.pop(Q))
    assert f"the tensor {Q} is missing" in refusal(folder)


@pytest.mark.parametrize(
    ("name", "shape", "expected"),
    [(Q, (23, 24), "(24, 24)"), ("model.norm.weight", (23,), "(24,)"), ("lm_head.weight", (24, 23), "(23, 24)")],
)
def test_tensor_of_a_wrong_shape_is_named(folder: Path, name: str, shape: tuple[int, ...], expected: str) -> None:
    change_tensors(folder, lambda t: t.update({name: torch.zeros(shape)}))
    message = refusal(folder)
    assert f"{name} has shape {shape}" in message
    assert f"asks for {expected}" in message


@pytest.mark.parametrize("stray", ["model.layers.2.mlp.up_proj.weight", f"{Q[:-6]}bias", "visual.weight"])
def test_tensor_without_a_place_is_named(folder: Path, stray: str) -> None:
    change_tensors(folder, lambda t: t.update({stray: torch.zeros(2)}))
    assert f"1 tensors have no place in this architecture, the first is {stray}" in refusal(folder)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("name", [Q, "model.embed_tokens.weight", "model.norm.weight"])
def test_weights_that_are_no_numbers_are_refused(folder: Path, name: str, value: float) -> None:
    change_tensors(folder, lambda t: t[name].view(-1)[3:4].fill_(value))
    assert f"the tensor {name} holds NaN or infinite values" in refusal(folder)


def test_weight_too_large_for_the_dtype_asked_for_is_refused(folder: Path) -> None:
    """1e6 is a number in float32, and infinite in float16."""
    change_tensors(folder, lambda t: t[Q].view(-1)[3:4].fill_(1e6))
    load(folder)
    assert Q in refusal(folder, torch.float16)


@pytest.mark.parametrize("keep", [0, 7, 200, 5000])
def test_damaged_weights_file(folder: Path, keep: int) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    assert "model.safetensors is damaged or cut short" in refusal(folder)


def test_weights_file_of_another_kind(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    assert "only safetensors are read" in refusal(folder)


# --- configurations that do not fit -------------------------------------------------------------------------------


def test_missing_folder_names_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no model folder at .*nowhere.*tiny") as error:
        find_checkpoint(tmp_path / "nowhere")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_names_are_folders_of_the_package(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("refspec.models.checkpoint.SHIPPED_FOLDER", tmp_path)
    with pytest.raises(CheckpointError, match="reinstall"):
        find_checkpoint(name)
    (tmp_path / SHIPPED[name]).mkdir()
    assert find_checkpoint(name) == tmp_path / SHIPPED[name]


def test_folder_without_a_config(folder: Path) -> None:
    (folder / "config.json").unlink()
    assert "no config.json" in refusal(folder)


@pytest.mark.parametrize("content", [b"", b"{", b'{"architectures": ', b"\xff\xfe", b"[]", b"3", b"null", b'"x"'])
def test_config_that_is_no_json_object(folder: Path, content: bytes) -> None:
    (folder / "config.json").write_bytes(content)
    assert "config.json" in refusal(folder)


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"architectures": ["Qwen3ForCausalLM"]}, "architecture Qwen3ForCausalLM where LlamaForCausalLM is needed"),
        ({"architectures": []}, "architecture (none given)"),
        ({"architectures": None}, "architecture (none given)"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"attention_bias": True}, "attention_bias is set"),
        ({"mlp_bias": True}, "mlp_bias is set"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rotary embeddings are scaled"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rotary embeddings are scaled"),
        ({"rope_parameters": {"rope_type": "llama3"}}, "rotary embeddings are scaled"),
        ({"rope_scaling": "yarn"}, "rope_scaling"),
        ({"vocab_size": None}, "the field 'vocab_size' is missing"),
        ({"max_position_embeddings": None}, "the field 'max_position_embeddings' is missing"),
        ({"hidden_size": "wide"}, "wide"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be at least 1, got 0"),
        ({"num_hidden_layers": 2.5}, "2.5"),
        ({"num_attention_heads": 0}, "num_attention_heads"),
        ({"num_key_value_heads": 3}, "num_key_value_heads (3)"),
        ({"head_dim": 5}, "head_dim must be even"),
        ({"rms_norm_eps": "small"}, "small"),
        ({"eos_token_id": "</s>"}, "eos_token_id"),
        ({"eos_token_id": [2, "</s>"]}, "eos_token_id"),
        ({"eos_token_id": 2.0}, "eos_token_id"),
    ],
    ids=str,
)
def test_config_that_this_code_does_not_compute(folder: Path, fields: dict[str, Any], complaint: str) -> None:
    change_config(folder, **fields)
    message = refusal(folder)
    assert "config.json" in message
    assert complaint in message


def test_head_folder_where_a_target_is_needed_and_the_reverse(tmp_path: Path) -> None:
    target = random_llama(dtype=F32)
    head_folder = saved_head(tmp_path / "head", random_head(target))
    assert "LlamaForCausalLMEagle where LlamaForCausalLM is needed" in refusal(head_folder)
    with pytest.raises(CheckpointError, match="LlamaForCausalLM where LlamaForCausalLMEagle is needed"):
        load_eagle(saved_target(tmp_path / "target", target), target, F32, CPU)


@pytest.mark.parametrize("field", ["hidden_size", "vocab_size"])
def test_head_that_does_not_fit_its_target(field: str, tmp_path: Path) -> None:
    folder = saved_head(tmp_path, random_head(random_llama(dtype=F32)))
    other = random_llama(llama_config(**{field: 32}), dtype=F32)
    with pytest.raises(CheckpointError, match=rf"{field} is \d+, its target's is 32") as error:
        load_eagle(folder, other, F32, CPU)
    assert str(folder) in str(error.value)


def test_plain_rope_may_be_said_in_either_way(folder: Path) -> None:
    change_config(folder, rope_theta=None, rope_parameters={"rope_type": "default", "rope_theta": 77.0})
    assert load(folder).config.rope_theta == 77
    change_config(folder, rope_parameters=None, rope_scaling=None, rope_theta=55.0)
    assert load(folder).config.rope_theta == 55


def test_fields_that_old_configs_leave_out(folder: Path, tmp_path: Path) -> None:
    """Without GQA and with heads that fill the hidden size, both are implied."""
    full = saved_target(tmp_path / "full", random_llama(llama_config(num_key_value_heads=4), dtype=F32))
    change_config(full, num_key_value_heads=None, head_dim=None)
    config = load(full).config
    assert (config.num_key_value_heads, config.head_dim) == (4, 6)


@pytest.mark.parametrize(
    ("config_eos", "generation_eos", "ids"),
    [(None, None, ()), (2, None, (2,)), ([3, 2], None, (2, 3)), (2, 5, (2, 5)), (2, [5, 2], (2, 5)), (None, [0], (0,))],
)
def test_FIN_12_ends_of_text_come_from_both_files(
    folder: Path, config_eos: object, generation_eos: object, ids: tuple[int, ...]
) -> None:
    change_config(folder, eos_token_id=config_eos)
    if generation_eos is not None:
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": generation_eos}))
    assert load(folder).config.eos_token_ids == ids


@pytest.mark.parametrize("content", ["{", "[]"])
def test_damaged_generation_config(folder: Path, content: str) -> None:
    (folder / "generation_config.json").write_text(content)
    assert "generation_config.json" in refusal(folder)


# --- the other drafts ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def target() -> LlamaForCausalLM:
    return random_llama(dtype=F32)


def saved(folder: Path, draft: nn.Module) -> Path:
    save_checkpoint(draft, folder, dtype=F32)  # type: ignore[arg-type]
    return folder


def eagle3_refusal(folder: Path, target: LlamaForCausalLM) -> str:
    with pytest.raises(CheckpointError) as error:
        load_eagle3(folder, target, F32, CPU)
    assert str(folder) in str(error.value)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_drafts_come_back_as_they_were(target: LlamaForCausalLM, tmp_path: Path) -> None:
    eagle3, mtp, assistant = random_eagle3(target), random_mtp(target), random_assistant(target, (1, 0, 1))
    head = load_eagle3(saved(tmp_path / "eagle3", eagle3), target, F32, CPU)
    layers = load_mtp(saved(tmp_path / "mtp", mtp), target, F32, CPU)
    other = load_frozen_kv(saved(tmp_path / "frozen", assistant), target, F32, CPU)
    for loaded, draft in ((head, eagle3), (layers, mtp), (other, assistant)):
        assert_same_parameters(loaded, draft)
        assert loaded.config == draft.config
        assert not any(p.requires_grad or p.is_meta for p in loaded.parameters())
    assert torch.equal(head.d2t, eagle3.d2t)
    assert other.target_layers == (1, 0, 1)
    assert [architecture_of(tmp_path / name) for name in ("eagle3", "mtp", "frozen")] == [
        "LlamaForCausalLMEagle3",
        "LlamaForCausalLMNextN",
        "LlamaAssistantForCausalLM",
    ]


def test_eagle3_file_has_the_published_names(target: LlamaForCausalLM, tmp_path: Path) -> None:
    folder = saved(tmp_path, random_eagle3(target))
    tensors = load_file(folder / "model.safetensors")
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == {
        "fc.weight": (24, 72),
        "midlayer.input_layernorm.weight": (24,),
        "midlayer.hidden_norm.weight": (24,),
        "midlayer.self_attn.q_proj.weight": (24, 48),
        "midlayer.self_attn.k_proj.weight": (12, 48),
        "midlayer.self_attn.v_proj.weight": (12, 48),
        "midlayer.self_attn.o_proj.weight": (24, 24),
        "midlayer.post_attention_layernorm.weight": (24,),
        "midlayer.mlp.gate_proj.weight": (20, 24),
        "midlayer.mlp.up_proj.weight": (20, 24),
        "midlayer.mlp.down_proj.weight": (24, 20),
        "norm.weight": (24,),
        "lm_head.weight": (4, 24),
        "d2t": (4,),
        "t2d": (23,),
    }
    assert tensors["d2t"].tolist() == [2, 4, 4, 8]
    assert tensors["t2d"].nonzero().flatten().tolist() == [2, 5, 6, 11]


def test_what_published_eagle3_files_differ_in(target: LlamaForCausalLM, tmp_path: Path) -> None:
    """A counted layer, a copy of the embedding, no t2d, the features' layers as SGLang counts them."""
    head = random_eagle3(target)
    folder = saved(tmp_path, head)
    tensors = load_file(folder / "model.safetensors")
    renamed = {name.replace("midlayer", "layers.0"): tensor for name, tensor in tensors.items() if name != "t2d"}
    save_file({**renamed, "embed_tokens.weight": torch.zeros(23, 24)}, folder / "model.safetensors")
    change_config(folder, eagle_config={"eagle_aux_hidden_state_layer_ids": [0, 1, 1]})
    loaded = load_eagle3(folder, target, F32, CPU)
    assert_same_parameters(loaded, head)
    assert loaded.config.feature_layers == (1, 2, 2)
    assert load_eagle3(saved(tmp_path / "again", loaded), target, F32, CPU).config == loaded.config


def test_TREE_08_a_head_without_a_table_has_the_targets_vocabulary(target: LlamaForCausalLM, tmp_path: Path) -> None:
    """All zeros and no table are the same, if sizes are equal; if they are not, there has to be a table."""
    folder = saved(tmp_path, random_eagle3(target, ids=range(23)))
    for change in (lambda t: t["d2t"].zero_(), lambda t: [t.pop("d2t"), t.pop("t2d")]):
        change_tensors(folder, change)
        assert load_eagle3(folder, target, F32, CPU).draft_to_target.tolist() == list(range(23))
    change_config(folder, draft_vocab_size=22)
    assert "draft_vocab_size is 22, vocab_size 23, and there is no table d2t" in eagle3_refusal(folder, target)


@pytest.mark.parametrize(
    ("size", "d2t", "complaint"),
    [
        (0, None, "draft_vocab_size is 0"),
        (-1, None, "draft_vocab_size is -1"),
        (24, None, "draft_vocab_size is 24"),
        (4.5, None, "draft_vocab_size is 4.5"),
        (True, None, "draft_vocab_size is True"),
        (4, [2, 4, 4, 20], "d2t[3] is 20, which makes draft id 3 the target's id 23"),
        (4, [-1, 4, 4, 8], "d2t[0] is -1, which makes draft id 0 the target's id -1"),
        (4, [2, 4, 3, 8], "d2t leads twice to the target's id 5"),
        (4, [2, 4, 4], "draft_vocab_size = 4"),
        (4, [2.0, 4, 4, 8], "torch.float32"),
        (4, [2, 4, 4, 9], "t2d names other ids"),
    ],
    ids=str,
)
def test_TREE_10_vocabularies_that_make_no_sense(
    target: LlamaForCausalLM, size: float, d2t: list[float] | None, complaint: str, tmp_path: Path
) -> None:
    folder = saved(tmp_path, random_eagle3(target))
    change_config(folder, draft_vocab_size=size)
    if d2t is not None:
        change_tensors(folder, lambda t: t.update({"d2t": torch.tensor(d2t)}))
    assert complaint in eagle3_refusal(folder, target)


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"eagle_config": {"norm_before_fc": True}}, "norm_before_fc is set"),
        ({"norm_output": True}, "norm_output is set"),
        ({"target_hidden_size": 48}, "target_hidden_size is 48, hidden_size 24"),
        ({"num_hidden_layers": 2}, "num_hidden_layers is 2: an EAGLE-3 head has one layer"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": 3}}, "eagle_aux_hidden_state_layer_ids is 3"),
    ],
    ids=str,
)
def test_eagle3_configs_that_this_code_does_not_compute(
    target: LlamaForCausalLM, fields: dict[str, Any], complaint: str, tmp_path: Path
) -> None:
    folder = saved(tmp_path, random_eagle3(target))
    change_config(folder, **fields)
    assert complaint in eagle3_refusal(folder, target)


def test_SEQ_18_zero_layers_are_none(target: LlamaForCausalLM, tmp_path: Path) -> None:
    """Absent, null and 0 are refused alike; 1 makes one layer."""
    folder = saved(tmp_path, random_mtp(target, count=1))
    assert len(load_mtp(folder, target, F32, CPU)) == 1
    file = folder / "config.json"
    raw, messages = json.loads(file.read_text()), set()
    for given in ({}, {"num_nextn_predict_layers": None}, {"num_nextn_predict_layers": 0}):
        raw.pop("num_nextn_predict_layers", None)
        file.write_text(json.dumps({**raw, **given}))
        with pytest.raises(CheckpointError, match="num_nextn_predict_layers is absent, null or 0") as error:
            load_mtp(folder, target, F32, CPU)
        messages.add(str(error.value))
    assert len(messages) == 1


@pytest.mark.parametrize("count", [-1, 1.5, "two", True])
def test_numbers_of_mtp_layers_that_are_none(target: LlamaForCausalLM, count: object, tmp_path: Path) -> None:
    folder = saved(tmp_path, random_mtp(target, count=1))
    change_config(folder, num_nextn_predict_layers=count)
    with pytest.raises(CheckpointError, match=r"config\.json: num_nextn_predict_layers must be"):
        load_mtp(folder, target, F32, CPU)


def test_mtp_file_has_deepseeks_names(target: LlamaForCausalLM, tmp_path: Path) -> None:
    """Copies of embedding and head, which DeepSeek's layers come with, are passed over."""
    folder = saved(tmp_path, random_mtp(target, count=2))
    names = set(load_file(folder / "model.safetensors"))
    one = {name.removeprefix("model.layers.1.") for name in names if name.startswith("model.layers.1.")}
    assert {"enorm.weight", "hnorm.weight", "eh_proj.weight", "shared_head.norm.weight"} < one
    assert {"input_layernorm.weight", "self_attn.q_proj.weight", "mlp.down_proj.weight"} < one
    assert len(names) == 2 * len(one)
    copies = {f"model.layers.0.{name}.weight": torch.zeros(23, 24) for name in ("embed_tokens", "shared_head.head")}
    change_tensors(folder, lambda t: t.update(copies))
    assert load_mtp(folder, target, F32, CPU)[0].shared[0] is target.embed_tokens


@pytest.mark.parametrize("layers", [None, 3, [0, 2], [0], ["0", "1"]])
def test_layers_of_a_frozen_kv_folder(target: LlamaForCausalLM, layers: object, tmp_path: Path) -> None:
    folder = saved(tmp_path, random_assistant(target))
    change_config(folder, target_layers=layers)
    with pytest.raises(CheckpointError, match=r"target_layers is .*, it must"):
        load_frozen_kv(folder, target, F32, CPU)


def test_architecture_that_is_none_of_ours(folder: Path) -> None:
    change_config(folder, architectures=["Qwen3ForCausalLM"])
    with pytest.raises(CheckpointError, match="architecture Qwen3ForCausalLM, which is none of: LlamaForCausalLM, "):
        architecture_of(folder)


# --- tokenizer ----------------------------------------------------------------------------------------------------


def test_tokenizer_is_read_from_its_folder(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(saved_target(tmp_path, random_llama(llama_config(vocab_size=256))))
    assert tokenizer is not None
    assert tokenizer.encode("ab").ids == [97, 98]


def test_folder_without_a_tokenizer(folder: Path) -> None:
    assert load_tokenizer(folder) is None


@pytest.mark.parametrize("content", [b"", b"{}", b"\xff", b'{"version": "1.0"}'])
def test_damaged_tokenizer(folder: Path, content: bytes) -> None:
    (folder / "tokenizer.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"tokenizer\.json") as error:
        load_tokenizer(folder)
    assert "\n" not in str(error.value)
