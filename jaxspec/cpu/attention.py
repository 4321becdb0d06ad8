"""Attention of a block of nodes over pages and itself, as LLVM IR.

A chunk is one row, one kv head and as many of its queries as a vector has lanes. Scores stand in a column for each
query: S keys times the queries' vector. Every sum runs over the keys in the order of their positions, first the pages
and then the block, and a key that a query may not see counts as nothing. A query's result therefore does not depend on
which of its keys are in pages and which in the block, nor on its neighbours: bit for bit, a draft that is verified sees
what a token that is decoded sees.
"""

from jaxspec.cpu.call_frame import Buffer, CallFrame, metadata_source
from jaxspec.cpu.exponential import exponential_source
from jaxspec.cpu.host import VectorUnit
from jaxspec.cpu.job import Job, job_source
from jaxspec.cpu.microkernel import Form, blocks_source, declarations, microkernel_source
from jaxspec.cpu.words import words_source

ROW_BLOCK = 8
QUERIES, KEYS, VALUES, KEY_POOL, VALUE_POOL, LAYER, TABLE, PREFIX_LEN, VISIBLE = range(9)


class Sizes:
    """Words behind a job's own: sizes, and the buffers' data."""

    ROWS, NODES, HEADS, DIM, BLOCK_KEYS, KV_HEADS, PAGES, PAGE_SIZE, TABLE_WIDTH, WORDS, GROUP, TILES = range(
        Job.SIZE, Job.SIZE + 12
    )
    DATA = Job.SIZE + 12  # one word for each argument, and one for the result
    SIZE = 12 + 10


class Tile:
    """Words of what a thread has at hand for one chunk."""

    JOB, ROW, KV, FIRST, COUNT, LENGTH, TURNED, SCORES, SUMS, PEAK = range(10)
    SIZE = 10


def attention_source(unit: VectorUnit, name: str) -> str:
    """IR of a module whose function `name` is the handler; head sizes are multiples of the unit's lanes.

    Its arguments: queries f32 [B, N, H, D], scaled; keys and values f32 [B, M, K, D]; their pools f32
    [L, pages, K, page_size, D]; the layer i32; the table i32 [B, pages of a row]; prefix lengths i32 [B]; ancestor bits
    u32 [B, N, words]. Its result: f32 [B, N, H, D].
    """
    scores = Form("scores", 1)
    values = Form("values", 1, x_step=unit.lanes, adds=True)
    kernels = [microkernel_source(unit, form, rows) for form in (scores, values) for rows in range(1, ROW_BLOCK + 1)]
    return "\n".join(
        [
            declarations(unit),
            words_source(),
            metadata_source(),
            job_source(unit),
            *kernels,
            blocks_source(scores, ROW_BLOCK),
            blocks_source(values, ROW_BLOCK),
            exponential_source(unit),
            "declare void @llvm.memset.p0.i64(ptr, i8, i64, i1)",
            _size_source(),
            _page(),
            _turn(unit),
            _score(unit),
            _hide(unit),
            _weigh(unit),
            _mix(unit),
            _write(),
            _chunk(unit),
            _handler(name, unit),
        ]
    )


def _size_source() -> str:
    return f"""
define internal i64 @argument_size(ptr %arguments, i64 %argument, i64 %axis) {{
  %buffer = call ptr @pointer(ptr %arguments, i64 %argument)
  %sizes = call ptr @pointer(ptr %buffer, i64 {Buffer.SIZES})
  %size = call i64 @word(ptr %sizes, i64 %axis)
  ret i64 %size
}}
define internal i64 @int(ptr %base, i64 %index) {{
  %at = getelementptr i32, ptr %base, i64 %index
  %value = load i32, ptr %at
  %wide = sext i32 %value to i64
  ret i64 %wide
}}"""


