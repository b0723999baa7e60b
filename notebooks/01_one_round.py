# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#       format_version: '1.3'
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # One round of speculation
#
# A language model writes one token for each forward. An engine that *speculates* has two models: a small **draft**
# guesses several tokens ahead, and the **target**, the model that is being served, checks all of the guesses in one
# forward. What it confirms is output; what it does not is thrown away. The text is the target's own, to the last token.
#
# This notebook takes one such round apart, with EAGLE as the draft. You should know what a transformer and its
# attention do; you need not know how a serving engine works. Three numbers set the size of a round:
#
# - **k** (`topk`): how many branches the draft follows,
# - **S** (`num_steps`): how many tokens ahead it looks,
# - **N** (`num_draft_tokens`): how many nodes the target checks, the root included.

# %% [markdown]
# ## Fewer forwards, the same text
#
# First without speculation. The model is a small one that comes with this repository. It has read Python code, and
# writes something like it. It runs in float64 here, where rounding is too small to decide between two tokens: so all
# texts can be compared token by token, and the counts below do not hang on the machine.

# %%
from dataclasses import replace

import matplotlib.pyplot as plt
import torch

from refspec import Engine, SamplingParams, SpecConfig
from refspec.bench.prompts import load_prompts
from refspec.contracts import ForwardMode
from refspec.course import plots
from refspec.engine.record import make_trace
from refspec.kernels import build_tree, verify_tree_greedy
from refspec.models.scripted import ScriptedModel
from refspec.requests.request import Request, RunningBatch
from refspec.spec.commit import commit
from refspec.spec.draft import draft
from refspec.spec.extend import extend_after_verify
from refspec.spec.tree import make_tree
from refspec.spec.verify import verify

plots.use_style()
torch.set_num_threads(1)  # matrices as small as these gain nothing from a second one
prompt, params = "def fib(n):", SamplingParams(max_new_tokens=64)
plain = Engine("tiny", dtype="float64")
[expected] = plain.generate([prompt], params)
print(prompt + expected.text)

# %% [markdown]
# Then with it. The `observer` is handed a trace of every round; we shall look into one of them.

# %%
k, S, N = 4, 3, 16
config = SpecConfig(topk=k, num_steps=S, num_draft_tokens=N)
engine = Engine("tiny", spec=config, dtype="float64")
rounds = []
[generation] = engine.generate([prompt], params, observer=rounds.append)
assert generation.token_ids == expected.token_ids

decoded = len(generation.token_ids) - 1  # reading the prompt gave the first token
print(f"{decoded} tokens      target forwards  per token  draft forwards")
for name, stats in (("plain", plain.stats), ("speculative", engine.stats)):
    by_target, by_draft = stats.target_forwards, stats.draft_forwards + stats.extend_forwards
    print(f"{name:<12} {by_target:>18} {by_target / decoded:>10.2f} {by_draft:>15}")

# %% [markdown]
# The draft's forwards are not free, but they are small: this EAGLE head has a single layer. It can do with that because
# it does not start from scratch: beside each token it is fed the hidden state of the token before, the target's own as
# far as the target has read, then its own guess of it. Embedding and output head it borrows from the target.

# %%
for name, model in (("target", engine.target_model), ("EAGLE head", engine.scheduler.worker.draft_runner.model)):
    weights = sum(parameter.numel() for parameter in model.parameters())
    print(f"{name:<10}  layers: {model.config.num_hidden_layers:>2}  weights of its own: {weights / 1e6:.2f} million")
assert engine.scheduler.worker.draft_runner.model.shared[0] is engine.target_model.embed_tokens

# %% [markdown]
# ## One round
#
# Its phases, in their order: **draft**, **tree**, **verify**, **commit**, **extend**. The target runs once, in verify.
# The draft runs S times: S − 1 times in the draft phase, whose level 0 is there already, and once in extend, which
# reads what was committed and so makes level 0 of the *next* round.

# %%
trace = make_trace(engine, {}, [prompt], [generation], rounds)
words = trace.vocabulary
round_ = trace.rounds[10]  # any but the last: when the text is done, extend is left out
[tree] = round_.requests
print("forwards", round_.forwards)
assert [round_.forwards.get(name, 0) for name in ("draft", "target", "extend")] == [S - 1, 1, 1]

