"""What XLA calls, as LLVM IR: reads the call's buffers, and shares the panels among the threads of XLA's pool.

A call is cut into chunks of panels. The calling thread and helpers that it schedules take one after the other from a
counter, so that a busy pool only means fewer helpers: nothing waits for a task that has not begun. What they share is
counted, and whoever is last frees it; a helper may begin after the call has returned.
"""

from jaxspec.cpu.call_frame import Api, Buffer, CallFrame, Metadata, Version

# Bytes of weights that a thread takes at a time, and rows of x that pass over them before the next ones do.
CHUNK_BYTES = 1 << 16
TILE_ROWS = 64
# Looks at the counter before the processor is given up to others.
SPINS = 4096

# Fields of a job, in words of 8 bytes.
_JOB = """
; 0 next chunk, 1 chunks done, 2 holders, 3 chunks, 4 x, 5 rows, 6 length, 7 matrices, 8 tiles of rows,
; 9 panels in a chunk; then for each matrix: panels, y, columns, number of panels, chunks of a tile
"""
_JOB_WORDS, _MATRIX_WORDS = 10, 5


def handler_source(name: str, *, panel: int, row_block: int, pause: str) -> str:
    """IR of the handler `name`; it calls `rows_1` to `rows_R`, which are defined elsewhere.

    Args:
        panel: columns of a panel.
        row_block: R, the most rows that one call computes.
        pause: the host's instruction that eases a spinning thread.
    """
    tile = TILE_ROWS // row_block * row_block
    kernels = ", ".join(f"ptr @rows_{rows}" for rows in range(1, row_block + 1))
    return "\n".join(
        [
            f"@kernels = internal constant [{row_block} x ptr] [{kernels}]",
            "declare ptr @malloc(i64)\ndeclare void @free(ptr)\ndeclare i32 @sched_yield()",
            "declare i64 @llvm.smin.i64(i64, i64)\ndeclare i64 @llvm.smax.i64(i64, i64)",
            _JOB,
            _load_word(),
            _panel_rows(row_block),
            _chunk(panel, tile),
            _work(),
            _wait(pause),
            _handler(name, panel, tile),
        ]
    )


def _load_word() -> str:
    return """
define internal i64 @word(ptr %base, i64 %index) alwaysinline {
  %at = getelementptr i64, ptr %base, i64 %index
  %value = load i64, ptr %at
  ret i64 %value
}
define internal ptr @pointer(ptr %base, i64 %index) alwaysinline {
  %at = getelementptr ptr, ptr %base, i64 %index
  %value = load ptr, ptr %at
  ret ptr %value
}
"""


def _panel_rows(row_block: int) -> str:
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
  %count = call i64 @llvm.smin.i64(i64 %left, i64 {row_block})
  %index = sub i64 %count, 1
  %kernel = call ptr @pointer(ptr @kernels, i64 %index)
  %x_offset = mul i64 %row, %length
  %y_offset = mul i64 %row, %width
  %x_at = getelementptr float, ptr %x, i64 %x_offset
  %y_at = getelementptr float, ptr %y, i64 %y_offset
  call void %kernel(ptr %x_at, i64 %length, ptr %panel, i64 %length, ptr %y_at, i64 %width, i64 %columns)
  %next = add i64 %row, {row_block}
  br label %head
exit:
  ret void
}}
"""


def _chunk(panel: int, tile: int) -> str:
    return f"""
