"""What one call shares among threads, as LLVM IR: chunks of work, taken one after the other from a counter.

Nothing waits for a thread that has not begun: whoever is free takes the next chunk, and the calling thread waits only
for chunks that others are at. Holders are counted, and the last one frees the job: a helper may begin when the call has
long returned, and then finds nothing to do.
"""

from jaxspec.cpu.call_frame import Api, CallFrame
from jaxspec.cpu.host import VectorUnit
from jaxspec.cpu.words import read_pointers

# Looks at the counter before a waiting thread gives its processor to others.
SPINS = 4096


class Job:
    """Words of a job; more may follow. RUN: the function that does a chunk, of the job and the chunk's index."""

    NEXT, DONE, HOLDERS, CHUNKS, RUN, FRAME = range(6)
    SIZE = 6


def job_source(unit: VectorUnit) -> str:
    """IR of `new_job` and `finish_job`, and of what they need; `words_source` goes before."""
    parts = [_new_job(), _forget_error(), _pool_size(), _get_help(), _work(), _wait(unit), _finish_job()]
    return "\n".join(["declare ptr @malloc(i64)\ndeclare void @free(ptr)\ndeclare i32 @sched_yield()", *parts])


def _new_job() -> str:
    return f"""
define internal ptr @new_job(ptr %frame, ptr %run, i64 %more_words) {{
  %words = add i64 %more_words, {Job.SIZE}
  %bytes = mul i64 %words, 8
  %job = call ptr @malloc(i64 %bytes)
  call void @set_word(ptr %job, i64 {Job.NEXT}, i64 0)
  call void @set_word(ptr %job, i64 {Job.DONE}, i64 0)
  call void @set_word(ptr %job, i64 {Job.HOLDERS}, i64 1)
  call void @set_pointer(ptr %job, i64 {Job.RUN}, ptr %run)
  call void @set_pointer(ptr %job, i64 {Job.FRAME}, ptr %frame)
  ret ptr %job
}}"""


def _finish_job() -> str:
    return f"""
; does all chunks, with the pool's help where there are several
define internal void @finish_job(ptr %job, i64 %chunks) {{
entry:
  %frame = call ptr @pointer(ptr %job, i64 {Job.FRAME})
{read_pointers("frame", CallFrame, "api", "context")}
  call void @set_word(ptr %job, i64 {Job.CHUNKS}, i64 %chunks)
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
  ret void
}}"""


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


def _work() -> str:
    return f"""
define internal void @work(ptr %job) {{
entry:
  %chunks = call i64 @word(ptr %job, i64 {Job.CHUNKS})
  %run = call ptr @pointer(ptr %job, i64 {Job.RUN})
  %taken = getelementptr i64, ptr %job, i64 {Job.NEXT}
  %done = getelementptr i64, ptr %job, i64 {Job.DONE}
  br label %head
head:
  %index = atomicrmw add ptr %taken, i64 1 monotonic
  %has_more = icmp slt i64 %index, %chunks
  br i1 %has_more, label %body, label %exit
body:
  call void %run(ptr %job, i64 %index)
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
