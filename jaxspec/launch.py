"""From checkpoints and settings to a running engine: resolve first, load then, compile last."""

import contextlib
import dataclasses
import os
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from tqdm import tqdm

from jaxspec.attention_choice import automatic_backend
from jaxspec.config import EngineConfig, SpecConfig
from jaxspec.cpu.register import why_not
from jaxspec.device import (
    bytes_per_row,
    check_pool_fits,
    default_dtype,
    default_pool_tokens,
    default_scan_layers,
    keep_compiled_programs,
    platform,
)
from jaxspec.draft import DRAFTS
from jaxspec.draft.base import DraftMethod, DraftSettings, Noise
from jaxspec.draft.merged import Merged
from jaxspec.draft.shape import StaticTree, TreeShape
from jaxspec.engine import Engine
from jaxspec.loading.checkpoint import Checkpoint, open_checkpoint
from jaxspec.loading.drafts import DRAFT_SOURCES, OWN_DRAFT_SOURCES, DraftSource, ModelSource, weight_bytes
from jaxspec.plan import Note, SpecPlan
from jaxspec.resolve import resolve
from jaxspec.rules import COUPLED, Rejection, Rule, TargetOnly
from jaxspec.runner import Runner, RunnerShape
from jaxspec.sampling_params import MAX_PROCESSOR_ARGUMENTS
from jaxspec.simulation import Simulated
from jaxspec.sizes import num_rows
from jaxspec.state import Widths
from jaxspec.step import Params, Program
from jaxspec.tokenizer import Tokenizer
from jaxspec.tree_shape import TreeShape as Numbers
from jaxspec.turns import DeferredInterrupt
from jaxspec.weight_layout import PANELS, CpuKernels

# Tokens in a page. On the CPU 64 to 128 is flat, 16 costs 40 % and 1 doubles the attention of a round.
PAGE_SIZE = 64


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
        target = ModelSource.of(checkpoint, tokenizer)
        drafts = _open_drafts(spec, target, tokenizer is not None, stack)
        plan = _resolve(spec, settings, target, drafts, env, cache_dir)
        opened = [draft for draft in drafts if draft is not None]
        plan = dataclasses.replace(plan, notes=(*plan.notes, *(note for draft in opened for note in draft.notes)))
        plan.log()
        models = [source.model for source in (target, *opened)]
        check_pool_fits(models, plan.dtype, plan.attention_backend, plan.num_pages * plan.page_size)
        program, params = _load(plan, settings, target, drafts)
    dtype = jnp.dtype(plan.dtype)
    shape = RunnerShape(
        num_rows=plan.max_running_requests,
        max_model_len=plan.max_model_len,
        num_stop_ids=settings.max_stop_token_ids,
        num_pages=plan.num_pages,
        page_size=plan.page_size,
        dtype=dtype,
        attention_backend=plan.attention_backend,
        widths=_widths(settings, program.target.config.vocab_size),
    )
    runner = make_runner(program, params, shape)
    if plan.prefix_caching and not runner.keeps_all_in_pages:
        reason = "this model keeps more of a prompt than its pages, which are all that requests can share"
        note = Note("prefix_caching", True, False, reason)
        plan = dataclasses.replace(plan, prefix_caching=False, notes=(*plan.notes, note))
    engine = Engine(runner, plan, settings)
    if settings.warmup:
        warm_up(engine, settings.progress)
    return engine


def rule_for(plan: SpecPlan) -> Rule:
    """The rule that judges the drafts of a plan."""
    if plan.simulate_accept_len is not None:
        return Simulated(plan.simulate_accept_len)
    return {
        "coupled": COUPLED,
        "rejection": Rejection(plan.block_verification),
        "target_only": TargetOnly(plan.accept_threshold_single, plan.accept_threshold_acc),
    }[plan.accept_rule]


def noise_for(plan: SpecPlan) -> Noise:
    """How drafts are drawn that this plan's rule judges."""
    if plan.accept_rule == "coupled":
        return Noise.SHARED if plan.shared_noise else Noise.OWN
    return Noise.FRESH if plan.accept_rule == "rejection" else Noise.NONE


def _widths(settings: EngineConfig, vocab_size: int) -> Widths:
    return Widths(
        num_biases=settings.max_logit_bias,
        banned_vocab=vocab_size,
        num_bad_words=settings.max_bad_words,
        bad_word_len=settings.max_bad_word_tokens,
        num_processors=len(settings.processors),
        num_arguments=MAX_PROCESSOR_ARGUMENTS,
    )


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


# The draft checkpoints of the method and of the one that is merged in, None for one that has none.
Drafts = tuple[DraftSource | None, DraftSource | None]


