"""Each thing that a request may ask of its tokens, and what it means, in NumPy."""

import random
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxspec.config import SamplingParams
from tests.tiny import VOCAB

# Settings that change what is said, one by one.
FEATURES: dict[str, dict[str, Any]] = {
    "presence": {"presence_penalty": 2.0},
    "frequency": {"frequency_penalty": 1.5},
    "rewarded": {"presence_penalty": -2.0, "frequency_penalty": -2.0},
    "repetition": {"repetition_penalty": 1.8},
    "repeated": {"repetition_penalty": 0.5},
    "bias": {"logit_bias": {3: 9.0, 40: -100.0, 21: 7.5, 7: 8.25}},
    "allowed": {"allowed_token_ids": range(1, VOCAB, 5)},
    "bad_words": {"bad_words_ids": [[7], [11], [21, 31], [21, 21]], "allowed_token_ids": [7, 11, 21, 31, 40]},
    "min_tokens": {"stop_token_ids": range(0, VOCAB, 8), "min_tokens": 15},
    "stops": {"stop_token_ids": range(5, VOCAB, 12)},
    "parity": {"logits_processors": ["change_parity"]},
    "in_turn": {"logits_processors": {"favour_in_turn": [5, 12.5]}},
    "not_speculated": {"speculate": False},
}


def mixture(rng: random.Random) -> dict[str, Any]:
    """Some of everything, with random values."""

    def some(share: float, value: Any, otherwise: Any) -> Any:
        return value if rng.random() < share else otherwise

    allowed = rng.sample(range(VOCAB), rng.choice([8, 20, 50]))
    words = [[rng.choice(allowed[1:]) for _ in range(rng.choice([1, 2, 2, 3]))] for _ in range(rng.randint(1, 3))]
    stops = rng.sample([token for token in range(VOCAB) if token != allowed[0]], rng.choice([1, 3, 8]))
    return {
        "presence_penalty": some(0.4, rng.uniform(-2, 2), 0.0),
        "frequency_penalty": some(0.4, rng.uniform(-2, 2), 0.0),
        "repetition_penalty": some(0.4, rng.uniform(0.5, 2), 1.0),
        "logit_bias": some(0.4, {token: rng.uniform(-20, 20) for token in rng.sample(range(VOCAB), 4)}, {}),
        "allowed_token_ids": some(0.4, allowed, None),
        "bad_words_ids": some(0.4, words, []),
        "stop_token_ids": some(0.5, stops, []),
        "min_tokens": some(0.3, rng.randint(1, 12), 0),
        "logits_processors": some(0.3, rng.choice([FEATURES["parity"], FEATURES["in_turn"]])["logits_processors"], []),
        "speculate": some(0.9, True, False),
    }


def adjusted(logits: np.ndarray, prompt: Sequence[int], outputs: Sequence[int], params: SamplingParams) -> np.ndarray:
    """Logits float64 [V] after all that `params` asks for, behind a prompt and outputs; written to be read."""
    logits, said = np.array(logits, np.float64), [*prompt, *outputs]
    for token, bias in params.biases:
        logits[token] += bias
    for token in set(said):
        logits[token] = (
            logits[token] / params.repetition_penalty
            if logits[token] > 0
            else (logits[token] * params.repetition_penalty)
        )
    for token in outputs:
        logits[token] -= params.frequency_penalty
    for token in set(outputs):
        logits[token] -= params.presence_penalty
    for name, numbers in params.processors:
        if name == "change_parity":
            logits[said[-1] % 2 :: 2] = -np.inf
        else:
            step, bonus = numbers
            logits[len(outputs) * int(step) % len(logits)] += bonus
    if params.allowed_token_ids is not None:
        logits[[token for token in range(len(logits)) if token not in params.allowed_token_ids]] = -np.inf
    for *begins, last in params.bad_words_ids:
        if list(outputs[len(outputs) - len(begins) :]) == begins:
            logits[last] = -np.inf
    if len(outputs) < params.min_tokens:
        logits[list(params.stop_token_ids)] = -np.inf
    return logits
