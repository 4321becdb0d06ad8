"""Hugging Face's `generate` on torch, as variants of `bench_peers.py`: plain, prompt lookup, assisted generation."""

import copy
import importlib
import time
from typing import Any

import jax
import numpy as np
import transformers

from bench_variants import Batch, Measured
from jaxspec.loading.checkpoint import Checkpoint, open_checkpoint

# Not an import statement: torch is no requirement, so that type checkers do not know it.
torch: Any = importlib.import_module("torch")

LOOKUP_TOKENS = 5
ASSISTANT_LAYERS = 2


class HuggingFaceModel:
    """A transformers model with the weights of a checkpoint, which several variants share.

    Args:
        dtype: of the weights and the computation.

    Raises:
        ValueError: torch does not run on jax's device, or transformers does not know the checkpoint's tensors.
    """

    def __init__(self, model: str, *, dtype: str):
        self.device, self._dtype = _device(), getattr(torch, dtype)
        with open_checkpoint(model) as checkpoint:
            self._config = transformers.AutoConfig.for_model(**checkpoint.config)
            self.whole = _load(checkpoint, self._config, self._dtype).to(self.device)

    def first_layers(self, count: int) -> Any:
        """A model of the first layers, which are the whole model's own."""
        config = copy.deepcopy(self._config)
        config.num_hidden_layers = count
        if getattr(config, "layer_types", None):
            config.layer_types = config.layer_types[:count]
        part = transformers.AutoModelForCausalLM.from_config(config, dtype=self._dtype).to(self.device)
        part.load_state_dict(self.whole.state_dict(), strict=False, assign=True)
        part.tie_weights()
        part.generation_config = copy.deepcopy(self.whole.generation_config)
        return part.eval()


class HuggingFaceVariant:
    """Greedy answers by `generate`, with stop tokens banned.

    Args:
        model: shared by the variants.
        num_tokens: of every answer.
        how: further arguments of `generate`.
    """

    def __init__(self, model: HuggingFaceModel, num_tokens: int, **how: Any):
        self.versions = {"torch": torch.__version__, "transformers": transformers.__version__}
        self._model, self._num_tokens, self._how = model, num_tokens, how

    def run(self, batch: Batch) -> Measured:
        width, device = max(map(len, batch)), self._model.device
        # Padded on the left, so that every row's next token comes at the same place.
        ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in batch], device=device)
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in batch], device=device)
        stamps: list[tuple[float, int]] = []  # when, and how many tokens each row then had

        def stamp(ids: Any, scores: Any, **_: Any) -> Any:
            stamps.append((time.perf_counter(), ids.shape[1] - width))
            return torch.zeros(len(batch), dtype=torch.bool, device=device)

        started = time.perf_counter()
        with torch.inference_mode():
            output = self._model.whole.generate(
                ids,
                attention_mask=mask,
                do_sample=False,
                min_new_tokens=self._num_tokens,
                max_new_tokens=self._num_tokens,
                stopping_criteria=transformers.StoppingCriteriaList([stamp]),
                pad_token_id=0,
                **self._how,
            )
        (first, num_first), (last, _) = stamps[0], stamps[-1]
        rounds = len(stamps) - 1
        return Measured(
            tokens=output[:, width:].tolist(),
            decode_tokens=len(batch) * (self._num_tokens - num_first),
            decode_seconds=last - first,
            rounds=rounds,
            total_seconds=last - started,
            row_rounds=len(batch) * rounds,
            round_tokens=len(batch) * (self._num_tokens - num_first),
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
    raise ValueError(f"this torch does not run on jax's device ({platform}), so nothing could be compared.")


def _load(checkpoint: Checkpoint, config: Any, dtype: Any) -> Any:
    """Builds the model from the checkpoint's own config and fills it tensor by tensor."""
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
