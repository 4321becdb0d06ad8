"""Stop strings and streams through LLM: cut exactly, however the tokens were grouped into rounds."""

import itertools

import pytest

from jaxspec import LLM, RequestOutput
from tests.cases import NUM_STEPS, SCHEDULES, SCRIPT, engine_of, follow
from tests.story import PROMPT, Checkpoint, find_story, sampled

# What the first outputs are made to say; the third and fourth are one character together.
PIECES = (b"Once ", b"up", b"\xe2\x82", b"\xac", b"on a", b" time", b", th", b"e e", b"nd", b".")
TEXT = b"".join(PIECES).decode()
SCRIPTS = {"whole": (NUM_STEPS,), "none": (0,), "mixed": SCRIPT}


class Tokenizer:
    """Says `PIECES` for the given tokens."""

    def __init__(self, tokens: list[int]):
        self._pieces = dict(zip(tokens, PIECES, strict=True))

    def decode(self, token_ids: list[int], skip_special_tokens: bool = True) -> str:
        return b"".join(self._pieces[token] for token in token_ids).decode(errors="replace")


@pytest.fixture(scope="module")
def story() -> tuple[int, list[int]]:
    return find_story()


@pytest.fixture(params=itertools.product(SCHEDULES, SCRIPTS), ids="-".join)
def llm(request, story, monkeypatch) -> LLM:
    schedule, script = request.param
    engine = engine_of("chain", schedule)
    follow(engine, [PROMPT + story[1]], SCRIPTS[script])
    monkeypatch.setattr("jaxspec.llm.open_checkpoint", lambda model: Checkpoint(Tokenizer(story[1])))
    monkeypatch.setattr("jaxspec.llm.launch", lambda *settings: engine)
    return LLM("scripted")


def cut(stop: str, min_tokens: int = 0) -> tuple[int, int] | None:
    """By brute force: tokens until the stop string is complete, and where it starts in the text."""
    for count in range(min_tokens + 1, len(PIECES) + 1):
        text = b"".join(PIECES[:count]).decode(errors="ignore")
        before = b"".join(PIECES[: count - 1]).decode(errors="ignore")
        # What was complete before min_tokens is text like any other.
        start = text.find(stop, max(0, len(before) - len(stop) + 1))
        if start >= 0:
            return count, start
    return None


STOPS = sorted({TEXT[start : start + size] for start in range(len(TEXT)) for size in (1, 2, 4, 7)})


def check_cut(output: RequestOutput, story: tuple[int, list[int]], stop: str, found: tuple[int, int] | None) -> None:
    count, start = found or (len(PIECES), len(TEXT))
    assert (output.text, output.token_ids) == (TEXT[:start], story[1][:count]), stop
    assert (output.finish_reason, output.stop_reason) == (("stop", stop) if found else ("length", None))
    assert output.logprobs is not None
    assert [entry.token_id for entry in output.logprobs] == output.token_ids
    # Cut rounds count what is left of them.
    assert (output.accept_length or 0) * output.rounds == pytest.approx(count - 1)


def test_every_stop_string_cuts_text_tokens_and_logprobs_alike(llm, story):
    """Public report: the text is cut and token ids and logprobs keep the tail (vLLM PR #47616)."""
    params = [sampled(story[0], stop=(stop,), logprobs=0) for stop in STOPS]
    outputs = llm.generate([PROMPT] * len(STOPS), params)
    for output, stop in zip(outputs, STOPS, strict=True):
        check_cut(output, story, stop, cut(stop))
    assert llm.metrics.emitted_tokens == sum(len(output.token_ids) for output in outputs)
    assert llm.metrics.rounds == sum(output.rounds for output in outputs)
    assert llm.engine.num_free_pages == llm.plan.num_pages


def test_min_tokens_holds_for_stop_strings_too(llm, story):
    pairs = [(stop, least) for stop in (" ", "e", "€on", "n a t") for least in (1, 4, 8)]
    params = [sampled(story[0], stop=(stop,), min_tokens=least, logprobs=0) for stop, least in pairs]
    for output, (stop, least) in zip(llm.generate([PROMPT] * len(pairs), params), pairs, strict=True):
        check_cut(output, story, stop, cut(stop, least))


def test_a_budget_cuts_text_and_tokens_alike(llm, story):
    """A request may be done after its prefill and one round, which v1 reads in one step."""
    params = [sampled(story[0], max_tokens=budget) for budget in range(len(PIECES) + 1)]
    for budget, output in enumerate(llm.generate([PROMPT] * len(params), params)):
        assert output.token_ids == story[1][:budget]
        assert output.text == b"".join(PIECES[:budget]).decode(errors="replace")
        assert output.finish_reason == "length"


def test_streams_add_up_to_the_output(llm, story):
    """Public report: streams drop or repeat the last tokens, or split characters (TRT-LLM #3753, vLLM PR #26027)."""
    params = [sampled(story[0], stop=(stop,)) for stop in (*STOPS[::7], "not in it")]
    params += [sampled(story[0], max_tokens=budget) for budget in range(1, len(PIECES))]
    params += [sampled(story[0], stop_token_ids=(token,)) for token in story[1]]
    chunks = list(llm.stream([PROMPT] * len(params), params))
    for index, wanted in enumerate(params):
        mine = [chunk for chunk in chunks if chunk.prompt_index == index]
        output = mine[-1].output
        assert output is not None, wanted
        assert "".join(chunk.text for chunk in mine) == output.text
        assert [token for chunk in mine for token in chunk.token_ids] == output.token_ids
        assert [chunk.finish_reason for chunk in mine] == [None] * (len(mine) - 1) + [output.finish_reason]
        if output.finish_reason == "stop":
            assert "\ufffd" not in "".join(chunk.text for chunk in mine[:-1])


def test_a_stop_string_wins_over_the_budget_and_the_stop_token_of_its_round(llm, story):
    """All three in one block: the text ends where the first of them is."""
    outputs = llm.generate(
        [PROMPT] * 3,
        [
            sampled(story[0], stop=("up",), max_tokens=4),
            sampled(story[0], stop=("up",), stop_token_ids=(story[1][3],)),
            sampled(story[0], stop=("on a",), stop_token_ids=(story[1][1],)),
        ],
    )
    assert [output.text for output in outputs] == ["Once ", "Once ", "Once "]
    assert [output.stop_reason for output in outputs] == ["up", "up", story[1][1]]
    assert [len(output.token_ids) for output in outputs] == [2, 2, 2]


def test_stop_text_is_kept_on_request(llm, story):
    kept = {"include_stop_str_in_output": True}
    params = [sampled(story[0], stop=("n a",), **kept), sampled(story[0], stop_token_ids=(story[1][5],), **kept)]
    assert [output.text for output in llm.generate([PROMPT] * 2, params)] == ["Once up€on a", "Once up€on a time"]


def test_a_closed_stream_aborts_its_requests_and_gives_their_pages_back(llm, story):
    stream = llm.stream([PROMPT] * 5, sampled(story[0]))
    next(stream)
    stream.close()
    (output,) = llm.generate([PROMPT], sampled(story[0]))
    assert output.text == TEXT
    assert llm.engine.num_free_pages == llm.plan.num_pages
    assert llm.metrics.requests == llm.metrics.finished == 6
