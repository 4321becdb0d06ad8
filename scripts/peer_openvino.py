"""openvino-genai's continuous batching, as variants of `bench_peers.py`: plain, and prompt lookup."""

import importlib
import time
from typing import Any

import numpy as np

from bench_variants import Batch, Measured

# Not import statements: neither package is a requirement, so that type checkers do not know them.
genai: Any = importlib.import_module("openvino_genai")
openvino: Any = importlib.import_module("openvino")

LOOKUP_TOKENS = 5
LOOKUP_NGRAM = 3
CACHE_GB = 1


class OpenVinoVariant:
    """Greedy answers, with stop tokens banned, computed in float32.

    Args:
        folder: of the exported model, float32.
        num_tokens: of every answer.
        has_lookup: drafts by prompt lookup.
    """

    def __init__(self, folder: str, num_tokens: int, *, has_lookup: bool = False):
        self.versions = {"openvino-genai": genai.__version__}
        scheduler = genai.SchedulerConfig()
        scheduler.cache_size, scheduler.enable_prefix_caching = CACHE_GB, False
        how = {"INFERENCE_PRECISION_HINT": "f32", **({"prompt_lookup": True} if has_lookup else {})}
        self._pipeline = genai.ContinuousBatchingPipeline(folder, scheduler, "CPU", how)
        self._config = config = genai.GenerationConfig()
        config.max_new_tokens = config.min_new_tokens = num_tokens
        config.do_sample, config.apply_chat_template, config.ignore_eos = False, False, True
        if has_lookup:
            config.num_assistant_tokens, config.max_ngram_size = LOOKUP_TOKENS, LOOKUP_NGRAM

    def run(self, batch: Batch) -> Measured:
        started = time.perf_counter()
        handles = [
            self._pipeline.add_request(index, openvino.Tensor(np.array([prompt], np.int64)), self._config)
            for index, prompt in enumerate(batch)
        ]
        tokens: list[list[int]] = [[] for _ in batch]
        window, rounds, before = None, 0, 0
        while self._pipeline.has_non_finished_requests():
            self._pipeline.step()
            for handle, own in zip(handles, tokens, strict=True):
                while handle.can_read():
                    for output in handle.read().values():
                        own.extend(output.generated_ids)
            if window is not None:
                rounds += 1
            elif all(tokens):
                window, before = time.perf_counter(), sum(map(len, tokens))
        finished = time.perf_counter()
        decoded = sum(map(len, tokens)) - before
        return Measured(
            tokens=tokens,
            decode_tokens=decoded,
            decode_seconds=finished - (finished if window is None else window),
            rounds=rounds,
            total_seconds=finished - started,
            row_rounds=len(batch) * rounds,
            round_tokens=decoded,
        )

    def close(self) -> None:
        del self._pipeline
