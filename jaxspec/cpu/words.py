"""Reading and writing structs by the index of a word of 8 bytes, and 32-bit integers, as LLVM IR."""


def words_source() -> str:
    """IR of `word`, `pointer`, `set_word` and `set_pointer`, and of `int`, which reads 32 bits."""
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
    parts.append("""
define internal i64 @int(ptr %base, i64 %index) {
  %at = getelementptr i32, ptr %base, i64 %index
  %value = load i32, ptr %at
  %wide = sext i32 %value to i64
  ret i64 %wide
}""")
    return "\n".join(parts)


def read_words(base: str, struct: type, *names: str) -> str:
    """IR that reads fields of a struct, given by the class of their indices: %name is the word struct.NAME of %base."""
    return _reads("i64 @word", base, struct, names)


def read_pointers(base: str, struct: type, *names: str) -> str:
    """The same for fields that are pointers."""
    return _reads("ptr @pointer", base, struct, names)


def _reads(function: str, base: str, struct: type, names: tuple[str, ...]) -> str:
    indices = {name: getattr(struct, name.upper()) for name in names}
    return "\n".join(f"  %{name} = call {function}(ptr %{base}, i64 {index})" for name, index in indices.items())
