"""The engine as its users meet it: what it returns, what it streams, and what it refuses, in one line."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from builders import (
    agreeing_now_and_then,
    assert_all_free,
    assert_same_output,
    byte_tokenizer,
    generate_watched,
    llama_config,
    random_head,
    random_llama,
    random_logits,
    saved_head,
    saved_target,
    scripted_engine,
    text_logits,
    transparent_pair,
)
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

import refspec
import refspec.engine.engine as engine_module
from refspec import Engine, SamplingParams, SpecConfig
from refspec.models.checkpoint import CheckpointError
from refspec.models.llama import LlamaForCausalLM
from refspec.models.scripted import ScriptedModel

VOCAB = 11
SPEC = SpecConfig(topk=2, num_steps=3, num_draft_tokens=6)


def scripted(vocab_size: int = VOCAB, **settings: int) -> ScriptedModel:
    return ScriptedModel(random_logits(vocab_size), vocab_size, **settings)


def refusal(call: Callable[[], object]) -> str:
    """The one line with which the call is refused."""
    with pytest.raises(ValueError, match=r".") as error:
        call()
    assert "\n" not in str(error.value)
    return str(error.value)


# --- refused when the engine is made ------------------------------------------------------------------------------


def with_nan() -> LlamaForCausalLM:
    model = random_llama()
    model.layers[1].mlp.down_proj.weight[2, 3] = torch.nan
    return model


BAD_ENGINES: dict[str, tuple[Callable[[], object], list[str]]] = {
    "more branches than ids": (
        lambda: Engine(scripted(3), scripted(3), SpecConfig(topk=4, num_steps=1, num_draft_tokens=3)),
        ["topk is 4", "3 ids"],
    ),
    "a draft, but nothing to do with it": (lambda: Engine(scripted(), scripted()), ["draft", "spec=None"]),
    "no draft to speculate with": (lambda: Engine(scripted(), spec=SPEC), ["draft"]),
    "another vocabulary": (lambda: Engine(scripted(11), scripted(12), SPEC), ["vocab_size is 12", "11"]),
    "a language model as EAGLE head": (lambda: Engine(random_llama(), random_llama(), SPEC), ["EAGLE head"]),
    "a head on a scripted target": (lambda: Engine(scripted(), "tiny-eagle", SPEC), ["LLaMA"]),
    "an unknown dtype": (lambda: Engine(scripted(), dtype="int8"), ["dtype is 'int8'", "float32, float64"]),
    "a dtype that is none": (lambda: Engine(scripted(), dtype=torch.int64), ["dtype is torch.int64"]),
    "an unknown device": (lambda: Engine(scripted(), device="abacus"), ["device 'abacus'"]),
    "a device that is not here": (lambda: Engine(scripted(), device="cuda:99"), ["device 'cuda:99'"]),
    "no slots": (lambda: Engine(scripted(), kv_slots=0), ["kv_slots", "got 0"]),
    "half a slot": (lambda: Engine(scripted(), kv_slots=8.5), ["kv_slots", "8.5"]),  # type: ignore[arg-type]
    "nobody may run": (lambda: Engine(scripted(), max_running=0), ["max_running", "got 0"]),
    "everybody may run": (lambda: Engine(scripted(), max_running=2**63), ["max_running", "2147483648"]),
    "NaN in the target": (lambda: Engine(with_nan()), ["target", "NaN", "layers.1.mlp.down_proj.weight"]),
    "no such folder": (lambda: Engine("/nowhere/at/all"), ["no model folder", "/nowhere/at/all"]),
    "no such shipped model": (lambda: Engine("tinny"), ["no model folder", "tiny-eagle"]),
}


@pytest.mark.parametrize("case", BAD_ENGINES)
def test_engine_is_refused(case: str) -> None:
    make, parts = BAD_ENGINES[case]
    message = refusal(make)
    for part in parts:
        assert part in message


def test_nan_in_the_draft() -> None:
    target = random_llama()
    head = random_head(target)
    head.fc.weight[0, 0] = torch.inf
    message = refusal(lambda: Engine(target, head, SPEC))
    assert "draft" in message
    assert "fc.weight" in message


def test_head_that_was_made_for_another_target() -> None:
    """Same vocabulary, another width: found when the engine is made, not in the middle of the first prompt."""
    other = random_head(random_llama(llama_config(hidden_size=32)))
    message = refusal(lambda: Engine(random_llama(), other, SPEC))
    assert "32" in message
    assert "24" in message


def test_target_and_draft_of_different_dtypes() -> None:
    head = random_head(random_llama(dtype=torch.float32))
    message = refusal(lambda: Engine(random_llama(dtype=torch.float64), head, SPEC))
    assert "float32" in message
    assert "float64" in message


def test_head_folder_over_a_target_object_takes_the_targets_dtype(tmp_path: Path) -> None:
    target, head = transparent_pair()
    folder = saved_head(tmp_path, head)
    expected = Engine(target, head, SPEC).generate([[0, 5]], SamplingParams(max_new_tokens=12))
    assert_same_output(expected, Engine(target, folder, SPEC).generate([[0, 5]], SamplingParams(max_new_tokens=12)))


def test_engine_tells_the_dtype_that_it_runs_in() -> None:
    """The rounding that a comparison may allow depends on it."""
    assert Engine(random_llama(dtype=torch.float64)).dtype == torch.float64
    assert Engine(random_llama(dtype=torch.bfloat16)).dtype == torch.bfloat16


@pytest.mark.parametrize("backend", ["auto", "torch"])
def test_backend_of_the_operations_can_be_chosen(backend: str) -> None:
    engine = Engine(scripted(), scripted(), SPEC, backend=backend)  # type: ignore[call-arg]
    engine.generate([[1]], SamplingParams(max_new_tokens=3))


def test_unknown_backend() -> None:
    assert "abacus" in refusal(lambda: Engine(scripted(), backend="abacus"))  # type: ignore[call-arg]


# --- refused when asked -------------------------------------------------------------------------------------------


def small_engine() -> Engine:
    return Engine(scripted(max_context=20), scripted(max_context=20), SPEC, kv_slots=30)


BAD_PROMPTS: dict[str, tuple[object, list[str]]] = {
    "an empty prompt": ([[]], ["empty"]),
    "an empty one among others": ([[1, 2], []], ["empty"]),
    "an id beyond the vocabulary": ([[1, VOCAB]], ["11", "0 to 10"]),
    "a negative id": ([[-1]], ["-1", "0 to 10"]),
    "half an id": ([[1.5]], ["1.5"]),
    "a word among ids": ([[1, "two"]], ["'two'"]),
    "nothing among ids": ([[None]], ["None"]),
    "a prompt as long as the context": ([[1] * 20], ["20 tokens", "context is 20"]),
    "text without a tokenizer": (["hello"], ["tokenizer", "token ids"]),
    "one string": ("hello", ["list of prompts"]),
    "one list of ids": ([1, 2, 3], ["list of prompts"]),
}


@pytest.mark.parametrize("case", BAD_PROMPTS)
def test_prompts_are_refused_before_anything_runs(case: str) -> None:
    engine = small_engine()
    prompts, parts = BAD_PROMPTS[case]
    message = refusal(lambda: engine.generate(prompts))  # type: ignore[arg-type]
    for part in parts:
        assert part in message
    assert engine.stats.forwards == {}
    assert_all_free(engine)


@pytest.mark.parametrize("case", ["an empty prompt", "a negative id", "a prompt as long as the context"])
def test_stream_refuses_its_prompt_when_it_is_asked_for_not_when_it_is_read(case: str) -> None:
    engine = small_engine()
    prompts, parts = BAD_PROMPTS[case]
    message = refusal(lambda: engine.stream(prompts[0]))  # type: ignore[index]
    for part in parts:
        assert part in message
    assert "prompt -1" not in message  # it is none of a run's prompts


@pytest.mark.parametrize("params", [{"max_new_tokens": 3}, 5, [], [SamplingParams()]], ids=str)
def test_stream_refuses_what_are_no_params(params: object) -> None:
    message = refusal(lambda: small_engine().stream([1], params))  # type: ignore[arg-type]
    assert message == f"params is {params!r}: give a SamplingParams"


@pytest.mark.parametrize("bad", [VOCAB, 10**12])
def test_stop_tokens_beyond_the_vocabulary(bad: int) -> None:
    engine = small_engine()
    params = [SamplingParams(max_new_tokens=3, stop_token_ids=ids) for ids in ((0, VOCAB - 1), (2, bad))]
    for refused in (
        lambda: engine.generate([[1], [2]], params),
        lambda: engine.stream([2], params[1]),
    ):
        message = refusal(refused)
        for part in (f"stop token id {bad}", "11 ids", "0 to 10"):
            assert part in message
    assert engine.stats.forwards == {}
    engine.generate([[1]], params[0])


@pytest.mark.parametrize(("slots", "fits"), [(9, False), (10, True)])
def test_request_that_just_fits_the_pool(slots: int, fits: bool) -> None:
    """4 prompt tokens, and 6 for a round's tree."""
    engine = Engine(scripted(), scripted(), SPEC, kv_slots=slots)
    params = SamplingParams(max_new_tokens=2)
    if fits:
        (generation,) = engine.generate([[1, 2, 3, 4]], params)
        assert len(generation.token_ids) == 2
        return
    message = refusal(lambda: engine.generate([[1, 2, 3, 4]], params))
    for part in ("prompt 0", "4 tokens", "10 KV slots", "the pool has 9", "raise kv_slots"):
        assert part in message


