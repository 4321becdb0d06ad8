"""Tiny models with random weights, and engines over them, for tests that need no checkpoint."""

import dataclasses
import os
import random
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxspec.adjust import Processor
from jaxspec.config import EngineConfig, SamplingParams
from jaxspec.cpu.register import why_not
from jaxspec.device import on_cpu
from jaxspec.draft.base import DraftMethod
from jaxspec.draft.merged import Merged
from jaxspec.draft.plain import Plain
from jaxspec.draft.shape import TreeShape
from jaxspec.draft.tree_draft import TreeDraft
from jaxspec.engine import Engine
from jaxspec.models import Decoder, ModelConfig
from jaxspec.models.heads import Head, HeadConfig
from jaxspec.models.network import Network
from jaxspec.models.weights import pack_weights
from jaxspec.outputs import Exactness
from jaxspec.plan import SpecPlan
from jaxspec.request import Request, RequestRules, make_requests
from jaxspec.rules import COUPLED, Rule
from jaxspec.runner import Runner, RunnerShape
from jaxspec.sizes import choose_sizes
from jaxspec.state import Widths
from jaxspec.step import Params, Program
from jaxspec.weight_layout import PANELS, CpuKernels, choose_weight_layout
from tests.plans import target_info
from tests.processors import PROCESSORS

VOCAB = 64
# What a request may bring, beyond stop tokens.
WIDTHS = Widths(num_biases=4, num_bad_words=3, bad_word_len=3, num_arguments=2)
HAS_PANELS = (
    choose_weight_layout(os.environ, "float32", "auto", CpuKernels(why_not()) if on_cpu() else None, []) == PANELS
)
AUTOMATIC_BACKEND = "cpu" if HAS_PANELS else "xla"


def tiny_config(**changes) -> ModelConfig:
    """A two-layer Llama over `VOCAB` tokens."""
    settings = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
    }
    return ModelConfig.from_hf({**settings, **changes})


def tiny_model(seed: int, *, scale: float = 12.0, **changes) -> tuple[Network, tuple[jax.Array, ...]]:
    """A network and its leaves; `scale` spreads the logits so that greedy choices are not near-ties."""
    config = tiny_config(**changes)
    model = Decoder(config, dtype=jnp.float32, scan_layers=False, rngs=nnx.Rngs(seed))
    graphdef, state = nnx.split(model)
    leaves, treedef = jax.tree.flatten(state)
    leaves = tuple(leaf * scale if leaf.ndim == 2 else leaf for leaf in leaves)
    return Network(config, Decoder, graphdef, treedef), leaves


def tiny_head(
    seed: int, *, fused: bool, layer: ModelConfig | None = None, embed: int | None = None, **changes
) -> tuple[Network, tuple[jax.Array, ...]]:
    """An EAGLE (or, `fused`, EAGLE-3) head and its leaves; every weight is random, norms and biases too.

    Args:
        seed: of the weights.
        fused: see `HeadConfig`.
        layer: the head's own sizes; None is the tiny target's.
        embed: width of the token embedding; None is the head's.
        changes: of HeadConfig.
    """
    layer = tiny_config(num_hidden_layers=1) if layer is None else layer
    sizes = {
        "capture": (0, 1, 0) if fused else ("normed",),
        "target_hidden": layer.hidden_size,
        "target_embed": embed or layer.hidden_size,
        "draft_vocab": layer.vocab_size,
        "fc_bias": not fused,
    }
    config = HeadConfig(layer=layer, fused=fused, **{**sizes, **changes})
    graphdef, state = nnx.split(Head(config, dtype=jnp.float32, rngs=nnx.Rngs(seed)))
    leaves, treedef = jax.tree.flatten(state)
    rng = np.random.default_rng(seed)

    def randomise(leaf: jax.Array) -> jax.Array:
        if leaf.dtype == jnp.int32:
            return jnp.asarray(rng.permutation(layer.vocab_size)[: leaf.size], jnp.int32)
        if leaf.ndim == 1:
            return leaf + jnp.asarray(rng.normal(0, 0.3, leaf.shape), jnp.float32)
        return jnp.asarray(rng.normal(0, leaf.shape[0] ** -0.5, leaf.shape), jnp.float32)

    return Network(config, Head, graphdef, treedef), tuple(map(randomise, leaves))


