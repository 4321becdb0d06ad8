"""A target's own draft layer against another implementation: its logits and its drafts, under each engine's wiring."""

import functools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.attention import Block
from jaxspec.draft.base import CacheShape, Observation
from jaxspec.draft.feature import Feature
from jaxspec.kv_cache import Accepted
from jaxspec.loading import open_checkpoint
from jaxspec.loading.own_head import load_own_head, open_own_head
from jaxspec.models.network import Network
from jaxspec.models.own_draft import Wiring
from jaxspec.state import Rows
from tests.models.test_oracle import TABLE, folder_of, load_network, write_folder
from tests.tiny import chain

CASES = [
    (family, "sglang", "main") for family in ("deepseek_v3_fp8", "deepseek_v3", "qwen3_next", "qwen3_5", "qwen3_5_moe")
]
# The layer's own vocabulary head is a copy of the target's.
CASES += [("deepseek_v3_fp8", "vllm", "own"), ("deepseek_v3", "vllm", "main")]
NUM_DRAFTS = 4
PAGES = {"num_pages": 16, "page_size": 4, "dtype": jnp.dtype("float32")}
Weights = tuple[Network, tuple[jax.Array, ...]]


def load_pair(folder: Path, wiring: Wiring) -> tuple[Weights, Weights]:
    """A target and its own head."""
    target = load_network(folder, scan_layers=False)
    with open_checkpoint(folder) as checkpoint:
        head = open_own_head(checkpoint, target[0].config, wiring=wiring)
        assert head is not None
        return target, load_own_head(head, *target, dtype="float32")


@functools.partial(jax.jit, static_argnames=("network", "name"))
def read_target(network: Network, leaves, tokens, name: str) -> jax.Array:
    """A captured state of the target over a text int32 [1, T]: [1, T, E]."""
    places = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
    block = Block(places, jnp.zeros(1, jnp.int32), jnp.asarray(TABLE))
    return (
        network.bind(leaves).extend(tokens, block, network.init_cache(**PAGES, num_rows=1), capture=(name,)).captured[0]
    )


@functools.partial(jax.jit, static_argnames="network")
def run_pairs(network: Network, leaves, caches, tokens, hidden, start):
    """Commits pairs from `start` on; logits and state of the last one, and the caches."""
    head = network.bind(leaves)
    offsets = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
    block = Block(start + offsets, start[None], jnp.asarray(TABLE))
    out = head.extend(tokens, hidden, block, caches)
    kept = Accepted(offsets, jnp.full(1, tokens.shape[1]))
    return head.logits(out.state)[0, -1], out.hidden[:, -1:], head.commit(caches, out.pending, block, kept)


@pytest.mark.parametrize(("family", "name", "head"), CASES)
def test_drafts_and_logits_equal_the_reference(request, tmp_path, family, name, head):
    source = folder_of(family, request)
    folder = write_folder(source, tmp_path, "config_hub.json")
    ref = json.loads((source / "ref.json").read_text())
    said = ref["mtp"]["wirings"][name]
    wiring = Wiring(hidden=said["hidden"], link=said["link"], head=head, zero_first=said["zero_first_embedding"])
    target, (network, leaves) = load_pair(folder, wiring)
    prompt, follows = (np.array([ref[key]], np.int32) for key in ("prompt", "greedy"))
    tokens = np.array([ref["mtp"]["tokens_in"]], np.int32)
    assert tokens[0].tolist() == [*ref["prompt"][1:], ref["greedy"][0]]
    feature = read_target(*target, prompt, network.config.capture[0])

    caches, hidden, drafts = network.init_cache(**PAGES), feature, []
    start, last = np.int32(0), tokens
    for step in said["steps"]:
        logits, hidden, caches = run_pairs(network, leaves, caches, last, hidden, start)
        np.testing.assert_allclose(logits, step["logits"], rtol=0, atol=2e-4)
        drafts.append(int(logits.argmax()))
        start, last = np.int32(start + last.shape[1]), np.array([[drafts[-1]]], np.int32)
    assert drafts == [step["draft"] for step in said["steps"]]

    method = Feature(network, chain(NUM_DRAFTS))
    length = tokens.shape[1]
    rows = Rows.zeros(1, 64, 1)._replace(
        bonus=follows[:, 0], seq_len=jnp.full(1, length), active=jnp.ones(1, bool), remaining=jnp.full(1, 9)
    )
    seen = Observation(
        jnp.asarray(prompt), jnp.asarray(tokens), jnp.full(1, length), jnp.zeros(1, jnp.int32), (feature,)
    )

    @jax.jit
    def draft(leaves, rows: Rows, seen: Observation) -> jax.Array:
        state = method.init(CacheShape(1, PAGES["num_pages"], PAGES["page_size"], PAGES["dtype"]))
        state = method.observe(leaves, state, rows, jnp.asarray(TABLE), seen)
        return method.propose(leaves, state, rows, jnp.asarray(TABLE)).tokens

    assert draft(leaves, rows, seen)[0].tolist() == [ref["greedy"][0], *drafts]