define internal void @chunk(ptr %job, i64 %index) {{
entry:
  %x = call ptr @pointer(ptr %job, i64 4)
  %all_rows = call i64 @word(ptr %job, i64 5)
  %length = call i64 @word(ptr %job, i64 6)
  %tiles = call i64 @word(ptr %job, i64 8)
  %step = call i64 @word(ptr %job, i64 9)
  %first_matrix = getelementptr i64, ptr %job, i64 {_JOB_WORDS}
  br label %find
find:
  %matrix = phi ptr [ %first_matrix, %entry ], [ %next_matrix, %skip ]
  %place = phi i64 [ %index, %entry ], [ %rest, %skip ]
  %groups = call i64 @word(ptr %matrix, i64 4)
  %own = mul i64 %groups, %tiles
  %is_here = icmp slt i64 %place, %own
  br i1 %is_here, label %found, label %skip
skip:
  %rest = sub i64 %place, %own
  %next_matrix = getelementptr i64, ptr %matrix, i64 {_MATRIX_WORDS}
  br label %find
found:
  %tile = udiv i64 %place, %groups
  %group = urem i64 %place, %groups
  %row = mul i64 %tile, {tile}
  %rows_left = sub i64 %all_rows, %row
  %rows = call i64 @llvm.smin.i64(i64 %rows_left, i64 {tile})
  %panels = call ptr @pointer(ptr %matrix, i64 0)
  %y = call ptr @pointer(ptr %matrix, i64 1)
  %width = call i64 @word(ptr %matrix, i64 2)
  %num_panels = call i64 @word(ptr %matrix, i64 3)
  %first = mul i64 %group, %step
  %end = add i64 %first, %step
  %last = call i64 @llvm.smin.i64(i64 %end, i64 %num_panels)
  %x_offset = mul i64 %row, %length
  %y_offset = mul i64 %row, %width
  %x_at = getelementptr float, ptr %x, i64 %x_offset
  %y_row = getelementptr float, ptr %y, i64 %y_offset
  %panel_size = mul i64 %length, {panel}
  br label %head
head:
  %number = phi i64 [ %first, %found ], [ %next, %body ]
  %has_more = icmp slt i64 %number, %last
  br i1 %has_more, label %body, label %exit
body:
  %offset = mul i64 %number, %panel_size
  %panel = getelementptr float, ptr %panels, i64 %offset
  %column = mul i64 %number, {panel}
  %y_at = getelementptr float, ptr %y_row, i64 %column
  %columns = sub i64 %width, %column
  call void @panel_rows(ptr %x_at, i64 %rows, i64 %length, ptr %panel, ptr %y_at, i64 %width, i64 %columns)
  %next = add i64 %number, 1
  br label %head
exit:
  ret void
}}
"""


def _work() -> str:
    return """
define internal void @work(ptr %job) {
entry:
  %chunks = call i64 @word(ptr %job, i64 3)
  %done = getelementptr i64, ptr %job, i64 1
  br label %head
head:
  %index = atomicrmw add ptr %job, i64 1 monotonic
  %has_more = icmp slt i64 %index, %chunks
  br i1 %has_more, label %body, label %exit
body:
  call void @chunk(ptr %job, i64 %index)
  atomicrmw add ptr %done, i64 1 release
  br label %head
exit:
  ret void
}
define internal void @let_go(ptr %job) {
entry:
  %holders = getelementptr i64, ptr %job, i64 2
  %before = atomicrmw sub ptr %holders, i64 1 acq_rel
  %is_last = icmp eq i64 %before, 1
  br i1 %is_last, label %last, label %exit
last:
  call void @free(ptr %job)
  br label %exit
exit:
  ret void
}
define internal void @help(ptr %job) {
  call void @work(ptr %job)
  call void @let_go(ptr %job)
  ret void
}
"""


def _wait(pause: str) -> str:
    return f"""
; until every chunk is done; those that are not are being worked on
define internal void @wait(ptr %job) {{
entry:
  %chunks = call i64 @word(ptr %job, i64 3)
  %done = getelementptr i64, ptr %job, i64 1
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
  call void asm sideeffect "{pause}", ""()
  br label %head
yield:
  call i32 @sched_yield()
  br label %head
exit:
  ret void
}}
"""


def _handler(name: str, panel: int, tile: int) -> str:
    return f"""