def _page() -> str:
    return f"""
; where a page of a pool begins for a tile's row and kv head
define internal ptr @page(ptr %tile, i64 %pool_index, i64 %number) {{
  %job = call ptr @pointer(ptr %tile, i64 {Tile.JOB})
  %row = call i64 @word(ptr %tile, i64 {Tile.ROW})
  %kv = call i64 @word(ptr %tile, i64 {Tile.KV})
  %pool_word = add i64 %pool_index, {Sizes.DATA}
  %pool = call ptr @pointer(ptr %job, i64 %pool_word)
  %layer_at = call ptr @pointer(ptr %job, i64 {Sizes.DATA + LAYER})
  %layer = call i64 @int(ptr %layer_at, i64 0)
  %table = call ptr @pointer(ptr %job, i64 {Sizes.DATA + TABLE})
  %table_width = call i64 @word(ptr %job, i64 {Sizes.TABLE_WIDTH})
  %table_row = mul i64 %row, %table_width
  %table_index = add i64 %table_row, %number
  %entry = call i64 @int(ptr %table, i64 %table_index)
  %page = call i64 @llvm.smax.i64(i64 %entry, i64 0)
  %pages = call i64 @word(ptr %job, i64 {Sizes.PAGES})
  %kv_heads = call i64 @word(ptr %job, i64 {Sizes.KV_HEADS})
  %page_size = call i64 @word(ptr %job, i64 {Sizes.PAGE_SIZE})
  %dim = call i64 @word(ptr %job, i64 {Sizes.DIM})
  %layer_pages = mul i64 %layer, %pages
  %index = add i64 %layer_pages, %page
  %index_heads = mul i64 %index, %kv_heads
  %head = add i64 %index_heads, %kv
  %head_tokens = mul i64 %head, %page_size
  %offset = mul i64 %head_tokens, %dim
  %at = getelementptr float, ptr %pool, i64 %offset
  ret ptr %at
}}
; the first of a tile's keys or values in the block
define internal ptr @own(ptr %tile, i64 %argument) {{
  %job = call ptr @pointer(ptr %tile, i64 {Tile.JOB})
  %row = call i64 @word(ptr %tile, i64 {Tile.ROW})
  %kv = call i64 @word(ptr %tile, i64 {Tile.KV})
  %word = add i64 %argument, {Sizes.DATA}
  %data = call ptr @pointer(ptr %job, i64 %word)
  %keys = call i64 @word(ptr %job, i64 {Sizes.BLOCK_KEYS})
  %kv_heads = call i64 @word(ptr %job, i64 {Sizes.KV_HEADS})
  %dim = call i64 @word(ptr %job, i64 {Sizes.DIM})
  %row_keys = mul i64 %row, %keys
  %row_heads = mul i64 %row_keys, %kv_heads
  %head = add i64 %row_heads, %kv
  %offset = mul i64 %head, %dim
  %at = getelementptr float, ptr %data, i64 %offset
  ret ptr %at
}}
; where a lane's query is, and its result
define internal i64 @place(ptr %tile, i64 %lane) {{
  %job = call ptr @pointer(ptr %tile, i64 {Tile.JOB})
  %row = call i64 @word(ptr %tile, i64 {Tile.ROW})
  %kv = call i64 @word(ptr %tile, i64 {Tile.KV})
  %first = call i64 @word(ptr %tile, i64 {Tile.FIRST})
  %nodes = call i64 @word(ptr %job, i64 {Sizes.NODES})
  %heads = call i64 @word(ptr %job, i64 {Sizes.HEADS})
  %group = call i64 @word(ptr %job, i64 {Sizes.GROUP})
  %dim = call i64 @word(ptr %job, i64 {Sizes.DIM})
  %query = add i64 %first, %lane
  %node = udiv i64 %query, %group
  %member = urem i64 %query, %group
  %row_nodes = mul i64 %row, %nodes
  %row_node = add i64 %row_nodes, %node
  %node_heads = mul i64 %row_node, %heads
  %kv_group = mul i64 %kv, %group
  %head = add i64 %kv_group, %member
  %node_head = add i64 %node_heads, %head
  %offset = mul i64 %node_head, %dim
  ret i64 %offset
}}"""