# %% [markdown]
# ### Draft: a pool of candidates
#
# At level 0 the draft names its k likeliest tokens. From then on it follows k branches, and each has k children, of
# which the best k are followed further. All children go into the pool, followed or not: k + (S − 1)·k².
# A candidate's score is the probability that the draft gives to the whole path down to it.

# %%
print(f"{len(tree.candidates)} candidates = {k} + {S - 1}·{k}²")
assert len(tree.candidates) == k + (S - 1) * k**2

# %% [markdown]
# ### Tree: the best N − 1 are kept
#
# What the target's forward costs depends on N, not on the shape of the tree. So the best N − 1 candidates of *all*
# levels are kept: where the draft is sure, the tree grows deep, elsewhere wide.

# %%
fig, ax = plt.subplots(figsize=(7, 3.6))
plots.draw_pool(ax, tree)
plt.show()
# alt: Scatter plot of the 36 candidates, 4 at level 0 and 16 at each of levels 1 and 2, by the probability of their
# path, on a logarithmic axis. The 15 that are not below a dashed line are kept: all of level 0, some of level 1, few of
# level 2.

# %% [markdown]
# The dashed line is the lowest score that was kept. A cut by score alone never tears the tree apart: a child's path is
# no likelier than its parent's, so whoever is kept has a parent that is kept too.

# %%
for index, candidate in enumerate(tree.candidates):
    if candidate.parent >= 0:  # -1 is the root
        assert candidate.score <= tree.candidates[candidate.parent].score
        assert index not in tree.kept or candidate.parent in tree.kept
print(len(tree.kept), "kept, each with its parent")

# %% [markdown]
# ### Verify: one forward over the whole tree
#
# The root, row 0, is the newest token of the output: chosen by the target in the round before, and not yet in its KV
# cache. The target reads all N rows at once. The branches must not see each other: each row attends the committed text,
# its ancestors and itself. That is the **tree mask**, drawn at the right of the tree, with the same rows.

# %%
fig, (left, right) = plt.subplots(1, 2, figsize=(8, 4.6), width_ratios=(1.1, 1))
plots.draw_tree(left, tree, words)
plots.draw_mask(right, tree, words)
plt.show()
# alt: Left: the tree of 16 rows, each with its token and the target's choice after it. A thick blue path leads from the
# root over two accepted drafts; the choice at its end, the bonus, is starred. Right: the tree mask, 16 by 16 cells. The
# first column and the diagonal are filled, and each row's ancestors.


# %%
def path_to(row):
    return [row] if row == 0 else [*path_to(tree.parents[row]), row]


for row in range(N):
    assert path_to(row) == [column for column in range(N) if tree.tree_mask[row][column] == "1"]
print("row", N - 1, "sees the rows", path_to(N - 1))

# %% [markdown]
# So the target's choice after a row is just what it would have been without a tree. The plain engine can tell: we let
# it read the text with each row's path at its end, and say one token more.

# %%
tokens = [tree.bonus_token, *(tree.candidates[i].token for i in tree.kept)]
in_cache = (engine.encode(prompt) + generation.token_ids)[: tree.seq_len]
texts = [in_cache + [tokens[node] for node in path_to(row)] for row in range(N)]
answers = plain.generate(texts, SamplingParams(max_new_tokens=1))
assert [answer.token_ids for answer in answers] == [[choice] for choice in tree.target_predict]
print(f"{N} paths one by one give the {N} choices that the tree gave at once")

# %% [markdown]
# Now we can walk down: from the root to the child that is the target's choice, and on from there, as long as there is
# one.

# %%
path = [0]
while True:
    choice = tree.target_predict[path[-1]]
    child = [row for row in range(N) if tree.parents[row] == path[-1] and tokens[row] == choice]
    here, after = words[tokens[path[-1]]], words[choice]
    print(f"row {path[-1]:>2} {here!r:<14} the target says {after!r:<14} row", *child or ["-"])
    if not child:
        break
    path += child
assert path == tree.accepted_rows