def as_loaded(
    network: Network, leaves: tuple[jax.Array, ...], weight_dtype: str = "float32"
) -> tuple[Network, tuple[jax.Array, ...]]:
    """A model as `launch` would have it on this device: on the CPU with panels, unless the environment says no."""
    if not HAS_PANELS:
        return network, leaves
    state = dict(nnx.to_flat_state(jax.tree.unflatten(network.treedef, leaves)))
    pack_weights(state, weight_dtype)
    packed, treedef = jax.tree.flatten(nnx.from_flat_state(list(state.items())))
    return dataclasses.replace(network, treedef=treedef), tuple(packed)


def draft_as_loaded(
    method: Any, leaves: tuple[Any, ...], weight_dtype: str = "float32"
) -> tuple[DraftMethod, tuple[Any, ...]]:
    """The same for a draft method and its weights."""
    if isinstance(method, Merged):
        parts = [draft_as_loaded(*part, weight_dtype) for part in zip(method.methods, leaves, strict=True)]
        methods, leaves = zip(*parts)
        return dataclasses.replace(method, methods=methods), leaves
    if not hasattr(method, "network"):
        return method, leaves
    network, leaves = as_loaded(method.network, leaves, weight_dtype)
    return dataclasses.replace(method, network=network), leaves


def chain(num_steps: int) -> TreeShape:
    """The tree of one branch."""
    return TreeShape(num_steps, 1, num_steps + 1)


def scored(num_steps: int) -> TreeShape:
    """A chain that can be united with other trees."""
    return chain(num_steps)._replace(scores_chain=True)


def make_runner(
    target: tuple[Network, tuple[jax.Array, ...]],
    method: DraftMethod | None = None,
    draft_leaves: tuple[Any, ...] = (),
    *,
    rounds_per_dispatch: int = 1,
    num_rows: int = 4,
    page_size: int = 16,
    num_pages: int = 64,
    max_model_len: int = 160,
    num_top_logprobs: int = 4,
    attention_backend: str = AUTOMATIC_BACKEND,
    weight_dtype: str = "float32",
    processors: tuple[Processor, ...] = (),
    rule: Rule = COUPLED,
) -> Runner:
    """The device side over tiny models; `method` None is plain decoding."""
    network, leaves = as_loaded(*target, weight_dtype)
    drafting, draft_leaves = draft_as_loaded(Plain() if method is None else method, draft_leaves, weight_dtype)
    if isinstance(drafting, TreeDraft):
        drafting = dataclasses.replace(drafting, processors=processors)
    program = Program(network, drafting, rounds_per_dispatch, num_top_logprobs, processors, rule)
    dtype = jnp.dtype("float32")
    widths = WIDTHS._replace(banned_vocab=network.config.vocab_size, num_processors=len(processors))
    shape = RunnerShape(num_rows, max_model_len, 8, num_pages, page_size, dtype, attention_backend, widths)
    return Runner(program, Params(leaves, draft_leaves), shape)


def prefill_prompts(
    runner: Runner, prompts: Sequence[Sequence[int]], table: np.ndarray, chunk: int, temperature: float
) -> None:
    """Takes prompts in, in chunks and without an engine; row b has the pages `table[b]` and its own seed."""
    for start in range(0, max(map(len, prompts)), chunk):
        chunks = runner.empty_chunks(len(prompts), chunk)
        for row, prompt in enumerate(prompts):
            part = prompt[start : start + chunk]
            if part:
                chunks.row_ids[row], chunks.start[row], chunks.length[row] = row, start, len(part)
                chunks.table[row], chunks.tokens[row, : len(part)] = table[row], part
                chunks.is_last[row] = start + chunk >= len(prompt)
                chunks.next_token[row] = -1 if chunks.is_last[row] else prompt[start + chunk]
                chunks.remaining[row] = runner.shape.max_model_len
                chunks.sampling.temperature[row], chunks.sampling.seed[row] = temperature, (row, 11)
        runner.prefill(chunks)


