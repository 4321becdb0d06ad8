"""Products with panels of weights, as LLVM IR: one x, several matrices, cut into chunks of panels."""

from jaxspec.cpu.call_frame import Buffer, CallFrame, metadata_source
from jaxspec.cpu.host import VectorUnit
from jaxspec.cpu.job import Job, job_source
from jaxspec.cpu.microkernel import Form, blocks_source, declarations, microkernel_source
from jaxspec.cpu.storage import SCALE_ROWS, STORAGES, Storage
from jaxspec.cpu.words import read_pointers, read_words, words_source

# Bytes of weights that a thread takes at a time, if a panel is not more.
CHUNK_BYTES = 1 << 16
# Rows of x that a chunk of panels is multiplied with before it is taken anew for the next ones.
TILE_ROWS = 64


class Product:
    """Words behind a job's own. STEP: panels in a chunk."""

    X, ROWS, LENGTH, TILES, STEP = range(Job.SIZE, Job.SIZE + 5)
    SIZE = 5


class Matrix:
    """Words of each matrix; they follow the product's. GROUPS: chunks for one tile of rows."""

    PANELS, Y, WIDTH, NUM_PANELS, GROUPS, SCALES = range(6)
    SIZE = 6


def tile_rows(unit: VectorUnit) -> int:
    """Rows of a tile: whole blocks, so that only the last one may be shorter."""
    return TILE_ROWS // unit.row_block * unit.row_block


def product_source(unit: VectorUnit, name: str, dtype: str) -> str:
    """IR of a module whose function `name` is the handler; all sizes are arguments of its calls.

    Its arguments: x f32 [M, K], then of each matrix its panels [ceil(N / P), K, P], stored as `dtype`, and their scales
    f32 [ceil(N / P), groups of K, P] where it has some. Its results: f32 [M, N] each.
    """
    storage = STORAGES[dtype]
    form = Form("rows", unit.panel_vectors, prefetches=True, storage=storage)
    return "\n".join(
        [
            declarations(unit),
            words_source(),
            metadata_source(),
            job_source(unit),
            *(microkernel_source(unit, form, rows) for rows in range(1, unit.row_block + 1)),
            blocks_source(form, unit.row_block),
            _chunk(unit),
            _group(unit, form),
            _new_product(unit, storage),
            _add_matrices(storage),
            _handler(name),
        ]
    )


def _chunk(unit: VectorUnit) -> str:
    return f"""
; finds the matrix, the group of panels and the tile of rows that a chunk stands for; tiles of one group follow each
; other, so that its panels are still in the cache
define internal void @chunk(ptr %job, i64 %index) {{
entry:
  %tiles = call i64 @word(ptr %job, i64 {Product.TILES})
  %first_matrix = getelementptr i64, ptr %job, i64 {Job.SIZE + Product.SIZE}
  br label %find
find:
  %matrix = phi ptr [ %first_matrix, %entry ], [ %next_matrix, %skip ]
  %place = phi i64 [ %index, %entry ], [ %rest, %skip ]
  %groups = call i64 @word(ptr %matrix, i64 {Matrix.GROUPS})
  %own = mul i64 %groups, %tiles
  %is_here = icmp slt i64 %place, %own
  br i1 %is_here, label %found, label %skip
skip:
  %rest = sub i64 %place, %own
  %next_matrix = getelementptr i64, ptr %matrix, i64 {Matrix.SIZE}
  br label %find
found:
  %group = udiv i64 %place, %tiles
  %tile = urem i64 %place, %tiles
  %row = mul i64 %tile, {tile_rows(unit)}
  call void @group(ptr %job, ptr %matrix, i64 %row, i64 %group)
  ret void
}}"""


def _group(unit: VectorUnit, form: Form) -> str:
    find_scales = f"""
  %all_scales = call ptr @pointer(ptr %matrix, i64 {Matrix.SCALES})
  %length_up = add i64 %length, {SCALE_ROWS - 1}
  %scale_rows = udiv i64 %length_up, {SCALE_ROWS}
  %scales_offset = mul i64 %scale_rows, %column
  %scales = getelementptr float, ptr %all_scales, i64 %scales_offset"""
    return f"""
define internal void @group(ptr %job, ptr %matrix, i64 %row, i64 %group) {{
entry:
  %x = call ptr @pointer(ptr %job, i64 {Product.X})
  %all_rows = call i64 @word(ptr %job, i64 {Product.ROWS})
{read_words("job", Product, "length", "step")}
{read_pointers("matrix", Matrix, "panels", "y")}
{read_words("matrix", Matrix, "width", "num_panels")}
  %left = sub i64 %all_rows, %row
  %rows = call i64 @llvm.smin.i64(i64 %left, i64 {tile_rows(unit)})
  %first = mul i64 %group, %step
  %end = add i64 %first, %step
  %last = call i64 @llvm.smin.i64(i64 %end, i64 %num_panels)
  %x_offset = mul i64 %row, %length
  %y_offset = mul i64 %row, %width
  %x_at = getelementptr float, ptr %x, i64 %x_offset
  %y_row = getelementptr float, ptr %y, i64 %y_offset
  %panel_size = mul i64 %length, {unit.panel}
  br label %head
head:
  %number = phi i64 [ %first, %entry ], [ %next, %body ]
  %has_more = icmp slt i64 %number, %last
  br i1 %has_more, label %body, label %exit
body:
  %offset = mul i64 %number, %panel_size
  %panel = getelementptr {form.storage.kind}, ptr %panels, i64 %offset
  %column = mul i64 %number, {unit.panel}{find_scales if form.storage.is_scaled else ""}
  %y_at = getelementptr float, ptr %y_row, i64 %column
  %columns = sub i64 %width, %column
  call void @all_rows
    (i64 %rows, ptr %x_at, i64 %length, ptr %panel, i64 {unit.panel}, i64 %length, ptr %y_at, i64 %width,
     i64 %columns{form.scales})
  %next = add i64 %number, 1
  br label %head
exit:
  ret void
}}"""


