"""One tensor of a file as an array, without reading the file."""

from pathlib import Path

import numpy as np
import numpy.typing as npt


def map_tensor(path: Path, dtype: npt.DTypeLike, shape: tuple[int, ...], offset: int, num_bytes: int) -> np.ndarray:
    """The bytes [offset, offset + num_bytes) of a file as a read-only array [*shape].

    Each tensor is a mapping of its own, which goes when the array goes. A mapping of the whole file would keep every
    page that was ever touched resident, and a load would look, and under a memory limit be, twice as large.
    """
    if num_bytes == 0:
        return np.zeros(shape, dtype)
    mapped = np.memmap(path, np.uint8, mode="r", offset=offset, shape=(num_bytes,))
    # Slices of a memmap are memmaps, whose repr and pickling surprise: hand out the plain array.
    return np.asarray(mapped).view(dtype).reshape(shape)
