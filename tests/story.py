"""A text of pieces that tokens of plain decoding are made to say: for tests of what text becomes of tokens."""

import functools
from typing import Any, Protocol

from jaxspec import SamplingParams
from tests.cases import MAX_LEN, engine_of
from tests.tiny import requests_of, run

PROMPT = [63, 5, 40, 11]
NUM_PIECES = 10


class Says(Protocol):
    """A tokenizer that gives each token of a story its piece."""

    def decode(self, token_ids: list[int], skip_special_tokens: bool = True) -> str: ...


class Checkpoint:
    """As much of a checkpoint as LLM asks for."""

    eos_token_ids = ()

    def __init__(self, tokenizer: Says):
        self._tokenizer = tokenizer

    def load_tokenizer(self) -> Says:
        return self._tokenizer

    def __enter__(self) -> "Checkpoint":
        return self

    def __exit__(self, *error: object) -> None:
        pass


def sampled(seed: int, **changes: Any) -> SamplingParams:
    return SamplingParams(seed=seed, **{"max_tokens": NUM_PIECES, **changes})


@functools.cache
def find_story() -> tuple[int, list[int]]:
    """A seed and its outputs by plain decoding, all different, so that each can have a piece of its own."""
    params = [sampled(seed) for seed in range(40)]
    for request in run(engine_of("plain", "v1"), requests_of([PROMPT] * 40, params, max_model_len=MAX_LEN)):
        if len(set(request.output_ids)) == NUM_PIECES:
            return request.seed, request.output_ids
    raise AssertionError("no seed gives different tokens; try more")
