"""Tokens to text as they come, and the stop strings in it."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

Decode = Callable[[list[int]], str]

# What a decoder gives for bytes that are no character, and for the first bytes of one that is not complete.
REPLACEMENT = "\ufffd"
# Tokens decoded together. More context costs time with every token, less costs more attempts to shorten it.
WINDOW = 16
# A character has at most 4 bytes. After twice as many tokens without one, the bytes are no text.
MAX_STALLED = 8


class Detokenizer:
    """Text of a growing list of tokens, each part once, at a cost that is linear in the number of tokens.

    Only the last few tokens, the window, are decoded with each new one. The characters of an incomplete end are held
    back. The texts add up to `decode` of all tokens; where byte tokens form no valid text, some decoders judge a whole
    run of them at once, and then the number of replacement characters may differ.
    """

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._window: list[int] = []
        self._limit = WINDOW
        self._text = ""  # of the window
        self._taken = 0  # characters of it that were returned
        self._stalled = 0  # tokens since the last returned character

    def push(self, token: int) -> str:
        """The text that this token completes."""
        text = self._decode([*self._window, token])
        # A token that never has text (a skipped special token) would only fill the window. A space that a decoder
        # drops at the start has text when it comes twice.
        if text == self._text and not self._decode([token, token]):
            return ""
        self._window.append(token)
        self._text = text
        self._stalled += 1
        end = len(text.rstrip(REPLACEMENT))
        if self._stalled >= MAX_STALLED:
            end = max(end, len(text) - 1)
        new = text[self._taken : end]
        if new:
            self._taken, self._stalled = end, 0
        # A cut is judged best while no character is incomplete: bytes that are no text look alike.
        is_whole = not text.endswith(REPLACEMENT)
        if len(self._window) >= (self._limit if is_whole else 2 * self._limit):
            self._shorten()
        return new

    def finish(self) -> str:
        """The text of an end that is not complete."""
        new = self._text[self._taken :]
        self._taken = len(self._text)
        return new

    def _shorten(self) -> None:
        """Forgets the first half of the window if the rest decodes to the same text without it.

        One of four neighbouring cuts is between characters:

            tokens   |  He | llo |  E2 | 82 | AC |  w |        (the three bytes are one character)
            cut                  yes   no   no   yes
        """
        middle = len(self._window) // 2
        for cut in range(middle, middle + 4):
            head, tail = self._decode(self._window[:cut]), self._decode(self._window[cut:])
            start = len(self._text) - len(tail)
            # Some decoders drop the space before their first word: then it is in neither half.
            same = tail and self._text in (head + tail, f"{head} {tail}")
            if same and start <= self._taken:
                self._window, self._text, self._taken = self._window[cut:], tail, self._taken - start
                self._limit = WINDOW
                return
        self._limit = 2 * len(self._window)


class StopHit(NamedTuple):
    stop: str
    num_tokens: int  # of all tokens pushed; the last of them completes the stop string


class TextStream:
    """The text of one completion, up to the first stop string.

    Every token is judged as if it came alone, so the result does not depend on how tokens are grouped into pushes:
    the stop that is complete with the earliest token ends the text; of several that one token completes, the one that
    starts first, then the shortest. Text that may be the beginning of a stop string is held back.

    Args:
        decode: tokens to text; None when there is no tokenizer, and then the text is empty.
        stop: strings that end the text.
        include_stop: whether the text keeps the stop string.
        min_tokens: a stop string that is complete within the first `min_tokens` tokens is text like any other.

    Raises:
        ValueError: a stop string is empty, or there are stop strings and no `decode`.
    """

    def __init__(
        self, decode: Decode | None, stop: Sequence[str] = (), include_stop: bool = False, *, min_tokens: int = 0
    ) -> None:
        if "" in stop:
            raise ValueError("stop='' would end every text at once; leave it out.")
        if stop and decode is None:
            raise ValueError(
                f"stop={list(stop)} needs text, and there is no tokenizer; "
                "use stop_token_ids, or set skip_tokenizer_init=False."
            )
        self._detokenizer = None if decode is None else Detokenizer(decode)
        self._stop = tuple(stop)
        self._include_stop = include_stop
        self._min_tokens = min_tokens
        self._num_tokens = 0
        self._held = ""  # may be the beginning of a stop string
        self._ended = False

    def push(self, token_ids: Sequence[int]) -> tuple[str, StopHit | None]:
        """Takes tokens; returns the text that is sure by now, and the stop string that ends it.

        After a hit that text is the last: the tokens beyond it are ignored, and `finish` returns "".

        Raises:
            RuntimeError: the text has ended.
        """
        if self._ended:
            raise RuntimeError("the text has ended; nothing can be pushed after a stop string or finish().")
        sure: list[str] = []
        for token in token_ids:
            self._num_tokens += 1
            new = "" if self._detokenizer is None else self._detokenizer.push(token)
            hit = self._first_stop(new) if self._num_tokens > self._min_tokens else None
            if hit is not None:
                start, length, stop = hit
                sure.append((self._held + new)[: start + length if self._include_stop else start])
                self._ended, self._held = True, ""
                return "".join(sure), StopHit(stop, self._num_tokens)
            sure.append(self._hold(new))
        return "".join(sure), None

    def finish(self) -> str:
        """The rest, when the tokens have ended without a stop string."""
        if self._ended:
            return ""
        rest = self._held + ("" if self._detokenizer is None else self._detokenizer.finish())
        self._ended, self._held = True, ""
        return rest

    def _first_stop(self, new: str) -> tuple[int, int, str] | None:
        """Start in `held + new`, length and string of the first stop that `new` completes."""
        if not new:
            return None
        text = self._held + new
        found: list[tuple[int, int, str]] = []
        for stop in self._stop:
            # It ends in `new`: what ends before was judged with an earlier token.
            start = text.find(stop, max(0, len(self._held) - len(stop) + 1))
            if start >= 0:
                found.append((start, len(stop), stop))
        return min(found, default=None)

    def _hold(self, new: str) -> str:
        """Takes new text and returns what can no longer be part of a stop string."""
        if not new:
            return ""
        text = self._held + new
        longest = max((len(stop) - 1 for stop in self._stop), default=0)
        for start in range(max(0, len(text) - longest), len(text)):
            end = text[start:]
            if any(len(stop) > len(end) and stop.startswith(end) for stop in self._stop):
                break
        else:
            start = len(text)
        self._held = text[start:]
        return text[:start]
