"""How weights lie in memory: plain arrays that XLA multiplies, or on the CPU panels for a kernel of its own."""

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
        problem: why the kernel does not run on this host, None where it does.
    """

    problem: str | None = None


def choose_weight_layout(env: Mapping[str, str], dtype: str, kernels: CpuKernels | None, notes: list[Note]) -> str:
    """Returns PLAIN or PANELS, with a note on the CPU.

    Args:
        env: the environment variables.
        dtype: of the weights.
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
    elif dtype != "float32":
        reason = f"XLA multiplies: the CPU kernel is for float32, and dtype is {dtype}; set dtype"
        notes.append(Note("weight_layout", None, PLAIN, reason))
    elif kernels.problem is not None:
        reason = f"XLA multiplies instead of the CPU kernel: {kernels.problem}"
        notes.append(Note("weight_layout", PANELS, PLAIN, reason, FALLBACK))
    else:
        reason = f"the CPU kernel multiplies; set {CPU_KERNELS_VARIABLE}=0 to leave that to XLA"
        notes.append(Note("weight_layout", None, PANELS, reason, AUTO))
        return PANELS
    return PLAIN