@pytest.mark.parametrize("count", [0, 1, 3])
def test_params_for_another_number_of_prompts(count: int) -> None:
    message = refusal(lambda: small_engine().generate([[1], [2]], [SamplingParams()] * count))
    assert "2 prompts" in message
    assert f"{count} SamplingParams" in message


# --- what comes back ----------------------------------------------------------------------------------------------


def test_no_prompts_give_no_generations() -> None:
    assert small_engine().generate([]) == []


@pytest.mark.parametrize(
    "prompt", [[3, 1, 4], (3, 1, 4), np.array([3, 1, 4]), torch.tensor([3, 1, 4])], ids=lambda p: type(p).__name__
)
def test_ids_may_come_in_any_sequence(prompt: object) -> None:
    (generation,) = small_engine().generate([prompt], SamplingParams(max_new_tokens=4))  # type: ignore[list-item]
    (expected,) = small_engine().generate([[3, 1, 4]], SamplingParams(max_new_tokens=4))
    assert generation == expected
    assert all(type(token) is int for token in generation.token_ids)


def test_generations_come_in_the_order_of_the_prompts() -> None:
    """Though they end, and even start, in another one."""
    engine = Engine(scripted(), scripted(), SPEC, max_running=2)
    prompts = [[i] for i in range(5)]
    params = [SamplingParams(max_new_tokens=n) for n in (20, 1, 12, 3, 7)]
    generations = engine.generate(prompts, params)
    alone = [Engine(scripted(), scripted(), SPEC).generate([p], [q])[0] for p, q in zip(prompts, params, strict=True)]
    assert generations == alone


