"""Attention of a block of nodes over pages and itself, as LLVM IR.

Every sum runs over the keys in the order of their positions, first the pages and then the block, and a key that a query
may not see counts as nothing. A query's result therefore does not depend on which of its keys are in pages and which in
the block, nor on its neighbours: bit for bit, a draft that is verified sees what a token that is decoded sees.
"""

from jaxspec.cpu.call_frame import Buffer, CallFrame, metadata_source
from jaxspec.cpu.host import VectorUnit
from jaxspec.cpu.job import job_source
from jaxspec.cpu.microkernel import declarations
from jaxspec.cpu.softmax import softmax_source
from jaxspec.cpu.tile import KEY_POOL, KEYS, PREFIX_LEN, QUERIES, RESULT, TABLE, VISIBLE, Sizes, Tile, tile_source
from jaxspec.cpu.words import read_pointers, read_words, words_source


def attention_source(unit: VectorUnit, name: str) -> str:
    """IR of a module whose function `name` is the handler; head sizes are multiples of the unit's lanes.

    Its arguments: queries f32 [B, N, H, D], scaled; keys and values f32 [B, M, K, D]; their pools f32
    [L, pages, K, page_size, D]; the layer i32; the table i32 [B, pages of a row]; prefix lengths i32 [B]; ancestor bits
    u32 [B, N, words]. Its result: f32 [B, N, H, D].
    """
    return "\n".join(
        [
            declarations(unit),
            words_source(),
            metadata_source(),
            job_source(unit),
            tile_source(unit),
            softmax_source(unit),
            _argument_size(),
            _chunk(unit),
            _handler(name, unit),
        ]
    )


def _argument_size() -> str:
    return f"""
define internal i64 @argument_size(ptr %arguments, i64 %argument, i64 %axis) {{
  %buffer = call ptr @pointer(ptr %arguments, i64 %argument)
  %sizes = call ptr @pointer(ptr %buffer, i64 {Buffer.SIZES})
  %size = call i64 @word(ptr %sizes, i64 %axis)
  ret i64 %size
}}"""


def _chunk(unit: VectorUnit) -> str:
    return f"""
define internal void @chunk(ptr %job, i64 %index) {{
  %tile = alloca [{Tile.SIZE} x i64]
  %sums = alloca [{unit.lanes} x float]
{read_words("job", Sizes, "tiles", "kv_heads", "nodes", "group", "dim", "block_keys")}
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
{read_words("job", Sizes, "table_width", "page_size")}
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
  %seen = call i64 @seen(ptr %tile)
  call void @set_word(ptr %tile, i64 {Tile.SEEN}, i64 %seen)
  %keys_seen = add i64 %length, %seen
  call void @turn(ptr %tile)
  call void @score(ptr %tile)
  call void @hide(ptr %tile)
  call void @weigh(ptr %tile, i64 %keys_seen)
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
        f"  %buffer_{i} = call ptr @pointer(ptr {'%results' if i == RESULT else '%arguments'}, i64 {i % RESULT})\n"
        f"  %data_{i} = call ptr @pointer(ptr %buffer_{i}, i64 {Buffer.DATA})\n"
        f"  call void @set_pointer(ptr %job, i64 {Sizes.DATA + i}, ptr %data_{i})"
        for i in range(RESULT + 1)
    )
    return f"""
define ptr @{name}(ptr %frame) {{
entry:
  %is_query = call i1 @answers(ptr %frame)
  br i1 %is_query, label %exit, label %call
call:
{read_pointers("frame", CallFrame, "arguments", "results")}
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
