"""e^x of a vector, as LLVM IR: for the weights of a softmax, whose x is at most 0."""

import struct

from jaxspec.cpu.host import VectorUnit

# Below this e^x is taken as 0: close to the smallest normal float32.
LOWEST = -87.0
# e^r for |r| <= log(2) / 2, highest power first (the Taylor series to r^6, whose next term is below a rounding).
COEFFICIENTS = (1 / 720, 1 / 120, 1 / 24, 1 / 6, 1 / 2, 1.0, 1.0)
# log(2) in two parts, the first with few enough bits that its multiples are exact.
LOG2_HIGH, LOG2_LOW, LOG2_E = 0.693359375, -2.12194440e-4, 1.44269504088896341


def exponential_source(unit: VectorUnit) -> str:
    """IR of `exponential`, of one vector."""
    lanes, vector, integers = unit.lanes, f"<{unit.lanes} x float>", f"<{unit.lanes} x i32>"
    high = f"fmul {vector} %n, {splat(lanes, -LOG2_HIGH)}"
    low = f"fmul {vector} %n, {splat(lanes, -LOG2_LOW)}"
    steps, last = [], splat(lanes, COEFFICIENTS[0])
    for power, coefficient in enumerate(COEFFICIENTS[1:]):
        steps.append(f"  %product_{power} = fmul {vector} {last}, %r")
        steps.append(f"  %poly_{power} = fadd {vector} %product_{power}, {splat(lanes, coefficient)}")
        last = f"%poly_{power}"
    polynomial = "\n".join(steps)
    return f"""
declare {vector} @llvm.rint.v{lanes}f32({vector})
define internal {vector} @exponential({vector} %x) {{
  %is_none = fcmp olt {vector} %x, {splat(lanes, LOWEST)}
  %bounded = select <{lanes} x i1> %is_none, {vector} zeroinitializer, {vector} %x
  %turns = fmul {vector} %bounded, {splat(lanes, LOG2_E)}
  %n = call {vector} @llvm.rint.v{lanes}f32({vector} %turns)
  %high = {high}
  %low = {low}
  %r_high = fadd {vector} %bounded, %high
  %r = fadd {vector} %r_high, %low
{polynomial}
  %n_int = fptosi {vector} %n to {integers}
  %biased = add {integers} %n_int, {splat(lanes, 127)}
  %bits = shl {integers} %biased, {splat(lanes, 23)}
  %power = bitcast {integers} %bits to {vector}
  %value = fmul {vector} {last}, %power
  %result = select <{lanes} x i1> %is_none, {vector} zeroinitializer, {vector} %value
  ret {vector} %result
}}"""


def splat(lanes: int, value: float | int) -> str:
    """A vector constant whose elements are equal."""
    if isinstance(value, int):
        return f"<{', '.join([f'i32 {value}'] * lanes)}>"
    # LLVM takes a float as the hexadecimal digits of the double that it equals.
    digits = struct.pack(">d", struct.unpack("f", struct.pack("f", value))[0]).hex().upper()
    return f"<{', '.join([f'float 0x{digits}'] * lanes)}>"
