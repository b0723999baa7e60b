"""The text of an output as it grows by tokens, and the stop strings in it.

A token is not a piece of text: a character may be spread over several tokens, a token may hold the end of one
character and the start of the next, and some decoders read a token differently at the start of a text. So text comes
from decoding several ids together, and here only the newest few are: what a token costs does not depend on how long
the output is, nor on how many tokens a round accepted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

Decode = Callable[[Sequence[int]], str]

# What decoders write for bytes that make up no character. At the end of a text it may only mean: not yet.
REPLACEMENT = "\ufffd"
# The window is cut to SHORT_WINDOW ids when it has grown beyond LONG_WINDOW. A character has at most four bytes, and
# an id that adds a part of one adds at least one of them, so what SHORT_WINDOW ids leave behind them is decided.
SHORT_WINDOW, LONG_WINDOW = 8, 16


class TextInPieces:
    """The text of an output that grows, without decoding all of it again for each token.

    Only a window of the newest ids is decoded. As a rule it begins one piece early, at an id with which a character
    begins: for some decoders the first id is a special case (a space before it is dropped), and that id's text is out
    already. (tokenizers' own DecodeStream does as much, but has no way to ask for what is left at the end.)
    """

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._window: list[int] = []
        self._newest = 0  # where in the window its newest piece begins, if a character does
        self._told = 0  # characters of the window's text that are out

    def append(self, token: int) -> str:
        """What one more id adds to the text. Bytes that do not yet make up a character wait for further ids.

        The pieces and rest() are together decode(all ids), unless further ids change the text before them: decoders
        with byte fallback do so to bytes that never become a character.
        """
        self._window.append(token)
        text = self._decode(self._window)
        whole = text.rstrip(REPLACEMENT)
        piece = whole[self._told :]
        self._told = max(self._told, len(whole))
        if not piece and text and not self._decode([token]) and text == self._decode(self._window[:-1]):
            self._window.pop()  # a special token, which is no text: however many there are, they take no room
        elif len(whole) == len(text) and (newest := self._decode(self._window[self._newest :])):
            self._window = self._window[self._newest :]
            self._newest, self._told = len(self._window), len(newest)
        elif len(self._window) > LONG_WINDOW:
            piece += self._shorten(text)
        return piece

    def rest(self) -> str:
        """What the end of the output adds: bytes that make up no character, as the decoder writes them."""
        return self._decode(self._window)[self._told :]

    def _shorten(self, text: str) -> str:
        """Where no id has ended with a character for long. Returns what waits too long to become one still."""
        self._window, self._newest = self._window[-SHORT_WINDOW:], 0
        told, waiting = self._told, max(0, len(text) - self._told)
        kept = len(self._decode(self._window))  # its first characters may be halves of those before: they are out
        self._told = max(0, kept - waiting)
        return text[told : told + max(0, waiting - kept)]


class OutputText:
    """The text of one request's output, as far as it is decided, and the stop string that ended it.

    What may still become a stop string is held back: the longest end of the text with which one begins. That is also
    all that the search must remember, since a stop string that ends in a token's piece begins in it, or in what was
    held back before it.
    """

    def __init__(self, decode: Decode, stops: Sequence[str] = (), include_stop: bool = False) -> None:
        self._pieces, self._stops, self._include_stop = TextInPieces(decode), tuple(stops), include_stop
        self._longest_start = max(map(len, self._stops), default=1) - 1
        self._held = ""
        self._ready: list[str] = []  # decided, and not taken yet
        self.matched_stop: str | None = None
        self.cut = 0  # characters at the end of decode(output ids) that do not count: the stop, and what follows it

    def append(self, token: int) -> None:
        """One more token of the output. Afterwards matched_stop is set if it completed a stop string.

        Of several that it completed, the one that begins first counts; of those, the shortest.
        """
        text = self._held + self._pieces.append(token)
        found = min(((text.find(stop), len(stop), stop) for stop in self._stops if stop in text), default=None)
        if found:
            start, length, self.matched_stop = found
            end = start + length if self._include_stop else start
            self.cut = len(text) - end + len(self._pieces.rest())
            self._held = ""
        else:
            end = next((i for i in self._possible_starts(text) if self._begins_a_stop(text[i:])), len(text))
            self._held = text[end:]
        self._ready.append(text[:end])

    def forget_stop(self) -> None:
        """The token that completed the stop string is taken back."""
        self.matched_stop, self.cut = None, 0

    def take(self, last: bool) -> str:
        """What is decided and was not taken before; last: all that there is, since no further token comes."""
        if last and self.matched_stop is None:
            self._ready += [self._held, self._pieces.rest()]
        taken = "".join(self._ready)
        self._ready.clear()
        return taken

    def _possible_starts(self, text: str) -> range:
        return range(max(0, len(text) - self._longest_start), len(text))

    def _begins_a_stop(self, end: str) -> bool:
        return any(stop.startswith(end) for stop in self._stops)
