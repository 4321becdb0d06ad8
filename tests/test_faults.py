"""Errors, interrupts, threads and closing in the middle of the work: no wrong token, no hang, nothing kept."""

import gc
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, Self

import jax
import pytest

from jaxspec import LLM, SamplingParams
from jaxspec.engine import Engine
from jaxspec.launch import make_runner
from jaxspec.turns import DeferredInterrupt, Turns
from tests.cases import MAX_LEN, ONE_BUCKET, engine_of, runner_of
from tests.tiny import engine_over, requests_of, run

PROMPTS = [[63, 5, 40, 11], [7, 8], [9, 30, 2]]
PARAMS = SamplingParams(seed=3, max_tokens=20)


class Tokenizer:
    """Says a token's number; some tokens it cannot say."""

    def __init__(self) -> None:
        self.unsayable: set[int] = set()

    def decode(self, token_ids: list[int], skip_special_tokens: bool = True) -> str:
        if self.unsayable & set(token_ids):
            raise ArithmeticError("no such piece")
        return "".join(f" {token}" for token in token_ids)


class Checkpoint:
    """As much of a checkpoint as LLM asks for."""

    eos_token_ids = ()

    def load_tokenizer(self) -> Tokenizer:
        return Tokenizer()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        pass


@pytest.fixture
def make_llm(monkeypatch) -> Callable[..., LLM]:
    def make(engine) -> LLM:
        monkeypatch.setattr("jaxspec.llm.open_checkpoint", lambda model: Checkpoint())
        monkeypatch.setattr("jaxspec.llm.launch", lambda *settings: engine)
        return LLM("tiny")

    return make


def own_engine() -> Engine:
    """An engine whose runner no other test uses, so that it may be closed."""
    chunk_buckets, row_buckets = ONE_BUCKET
    runner = runner_of.__wrapped__("plain")
    return engine_over(
        runner, chunked_prefill_size=None, prefill_chunk_buckets=chunk_buckets, decode_row_buckets=row_buckets
    )


@pytest.fixture(params=["v1", "v2"])
def llm(request, make_llm) -> LLM:
    return make_llm(engine_of("ngram", request.param))


@pytest.fixture(scope="module")
def truth() -> list[list[int]]:
    made = requests_of(PROMPTS, PARAMS, max_model_len=MAX_LEN)
    for request in made:  # an LLM gives a request its own seed only where the parameters bring none
        assert request.seed == PARAMS.seed
    return [request.output_ids for request in run(engine_of("plain", "v1"), made)]


def tokens_of(chunks) -> list[int]:
    return [token for chunk in chunks for token in chunk.token_ids]


def check_whole(llm: LLM, truth: list[list[int]]) -> None:
    """It answers as if nothing had happened, and holds nothing afterwards."""
    assert [output.token_ids for output in llm.generate(PROMPTS, PARAMS)] == truth
    assert llm.engine.num_free_pages == llm.plan.num_pages
    assert llm.metrics.requests == llm.metrics.finished


class TestErrors:
    @pytest.mark.parametrize("where", ["prefill", "decode"])
    def test_an_error_in_a_step_ends_every_call_and_is_named_by_later_ones(self, llm, where, monkeypatch):
        """Found by use: the books said a prefill was on its way that never was, and another stream got wrong tokens."""
        other = llm.stream(PROMPTS[0], PARAMS)
        seen = tokens_of([next(other)])
        broken = llm.stream(PROMPTS[1], PARAMS)

        def fail(*batch: object) -> None:
            raise OverflowError("too large")

        monkeypatch.setattr(llm.engine.runner, where, fail)
        with pytest.raises(OverflowError, match="too large"):
            list(broken)
        monkeypatch.undo()
        assert list(broken) == []
        with pytest.raises(RuntimeError, match=r"failed in a step \(OverflowError: too large\); make a new one"):
            seen += tokens_of(other)
        assert len(seen) == 1
        with pytest.raises(RuntimeError, match="failed in a step"):
            llm.generate(PROMPTS[0], PARAMS)

    def test_an_error_in_the_text_of_a_call_ends_that_call_alone(self, llm, truth):
        bad, good = llm.stream(PROMPTS[0], PARAMS), llm.stream(PROMPTS[1], PARAMS)
        llm.tokenizer.unsayable = set(truth[0]) - set(truth[1])
        assert llm.tokenizer.unsayable
        with pytest.raises(ArithmeticError, match="no such piece"):
            list(bad)
        assert list(bad) == []
        assert tokens_of(good) == truth[1]
        llm.tokenizer.unsayable = set()
        check_whole(llm, truth)

    def test_an_engine_that_can_run_nothing_says_so(self, llm, monkeypatch):
        monkeypatch.setattr(llm.engine._scheduler, "plan_prefill", lambda: None)
        with pytest.raises(RuntimeError, match="nothing can run: 0 requests have rows, 1 wait"):
            llm.generate(PROMPTS[0], PARAMS)


