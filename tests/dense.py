"""A Llama in plain NumPy, float64, over whole sequences: no cache, no blocks, nothing shared but the weights."""

import jax
import numpy as np

from jaxspec.models.network import Network


def dense_logits(model: tuple[Network, tuple[jax.Array, ...]], tokens: list[int]) -> np.ndarray:
    """Logits [T, V] of a tiny model (plain rotary positions, tied head, no biases) over a sequence."""
    network, leaves = model
    config, decoder = network.config, network.bind(leaves)
    read = lambda weight: np.asarray(weight[...], np.float64)  # noqa: E731
    norm = lambda x, module: (  # noqa: E731
        x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + config.rms_norm_eps) * read(module.weight)
    )
    table = read(decoder.embed_tokens)
    x = table[np.asarray(tokens)]
    for layer in decoder.segments:
        attention, mlp = layer.self_attn, layer.mlp
        inputs = norm(x, layer.input_layernorm)
        heads = [
            (inputs @ read(projection.weight)).reshape(len(tokens), -1, config.head_dim)
            for projection in (attention.q_proj, attention.k_proj, attention.v_proj)
        ]
        mixed = _attend(_rotate(heads[0], config.rope.theta), _rotate(heads[1], config.rope.theta), heads[2])
        x = x + mixed.reshape(len(tokens), -1) @ read(attention.o_proj.weight)
        inputs = norm(x, layer.post_attention_layernorm)
        gate = inputs @ read(mlp.gate_proj.weight)
        x = x + (gate / (1 + np.exp(-gate)) * (inputs @ read(mlp.up_proj.weight))) @ read(mlp.down_proj.weight)
    return norm(x, decoder.norm) @ table.T


def _rotate(x: np.ndarray, theta: float) -> np.ndarray:
    """Rotary positions on x [T, heads, D]: coordinates i and i + D / 2 are a pair."""
    half = x.shape[-1] // 2
    angles = np.arange(len(x))[:, None, None] * theta ** (-np.arange(half) / half)
    first, second = x[..., :half], x[..., half:]
    cos, sin = np.cos(angles), np.sin(angles)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def _attend(queries: np.ndarray, keys: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Causal attention of [T, H, D] over [T, K, D]; neighbouring query heads share a kv head."""
    group = queries.shape[1] // keys.shape[1]
    keys, values = np.repeat(keys, group, axis=1), np.repeat(values, group, axis=1)
    scores = np.einsum("thd,shd->hts", queries, keys) / np.sqrt(queries.shape[-1])
    scores = np.where(np.tril(np.ones(scores.shape[1:], bool)), scores, -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return np.einsum("hts,shd->thd", weights / weights.sum(axis=-1, keepdims=True), values)


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
