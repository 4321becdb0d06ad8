"""What XLA calls, as LLVM IR: reads the call's buffers, and asks XLA's thread pool for helpers."""

from jaxspec.cpu.call_frame import Api, Buffer, CallFrame, Metadata, Version
from jaxspec.cpu.host import VectorUnit
from jaxspec.cpu.job import Job, Matrix, job_source, tile_rows
from jaxspec.cpu.microkernel import declarations, microkernel_source
from jaxspec.cpu.words import words_source

# Bytes of weights that a thread takes at a time, if a panel is not more.
CHUNK_BYTES = 1 << 16


def kernel_source(unit: VectorUnit, name: str) -> str:
    """IR of a module whose function `name` is the handler; all sizes are arguments of its calls."""
    return "\n".join(
        [
            declarations(unit),
            words_source(),
            *(microkernel_source(unit, rows) for rows in range(1, unit.row_block + 1)),
            job_source(unit),
            "declare ptr @malloc(i64)",
            _forget_error(),
            _pool_size(),
            _get_help(),
            _new_job(unit),
            _add_matrices(),
            _answer(),
            _handler(name),
        ]
    )


def _forget_error() -> str:
    return f"""
define internal void @forget_error(ptr %api, ptr %error) {{
  %args = alloca [3 x i64]
  %destroy = call ptr @pointer(ptr %api, i64 {Api.ERROR_DESTROY})
  call void @set_word(ptr %args, i64 0, i64 24)
  call void @set_pointer(ptr %args, i64 1, ptr null)
  call void @set_pointer(ptr %args, i64 2, ptr %error)
  call void %destroy(ptr %args)
  ret void
}}"""


def _pool_size() -> str:
    return f"""
; threads of the pool, 1 where there is none
define internal i64 @pool_size(ptr %api, ptr %context) {{
entry:
  %args = alloca [4 x i64]
  %count = alloca i64
  %ask = call ptr @pointer(ptr %api, i64 {Api.NUM_THREADS})
  call void @set_word(ptr %args, i64 0, i64 32)
  call void @set_pointer(ptr %args, i64 1, ptr null)
  call void @set_pointer(ptr %args, i64 2, ptr %context)
  call void @set_pointer(ptr %args, i64 3, ptr %count)
  %error = call ptr %ask(ptr %args)
  %is_fine = icmp eq ptr %error, null
  br i1 %is_fine, label %fine, label %failed
fine:
  %threads = load i64, ptr %count
  ret i64 %threads
failed:
  call void @forget_error(ptr %api, ptr %error)
  ret i64 1
}}"""


def _get_help() -> str:
    return f"""
; schedules helpers until there are as many as wanted, or the pool refuses
define internal void @get_help(ptr %job, ptr %api, ptr %context, i64 %wanted) {{
entry:
  %args = alloca [5 x i64]
  %schedule = call ptr @pointer(ptr %api, i64 {Api.SCHEDULE})
  %holders = getelementptr i64, ptr %job, i64 {Job.HOLDERS}
  call void @set_word(ptr %args, i64 0, i64 40)
  call void @set_pointer(ptr %args, i64 1, ptr null)
  call void @set_pointer(ptr %args, i64 2, ptr %context)
  call void @set_pointer(ptr %args, i64 3, ptr @help)
  call void @set_pointer(ptr %args, i64 4, ptr %job)
  br label %head
head:
  %asked = phi i64 [ 0, %entry ], [ %next, %ask ]
  %has_more = icmp slt i64 %asked, %wanted
  br i1 %has_more, label %ask, label %exit
ask:
  atomicrmw add ptr %holders, i64 1 monotonic
  %error = call ptr %schedule(ptr %args)
  %next = add i64 %asked, 1
  %is_fine = icmp eq ptr %error, null
  br i1 %is_fine, label %head, label %refused
refused:
  atomicrmw sub ptr %holders, i64 1 monotonic
  call void @forget_error(ptr %api, ptr %error)
  br label %exit
exit:
  ret void
}}"""


