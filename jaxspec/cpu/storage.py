"""How a panel's values lie in memory, and as LLVM IR how they become float32 in a register."""

import dataclasses

# Rows of a panel, consecutive values of k, that share a scale a column.
SCALE_ROWS = 32


@dataclasses.dataclass(frozen=True)
class Storage:
    """What a value of a panel is stored as.

    Attributes:
        dtype: its name.
        kind: as LLVM names it.
        bytes: of one value.
        is_scaled: values are multiplied by a scale, which `SCALE_ROWS` values of a column share.
    """

    dtype: str
    kind: str
    bytes: int
    is_scaled: bool = False

    def load(self, result: str, place: str, lanes: int, scale: str) -> list[str]:
        """Lines that read a vector from memory as float32; `scale` is a vector, or nothing where there are none."""
        floats, integers = f"<{lanes} x float>", f"<{lanes} x i32>"
        if self == FLOAT32:
            return [f"  {result} = load {floats}, ptr {place}, align 4"]
        lines = [f"  {result}_raw = load <{lanes} x {self.kind}>, ptr {place}, align {self.bytes}"]
        if self == BFLOAT16:  # the upper half of a float32
            shift = ", ".join(["i32 16"] * lanes)
            return [
                *lines,
                f"  {result}_low = zext <{lanes} x i16> {result}_raw to {integers}",
                f"  {result}_bits = shl {integers} {result}_low, <{shift}>",
                f"  {result} = bitcast {integers} {result}_bits to {floats}",
            ]
        return [
            *lines,
            f"  {result}_whole = sext <{lanes} x i8> {result}_raw to {integers}",
            f"  {result}_steps = sitofp {integers} {result}_whole to {floats}",
            f"  {result} = fmul {floats} {result}_steps, {scale}",
        ]


FLOAT32 = Storage("float32", "float", 4)
BFLOAT16 = Storage("bfloat16", "i16", 2)
INT8 = Storage("int8", "i8", 1, is_scaled=True)
STORAGES = {storage.dtype: storage for storage in (FLOAT32, BFLOAT16, INT8)}
