"""One chunk of attention, as LLVM IR: where its queries, keys, values and results lie.

A chunk is one row, one kv head, and as many of its queries (nodes x query heads of the kv head) as a vector has lanes.
"""

from jaxspec.cpu.host import VectorUnit
from jaxspec.cpu.job import Job
from jaxspec.cpu.words import read_words

# The handler's arguments, then its result.
QUERIES, KEYS, VALUES, KEY_POOL, VALUE_POOL, LAYER, TABLE, PREFIX_LEN, VISIBLE, RESULT = range(10)


class Sizes:
    """Words behind a job's own: sizes, and the buffers' data."""

    ROWS, NODES, HEADS, DIM, BLOCK_KEYS, KV_HEADS, PAGES, PAGE_SIZE, TABLE_WIDTH, WORDS, GROUP, TILES = range(
        Job.SIZE, Job.SIZE + 12
    )
    DATA = Job.SIZE + 12  # one word for each argument, and one for the result
    SIZE = 12 + RESULT + 1


class Tile:
    """Words of what a thread has at hand for one chunk. SEEN: keys of the block up to the last that a query sees."""

    JOB, ROW, KV, FIRST, COUNT, LENGTH, SEEN, TURNED, SCORES, SUMS = range(10)
    SIZE = 10


# What goes before and after the work on one of a tile's queries, which branches to lane_done; then comes exit.
LANES = """lanes:
  %lane = phi i64 [ 0, %entry ], [ %next_lane, %lane_done ]
  %has_lane = icmp slt i64 %lane, %count
  br i1 %has_lane, label %lane_start, label %exit
lane_start:"""
NEXT_LANE = """lane_done:
  %next_lane = add i64 %lane, 1
  br label %lanes
exit:"""


def tile_source(unit: VectorUnit) -> str:
    """IR of `page`, `own`, `turn` and `write`."""
    memset = "declare void @llvm.memset.p0.i64(ptr, i8, i64, i1)"
    return "\n".join([memset, _page(), _own(), _place(), _turn(unit), _write()])


def _page() -> str:
    return f"""
; where a page of a pool begins for a tile's row and kv head
define internal ptr @page(ptr %tile, i64 %pool_index, i64 %number) {{
  %job = call ptr @pointer(ptr %tile, i64 {Tile.JOB})
{read_words("tile", Tile, "row", "kv")}
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
{read_words("job", Sizes, "pages", "kv_heads", "page_size", "dim")}
  %layer_pages = mul i64 %layer, %pages
  %index = add i64 %layer_pages, %page
  %index_heads = mul i64 %index, %kv_heads
  %head = add i64 %index_heads, %kv
  %head_tokens = mul i64 %head, %page_size
  %offset = mul i64 %head_tokens, %dim
  %at = getelementptr float, ptr %pool, i64 %offset
  ret ptr %at
}}"""


def _own() -> str:
    return f"""
; the first of a tile's keys or values in the block
define internal ptr @own(ptr %tile, i64 %argument) {{
  %job = call ptr @pointer(ptr %tile, i64 {Tile.JOB})
{read_words("tile", Tile, "row", "kv")}
  %word = add i64 %argument, {Sizes.DATA}
  %data = call ptr @pointer(ptr %job, i64 %word)
  %keys = call i64 @word(ptr %job, i64 {Sizes.BLOCK_KEYS})
{read_words("job", Sizes, "kv_heads", "dim")}
  %row_keys = mul i64 %row, %keys
  %row_heads = mul i64 %row_keys, %kv_heads
  %head = add i64 %row_heads, %kv
  %offset = mul i64 %head, %dim
  %at = getelementptr float, ptr %data, i64 %offset
  ret ptr %at
}}"""


def _place() -> str:
    return f"""
; where a lane's query is, and its result
define internal i64 @place(ptr %tile, i64 %lane) {{
  %job = call ptr @pointer(ptr %tile, i64 {Tile.JOB})
{read_words("tile", Tile, "row", "kv", "first")}
{read_words("job", Sizes, "nodes", "heads", "group", "dim")}
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
{LANES}
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
{NEXT_LANE}
  ret void
}}"""


def _write() -> str:
    return f"""
; divides by the sums of weights, into the result
define internal void @write(ptr %tile, ptr %mixed) {{
entry:
  %job = call ptr @pointer(ptr %tile, i64 {Tile.JOB})
  %result = call ptr @pointer(ptr %job, i64 {Sizes.DATA + RESULT})
  %sums = call ptr @pointer(ptr %tile, i64 {Tile.SUMS})
  %count = call i64 @word(ptr %tile, i64 {Tile.COUNT})
  %dim = call i64 @word(ptr %job, i64 {Sizes.DIM})
  br label %lanes
{LANES}
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
{NEXT_LANE}
  ret void
}}"""
