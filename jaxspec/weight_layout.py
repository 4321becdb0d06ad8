"""How weights lie in memory: plain arrays for XLA, or on the CPU panels for kernels of its own (attention's too).

Panels may be stored in fewer bits than is computed with.
"""

import dataclasses
from collections.abc import Mapping

from jaxspec.environment import is_on
from jaxspec.plan import AUTO, FALLBACK, REQUESTED, Note

PLAIN, PANELS = "plain", "panels"
CPU_KERNELS_VARIABLE = "JAXSPEC_CPU_KERNELS"


@dataclasses.dataclass(frozen=True)
class CpuKernels:
    """What there is on a CPU.

    Attributes:
        problem: why the kernels do not run on this host, None where they do.
    """

    problem: str | None = None


def choose_weight_layout(
    env: Mapping[str, str], dtype: str, attention_backend: str, kernels: CpuKernels | None, notes: list[Note]
) -> str:
    """Returns PLAIN or PANELS, with a note on the CPU.

    Args:
        env: the environment variables.
        dtype: of the weights.
        attention_backend: as the user set it; the kernels come together.
        kernels: None on other devices.
        notes: taken further.

    Raises:
        ValueError: the environment variable is neither yes nor no.
    """
    is_wanted = is_on(env, CPU_KERNELS_VARIABLE, "set 1 for the CPU kernels or 0 to leave products to XLA")
    if kernels is None:
        return PLAIN
    if not is_wanted:
        notes.append(
            Note("weight_layout", None, PLAIN, f"{CPU_KERNELS_VARIABLE}={env[CPU_KERNELS_VARIABLE]}", REQUESTED)
        )
    elif attention_backend not in ("auto", "cpu"):
        reason = f"attention_backend={attention_backend!r} leaves products to XLA too; set it to 'auto'"
        notes.append(Note("weight_layout", None, PLAIN, reason, REQUESTED))
    elif dtype != "float32":
        reason = f"XLA computes: the CPU's kernels are for float32, and dtype is {dtype}; set dtype"
        notes.append(Note("weight_layout", None, PLAIN, reason))
    elif kernels.problem is not None:
        reason = f"XLA computes instead of the CPU's kernels: {kernels.problem}"
        notes.append(Note("weight_layout", PANELS, PLAIN, reason, FALLBACK))
    else:
        reason = f"the CPU's kernels multiply and attend; set {CPU_KERNELS_VARIABLE}=0 to leave that to XLA"
        notes.append(Note("weight_layout", None, PANELS, reason, AUTO))
        return PANELS
    return PLAIN


def choose_weight_dtype(asked: str, dtype: str, layout: str, notes: list[Note]) -> str:
    """Returns what weights are stored as, with a note where that is not what is computed with.

    Args:
        asked: as the user set it.
        dtype: of what is computed.
        layout: from `choose_weight_layout`.
        notes: taken further; where the layout is PLAIN on a CPU, one of them says why.

    Raises:
        ValueError: this layout cannot serve it.
    """
    if asked in ("auto", dtype):
        return dtype
    if layout != PANELS:
        reasons = [note.reason for note in notes if note.field == "weight_layout"] or ["this is no CPU"]
        raise ValueError(
            f"weight_dtype={asked!r} needs the CPU's kernels, which do not run: {reasons[0]}; or leave weight_dtype at "
            f"'auto', which is {dtype}."
        )
    reason = "multiplied weights are rounded to it, and the output is that of the rounded model; 'auto' rounds nothing"
    notes.append(Note("weight_dtype", asked, asked, reason, REQUESTED))
    return asked
