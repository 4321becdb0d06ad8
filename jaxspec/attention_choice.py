"""Which kernels compute attention, and why others cannot: the automatic choice, or the user's own and no other."""

from typing import NamedTuple

from jaxspec.plan import AUTO, FALLBACK, Note

# Tokens of one tile in a TPU's memory, which a page is made of, by the dtypes that the kernels for TPUs take.
TPU_TILES = {"float32": 8, "bfloat16": 16}
# Pages of all rows together, of which a TPU's kernel keeps a list in a memory of 1 MiB.
MAX_TPU_PAGES = 3 << 16
PLATFORM_NAMES = {"cpu": "a CPU", "gpu": "a GPU", "tpu": "a TPU"}


class AttentionNeeds(NamedTuple):
    """What a kernel has to serve."""

    platform: str  # "cpu", "gpu" or "tpu"
    dtype: str
    page_size: int
    max_running_requests: int
    max_model_len: int
    has_cpu_kernels: bool


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
    reason = f"automatic on {PLATFORM_NAMES[needs.platform]}; set attention_backend"
    notes.append(Note("attention_backend", "auto", backend, reason, AUTO))
    return backend


def why_not(backend: str, needs: AttentionNeeds) -> str | None:
    """Why a backend cannot serve, and what to set; None where it can."""
    if backend == "xla":
        return None
    if backend == "cpu":
        if needs.has_cpu_kernels:
            return None
        return "the CPU's kernels do not, see the note on weight_layout; set attention_backend='xla'"
    if backend == "pallas_gpu":
        return "there are no kernels for GPUs in this version; set attention_backend='xla'"
    if needs.platform != "tpu":
        return f"it needs a TPU, and this is {PLATFORM_NAMES[needs.platform]}; set attention_backend='xla'"
    if needs.dtype not in TPU_TILES:
        return f"it does not take dtype={needs.dtype!r}; set dtype to one of {', '.join(TPU_TILES)}"
    tile = TPU_TILES[needs.dtype]
    if needs.page_size % tile:
        fits = tile * max(1, needs.page_size // tile)
        return f"page_size={needs.page_size} is no multiple of {tile}, as {needs.dtype} needs; set page_size={fits}"
    pages = needs.max_running_requests * -(-needs.max_model_len // needs.page_size)
    if pages > MAX_TPU_PAGES:
        return (
            f"max_running_requests={needs.max_running_requests} times max_model_len={needs.max_model_len} is {pages} "
            f"pages of page_size={needs.page_size} and its lists hold {MAX_TPU_PAGES}; set a larger page_size or less"
        )
    return None
