"""Where XLA's typed FFI keeps what a handler reads: indices into its C structs, from `xla/ffi/api/c_api.h`.

Indices count words of 8 bytes, those of 32-bit fields count 4.
"""


class Version:
    """Of the interface that these indices are those of."""

    MAJOR, MINOR = 0, 3


class CallFrame:
    """XLA_FFI_CallFrame, with the arguments' and results' structs in it."""

    EXTENSION, API, CONTEXT = 1, 2, 3
    ARGUMENTS = 9  # args.args
    NUM_RESULTS, RESULTS = 12, 14  # rets.size, rets.rets


class Buffer:
    """XLA_FFI_Buffer."""

    DATA, SIZES = 3, 5


class Api:
    """XLA_FFI_Api: functions."""

    ERROR_DESTROY, SCHEDULE, NUM_THREADS = 8, 17, 18


class Metadata:
    """XLA_FFI_Metadata, and where the extension of the metadata query points to it."""

    OF_EXTENSION = 3
    MAJOR, MINOR, TRAITS = 6, 7, 8  # 32-bit


def metadata_source() -> str:
    """IR of `answers`: whether a call is XLA's question, at registration, which version a handler is written for."""
    return f"""
define internal i1 @answers(ptr %frame) {{
entry:
  %extension = call ptr @pointer(ptr %frame, i64 {CallFrame.EXTENSION})
  %is_call = icmp eq ptr %extension, null
  br i1 %is_call, label %call, label %query
call:
  ret i1 0
query:
  %metadata = call ptr @pointer(ptr %extension, i64 {Metadata.OF_EXTENSION})
  %major = getelementptr i32, ptr %metadata, i64 {Metadata.MAJOR}
  store i32 {Version.MAJOR}, ptr %major
  %minor = getelementptr i32, ptr %metadata, i64 {Metadata.MINOR}
  store i32 {Version.MINOR}, ptr %minor
  %traits = getelementptr i32, ptr %metadata, i64 {Metadata.TRAITS}
  store i32 0, ptr %traits
  ret i1 1
}}"""