def _turn(unit: VectorUnit) -> str:
    return f"""
; the tile's queries as columns [D, lanes], zeros where there are fewer
define internal void @turn(ptr %tile) {{
entry:
  %job = call ptr @pointer(ptr %tile, i64 {Tile.JOB})
  %queries = call ptr @pointer(ptr %job, i64 {Sizes.DATA + QUERIES})
  %turned = call ptr @pointer(ptr %tile, i64 {Tile.TURNED})
  %count = call i64 @word(ptr %tile, i64 {Tile.COUNT})
  %dim = call i64 @word(ptr %job, i64 {Sizes.DIM})
  %bytes = mul i64 %dim, {4 * unit.lanes}
  call void @llvm.memset.p0.i64(ptr %turned, i8 0, i64 %bytes, i1 0)
  br label %lanes
lanes:
  %lane = phi i64 [ 0, %entry ], [ %next_lane, %lane_done ]
  %has_lane = icmp slt i64 %lane, %count
  br i1 %has_lane, label %lane_start, label %exit
lane_start:
  %offset = call i64 @place(ptr %tile, i64 %lane)
  %query = getelementptr float, ptr %queries, i64 %offset
  %column = getelementptr float, ptr %turned, i64 %lane
  br label %values
values:
  %d = phi i64 [ 0, %lane_start ], [ %next_d, %values ]
  %from = getelementptr float, ptr %query, i64 %d
  %value = load float, ptr %from
  %to_offset = mul i64 %d, {unit.lanes}
  %to = getelementptr float, ptr %column, i64 %to_offset
  store float %value, ptr %to
  %next_d = add i64 %d, 1
  %has_more = icmp slt i64 %next_d, %dim
  br i1 %has_more, label %values, label %lane_done
lane_done:
  %next_lane = add i64 %lane, 1
  br label %lanes
exit:
  ret void
}}"""


def _score(unit: VectorUnit) -> str:
    return f"""
define internal void @score(ptr %tile) {{
entry:
  %job = call ptr @pointer(ptr %tile, i64 {Tile.JOB})
  %turned = call ptr @pointer(ptr %tile, i64 {Tile.TURNED})
  %scores = call ptr @pointer(ptr %tile, i64 {Tile.SCORES})
  %length = call i64 @word(ptr %tile, i64 {Tile.LENGTH})
  %page_size = call i64 @word(ptr %job, i64 {Sizes.PAGE_SIZE})
  %dim = call i64 @word(ptr %job, i64 {Sizes.DIM})
  %kv_heads = call i64 @word(ptr %job, i64 {Sizes.KV_HEADS})
  %block_keys = call i64 @word(ptr %job, i64 {Sizes.BLOCK_KEYS})
  br label %head
head:
  %number = phi i64 [ 0, %entry ], [ %next, %body ]
  %start = mul i64 %number, %page_size
  %left = sub i64 %length, %start
  %has_more = icmp sgt i64 %left, 0
  br i1 %has_more, label %body, label %block
body:
  %count = call i64 @llvm.smin.i64(i64 %left, i64 %page_size)
  %keys = call ptr @page(ptr %tile, i64 {KEY_POOL}, i64 %number)
  %offset = mul i64 %start, {unit.lanes}
  %to = getelementptr float, ptr %scores, i64 %offset
  call void @all_scores(i64 %count, ptr %keys, i64 %dim, ptr %turned, i64 {unit.lanes}, i64 %dim, ptr %to,
    i64 {unit.lanes}, i64 {unit.lanes})
  %next = add i64 %number, 1
  br label %head
block:
  %own = call ptr @own(ptr %tile, i64 {KEYS})
  %stride = mul i64 %kv_heads, %dim
  %own_offset = mul i64 %length, {unit.lanes}
  %own_to = getelementptr float, ptr %scores, i64 %own_offset
  call void @all_scores(i64 %block_keys, ptr %own, i64 %stride, ptr %turned, i64 {unit.lanes}, i64 %dim, ptr %own_to,
    i64 {unit.lanes}, i64 {unit.lanes})
  ret void
}}"""


