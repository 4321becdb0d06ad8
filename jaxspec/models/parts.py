"""Settings of the parts that only some models have: routed experts, latent attention, recurrent layers. No jax."""

import dataclasses
from typing import NamedTuple

# What mixes tokens in a layer: grouped-query attention over all keys or over a window, latent attention, a delta rule.
MIXERS = ("full", "window", "latent", "delta")
# What follows it: one gated MLP, or routed experts.
MLPS = ("dense", "experts")


class LayerKind(NamedTuple):
    """Layers of one kind have weights of one shape; those with one mixer share a cache."""

    mixer: str  # one of MIXERS
    mlp: str  # one of MLPS


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpertsConfig:
    """Routed experts, and the rule that chooses them.

    Attributes:
        num_experts: experts of a layer.
        topk: experts that a token goes to.
        size: inner size of an expert.
        scores: what router logits become: "softmax" over the experts, or "sigmoid" of each.
        renormalise: the weights of the chosen experts are divided by their sum.
        has_bias: a bias is added to the scores for the choice, and not for the weights.
        num_groups: experts are in so many groups of equal size.
        topk_groups: groups that experts are chosen from: those whose best two choice scores sum highest.
        scale: factor on the weights.
        shared_size: inner size of an expert that every token goes to; 0 is none.
        gates_shared: the shared expert's output is multiplied by a sigmoid of the token.
    """

    num_experts: int
    topk: int
    size: int
    scores: str
    renormalise: bool
    has_bias: bool = False
    num_groups: int = 1
    topk_groups: int = 1
    scale: float = 1.0
    shared_size: int = 0
    gates_shared: bool = False

    def __post_init__(self):
        if self.scores not in ("softmax", "sigmoid"):
            raise ValueError(f"router scores={self.scores!r} are not supported; the known ones are softmax, sigmoid.")
        if min(self.num_experts, self.size, self.num_groups) < 1 or self.shared_size < 0:
            raise ValueError(
                f"num_experts={self.num_experts}, their size={self.size} and num_groups={self.num_groups} must be at "
                f"least 1, and shared_size={self.shared_size} at least 0."
            )
        if self.num_experts % self.num_groups or not 1 <= self.topk_groups <= self.num_groups:
            raise ValueError(
                f"num_experts={self.num_experts} in num_groups={self.num_groups}, of which topk_groups="
                f"{self.topk_groups} are kept, do not fit together."
            )
        eligible = self.num_experts // self.num_groups * self.topk_groups
        if not 1 <= self.topk <= eligible:
            raise ValueError(f"num_experts_per_tok={self.topk} is not in 1..{eligible}, the experts to choose from.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class LatentConfig:
    """Multi-head latent attention (arXiv 2405.04434 section 2.1): keys and values from one latent row per token.

    Attributes:
        query_rank: width that queries are made from.
        rank: width of the latent row.
        key_size: numbers of a key that come from the latent; as many again as are rotated are shared by all heads.
        rotated_size: numbers of a key that carry the position.
        value_size: numbers of a value.
        absorbed: attend in the latent's own space, and cache the latent; False expands keys and values, and caches
            them.
    """

    query_rank: int
    rank: int
    key_size: int
    rotated_size: int
    value_size: int
    absorbed: bool = True

    def __post_init__(self):
        sizes = dataclasses.astuple(self)[:-1]
        if min(sizes) < 1 or self.rotated_size % 2:
            raise ValueError(
                f"latent attention needs q_lora_rank, kv_lora_rank, qk_nope_head_dim, qk_rope_head_dim (even) and "
                f"v_head_dim of at least 1; got {', '.join(map(str, sizes))}."
            )
        if self.value_size > self.key_size + self.rotated_size:
            raise ValueError(
                f"v_head_dim={self.value_size} is more than the {self.key_size + self.rotated_size} numbers of a key: "
                "not supported."
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeltaConfig:
    """A gated delta rule (arXiv 2412.06464): a recurrent state per value head instead of keys and values.

    Attributes:
        num_key_heads: heads of queries and keys.
        num_value_heads: heads of values; a multiple of num_key_heads.
        key_size: numbers of a query or key.
        value_size: numbers of a value.
        kernel: tokens that the causal convolution before it sees.
        grouped: the projections are stored by key head, [q k v z] and [b a] each; False has one tensor for q, k and
            v, and one each for z, b and a.
    """

    num_key_heads: int
    num_value_heads: int
    key_size: int
    value_size: int
    kernel: int
    grouped: bool

    def __post_init__(self):
        sizes = dataclasses.astuple(self)[:-1]
        if min(sizes) < 1 or self.num_value_heads % self.num_key_heads or self.kernel < 2:
            raise ValueError(
                f"linear attention needs linear_num_key_heads={self.num_key_heads} to divide linear_num_value_heads="
                f"{self.num_value_heads}, head sizes ({self.key_size}, {self.value_size}) of at least 1 and "
                f"linear_conv_kernel_dim={self.kernel} of at least 2."
            )

    @property
    def conv_width(self) -> int:
        """Channels of the convolution: queries, keys and values."""
        return 2 * self.num_key_heads * self.key_size + self.num_value_heads * self.value_size

    @property
    def projections(self) -> dict[str, int]:
        """The tensors that project into the layer, and the numbers they make."""
        heads, values = self.num_value_heads, self.num_value_heads * self.value_size
        if self.grouped:
            return {"in_proj_qkvz": self.conv_width + values, "in_proj_ba": 2 * heads}
        return {"in_proj_qkv": self.conv_width, "in_proj_z": values, "in_proj_b": heads, "in_proj_a": heads}
