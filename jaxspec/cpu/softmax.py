"""The arithmetic of one chunk of attention, as LLVM IR: scores, weights, and the mixture of values.

Scores stand in a column for each query: for each key in turn, a vector of the queries' scores.
"""

from jaxspec.cpu.exponential import exponential_source
from jaxspec.cpu.host import VectorUnit
from jaxspec.cpu.microkernel import Form, blocks_source, microkernel_source
from jaxspec.cpu.tile import KEY_POOL, KEYS, LANES, NEXT_LANE, VALUE_POOL, VALUES, VISIBLE, Sizes, Tile
from jaxspec.cpu.words import read_pointers, read_words

# Keys, or queries, that one call of a microkernel takes.
ROW_BLOCK = 8


def softmax_source(unit: VectorUnit) -> str:
    """IR of `seen`, `score`, `hide`, `weigh` and `mix`."""
    forms = Form("scores", 1), Form("values", 1, x_step=unit.lanes, adds=True)
    kernels = [microkernel_source(unit, form, rows) for form in forms for rows in range(1, ROW_BLOCK + 1)]
    blocks = [blocks_source(form, ROW_BLOCK) for form in forms]
    steps = [_bits(), _seen(), _score(unit), _hide(unit), _weigh(unit), _mix_some(unit), _mix(unit)]
    return "\n".join([*kernels, *blocks, exponential_source(unit), *steps])


def _bits() -> str:
    return f"""
; a lane's ancestor bits
define internal ptr @bits(ptr %tile, i64 %lane) {{
  %job = call ptr @pointer(ptr %tile, i64 {Tile.JOB})
{read_words("tile", Tile, "row", "first")}
  %visible = call ptr @pointer(ptr %job, i64 {Sizes.DATA + VISIBLE})
{read_words("job", Sizes, "nodes", "group", "words")}
  %query = add i64 %first, %lane
  %node = udiv i64 %query, %group
  %row_nodes = mul i64 %row, %nodes
  %row_node = add i64 %row_nodes, %node
  %offset = mul i64 %row_node, %words
  %at = getelementptr i32, ptr %visible, i64 %offset
  ret ptr %at
}}"""


def _seen() -> str:
    return f"""
; keys of the block up to the last word of bits that is not empty for some lane: of a causal block, half on average
define internal i64 @seen(ptr %tile) {{
entry:
  %job = call ptr @pointer(ptr %tile, i64 {Tile.JOB})
  %count = call i64 @word(ptr %tile, i64 {Tile.COUNT})
{read_words("job", Sizes, "words", "block_keys")}
  br label %lanes
lanes:
  %lane = phi i64 [ 0, %entry ], [ %next_lane, %lane_done ]
  %most = phi i64 [ 0, %entry ], [ %more, %lane_done ]
  %has_lane = icmp slt i64 %lane, %count
  br i1 %has_lane, label %lane_start, label %exit
lane_start:
  %bits = call ptr @bits(ptr %tile, i64 %lane)
  br label %back
back:
  %left = phi i64 [ %words, %lane_start ], [ %index, %back_next ]
  %has_word = icmp sgt i64 %left, 0
  br i1 %has_word, label %back_next, label %lane_done
back_next:
  %index = sub i64 %left, 1
  %word = call i64 @int(ptr %bits, i64 %index)
  %is_empty = icmp eq i64 %word, 0
  br i1 %is_empty, label %back, label %lane_done
lane_done:
  %own = mul i64 %left, 32
  %more = call i64 @llvm.smax.i64(i64 %most, i64 %own)
  %next_lane = add i64 %lane, 1
  br label %lanes
exit:
  %keys = call i64 @llvm.smin.i64(i64 %most, i64 %block_keys)
  ret i64 %keys
}}"""


def _score(unit: VectorUnit) -> str:
    return f"""
define internal void @score(ptr %tile) {{
entry:
{read_pointers("tile", Tile, "job", "turned", "scores")}
  %length = call i64 @word(ptr %tile, i64 {Tile.LENGTH})
{read_words("job", Sizes, "page_size", "dim", "kv_heads")}
  %seen = call i64 @word(ptr %tile, i64 {Tile.SEEN})
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
  call void @all_scores(i64 %seen, ptr %own, i64 %stride, ptr %turned, i64 {unit.lanes}, i64 %dim, ptr %own_to,
    i64 {unit.lanes}, i64 {unit.lanes})
  ret void
}}"""


def _hide(unit: VectorUnit) -> str:
    return f"""
; -inf for the block's keys that a query may not see
define internal void @hide(ptr %tile) {{
entry:
{read_words("tile", Tile, "count", "length", "seen")}
  %scores = call ptr @pointer(ptr %tile, i64 {Tile.SCORES})
  br label %lanes
{LANES}
  %bits = call ptr @bits(ptr %tile, i64 %lane)
  %column = getelementptr float, ptr %scores, i64 %lane
  br label %keys
keys:
  %key = phi i64 [ 0, %lane_start ], [ %after_word, %whole ], [ %next_key, %key_done ]
  %has_key = icmp slt i64 %key, %seen
  br i1 %has_key, label %look, label %lane_done
look:
  %word_index = lshr i64 %key, 5
  %word = call i64 @int(ptr %bits, i64 %word_index)
  %shift = and i64 %key, 31
  %is_first = icmp eq i64 %shift, 0
  %is_full = icmp eq i64 %word, -1
  %is_skipped = and i1 %is_first, %is_full
  br i1 %is_skipped, label %whole, label %one
whole:
  %after_word = add i64 %key, 32
  br label %keys
one:
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
  br label %keys
{NEXT_LANE}
  ret void
}}"""


def _weigh(unit: VectorUnit) -> str:
    lanes, vector = unit.lanes, f"<{unit.lanes} x float>"
    return f"""
; scores become e^(score - peak), and their sums are kept
define internal void @weigh(ptr %tile, i64 %keys) {{
entry:
{read_pointers("tile", Tile, "scores", "sums")}
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


def _mix_some(unit: VectorUnit) -> str:
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
}}"""


def _mix(unit: VectorUnit) -> str:
    return f"""
define internal void @mix(ptr %tile, ptr %mixed) {{
entry:
  %job = call ptr @pointer(ptr %tile, i64 {Tile.JOB})
  %weights = call ptr @pointer(ptr %tile, i64 {Tile.SCORES})
  %length = call i64 @word(ptr %tile, i64 {Tile.LENGTH})
{read_words("job", Sizes, "page_size", "dim", "kv_heads")}
  %seen = call i64 @word(ptr %tile, i64 {Tile.SEEN})
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
  call void @mix_some(ptr %tile, ptr %own_from, ptr %own, i64 %stride, i64 %seen, ptr %mixed)
  ret void
}}"""
