"""GGUF files: every readable type against its definition, and files that cannot be read."""

import struct

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind
from gguf import GGUFWriter
from gguf.quants import dequantize, quantize

from jaxspec.loading.gguf_file import READABLE_TYPES, GGUFFile
from tests.loading.files import add_keys, finish, hf_config, random_tensors, write_gguf


def random_blocks(kind: Kind, rows: int, columns: int) -> np.ndarray:
    """Bytes of a valid quantised matrix, uint8 [rows, bytes]: any codes, with scales that are finite."""
    rng = np.random.default_rng(int(kind))
    try:
        return quantize(rng.standard_normal((rows, columns), np.float32), kind).view(np.uint8).reshape(rows, -1)
    except NotImplementedError:
        pass
    block_len, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    blocks = rng.integers(0, 256, (rows * columns // block_len, block_bytes), np.uint8)
    scales = {Kind.Q4_K: (0, 2), Kind.Q5_K: (0, 2), Kind.Q6_K: (208,), Kind.Q2_K: (80, 82), Kind.Q3_K: (108,)}
    for at in scales[kind]:
        scale = rng.standard_normal(len(blocks)).astype(np.float16)
        blocks[:, at : at + 2] = scale.view(np.uint8).reshape(-1, 2)
    return blocks.reshape(rows, -1)


def half(block: bytes, at: int) -> np.float32:
    return np.float32(struct.unpack_from("<e", block, at)[0])


def q8_0(block: bytes) -> list[np.float32]:
    return [half(block, 0) * np.float32(code) for code in struct.unpack_from("<32b", block, 2)]


def q4_0(block: bytes) -> list[np.float32]:
    codes = [byte & 15 for byte in block[2:]] + [byte >> 4 for byte in block[2:]]
    return [half(block, 0) * np.float32(code - 8) for code in codes]


def q4_1(block: bytes) -> list[np.float32]:
    codes = [byte & 15 for byte in block[4:]] + [byte >> 4 for byte in block[4:]]
    return [half(block, 0) * np.float32(code) + half(block, 2) for code in codes]


def q4_k(block: bytes) -> list[np.float32]:
    """Eight sub-blocks of 32 with 6-bit scales and minima, packed in 12 bytes."""
    packed, values = block[4:16], []
    for sub in range(8):
        if sub < 4:
            scale, low = packed[sub] & 63, packed[sub + 4] & 63
        else:
            scale = packed[sub + 4] & 15 | packed[sub - 4] >> 6 << 4
            low = packed[sub + 4] >> 4 | packed[sub] >> 6 << 4
        codes = block[16 + sub // 2 * 32 :][:32]
        nibbles = [byte >> 4 if sub % 2 else byte & 15 for byte in codes]
        factor, offset = half(block, 0) * np.float32(scale), half(block, 2) * np.float32(low)
        values += [factor * np.float32(code) - offset for code in nibbles]
    return values


def q6_k(block: bytes) -> list[np.float32]:
    """Two halves of 128; four low bits in 64 bytes, two high bits in 32, a signed scale for each 16."""
    values = []
    scales = struct.unpack_from("<16b", block, 192)
    for part in range(2):
        low, high = block[64 * part :][:64], block[128 + 32 * part :][:32]
        for quarter in range(4):
            for i in range(32):
                byte = low[i + 32 * (quarter % 2)]
                code = (byte >> 4 if quarter >= 2 else byte & 15) | (high[i] >> 2 * quarter & 3) << 4
                scale = scales[8 * part + 2 * quarter + i // 16]
                values.append(half(block, 208) * np.float32(scale) * np.float32(code - 32))
    return values


@pytest.mark.parametrize(
    ("kind", "definition"),
    [(Kind.Q8_0, q8_0), (Kind.Q4_0, q4_0), (Kind.Q4_1, q4_1), (Kind.Q4_K, q4_k), (Kind.Q6_K, q6_k)],
)
def test_a_quantised_tensor_reads_as_its_definition_says(tmp_path, kind, definition):
    stored = random_blocks(kind, 3, 512)
    values = write_and_read(tmp_path, stored, kind)
    size = gguf.GGML_QUANT_SIZES[kind][1]
    blocks = [row[at : at + size].tobytes() for row in stored for at in range(0, len(row), size)]
    expected = np.array([definition(block) for block in blocks]).reshape(3, 512)
    np.testing.assert_allclose(values, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kind", READABLE_TYPES, ids=lambda kind: kind.name)
def test_reading_in_chunks_equals_reading_at_once(tmp_path, kind):
    stored = random_blocks(kind, 550, 512)  # more than two chunks, the last one short
    values = write_and_read(tmp_path, stored, kind)
    np.testing.assert_array_equal(values, dequantize(stored, kind))
    assert values.dtype == np.float32


@pytest.mark.parametrize("kind", [Kind.F32, Kind.F16, Kind.BF16])
def test_plain_floats_keep_their_values(tmp_path, kind):
    values = np.array([[0.0, -0.0, 1.0, -2.5, 1 / 3, 6e-5, 65504.0, 1e-3]], np.float32)
    read = write_and_read(tmp_path, quantize(values, kind).view(np.uint8), kind)
    np.testing.assert_allclose(read, values, rtol={Kind.F32: 0, Kind.F16: 1e-3, Kind.BF16: 1e-2}[kind])


def write_and_read(tmp_path, stored: np.ndarray, kind: Kind) -> np.ndarray:
    """The tensor through a file, between two others so that its offset is not 0."""
    writer = GGUFWriter(tmp_path / "x.gguf", "llama")
    writer.add_tensor("before", np.ones(3, np.float32))
    writer.add_tensor("middle", stored, raw_dtype=kind)
    writer.add_tensor("after", np.ones(3, np.float32))
    finish(writer)
    file = GGUFFile(tmp_path / "x.gguf")
    np.testing.assert_array_equal(file.read("after"), 1)
    return file.read("middle")


@pytest.mark.parametrize("alignment", [None, 64])
def test_metadata_of_every_kind_is_read(tmp_path, alignment):
    writer = GGUFWriter(tmp_path / "x.gguf", "llama")
    if alignment:
        writer.add_custom_alignment(alignment)
    said = {
        "a.bool": True,
        "a.int": 7,
        "a.float": 0.5,
        "a.text": "héllo",
        "a.ints": [1, -2],
        "a.floats": [0.5, 2.0],
        "a.texts": ["x", "", "日本"],
    }
    add_keys(writer, said)
    writer.add_uint64("a.wide", 1 << 40)
    writer.add_int8("a.small", -3)
    writer.add_tensor("t", np.arange(6, dtype=np.float32).reshape(2, 3))
    finish(writer)
    file = GGUFFile(tmp_path / "x.gguf")
    for key, value in {**said, "a.wide": 1 << 40, "a.small": -3}.items():
        assert file.metadata[key] == value
    np.testing.assert_array_equal(file.read("t"), [[0, 1, 2], [3, 4, 5]])


@pytest.mark.parametrize("kind", [Kind.IQ4_NL, Kind.I8])
def test_another_type_is_an_error_that_names_tensor_and_type(tmp_path, kind):
    writer = GGUFWriter(tmp_path / "x.gguf", "llama")
    block_bytes = gguf.GGML_QUANT_SIZES[kind][1]
    writer.add_tensor("blk.0.ffn_up.weight", np.zeros((2, block_bytes), np.uint8), raw_dtype=kind)
    finish(writer)
    with pytest.raises(ValueError, match=f"blk.0.ffn_up.weight has type {kind.name}; readable are F32"):
        GGUFFile(tmp_path / "x.gguf")


def test_a_cut_off_file_is_an_error_wherever_it_ends(tmp_path):
    config = hf_config()
    path = write_gguf(tmp_path / "x.gguf", config, random_tensors(config))
    whole = path.read_bytes()
    cuts = [4, 30, 100, 400, 1000, len(whole) // 2, len(whole) - 200]
    for cut in cuts:
        path.write_bytes(whole[:cut])
        with pytest.raises(ValueError, match=r"cut off|not a GGUF file"):
            GGUFFile(path)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "not a GGUF file: it has 0 bytes"),
        (b"PK" + bytes(100), "does not begin with 'GGUF'"),
        (b"GGUF" + struct.pack("<I", 1) + bytes(100), "version 1"),
        (b"GGUF" + struct.pack(">I", 3) + bytes(100), "little-endian"),
    ],
)
def test_another_kind_of_file_is_an_error(tmp_path, content, said):
    (tmp_path / "x.gguf").write_bytes(content)
    with pytest.raises(ValueError, match=said):
        GGUFFile(tmp_path / "x.gguf")


def test_a_part_of_a_split_file_is_an_error(tmp_path):
    writer = GGUFWriter(tmp_path / "x.gguf", "llama")
    writer.add_uint16("split.count", 3)
    finish(writer)
    with pytest.raises(ValueError, match="one of 3 parts"):
        GGUFFile(tmp_path / "x.gguf")


def test_an_array_of_arrays_is_an_error_however_deep(tmp_path):
    key = b"deep"
    head = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", len(key)) + key
    (tmp_path / "x.gguf").write_bytes(head + struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 5000)
    with pytest.raises(ValueError, match=r"x.gguf: metadata at byte \d+ is an array of arrays"):
        GGUFFile(tmp_path / "x.gguf")


def test_a_tensor_larger_than_any_file_is_an_error(tmp_path):
    name = b"t"
    head = b"GGUF" + struct.pack("<IQQ", 3, 1, 0) + struct.pack("<Q", len(name)) + name
    # Two sides whose product wraps around 64 bits.
    head += struct.pack("<IQQIQ", 2, 2**33, 2**33, 0, 0)
    (tmp_path / "x.gguf").write_bytes(head + bytes(64))
    with pytest.raises(ValueError, match=r"x.gguf is cut off: tensor t ends at byte"):
        GGUFFile(tmp_path / "x.gguf")
