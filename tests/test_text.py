"""Incremental text: equal to decoding everything, for any grouping of tokens, cut at the first stop string."""

import itertools
import random
from collections.abc import Callable, Sequence

import pytest

from jaxspec.text import REPLACEMENT, StopHit, TextStream

SPECIAL = 300  # skipped by both decoders
PIECES = ["he", "llo", " wor", "ld", "é", "€uro", "日本", "😀", " ", "\n", "ST", "TOP", "END"]
SPACE = "▁"


def decode_bytes(tokens: list[int]) -> str:
    """Byte-level: below 256 a byte, then `PIECES`, and a few pieces that break characters."""
    return b"".join(byte_piece(token) for token in tokens).decode("utf-8", errors="replace")


def byte_piece(token: int) -> bytes:
    if token < 256:
        return bytes([token])
    broken = ["日本".encode()[:4], "日本".encode()[4:], "a😀".encode()[:3], "😀b".encode()[2:]]
    return ([piece.encode() for piece in PIECES] + broken)[token - 256] if token != SPECIAL else b""


def decode_pieces(tokens: list[int]) -> str:
    """SentencePiece-like: a run of byte tokens is one text or all replacements, and the first space is dropped."""
    text = ""
    for is_byte, run in itertools.groupby((t for t in tokens if t != SPECIAL), key=lambda token: token < 256):
        if is_byte:
            raw = bytes(run)
            try:
                text += raw.decode()
            except UnicodeDecodeError:
                text += REPLACEMENT * len(raw)
        else:
            text += "".join([*PIECES, SPACE, "▁a", "▁the", "b"][token - 256] for token in run).replace(SPACE, " ")
    return text.removeprefix(" ")


def stream(decode: Callable, groups: Sequence[Sequence[int]], **settings) -> tuple[str, StopHit | None]:
    """Everything a stream gives for groups of tokens."""
    texts = TextStream(decode, **settings)
    parts: list[str] = []
    for group in groups:
        text, hit = texts.push(group)
        parts.append(text)
        if hit is not None:
            assert texts.finish() == ""
            return "".join(parts), hit
    return "".join(parts) + texts.finish(), None


def group_at_random(rng: random.Random, tokens: list[int]) -> list[list[int]]:
    groups: list[list[int]] = []
    while tokens:
        size = rng.choice([0, 1, 2, 3, 5, 8])
        groups.append(tokens[:size])
        tokens = tokens[size:]
    return groups


def first_stop(decode: Callable, tokens: list[int], stop: Sequence[str], min_tokens: int) -> tuple[str, StopHit] | None:
    """The slow way: decodes all tokens again after each one. Returns the text before the stop string."""
    judged = 0
    for count in range(1, len(tokens) + 1):
        text = decode(tokens[:count]).rstrip(REPLACEMENT)
        found = [(text.find(s, max(0, judged - len(s) + 1)), len(s), s) for s in stop]
        found = [hit for hit in found if hit[0] >= 0]
        if found and count > min_tokens:
            start, _, stopped = min(found)
            return text[:start], StopHit(stopped, count)
        judged = max(judged, len(text))  # a run of bytes may look broken until it is complete
    return None


def random_text_tokens(rng: random.Random, count: int) -> list[int]:
    """Tokens of valid text: pieces, and characters as single bytes."""
    tokens: list[int] = []
    while len(tokens) < count:
        if rng.random() < 0.4:
            tokens += rng.choice(["é", "€", "😀", "S", "T", "O", "P", " "]).encode()
        else:
            tokens.append(rng.choice([*range(256, 256 + len(PIECES)), SPECIAL]))
    return tokens


@pytest.mark.parametrize("decode", [decode_bytes, decode_pieces])
def test_text_is_that_of_all_tokens_for_any_grouping(decode):
    rng = random.Random(0)
    for _ in range(150):
        tokens = random_text_tokens(rng, rng.randint(0, 80))
        if decode is decode_pieces:
            spaces = [256 + len(PIECES) + i for i in range(4)]
            tokens = [rng.choice(spaces) if rng.random() < 0.3 and t >= 256 else t for t in tokens]
        expected = decode(tokens), None
        assert stream(decode, [[token] for token in tokens]) == expected
        assert stream(decode, group_at_random(rng, tokens)) == expected
        assert stream(decode, [tokens]) == expected


def test_byte_level_text_is_exact_for_any_bytes():
    """Random bytes, broken characters and long runs without any character."""
    rng = random.Random(1)
    kinds = [range(256), range(0x80, 0x100), [0xFF], [0xF0, 0x9F, 0x98, 0x80], [*range(256, 273), 0xE6, SPECIAL]]
    for i in range(400):
        kind = kinds[i % len(kinds)]
        tokens = [rng.choice(kind) for _ in range(rng.randint(0, 120))]
        assert stream(decode_bytes, [[token] for token in tokens]) == (decode_bytes(tokens), None)
        assert stream(decode_bytes, group_at_random(rng, tokens)) == (decode_bytes(tokens), None)


