"""A decode round over shapes alone: no weights, and compiled for chips that this machine need not have."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from jaxspec.draft.base import CacheShape, DraftMethod
from jaxspec.draft.feature import Feature
from jaxspec.draft.ngram import Ngram
from jaxspec.draft.plain import Plain
from jaxspec.draft.shape import TreeShape
from jaxspec.draft.standalone import Standalone
from jaxspec.models import MODELS, ModelConfig
from jaxspec.models.heads import Head, HeadConfig
from jaxspec.models.network import Network
from jaxspec.pallas.split import MODEL_AXIS
from jaxspec.state import Rows, State
from jaxspec.step import Params, Program, decode_step

_LLAMA_3 = {
    "architectures": ["LlamaForCausalLM"],
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "num_key_value_heads": 8,
    "head_dim": 128,
}
_QWEN_3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "num_key_value_heads": 8,
    "head_dim": 128,
}
# What the models' own config.json says of their sizes.
MODEL_SHAPES: dict[str, dict[str, Any]] = {
    "SmolLM2-135M": {
        "architectures": ["LlamaForCausalLM"],
        "rms_norm_eps": 1e-5,
        "rope_theta": 100000.0,
        "vocab_size": 49152,
        "max_position_embeddings": 8192,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "tie_word_embeddings": True,
    },
    "Llama-3.1-8B": {
        **_LLAMA_3,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
    },
    "Llama-3.1-70B": {
        **_LLAMA_3,
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
    },
    "Qwen3-0.6B": {
        **_QWEN_3,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "tie_word_embeddings": True,
    },
    "Qwen3-32B": {
        **_QWEN_3,
        "hidden_size": 5120,
        "intermediate_size": 25600,
        "num_hidden_layers": 64,
        "num_attention_heads": 64,
    },
}
# Tokens that the heads of EAGLE-3 choose from, as they are published.
HEAD_VOCAB = 32000
CHAIN = TreeShape(3, 1, 4)
NUM_STOP_IDS, NUM_TOP_LOGPROBS = 16, 20
# Which axis of a weight is split, from the end; the others are whole on every chip.
_SPLIT = {"q_proj": -1, "k_proj": -1, "v_proj": -1, "gate_proj": -1, "up_proj": -1, "o_proj": -2, "down_proj": -2}


@dataclasses.dataclass(frozen=True, kw_only=True)
class RoundSettings:
    """What is compiled.

    Attributes:
        model: sizes of the target.
        algorithm: "NONE", "NGRAM", "STANDALONE" or "EAGLE3".
        shape: of the draft tree.
        draft: sizes of STANDALONE's draft model.
        num_rows: rows that run together.
        max_model_len: longest context of a row; the pool has room for all rows of it.
        page_size: tokens of a page.
        backend: what attends, see `EngineConfig.attention_backend`.
        dtype: of weights, activations and caches.
    """

    model: ModelConfig
    algorithm: str = "EAGLE3"
    shape: TreeShape = CHAIN
    draft: ModelConfig | None = None
    num_rows: int = 16
    max_model_len: int = 4096
    page_size: int = 64
    backend: str = "pallas_tpu"
    dtype: str = "bfloat16"

    @property
    def table_width(self) -> int:
        """Pages of one row."""
        return -(-self.max_model_len // self.page_size)


@dataclasses.dataclass(frozen=True)
class Round:
    """The decode step of one round, and the shapes of its arguments."""

    settings: RoundSettings
    program: Program
    params: Params
    state: State

    @property
    def arguments(self) -> dict[str, Any]:
        """By name, as `decode_step` takes them."""
        rows = self.settings.num_rows
        return {
            "params": self.params,
            "state": self.state,
            "row_ids": jax.ShapeDtypeStruct((rows,), jnp.int32),
            "table": jax.ShapeDtypeStruct((rows, self.settings.table_width), jnp.int32),
        }

    @property
    def step(self) -> Any:
        """The jitted step, its state donated."""
        return jax.jit(functools.partial(decode_step, self.program), donate_argnames=("state",))


def model_shape(name: str, **changes: Any) -> ModelConfig:
    """The sizes of a named model."""
    return ModelConfig.from_hf({**MODEL_SHAPES[name], **changes})


def make_round(settings: RoundSettings) -> Round:
    """The program of a round, traced over shapes.

    Raises:
        ValueError: STANDALONE without a draft model, or an algorithm that is none of those above.
    """
    dtype = jnp.dtype(settings.dtype)
    target, leaves = _network(MODELS[settings.model.architecture], settings.model, dtype, scan_layers=True)
    method, draft_leaves = _draft(settings, dtype)
    num_pages = settings.num_rows * settings.table_width
    pool = CacheShape(settings.num_rows, num_pages, settings.page_size, dtype, settings.backend)

    def state() -> State:
        caches = target.init_cache(
            num_pages=num_pages, page_size=settings.page_size, dtype=dtype, backend=settings.backend
        )
        return State(Rows.zeros(settings.num_rows, settings.max_model_len, NUM_STOP_IDS), caches, method.init(pool))

    program = Program(target, method, 1, NUM_TOP_LOGPROBS)
    return Round(settings, program, Params(leaves, draft_leaves), jax.eval_shape(state))


def _network(kind: type[Any], config: Any, dtype: jnp.dtype, **how: Any) -> tuple[Network, tuple[Any, ...]]:
    model = nnx.eval_shape(lambda: kind(config, dtype=dtype, rngs=None, **how))
    graphdef, state = nnx.split(model)
    leaves, treedef = jax.tree.flatten(state)
    return Network(config, kind, graphdef, treedef), tuple(leaves)


def _draft(settings: RoundSettings, dtype: jnp.dtype) -> tuple[DraftMethod, tuple[Any, ...]]:
    target, shape = settings.model, settings.shape
    if settings.algorithm == "NONE":
        return Plain(), ()
    if settings.algorithm == "NGRAM":
        return Ngram(shape, 1, 3), ()
    if settings.algorithm == "STANDALONE":
        if settings.draft is None:
            raise ValueError("STANDALONE needs a draft model; set --draft-model.")
        network, leaves = _network(MODELS[settings.draft.architecture], settings.draft, dtype, scan_layers=True)
        return Standalone(network, shape, target.vocab_size), leaves
    if settings.algorithm == "EAGLE3":
        network, leaves = _network(Head, eagle3_head(target), dtype)
        return Feature(network, shape), leaves
    raise ValueError(f"algorithm={settings.algorithm!r} is not one of NONE, NGRAM, STANDALONE, EAGLE3.")


def eagle3_head(target: ModelConfig) -> HeadConfig:
    """A head as they are published: one layer of the target's sizes, over a low, a middle and a high layer."""
    last = target.num_layers - 1
    return HeadConfig(
        layer=dataclasses.replace(target, num_layers=1, tie_embeddings=False),
        fused=True,
        capture=(min(1, last), target.num_layers // 2, max(0, last - 3)),
        target_hidden=target.hidden_size,
        target_embed=target.hidden_size,
        draft_vocab=min(HEAD_VOCAB, target.vocab_size),
    )


def compile_round(made: Round, devices: list[Any], **options: Any) -> Any:
    """Compiles for devices that need not be there: one, or several that split the model.

    Args:
        made: the round.
        devices: of a topology.
        options: for the compiler.
    """
    arguments = made.arguments
    if len(devices) == 1:
        alone = SingleDeviceSharding(devices[0])
        placed = jax.tree.map(lambda leaf: _placed(leaf, alone), arguments)
        return made.step.lower(**placed).compile(compiler_options=options)
    auto = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((len(devices),), (MODEL_AXIS,), auto, devices=devices)
    with jax.set_mesh(mesh):
        return made.step.lower(**_split_arguments(made, mesh)).compile(compiler_options=options)


def _placed(leaf: Any, sharding: Sharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def _split_arguments(made: Round, mesh: jax.sharding.Mesh) -> dict[str, Any]:
    """Arguments of a round on several chips: matrices and pools are split, everything else is whole on each."""
    num_chips = mesh.shape[MODEL_AXIS]

    def split(leaf: Any, axis: int | None) -> jax.ShapeDtypeStruct:
        names: list[str | None] = [None] * len(leaf.shape)
        if axis is not None and leaf.shape[axis] % num_chips == 0:
            names[axis] = MODEL_AXIS
        return _placed(leaf, NamedSharding(mesh, PartitionSpec(*names)))

    def weights(network: Network, leaves: tuple[Any, ...]) -> tuple[Any, ...]:
        paths = jax.tree_util.tree_flatten_with_path(jax.tree.unflatten(network.treedef, leaves))[0]
        return tuple(split(leaf, _split_axis(jax.tree_util.keystr(path))) for path, leaf in paths)

    arguments = jax.tree.map(lambda leaf: split(leaf, None), made.arguments)
    program, params = made.program, made.params
    draft = getattr(program.draft, "network", None)
    caches = lambda tree: jax.tree.map(lambda pool: split(pool, 2), tree)  # noqa: E731
    state = arguments["state"]
    arguments["params"] = Params(
        weights(program.target, params.target), () if draft is None else weights(draft, params.draft)
    )
    arguments["state"] = state._replace(
        caches=caches(made.state.caches), draft=state.draft._replace(caches=caches(made.state.draft.caches))
    )
    return arguments


def _split_axis(path: str) -> int | None:
    if "lm_head" in path:
        return -1
    if "embed_tokens" in path:
        return 0
    return next((axis for name, axis in _SPLIT.items() if f"'{name}'" in path), None)