class _Injector:
    """Sends Ctrl-C at the n-th line that the package executes."""

    def __init__(self, at: int):
        self.at, self.count = at, 0

    def __enter__(self) -> Self:
        sys.settrace(self._trace)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        sys.settrace(None)

    def _trace(self, frame: FrameType, event: str, arg: Any):
        if "/jaxspec/" not in frame.f_code.co_filename or frame.f_code.co_name in ("__del__", "_note"):
            return None
        if event == "line":
            self.count += 1
            if self.count == self.at:
                signal.raise_signal(signal.SIGINT)
        return self._trace


class TestInterrupts:
    def _interrupted(self, llm: LLM, at: int) -> tuple[list[int], list[int], bool]:
        """Two streams in turns, Ctrl-C at line `at` of the second: their tokens, and whether it came."""
        first, second = llm.stream(PROMPTS[0], PARAMS), llm.stream(PROMPTS[1], PARAMS)
        seen: tuple[list[int], list[int]] = ([], [])
        hit = False
        try:
            with _Injector(at):
                for chunk in second:
                    seen[1].extend(chunk.token_ids)
        except KeyboardInterrupt:
            hit = True
        seen[0].extend(tokens_of(first))
        return (*seen, hit)

    @pytest.mark.parametrize("schedule", ["v1", "v2"])
    def test_wherever_ctrl_c_hits_a_stream_ends_and_the_rest_goes_on(self, schedule, make_llm, truth):
        """Found by use: dead engines, lost pages, and wrong tokens in the stream that was not interrupted."""
        llm = make_llm(engine_of("ngram", schedule))
        num_hits = 0
        with _Injector(-1) as counter:
            list(llm.stream(PROMPTS[1], PARAMS))
        for at in [*range(1, 400, 13), *range(400, counter.count, 131)]:
            first, second, hit = self._interrupted(llm, at)
            assert first == truth[0], at
            assert second == truth[1][: len(second)], at
            assert hit or second == truth[1], at
            num_hits += hit
        assert num_hits > 30
        check_whole(llm, truth)

    def test_ctrl_c_before_the_first_chunk_queues_nothing(self, llm, truth):
        num_hits = 0
        for at in range(1, 200, 7):
            try:
                with _Injector(at):
                    stream = llm.stream(PROMPTS, PARAMS)
            except KeyboardInterrupt:
                num_hits += 1
                assert llm._calls == {}
            else:
                stream.close()
        assert num_hits > 10
        check_whole(llm, truth)

    def test_a_second_ctrl_c_is_not_held_back_and_a_torn_engine_says_so(self, llm, monkeypatch):
        other, stream = llm.stream(PROMPTS[0], PARAMS), llm.stream(PROMPTS[1], PARAMS)
        next(other)

        def twice(*batch: object) -> None:
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)

        monkeypatch.setattr(llm.engine.runner, "decode", twice)
        with pytest.raises(KeyboardInterrupt):
            list(stream)
        with pytest.raises(RuntimeError, match=r"failed in a step \(KeyboardInterrupt: \); make a new one"):
            list(other)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler

    def test_blocks_that_hold_it_back_may_be_nested(self):
        reached: list[str] = []

        def nested() -> None:
            with DeferredInterrupt():
                with DeferredInterrupt():
                    signal.raise_signal(signal.SIGINT)
                    reached.append("inner")
                reached.append("outer")

        with pytest.raises(KeyboardInterrupt):
            nested()
        assert reached == ["inner", "outer"]
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler

    def test_an_ignored_ctrl_c_stays_ignored(self):
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            with DeferredInterrupt():
                signal.raise_signal(signal.SIGINT)
        finally:
            assert signal.signal(signal.SIGINT, before) is signal.SIG_IGN