def test_callers_lists_stay_as_they_were() -> None:
    prompt, params = [1, 2, 3], [SamplingParams(max_new_tokens=5)]
    engine = small_engine()
    (first,) = engine.generate([prompt], params)
    assert (prompt, len(params)) == ([1, 2, 3], 1)
    first.token_ids.append(0)
    (second,) = engine.generate([prompt], params)
    assert second.token_ids == first.token_ids[:-1]


def test_text_of_ids_without_a_tokenizer() -> None:
    (generation,) = scripted_engine(text_logits([0, 5, 6, 7], VOCAB), VOCAB, None).generate(
        [[0]], SamplingParams(max_new_tokens=3)
    )
    assert generation.text == "5 6 7"


def test_names_that_the_package_promises() -> None:
    for name in ("Engine", "Generation", "SamplingParams", "SpecConfig", "StreamBlock"):
        assert isinstance(getattr(refspec, name), type)
    with pytest.raises(AttributeError, match="Motor"):
        refspec.Motor  # noqa: B018


# --- folders ------------------------------------------------------------------------------------------------------


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    """A target with a byte tokenizer, and a head that knows it."""
    target, head = transparent_pair(vocab_size=256)
    return saved_target(tmp_path / "target", target), saved_head(tmp_path / "head", head)


def test_folders_are_loaded_in_the_dtype_asked_for(folders: tuple[Path, Path]) -> None:
    params = SamplingParams(max_new_tokens=10)
    plain = Engine(folders[0], dtype="float64").generate(["\0if x:"], params)
    for dtype in ("float64", torch.float64, "torch.float64"):
        engine = Engine(folders[0], folders[1], SPEC, dtype=dtype)
        assert engine.dtype == torch.float64
        spec, _ = generate_watched(engine, ["\0if x:"], params)
        assert_same_output(plain, spec)
    assert Engine(folders[0]).dtype == torch.float32
    for dtype in ("bfloat16", "float16"):
        (generation,) = Engine(folders[0], folders[1], SPEC, dtype=dtype).generate(["\0if x:"], params)
        assert len(generation.token_ids) == 10