def _new_product(unit: VectorUnit, storage: Storage) -> str:
    return f"""
define internal ptr @new_product(ptr %frame, ptr %x_buffer, i64 %matrices) {{
  %matrix_words = mul i64 %matrices, {Matrix.SIZE}
  %words = add i64 %matrix_words, {Product.SIZE}
  %job = call ptr @new_job(ptr %frame, ptr @chunk, i64 %words)
  %x = call ptr @pointer(ptr %x_buffer, i64 {Buffer.DATA})
  %sizes = call ptr @pointer(ptr %x_buffer, i64 {Buffer.SIZES})
  %rows = call i64 @word(ptr %sizes, i64 0)
  %length = call i64 @word(ptr %sizes, i64 1)
  %rows_up = add i64 %rows, {tile_rows(unit) - 1}
  %tiles = udiv i64 %rows_up, {tile_rows(unit)}
  %panel_bytes = mul i64 %length, {storage.bytes * unit.panel}
  %fit = udiv i64 {CHUNK_BYTES}, %panel_bytes
  %step = call i64 @llvm.smax.i64(i64 %fit, i64 1)
  call void @set_pointer(ptr %job, i64 {Product.X}, ptr %x)
  call void @set_word(ptr %job, i64 {Product.ROWS}, i64 %rows)
  call void @set_word(ptr %job, i64 {Product.LENGTH}, i64 %length)
  call void @set_word(ptr %job, i64 {Product.TILES}, i64 %tiles)
  call void @set_word(ptr %job, i64 {Product.STEP}, i64 %step)
  ret ptr %job
}}"""


def _add_matrices(storage: Storage) -> str:
    return f"""
; the matrices behind x in the arguments, and their results; returns the number of chunks
define internal i64 @add_matrices(ptr %job, ptr %arguments, ptr %results, i64 %matrices) {{
entry:
{read_words("job", Product, "tiles", "step")}
  %step_less = sub i64 %step, 1
  %first = getelementptr i64, ptr %job, i64 {Job.SIZE + Product.SIZE}
  br label %head
head:
  %index = phi i64 [ 0, %entry ], [ %next, %body ]
  %chunks = phi i64 [ 0, %entry ], [ %chunks_more, %body ]
  %has_more = icmp slt i64 %index, %matrices
  br i1 %has_more, label %body, label %exit
body:
  %next = add i64 %index, 1
  %place = mul i64 %index, {Matrix.SIZE}
  %matrix = getelementptr i64, ptr %first, i64 %place
  %arguments_before = mul i64 %index, {2 if storage.is_scaled else 1}
  %panels_argument = add i64 %arguments_before, 1
  %panels_buffer = call ptr @pointer(ptr %arguments, i64 %panels_argument)
  %panels = call ptr @pointer(ptr %panels_buffer, i64 {Buffer.DATA})
  %panels_sizes = call ptr @pointer(ptr %panels_buffer, i64 {Buffer.SIZES})
  %num_panels = call i64 @word(ptr %panels_sizes, i64 0)
  %y_buffer = call ptr @pointer(ptr %results, i64 %index)
  %y = call ptr @pointer(ptr %y_buffer, i64 {Buffer.DATA})
  %y_sizes = call ptr @pointer(ptr %y_buffer, i64 {Buffer.SIZES})
  %width = call i64 @word(ptr %y_sizes, i64 1)
  %panels_up = add i64 %num_panels, %step_less
  %groups = udiv i64 %panels_up, %step
  call void @set_pointer(ptr %matrix, i64 {Matrix.PANELS}, ptr %panels)
  call void @set_pointer(ptr %matrix, i64 {Matrix.Y}, ptr %y)
  call void @set_word(ptr %matrix, i64 {Matrix.WIDTH}, i64 %width)
  call void @set_word(ptr %matrix, i64 {Matrix.NUM_PANELS}, i64 %num_panels)
  call void @set_word(ptr %matrix, i64 {Matrix.GROUPS}, i64 %groups){_keep_scales() if storage.is_scaled else ""}
  %own = mul i64 %groups, %tiles
  %chunks_more = add i64 %chunks, %own
  br label %head
exit:
  ret i64 %chunks
}}"""


def _keep_scales() -> str:
    return f"""
  %scales_argument = add i64 %panels_argument, 1
  %scales_buffer = call ptr @pointer(ptr %arguments, i64 %scales_argument)
  %scales = call ptr @pointer(ptr %scales_buffer, i64 {Buffer.DATA})
  call void @set_pointer(ptr %matrix, i64 {Matrix.SCALES}, ptr %scales)"""


def _handler(name: str) -> str:
    return f"""
define ptr @{name}(ptr %frame) {{
entry:
  %is_query = call i1 @answers(ptr %frame)
  br i1 %is_query, label %exit, label %call
call:
  %matrices = call i64 @word(ptr %frame, i64 {CallFrame.NUM_RESULTS})
{read_pointers("frame", CallFrame, "arguments", "results")}
  %x_buffer = call ptr @pointer(ptr %arguments, i64 0)
  %job = call ptr @new_product(ptr %frame, ptr %x_buffer, i64 %matrices)
  %chunks = call i64 @add_matrices(ptr %job, ptr %arguments, ptr %results, i64 %matrices)
  call void @finish_job(ptr %job, i64 %chunks)
  br label %exit
exit:
  ret ptr null
}}"""
