"""Hugging Face's `generate` on torch, as a variant of `bench_decode.py`: same weights, prompts and number of tokens."""

import importlib
import time
from typing import Any

import jax
import numpy as np
import transformers

from bench_variants import Batch, Measured
from jaxspec import SamplingParams
from jaxspec.loading.checkpoint import Checkpoint, open_checkpoint

try:
    # Not an import statement: torch is no requirement, so that type checkers do not know it.
    torch: Any = importlib.import_module("torch")
except ImportError as error:
    raise ValueError("--compare-hf needs torch, which jaxspec does not install; add it: pip install torch") from error


def check_params(params: SamplingParams) -> None:
    """Refuses what both sides would not do alike.

    Raises:
        ValueError: `params` sample (the random numbers would differ, and with them the text that is timed), or have no
            number of tokens.
    """
    if params.temperature != 0:
        raise ValueError("--compare-hf compares greedy decoding; set --temperature 0.")
    if params.max_tokens is None:
        raise ValueError("--compare-hf needs a number of tokens; set --max-new-tokens.")


class HuggingFaceVariant:
    """A transformers model with the weights of a checkpoint.

    Args:
        params: greedy, with a fixed number of tokens.
        dtype: of the weights and the computation, as the other variants use it.

    Raises:
        ValueError: as `check_params`.
    """

    def __init__(self, model: str, params: SamplingParams, *, dtype: str):
        check_params(params)
        self.versions = {"torch": torch.__version__, "transformers": transformers.__version__}
        self._num_tokens = params.max_tokens or 0
        checkpoint = open_checkpoint(model)
        try:
            self._device = _device()
            self._model = _load(checkpoint, getattr(torch, dtype)).to(self._device)
        finally:
            checkpoint.close()

    def run(self, batch: Batch) -> Measured:
        width = max(map(len, batch))
        # Padded on the left, so that every row's next token comes at the same place.
        ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in batch], device=self._device)
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in batch], device=self._device)
        stamps: list[float] = []

        def stamp(ids: Any, scores: Any, **_: Any) -> Any:
            stamps.append(time.perf_counter())
            return torch.zeros(len(batch), dtype=torch.bool, device=self._device)

        started = time.perf_counter()
        with torch.inference_mode():
            output = self._model.generate(
                ids,
                attention_mask=mask,
                do_sample=False,
                min_new_tokens=self._num_tokens,
                max_new_tokens=self._num_tokens,
                stopping_criteria=transformers.StoppingCriteriaList([stamp]),
                pad_token_id=0,
            )
        return Measured(
            tokens=output[:, width:].tolist(),
            decode_tokens=len(batch) * (self._num_tokens - 1),
            decode_seconds=stamps[-1] - stamps[0],
            rounds=self._num_tokens - 1,
            total_seconds=stamps[-1] - started,
        )

    def close(self) -> None:
        del self._model


def _device() -> str:
    """Torch's name of the device that jax runs on."""
    platform = jax.default_backend()
    if platform == "gpu" and torch.cuda.is_available():
        return "cuda"
    if platform == "cpu":
        return "cpu"
    raise ValueError(
        f"--compare-hf: this torch does not run on jax's device ({platform}), so nothing could be compared."
    )


def _load(checkpoint: Checkpoint, dtype: Any) -> Any:
    """Builds the model from the checkpoint's own config and fills it tensor by tensor."""
    config = transformers.AutoConfig.for_model(**checkpoint.config)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    weights = {name: torch.from_numpy(checkpoint.read(name).astype(np.float32)) for name in checkpoint.shapes}
    missing, unexpected = model.load_state_dict(weights, strict=False)
    tied = {"lm_head.weight"} if config.tie_word_embeddings else set()
    if set(missing) - tied or unexpected:
        raise ValueError(f"transformers misses {sorted(set(missing) - tied)} and does not know {unexpected}.")
    model.tie_weights()
    # Stop tokens would end a row before its number of tokens; min_new_tokens bans those that the config names.
    model.generation_config.eos_token_id = list(checkpoint.eos_token_ids) or None
    return model.eval()