# %% [markdown]
# The last choice has no row in the tree, but it is the target's own word all the same: it is the **bonus**, and the
# root of the next round. So even a round in which every draft is wrong brings a token, as plain decoding would.

# %%
assert len(tree.committed) == len(path) == (len(path) - 1) + 1
assert trace.rounds[round_.number + 1].requests[0].bonus_token == tree.committed[-1]
print(f"{len(path) - 1} drafts + 1 bonus:", [words[token] for token in tree.committed])

# %% [markdown]
# ### Commit: who owns which slot
#
# Keys and values of each token live in a **slot** of the KV pool. The draft reserves k·S for its branches and gives
# *all* of them back at the end of its phase, before the target verifies. Verify takes N fresh ones. Commit keeps those
# of the accepted path and frees the rest.

# %%
fig, ax = plt.subplots(figsize=(7, 3.2))
plots.draw_slots(ax, round_)
plt.show()
# alt: Step plot of the slots that the request owns. In the draft phase 12 are taken and 12 given back; in verify 16 are
# taken; in commit 13 go back, so that the round ends with 3 slots more than it began with.

# %%
print("taken   ", round_.slots_taken)
print("returned", round_.slots_returned)
assert round_.slots_taken["draft"] == round_.slots_returned["draft"] == k * S
assert round_.slots_taken["verify"] == N
assert round_.slots_returned["commit"] == N - len(tree.committed)

# %% [markdown]
# The bonus has no slot yet: it gets one as the root of the next round. The slots that stay are those of the old root
# and of the accepted drafts, just as many as tokens were committed.
#
# ## By hand
#
# ### A tree of five words
#
# Two functions do the tree's work, and they take any tree. Here k = 2 and S = 2, so the pool has 2 + 2² places.
# Candidate i hangs under the node that `parent_list[i // k]` names.

# %%
pool = ["cat", "dog", "sat", "ran", "barked", "ran"]  # 0, 1 under "the"; 2, 3 under cat; 4, 5 under dog
parent_list = torch.tensor([[-1, 0, 1]])  # the root, candidate 0, candidate 1
kept = torch.tensor([[0, 1, 2, 5]])  # the tree does without cat ran and dog barked
nodes = ["the", *(pool[i] for i in kept[0])]

mask, positions, index, first_child, next_sibling = build_tree(
    parent_list, kept, torch.tensor([7]), topk=2, num_steps=2, num_draft_tokens=5, mask_mode="qlen"
)
for row, seen in enumerate(mask.view(5, 5).int().tolist()):
    links = f"first child {first_child[0, row]:>2}, next sibling {next_sibling[0, row]:>2}"
    print(f"{row} {nodes[row]:<4} sees {seen}, at position {positions[row]}, {links}")

# %% [markdown]
# Seven tokens are in the cache, so the root stands at position 7. Siblings share a position: they are two answers to
# the same question. Now say what the target chooses after each node, and walk:

# %%
target_says = ["dog", "sat", "ran", "down", "away"]  # after the, cat, dog, (cat) sat, (dog) ran
ids = {word: number for number, word in enumerate(dict.fromkeys([*nodes, *target_says]))}
candidates = torch.tensor([[ids[word] for word in nodes]])
target_predict = torch.tensor([[ids[word] for word in target_says]])
predict, accepted_rows, accepted = verify_tree_greedy(
    candidates, index, first_child, next_sibling, target_predict, num_steps=2
)
path = [row for row in accepted_rows[0].tolist() if row != -1]
print("path", [nodes[row] for row in path], "and the bonus", target_says[path[-1]])
assert accepted.tolist() == [len(path) - 1]  # drafts; the bonus comes on top

# %% [markdown]
# ### A round, phase by phase
#
# A *scripted* model has no weights: a function of yours says what comes next. This target counts. The draft counts too,
# but after a 3 it would rather say 9 than 4. With k = 2 the tree holds both of its ideas. (What
# `exact_branch_kv` does we shall see in a moment.)


# %%
def counts(context):
    return [9.0 if token == (context[-1] + 1) % 10 else 0.0 for token in range(10)]


def counts_badly(context):
    return [10.0 if (context[-1], token) == (3, 9) else logit for token, logit in enumerate(counts(context))]