def _hide(unit: VectorUnit) -> str:
    return f"""
; -inf for the block's keys that a query may not see
define internal void @hide(ptr %tile) {{
entry:
  %job = call ptr @pointer(ptr %tile, i64 {Tile.JOB})
  %row = call i64 @word(ptr %tile, i64 {Tile.ROW})
  %first = call i64 @word(ptr %tile, i64 {Tile.FIRST})
  %count = call i64 @word(ptr %tile, i64 {Tile.COUNT})
  %length = call i64 @word(ptr %tile, i64 {Tile.LENGTH})
  %scores = call ptr @pointer(ptr %tile, i64 {Tile.SCORES})
  %visible = call ptr @pointer(ptr %job, i64 {Sizes.DATA + VISIBLE})
  %nodes = call i64 @word(ptr %job, i64 {Sizes.NODES})
  %group = call i64 @word(ptr %job, i64 {Sizes.GROUP})
  %words = call i64 @word(ptr %job, i64 {Sizes.WORDS})
  %block_keys = call i64 @word(ptr %job, i64 {Sizes.BLOCK_KEYS})
  %row_nodes = mul i64 %row, %nodes
  br label %lanes
lanes:
  %lane = phi i64 [ 0, %entry ], [ %next_lane, %lane_done ]
  %has_lane = icmp slt i64 %lane, %count
  br i1 %has_lane, label %lane_start, label %exit
lane_start:
  %query = add i64 %first, %lane
  %node = udiv i64 %query, %group
  %row_node = add i64 %row_nodes, %node
  %bits_offset = mul i64 %row_node, %words
  %bits = getelementptr i32, ptr %visible, i64 %bits_offset
  %column = getelementptr float, ptr %scores, i64 %lane
  br label %keys
keys:
  %key = phi i64 [ 0, %lane_start ], [ %next_key, %key_done ]
  %word_index = lshr i64 %key, 5
  %word = call i64 @int(ptr %bits, i64 %word_index)
  %shift = and i64 %key, 31
  %shifted = lshr i64 %word, %shift
  %bit = and i64 %shifted, 1
  %is_seen = icmp eq i64 %bit, 1
  br i1 %is_seen, label %key_done, label %unseen
unseen:
  %position = add i64 %length, %key
  %to_offset = mul i64 %position, {unit.lanes}
  %to = getelementptr float, ptr %column, i64 %to_offset
  store float 0xFFF0000000000000, ptr %to
  br label %key_done
key_done:
  %next_key = add i64 %key, 1
  %has_key = icmp slt i64 %next_key, %block_keys
  br i1 %has_key, label %keys, label %lane_done
lane_done:
  %next_lane = add i64 %lane, 1
  br label %lanes
exit:
  ret void
}}"""


def _weigh(unit: VectorUnit) -> str:
    lanes, vector = unit.lanes, f"<{unit.lanes} x float>"
    return f"""
; scores become e^(score - peak), and their sums are kept
define internal void @weigh(ptr %tile, i64 %keys) {{
entry:
  %scores = call ptr @pointer(ptr %tile, i64 {Tile.SCORES})
  %sums = call ptr @pointer(ptr %tile, i64 {Tile.SUMS})
  %start = load {vector}, ptr %scores, align 4
  br label %peaks
peaks:
  %i = phi i64 [ 0, %entry ], [ %next_i, %peaks ]
  %peak = phi {vector} [ %start, %entry ], [ %higher, %peaks ]
  %i_offset = mul i64 %i, {lanes}
  %at = getelementptr float, ptr %scores, i64 %i_offset
  %score = load {vector}, ptr %at, align 4
  %is_higher = fcmp ogt {vector} %score, %peak
  %higher = select <{lanes} x i1> %is_higher, {vector} %score, {vector} %peak
  %next_i = add i64 %i, 1
  %has_i = icmp slt i64 %next_i, %keys
  br i1 %has_i, label %peaks, label %weights
weights:
  %j = phi i64 [ 0, %peaks ], [ %next_j, %weights ]
  %total = phi {vector} [ zeroinitializer, %peaks ], [ %more, %weights ]
  %j_offset = mul i64 %j, {lanes}
  %to = getelementptr float, ptr %scores, i64 %j_offset
  %old = load {vector}, ptr %to, align 4
  %below = fsub {vector} %old, %higher
  %weight = call {vector} @exponential({vector} %below)
  store {vector} %weight, ptr %to, align 4
  %more = fadd {vector} %total, %weight
  %next_j = add i64 %j, 1
  %has_j = icmp slt i64 %next_j, %keys
  br i1 %has_j, label %weights, label %exit
exit:
  store {vector} %more, ptr %sums, align 4
  ret void
}}"""