; asks the pool for helpers until it has no more threads or refuses
define internal void @get_help(ptr %job, ptr %api, ptr %context, i64 %wanted) {{
entry:
  %schedule_args = alloca [5 x i64]
  %destroy_args = alloca [3 x i64]
  %schedule = call ptr @pointer(ptr %api, i64 {Api.SCHEDULE})
  %destroy = call ptr @pointer(ptr %api, i64 {Api.ERROR_DESTROY})
  %holders = getelementptr i64, ptr %job, i64 2
  store i64 40, ptr %schedule_args
  %extension = getelementptr i64, ptr %schedule_args, i64 1
  store ptr null, ptr %extension
  %context_at = getelementptr i64, ptr %schedule_args, i64 2
  store ptr %context, ptr %context_at
  %task_at = getelementptr i64, ptr %schedule_args, i64 3
  store ptr @help, ptr %task_at
  %data_at = getelementptr i64, ptr %schedule_args, i64 4
  store ptr %job, ptr %data_at
  br label %head
head:
  %asked = phi i64 [ 0, %entry ], [ %next, %ask ]
  %has_more = icmp slt i64 %asked, %wanted
  br i1 %has_more, label %ask, label %exit
ask:
  atomicrmw add ptr %holders, i64 1 monotonic
  %error = call ptr %schedule(ptr %schedule_args)
  %next = add i64 %asked, 1
  %is_fine = icmp eq ptr %error, null
  br i1 %is_fine, label %head, label %refused
refused:
  atomicrmw sub ptr %holders, i64 1 monotonic
  store i64 24, ptr %destroy_args
  %no_extension = getelementptr i64, ptr %destroy_args, i64 1
  store ptr null, ptr %no_extension
  %error_at = getelementptr i64, ptr %destroy_args, i64 2
  store ptr %error, ptr %error_at
  call void %destroy(ptr %destroy_args)
  br label %exit
exit:
  ret void
}}

define internal i64 @pool_size(ptr %api, ptr %context) {{
  %args = alloca [4 x i64]
  %count = alloca i64
  store i64 1, ptr %count
  %ask = call ptr @pointer(ptr %api, i64 {Api.NUM_THREADS})
  store i64 32, ptr %args
  %extension = getelementptr i64, ptr %args, i64 1
  store ptr null, ptr %extension
  %context_at = getelementptr i64, ptr %args, i64 2
  store ptr %context, ptr %context_at
  %count_at = getelementptr i64, ptr %args, i64 3
  store ptr %count, ptr %count_at
  %error = call ptr %ask(ptr %args)
  %is_fine = icmp eq ptr %error, null
  br i1 %is_fine, label %fine, label %failed
fine:
  %threads = load i64, ptr %count
  ret i64 %threads
failed:
  %destroy_args = alloca [3 x i64]
  %destroy = call ptr @pointer(ptr %api, i64 {Api.ERROR_DESTROY})
  store i64 24, ptr %destroy_args
  %no_extension = getelementptr i64, ptr %destroy_args, i64 1
  store ptr null, ptr %no_extension
  %error_at = getelementptr i64, ptr %destroy_args, i64 2
  store ptr %error, ptr %error_at
  call void %destroy(ptr %destroy_args)
  ret i64 1
}}

