"""LLM: text, chats or token ids in, outputs out."""

import contextlib
import itertools
import os
import random
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from jaxspec.acceptance import AcceptanceWatch
from jaxspec.batches import Progress
from jaxspec.call import Call, Prompt, as_prompts, params_for
from jaxspec.config import EngineConfig, SamplingParams, SpecConfig, check_settings
from jaxspec.engine import Engine
from jaxspec.launch import launch
from jaxspec.loading.checkpoint import open_checkpoint
from jaxspec.metrics import EngineMetrics
from jaxspec.outputs import RequestOutput
from jaxspec.plan import SpecPlan
from jaxspec.reasoning import PARSERS, check_marks
from jaxspec.request import Request, RequestRules
from jaxspec.stream import ChunkStream
from jaxspec.tokenizer import Tokenizer
from jaxspec.turns import Turns


class LLM:
    """A language model on the devices of this machine, with or without speculative decoding.

    Several threads may use one LLM: their requests share the batch, and one thread at a time runs a step for all.
    Ctrl-C takes effect between steps; it ends the call that it hits, and the LLM and its other streams go on.

    Args:
        model: a Hugging Face folder, a GGUF file, or the name of the embedded model ("smollm2").
        spec: how to draft; None is plain decoding.
        engine: sizes and schedule.

    Attributes:
        plan: what runs, and a note for every value that was not set by the user.
        tokenizer: None with `skip_tokenizer_init`.

    Raises:
        FileNotFoundError: a model or one of its files is missing.
        TypeError: `model` is no path, or `spec` or `engine` is of another class.
        ValueError: the settings contradict each other, the models, or this version.
    """

    def __init__(
        self,
        model: str | os.PathLike[str],
        *,
        spec: SpecConfig | None = None,
        engine: EngineConfig | None = None,
    ):
        spec, settings = check_settings(spec, engine)
        with open_checkpoint(model) as target:
            self.tokenizer: Tokenizer | None = None if settings.skip_tokenizer_init else target.load_tokenizer()
            self._parser = None if settings.reasoning_parser is None else PARSERS[settings.reasoning_parser]
            if self._parser is not None and self.tokenizer is not None:
                check_marks(self.tokenizer)
            self._engine: Engine = launch(target, spec, settings, self.tokenizer, os.environ)
            eos_ids = tuple(target.eos_token_ids)
        runner = self._engine.runner
        self._rules = RequestRules(
            max_model_len=self.plan.max_model_len,
            vocab_size=runner.program.target.config.vocab_size,
            eos_ids=eos_ids,
            max_stop_token_ids=settings.max_stop_token_ids,
            max_logprobs=runner.program.num_top_logprobs,
            max_logit_bias=settings.max_logit_bias,
            max_bad_words=settings.max_bad_words,
            max_bad_word_tokens=settings.max_bad_word_tokens,
            processors=tuple(settings.processors),
            exactness=self.plan.exactness,
            simulate_accept_len=self.plan.simulate_accept_len,
        )
        self._watch = AcceptanceWatch(self.plan.algorithm)
        self._rng = random.Random(settings.random_seed)
        self._call_ids = itertools.count()
        self._calls: dict[str, Call] = {}  # by request id
        self._abandoned: list[Call] = []  # streams that were dropped while a step ran
        self._turns = Turns()

    @property
    def plan(self) -> SpecPlan:
        """The resolved plan."""
        return self._engine.plan

    @property
    def metrics(self) -> EngineMetrics:
        """Totals since the engine was made."""
        return self._engine.metrics

    @property
    def engine(self) -> Engine:
        """The engine underneath."""
        return self._engine

    def generate(
        self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[RequestOutput]:
        """Completes prompts.

        Args:
            prompts: a prompt, or a list of prompts. A prompt is a string, a list of token ids, or a list of chat
                messages ({"role": ..., "content": ...}).
            params: one for all prompts, or one for each; `SamplingParams()` where None.

        Returns:
            One output for each prompt, in their order.

        Raises:
            ValueError: a prompt is empty, too long, or can never fit; nothing has been generated then.
            RuntimeError: this LLM is closed, or an earlier step failed.
        """
        with contextlib.closing(self.stream(prompts, params)) as chunks:
            outputs = {chunk.prompt_index: chunk.output for chunk in chunks if chunk.output is not None}
        return [outputs[index] for index in sorted(outputs)]

    def stream(
        self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> ChunkStream:
        """Completes prompts, yielding text and tokens as they come; the arguments are those of `generate`.

        The chunks of one completion add up to its text and tokens; the last chunk of each prompt carries its output.
        Requests are checked and queued at once. Closing the iterator aborts what is not finished; so does dropping it.
        """
        listed = as_prompts(prompts)
        call = Call(
            listed,
            params_for(params, len(listed)),
            call_id=next(self._call_ids),
            tokenizer=self.tokenizer,
            rules=self._rules,
            rng=self._rng,
            parser=self._parser,
        )
        try:
            with self._turns.take():
                self._end_abandoned()
                self._submit(call)
            return ChunkStream(call, advance=self._advance, abort=self._abort, abandon=self._abandon)
        except BaseException:
            self._abort(call)
            raise

    def _submit(self, call: Call) -> None:
        """Queues all requests of a call; where one cannot be, the caller aborts the call."""
        for request in call.requests:
            self._engine.check(request)
        for request in call.requests:
            self._calls[request.id] = call
            finished = self._engine.add(request)
            if finished is not None:
                self._take(call, finished)

    def _advance(self, call: Call) -> None:
        """Runs a step for all calls, unless this one got something meanwhile."""
        with self._turns.take():
            self._end_abandoned()
            if call.ready or call.is_done:
                return
            with self._engine.intact():
                for progress in self._engine.step():
                    owner = self._calls.get(progress.request.id)
                    if owner is not None:
                        self._take_or_end(owner, progress)
            self._watch.look(self.metrics.stats)

    def _take_or_end(self, call: Call, progress: Progress) -> None:
        """Hands a progress to its call; an error in the making of its text ends that call, and no other."""
        try:
            self._take(call, progress)
        except Exception as error:
            call.error = error
            self._drop(call)

    def _take(self, call: Call, progress: Progress) -> None:
        """Hands a request's progress to its call, and ends the request where a stop string does."""
        request = progress.request
        hit = call.take(progress)
        if hit is not None:
            self._engine.finish(request, "stop", hit.num_tokens, hit.stop)
        # Not `is_finished`: one step may bring the end of a request's prefill and the round that finished it.
        if hit is not None or progress.finish is not None:
            call.close(request)
            del self._calls[request.id]

    def _abort(self, call: Call) -> None:
        """Ends what is not finished of a call."""
        with self._turns.take():
            self._drop(call)

    def _abandon(self, call: Call) -> None:
        """The same from a destructor, which may run in any thread and in the middle of a step."""
        with self._turns.take(wait=False) as is_mine:
            if is_mine:
                self._drop(call)
            else:
                self._abandoned.append(call)

    def _end_abandoned(self) -> None:
        while self._abandoned:
            self._drop(self._abandoned.pop())

    def _drop(self, call: Call) -> list[Request]:
        """Aborts the requests of a call that are not finished, and returns them."""
        mine = [request for request in call.requests if self._calls.pop(request.id, None) is not None]
        return [request for request in mine if self._engine.abort(request.id)]

    def close(self) -> None:
        """Frees the device memory. What runs is aborted: its streams end with what was known of it."""
        with self._turns.take():
            self._end_abandoned()
            for call in dict.fromkeys(self._calls.values()):
                for request in self._drop(call):
                    call.close(request)
            self._engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