def _mix(unit: VectorUnit) -> str:
    return f"""
; adds the weighted values of some keys to every query's sum; `sums` has a row [D] for each
define internal void @mix_some(ptr %tile, ptr %weights, ptr %values, i64 %stride, i64 %keys, ptr %mixed) {{
entry:
  %job = call ptr @pointer(ptr %tile, i64 {Tile.JOB})
  %count = call i64 @word(ptr %tile, i64 {Tile.COUNT})
  %dim = call i64 @word(ptr %job, i64 {Sizes.DIM})
  br label %columns
columns:
  %column = phi i64 [ 0, %entry ], [ %next, %columns ]
  %from = getelementptr float, ptr %values, i64 %column
  %to = getelementptr float, ptr %mixed, i64 %column
  call void @all_values(i64 %count, ptr %weights, i64 1, ptr %from, i64 %stride, i64 %keys, ptr %to, i64 %dim,
    i64 {unit.lanes})
  %next = add i64 %column, {unit.lanes}
  %has_more = icmp slt i64 %next, %dim
  br i1 %has_more, label %columns, label %exit
exit:
  ret void
}}
define internal void @mix(ptr %tile, ptr %mixed) {{
entry:
  %job = call ptr @pointer(ptr %tile, i64 {Tile.JOB})
  %weights = call ptr @pointer(ptr %tile, i64 {Tile.SCORES})
  %length = call i64 @word(ptr %tile, i64 {Tile.LENGTH})
  %page_size = call i64 @word(ptr %job, i64 {Sizes.PAGE_SIZE})
  %dim = call i64 @word(ptr %job, i64 {Sizes.DIM})
  %kv_heads = call i64 @word(ptr %job, i64 {Sizes.KV_HEADS})
  %block_keys = call i64 @word(ptr %job, i64 {Sizes.BLOCK_KEYS})
  %bytes = mul i64 %dim, {4 * unit.lanes}
  call void @llvm.memset.p0.i64(ptr %mixed, i8 0, i64 %bytes, i1 0)
  br label %head
head:
  %number = phi i64 [ 0, %entry ], [ %next, %body ]
  %start = mul i64 %number, %page_size
  %left = sub i64 %length, %start
  %has_more = icmp sgt i64 %left, 0
  br i1 %has_more, label %body, label %block
body:
  %count = call i64 @llvm.smin.i64(i64 %left, i64 %page_size)
  %values = call ptr @page(ptr %tile, i64 {VALUE_POOL}, i64 %number)
  %offset = mul i64 %start, {unit.lanes}
  %from = getelementptr float, ptr %weights, i64 %offset
  call void @mix_some(ptr %tile, ptr %from, ptr %values, i64 %dim, i64 %count, ptr %mixed)
  %next = add i64 %number, 1
  br label %head
block:
  %own = call ptr @own(ptr %tile, i64 {VALUES})
  %stride = mul i64 %kv_heads, %dim
  %own_offset = mul i64 %length, {unit.lanes}
  %own_from = getelementptr float, ptr %weights, i64 %own_offset
  call void @mix_some(ptr %tile, ptr %own_from, ptr %own, i64 %stride, i64 %block_keys, ptr %mixed)
  ret void
}}"""


