"""The embedded model as llama.cpp takes it, in float32 and in Q8_0."""

from collections.abc import Iterator
from pathlib import Path

import gguf
import numpy as np

from jaxspec.loading.embedded import find_embedded_model

_SKIPPED = ("general.architecture", "general.file_type")  # the writer has them from elsewhere


def write_embedded_gguf(folder: Path) -> Iterator[Path]:
    """Writes f32.gguf and q8_0.gguf; norms are float32 in both.

    Raises:
        FileNotFoundError: the embedded model is not installed.
    """
    reader = gguf.GGUFReader(find_embedded_model())
    folder.mkdir(parents=True, exist_ok=True)
    for name, kind in (("f32", gguf.LlamaFileType.ALL_F32), ("q8_0", gguf.LlamaFileType.MOSTLY_Q8_0)):
        path = folder / f"{name}.gguf"
        writer = gguf.GGUFWriter(path, reader.fields["general.architecture"].contents())
        for field in reader.fields.values():
            if not field.name.startswith("GGUF.") and field.name not in _SKIPPED:
                inner = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
                writer.add_key_value(field.name, field.contents(), field.types[0], sub_type=inner)
        writer.add_file_type(kind)
        for tensor in reader.tensors:
            values = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
            if kind == gguf.LlamaFileType.MOSTLY_Q8_0 and values.ndim == 2:
                rounded = gguf.quants.quantize(values, gguf.GGMLQuantizationType.Q8_0)
                writer.add_tensor(tensor.name, rounded, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
            else:
                writer.add_tensor(tensor.name, values)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        yield path
