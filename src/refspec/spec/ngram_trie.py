"""What followed the last time? A trie of the texts that were seen, and the tree of guesses that it gives.

Every token begins a window: itself and the max_depth - 1 tokens behind it. Each window is a path from the trie's root,
and windows that begin alike share their nodes. So a node stands for a piece of text, and its children for what has
followed it.

To guess, look for the end of the text so far: for its last token, its last two, and so on. Where one of these suffixes
is in the trie, what hangs below it is a guess. The end itself gives none: nothing has followed it yet. A long match
says more than a short one, so the longest comes first, and shorter ones fill what room it leaves.

    text  1 2 3 4 1 2 3 5 1 2 3     suffix 1 2 3, followed by 5 1 2 (latest) and by 4 1 2
    text  7 8 9 7 8                 suffix 7 8, followed by 9 7 8

Two rules say what comes first below a match; SGLang's names for them:

- "BFS": the latest. Level by level, and at each node the child that was taken last, then the one before it, and so on.
  How many depends on how long the text is that has led to the node: max_breadth after one token, one child after the
  longest, in between along a straight line.
- "PROB": the most frequent. A child is as likely as its share of what followed; of all nodes whose parent is in the
  tree already, the likeliest by the product of the shares is next, at most max_breadth children of each. Where two are
  as likely, the one that came to be asked first; of a node's children, the latest.

A token costs at most max_depth nodes, a call of `insert` at most (new tokens + max_depth) · max_depth steps, however
long the text is. Beyond `capacity` nodes, those are dropped that were not walked over for the longest time. A walk goes
over a node's ancestors as well, so this cuts branches from their ends.

Source: SGLang: python/sglang/kernels/jit/csrc/ngram_corpus/trie.cpp @0.5.23. There the counts grow with every walk, and
the end of a text is walked again after each round, so that a token counts several times; here it counts once. The
breadth is max_bfs_breadth after no token and falls to min_bfs_breadth, an option, after max_trie_depth - 1; a child's
share is that among the max_bfs_breadth most frequent. (Until #21225 two more options bounded the length of a match,
min_match_window_size and max_match_window_size.) Before it: Zhao et al. 2024, Lookahead: an inference acceleration
framework, which keeps a trie of prompts and outputs.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count, islice


class Node:
    """A piece of text of `depth` tokens. The root is the empty one."""

    __slots__ = ("children", "depth", "parent", "times", "token")

    def __init__(self, token: int, parent: Node | None) -> None:
        self.token, self.parent = token, parent
        self.depth: int = parent.depth + 1 if parent else 0
        self.times = 1  # it was seen
        self.children: dict[int, Node] = {}  # by token, the one taken last at the end

    def latest(self) -> Iterator[Node]:
        """Its children, the one taken last first."""
        return reversed(self.children.values())


@dataclass
class GuessTree:
    """Guesses for what follows a text. Node 0 is the text's last token; parents stand before their children."""

    tokens: list[int]
    parents: list[int] = field(default_factory=lambda: [-1])
    depths: list[int] = field(default_factory=lambda: [0])
    places: dict[tuple[int, int], int] = field(default_factory=dict)  # (parent, token) -> node

    def __len__(self) -> int:
        return len(self.tokens)

    def child(self, parent: int, token: int) -> int:
        """The node for token under parent, which is new if there was none."""
        place = self.places.setdefault((parent, token), len(self.tokens))
        if place == len(self.tokens):
            self.tokens.append(token)
            self.parents.append(parent)
            self.depths.append(self.depths[parent] + 1)
        return place


class NgramTrie:
    """See the module's docstring."""

    def __init__(self, max_depth: int, capacity: int) -> None:
        """max_depth >= 2: tokens of a window. capacity >= 1: nodes, the root not counted."""
        self.max_depth, self.capacity = max_depth, capacity
        self.root = Node(-1, None)
        self._by_use: OrderedDict[Node, None] = OrderedDict()  # the node walked over last is at the end

    def __len__(self) -> int:
        """Nodes, the root not counted."""
        return len(self._by_use)

    def insert(self, tokens: Sequence[int], start: int = 0) -> None:
        """Learn tokens[start:], which follow tokens[:start]. Of those, the last max_depth - 1 are looked at.

        They were inserted before: where they still are, they are not counted again. Afterwards at most `capacity` nodes
        are there.
        """
        for begin in range(max(0, start - self.max_depth + 1), len(tokens)):
            node = self.root
            for place in range(begin, min(begin + self.max_depth, len(tokens))):
                node = self._step(node, tokens[place], is_new=place >= start)
            while node.parent:  # parents after their children: the node at the front of _by_use has none
                self._by_use[node] = None
                self._by_use.move_to_end(node)
                node = node.parent
            while len(self) > self.capacity:
                oldest, _ = self._by_use.popitem(last=False)
                assert oldest.parent is not None
                del oldest.parent.children[oldest.token]

    def _step(self, node: Node, token: int, is_new: bool) -> Node:
        """From a node to its child for token, which is made if need be."""
        child = node.children.get(token)
        if child is None:
            child = node.children[token] = Node(token, node)
        elif is_new:
            child.times += 1
            node.children[token] = node.children.pop(token)  # now the latest
        return child

    def matches(self, text: Sequence[int]) -> Iterator[Node]:
        """The nodes of the suffixes of text that something has followed, the longest first."""
        for length in range(min(self.max_depth - 1, len(text)), 0, -1):
            node: Node | None = self.root
            for token in text[-length:]:
                node = node.children.get(token) if node else None
            if node and node.children:
                yield node

    def guess(self, text: Sequence[int], size: int, max_breadth: int, match_type: str) -> GuessTree:
        """The tree of at most `size` nodes, the root among them, for what may follow text (at least one token).

        max_breadth >= 1 and match_type: see the module's docstring.
        """
        grow = self._grow_by_recency if match_type == "BFS" else self._grow_by_frequency
        tree = GuessTree([text[-1]])
        for match in self.matches(text):
            if len(tree) == size:
                break
            grow(tree, match, size, max_breadth)
        return tree

    def _grow_by_recency(self, tree: GuessTree, match: Node, size: int, max_breadth: int) -> None:
        queue = deque([(0, match)])
        while queue:
            place, node = queue.popleft()
            for child in islice(node.latest(), self._breadth(node, max_breadth)):
                if len(tree) == size:
                    return
                queue.append((tree.child(place, child.token), child))

    def _breadth(self, node: Node, max_breadth: int) -> int:
        """How many children of a node are tried: max_breadth at depth 1, one where the children are leaves."""
        deepest = max(2, self.max_depth - 1)
        return max(1, max_breadth - (max_breadth - 1) * (node.depth - 1) // (deepest - 1))

    def _grow_by_frequency(self, tree: GuessTree, match: Node, size: int, max_breadth: int) -> None:
        asked = count()  # decides where two are as likely
        heap: list[tuple[float, int, int, Node]] = []  # (-probability, order, the parent's place, node)

        def ask_children(place: int, node: Node, probability: float) -> None:
            followed = sum(child.times for child in node.children.values())
            for child in heapq.nlargest(max_breadth, node.latest(), key=lambda child: child.times):
                heapq.heappush(heap, (-probability * child.times / followed, next(asked), place, child))

        ask_children(0, match, 1.0)
        while heap and len(tree) < size:
            negative, _, parent, node = heapq.heappop(heap)
            ask_children(tree.child(parent, node.token), node, -negative)