class TestStreams:
    @pytest.mark.parametrize("end", ["close", "drop", "drop in a step"])
    def test_a_stream_that_was_never_advanced_holds_nothing_once_it_is_gone(self, llm, truth, end):
        stream = llm.stream(PROMPTS * 2, PARAMS)
        assert llm.metrics.requests == 6
        if end == "close":
            stream.close()
        elif end == "drop":
            del stream
        else:
            with llm._turns.take():  # as when the garbage collector runs within a step
                del stream
            assert llm._abandoned
        check_whole(llm, truth)
        assert llm._calls == {}

    def test_a_dropped_generation_ends_when_its_last_reference_goes(self, llm, truth):
        stream = llm.stream(PROMPTS[0], PARAMS)
        next(stream)
        del stream
        assert llm.metrics.finished == 1
        check_whole(llm, truth)


class TestClosing:
    def test_an_open_stream_ends_with_what_was_known_and_later_calls_say_closed(self, make_llm, truth):
        llm = make_llm(own_engine())
        stream, waiting = llm.stream(PROMPTS[0], PARAMS), llm.stream(PROMPTS[1], PARAMS)
        chunks = [next(stream), next(stream)]
        llm.close()
        chunks += stream
        assert [chunk.finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
        last = chunks[-1]
        assert last.finish_reason == "abort"
        assert last.output is not None
        assert last.output.token_ids == tokens_of(chunks) == truth[0][: len(last.output.token_ids)]
        # Found by use: the text of the chunk before came a second time.
        assert "".join(chunk.text for chunk in chunks) == last.output.text != ""
        others = list(waiting)
        assert others[-1].finish_reason == "abort"
        assert tokens_of(others) == truth[1][: len(tokens_of(others))]
        for call in (llm.generate, llm.stream):
            with pytest.raises(RuntimeError, match="this LLM is closed; make a new one"):
                call(PROMPTS[0], PARAMS)
        llm.close()

    def test_closing_frees_weights_and_caches(self, make_llm):
        gc.collect()
        before = len(jax.live_arrays())
        llm = make_llm(own_engine())
        llm.generate(PROMPTS, PARAMS)
        assert len(jax.live_arrays()) > before
        llm.close()
        gc.collect()
        assert len(jax.live_arrays()) <= before


class TestThreads:
    def test_threads_share_an_llm(self, llm, truth):
        """One thread's step serves all; each gets its own tokens, and all of them."""
        results: dict[int, list[list[int]]] = {}

        def work(index: int) -> None:
            prompt = PROMPTS[index % len(PROMPTS)]
            results[index] = [tokens_of(llm.stream(prompt, PARAMS)) for _ in range(3)]

        threads = [threading.Thread(target=work, args=(index,)) for index in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=120)
        assert results == {index: [truth[index % len(PROMPTS)]] * 3 for index in range(6)}
        check_whole(llm, truth)

    def test_a_call_from_within_a_turn_is_an_error_and_no_deadlock(self):
        turns = Turns()
        with turns.take(), pytest.raises(RuntimeError, match="from within one of its own steps"), turns.take():
            pass
        with turns.take() as is_mine:
            assert is_mine


def test_a_state_beyond_the_memory_is_refused_with_its_sizes():
    """Found by use: the compiler's own error, which names no setting."""
    runner = runner_of("plain")
    with pytest.raises(ValueError, match=r"max_running_requests=2147483647 rows .* do not fit into the memory"):
        make_runner(runner.program, runner.params, runner.shape._replace(num_rows=2**31 - 1))
