"""Which kernels compute attention, and why others cannot: the automatic choice, or the user's own and no other."""

from typing import NamedTuple

from jaxspec.plan import AUTO, FALLBACK, Note
from jaxspec.weight_layout import PANELS

# Tokens of one tile in a TPU's memory, which a page is made of, by the dtypes that the kernels for TPUs take.
TPU_TILES = {"float32": 8, "bfloat16": 16}
# Pages of all rows together, of which a TPU's kernel keeps a list in a memory of 1 MiB.
MAX_TPU_PAGES = 3 << 16
# What the tensor cores of a GPU take from a page at once, and what they multiply without loss.
GPU_TILE, GPU_DTYPES = 64, ("bfloat16", "float16")
# Hopper's tensor cores, which no other generation has.
GPU_GENERATION = "9"


class AttentionNeeds(NamedTuple):
    """What a kernel has to serve."""

    platform: str  # see `resolve`
    dtype: str
    page_size: int
    max_running_requests: int
    max_model_len: int
    weight_layout: str  # the CPU's kernels come together

    @property
    def device(self) -> str:
        """The platform in words."""
        kind, _, capability = self.platform.partition(":")
        of = f" of compute capability {capability}" if capability else ""
        return f"a {kind.upper()}{of}"


def automatic_backend(platform: str) -> str:
    """What runs on a platform unless something is in the way."""
    return {"cpu": "cpu", "tpu": "pallas_tpu"}.get(platform, "xla")


def choose_backend(asked: str, needs: AttentionNeeds, notes: list[Note]) -> str:
    """Returns the backend, with a note where the user left it open.

    Raises:
        ValueError: the backend that the user named cannot serve here.
    """
    if asked != "auto":
        reason = why_not(asked, needs)
        if reason is not None:
            raise ValueError(f"attention_backend={asked!r} cannot run: {reason}; or leave attention_backend at 'auto'.")
        return asked
    backend = automatic_backend(needs.platform)
    reason = why_not(backend, needs)
    if reason is not None:
        # That the CPU's kernels do not run is told of the weights.
        kind = AUTO if backend == "cpu" else FALLBACK
        notes.append(Note("attention_backend", "auto", "xla", f"{backend} cannot run: {reason}", kind))
        return "xla"
    reason = f"automatic on {needs.device}; set attention_backend"
    if why_not("pallas_gpu", needs) is None:
        reason = "automatic: the kernel for this GPU has not been measured yet; set attention_backend='pallas_gpu'"
    notes.append(Note("attention_backend", "auto", backend, reason, AUTO))
    return backend


def why_not(backend: str, needs: AttentionNeeds) -> str | None:
    """Why a backend cannot serve, and what to set; None where it can."""
    if backend == "xla":
        return None
    if backend == "cpu":
        if needs.weight_layout == PANELS:
            return None
        return "the CPU's kernels do not, see the note on weight_layout; set attention_backend='xla'"
    return _why_not_tpu(needs) if backend == "pallas_tpu" else _why_not_gpu(needs)


def _why_not_tpu(needs: AttentionNeeds) -> str | None:
    if needs.platform != "tpu":
        return f"it needs a TPU, and this is {needs.device}; set attention_backend='xla'"
    if needs.dtype not in TPU_TILES:
        return f"it does not take dtype={needs.dtype!r}; set dtype to one of {', '.join(TPU_TILES)}"
    tile = TPU_TILES[needs.dtype]
    if needs.page_size % tile:
        return _bad_page(needs, tile)
    pages = needs.max_running_requests * -(-needs.max_model_len // needs.page_size)
    if pages > MAX_TPU_PAGES:
        return (
            f"max_running_requests={needs.max_running_requests} times max_model_len={needs.max_model_len} is {pages} "
            f"pages of page_size={needs.page_size}, and its lists hold {MAX_TPU_PAGES}; set a larger page_size or less"
        )
    return None


def _why_not_gpu(needs: AttentionNeeds) -> str | None:
    kind, _, capability = needs.platform.partition(":")
    if kind != "gpu" or capability.partition(".")[0] != GPU_GENERATION:
        return (
            f"it needs a GPU of compute capability {GPU_GENERATION}.x (Hopper), and this is {needs.device}; "
            "set attention_backend='xla'"
        )
    if needs.dtype not in GPU_DTYPES:
        return f"it does not take dtype={needs.dtype!r}; set dtype to one of {', '.join(GPU_DTYPES)}"
    return _bad_page(needs, GPU_TILE) if needs.page_size % GPU_TILE else None


def _bad_page(needs: AttentionNeeds, tile: int) -> str:
    fits = tile * max(1, needs.page_size // tile)
    return f"page_size={needs.page_size} is no multiple of {tile}, as {needs.dtype} needs; set page_size={fits}"
