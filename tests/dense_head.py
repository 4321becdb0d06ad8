"""A draft head in plain NumPy, float64, one pair at a time: no cache, no blocks, nothing shared but the weights."""

from typing import Any

import jax
import numpy as np

from jaxspec.models.network import Network


class DenseHead:
    """The pairs run so far, as their keys and values; each new pair says which of them it sees."""

    def __init__(self, network: Network, leaves: tuple[jax.Array, ...]):
        self.config, self.module = network.config, network.bind(leaves)
        self.keys: list[np.ndarray] = []
        self.values: list[np.ndarray] = []

    def fuse(self, features: list[np.ndarray]) -> np.ndarray:
        """One position's features of the target, as the head reads them."""
        if self.config.fc_norm:
            features = [self._norm(one, norm) for one, norm in zip(features, self.module.fc_norm, strict=True)]
        joined = np.concatenate([np.asarray(one, np.float64) for one in features])
        if self.config.norm_before_fc:
            joined = self._norm(joined, self.module.input_norm)
        return self._linear(joined, self.module.fc) if self.config.fused else joined

    def run(self, token: int, hidden: np.ndarray, position: int, seen: list[int]) -> tuple[np.ndarray, np.ndarray]:
        """Runs pair (hidden, token), which sees earlier pairs and itself.

        Returns:
            What the next step gets for a feature, and logits over the target's vocabulary.
        """
        config, layer = self.config, self.module.layer
        embedded = _wide(self.module.embed_tokens)[token]
        if config.fused:
            normed = self._norm(hidden, layer.hidden_norm)
            x = normed if config.norm_before_residual else hidden
            inputs = np.concatenate([self._norm(embedded, layer.input_layernorm), normed])
        else:
            x = inputs = self._linear(np.concatenate([embedded, hidden]), self.module.fc)
        x = x + self._attend(inputs, position, seen)
        inner, mlp = self._norm(x, layer.post_attention_layernorm), layer.mlp
        gate = self._linear(inner, mlp.gate_proj)
        x = x + self._linear(gate / (1 + np.exp(-gate)) * self._linear(inner, mlp.up_proj), mlp.down_proj)
        normed = self._norm(x, self.module.norm) if config.fused else x
        own = (normed if config.final_norm else x) @ self._vocabulary_head()
        logits = np.full(config.layer.vocab_size, -np.inf)
        ids = np.arange(len(own)) if self.module.target_ids is None else np.asarray(self.module.target_ids[...])
        logits[ids] = own
        return (normed if config.feed_normed else x), logits

    def _vocabulary_head(self) -> np.ndarray:
        """[E, draft vocabulary], however it is stored."""
        if self.config.lm_head == "matrix":
            return _wide(self.module.lm_head)
        return _wide(self.module.embed_tokens if self.config.lm_head == "embedding" else self.module.lm_head).T

    def _attend(self, inputs: np.ndarray, position: int, seen: list[int]) -> np.ndarray:
        attention, sizes = self.module.layer.self_attn, self.config.layer
        heads = lambda projection: self._linear(inputs, projection).reshape(-1, sizes.head_dim)  # noqa: E731
        half = sizes.head_dim // 2
        turn = np.exp(1j * position * sizes.rope.theta ** (-np.arange(half) / half))

        def rotate(x: np.ndarray) -> np.ndarray:
            turned = (x[:, :half] + 1j * x[:, half:]) * turn
            return np.concatenate([turned.real, turned.imag], axis=1)

        queries = rotate(heads(attention.q_proj))
        self.keys.append(rotate(heads(attention.k_proj)))
        self.values.append(heads(attention.v_proj))
        places = [*seen, len(self.keys) - 1]
        out = []
        for index, query in enumerate(queries):
            kv = index // (sizes.num_heads // sizes.num_kv_heads)
            scores = np.array([query @ self.keys[place][kv] for place in places]) / np.sqrt(sizes.head_dim)
            weights = np.exp(scores - scores.max())
            out.append(weights / weights.sum() @ np.array([self.values[place][kv] for place in places]))
        return self._linear(np.concatenate(out), attention.o_proj)

    def _norm(self, x: np.ndarray, module: Any) -> np.ndarray:
        x = np.asarray(x, np.float64)
        return x / np.sqrt(np.mean(x * x) + self.config.layer.rms_norm_eps) * _wide(module.weight)

    @staticmethod
    def _linear(x: np.ndarray, module: Any) -> np.ndarray:
        y = x @ _wide(module.weight)
        return y if module.bias is None else y + _wide(module.bias)


def _wide(weight: Any) -> np.ndarray:
    return np.asarray(weight[...], np.float64)