toy_config = SpecConfig(topk=2, num_steps=3, num_draft_tokens=6, exact_branch_kv=True)
toy = Engine(ScriptedModel(counts, 10), ScriptedModel(counts_badly, 10), toy_config, kv_slots=20)
request = Request(0, prompt_ids=[1], params=params, stop_token_ids=frozenset(), max_total_len=64)
request.row = toy.table.alloc()
batch = RunningBatch.of([request], toy.table.req_to_token)
batch = toy.scheduler.worker.forward(batch, ForwardMode.EXTEND)  # the prefill
print("output", request.output_ids, "and", toy.allocator.available(), "of 20 slots are free")

# %% [markdown]
# This is all that the engine's worker does in a round; see `_round` in `workers/eagle_v1.py`. Mind the slots: those
# of the draft are back before verify takes any.

# %%
worker, slots = toy.scheduler.worker, toy.allocator


def report(phase):
    print(f"{phase:<7} {slots.taken:>3} taken so far, {slots.returned:>2} returned, {slots.available():>3} free")


report("prefill")
drafted = draft(batch, worker.draft_runner, slots, toy_config)
report("draft")
toy_tree = make_tree(batch, drafted, toy_config)
report("tree")
verified = verify(batch, toy_tree, worker.target, slots, toy_config)
report("verify")
done = commit(batch, verified, worker.target, slots, toy_config)
report("commit")
batch = extend_after_verify(batch, verified, done, worker.draft_runner, toy_config)
report("extend")

# %%
print("tree  ", toy_tree.draft_token.tolist(), "at positions", toy_tree.positions.tolist())
print("path  ", [row for row in verified.accept_index[0].tolist() if row != -1])
print("output", request.output_ids)
assert request.output_ids == [2, 3, 4, 5, 6]
assert done.accept_lens == [4]  # 3, 4 and 5 were drafts, 6 is the bonus

# %% [markdown]
# The draft's favourite after 3 was wrong, and still all S drafts of a path were accepted, since the tree had the other
# idea as well. With k = 1 the tree is a chain, and the first round ends at the wrong guess.
#
# Something else can spoil the guess. By default, as in SGLang, branch j of the draft attends what branch j held in the
# forwards before. But the 4 is in the second branch, and its parent 3 was in the first: so it attends another token in
# its parent's place, and a scripted model that attends the wrong tokens talks nonsense. `exact_branch_kv=True` lets
# each branch attend its true ancestors. The output is the same in all cases: verification repairs any draft.

# %%
for what, spec in {
    "k=1": SpecConfig(topk=1, num_steps=3, num_draft_tokens=4),
    "k=2, as in SGLang": replace(toy_config, exact_branch_kv=False),
    "k=2, exact": toy_config,
}.items():
    counter = Engine(ScriptedModel(counts, 10), ScriptedModel(counts_badly, 10), spec)
    [counted] = counter.generate([[1]], SamplingParams(max_new_tokens=12))
    print(f"{what:<18} output {counted.token_ids} in rounds of {counted.accept_lens}")
    assert counted.token_ids == [2, 3, 4, 5, 6, 7, 8, 9, 0, 1, 2, 3]

# %% [markdown]
# ## Many rounds
#
# How many tokens a round brings is its **accept length**; we count the bonus. (Not everybody does: always ask.) It lies
# between 1 and S + 1. Here is its distribution over twelve prompts:

# %%
many = Engine("tiny", spec=config, dtype="float64")
generations = many.generate(load_prompts()[:12], params)
lens = torch.tensor([length for generation in generations for length in generation.accept_lens])
share = torch.bincount(lens, minlength=S + 2)[1:] / len(lens)
fig, ax = plt.subplots(figsize=(7, 2.8))
bars = ax.bar(range(1, S + 2), share, color=plots.BLUE, width=0.7)
ax.bar_label(bars, [f"{part:.0%}" for part in share.tolist()], padding=2)
ax.axvline(lens.double().mean(), color=plots.ORANGE, linestyle="--", label=f"mean {lens.double().mean():.2f}")
ax.set(xlabel="accept length (bonus included)", ylabel="share of rounds", xticks=range(1, S + 2))
ax.legend(loc="upper left")
plt.show()
# alt: Bar chart of how many rounds have an accept length of 1, 2, 3 and 4, with a dashed line at the mean. Most rounds
# have 3 or 4.