def _new_job(unit: VectorUnit) -> str:
    return f"""
define internal ptr @new_job(ptr %x_buffer, i64 %matrices) {{
  %matrix_words = mul i64 %matrices, {Matrix.SIZE}
  %words = add i64 %matrix_words, {Job.SIZE}
  %bytes = mul i64 %words, 8
  %job = call ptr @malloc(i64 %bytes)
  %x = call ptr @pointer(ptr %x_buffer, i64 {Buffer.DATA})
  %sizes = call ptr @pointer(ptr %x_buffer, i64 {Buffer.SIZES})
  %rows = call i64 @word(ptr %sizes, i64 0)
  %length = call i64 @word(ptr %sizes, i64 1)
  %rows_up = add i64 %rows, {tile_rows(unit) - 1}
  %tiles = udiv i64 %rows_up, {tile_rows(unit)}
  %panel_bytes = mul i64 %length, {4 * unit.panel}
  %fit = udiv i64 {CHUNK_BYTES}, %panel_bytes
  %step = call i64 @llvm.smax.i64(i64 %fit, i64 1)
  call void @set_word(ptr %job, i64 {Job.NEXT}, i64 0)
  call void @set_word(ptr %job, i64 {Job.DONE}, i64 0)
  call void @set_word(ptr %job, i64 {Job.HOLDERS}, i64 1)
  call void @set_pointer(ptr %job, i64 {Job.X}, ptr %x)
  call void @set_word(ptr %job, i64 {Job.ROWS}, i64 %rows)
  call void @set_word(ptr %job, i64 {Job.LENGTH}, i64 %length)
  call void @set_word(ptr %job, i64 {Job.TILES}, i64 %tiles)
  call void @set_word(ptr %job, i64 {Job.STEP}, i64 %step)
  ret ptr %job
}}"""


def _add_matrices() -> str:
    return f"""
; the matrices behind x in the arguments, and their results; sets and returns the number of chunks
define internal i64 @add_matrices(ptr %job, ptr %arguments, ptr %results, i64 %matrices) {{
entry:
  %tiles = call i64 @word(ptr %job, i64 {Job.TILES})
  %step = call i64 @word(ptr %job, i64 {Job.STEP})
  %step_less = sub i64 %step, 1
  %first = getelementptr i64, ptr %job, i64 {Job.SIZE}
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
  %panels_buffer = call ptr @pointer(ptr %arguments, i64 %next)
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
  call void @set_word(ptr %matrix, i64 {Matrix.GROUPS}, i64 %groups)
  %own = mul i64 %groups, %tiles
  %chunks_more = add i64 %chunks, %own
  br label %head
exit:
  call void @set_word(ptr %job, i64 {Job.CHUNKS}, i64 %chunks)
  ret i64 %chunks
}}"""


def _answer() -> str:
    return f"""
; at registration XLA asks which version of its interface a handler was written for
define internal void @answer(ptr %extension) {{
  %metadata = call ptr @pointer(ptr %extension, i64 {Metadata.OF_EXTENSION})
  %major = getelementptr i32, ptr %metadata, i64 {Metadata.MAJOR}
  store i32 {Version.MAJOR}, ptr %major
  %minor = getelementptr i32, ptr %metadata, i64 {Metadata.MINOR}
  store i32 {Version.MINOR}, ptr %minor
  %traits = getelementptr i32, ptr %metadata, i64 {Metadata.TRAITS}
  store i32 0, ptr %traits
  ret void
}}"""


def _handler(name: str) -> str:
    return f"""
define ptr @{name}(ptr %frame) {{
entry:
  %extension = call ptr @pointer(ptr %frame, i64 {CallFrame.EXTENSION})
  %is_call = icmp eq ptr %extension, null
  br i1 %is_call, label %call, label %query
query:
  call void @answer(ptr %extension)
  ret ptr null
call:
  %api = call ptr @pointer(ptr %frame, i64 {CallFrame.API})
  %context = call ptr @pointer(ptr %frame, i64 {CallFrame.CONTEXT})
  %matrices = call i64 @word(ptr %frame, i64 {CallFrame.NUM_RESULTS})
  %arguments = call ptr @pointer(ptr %frame, i64 {CallFrame.ARGUMENTS})
  %results = call ptr @pointer(ptr %frame, i64 {CallFrame.RESULTS})
  %x_buffer = call ptr @pointer(ptr %arguments, i64 0)
  %job = call ptr @new_job(ptr %x_buffer, i64 %matrices)
  %chunks = call i64 @add_matrices(ptr %job, ptr %arguments, ptr %results, i64 %matrices)
  %is_small = icmp slt i64 %chunks, 2
  br i1 %is_small, label %join, label %share
share:
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
}}"""
