"""What the scripts say about a run: rates, the resolved plan, and the machine it ran on."""

import dataclasses
import os
import platform
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.markup import escape
from rich.table import Table

from jaxspec.config import EngineConfig
from jaxspec.outputs import Completion
from jaxspec.plan import SpecPlan

# Columns where the output is no terminal: enough for the widest table, which would be cut at the usual 80.
WIDTH = 200


def make_console() -> Console:
    """The console for stdout: as wide as the terminal, or as the widest table where there is none."""
    console = Console(highlight=False)
    return console if console.is_terminal or "COLUMNS" in os.environ else Console(highlight=False, width=WIDTH)


def decode_rate(completion: Completion) -> float | None:
    """Tokens per second after the first one, so that neither prefill nor compilation counts; None below two tokens."""
    first, finished = completion.timings.first_token, completion.timings.finished
    if first is None or finished is None or len(completion.token_ids) < 2 or finished <= first:
        return None
    return (len(completion.token_ids) - 1) / (finished - first)


def number(value: float | None, digits: int = 2, unit: str = "") -> str:
    return "-" if value is None else f"{value:.{digits}f}{unit}"


def simulation_mark(engine: EngineConfig) -> dict[str, str]:
    """What a report says first where acceptance is simulated: one entry, or none."""
    length = engine.simulate_accept_len
    if length is None:
        return {}
    return {"SIMULATED": f"accept length {length:g}: drafts were accepted unseen, and the tokens are not the model's"}


def plan_values(plan: SpecPlan) -> dict[str, Any]:
    """The plan as JSON values, its notes included."""
    return {
        field.name: [dataclasses.asdict(note) for note in plan.notes] if field.name == "notes" else value
        for field in dataclasses.fields(plan)
        if isinstance(value := getattr(plan, field.name), str | int | float | bool | tuple | list | None)
    }


def plan_table(plan: SpecPlan) -> Group:
    """The plan for a terminal: one line of settings each, then what was changed or chosen and why."""
    settings = Table(title="Resolved plan", title_justify="left", show_header=False, box=None)
    for name, value in plan.settings().items():
        settings.add_row(name, escape(str(value)))
    if not plan.notes:
        return Group(settings)
    notes = Table("note", "setting", "from", "to", "reason", title="Notes", title_justify="left", box=None)
    for note in plan.notes:
        cells = (note.kind, note.field, note.before, note.after, note.reason)
        notes.add_row(*(escape(str(cell)) for cell in cells))
    return Group(settings, "", notes)


def device_name() -> str:
    """What the numbers were measured on, e.g. "cpu: AMD EPYC 7B13, 2 cores" or "gpu: NVIDIA H200 x 1"."""
    import jax  # here, so that --help and a wrong flag do not wait for it

    device = jax.devices()[0]
    if device.platform != "cpu":
        return f"{device.platform}: {device.device_kind} x {jax.device_count()}"
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"cpu: {_cpu_model()}, {cores} cores"


def _cpu_model() -> str:
    listing = Path("/proc/cpuinfo")
    if listing.exists():
        for line in listing.read_text().splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    return platform.processor() or platform.machine()
