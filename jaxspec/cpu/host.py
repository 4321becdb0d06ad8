"""The host's vector unit, and machine code for it."""

import dataclasses
import functools
import platform


@dataclasses.dataclass(frozen=True)
class VectorUnit:
    """What a kernel needs to know of the host.

    Attributes:
        lanes: float32 values in a vector.
        num_registers: vector registers.
        has_fma: whether a product and a sum are one instruction.
        pause: the instruction that eases a thread that spins.
    """

    lanes: int
    num_registers: int
    has_fma: bool
    pause: str

    @property
    def panel_vectors(self) -> int:
        """Vectors that lie side by side in a panel: two, or a cache line where vectors are short."""
        return max(2, 16 // self.lanes)

    @property
    def panel(self) -> int:
        """Columns of a panel."""
        return self.panel_vectors * self.lanes

    @property
    def row_block(self) -> int:
        """Most rows whose accumulators fit into the registers, beside a row of the panel and a value of x."""
        return min(8, (self.num_registers - self.panel_vectors - 1) // self.panel_vectors)


@functools.cache
def vector_unit() -> VectorUnit | None:
    """The host's, None where there is none that kernels are written for."""
    machine = platform.machine().lower()
    if platform.system() == "Windows":  # its threads yield by another call
        return None
    if machine in ("arm64", "aarch64"):
        return VectorUnit(lanes=4, num_registers=32, has_fma=True, pause="yield")
    if machine not in ("x86_64", "amd64"):
        return None
    import llvmlite.binding as llvm  # here, because it takes a fifth of a second and only the CPU needs it

    features = llvm.get_host_cpu_features()
    if features.get("avx512f"):
        return VectorUnit(lanes=16, num_registers=32, has_fma=True, pause="pause")
    if features.get("avx2"):
        return VectorUnit(lanes=8, num_registers=16, has_fma=bool(features.get("fma")), pause="pause")
    return None


class Library:
    """Functions compiled from LLVM IR; their code lives as long as the object.

    Args:
        source: of the module. It is written as it is to run: passes over it would double the time and gain nothing.
    """

    def __init__(self, source: str):
        import llvmlite.binding as llvm

        llvm.initialize_native_target()
        llvm.initialize_native_asmprinter()
        llvm.initialize_native_asmparser()  # for the instruction that pauses
        # The features beside the name: a compiler may not know the name of a CPU that is newer.
        machine = llvm.Target.from_default_triple().create_target_machine(
            cpu=llvm.get_host_cpu_name(), features=llvm.get_host_cpu_features().flatten(), opt=1, jit=True
        )
        module = llvm.parse_assembly(source)
        module.verify()
        self._engine = llvm.create_mcjit_compiler(module, machine)
        self._engine.finalize_object()

    def address(self, name: str) -> int:
        """Where a function begins."""
        return self._engine.get_function_address(name)
