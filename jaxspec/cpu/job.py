"""What one call shares among threads, as LLVM IR: chunks of panels, taken one after the other from a counter.

Nothing waits for a thread that has not begun: whoever is free takes the next chunk, and the calling thread waits only
for chunks that others are at. Holders are counted, and the last one frees the job: a helper may begin when the call has
long returned, and then finds nothing to do.
"""

from jaxspec.cpu.host import VectorUnit

# Rows of x that a chunk of panels is multiplied with before it is taken anew for the next ones.
TILE_ROWS = 64
# Looks at the counter before a waiting thread gives its processor to others.
SPINS = 4096


class Job:
    """Words of a job."""

    NEXT, DONE, HOLDERS, CHUNKS, X, ROWS, LENGTH, TILES, STEP = range(9)  # STEP: panels in a chunk
    SIZE = 9


class Matrix:
    """Words of each matrix; they follow the job's. GROUPS: chunks for one tile of rows."""

    PANELS, Y, WIDTH, NUM_PANELS, GROUPS = range(5)
    SIZE = 5


def tile_rows(unit: VectorUnit) -> int:
    """Rows of a tile: whole blocks, so that only the last one may be shorter."""
    return TILE_ROWS // unit.row_block * unit.row_block


def job_source(unit: VectorUnit) -> str:
    """IR of `work`, `wait`, `let_go` and `help`; it calls `rows_1` to `rows_R`."""
    kernels = ", ".join(f"ptr @rows_{rows}" for rows in range(1, unit.row_block + 1))
    return "\n".join(
        [
            f"@kernels = internal constant [{unit.row_block} x ptr] [{kernels}]",
            "declare void @free(ptr)\ndeclare i32 @sched_yield()",
            _panel_rows(unit),
            _chunk(unit),
            _group(unit),
            _work(),
            _wait(unit),
        ]
    )


def _panel_rows(unit: VectorUnit) -> str:
    return f"""
; y = x times one panel, a block of rows after the other
define internal void @panel_rows(ptr %x, i64 %rows, i64 %length, ptr %panel, ptr %y, i64 %width, i64 %columns) {{
entry:
  br label %head
head:
  %row = phi i64 [ 0, %entry ], [ %next, %block ]
  %left = sub i64 %rows, %row
  %has_more = icmp sgt i64 %left, 0
  br i1 %has_more, label %block, label %exit
block:
  %count = call i64 @llvm.smin.i64(i64 %left, i64 {unit.row_block})
  %index = sub i64 %count, 1
  %kernel = call ptr @pointer(ptr @kernels, i64 %index)
  %x_offset = mul i64 %row, %length
  %y_offset = mul i64 %row, %width
  %x_at = getelementptr float, ptr %x, i64 %x_offset
  %y_at = getelementptr float, ptr %y, i64 %y_offset
  call void %kernel(ptr %x_at, i64 %length, ptr %panel, i64 %length, ptr %y_at, i64 %width, i64 %columns)
  %next = add i64 %row, {unit.row_block}
  br label %head
exit:
  ret void
}}"""


def _chunk(unit: VectorUnit) -> str:
    return f"""
; finds the matrix, the tile of rows and the group of panels that a chunk stands for
define internal void @chunk(ptr %job, i64 %index) {{
entry:
  %tiles = call i64 @word(ptr %job, i64 {Job.TILES})
  %first_matrix = getelementptr i64, ptr %job, i64 {Job.SIZE}
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
  %tile = udiv i64 %place, %groups
  %group = urem i64 %place, %groups
  %row = mul i64 %tile, {tile_rows(unit)}
  call void @group(ptr %job, ptr %matrix, i64 %row, i64 %group)
  ret void
}}"""


def _group(unit: VectorUnit) -> str:
    return f"""
define internal void @group(ptr %job, ptr %matrix, i64 %row, i64 %group) {{
entry:
  %x = call ptr @pointer(ptr %job, i64 {Job.X})
  %all_rows = call i64 @word(ptr %job, i64 {Job.ROWS})
  %length = call i64 @word(ptr %job, i64 {Job.LENGTH})
  %step = call i64 @word(ptr %job, i64 {Job.STEP})
  %panels = call ptr @pointer(ptr %matrix, i64 {Matrix.PANELS})
  %y = call ptr @pointer(ptr %matrix, i64 {Matrix.Y})
  %width = call i64 @word(ptr %matrix, i64 {Matrix.WIDTH})
  %num_panels = call i64 @word(ptr %matrix, i64 {Matrix.NUM_PANELS})
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
  %panel = getelementptr float, ptr %panels, i64 %offset
  %column = mul i64 %number, {unit.panel}
  %y_at = getelementptr float, ptr %y_row, i64 %column
  %columns = sub i64 %width, %column
  call void @panel_rows(ptr %x_at, i64 %rows, i64 %length, ptr %panel, ptr %y_at, i64 %width, i64 %columns)
  %next = add i64 %number, 1
  br label %head
exit:
  ret void
}}"""


def _work() -> str:
    return f"""
define internal void @work(ptr %job) {{
entry:
  %chunks = call i64 @word(ptr %job, i64 {Job.CHUNKS})
  %taken = getelementptr i64, ptr %job, i64 {Job.NEXT}
  %done = getelementptr i64, ptr %job, i64 {Job.DONE}
  br label %head
head:
  %index = atomicrmw add ptr %taken, i64 1 monotonic
  %has_more = icmp slt i64 %index, %chunks
  br i1 %has_more, label %body, label %exit
body:
  call void @chunk(ptr %job, i64 %index)
  atomicrmw add ptr %done, i64 1 release
  br label %head
exit:
  ret void
}}
define internal void @let_go(ptr %job) {{
entry:
  %holders = getelementptr i64, ptr %job, i64 {Job.HOLDERS}
  %before = atomicrmw sub ptr %holders, i64 1 acq_rel
  %is_last = icmp eq i64 %before, 1
  br i1 %is_last, label %last, label %exit
last:
  call void @free(ptr %job)
  br label %exit
exit:
  ret void
}}
define internal void @help(ptr %job) {{
  call void @work(ptr %job)
  call void @let_go(ptr %job)
  ret void
}}"""


def _wait(unit: VectorUnit) -> str:
    return f"""
; until every chunk is done; those that are not are being worked on
define internal void @wait(ptr %job) {{
entry:
  %chunks = call i64 @word(ptr %job, i64 {Job.CHUNKS})
  %done = getelementptr i64, ptr %job, i64 {Job.DONE}
  br label %head
head:
  %spins = phi i64 [ 0, %entry ], [ %more, %spin ], [ %more, %yield ]
  %count = load atomic i64, ptr %done acquire, align 8
  %is_done = icmp sge i64 %count, %chunks
  br i1 %is_done, label %exit, label %look
look:
  %more = add i64 %spins, 1
  %is_long = icmp sgt i64 %spins, {SPINS}
  br i1 %is_long, label %yield, label %spin
spin:
  call void asm sideeffect "{unit.pause}", ""()
  br label %head
yield:
  call i32 @sched_yield()
  br label %head
exit:
  ret void
}}"""
