"""The innermost loop as LLVM IR: a few rows of x against one panel of a matrix.

A panel that is stored in fewer bits is widened to float32 on its way into the registers, and everything is computed in
float32: the result is, bit for bit, that of a float32 panel of the widened values.

Each output is one chain of multiply-adds over k in ascending order, whatever the number of rows. A row's result
therefore does not depend on how many rows it is computed with, bit for bit.
"""

import dataclasses

from jaxspec.cpu.host import VectorUnit
from jaxspec.cpu.storage import FLOAT32, SCALE_ROWS, Storage

# Rows of the panel in one turn of the loop; fewer where scales take registers that many rows of x need, or the compiler
# would keep values in memory (8 rows, int8: 2.7 ms with 4, 2.3 ms with 2; one row 0.9 and 1.1 ms).
UNROLL, UNROLL_SCALED, FEW_ROWS = 4, 2, 4
# How far ahead of its use the panel is asked for.
PREFETCH_BYTES = 12 * 1024
_LINE_BYTES = 64


@dataclasses.dataclass(frozen=True)
class Form:
    """How a family of microkernels reads its arguments; each has a member `name_R` for R rows.

    Attributes:
        name: of the family.
        vectors: that lie side by side in a panel.
        x_step: values of x from one k to the next.
        adds: the products are added to what y holds.
        prefetches: the panel comes from memory, and is asked for ahead of its use.
        storage: of the panel's values.
    """

    name: str
    vectors: int
    x_step: int = 1
    adds: bool = False
    prefetches: bool = False
    storage: Storage = FLOAT32

    @property
    def scales(self) -> str:
        """The argument that is behind the others where the panel has scales."""
        return ", ptr %scales" if self.storage.is_scaled else ""


def microkernel_source(unit: VectorUnit, form: Form, rows: int) -> str:
    """IR of one microkernel: y = x times a panel, for R rows.

    Its arguments are x and the values from one of its rows to the next, the panel and the same for it, its length K, y
    and the same for it, how many of the panel's columns y has, and the panel's scales where it has some.
    """
    kernel = _Microkernel(unit, form, rows)
    zeros = ["zeroinitializer"] * (rows * form.vectors)
    start = kernel.names("start") if form.adds else zeros
    return f"""
define internal void @{form.name}_{rows}
  (ptr %x, i64 %x_stride, ptr %panel, i64 %panel_stride, i64 %length, ptr %y, i64 %y_stride, i64 %columns
  {form.scales}) {{
entry:
{kernel.row_pointers("x", "%x_stride")}
{kernel.row_pointers("y", "%y_stride")}
{kernel.load_all() if form.adds else ""}
  %whole = and i64 %length, {-kernel.unroll}
  %has_whole = icmp sgt i64 %whole, 0
  br i1 %has_whole, label %many, label %rest_entry
{kernel.loop("many", "entry", start, "0", "%whole", kernel.unroll)}
rest_entry:
{kernel.joined("rest", "entry", start, "many")}
  %has_rest = icmp slt i64 %whole, %length
  br i1 %has_rest, label %one, label %store
{kernel.loop("one", "rest_entry", kernel.names("rest"), "%whole", "%length", 1)}
store:
{kernel.joined("sum", "rest_entry", kernel.names("rest"), "one")}
  %is_whole = icmp sge i64 %columns, {form.vectors * unit.lanes}
  br i1 %is_whole, label %store_all, label %store_some
store_all:
{kernel.store_all()}
  ret void
store_some:
{kernel.store_some()}
  ret void
}}
"""


def blocks_source(form: Form, row_block: int) -> str:
    """IR of `all_NAME`, which has a microkernel's arguments behind a number of rows, and takes them block by block."""
    kernels = ", ".join(f"ptr @{form.name}_{rows}" for rows in range(1, row_block + 1))
    return f"""
@{form.name}_kernels = internal constant [{row_block} x ptr] [{kernels}]
define internal void @all_{form.name}
  (i64 %rows, ptr %x, i64 %x_stride, ptr %panel, i64 %panel_stride, i64 %length, ptr %y, i64 %y_stride, i64 %columns
  {form.scales}) {{
entry:
  br label %head
head:
  %row = phi i64 [ 0, %entry ], [ %next, %block ]
  %left = sub i64 %rows, %row
  %has_more = icmp sgt i64 %left, 0
  br i1 %has_more, label %block, label %exit
block:
  %count = call i64 @llvm.smin.i64(i64 %left, i64 {row_block})
  %index = sub i64 %count, 1
  %kernel = call ptr @pointer(ptr @{form.name}_kernels, i64 %index)
  %x_offset = mul i64 %row, %x_stride
  %y_offset = mul i64 %row, %y_stride
  %x_at = getelementptr float, ptr %x, i64 %x_offset
  %y_at = getelementptr float, ptr %y, i64 %y_offset
  call void %kernel
    (ptr %x_at, i64 %x_stride, ptr %panel, i64 %panel_stride, i64 %length, ptr %y_at, i64 %y_stride,
     i64 %columns{form.scales})
  %next = add i64 %row, {row_block}
  br label %head
exit:
  ret void
}}"""


