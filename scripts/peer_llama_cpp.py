"""llama.cpp, by the wheels of xllamacpp, as variants of `bench_peers.py`: plain, and prompt lookup.

The server gives out text and not token ids: answers are turned into ids by the model's tokenizer, for the comparison
with other variants alone. What is counted are the server's own tokens.
"""

import importlib
import os
import threading
import time
from collections.abc import Callable
from importlib import metadata
from typing import Any

from bench_variants import Batch, Measured

# Not an import statement: it is no requirement, so that type checkers do not know it.
xllamacpp: Any = importlib.import_module("xllamacpp")

LOOKUP_TOKENS = 5
LOOKUP_NGRAM = 3


class LlamaCppVariant:
    """Greedy answers, with stop tokens banned.

    Args:
        file: a GGUF file, whose types are what is computed with.
        num_tokens: of every answer.
        max_batch: requests decoded together.
        context: tokens of a prompt and its answer.
        encode: text to token ids.
        has_lookup: drafts by prompt lookup.
    """

    def __init__(
        self,
        file: str,
        num_tokens: int,
        *,
        max_batch: int,
        context: int,
        encode: Callable[[str], list[int]],
        has_lookup: bool = False,
    ):
        self.versions = {"xllamacpp": metadata.version("xllamacpp"), "llama.cpp": xllamacpp.get_system_info().strip()}
        self._num_tokens, self._encode = num_tokens, encode
        params = xllamacpp.CommonParams()
        params.model.path = file
        params.n_gpu_layers, params.n_parallel, params.n_ctx = 0, max_batch, max_batch * context
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = os.cpu_count() or 1
        params.cache_prompt, params.verbosity = False, -1
        if has_lookup:
            params.speculative.types = [xllamacpp.common_speculative_type.COMMON_SPECULATIVE_TYPE_NGRAM_SIMPLE]
            params.speculative.ngram_simple.size_n, params.speculative.ngram_simple.size_m = LOOKUP_NGRAM, LOOKUP_TOKENS
        self._server = xllamacpp.Server(params)

    def run(self, batch: Batch) -> Measured:
        stamps: list[list[tuple[float, int]]] = [[] for _ in batch]  # when, and how many tokens there then were
        texts: list[list[str]] = [[] for _ in batch]
        accepted = [0] * len(batch)  # drafts

        def answer(index: int) -> None:
            def take(chunk: Any) -> bool:
                if "error" in chunk:
                    raise RuntimeError(f"llama.cpp: {chunk}")
                texts[index].append(chunk["choices"][0]["text"])
                stamps[index].append((time.perf_counter(), chunk["timings"]["predicted_n"]))
                accepted[index] = chunk["timings"].get("draft_n_accepted", 0)
                return False

            request = {"prompt": batch[index], "n_predict": self._num_tokens, "temperature": 0, "ignore_eos": True}
            self._server.handle_completions(
                {**request, "stream": True, "timings_per_token": True, "cache_prompt": False}, take
            )

        started = time.perf_counter()
        threads = [threading.Thread(target=answer, args=(index,)) for index in range(len(batch))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        window = max(own[0][0] for own in stamps)  # the last row has its first token
        finished = max(own[-1][0] for own in stamps)
        decoded = sum(own[-1][1] - max(count for when, count in own if when <= window) for own in stamps)
        rounds = [own[-1][1] - 1 - drafts for own, drafts in zip(stamps, accepted, strict=True)]
        return Measured(
            tokens=[self._encode("".join(own)) for own in texts],
            decode_tokens=decoded,
            decode_seconds=finished - window,
            rounds=max(rounds),
            total_seconds=finished - started,
            row_rounds=sum(rounds),
            round_tokens=sum(own[-1][1] - 1 for own in stamps),
        )

    def close(self) -> None:
        del self._server
