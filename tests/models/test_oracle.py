"""Models of a checkpoint against another implementation's logits, through the paged cache.

Reference values of some families lie in `tests/golden`, those of the others in the shared folder.
"""

import functools
import json
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.attention import Block
from jaxspec.kv_cache import Accepted
from jaxspec.loading import open_checkpoint
from jaxspec.loading.load import load_model
from jaxspec.models import MODELS
from jaxspec.models.delta_cache import DeltaCache
from jaxspec.models.network import Network

GOLDEN = Path(__file__).resolve().parents[1] / "golden"
FAMILIES = (
    *("llama", "qwen3", "smollm2", "qwen2", "qwen3_moe", "gemma3"),
    *("deepseek_v3", "deepseek_v3_fp8", "qwen3_next", "qwen3_5", "qwen3_5_moe"),
)
PAGE_SIZE, NUM_PAGES = 4, 16
TABLE = np.random.default_rng(0).permutation(NUM_PAGES)[None, :12].astype(np.int32)
BLOCK = 4  # one shape for chunks of the prompt, of the continuation, and for the verify block


def close(found, expected, atol: float = 2e-4) -> None:
    np.testing.assert_allclose(found, expected, rtol=0, atol=atol)


@functools.partial(jax.jit, static_argnums=0)
def feed_block(network: Network, leaves, caches, tokens, length, keep):
    """Logits [N, V] of a block of tokens [1, N] behind `length` committed ones, and caches with `keep` more."""
    model = network.bind(leaves)
    offsets = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
    block = Block(length + offsets, length[None], jnp.asarray(TABLE))
    out = model.extend(tokens, block, caches)
    return model.logits(out.hidden)[0], model.commit(caches, out.pending, block, Accepted(offsets, keep[None]))


class Session:
    """A text that grows in one row of a paged cache."""

    def __init__(self, network: Network, leaves: tuple[jax.Array, ...]):
        self.network, self.leaves, self.length = network, leaves, 0
        dtype = jnp.dtype("float32")
        self.caches = network.init_cache(num_pages=NUM_PAGES, page_size=PAGE_SIZE, num_rows=1, dtype=dtype)

    def feed(self, tokens: list[int], *, keep: int | None = None) -> np.ndarray:
        """Logits [N, V] of a block; `keep` of its tokens are committed (all if None)."""
        keep = len(tokens) if keep is None else keep
        numbers = np.array([tokens], np.int32), np.int32(self.length), np.int32(keep)
        logits, self.caches = feed_block(self.network, self.leaves, self.caches, *numbers)
        self.length += keep
        return np.asarray(logits)

    def feed_all(self, tokens: list[int], size: int) -> np.ndarray:
        """Logits [len(tokens), V], in blocks of `size`."""
        return np.concatenate([self.feed(tokens[start : start + size]) for start in range(0, len(tokens), size)])


def folder_of(family: str, request: pytest.FixtureRequest) -> Path:
    """The folder of one family's files."""
    if (GOLDEN / family).is_dir():
        return GOLDEN / family
    return request.getfixturevalue("shared") / "oracle" / "tiny" / family


@pytest.fixture(params=FAMILIES)
def folder(request: pytest.FixtureRequest) -> Path:
    return folder_of(request.param, request)


def load_network(folder: Path, *, scan_layers: bool) -> tuple[Network, tuple[jax.Array, ...]]:
    with open_checkpoint(folder) as checkpoint:
        loaded = load_model(checkpoint, dtype="float32", scan_layers=scan_layers)
    kind = MODELS[loaded.config.architecture]
    return Network(loaded.config, kind, loaded.graphdef, loaded.treedef), loaded.leaves


@pytest.fixture
def ref(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "ref.json").read_text())


def write_folder(folder: Path, to: Path, wording: str) -> Path:
    """A Hugging Face folder with one wording of the config; how weights are stored stands in the public one only."""
    shutil.copyfile(folder / "model.safetensors", to / "model.safetensors")
    config, public = (json.loads((folder / name).read_text()) for name in (wording, "config_hub.json"))
    stored_as = {name: value for name, value in public.items() if name == "quantization_config"}
    (to / "config.json").write_text(json.dumps(config | stored_as))
    return to


@pytest.mark.parametrize(
    ("wording", "scan_layers"),
    [("config.json", False), ("config_hub.json", True)],
    ids=["saved wording, unrolled", "public wording, scanned"],
)
def test_logits_equal_the_reference(folder, ref, tmp_path, wording, scan_layers):
    model = load_network(write_folder(folder, tmp_path, wording), scan_layers=scan_layers)
    prompt, greedy, verify = ref["prompt"], ref["greedy"], ref["verify"]

    session = Session(*model)
    logits = session.feed_all(prompt, BLOCK)
    assert logits.argmax(-1).tolist() == ref["argmax"]
    close(logits[-1], ref["last_logits"])
    one_by_one = [int(logits[-1].argmax())]
    while len(one_by_one) < len(greedy):
        one_by_one.append(int(session.feed(one_by_one[-1:])[-1].argmax()))
    assert one_by_one == greedy

    in_blocks = Session(*model)
    in_blocks.feed_all(prompt, BLOCK)
    assert in_blocks.feed_all(greedy, BLOCK).argmax(-1).tolist()[:-1] == greedy[1:]

    judged = Session(*model)
    judged.feed_all(prompt, BLOCK)
    logits = judged.feed(verify["block"], keep=verify["accepted"])
    assert logits.argmax(-1).tolist() == verify["argmax"]
    close(logits[-1], verify["last_logits"])
    close(logits[verify["accepted"] - 1], verify["next_logits_after_rollback"])
    close(judged.feed([greedy[1]])[-1], verify["then_logits"])


@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5", "qwen3_5_moe"])
def test_recurrent_states_equal_the_reference(family, request):
    folder = folder_of(family, request)
    ref = json.loads((folder / "ref.json").read_text())
    model = load_network(folder, scan_layers=False)

    def check(session: Session, name: str) -> None:
        (cache,) = [cache for cache in session.caches if isinstance(cache, DeltaCache)]
        for place, said in enumerate(ref["states"][name]):
            state, inputs = np.asarray(cache.state[place, 0], np.float64), cache.inputs[place, 0]
            close([state.sum(), np.abs(state).sum()], [said["recurrent_sum"], said["recurrent_abs"]], atol=2e-3)
            close(state[0, 0, :4], said["recurrent_head"])
            close(inputs[-1, :4], said["conv_last"])

    one, block = Session(*model), Session(*model)
    for session in (one, block):
        session.feed_all(ref["prompt"], BLOCK)
        check(session, "after_prompt")
    one.feed(ref["greedy"][:1])
    check(one, "after_1")
    block.feed(ref["verify"]["block"])
    check(block, "after_block")


def test_both_wordings_are_the_same_model(folder, tmp_path):
    public = load_network(write_folder(folder, tmp_path, "config_hub.json"), scan_layers=False)[0]
    assert load_network(write_folder(folder, tmp_path, "config.json"), scan_layers=False)[0] == public


@pytest.mark.parametrize("family", sorted(path.name for path in GOLDEN.iterdir() if path.is_dir()))
def test_the_golden_files_are_the_shared_ones(shared, family):
    for file in (GOLDEN / family).iterdir():
        assert file.read_bytes() == (shared / "oracle" / "tiny" / family / file.name).read_bytes()