define ptr @{name}(ptr %frame) {{
entry:
  %extension = call ptr @pointer(ptr %frame, i64 {CallFrame.EXTENSION})
  %is_call = icmp eq ptr %extension, null
  br i1 %is_call, label %call, label %question
question:
  %metadata = call ptr @pointer(ptr %extension, i64 {Metadata.OF_EXTENSION})
  %major = getelementptr i32, ptr %metadata, i64 {Metadata.MAJOR}
  store i32 {Version.MAJOR}, ptr %major
  %minor = getelementptr i32, ptr %metadata, i64 {Metadata.MINOR}
  store i32 {Version.MINOR}, ptr %minor
  %traits = getelementptr i32, ptr %metadata, i64 {Metadata.TRAITS}
  store i32 0, ptr %traits
  ret ptr null
call:
  %api = call ptr @pointer(ptr %frame, i64 {CallFrame.API})
  %context = call ptr @pointer(ptr %frame, i64 {CallFrame.CONTEXT})
  %matrices = call i64 @word(ptr %frame, i64 {CallFrame.NUM_RESULTS})
  %arguments = call ptr @pointer(ptr %frame, i64 {CallFrame.ARGUMENTS})
  %results = call ptr @pointer(ptr %frame, i64 {CallFrame.RESULTS})
  %x_buffer = call ptr @pointer(ptr %arguments, i64 0)
  %x = call ptr @pointer(ptr %x_buffer, i64 {Buffer.DATA})
  %x_sizes = call ptr @pointer(ptr %x_buffer, i64 {Buffer.SIZES})
  %rows = call i64 @word(ptr %x_sizes, i64 0)
  %length = call i64 @word(ptr %x_sizes, i64 1)
  %panel_bytes = mul i64 %length, {4 * panel}
  %fit = udiv i64 {CHUNK_BYTES}, %panel_bytes
  %step = call i64 @llvm.smax.i64(i64 %fit, i64 1)
  %rows_up = add i64 %rows, {tile - 1}
  %tiles = udiv i64 %rows_up, {tile}
  %matrix_words = mul i64 %matrices, {_MATRIX_WORDS}
  %words = add i64 %matrix_words, {_JOB_WORDS}
  %bytes = mul i64 %words, 8
  %job = call ptr @malloc(i64 %bytes)
  store i64 0, ptr %job
  %done_at = getelementptr i64, ptr %job, i64 1
  store i64 0, ptr %done_at
  %holders_at = getelementptr i64, ptr %job, i64 2
  store i64 1, ptr %holders_at
  %chunks_at = getelementptr i64, ptr %job, i64 3
  %x_at = getelementptr i64, ptr %job, i64 4
  store ptr %x, ptr %x_at
  %rows_at = getelementptr i64, ptr %job, i64 5
  store i64 %rows, ptr %rows_at
  %length_at = getelementptr i64, ptr %job, i64 6
  store i64 %length, ptr %length_at
  %matrices_at = getelementptr i64, ptr %job, i64 7
  store i64 %matrices, ptr %matrices_at
  %tiles_at = getelementptr i64, ptr %job, i64 8
  store i64 %tiles, ptr %tiles_at
  %step_at = getelementptr i64, ptr %job, i64 9
  store i64 %step, ptr %step_at
  br label %head
head:
  %index = phi i64 [ 0, %call ], [ %next, %body ]
  %chunks = phi i64 [ 0, %call ], [ %chunks_more, %body ]
  %has_more = icmp slt i64 %index, %matrices
  br i1 %has_more, label %body, label %share
body:
  %next = add i64 %index, 1
  %panels_buffer = call ptr @pointer(ptr %arguments, i64 %next)
  %panels = call ptr @pointer(ptr %panels_buffer, i64 {Buffer.DATA})
  %panels_sizes = call ptr @pointer(ptr %panels_buffer, i64 {Buffer.SIZES})
  %num_panels = call i64 @word(ptr %panels_sizes, i64 0)
  %y_buffer = call ptr @pointer(ptr %results, i64 %index)
  %y = call ptr @pointer(ptr %y_buffer, i64 {Buffer.DATA})
  %y_sizes = call ptr @pointer(ptr %y_buffer, i64 {Buffer.SIZES})
  %width = call i64 @word(ptr %y_sizes, i64 1)
  %before = mul i64 %index, {_MATRIX_WORDS}
  %place = add i64 %before, {_JOB_WORDS}
  %matrix = getelementptr i64, ptr %job, i64 %place
  store ptr %panels, ptr %matrix
  %y_at = getelementptr i64, ptr %matrix, i64 1
  store ptr %y, ptr %y_at
  %width_at = getelementptr i64, ptr %matrix, i64 2
  store i64 %width, ptr %width_at
  %num_panels_at = getelementptr i64, ptr %matrix, i64 3
  store i64 %num_panels, ptr %num_panels_at
  %step_less = sub i64 %step, 1
  %panels_up = add i64 %num_panels, %step_less
  %groups = udiv i64 %panels_up, %step
  %groups_at = getelementptr i64, ptr %matrix, i64 4
  store i64 %groups, ptr %groups_at
  %own = mul i64 %groups, %tiles
  %chunks_more = add i64 %chunks, %own
  br label %head
share:
  store i64 %chunks, ptr %chunks_at
  %alone = icmp slt i64 %chunks, 2
  br i1 %alone, label %join, label %ask
ask:
  %threads = call i64 @pool_size(ptr %api, ptr %context)
  %useful = call i64 @llvm.smin.i64(i64 %threads, i64 %chunks)
  %helpers = sub i64 %useful, 1
  call void @get_help(ptr %job, ptr %api, ptr %context, i64 %helpers)
  br label %join
join:
  call void @work(ptr %job)
  call void @wait(ptr %job)
  call void @let_go(ptr %job)
  ret ptr null
}}
"""
