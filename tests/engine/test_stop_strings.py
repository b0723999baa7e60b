"""Stop strings end requests where they should: in output, text, stream, cache, trace and counts alike."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from builders import (
    agreeing_now_and_then,
    assert_all_free,
    assert_same_output,
    byte_tokenizer,
    generate_watched,
    naive_stop,
    peaked_logits,
    ragged_prompts,
    scripted_engine,
    text_logits,
    tokenizer_of,
    undecided_end,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from refspec import Engine, SamplingParams, SpecConfig
from refspec.models.scripted import ScriptedModel

CHAIN = [SpecConfig(topk=1, num_steps=steps, num_draft_tokens=steps + 1) for steps in (1, 3, 7)]
WIDE = SpecConfig(topk=2, num_steps=4, num_draft_tokens=10, exact_branch_kv=True)
HOW = [None, *CHAIN, WIDE]
how = pytest.mark.parametrize("spec", HOW, ids=lambda s: f"k{s.topk}S{s.num_steps}" if s else "plain")


def says(text: str | bytes, spec: SpecConfig | None, prompt: str = "?", **more: object) -> Engine:
    """An engine that says just this text, byte by byte, after a prompt; every draft is right."""
    said = text.encode() if isinstance(text, str) else text
    engine = scripted_engine(text_logits([*prompt.encode(), *said], 256), 256, spec, **more)
    engine.tokenizer = byte_tokenizer()
    return engine


@how
@pytest.mark.parametrize(("include", "text"), [(False, "x"), (True, "xab")])
def test_FIN_03_stop_text_early_in_a_block(spec: SpecConfig | None, include: bool, text: str) -> None:
    """One character per token, a long run accepted at once: nothing behind the stop is anywhere."""
    params = SamplingParams(max_new_tokens=50, stop="ab", include_stop_str_in_output=include)  # type: ignore[arg-type]
    (generation,), watcher = generate_watched(says("xabcdefg", spec), ["?"], params)
    assert bytes(generation.token_ids) == b"xab"
    assert (generation.text, generation.finish_reason, generation.matched_stop) == (text, "stop", "ab")
    assert 1 + sum(generation.accept_lens) == 3
    assert [token for request in watcher.requests for token in request.committed] == generation.token_ids[1:] * bool(
        spec
    )
    if spec:
        assert watcher.requests[-1].finish_reason == "stop"
        assert sum(len(request.kept_slots) for request in watcher.requests) == 2


@how
@pytest.mark.parametrize("budget", [1, 2, 3, 6, 7])
def test_FIN_01_stop_text_wins_over_the_budget_inside_a_block(spec: SpecConfig | None, budget: int) -> None:
    """4 9 S 6 6 2 8, S being no stop token, but its text a stop string."""
    params = SamplingParams(max_new_tokens=budget, stop=("S",))
    (generation,), _ = generate_watched(says("49S6628", spec), ["?"], params)
    assert bytes(generation.token_ids) == b"49S"[:budget]
    assert generation.text == "49"[:budget]
    assert generation.finish_reason == ("stop" if budget >= 3 else "length")
    assert generation.matched_stop == ("S" if budget >= 3 else None)


@how
def test_FIN_10_every_count_speaks_of_what_was_kept(spec: SpecConfig | None) -> None:
    engine = says("1abcd>efgh", spec)
    blocks = list(engine.stream("?", SamplingParams(max_new_tokens=40, stop=("d>",))))
    assert sum(len(block.token_ids) for block in blocks) == 6
    assert engine.stats.committed_tokens == 5
    (generation,), _ = generate_watched(engine, ["?"], SamplingParams(max_new_tokens=40, stop=("d>",)))
    assert 1 + sum(generation.accept_lens) == len(generation.token_ids) == 6
    assert engine.stats.committed_tokens == 10


@how
def test_FIN_05_FIN_12_end_of_text_before_and_after_the_stop_string(spec: SpecConfig | None) -> None:
    """Whatever comes first ends it; ignoring the end of text leaves stop strings in force."""
    engine = says("ab\ncd;ef", spec, eos_token_ids=[ord("\n")])
    for stop, ignore, kept, text, matched in (
        ("b", False, b"ab", "a", "b"),
        ("d;", False, b"ab\n", "ab\n", 10),
        ("d;", True, b"ab\ncd;", "ab\nc", "d;"),
        ("b\n", False, b"ab\n", "a", "b\n"),
        ("b\nx", True, b"ab\ncd;ef", "ab\ncd;ef", None),
    ):
        params = SamplingParams(max_new_tokens=8, stop=(stop,), ignore_eos=ignore)
        (generation,), _ = generate_watched(engine, ["?"], params)
        assert bytes(generation.token_ids) == kept
        assert (generation.text, generation.matched_stop) == (text, matched)
        assert generation.finish_reason == ("length" if matched is None else "stop")


@how
def test_FIN_09_a_budget_without_a_stop_is_used_up(spec: SpecConfig | None) -> None:
    """What was held back, since a stop string might have begun with it, is text when the output ends."""
    for budget in range(1, 13):
        params = SamplingParams(max_new_tokens=budget, stop=("ccd",))
        (generation,), _ = generate_watched(says("ab" + "c" * 20, spec), ["?"], params)
        assert generation.text == ("ab" + "c" * 20)[:budget]
        assert (len(generation.token_ids), generation.finish_reason) == (budget, "length")


@how
def test_FIN_07_first_token_completes_the_stop_string(spec: SpecConfig | None) -> None:
    """They end at prefill, and make room for the next ones."""
    engine = says("a" * 40, spec, max_running=4)
    generations = engine.generate(["?"] * 20, SamplingParams(max_new_tokens=9, stop=("a",)))
    assert {(g.text, bytes(g.token_ids), g.finish_reason, g.matched_stop) for g in generations} == {
        ("", b"a", "stop", "a")
    }
    assert engine.stats.rounds == 0
    assert_all_free(engine)


@how
@pytest.mark.parametrize("prompt", ["stop", "sto", "x st"])
def test_the_prompts_text_never_counts(spec: SpecConfig | None, prompt: str) -> None:
    """A stop string that stands in the prompt, or begins there, does not match."""
    said = "stop"[len(prompt.split()[-1]) :] + "p, then stop it"
    (generation,), _ = generate_watched(
        says(said, spec, prompt), [prompt], SamplingParams(max_new_tokens=30, stop=("stop",))
    )
    assert generation.text == said[: said.index("stop")]


@how
def test_requests_of_a_batch_end_each_at_its_own_stop(spec: SpecConfig | None) -> None:
    prompts = ragged_prompts(5, 9, 256)
    logits = peaked_logits(256)
    free = scripted_engine(logits, 256, None).generate(prompts, SamplingParams(max_new_tokens=30))
    tokenizer = byte_tokenizer()
    params, expected = [], []
    for i, whole in enumerate(free):
        stops = [bytes([token]).decode("latin1") for token in whole.token_ids[3 * i :] if token < 128][:1]
        params.append(SamplingParams(max_new_tokens=30, stop=tuple(stops)))
        expected.append(naive_stop(tokenizer.decode, whole.token_ids, stops))
    engine = scripted_engine(logits, 256, spec)
    engine.tokenizer = tokenizer
    generations, _ = generate_watched(engine, prompts, params)
    assert [(len(g.token_ids), g.text, g.matched_stop) for g in generations] == expected
    assert len({len(g.token_ids) for g in generations}) > 2


# --- streams ------------------------------------------------------------------------------------------------------


@how
@pytest.mark.parametrize("include", [False, True])
def test_stream_says_nothing_of_a_stop_string(spec: SpecConfig | None, include: bool) -> None:
    engine = says("naïve st stomp 🙂stop! more", spec)
    params = SamplingParams(max_new_tokens=60, stop=("stop!", "🙂🙂"), include_stop_str_in_output=include)
    blocks = list(engine.stream("?", params))
    assert "".join(block.text for block in blocks) == "naïve st stomp 🙂" + "stop!" * include
    (generation,) = engine.generate(["?"], params)
    assert [token for block in blocks for token in block.token_ids] == generation.token_ids
    assert [len(block.token_ids) for block in blocks] == [1, *generation.accept_lens]
    assert [(block.finish_reason, block.matched_stop) for block in blocks[-2:]] == [(None, None), ("stop", "stop!")]
    assert_all_free(engine)


@how
def test_stream_lets_out_at_the_end_what_it_held_back(spec: SpecConfig | None) -> None:
    blocks = list(says("abcc", spec).stream("?", SamplingParams(max_new_tokens=4, stop=("ccd",))))
    assert "".join(block.text for block in blocks) == "abcc"
    assert (blocks[-1].finish_reason, blocks[-1].matched_stop) == ("length", None)


def test_stream_lets_out_what_it_held_back_when_the_slots_run_out() -> None:
    """No token comes with the end, but a block does: with the reason, and the text that was to become a stop string."""
    blocks = list(says("abcc", None, kv_slots=4).stream("?", SamplingParams(max_new_tokens=9, stop=("ccd",))))
    assert "".join(block.text for block in blocks) == "abcc"
    assert [block.finish_reason for block in blocks] == [None] * 4 + ["out_of_slots"]
    assert blocks[-1].token_ids == []


def test_stream_names_the_stop_token() -> None:
    blocks = list(says("ab\n", None).stream("?", SamplingParams(stop_token_ids=(10,))))
    assert [block.matched_stop for block in blocks] == [None, None, 10]


# --- refused ------------------------------------------------------------------------------------------------------


def refusal(engine: Engine, params: SamplingParams) -> str:
    for ask in (lambda: engine.generate([[1]], params), lambda: engine.stream([1], params)):
        with pytest.raises(ValueError, match=r".") as error:
            ask()
        assert "\n" not in str(error.value)
    assert engine.stats.forwards == {}
    assert_all_free(engine)
    return str(error.value)


def test_stop_strings_without_a_tokenizer() -> None:
    message = refusal(scripted_engine(peaked_logits(11), 11, None), SamplingParams(stop=("a",)))
    assert "no tokenizer" in message
    assert "stop_token_ids" in message


def test_stop_string_that_is_a_special_token() -> None:
    """It is not decoded, so it would never be found."""
    engine = says("abc", None)
    assert engine.tokenizer is not None
    engine.tokenizer.add_special_tokens(["<end>"])
    message = refusal(engine, SamplingParams(stop=("x", "<end>")))
    for part in ("'<end>'", "special token", "256", "stop_token_ids"):
        assert part in message
    engine.generate(["?"], SamplingParams(max_new_tokens=2, stop=("<end",)))


# --- whatever is said, and whatever stops it --------------------------------------------------------------------------

TOKENS = [
    b"a",
    b"b",
    b"ab",
    b"ba b",
    b" ",
    b"b\xc3",
    b"\xa9",
    "é".encode(),
    b"\xa9a",
    b"\xf0\x9f\x99",
    b"\x82",
    b"\xff",
]
SPECS = [SpecConfig(topk=1, num_steps=5, num_draft_tokens=6), SpecConfig(topk=2, num_steps=3, num_draft_tokens=8)]


@settings(max_examples=60, deadline=None)
@given(
    said=st.lists(st.integers(0, len(TOKENS) - 1), min_size=1, max_size=24),
    stops=st.lists(st.text("ab é🙂", min_size=1, max_size=4), min_size=1, max_size=3),
    include=st.booleans(),
    budget=st.integers(1, 26),
    one_in=st.integers(1, 6),
    spec=st.sampled_from(SPECS),
)
def test_speculative_is_plain_is_decoding_everything_after_each_token(
    said: list[int], stops: list[str], include: bool, budget: int, one_in: int, spec: SpecConfig
) -> None:
    """Blocks of any length, since the draft is wrong now and then."""
    size, tokenizer = len(TOKENS), tokenizer_of(TOKENS)
    params = SamplingParams(max_new_tokens=budget, stop=tuple(stops), include_stop_str_in_output=include)
    target = ScriptedModel(text_logits([0, *said], size), size)
    other = agreeing_now_and_then(target.next_logits, peaked_logits(size), one_in)
    plain, speculative = Engine(target), Engine(target, ScriptedModel(other, size), spec)
    plain.tokenizer = speculative.tokenizer = tokenizer

    unhindered = [*said, *[0] * budget][:budget]
    kept, text, stop = naive_stop(tokenizer.decode, unhindered, stops, include)
    (by_plain,) = plain.generate([[0]], params)
    assert by_plain.token_ids == unhindered[:kept]
    assert (by_plain.text, by_plain.matched_stop) == (text, stop)
    assert by_plain.finish_reason == ("length" if stop is None else "stop")

    by_spec, watcher = generate_watched(speculative, [[0]], params)
    assert_same_output([by_plain], by_spec)
    assert by_spec[0].matched_stop == stop
    assert [token for request in watcher.requests for token in request.committed] == by_plain.token_ids[1:]
    assert_stream(speculative, tokenizer, params, by_plain.token_ids, text)


def assert_stream(engine: Engine, tokenizer: Tokenizer, params: SamplingParams, ids: Sequence[int], text: str) -> None:
    """Blocks join to the output, and at no time was more told than was decided, nor less."""
    told, count = "", 0
    for block in engine.stream([0], params):
        told, count = told + block.text, count + len(block.token_ids)
        if block.finish_reason is None:
            so_far = tokenizer.decode(ids[:count])
            assert told == so_far[: len(so_far) - undecided_end(so_far, params.stop)]
    assert (told, count) == (text, len(ids))
    assert_all_free(engine)
