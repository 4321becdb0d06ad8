"""Reasoning is told from the answer, however both are cut: into tokens, rounds, by stops and by the budget."""

import itertools
from typing import Any

import pytest

from jaxspec import LLM
from jaxspec.config import EngineConfig
from jaxspec.reasoning import PARSERS, ReasoningSplitter, check_marks, num_until_end
from tests.cases import NUM_STEPS, SCHEDULES, engine_of, follow
from tests.story import PROMPT, Checkpoint, find_story, sampled

PLAIN_END, OPENED, CLOSED = "<|im_start|>assistant\n", "assistant\n<think>\n", "assistant\n<think>\n\n</think>\n\n"


def split(parser: str, prompt_end: str, pieces: list[str]) -> tuple[str, str]:
    splitter = ReasoningSplitter(PARSERS[parser], prompt_end)
    parts = [splitter.push(piece) for piece in pieces] + [splitter.finish()]
    reasoning, answer = zip(*parts)
    return "".join(reasoning), "".join(answer)


@pytest.mark.parametrize(
    ("parser", "end", "text", "reasoning", "answer"),
    [
        ("qwen3", PLAIN_END, "<think>\na < b</think>\n\nYes.", "\na < b", "\n\nYes."),
        ("qwen3", PLAIN_END, "\n<think>a", "a", ""),
        ("qwen3", PLAIN_END, "No <think>ing</think> here.", "", "No <think>ing</think> here."),
        ("qwen3", PLAIN_END, " <thin", "", " <thin"),
        ("qwen3", OPENED, "a</think>b</think>c", "a", "b</think>c"),
        ("qwen3", CLOSED, "a</think>b", "", "a</think>b"),
        ("deepseek-r1", PLAIN_END, "a</think>b", "a", "b"),
        ("deepseek-r1", PLAIN_END, "<think>a</think>b", "a", "b"),
        ("deepseek-r1", OPENED, "a </thi", "a </thi", ""),
        ("deepseek-r1", OPENED, "<<//think></think></think>", "<<//think>", "</think>"),
        ("deepseek-r1", CLOSED, "b", "", "b"),
        ("deepseek-r1", OPENED, "", "", ""),
    ],
)
def test_the_parts_do_not_depend_on_the_pieces(parser, end, text, reasoning, answer):
    for size in (1, 2, 3, 5, 100):
        pieces = [text[at : at + size] for at in range(0, len(text), size)]
        assert split(parser, end, pieces) == (reasoning, answer), size


class Tokenizer:
    """Says `PIECES` for the given tokens, and a letter for the others; the marks are in pieces."""

    def __init__(self, tokens: list[int]):
        self._pieces = dict(zip(tokens, PIECES, strict=True))

    def encode(self, text: str) -> list[int]:
        return [ord(letter) + 1000 for letter in text]

    def decode(self, token_ids: list[int], skip_special_tokens: bool = True) -> str:
        letters = ["?" if token < 1000 else chr(token - 1000) for token in token_ids]
        return "".join(self._pieces.get(token, letter) for token, letter in zip(token_ids, letters))


PIECES = ("Hm", ", 2 ", "+ 2 <", " 5.", "</th", "ink", ">\n", "It is ", "4", ".")
THOUGHT, ANSWER = "Hm, 2 + 2 < 5.", "\nIt is 4."


@pytest.fixture(scope="module")
def story() -> tuple[int, list[int]]:
    return find_story()


@pytest.fixture(params=itertools.product(SCHEDULES, [(NUM_STEPS,), (0,), (1, 2)]), ids=str)
def llm(request, story, monkeypatch) -> LLM:
    schedule, script = request.param
    engine = engine_of("chain", schedule)
    follow(engine, [PROMPT + story[1]], script)
    monkeypatch.setattr("jaxspec.llm.open_checkpoint", lambda model: Checkpoint(Tokenizer(story[1])))
    monkeypatch.setattr("jaxspec.llm.launch", lambda *settings: engine)
    return LLM("scripted", engine=EngineConfig(reasoning_parser="deepseek-r1"))


def test_budgets_and_stops_cut_both_parts_and_their_count(llm, story):
    """At every token: within the reasoning, within its mark, and behind it; streamed and whole."""
    budgets = [sampled(story[0], max_tokens=budget) for budget in range(len(PIECES) + 1)]
    stops = [sampled(story[0], stop=(stop,)) for stop in ("2 <", "</think>", "ink", "is")]
    tokens = [sampled(story[0], stop_token_ids=(token,)) for token in story[1]]
    params = budgets + stops + tokens
    chunks = list(llm.stream([PROMPT] * len(params), params))
    for index in range(len(params)):
        mine = [chunk for chunk in chunks if chunk.prompt_index == index]
        output = mine[-1].output
        assert output is not None
        assert "".join(chunk.text for chunk in mine) == output.text
        assert "".join(chunk.reasoning or "" for chunk in mine) == output.reasoning
    outputs = {chunk.prompt_index: chunk.output for chunk in chunks if chunk.output is not None}
    for budget in range(len(PIECES) + 1):
        text = "".join(PIECES[:budget])
        expected = (THOUGHT, text.partition("</think>")[2], 7) if budget >= 7 else (text, "", budget)
        output = outputs[budget]
        assert (output.reasoning, output.text, output.reasoning_tokens) == expected
    cut = [outputs[len(budgets) + index] for index in range(len(stops))]
    found = [(output.reasoning, output.text, output.reasoning_tokens) for output in cut]
    # The first stop that is complete ends the text: here always within the mark or before it, but for the last.
    assert found == [("Hm, 2 + ", "", 3), (THOUGHT, "", 7), (f"{THOUGHT}</th", "", 6), (THOUGHT, "\nIt ", 7)]
    for place, output in enumerate(outputs[len(budgets) + len(stops) + index] for index in range(len(tokens))):
        text = "".join(PIECES[:place])
        assert output.reasoning_tokens == min(place + 1, 7)
        assert (output.reasoning or "") + output.text == text.replace("</think>", "") or place == 6


def test_without_a_parser_all_is_text(llm, story):
    llm._parser = None
    (output,) = llm.generate([PROMPT], sampled(story[0]))
    assert (output.text, output.reasoning, output.reasoning_tokens) == ("".join(PIECES), None, None)


def test_the_end_is_found_where_no_parser_was():
    tokenizer = Tokenizer(list(range(10)))
    decode = lambda ids: tokenizer.decode(ids)  # noqa: E731
    assert num_until_end(decode, list(range(10))) == 7
    assert num_until_end(decode, list(range(6))) == 0
    assert num_until_end(decode, []) == 0


def test_what_a_parser_cannot_work_with_is_refused():
    with pytest.raises(ValueError, match=r"reasoning_parser='o1' is not known; set one of qwen3, deepseek-r1"):
        EngineConfig(reasoning_parser="o1")
    with pytest.raises(ValueError, match="reads text, and skip_tokenizer_init=True gives none"):
        EngineConfig(reasoning_parser="qwen3", skip_tokenizer_init=True)
    tokenizer: Any = Tokenizer(list(range(10)))
    check_marks(tokenizer)
    tokenizer.decode = lambda ids, skip_special_tokens=True: ""
    with pytest.raises(ValueError, match="leaves <think> out of its text"):
        check_marks(tokenizer)
