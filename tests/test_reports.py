"""Public reports that no other test re-enacts, and the page that says which test does."""

import ast
import re
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxspec.config import SamplingParams
from jaxspec.draft.standalone import Standalone
from jaxspec.sampling import best_token, gumbel_noise
from tests.cases import MAX_LEN, engine_of, target
from tests.conftest import REPO
from tests.tiny import VOCAB, chain, make_engine, requests_of, run, tiny_model

PROMPT = [60, 2, 33, 33, 7]


def outputs_of(draft: str, **params: Any) -> list[int]:
    (request,) = run(
        engine_of(draft), requests_of([PROMPT], SamplingParams(max_tokens=20, **params), max_model_len=MAX_LEN)
    )
    return request.output_ids


def test_top_k_without_a_temperature_is_sampled():
    """TRT-LLM #19390: an unset temperature was taken for 0 where top_k was set."""
    sampled = outputs_of("plain", top_k=50, seed=1)
    assert sampled == outputs_of("ngram", top_k=50, seed=1) == outputs_of("plain", top_k=50, seed=1, temperature=1.0)
    assert sampled != outputs_of("plain", top_k=50, seed=2)
    assert sampled != outputs_of("plain", temperature=0.0)


def test_noise_is_finite_and_never_draws_what_is_impossible():
    """vLLM #13196, sglang #30822: coins rounded to 0 or 1 accept what has no probability, or leave the law."""
    seeds = jnp.stack([jnp.arange(64, dtype=jnp.uint32)] * 2, axis=1)
    positions = jnp.broadcast_to(jnp.arange(64), (64, 64))
    noise = np.asarray(gumbel_noise(seeds, positions, 512))
    assert noise.size > 2_000_000
    assert np.isfinite(noise).all()
    # One token in 256 is possible, far below where the noise of the others would lift an ordinary logit.
    logits = np.full((64, 64, 512), -np.inf, np.float32)
    logits[:, :, 5:512:256] = -30.0
    assert set(np.unique(best_token(jnp.asarray(logits / 2 + noise)))) == {5, 261}


def test_a_draft_goes_on_beyond_its_own_context():
    """vLLM #5342, exllamav2 #274: a draft whose context is shorter crashes, or reads positions out of range."""
    network, leaves = tiny_model(0, max_position_embeddings=16)
    engine = make_engine(
        target(),
        Standalone(network, chain(3), VOCAB),
        leaves,
        max_model_len=MAX_LEN,
        chunked_prefill_size=None,
        prefill_chunk_buckets=(MAX_LEN,),
        decode_row_buckets=(4,),
    )
    made = requests_of([PROMPT], SamplingParams(max_tokens=60, seed=1), max_model_len=MAX_LEN)
    (request,) = run(engine, made)
    assert request.output_ids[:20] == outputs_of("plain", seed=1)
    assert len(request.output_ids) == 60
    # It is the target under another name: positions beyond its context are as good as those within.
    assert engine.metrics.accepted == engine.metrics.proposed > 0


def names_in(file: Path) -> set[str]:
    tree = ast.parse(file.read_text(encoding="utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef)}


def test_every_test_that_the_page_names_is_there():
    page = (REPO / "docs" / "reports.md").read_text(encoding="utf-8")
    named = re.findall(r"`([\w/]+\.py)::(\w+)`", page)
    assert len(named) > 60
    missing = [f"{file}::{name}" for file, name in named if name not in names_in(REPO / "tests" / file)]
    assert not missing
    rows = [line for line in page.splitlines() if line.startswith("|") and "---" not in line]
    assert all(line.count("|") == 4 and all(cell.strip() for cell in line.split("|")[1:-1]) for line in rows)
