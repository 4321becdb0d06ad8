"""The map from a head's own tokens to the target's, checked.

`d2t` holds offsets: token i of the head is token i + d2t[i] of the target. `t2d` marks the target's tokens that the
head has.
"""

from pathlib import Path

import numpy as np

_ABSOLUTE = "d2t holds offsets (target token = i + d2t[i])"


def read_target_ids(
    d2t: np.ndarray | None, t2d: np.ndarray | None, *, draft_vocab: int, target_vocab: int, path: Path
) -> np.ndarray | None:
    """Returns the target's token of each of a head's tokens, int32 [draft_vocab]; None where they are the same.

    Raises:
        ValueError: the map is missing or of another size, or names a token twice, outside the target's vocabulary, or
            other than t2d does.
    """
    if d2t is None:
        if draft_vocab == target_vocab and t2d is None:
            return None
        raise ValueError(
            f"{path}: the head chooses from {draft_vocab} of the target's {target_vocab} tokens, and has no d2t that "
            "says which; use a checkpoint with d2t and t2d."
        )
    if d2t.shape != (draft_vocab,) or d2t.dtype.kind not in "iu":
        raise ValueError(
            f"{path}: d2t is {d2t.dtype.name} {list(d2t.shape)}, expected integers [{draft_vocab}]; use the d2t that "
            "came with the weights, or set draft_vocab_size to its length if lm_head has that many rows."
        )
    ids = np.arange(draft_vocab, dtype=np.int64) + d2t.astype(np.int64)
    outside = np.flatnonzero((ids < 0) | (ids >= target_vocab))
    if outside.size:
        index = int(outside[0])
        raise ValueError(
            f"{path}: d2t sends {outside.size} tokens outside the target's vocabulary of {target_vocab}, the first is "
            f"{index} -> {ids[index]}; {_ABSOLUTE}: subtract i if these are token ids."
        )
    _check_unique(ids, path)
    if t2d is not None:
        _check_marks(ids, t2d, target_vocab, path)
    if draft_vocab == target_vocab:
        # All tokens, each once. Another order would need a map for no gain, and no trainer writes one.
        if d2t.any():
            raise ValueError(
                f"{path}: d2t reorders the whole vocabulary, which is not supported; order lm_head by the target's "
                "tokens and leave out d2t and t2d."
            )
        return None
    return ids.astype(np.int32)


def _check_unique(ids: np.ndarray, path: Path) -> None:
    values, counts = np.unique(ids, return_counts=True)
    twice = values[counts > 1]
    if twice.size:
        raise ValueError(
            f"{path}: d2t sends several tokens to one of the target's, {twice.size} times, the first to {twice[0]}; "
            f"{_ABSOLUTE}: subtract i if these are token ids."
        )


def _check_marks(ids: np.ndarray, t2d: np.ndarray, target_vocab: int, path: Path) -> None:
    if t2d.shape != (target_vocab,):
        raise ValueError(
            f"{path}: t2d is {list(t2d.shape)}, and the target's vocabulary is {target_vocab}; set draft_model to a "
            "head of this target."
        )
    marked = np.zeros(target_vocab, bool)
    marked[ids] = True
    other = np.flatnonzero(marked != (t2d != 0))
    if other.size:
        raise ValueError(
            f"{path}: d2t and t2d differ in {other.size} of the target's tokens, the first is {other[0]}; {_ABSOLUTE}: "
            "subtract i if these are token ids, or use the d2t and t2d that came with the weights."
        )