def test_text_prompts_are_encoded_and_answers_decoded(folders: tuple[Path, Path]) -> None:
    engine = Engine(str(folders[0]), str(folders[1]), SPEC, dtype="float64")
    assert engine.encode("aé") == [97, 0xC3, 0xA9]
    by_text, by_ids = engine.generate(["\0ab", [0, 97, 98]], SamplingParams(max_new_tokens=6))
    assert by_text == by_ids
    assert by_text.text == bytes(by_text.token_ids).decode(errors="replace")


def test_empty_text_is_an_empty_prompt(folders: tuple[Path, Path]) -> None:
    assert "empty" in refusal(lambda: Engine(folders[0]).generate([""]))


def test_folder_that_cannot_be_loaded(folders: tuple[Path, Path]) -> None:
    with pytest.raises(CheckpointError, match="LlamaForCausalLMEagle where LlamaForCausalLM is needed"):
        Engine(folders[1])


@pytest.mark.parametrize("spec", [None, SPEC], ids=["plain", "eagle"])
def test_TREE_11_ids_beyond_the_tokenizers_are_padding(spec: SpecConfig | None, tmp_path: Path) -> None:
    """An output head of 300 rows over 256 ids, its surplus rows the likeliest of all: never drafted, never said."""
    target, head = transparent_pair(vocab_size=300)
    target.lm_head.weight[256:] *= 3
    params = SamplingParams(max_new_tokens=20)
    (unbounded,) = Engine(target).generate([[0, 5]], params)
    assert max(unbounded.token_ids) >= 256

    folders = saved_target(tmp_path / "target", target), saved_head(tmp_path / "head", head)
    engine = Engine(folders[0], folders[1] if spec else None, spec, dtype="float64")
    (generation,), watcher = generate_watched(engine, [[0, 5]], params)
    assert max(generation.token_ids) < 256
    for request in watcher.requests:
        assert max(candidate.token for candidate in request.candidates) < 256
    assert "0 to 255" in refusal(lambda: engine.generate([[256]]))


def test_ids_of_a_tokenizer_that_has_gaps(tmp_path: Path) -> None:
    """What counts is the largest id, not how many there are."""
    folder = saved_target(tmp_path, random_llama(llama_config(vocab_size=12)))
    Tokenizer(WordLevel({"a": 0, "b": 9}, unk_token="a")).save(str(folder / "tokenizer.json"))
    engine = Engine(folder)
    assert engine.encode("b") == [9]
    assert engine.vocab_size == 10


# --- streams ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", [None, SPEC], ids=["plain", "eagle"])
@pytest.mark.parametrize("budget", [1, 2, 3, 20])
def test_blocks_of_a_stream_join_to_the_output(spec: SpecConfig | None, budget: int) -> None:
    draft = ScriptedModel(agreeing_now_and_then(random_logits(VOCAB), random_logits(VOCAB, 5)), VOCAB)
    engine = Engine(scripted(), draft if spec else None, spec)
    params = SamplingParams(max_new_tokens=budget)
    (generation,) = engine.generate([[1, 2]], params)
    blocks = list(engine.stream([1, 2], params))
    assert [token for block in blocks for token in block.token_ids] == generation.token_ids
    assert "".join(block.text for block in blocks) == generation.text
    assert [block.finish_reason for block in blocks] == [None] * (len(blocks) - 1) + [generation.finish_reason]
    assert [len(block.token_ids) for block in blocks] == [1, *generation.accept_lens]
    assert_all_free(engine)


@pytest.mark.parametrize("stop_at", range(6))
def test_stream_says_nothing_behind_a_stop(stop_at: int) -> None:
    text = [4, 5, 6, 7, 8, 9]
    text[stop_at] = 10
    spec = SpecConfig(topk=1, num_steps=5, num_draft_tokens=6)
    engine = scripted_engine(text_logits([0, *text, 3, 3, 3, 3], VOCAB), VOCAB, spec, eos_token_ids=[10])
    blocks = list(engine.stream([0], SamplingParams(max_new_tokens=50)))
    assert [token for block in blocks for token in block.token_ids] == text[: stop_at + 1]
    assert blocks[-1].finish_reason == "stop"


