"""A picture of a training run, from its log: loss and accept length by step."""

import json
from collections.abc import Sequence
from pathlib import Path


def simulated_accept_length(agreed: Sequence[float]) -> float:
    """Accept length of a chain whose step s is right with chance agreed[s] where the ones before it were.

    That is 1 + a0 + a0 a1 + ...: teacher-forced, so an estimate; `evaluation` measures the real one.
    """
    length, reached = 1.0, 1.0
    for chance in agreed:
        reached *= chance
        length += reached
    return length


def save_curves(log: Path, picture: Path) -> None:
    """Draws the log of a run as a PNG.

    Args:
        log: JSON lines with "step" and either "loss" and "accept_length" (simulated, of one batch), or
            "measured" (of an evaluation: "accept_length").
        picture: the file to write.

    Raises:
        ImportError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(f"{picture.name} needs matplotlib; install jaxspec[plots].") from error
    lines = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    trained = [line for line in lines if "loss" in line]
    measured = [line for line in lines if (line.get("measured") or {}).get("accept_length") is not None]
    figure = Figure(figsize=(8, 6), layout="constrained")
    loss, length = figure.subplots(2, 1, sharex=True)
    loss.plot([line["step"] for line in trained], [line["loss"] for line in trained], linewidth=0.8)
    loss.set_ylabel("loss")
    steps, lengths = [line["step"] for line in trained], [line["accept_length"] for line in trained]
    length.plot(steps, lengths, linewidth=0.8, label="simulated, training texts")
    if measured:
        places = [line["step"] for line in measured]
        values = [line["measured"]["accept_length"] for line in measured]
        length.plot(places, values, marker="o", label="measured by the engine, held-out prompts")
    length.set_ylabel("accept length")
    length.set_xlabel("step")
    length.legend()
    figure.savefig(picture, dpi=120)
