"""From checkpoints and settings to a running engine: resolve first, load then, compile last."""

import contextlib
import dataclasses
import math
from collections.abc import Mapping

import jax.numpy as jnp
from tqdm import tqdm

from jaxspec.config import EngineConfig, SpecConfig
from jaxspec.device import (
    check_pool_fits,
    default_dtype,
    default_pool_tokens,
    default_scan_layers,
    keep_compiled_programs,
)
from jaxspec.draft import DRAFTS
from jaxspec.draft.base import DraftSettings
from jaxspec.engine import Engine
from jaxspec.loading.checkpoint import Checkpoint, open_checkpoint
from jaxspec.loading.load import load_model
from jaxspec.models import MODELS, ModelConfig
from jaxspec.models.network import Network
from jaxspec.plan import DraftInfo, SpecPlan, TargetInfo
from jaxspec.resolve import MAX_RUNNING_REQUESTS, resolve
from jaxspec.runner import Runner, RunnerShape
from jaxspec.step import Params, Program
from jaxspec.tokenizer import Tokenizer
from jaxspec.turns import DeferredInterrupt

# Tokens in a page. On the CPU 64 to 128 is flat, 16 costs 40 % and 1 doubles the attention of a round.
PAGE_SIZE = 64


@dataclasses.dataclass(frozen=True)
class _Source:
    """A checkpoint and what its config says."""

    checkpoint: Checkpoint
    config: ModelConfig
    fingerprint: str | None

    @classmethod
    def of(cls, checkpoint: Checkpoint, tokenizer: Tokenizer | None) -> "_Source":
        return cls(checkpoint, ModelConfig.from_hf(checkpoint.config), tokenizer and tokenizer.fingerprint)

    def weight_bytes(self, dtype: str) -> int:
        return sum(math.prod(shape) for shape in self.checkpoint.shapes.values()) * jnp.dtype(dtype).itemsize


def launch(
    checkpoint: Checkpoint,
    spec: SpecConfig | None,
    settings: EngineConfig,
    tokenizer: Tokenizer | None,
    env: Mapping[str, str],
) -> Engine:
    """Builds an engine.

    Args:
        checkpoint: of the target.
        spec: how to draft, or None.
        settings: sizes and schedule.
        tokenizer: the target's, or None; a draft's has to be the same.
        env: the environment, read here and never again.

    Raises:
        FileNotFoundError: the draft checkpoint or one of its files is missing.
        ValueError: the settings contradict each other, the models, or this version.
    """
    cache_dir = keep_compiled_programs(settings.compilation_cache_dir)
    with contextlib.ExitStack() as stack:
        target, draft = _Source.of(checkpoint, tokenizer), None
        if spec is not None and spec.draft_model is not None:
            opened = stack.enter_context(open_checkpoint(spec.draft_model))
            draft = _Source.of(opened, None if tokenizer is None else opened.load_tokenizer())
        plan = _resolve(spec, settings, target, draft, env, cache_dir)
        plan.log()
        configs = [source.config for source in (target, draft) if source is not None]
        check_pool_fits(configs, plan.dtype, plan.num_pages * plan.page_size)
        program, params = _load(plan, settings, target, draft)
    dtype = jnp.dtype(plan.dtype)
    shape = RunnerShape(
        num_rows=plan.max_running_requests,
        max_model_len=plan.max_model_len,
        num_stop_ids=settings.max_stop_token_ids,
        num_pages=plan.num_pages,
        page_size=plan.page_size,
        dtype=dtype,
    )
    engine = Engine(make_runner(program, params, shape), plan, settings)
    if settings.warmup:
        warm_up(engine, settings.progress)
    return engine


def make_runner(program: Program, params: Params, shape: RunnerShape) -> Runner:
    """The device side.

    Raises:
        ValueError: its state does not fit into the memory.
    """
    try:
        return Runner(program, params, shape)
    except RuntimeError as error:  # jax's own class derives from it
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise ValueError(
            f"the state of max_running_requests={shape.num_rows} rows of max_model_len={shape.max_model_len} tokens "
            f"and max_stop_token_ids={shape.num_stop_ids}, and {shape.num_pages} pages of {shape.page_size} tokens, do "
            "not fit into the memory; set less."
        ) from error


def warm_up(engine: Engine, progress: bool | None = None) -> None:
    """Compiles every program a dispatch may need, behind a progress bar (None: only on a terminal)."""
    programs = engine.warmup_programs()
    disable = None if progress is None else not progress  # tqdm's None is "no terminal, no bar"
    with tqdm(total=len(programs), desc="Compiling", unit="program", disable=disable, leave=False) as bar:
        warmed = engine.runner.warm_up(programs)
        for _ in programs:
            with DeferredInterrupt():  # one that arrives within a compilation may be lost in it
                next(warmed)
            bar.update()


def _resolve(
    spec: SpecConfig | None,
    settings: EngineConfig,
    target: _Source,
    draft: _Source | None,
    env: Mapping[str, str],
    cache_dir: str | None,
) -> SpecPlan:
    dtype = default_dtype() if settings.dtype == "auto" else settings.dtype
    sources = [source for source in (target, draft) if source is not None]
    rows = settings.max_running_requests or MAX_RUNNING_REQUESTS
    most = rows * min(settings.max_model_len or target.config.max_position, target.config.max_position)
    pool_tokens = settings.max_total_tokens or default_pool_tokens(
        [source.config for source in sources], dtype, sum(source.weight_bytes(dtype) for source in sources), most
    )
    config = target.config
    return resolve(
        spec,
        settings,
        TargetInfo(
            architecture=config.architecture,
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            num_layers=config.num_layers,
            max_position=config.max_position,
            tokenizer_hash=target.fingerprint,
        ),
        None
        if draft is None
        else DraftInfo(
            architecture=draft.config.architecture,
            vocab_size=draft.config.vocab_size,
            max_position=draft.config.max_position,
            tokenizer_hash=draft.fingerprint,
        ),
        env,
        available=[name for name in DRAFTS if name != "NONE"],
        page_size_default=PAGE_SIZE,
        max_total_tokens_default=pool_tokens,
        dtype_default=dtype,
        scan_layers_default=default_scan_layers(),
        compilation_cache_dir=cache_dir,
    )


def _load(plan: SpecPlan, settings: EngineConfig, target: _Source, draft: _Source | None) -> tuple[Program, Params]:
    def load(source: _Source) -> tuple[Network, tuple]:
        loaded = load_model(source.checkpoint, dtype=jnp.dtype(plan.dtype), scan_layers=plan.scan_layers)
        kind = MODELS[loaded.config.architecture]
        return Network(loaded.config, kind, loaded.graphdef, loaded.treedef), loaded.leaves

    network, leaves = load(target)
    draft_network, draft_leaves = (None, ()) if draft is None else load(draft)
    wanted = DraftSettings(
        plan.num_steps, plan.eagle_topk, plan.num_draft_tokens, plan.ngram_min_match, plan.ngram_max_match
    )
    method = DRAFTS[plan.algorithm].create(wanted, draft_network, network.config.vocab_size)
    num_top = min(settings.max_logprobs, network.config.vocab_size)
    return Program(network, method, plan.rounds_per_dispatch, num_top), Params(leaves, draft_leaves)
