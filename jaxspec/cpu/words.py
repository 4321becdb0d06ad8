"""Reading and writing structs by the index of a word of 8 bytes, as LLVM IR."""


def words_source() -> str:
    """IR of `word`, `pointer`, `set_word` and `set_pointer`."""
    parts = ["declare i64 @llvm.smin.i64(i64, i64)\ndeclare i64 @llvm.smax.i64(i64, i64)"]
    for kind, name in (("i64", "word"), ("ptr", "pointer")):
        parts.append(f"""
define internal {kind} @{name}(ptr %base, i64 %index) {{
  %at = getelementptr i64, ptr %base, i64 %index
  %value = load {kind}, ptr %at
  ret {kind} %value
}}
define internal void @set_{name}(ptr %base, i64 %index, {kind} %value) {{
  %at = getelementptr i64, ptr %base, i64 %index
  store {kind} %value, ptr %at
  ret void
}}""")
    return "\n".join(parts)