def _write() -> str:
    return f"""
; divides by the sums of weights, into the result
define internal void @write(ptr %tile, ptr %mixed) {{
entry:
  %job = call ptr @pointer(ptr %tile, i64 {Tile.JOB})
  %result = call ptr @pointer(ptr %job, i64 {Sizes.DATA + 9})
  %sums = call ptr @pointer(ptr %tile, i64 {Tile.SUMS})
  %count = call i64 @word(ptr %tile, i64 {Tile.COUNT})
  %dim = call i64 @word(ptr %job, i64 {Sizes.DIM})
  br label %lanes
lanes:
  %lane = phi i64 [ 0, %entry ], [ %next_lane, %lane_done ]
  %has_lane = icmp slt i64 %lane, %count
  br i1 %has_lane, label %lane_start, label %exit
lane_start:
  %sum_at = getelementptr float, ptr %sums, i64 %lane
  %sum = load float, ptr %sum_at
  %mixed_offset = mul i64 %lane, %dim
  %from_row = getelementptr float, ptr %mixed, i64 %mixed_offset
  %offset = call i64 @place(ptr %tile, i64 %lane)
  %to_row = getelementptr float, ptr %result, i64 %offset
  br label %values
values:
  %d = phi i64 [ 0, %lane_start ], [ %next_d, %values ]
  %from = getelementptr float, ptr %from_row, i64 %d
  %value = load float, ptr %from
  %share = fdiv float %value, %sum
  %to = getelementptr float, ptr %to_row, i64 %d
  store float %share, ptr %to
  %next_d = add i64 %d, 1
  %has_more = icmp slt i64 %next_d, %dim
  br i1 %has_more, label %values, label %lane_done
lane_done:
  %next_lane = add i64 %lane, 1
  br label %lanes
exit:
  ret void
}}"""


def _chunk(unit: VectorUnit) -> str:
    return f"""
define internal void @chunk(ptr %job, i64 %index) {{
  %tile = alloca [{Tile.SIZE} x i64]
  %sums = alloca [{unit.lanes} x float]
  %tiles = call i64 @word(ptr %job, i64 {Sizes.TILES})
  %kv_heads = call i64 @word(ptr %job, i64 {Sizes.KV_HEADS})
  %nodes = call i64 @word(ptr %job, i64 {Sizes.NODES})
  %group = call i64 @word(ptr %job, i64 {Sizes.GROUP})
  %dim = call i64 @word(ptr %job, i64 {Sizes.DIM})
  %block_keys = call i64 @word(ptr %job, i64 {Sizes.BLOCK_KEYS})
  %number = urem i64 %index, %tiles
  %row_kv = udiv i64 %index, %tiles
  %row = udiv i64 %row_kv, %kv_heads
  %kv = urem i64 %row_kv, %kv_heads
  %first = mul i64 %number, {unit.lanes}
  %queries = mul i64 %nodes, %group
  %left = sub i64 %queries, %first
  %count = call i64 @llvm.smin.i64(i64 %left, i64 {unit.lanes})
  %lengths = call ptr @pointer(ptr %job, i64 {Sizes.DATA + PREFIX_LEN})
  %stated = call i64 @int(ptr %lengths, i64 %row)
  %table_width = call i64 @word(ptr %job, i64 {Sizes.TABLE_WIDTH})
  %page_size = call i64 @word(ptr %job, i64 {Sizes.PAGE_SIZE})
  %most = mul i64 %table_width, %page_size
  %length = call i64 @llvm.smin.i64(i64 %stated, i64 %most)
  %keys = add i64 %length, %block_keys
  %twice_dim = mul i64 %dim, 2
  %vectors = add i64 %keys, %twice_dim
  %bytes = mul i64 %vectors, {4 * unit.lanes}
  %room = call ptr @malloc(i64 %bytes)
  %dim_values = mul i64 %dim, {unit.lanes}
  %mixed = getelementptr float, ptr %room, i64 %dim_values
  %scores = getelementptr float, ptr %mixed, i64 %dim_values
  call void @set_pointer(ptr %tile, i64 {Tile.JOB}, ptr %job)
  call void @set_word(ptr %tile, i64 {Tile.ROW}, i64 %row)
  call void @set_word(ptr %tile, i64 {Tile.KV}, i64 %kv)
  call void @set_word(ptr %tile, i64 {Tile.FIRST}, i64 %first)
  call void @set_word(ptr %tile, i64 {Tile.COUNT}, i64 %count)
  call void @set_word(ptr %tile, i64 {Tile.LENGTH}, i64 %length)
  call void @set_pointer(ptr %tile, i64 {Tile.TURNED}, ptr %room)
  call void @set_pointer(ptr %tile, i64 {Tile.SCORES}, ptr %scores)
  call void @set_pointer(ptr %tile, i64 {Tile.SUMS}, ptr %sums)
  call void @turn(ptr %tile)
  call void @score(ptr %tile)
  call void @hide(ptr %tile)
  call void @weigh(ptr %tile, i64 %keys)
  call void @mix(ptr %tile, ptr %mixed)
  call void @write(ptr %tile, ptr %mixed)
  call void @free(ptr %room)
  ret void
}}"""


