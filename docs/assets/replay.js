/* The replay: one round of EAGLE speculation, step by step, drawn from a recorded run.
 *
 * Where it comes from. A page holds
 *
 *     <div class="refspec-replay" data-round="2" data-request="0">
 *       <script type="application/json">a whole trace (refspec.trace.Trace, schema_version 2)</script>
 *     </div>
 *
 * and every such element becomes a replay of the run in it. data-round is the round to show first, data-request the
 * prompt whose tree is shown. A trace holds what the engine did: candidates by pool index, rows of the tree, slots.
 *
 * How a step is made. stepsOf(tree, vocabulary) turns a request's part of a round into a list of {phase, sentence,
 * state}. It is pure: it knows nothing of the page, and a state says all that is known by then (see `state` there). A
 * Replay draws the round once, and show(step) then sets positions, classes and words from that step's state alone, so
 * that any step can follow any other.
 *
 * Tokens are a model's output and can be anything, "<script>" included. They reach the page as text nodes only.
 */
(() => {
  "use strict";

  const PHASES = ["start", "draft", "give back", "keep", "mask", "verify", "walk", "commit", "extend"];

  // --- words -------------------------------------------------------------------------------------------------------

  // Control characters, and those that only change how others are shown.
  const UNSEEN = /[\u0000-\u001f\u007f-\u009f\u200b-\u200f\u2028-\u202e\u2066-\u2069\ufeff]/g;
  const VISIBLE = { " ": "␣", "\n": "↵", "\t": "⇥", "\r": "␍" };

  /** A token's text with every character visible; its id where it has no text of its own. */
  function shown(vocabulary, id) {
    const text = vocabulary[id];
    if (text === undefined || text === "" || text.includes("\ufffd")) return `<${id}>`;
    const escaped = (c) => `\\u${c.charCodeAt(0).toString(16).padStart(4, "0")}`;
    return text.replace(/[ \n\t\r]/g, (c) => VISIBLE[c]).replace(UNSEEN, escaped);
  }

  /** [1, 2, 3, 7] as "1–3, 7". */
  function ranges(numbers) {
    const runs = [];
    for (const n of [...numbers].sort((a, b) => a - b)) {
      if (runs.length && runs.at(-1)[1] === n - 1) runs.at(-1)[1] = n;
      else runs.push([n, n]);
    }
    return runs.map(([first, last]) => (first === last ? `${first}` : `${first}–${last}`)).join(", ");
  }

  const many = (count, noun) => `${count} ${noun}${count === 1 ? "" : "s"}`;
  /** ["a", "b", "c"] as "a, b and c". */
  const listed = (items) => [items.slice(0, -1).join(", "), items.at(-1)].filter(Boolean).join(" and ");
  const probability = (p) => (p > 0 && p < 0.0005 ? "<.001" : p.toFixed(3).replace(/^0/, ""));

  // --- steps -------------------------------------------------------------------------------------------------------

  /** What follows from a round's data: the levels of the pool, which candidates became branches, rows, the bonus.
   * Levels and draft forwards count from 0, as in the code; what hangs under the root is level 0, at depth 1.
   * Guesses that were looked up have no draft slots. */
  function factsOf(tree) {
    const depths = tree.positions.map((position) => position - tree.positions[0]);
    const looksUp = tree.draft_slots.length === 0;
    const levels = tree.candidates.map(() => 0);
    tree.candidates.forEach(({ parent }, i) => {
      if (parent >= 0) levels[i] = levels[parent] + 1;
    });
    return {
      looksUp,
      topk: tree.draft_slots.length,
      numSteps: looksUp ? Math.max(...depths) : tree.draft_slots[0].length,
      levels,
      // A candidate that has children was one of its level's k branches. The last level has none.
      branches: new Set(tree.candidates.map(({ parent }) => parent).filter((parent) => parent >= 0)),
      tokens: [tree.bonus_token, ...tree.kept.map((i) => tree.candidates[i].token)],
      depths,
      draftSlots: tree.draft_slots.flat(),
      freedSlots: tree.verify_slots.filter((slot) => !tree.kept_slots.includes(slot)),
      bonus: tree.target_predict[tree.accepted_rows.at(-1)],
      wasCut: tree.committed.length < tree.accepted_rows.length, // a stop or the budget ended the request
    };
  }

  /** A request's part of a round as a list of {phase, sentence, state}. */
  function stepsOf(tree, vocabulary) {
    const { looksUp, topk: k, numSteps: S, levels, tokens, depths, draftSlots, freedSlots, wasCut } = factsOf(tree);
    const { seq_len: start, accepted_rows: path, committed, finish_reason: reason } = tree;
    const name = (id) => `‘${shown(vocabulary, id)}’`;
    const steps = [];
    let state = {
      levels: 0, // of the pool that are drafted
      written: 0, // draft forwards done; forward i writes column i of the draft slots
      draft: "none", // its slots: none, reserved, returned
      rows: false, // the kept candidates are numbered
      mask: false,
      verify: "none", // its slots: none, taken, settled
      predicted: false, // the target's choices are known
      walked: 0, // rows of the accepted path that the walk has reached
      at: null, // the row after which the walk looks for the target's choice
      bonus: false,
      committed: false,
      forwards: { draft: 0, target: 0, extend: 0 },
    };
    const add = (phase, sentences, change = {}) => {
      state = { ...state, ...change };
      steps.push({ phase, sentence: sentences.filter(Boolean).join(" "), state });
    };

    add("start", [
      `The cache holds ${many(start, "token")}.`,
      `The root is the bonus token of the forward before, ${name(tree.bonus_token)}:`,
      `it is output already, but not in the cache yet, and its position is ${start}.`,
    ]);
    if (looksUp) {
      const lookedUp = ["No model drafts. What followed the newest tokens before is looked up:"];
      add("draft", [...lookedUp, `${tree.candidates.length} found.`], { levels: S });
    }
    for (let level = 0; level < S && !looksUp; level++) {
      const next = level === S - 1 && "They are not followed: the last level needs no forward.";
      if (level === 0) {
        const sentences = [
          `Level 0 needs no forward: the last extend left the likeliest tokens after the root, k = ${k}.`,
          next || "They are the branches.",
          `Draft slots are reserved for k · S = ${k} · ${S} = ${k * S} tokens.`,
        ];
        add("draft", sentences, { levels: 1, draft: "reserved" });
      } else {
        const sentences = [
          `Draft forward ${level - 1} makes level ${level}: a row for each branch, at position ${start + level - 1};`,
          `keys and values go to column ${level - 1} of the draft slots.`,
          `The pool grows by ${many(levels.filter((l) => l === level).length, "candidate")}.`,
          next || `The best of them by path score, k = ${k}, are the next branches.`,
        ];
        const forwards = { ...state.forwards, draft: level };
        add("draft", sentences, { levels: level + 1, written: level, forwards });
      }
    }
    const returned = [
      `Every draft slot goes back before the target runs: ${ranges(draftSlots)}.`,
      `${k * S} were taken and ${k * (S - 1)} written:`,
      "the last of a branch’s S slots is never written, since the last level needs no forward.",
    ];
    if (!looksUp) add("give back", returned, { draft: "returned" });
    const best = `Of ${many(tree.candidates.length, "candidate")} the best ${tree.kept.length} by path score stay.`;
    const kept = [
      looksUp ? "All stay." : best,
      `In the order in which they were ${looksUp ? "found" : "drafted"} they are the tree’s rows from 1 on;`,
      "row 0 is the root.",
    ];
    add("keep", kept, { rows: true });
    const mask = [
      "Each row attends all tokens in the cache, its ancestors and itself.",
      `Its position is ${start} plus its depth, so siblings share one. Point at a row, or press Up and Down.`,
    ];
    add("mask", mask, { mask: true });
    const filling = tree.verify_slots.length - tokens.length;
    const verified = [
      `Verify takes a slot for each row: ${ranges(tree.verify_slots)}.`,
      filling > 0 && `${many(filling, "row")} more fill the tree up to its size, and hang nowhere.`,
      "One target forward over all rows yields its choice after each of them.",
    ];
    add("verify", verified, { verify: "taken", predicted: true, forwards: { ...state.forwards, target: 1 } });

    path.forEach((row, i) => {
      const says = `The target’s choice after row ${row}, ${name(tokens[row])}, is ${name(tree.target_predict[row])}.`;
      if (i + 1 < path.length) {
        add("walk", [says, `Child row ${path[i + 1]} holds it: accepted.`], { walked: i + 2, at: row });
        return;
      }
      let why = tree.parents.includes(row) ? "No child of this row holds it" : "This row has no child in the tree";
      if (depths[row] === S) why = looksUp ? "No guess goes deeper" : "The draft went no deeper";
      const end = `${why}: it is the bonus, and the walk ends. Accepted: ${i} of at most ${many(S, "draft")}.`;
      add("walk", [says, end], { walked: i + 1, at: row, bonus: true });
    });

    const settled = [
      `Committed: ${committed.map(name).join(" ")}.`,
      reason && `The request has ended (${reason}).`,
      wasCut && `What the walk found behind its end is dropped: ${path.length - committed.length} of ${path.length}.`,
      `The path ${path.slice(0, committed.length).join(" → ")} keeps its slots, ${ranges(tree.kept_slots)};`,
      `${freedSlots.length} go back. seq_len goes from ${start} to ${start + committed.length}.`,
    ];
    add("commit", settled, { committed: true, verify: "settled", at: null });
    if (reason) {
      add("extend", ["There is no extend for a request that has ended: it will draft no more."]);
    } else if (looksUp) {
      add("extend", ["No draft has to read what was committed. It is remembered, and will be found by later look-ups."]);
    } else {
      const rows = committed.map((_, i) => start + i); // their positions, see spec/extend.py
      const extended = [
        `One draft forward over ${many(rows.length, "row")}, at position${rows.length === 1 ? "" : "s"} ${ranges(rows)},`,
        "in the slots just kept. A row is fed the token after the one in its slot, the last row the bonus,",
        "beside the target’s hidden state from which that token was chosen.",
        `The likeliest tokens after the bonus, k = ${k}, are level 0 of the next round.`,
      ];
      add("extend", extended, { forwards: { ...state.forwards, extend: 1 } });
    }
    return steps;
  }

  // --- layout ------------------------------------------------------------------------------------------------------

  /** The place of each node of a tree, id -> {column, row}: columns by depth, leaves from the top, and parents amid
   * their children. nodes: [{id, parent, depth}], the root first, siblings in the order in which they are to appear. */
  function layout(nodes) {
    const children = new Map(nodes.map(({ id }) => [id, []]));
    for (const node of nodes) if (children.has(node.parent)) children.get(node.parent).push(node.id);
    const columns = [[nodes[0].id]];
    while (columns.at(-1).length) columns.push(columns.at(-1).flatMap((id) => children.get(id)));
    const rows = new Map();
    for (const column of columns.reverse()) {
      let next = 0;
      for (const id of column) {
        const below = children.get(id).map((child) => rows.get(child));
        rows.set(id, below.length ? Math.max(next, (below[0] + below.at(-1)) / 2) : next);
        next = rows.get(id) + 1;
      }
    }
    return new Map(nodes.map(({ id, depth }) => [id, { column: depth, row: rows.get(id) }]));
  }

  const POOL = { width: 98, gap: 24, height: 20, pitch: 25 };
  const TREE = { width: 80, gap: 18, height: 35, pitch: 40 };
  const CELL = 13; // of the mask

  const ROW_WORDS = {
    candidate: "candidate, and its path score",
    branch: "chosen as a branch",
    faded: "not kept",
    row: "row of the tree",
    accepted: "✓ accepted",
    dropped: "~ after the end",
    refused: "✗ the target chose otherwise",
    unreached: "· never reached",
    bonus: "★ bonus",
  };
  const SLOT_WORDS = {
    committed: "committed before",
    reserved: "reserved for the draft (branch·column)",
    draft: "written by the draft (branch·column)",
    verify: "taken by verify (row)",
    kept: "kept (row)",
    free: "free",
  };

  // --- elements ----------------------------------------------------------------------------------------------------

  function html(tag, attributes = {}, ...children) {
    const node = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
    node.append(...children);
    return node;
  }

  function svg(tag, attributes = {}, text = null) {
    const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
    if (text !== null) node.textContent = text;
    return node;
  }

  /** What a wide picture is scrolled in. Its classes say on which sides there is more, and the style fades those. */
  function pane(picture) {
    const node = html("div", { class: "rs-pane" }, picture);
    const mark = () => {
      node.classList.toggle("rs-more-left", node.scrollLeft > 1);
      node.classList.toggle("rs-more-right", node.scrollLeft + node.clientWidth < node.scrollWidth - 1);
    };
    node.addEventListener("scroll", mark);
    const sizes = new ResizeObserver(mark);
    [node, picture].forEach((part) => sizes.observe(part));
    return node;
  }

  /** Scrolls a pane as little as shows what lies from left to right in it, and a bit beside. */
  function bringIntoView(node, left, right) {
    const beside = 30;
    const least = Math.max(node.scrollLeft, right + beside - node.clientWidth);
    node.scrollLeft = Math.max(0, Math.min(least, left - beside));
  }

  const cut = (text, length) => ([...text].length <= length ? text : `${[...text].slice(0, length - 1).join("")}…`);

  // --- the replay --------------------------------------------------------------------------------------------------

  class Replay {
    constructor(element, trace) {
      this.element = element;
      this.trace = trace;
      this.request = Number(element.dataset.request ?? 0);
      this.rounds = trace.rounds.filter((round) => round.requests.some((tree) => tree.request === this.request));
      if (!this.rounds.length) throw new Error(`it has no round of request ${this.request}`);
      this.build();
      const wanted = this.rounds.findIndex((round) => round.number === Number(element.dataset.round));
      this.openRound(Math.max(0, wanted));
    }

    // The frame: what is the same for all rounds.
    build() {
      const button = (label, title, action) => {
        const node = html("button", { type: "button", title, "aria-label": title }, label);
        node.addEventListener("click", action);
        return node;
      };
      this.select = html("select", { "aria-label": "round" });
      const [from, to] = [this.rounds[0].number, this.rounds.at(-1).number];
      this.rounds.forEach(({ number }, i) =>
        this.select.append(html("option", { value: i }, `round ${number} (of ${from} to ${to})`)),
      );
      this.select.addEventListener("change", () => this.openRound(Number(this.select.value)));
      this.previousRound = button("◂", "previous round", () => this.openRound(this.index - 1));
      this.nextRound = button("▸", "next round", () => this.openRound(this.index + 1));
      this.first = button("⇤", "first step (Home)", () => this.show(0));
      this.back = button("← back", "one step back (Left)", () => this.show(this.step - 1));
      this.next = button("next →", "next step (Right)", () => this.show(this.step + 1));
      this.last = button("⇥", "last step (End)", () => this.show(this.steps.length - 1));
      this.counter = html("span", { class: "rs-counter" });
      this.chips = PHASES.map((phase) =>
        button(phase, `go to: ${phase}`, () => this.show(this.steps.findIndex((step) => step.phase === phase))),
      );
      this.sentence = html("p", { class: "rs-sentence", "aria-live": "polite" });
      this.lookedAt = html("p", { class: "rs-looked", "aria-live": "polite" });
      this.story = html("p", { class: "rs-story" });
      this.stage = html("div", { class: "rs-stage" });
      this.slots = html("div", { class: "rs-slots" });
      this.legend = html("p", { class: "rs-legend" });
      this.forwards = html("p", { class: "rs-forwards" });
      this.frame = html(
        "div",
        {
          class: "rs-replay",
          tabindex: "0",
          role: "group",
          "aria-label": "Replay of a round: Left and Right go through its steps",
        },
        html(
          "div",
          { class: "rs-bar" },
          html("span", { class: "rs-group" }, this.previousRound, this.select, this.nextRound),
          html("span", { class: "rs-group" }, this.first, this.back, this.next, this.last),
          this.counter,
          html("span", { class: "rs-keys" }, "keys: ← → Home End"),
        ),
        html("div", { class: "rs-phases" }, ...this.chips),
        this.sentence,
        this.story,
        this.stage,
        this.lookedAt,
        this.legend,
        this.slots,
        this.forwards,
      );
      this.frame.addEventListener("keydown", (event) => this.onKey(event));
      this.element.append(this.frame);
    }

    onKey(event) {
      const on = event.target.tagName;
      if (event.altKey || event.ctrlKey || event.metaKey || on === "SELECT" || (on === "BUTTON" && event.key === " "))
        return;
      const turn = {
        ArrowLeft: () => this.show(this.step - 1),
        ArrowRight: () => this.show(this.step + 1),
        " ": () => this.show(this.step + 1),
        Home: () => this.show(0),
        End: () => this.show(this.steps.length - 1),
        ArrowUp: () => this.look(Math.max(0, (this.looked ?? 1) - 1)),
        ArrowDown: () => this.look(Math.min(this.tree.parents.length - 1, (this.looked ?? -1) + 1)),
        Escape: () => this.look(null),
      }[event.key];
      // With the focus on nothing in particular the page is scrolled by what does not go from step to step.
      const ofSteps = ["ArrowLeft", "ArrowRight", "Home", "End"].includes(event.key);
      if (on === "BODY" && (!ofSteps || event.shiftKey)) return;
      const vertical = event.key === "ArrowUp" || event.key === "ArrowDown" || event.key === "Escape";
      if (!turn || (vertical && !this.steps[this.step].state.mask)) return;
      event.preventDefault();
      turn();
    }

    /** How much of the replay the window shows, in pixels; 0 if that is less than half of what it could show. */
    inView() {
      const { top, bottom, height } = this.frame.getBoundingClientRect();
      const shown = Math.min(bottom, innerHeight) - Math.max(top, 0);
      return shown >= Math.min(height, innerHeight) / 2 ? shown : 0;
    }

    /** Draws all that a round will need, with nothing of it placed yet, and shows its first step. */
    openRound(index) {
      if (index < 0 || index >= this.rounds.length) return;
      this.index = index;
      this.round = this.rounds[index];
      this.tree = this.round.requests.find((tree) => tree.request === this.request);
      this.facts = factsOf(this.tree);
      this.steps = stepsOf(this.tree, this.trace.vocabulary);
      this.select.value = index;
      this.previousRound.disabled = index === 0;
      this.nextRound.disabled = index === this.rounds.length - 1;

      const { candidates, kept, accepted_rows: path } = this.tree;
      const rowOf = new Map(kept.map((i, row) => [i, row + 1]));
      this.nodes = [{ id: "root", parent: null, depth: 0, token: this.tree.bonus_token, row: 0, pool: null }];
      candidates.forEach((candidate, i) =>
        this.nodes.push({
          id: i,
          parent: candidate.parent < 0 ? "root" : candidate.parent,
          depth: this.facts.levels[i] + 1,
          token: candidate.token,
          row: rowOf.get(i) ?? null,
          pool: i,
        }),
      );
      this.bonusNode = {
        id: "bonus",
        parent: this.idOf(path.at(-1)),
        depth: this.facts.depths[path.at(-1)] + 1,
        token: this.facts.bonus,
        row: null,
        pool: null,
      };
      const upTo = (depth) => layout(this.nodes.filter((node) => node.depth <= depth));
      this.poolPlaces = Array.from({ length: this.facts.numSteps + 1 }, (_, levels) => upTo(levels));
      const rows = this.nodes.filter((node) => node.row !== null);
      // The bonus comes before the drafts that it was preferred to.
      this.treePlaces = layout([rows[0], this.bonusNode, ...rows.slice(1)]);
      this.treeColumns = 1 + Math.max(...[...this.treePlaces.values()].map(({ column }) => column));

      this.picture = svg("svg", { class: "rs-tree", "aria-hidden": "true" });
      this.edges = svg("g", { class: "rs-edges" });
      this.picture.append(this.edges);
      for (const node of [...this.nodes, this.bonusNode]) this.picture.append(this.drawNode(node));
      this.maskPicture = this.drawMask();
      this.treePane = pane(this.picture);
      this.maskPane = pane(this.maskPicture);
      this.stage.replaceChildren(this.treePane, this.maskPane);
      this.drawSlots();
      this.show(0);
    }

    idOf(row) {
      return row === 0 ? "root" : this.tree.kept[row - 1];
    }

    drawNode(node) {
      node.group = svg("g");
      node.box = svg("rect", { rx: 3 });
      node.label = svg("text", { x: 6, y: 14, class: "rs-token" });
      node.note = svg("text", { class: "rs-note" });
      node.group.append(node.box, node.label, node.note, svg("title", {}, this.describe(node)));
      if (node.row !== null) {
        node.group.addEventListener("pointermove", () => this.look(node.row));
        node.group.addEventListener("pointerleave", () => this.look(null));
      }
      return node.group;
    }

    describe(node) {
      const token = `${shown(this.trace.vocabulary, node.token)} (id ${node.token})`;
      if (node.pool === null) return token;
      const { score, parent } = this.tree.candidates[node.pool];
      if (score === null) return `${token}\nguess ${node.pool}`;
      const before = parent < 0 ? 1 : this.tree.candidates[parent].score;
      const [whole, own] = [score.toPrecision(4), (score / before).toPrecision(4)];
      const place = `candidate ${node.pool}, of level ${this.facts.levels[node.pool]}`;
      return `${token}\n${place}, path score ${whole}, of which its own token ${own}`;
    }

    drawMask() {
      const rows = this.tree.tree_mask.length;
      const [left, top] = [22 + 2 * CELL, 16];
      const picture = svg("svg", { class: "rs-mask", "aria-hidden": "true" });
      picture.style.width = `${left + rows * CELL + 1}px`;
      picture.style.height = `${top + rows * CELL + 1}px`;
      picture.append(svg("text", { x: 22 + CELL - 2, y: 11, class: "rs-tick" }, "cache"));
      this.maskRows = this.tree.tree_mask.map((bits, row) => {
        const y = top + row * CELL;
        const group = svg("g", { class: "rs-mask-row" });
        picture.append(svg("text", { x: left + row * CELL + CELL / 2, y: 11, class: "rs-tick" }, `${row}`));
        const box = (x, width, kind) =>
          group.append(svg("rect", { x: x + 1, y: y + 1, width: width - 2, height: CELL - 2, class: kind }));
        group.append(svg("rect", { x: 0, y, width: left + rows * CELL, height: CELL, class: "rs-hit" }));
        group.append(svg("text", { x: 18, y: y + 10, class: "rs-row-number" }, `${row}`));
        box(21, 2 * CELL - 2, "rs-prefix");
        [...bits].forEach((bit, column) => box(left + column * CELL, CELL, bit === "1" ? "rs-seen" : "rs-unseen"));
        group.addEventListener("pointermove", () => this.look(row));
        group.addEventListener("pointerleave", () => this.look(null));
        picture.append(group);
        return group;
      });
      return picture;
    }

    drawSlots() {
      const touched = new Set([...this.facts.draftSlots, ...this.tree.verify_slots]);
      const earlier = this.rounds
        .slice(0, this.index)
        .flatMap((round) => round.requests.find((tree) => tree.request === this.request).kept_slots);
      this.heldSlots = new Set(earlier);
      const shownEarlier = earlier.filter((slot) => !touched.has(slot)).slice(-6);
      this.cells = [...shownEarlier, ...[...touched].sort((a, b) => a - b)].map((slot) => {
        const use = html("span", { class: "rs-use" });
        return { slot, use, cell: html("span", { class: "rs-cell" }, html("span", {}, `${slot}`), use) };
      });
      const cells = html("div", { class: "rs-cells" }, ...this.cells.map(({ cell }) => cell));
      this.slotsTitle = html("p", { class: "rs-slots-title" });
      this.slots.replaceChildren(this.slotsTitle, cells);
    }

    show(step) {
      if (step < 0 || step >= this.steps.length) return;
      this.step = step;
      const { phase, sentence, state } = this.steps[step];
      this.sentence.textContent = sentence;
      this.counter.textContent = `step ${step + 1} of ${this.steps.length}`;
      this.first.disabled = this.back.disabled = step === 0;
      this.next.disabled = this.last.disabled = step === this.steps.length - 1;
      this.chips.forEach((chip, i) =>
        PHASES[i] === phase ? chip.setAttribute("aria-current", "step") : chip.removeAttribute("aria-current"),
      );
      this.element.dataset.step = step;
      this.element.dataset.phase = phase;
      this.showStory(state);
      this.showTree(state);
      this.showSlots(state);
      const { draft, target, extend } = state.forwards;
      const drafts = this.facts.looksUp ? 0 : this.facts.numSteps - 1;
      const extends_ = this.facts.looksUp || this.tree.finish_reason ? 0 : 1;
      const counts = [`draft ${draft} of ${drafts}`, `target ${target} of 1`, `extend ${extend} of ${extends_}`];
      this.forwards.textContent = `forwards so far: ${counts.join(", ")}`;
      this.look(null);
    }

    showStory(state) {
      const { prompt_ids: prompt, token_ids: output } = this.trace.outputs[this.request];
      const text = (ids) => ids.map((id) => shown(this.trace.vocabulary, id)).join("");
      const before = text([...prompt, ...output].slice(0, this.tree.seq_len));
      const start = [...before].length > 60 ? `…${[...before].slice(-60).join("")}` : before;
      this.story.replaceChildren(start, html("span", { class: "rs-root" }, text([this.tree.bonus_token])));
      if (state.committed) this.story.append(html("ins", {}, text(this.tree.committed)));
    }

    /** What became of a row, as far as it is known: its class and its mark. */
    fate(row, state) {
      const path = this.tree.accepted_rows;
      if (row === 0) return ["root", ""];
      if (path.slice(0, state.walked).includes(row)) {
        return state.committed && path.indexOf(row) > this.tree.committed.length ? ["dropped", "~"] : ["accepted", "✓"];
      }
      const decided = path.slice(0, state.bonus ? state.walked : Math.max(0, state.walked - 1));
      if (decided.includes(this.tree.parents[row])) return ["refused", "✗"];
      return state.bonus ? ["unreached", "·"] : ["row", ""];
    }

    showTree(state) {
      const geometry = state.mask ? TREE : POOL;
      const places = state.mask ? this.treePlaces : this.poolPlaces[state.levels];
      const columns = state.mask ? this.treeColumns : this.facts.numSteps + 1;
      const at = new Map();
      let bottom = 0;
      const edges = [];
      for (const node of [...this.nodes, this.bonusNode]) {
        const isBonus = node === this.bonusNode;
        const visible = isBonus
          ? state.bonus && !(state.committed && this.facts.wasCut)
          : state.mask
            ? node.row !== null
            : node.depth <= state.levels;
        node.group.style.display = visible ? "" : "none";
        if (!places.has(node.id)) continue;
        const { column, row } = places.get(node.id);
        const [x, y] = [column * (geometry.width + geometry.gap) + 1, row * geometry.pitch + 1];
        bottom = Math.max(bottom, y + geometry.height);
        if (!visible) continue;
        at.set(node.id, { x, y });
        node.group.style.transform = `translate(${x}px, ${y}px)`;
        node.box.setAttribute("width", geometry.width);
        node.box.setAttribute("height", geometry.height);
        const [kind, mark] = isBonus ? ["bonus", "★"] : this.nodeKind(node, state);
        node.group.setAttribute("class", `rs-node rs-${kind}`);
        node.kind = kind;
        const number = state.rows && node.row !== null ? `${node.row} ` : "";
        const room = (state.mask ? 10 : node.depth ? 9 : 13) - number.length - (mark ? 2 : 0);
        const token = cut(shown(this.trace.vocabulary, node.token), room);
        node.label.textContent = `${mark ? `${mark} ` : ""}${number}${token}`;
        this.placeNote(node, state, geometry);
        const from = at.get(node.parent);
        if (from) {
          const [x1, y1, y2] = [from.x + geometry.width, from.y + geometry.height / 2, y + geometry.height / 2];
          const bend = (x1 + x) / 2;
          edges.push(
            svg("path", { d: `M${x1} ${y1}C${bend} ${y1} ${bend} ${y2} ${x} ${y2}`, class: `rs-edge rs-${kind}` }),
          );
        }
      }
      this.edges.replaceChildren(...edges);
      this.picture.style.width = `${columns * (geometry.width + geometry.gap) - geometry.gap + 2}px`;
      this.picture.style.height = `${bottom + 2}px`;
      this.maskPane.hidden = !state.mask;
      const newest = [...this.nodes, this.bonusNode].find(({ id }) => id === this.newest(state));
      if (newest) {
        const [from, to] = [at.get(newest.parent) ?? at.get(newest.id), at.get(newest.id)];
        bringIntoView(this.treePane, from.x, to.x + geometry.width);
      }
      this.showLegend(state);
    }

    /** The node that a step is about; null: none. */
    newest(state) {
      if (state.at !== null) return state.bonus ? "bonus" : this.idOf(this.tree.accepted_rows[state.walked - 1]);
      return state.rows ? null : this.nodes.find(({ depth }) => depth === state.levels).id;
    }

    nodeKind(node, state) {
      if (state.mask || node.row === 0) return this.fate(node.row, state);
      if (state.rows) return [node.row === null ? "faded" : "row", ""];
      return [this.facts.branches.has(node.pool) && node.depth <= state.levels ? "branch" : "candidate", ""];
    }

    /** Beside a candidate its path score; below a row its position, and then what the target chose after it. */
    placeNote(node, state, geometry) {
      let words = "";
      if (!state.mask && node.pool !== null) {
        const { score } = this.tree.candidates[node.pool];
        words = score === null ? "" : probability(score);
      }
      else if (node === this.bonusNode) words = "bonus";
      else if (state.predicted) words = `→ ${cut(shown(this.trace.vocabulary, this.tree.target_predict[node.row]), 8)}`;
      else if (state.mask) words = `position ${this.tree.positions[node.row]}`;
      node.note.textContent = words;
      node.note.setAttribute("x", state.mask ? 6 : geometry.width - 5);
      node.note.setAttribute("y", state.mask ? 29 : 14);
      node.note.setAttribute("text-anchor", state.mask ? "start" : "end");
    }

    showLegend(state) {
      const kinds = new Set(
        [...this.nodes, this.bonusNode].filter((node) => node.group.style.display !== "none").map((node) => node.kind),
      );
      const items = Object.keys(ROW_WORDS).filter((kind) => kinds.has(kind));
      this.legend.replaceChildren(
        ...items.map((kind) => html("span", { class: `rs-key rs-${kind}` }, ROW_WORDS[kind])),
      );
      if (state.predicted)
        this.legend.append(html("span", { class: "rs-key" }, "→ the target’s choice after this row"));
    }

    showSlots(state) {
      const { draft_slots: branches, verify_slots: verify, kept_slots: kept } = this.tree;
      const drafted = new Map();
      branches.forEach((slots, branch) => slots.forEach((slot, i) => drafted.set(slot, { branch, i })));
      const counts = new Map();
      for (const { slot, use, cell } of this.cells) {
        const row = verify.indexOf(slot);
        let [kind, words] = ["free", ""];
        if (state.draft === "reserved" && drafted.has(slot)) {
          const { branch, i } = drafted.get(slot);
          [kind, words] = [i < state.written ? "draft" : "reserved", `${branch}·${i}`];
        } else if (state.verify === "taken" && row >= 0) {
          [kind, words] = ["verify", `r${row}`];
        } else if (state.verify === "settled" && kept.includes(slot)) {
          [kind, words] = ["kept", `r${row}`];
        } else if (this.heldSlots.has(slot)) {
          kind = "committed";
        }
        counts.set(kind, (counts.get(kind) ?? 0) + 1);
        cell.className = `rs-cell rs-slot-${kind}`;
        cell.title = `slot ${slot}: ${SLOT_WORDS[kind]}`;
        use.textContent = words;
      }
      const kinds = Object.keys(SLOT_WORDS).filter((kind) => counts.has(kind));
      this.slotsTitle.replaceChildren(
        "KV slots: the newest that the request holds from earlier rounds, and those that this round touches. ",
        ...kinds.map((kind) => {
          const count = kind === "committed" ? "" : `${counts.get(kind)} `;
          return html("span", { class: `rs-key rs-slot-${kind}` }, `${count}${SLOT_WORDS[kind]}`);
        }),
      );
    }

    /** Marks a row, its ancestors, and its line of the mask; null: none but the one at which the walk is. */
    look(row) {
      const { state } = this.steps[this.step];
      if (!state.mask) row = null;
      this.looked = row;
      const bits = row === null ? "" : this.tree.tree_mask[row];
      for (const node of this.nodes) {
        node.group.classList.toggle("rs-look", node.row !== null && node.row === row);
        node.group.classList.toggle("rs-ancestor", node.row !== null && node.row !== row && bits[node.row] === "1");
        node.group.classList.toggle("rs-at", state.at !== null && node.row === state.at);
      }
      this.maskRows.forEach((group, i) => {
        group.classList.toggle("rs-look", i === row);
        group.classList.toggle("rs-ancestor", i !== row && bits[i] === "1");
        group.classList.toggle("rs-at", i === state.at);
      });
      this.lookedAt.textContent = "";
      if (row === null) return;
      const others = [...bits].flatMap((bit, i) => (bit === "1" && i !== row ? [`row ${i}`] : []));
      const attended = listed([`the ${many(this.tree.seq_len, "cached token")}`, ...others, "itself"]);
      const token = shown(this.trace.vocabulary, this.facts.tokens[row]);
      this.lookedAt.textContent = `Row ${row} (‘${token}’), position ${this.tree.positions[row]}, attends ${attended}.`;
    }
  }

  // --- the page ----------------------------------------------------------------------------------------------------

  const replays = [];

  function enhance(element) {
    if (element.querySelector(".rs-replay, .rs-broken")) return;
    try {
      const trace = JSON.parse(element.querySelector('script[type="application/json"]').textContent);
      if (trace.schema_version !== 2)
        throw new Error(`its trace has version ${trace.schema_version}, this page reads 2`);
      replays.push(new Replay(element, trace));
    } catch (error) {
      element.replaceChildren(
        html("p", { class: "rs-broken", role: "alert" }, `This replay cannot be shown: ${error.message}`),
      );
    }
  }

  // Keys that nothing on the page has asked for go to the replay that the reader looks at.
  document.addEventListener("keydown", (event) => {
    if (event.target !== document.body || event.defaultPrevented) return;
    const [seen] = replays.filter((replay) => replay.inView()).sort((a, b) => b.inView() - a.inView());
    seen?.onKey(event);
  });

  globalThis.refspecReplay = { stepsOf, enhance };
  const enhanceAll = () => document.querySelectorAll(".refspec-replay").forEach(enhance);
  if (document.readyState === "loading") document.addEventListener("DOMContentLoaded", enhanceAll);
  else enhanceAll();
})();
