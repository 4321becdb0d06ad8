"""How a family's own draft layers (multi-token prediction) are wired and named: one record a family. Imports no jax."""

import dataclasses

from jaxspec.models.parts import LayerKind


@dataclasses.dataclass(frozen=True, kw_only=True)
class Wiring:
    """What the layers read and feed. It decides how many drafts are accepted, never what comes out.

    Attributes:
        hidden: the target's state that the first draft reads: "post" its final norm, or "pre".
        link: the head's own state that the next draft reads: "post" its norm, or "pre".
        layers: "recycle" makes every draft with the first layer.
        head: whose vocabulary head makes the logits: "main" is the target's, "own" the layer's.
        zero_first: the embedding of the text's first pair is zeros.
    """

    hidden: str = "post"
    link: str = "post"
    layers: str = "recycle"
    head: str = "main"
    zero_first: bool = False

    def __post_init__(self):
        for name, known in _KNOWN.items():
            if getattr(self, name) not in known:
                raise ValueError(f"wiring {name}={getattr(self, name)!r} is not known; set {' or '.join(known)}.")


_KNOWN = {"hidden": ("post", "pre"), "link": ("post", "pre"), "layers": ("recycle",), "head": ("main", "own")}


@dataclasses.dataclass(frozen=True, kw_only=True)
class OwnDraft:
    """A family's own draft layers.

    Attributes:
        kind: of a layer; its mlp "main" is what the model's last layer has.
        names: of the tensors beside those of the layer, with "{layer}" for its prefix: fc, embed_norm, hidden_norm,
            norm; and lm_head where a layer has one.
        count_field: the config's word for how many there are.
        wiring: as SGLang has it.
    """

    kind: LayerKind
    names: dict[str, str]
    count_field: str
    wiring: Wiring = Wiring()


DEEPSEEK_DRAFT = OwnDraft(
    kind=LayerKind("latent", "experts"),
    names={
        "fc": "{layer}eh_proj.weight",
        "embed_norm": "{layer}enorm.weight",
        "hidden_norm": "{layer}hnorm.weight",
        "norm": "{layer}shared_head.norm.weight",
        "lm_head": "{layer}shared_head.head.weight",
    },
    count_field="num_nextn_predict_layers",
)
QWEN_DRAFT = OwnDraft(
    kind=LayerKind("full", "main"),
    names={
        "fc": "mtp.fc.weight",
        "embed_norm": "mtp.pre_fc_norm_embedding.weight",
        "hidden_norm": "mtp.pre_fc_norm_hidden.weight",
        "norm": "mtp.norm.weight",
    },
    count_field="mtp_num_hidden_layers",
)