def test_broken_byte_runs_of_pieces_do_not_depend_on_grouping():
    rng = random.Random(2)
    for _ in range(200):
        tokens = [rng.choice([rng.randrange(256), rng.randrange(0x80, 0x100), 266, 269]) for _ in range(60)]
        assert stream(decode_pieces, group_at_random(rng, tokens)) == stream(decode_pieces, [[t] for t in tokens])


@pytest.mark.parametrize("decode", [decode_bytes, decode_pieces])
@pytest.mark.parametrize("min_tokens", [0, 12])
def test_the_first_stop_string_wins_for_any_grouping(decode, min_tokens):
    rng = random.Random(3)
    choices = ["STOP", "TO", "TOPE", "OPS", "P S", "END", "DEN", "é", "€é", "lloé", "SSS", "\n\n", "ENDEND", "a", "DS"]
    num_hits = 0
    for _ in range(400):
        tokens = random_text_tokens(rng, 40)
        stop = rng.sample(choices, rng.randint(1, 5))
        expected = first_stop(decode, tokens, stop, min_tokens)
        for groups in ([[token] for token in tokens], group_at_random(rng, tokens), [tokens]):
            text, hit = stream(decode, groups, stop=stop, min_tokens=min_tokens)
            assert (text, hit) == (expected or (decode(tokens), None))
            if hit is not None:
                num_hits += 1
                assert decode(tokens[: hit.num_tokens]).startswith(text + hit.stop)
                included, _ = stream(decode, groups, stop=stop, min_tokens=min_tokens, include_stop=True)
                assert included == text + hit.stop
    assert num_hits > 300


def bytes_of(text: str) -> list[int]:
    return list(text.encode())


def test_text_that_may_become_a_stop_string_is_held_back():
    texts = TextStream(decode_bytes, ["STOP", "OUT"])
    assert texts.push(bytes_of("a ST")) == ("a ", None)
    assert texts.push(bytes_of("O")) == ("", None)
    assert texts.push(bytes_of("U")) == ("ST", None)  # OU may become OUT
    assert texts.push(bytes_of("R")) == ("OUR", None)
    assert texts.push(bytes_of("STO")) == ("", None)
    assert texts.finish() == "STO"
    with pytest.raises(RuntimeError, match="ended"):
        texts.push([65])


def test_an_incomplete_character_is_held_back_and_given_up_at_the_end():
    texts = TextStream(decode_bytes)
    assert [texts.push([byte])[0] for byte in "a€".encode()] == ["a", "", "", "€"]
    assert texts.push([0xE2, 0x82]) == ("", None)
    assert texts.finish() == REPLACEMENT


def test_tokens_are_kept_up_to_the_one_that_completes_the_stop():
    """Text after the stop inside that token is cut, and later tokens of the push do not count."""
    texts = TextStream(decode_bytes, ["OPx", "ST"])
    stopping = 256 + PIECES.index("ST")
    assert texts.push([97, stopping, 98, 99]) == ("a", StopHit("ST", 2))
    assert texts.finish() == ""


def test_a_stop_that_completes_earlier_beats_one_that_starts_earlier():
    groups = [bytes_of("abcd")]
    assert stream(decode_bytes, groups, stop=["abcd", "bc"]) == ("a", StopHit("bc", 3))
    whole = [[256 + PIECES.index("TOP")]]
    assert stream(decode_bytes, whole, stop=["OP", "TOP", "TO"]) == ("", StopHit("TO", 1))


def test_stops_within_min_tokens_are_text():
    groups = [bytes_of("xSTxST")]
    assert stream(decode_bytes, groups, stop=["ST"], min_tokens=3) == ("xSTx", StopHit("ST", 6))
    assert stream(decode_bytes, groups, stop=["ST"], min_tokens=2) == ("x", StopHit("ST", 3))
    # Held back for the longer stop string, with the shorter one inside: that one was complete too early.
    assert stream(decode_bytes, [bytes_of("xSTy")], stop=["ST", "xSTz"], min_tokens=3) == ("xSTy", None)


def test_without_a_tokenizer_the_text_is_empty():
    texts = TextStream(None)
    assert texts.push([1, 2, 3]) == ("", None)
    assert texts.finish() == ""
    with pytest.raises(ValueError, match="needs text, and there is no tokenizer"):
        TextStream(None, ["END"])
    with pytest.raises(ValueError, match="stop=''"):
        TextStream(decode_bytes, [""])


@pytest.mark.parametrize("token", [97, 0xFF, SPECIAL, 0xE6, 256 + PIECES.index("€uro")])
@pytest.mark.parametrize("decode", [decode_bytes, decode_pieces])
def test_cost_is_linear_in_the_number_of_tokens(decode, token):
    decoded = [0, 0]

    def counting(tokens: list[int]) -> str:
        decoded[0] += len(tokens)
        decoded[1] += 1
        return decode(tokens)

    tokens = [256, *[token] * 1500]
    assert stream(counting, [tokens])[0] == decode(tokens)
    assert decoded[0] < 30 * len(tokens)
    assert decoded[1] < 3 * len(tokens)