def engine_over(runner: Runner, *, rounds_in_flight: int = 1, pool_pages: int | None = None, **settings) -> Engine:
    """An engine over a runner, past `resolve` and loading; a runner may serve one engine after another.

    Args:
        runner: the device side.
        rounds_in_flight: 0 is v1, 1 is v2.
        pool_pages: pages the scheduler may give away; None is all that the device has.
        settings: of EngineConfig.
    """
    method, shape = runner.program.draft, runner.shape
    num_pages = shape.num_pages if pool_pages is None else pool_pages
    sizes = choose_sizes(
        EngineConfig(
            max_running_requests=shape.num_rows,
            max_model_len=shape.max_model_len,
            page_size=shape.page_size,
            max_total_tokens=num_pages * shape.page_size,
            **settings,
        ),
        target_info(max_position=shape.max_model_len),
        [],
        speculates=method.num_steps > 0,
        page_size_default=shape.page_size,
        max_total_tokens_default=num_pages * shape.page_size,
    )
    plan = SpecPlan(
        algorithm="TEST",
        draft_model=None,
        num_steps=method.num_steps,
        eagle_topk=1,
        num_draft_tokens=method.num_draft_tokens,
        rounds_in_flight=rounds_in_flight,
        rounds_per_dispatch=runner.program.rounds,
        prefix_caching=EngineConfig(**settings).prefix_caching and runner.keeps_all_in_pages,  # as in `launch`
        accept_rule="coupled",
        shared_noise=True,
        ngram_min_match=1,
        ngram_max_match=3,
        **sizes._asdict(),
        dtype="float32",
        attention_backend="xla",
        scan_layers=False,
    )
    return Engine(runner, plan, EngineConfig(**settings))


def make_engine(
    target: tuple[Network, tuple[jax.Array, ...]],
    method: DraftMethod | None = None,
    draft_leaves: tuple[Any, ...] = (),
    *,
    rounds_in_flight: int = 1,
    rounds_per_dispatch: int = 1,
    num_rows: int = 4,
    page_size: int = 16,
    num_pages: int = 64,
    max_model_len: int = 160,
    rule: Rule = COUPLED,
    **settings,
) -> Engine:
    """An engine over tiny models."""
    runner = make_runner(
        target,
        method,
        draft_leaves,
        rounds_per_dispatch=rounds_per_dispatch,
        num_rows=num_rows,
        page_size=page_size,
        num_pages=num_pages,
        max_model_len=max_model_len,
        rule=rule,
    )
    return engine_over(runner, rounds_in_flight=rounds_in_flight, **settings)


def requests_of(
    prompts, params, *, max_model_len: int = 160, eos_ids=(), vocab: int = VOCAB, exactness: Exactness = "token"
) -> list[Request]:
    """Requests for (prompt ids, params) pairs; one SamplingParams serves all."""
    if isinstance(params, SamplingParams):
        params = [params] * len(prompts)
    rules = RequestRules(
        max_model_len=max_model_len,
        vocab_size=vocab,
        eos_ids=eos_ids,
        max_logprobs=4,
        max_logit_bias=WIDTHS.num_biases,
        max_bad_words=WIDTHS.num_bad_words,
        max_bad_word_tokens=WIDTHS.bad_word_len,
        processors=tuple(PROCESSORS),
        exactness=exactness,
    )
    rng = random.Random(0)
    made = []
    for index, (prompt, one) in enumerate(zip(prompts, params, strict=True)):
        made += make_requests(prompt, one, rules, request_id=str(index), prompt_index=index, rng=rng)
    return made


def run(engine: Engine, requests: list[Request]) -> list[Request]:
    """Runs requests to their end."""
    for request in requests:
        engine.add(request)
    while engine.has_work:
        engine.step()
    return requests