def _open_drafts(
    spec: SpecConfig | None, target: ModelSource, with_tokenizer: bool, stack: contextlib.ExitStack
) -> Drafts:
    """The draft checkpoints as the methods read them; where a method has no use for one, `resolve` says so."""

    def open_(algorithm: str | None, model: str | os.PathLike[str] | None) -> DraftSource | None:
        if model is None:
            find_own = OWN_DRAFT_SOURCES.get(algorithm or "")
            return None if find_own is None else find_own(target)
        if algorithm not in DRAFT_SOURCES:
            return None
        opened = stack.enter_context(open_checkpoint(model))
        return DRAFT_SOURCES[algorithm](opened, target.config, with_tokenizer=with_tokenizer)

    if spec is None:
        return None, None
    return open_(spec.algorithm, spec.draft_model), open_(spec.merge, spec.merge_draft_model)


def _resolve(
    spec: SpecConfig | None,
    settings: EngineConfig,
    target: ModelSource,
    drafts: Drafts,
    env: Mapping[str, str],
    cache_dir: str | None,
) -> SpecPlan:
    dtype = default_dtype() if settings.dtype == "auto" else settings.dtype
    sources = [source for source in (target, *drafts) if source is not None]
    draft, merge_draft = (None if source is None else source.info for source in drafts)
    most = num_rows(settings) * min(settings.max_model_len or target.config.max_position, target.config.max_position)
    # What the plan falls back to, if it does, takes no more.
    backend = automatic_backend(platform()) if settings.attention_backend == "auto" else settings.attention_backend
    models = [source.model for source in sources]
    checkpoints = {id(source.checkpoint): source.checkpoint for source in sources}  # a draft may be in the target's
    taken = sum(weight_bytes(checkpoint, dtype) for checkpoint in checkpoints.values())
    taken += num_rows(settings) * bytes_per_row(models, dtype)
    pool_tokens = settings.max_total_tokens or default_pool_tokens(models, dtype, backend, taken, most)
    return resolve(
        spec,
        settings,
        target.target_info,
        draft,
        env,
        merge_draft=merge_draft,
        platform=platform(),
        available=[name for name in DRAFTS if name != "NONE"],
        page_size_default=PAGE_SIZE,
        max_total_tokens_default=pool_tokens,
        dtype_default=dtype,
        scan_layers_default=default_scan_layers(),
        cpu_kernels=CpuKernels(why_not()) if platform() == "cpu" else None,
        compilation_cache_dir=cache_dir,
    )


def _load(plan: SpecPlan, settings: EngineConfig, target: ModelSource, drafts: Drafts) -> tuple[Program, Params]:
    how: dict[str, Any] = {
        "dtype": plan.dtype,
        "scan_layers": plan.scan_layers,
        "panel_dtype": plan.weight_dtype if plan.weight_layout == PANELS else None,
    }
    network, leaves = target.load(**how)
    vocab_size = network.config.vocab_size
    processors = tuple(settings.processors.values())

    def make(algorithm: str, shape: TreeShape, source: DraftSource | None) -> tuple[DraftMethod, tuple[Any, ...]]:
        own, weights = None, ()
        if source is not None:
            own, weights = source.load((network, leaves), **how)
        wanted = DraftSettings(shape, noise_for(plan), plan.ngram_min_match, plan.ngram_max_match, processors)
        return DRAFTS[algorithm](wanted, own, vocab_size), weights

    shape = TreeShape(plan.num_steps, plan.eagle_topk, plan.num_draft_tokens)
    if plan.static_tree is not None:
        shape = shape._replace(num_nodes=1 + len(plan.static_tree), static=StaticTree(plan.static_tree))
    if plan.merge is None:
        method, draft_leaves = make(plan.algorithm, shape, drafts[0])
    else:
        # What one method can give to a tree that it shares: no more than there are candidates.
        most = min(shape.num_nodes, Numbers(plan.num_steps, plan.eagle_topk, plan.num_draft_tokens).capacity)
        first = shape._replace(num_nodes=most, scores_chain=True)
        second = TreeShape(plan.merge_num_steps, 1, plan.merge_num_steps + 1, scores_chain=True)
        one, one_leaves = make(plan.algorithm, first, drafts[0])
        other, other_leaves = make(plan.merge, second, drafts[1])
        method, draft_leaves = Merged((one, other), plan.num_draft_tokens), (one_leaves, other_leaves)
    num_top = min(settings.max_logprobs, vocab_size)
    program = Program(network, method, plan.rounds_per_dispatch, num_top, processors, rule_for(plan))
    return program, Params(leaves, draft_leaves)