def _handler(name: str, unit: VectorUnit) -> str:
    sizes = {
        "ROWS": (QUERIES, 0),
        "NODES": (QUERIES, 1),
        "HEADS": (QUERIES, 2),
        "DIM": (QUERIES, 3),
        "BLOCK_KEYS": (KEYS, 1),
        "KV_HEADS": (KEYS, 2),
        "PAGES": (KEY_POOL, 1),
        "PAGE_SIZE": (KEY_POOL, 3),
        "TABLE_WIDTH": (TABLE, 1),
        "WORDS": (VISIBLE, 2),
    }
    reads = "\n".join(
        f"  %{size} = call i64 @argument_size(ptr %arguments, i64 {argument}, i64 {axis})\n"
        f"  call void @set_word(ptr %job, i64 {getattr(Sizes, size)}, i64 %{size})"
        for size, (argument, axis) in sizes.items()
    )
    data = "\n".join(
        f"  %buffer_{i} = call ptr @pointer(ptr {'%results' if i == 9 else '%arguments'}, i64 {i % 9})\n"
        f"  %data_{i} = call ptr @pointer(ptr %buffer_{i}, i64 {Buffer.DATA})\n"
        f"  call void @set_pointer(ptr %job, i64 {Sizes.DATA + i}, ptr %data_{i})"
        for i in range(10)
    )
    return f"""
define ptr @{name}(ptr %frame) {{
entry:
  %is_query = call i1 @answers(ptr %frame)
  br i1 %is_query, label %exit, label %call
call:
  %arguments = call ptr @pointer(ptr %frame, i64 {CallFrame.ARGUMENTS})
  %results = call ptr @pointer(ptr %frame, i64 {CallFrame.RESULTS})
  %job = call ptr @new_job(ptr %frame, ptr @chunk, i64 {Sizes.SIZE})
{reads}
{data}
  %group = udiv i64 %HEADS, %KV_HEADS
  call void @set_word(ptr %job, i64 {Sizes.GROUP}, i64 %group)
  %queries = mul i64 %NODES, %group
  %queries_up = add i64 %queries, {unit.lanes - 1}
  %tiles = udiv i64 %queries_up, {unit.lanes}
  call void @set_word(ptr %job, i64 {Sizes.TILES}, i64 %tiles)
  %heads = mul i64 %ROWS, %KV_HEADS
  %chunks = mul i64 %heads, %tiles
  call void @finish_job(ptr %job, i64 %chunks)
  br label %exit
exit:
  ret ptr null
}}"""