@pytest.mark.parametrize(
    "spec", [None, *(SpecConfig(topk=1, num_steps=s, num_draft_tokens=s + 1) for s in (1, 2, 3, 4))], ids=str
)
@pytest.mark.parametrize(
    "said",
    ["naïve ☃ 🙂 done", "🙂🙂🙂", "é", "\ufffd is itself a character\ufffd"],
    ids=["mixed", "all long", "one", "mark"],
)
def test_characters_of_several_bytes_are_not_torn(spec: SpecConfig | None, said: str) -> None:
    """Wherever a block cuts a character, its bytes wait for the next block."""
    text = [0, *said.encode(), 10]
    model = ScriptedModel(text_logits(text, 256), 256, eos_token_ids=[10])
    engine = Engine(model, model if spec else None, spec)
    engine.tokenizer = byte_tokenizer()
    blocks = list(engine.stream([0], SamplingParams(max_new_tokens=100)))
    assert "".join(block.text for block in blocks) == said + "\n"
    whole = said + "\n"
    for block in blocks:
        assert whole.startswith(block.text)
        whole = whole[len(block.text) :]


@pytest.mark.parametrize("tail", [b"ok \xe2\x98", b"\xff\xfe", b"a\xf0\x9f b"])
def test_bytes_that_make_up_no_character_come_at_the_end(tail: bytes) -> None:
    spec = SpecConfig(topk=1, num_steps=2, num_draft_tokens=3)
    model = ScriptedModel(text_logits([0, *tail], 256), 256)
    engine = Engine(model, model, spec)
    engine.tokenizer = byte_tokenizer()
    params = SamplingParams(max_new_tokens=len(tail))
    (generation,) = engine.generate([[0]], params)
    assert generation.text == tail.decode(errors="replace")
    assert "".join(block.text for block in engine.stream([0], params)) == generation.text


def test_stream_decodes_each_id_a_few_times_however_long_the_output() -> None:
    engine = scripted_engine(text_logits([0, *"naïve ☃ ".encode() * 20], 256), 256, None)
    engine.tokenizer = byte_tokenizer()
    decoded: list[int] = []
    whole = engine.decode
    engine.decode = lambda ids: decoded.extend(ids) or whole(ids)  # type: ignore[method-assign, func-returns-value]
    blocks = list(engine.stream([0], SamplingParams(max_new_tokens=200)))
    assert "".join(block.text for block in blocks).startswith("naïve ☃ naïve")
    assert len(decoded) < 6 * 200


def test_streams_of_one_engine_take_turns() -> None:
    engine = Engine(scripted(), scripted(), SPEC)
    params = SamplingParams(max_new_tokens=15)
    expected = engine.generate([[1], [2, 3]], params)
    streams = [engine.stream([1], params), engine.stream([2, 3], params)]
    told: list[list[int]] = [[], []]
    while streams[0] or streams[1]:
        for i, stream in enumerate(streams):
            block = next(stream, None) if stream else None
            if block is None:
                streams[i] = None  # type: ignore[call-overload]
            else:
                told[i] += block.token_ids
            engine.check()
    assert told == [generation.token_ids for generation in expected]
    assert_all_free(engine)


def test_end_of_text_of_a_model_object_is_read_from_its_config() -> None:
    target = random_llama()
    (free_run,) = Engine(target).generate([[1]], SamplingParams(max_new_tokens=9))
    target.config = replace(target.config, eos_token_ids=(free_run.token_ids[2],))
    (generation,) = Engine(target).generate([[1]], SamplingParams(max_new_tokens=9))
    assert generation.token_ids == free_run.token_ids[: free_run.token_ids.index(free_run.token_ids[2]) + 1]


@pytest.mark.parametrize("graphs", [True, [1, 4]])
def test_graphs_on_a_gpu_are_refused_for_scripted_models(
    graphs: bool | list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the constructor, before anything is put on the GPU; tests/gpu has one."""
    monkeypatch.setattr(engine_module, "_device_of", lambda *_: torch.device("cuda"))
    monkeypatch.setattr(engine_module, "resolve_backend", lambda *_: "triton")
    model = ScriptedModel(lambda context: [0.0, 1.0, 0.0], 3)
    with pytest.raises(ValueError, match="graphs on a GPU cannot hold a scripted model") as error:
        Engine(model, graphs=graphs)
    assert "\n" not in str(error.value)
    with pytest.raises(ValueError, match="graphs on a GPU cannot hold a scripted model"):
        Engine("tiny", model, SpecConfig(), graphs=graphs)