def declarations(unit: VectorUnit) -> str:
    """What the microkernels call."""
    vector, lanes = f"<{unit.lanes} x float>", unit.lanes
    return f"""
declare {vector} @llvm.fma.v{lanes}f32({vector}, {vector}, {vector})
declare void @llvm.masked.store.v{lanes}f32.p0({vector}, ptr, i32, <{lanes} x i1>)
declare void @llvm.prefetch.p0(ptr, i32, i32, i32)
"""


class _Microkernel:
    """Pieces of one microkernel; each method returns lines of IR."""

    def __init__(self, unit: VectorUnit, form: Form, rows: int):
        self.unit, self.form, self.rows = unit, form, rows
        self.vector = f"<{unit.lanes} x float>"
        self.unroll = UNROLL_SCALED if form.storage.is_scaled and rows > FEW_ROWS else UNROLL

    def names(self, name: str) -> list[str]:
        """One value for each accumulator, row by row."""
        return [f"%{name}_{row}_{v}" for row in range(self.rows) for v in range(self.form.vectors)]

    def row_pointers(self, name: str, stride: str) -> str:
        return "\n".join(
            f"  %{name}_offset_{row} = mul i64 {stride}, {row}\n"
            f"  %{name}_{row} = getelementptr float, ptr %{name}, i64 %{name}_offset_{row}"
            for row in range(self.rows)
        )

    def joined(self, name: str, before: str, initial: list[str], loop: str) -> str:
        """The sums after a loop that may not have run."""
        final = self.names(f"{loop}_new")
        return "\n".join(
            f"  {result} = phi {self.vector} [ {first}, %{before} ], [ {last}, %{loop} ]"
            for result, first, last in zip(self.names(name), initial, final, strict=True)
        )

    def loop(self, name: str, before: str, initial: list[str], start: str, stop: str, step: int) -> str:
        """Adds x[:, start:stop] times those rows of the panel; `step` of them at a time."""
        lines = [f"{name}:", f"  %{name}_k = phi i64 [ {start}, %{before} ], [ %{name}_next, %{name} ]"]
        sums, new = self.names(name), self.names(f"{name}_new")
        for current, first, last in zip(sums, initial, new, strict=True):
            lines.append(f"  {current} = phi {self.vector} [ {first}, %{before} ], [ {last}, %{name} ]")
        lines += self._load_scales(name)
        for offset in range(step):
            after = new if offset == step - 1 else self.names(f"{name}_{offset}_new")
            lines += self._step(name, offset, sums, after)
            sums = after
        lines.append(f"  %{name}_next = add i64 %{name}_k, {step}")
        lines.append(f"  %{name}_more = icmp slt i64 %{name}_next, {stop}")
        lines.append(f"  br i1 %{name}_more, label %{name}, label %{'rest_entry' if name == 'many' else 'store'}")
        return "\n".join(lines)

    def _step(self, name: str, offset: int, sums: list[str], after: list[str]) -> list[str]:
        """One row of the panel, `offset` rows behind the loop's own."""
        kind, tag = self.form.storage.kind, f"{name}_{offset}"
        lines = [
            f"  %{tag}_k = add i64 %{name}_k, {offset}",
            f"  %{tag}_x_k = mul i64 %{tag}_k, {self.form.x_step}",
            f"  %{tag}_first = mul i64 %{tag}_k, %panel_stride",
            f"  %{tag}_base = getelementptr {kind}, ptr %panel, i64 %{tag}_first",
        ]
        lines += self._prefetch(tag, offset)
        for v in range(self.form.vectors):
            lines.append(f"  %{tag}_at_{v} = getelementptr {kind}, ptr %{tag}_base, i64 {v * self.unit.lanes}")
            lines += self.form.storage.load(f"%{tag}_w_{v}", f"%{tag}_at_{v}", self.unit.lanes, f"%{name}_scale_{v}")
        for row in range(self.rows):
            lines += self._row(tag, row, sums, after)
        return lines

    def _prefetch(self, tag: str, offset: int) -> list[str]:
        """Asks for each cache line of a row of the panel that no row before it has asked for."""
        width = self.form.storage.bytes
        row_bytes = self.form.vectors * self.unit.lanes * width
        if not self.form.prefetches or offset * row_bytes % _LINE_BYTES:
            return []
        lines = []
        for byte in range(0, row_bytes, _LINE_BYTES):
            ahead = f"%{tag}_ahead_{byte}"
            place = (byte + PREFETCH_BYTES) // width
            lines.append(f"  {ahead} = getelementptr {self.form.storage.kind}, ptr %{tag}_base, i64 {place}")
            lines.append(f"  call void @llvm.prefetch.p0(ptr {ahead}, i32 0, i32 3, i32 1)")
        return lines

    def _load_scales(self, name: str) -> list[str]:
        """The scales of a turn's rows, which share them: `unroll` divides the rows of a group."""
        if not self.form.storage.is_scaled:
            return []
        lanes = self.unit.lanes
        lines = [
            f"  %{name}_group = udiv i64 %{name}_k, {SCALE_ROWS}",
            f"  %{name}_scales_first = mul i64 %{name}_group, {self.form.vectors * lanes}",
            f"  %{name}_scales = getelementptr float, ptr %scales, i64 %{name}_scales_first",
        ]
        for v in range(self.form.vectors):
            lines.append(f"  %{name}_scale_at_{v} = getelementptr float, ptr %{name}_scales, i64 {v * lanes}")
            lines.append(f"  %{name}_scale_{v} = load {self.vector}, ptr %{name}_scale_at_{v}, align 4")
        return lines

    def _row(self, tag: str, row: int, sums: list[str], after: list[str]) -> list[str]:
        lanes, vector, own = self.unit.lanes, self.vector, f"%{tag}_x_{row}"
        lines = [
            f"  {own}_at = getelementptr float, ptr %x_{row}, i64 %{tag}_x_k",
            f"  {own} = load float, ptr {own}_at, align 4",
            f"  {own}_one = insertelement {vector} poison, float {own}, i32 0",
            f"  {own}_all = shufflevector {vector} {own}_one, {vector} poison, <{lanes} x i32> zeroinitializer",
        ]
        for v in range(self.form.vectors):
            index = row * self.form.vectors + v
            lines += self._multiply_add(after[index], f"{own}_all", f"%{tag}_w_{v}", sums[index])
        return lines

    def _multiply_add(self, result: str, a: str, b: str, c: str) -> list[str]:
        vector = self.vector
        if self.unit.has_fma:
            arguments = f"{vector} {a}, {vector} {b}, {vector} {c}"
            return [f"  {result} = call {vector} @llvm.fma.v{self.unit.lanes}f32({arguments})"]
        return [f"  {result}_product = fmul {vector} {a}, {b}", f"  {result} = fadd {vector} {result}_product, {c}"]

    def load_all(self) -> str:
        return "\n".join(
            f"  %old_{row}_{v} = getelementptr float, ptr %y_{row}, i64 {v * self.unit.lanes}\n"
            f"  %start_{row}_{v} = load {self.vector}, ptr %old_{row}_{v}, align 4"
            for row in range(self.rows)
            for v in range(self.form.vectors)
        )

    def store_all(self) -> str:
        return "\n".join(
            f"  %all_{row}_{v} = getelementptr float, ptr %y_{row}, i64 {v * self.unit.lanes}\n"
            f"  store {self.vector} %sum_{row}_{v}, ptr %all_{row}_{v}, align 4"
            for row in range(self.rows)
            for v in range(self.form.vectors)
        )

    def store_some(self) -> str:
        """Stores of the columns that y has."""
        lanes, wide = self.unit.lanes, f"<{self.unit.lanes} x i64>"
        lines = [
            f"  %limit_one = insertelement {wide} poison, i64 %columns, i32 0",
            f"  %limit = shufflevector {wide} %limit_one, {wide} poison, <{lanes} x i32> zeroinitializer",
        ]
        for v in range(self.form.vectors):
            own = ", ".join(f"i64 {v * lanes + lane}" for lane in range(lanes))
            lines.append(f"  %mask_{v} = icmp slt {wide} <{own}>, %limit")
        for row in range(self.rows):
            for v in range(self.form.vectors):
                at = f"%some_{row}_{v}"
                lines.append(f"  {at} = getelementptr float, ptr %y_{row}, i64 {v * lanes}")
                lines.append(
                    f"  call void @llvm.masked.store.v{lanes}f32.p0({self.vector} %sum_{row}_{v}, ptr {at}, i32 4, "
                    f"<{lanes} x i1> %mask_{v})"
                )
        return "\n".join(lines)
