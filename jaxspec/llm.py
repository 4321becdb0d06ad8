"""LLM: text, chats or token ids in, outputs out."""

import itertools
import os
import random
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Self

from jaxspec.acceptance import AcceptanceWatch
from jaxspec.batches import Progress
from jaxspec.call import Call, Prompt, as_prompts, params_for
from jaxspec.config import EngineConfig, SamplingParams, SpecConfig
from jaxspec.engine import Engine
from jaxspec.launch import launch
from jaxspec.loading.checkpoint import open_checkpoint
from jaxspec.metrics import EngineMetrics
from jaxspec.outputs import RequestOutput, StreamChunk
from jaxspec.plan import SpecPlan
from jaxspec.request import RequestRules
from jaxspec.tokenizer import Tokenizer


class LLM:
    """A language model on the devices of this machine, with or without speculative decoding.

    Args:
        model: a Hugging Face folder, a GGUF file, or the name of the embedded model ("smollm2").
        spec: how to draft; None is plain decoding.
        engine: sizes and schedule.

    Attributes:
        plan: what runs, and a note for every value that was not set by the user.
        tokenizer: None with `skip_tokenizer_init`.

    Raises:
        FileNotFoundError: a model or one of its files is missing.
        ValueError: the settings contradict each other, the models, or this version.
    """

    def __init__(
        self,
        model: str | os.PathLike[str],
        *,
        spec: SpecConfig | None = None,
        engine: EngineConfig | None = None,
    ):
        settings = engine or EngineConfig()
        with open_checkpoint(model) as target:
            self.tokenizer: Tokenizer | None = None if settings.skip_tokenizer_init else target.load_tokenizer()
            self._engine: Engine = launch(target, spec, settings, self.tokenizer, os.environ)
            eos_ids = tuple(target.eos_token_ids)
        runner = self._engine.runner
        self._rules = RequestRules(
            max_model_len=self.plan.max_model_len,
            vocab_size=runner.program.target.config.vocab_size,
            eos_ids=eos_ids,
            max_stop_token_ids=settings.max_stop_token_ids,
            max_logprobs=runner.program.num_top_logprobs,
        )
        self._watch = AcceptanceWatch(self.plan.algorithm)
        self._rng = random.Random(settings.random_seed)
        self._call_ids = itertools.count()
        self._calls: dict[str, Call] = {}  # by request id

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
        """
        outputs = {
            chunk.prompt_index: chunk.output for chunk in self.stream(prompts, params) if chunk.output is not None
        }
        return [outputs[index] for index in sorted(outputs)]

    def stream(
        self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> Iterator[StreamChunk]:
        """Completes prompts, yielding text and tokens as they come; the arguments are those of `generate`.

        The chunks of one completion add up to its text and tokens; the last chunk of each prompt carries its output.
        Requests are checked and queued at once. Closing the iterator aborts what is not finished.
        """
        listed = as_prompts(prompts)
        call = Call(
            listed,
            params_for(params, len(listed)),
            call_id=next(self._call_ids),
            tokenizer=self.tokenizer,
            rules=self._rules,
            rng=self._rng,
        )
        self._submit(call)
        return self._chunks(call)

    def _submit(self, call: Call) -> None:
        """Queues all requests of a call, or none."""
        for request in call.requests:
            self._engine.check(request)
        try:
            for request in call.requests:
                self._calls[request.id] = call
                finished = self._engine.add(request)
                if finished is not None:
                    self._take(finished)
        except ValueError:
            self._abort(call)
            raise

    def _chunks(self, call: Call) -> Iterator[StreamChunk]:
        try:
            while True:
                while call.ready:
                    yield call.ready.popleft()
                if call.is_done:
                    return
                for progress in self._engine.step():
                    self._take(progress)
                self._watch.look(self.metrics.stats)
        finally:
            self._abort(call)

    def _take(self, progress: Progress) -> None:
        """Hands a request's progress to its call, and ends the request where a stop string does."""
        request = progress.request
        call = self._calls.get(request.id)
        if call is None:
            return
        hit = call.take(progress)
        if hit is not None:
            self._engine.finish(request, "stop", hit.num_tokens, hit.stop)
        # Not `is_finished`: one step may bring the end of a request's prefill and the round that finished it.
        if hit is not None or progress.finish is not None:
            call.close(request)
            del self._calls[request.id]

    def _abort(self, call: Call) -> None:
        for request in call.requests:
            if self._calls.pop(request.id, None) is not None and not request.is_finished:
                self._engine.abort(request.id)

    def close(self) -> None:
        """Aborts what runs and frees the device memory."""
        for request_id in list(self._calls):
            self._engine.abort(request_id)
        self._calls.clear()
        self._engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