# %% [markdown]
# The mean is what one forward of the target brings a request, in tokens. Without the bonus it would read one less. Its
# inverse is the number of target forwards for each token; plain decoding needs 1.

# %%
mean = many.stats.accept_length
print(f"accept length {mean:.2f} = {mean - 1:.2f} drafts + 1 bonus, so {1 / mean:.2f} target forwards for each token")
assert abs(mean - lens.double().mean()) < 1e-9
assert 1 <= min(lens) <= max(lens) <= S + 1
assert all(len(one.token_ids) == 1 + sum(one.accept_lens) for one in generations)  # the first token is the prefill's

# %% [markdown]
# ## How far should the draft look ahead?
#
# With a chain (k = 1, N = S + 1), each further level costs the draft a forward in *every* round, and helps only in
# those in which all guesses before it were right. Change the range or the prompts, and run the cell again.

# %%
steps = list(range(1, 8))
accept_length, target_cost, draft_cost = [], [], []
for num_steps in steps:
    sweep = SpecConfig(topk=1, num_steps=num_steps, num_draft_tokens=num_steps + 1)
    swept = Engine("tiny", spec=sweep, dtype="float64", max_running=1)  # one after the other: all forwards are its own
    swept.generate(load_prompts()[:3], SamplingParams(max_new_tokens=32))
    stats = swept.stats
    accept_length.append(stats.accept_length)
    target_cost.append(stats.target_forwards / stats.committed_tokens)
    draft_cost.append((stats.draft_forwards + stats.extend_forwards) / stats.committed_tokens)
    print(f"S={num_steps}  accept length {accept_length[-1]:.2f}", end="  ")
    print(f"forwards per token: target {target_cost[-1]:.2f}, draft {draft_cost[-1]:.2f}")

# %%
fig, (left, right) = plt.subplots(1, 2, figsize=(8.2, 3))
left.plot(steps, accept_length, "o-", color=plots.BLUE)
left.set(xlabel="num_steps (S)", ylabel="accept length", ylim=(1, None), xticks=steps)
right.plot(steps, draft_cost, "s--", color=plots.ORANGE, label="draft")
right.plot(steps, target_cost, "o-", color=plots.BLUE, label="target")
right.set(xlabel="num_steps (S)", ylabel="forwards per token", ylim=(0, None), xticks=steps)
right.legend()
plt.show()
# alt: Two line plots over num_steps from 1 to 7. Left: the accept length rises at first, and from 5 on hardly changes.
# Right: so do target forwards per token, which fall at first; draft forwards per token rise all the way.

# %%
for num_steps, length, by_target, by_draft in zip(steps, accept_length, target_cost, draft_cost, strict=True):
    assert length <= num_steps + 1
    assert abs(by_target * length - 1) < 1e-9  # one for each round: the inverse of the accept length
    assert by_draft <= num_steps * by_target  # S for each round; less, as a text's last round has no extend
saved, spent = target_cost[0] - target_cost[-1], draft_cost[-1] - draft_cost[0]
print(
    f"S={steps[-1]} against S={steps[0]}, per token: {saved:.2f} target forwards less, {spent:.2f} draft forwards more"
)

# %% [markdown]
# Which S is best depends on what the two forwards cost, and that is a matter of models, machine and batch:
# `refspec bench engine` measures it on yours.
#
# ## Try this
#
# 1. Set `N = 6` at the top and run all: the pool stays the same, the tree shrinks. Which nodes go first, and what
#    becomes of the mean accept length? And with `N = 37`, where every candidate is kept?
# 2. In the tree of five words, change one word of `target_says` so that the round brings "cat", "sat" and a bonus. Then
#    one so that it brings a bonus alone.
# 3. Set `k, S, N = 8, 5, 32` at the top and run all. Then once more with `exact_branch_kv=True` given to `config`, so
#    that the draft's branches attend their true ancestors in its cache. Does the output change? Does the number of
#    target forwards for the one prompt, and the mean over twelve? Do both get better? Which of the answers could you
#    have known before?
