"""Writes a chunk of a prompt, and the settings of its request, into the arrays of a dispatch."""

from typing import Any

import numpy as np

from jaxspec.batches import PrefillChunk
from jaxspec.request import Request

WORD_BITS = 32


def fill_chunk(chunks: Any, index: int, chunk: PrefillChunk) -> None:
    """Writes one chunk into row `index`; the arrays are NumPy's, fresh from the runner."""
    chunks.row_ids[index] = chunk.row
    chunks.tokens[index, : len(chunk.tokens)] = chunk.tokens
    chunks.length[index] = len(chunk.tokens)
    chunks.start[index] = chunk.start
    chunks.next_token[index] = chunk.next_token
    chunks.is_last[index] = chunk.is_last
    chunks.remaining[index] = chunk.remaining
    chunks.sampling.min_len[index] = chunk.min_len
    fill_sampling(chunks.sampling, index, chunk.request)


def fill_sampling(sampling: Any, index: int, request: Request) -> None:
    """Writes what is the same for all chunks of a request into row `index` of a `Sampling`."""
    params = request.params
    sampling.temperature[index] = params.temperature
    sampling.top_k[index] = max(params.top_k, 0)
    sampling.top_p[index] = params.top_p
    sampling.min_p[index] = params.min_p
    sampling.seed[index] = request.seed >> 32, request.seed & 0xFFFFFFFF
    sampling.stop_ids[index, : len(request.stop_ids)] = request.stop_ids
    sampling.want_logprobs[index] = params.logprobs is not None
    sampling.want_prompt_logprobs[index] = request.wants_prompt_logprobs
    sampling.prompt_len[index] = len(request.prompt_ids)
    sampling.speculate[index] = params.speculate
    sampling.presence[index] = params.presence_penalty
    sampling.frequency[index] = params.frequency_penalty
    sampling.repetition[index] = params.repetition_penalty
    for place, (token, bias) in enumerate(params.biases):
        sampling.bias_ids[index, place], sampling.bias[index, place] = token, bias
    for place, numbers in request.processors.items():
        sampling.processors[index, place] = True
        sampling.arguments[index, place, : len(numbers)] = numbers
    words = [word for word in params.bad_words_ids if len(word) > 1]
    for place, word in enumerate(words):
        sampling.bad_words[index, place, -len(word) :] = word
    single = [word[0] for word in params.bad_words_ids if len(word) == 1]
    if params.allowed_token_ids is not None or single:
        sampling.banned[index] = _banned_bits(sampling.banned.shape[1], params.allowed_token_ids, single)


def _banned_bits(num_words: int, allowed: Any, banned: list[int]) -> np.ndarray:
    """A bit for each token: uint32 [num_words]; bit j of word w is token 32 w + j."""
    marks = np.full(num_words * WORD_BITS, allowed is not None)
    if allowed is not None:
        marks[list(allowed)] = False
    marks[banned] = True
    return np.packbits(marks, bitorder="little").view("<u4")
