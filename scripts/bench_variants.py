"""What the benchmarks of decoding measure: one way to answer a batch of prompts, and what a run of it took."""

import dataclasses
import time
from collections.abc import Sequence
from typing import Protocol

import jaxspec
from jaxspec import EngineConfig, SamplingParams, SpecConfig

Batch = list[list[int]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measured:
    """One or several batches, decoded to their budgets.

    Attributes:
        tokens: the output of each prompt.
        decode_tokens, decode_seconds: after the last row of a batch had its first token, until the last token.
        rounds: passes over the model in that time; a batch shares them.
        total_seconds: from the first request to the last token, prefill included.
        row_rounds, round_tokens: rounds counted once for each row in them, and the tokens they emitted.
    """

    tokens: list[list[int]]
    decode_tokens: int
    decode_seconds: float
    rounds: int
    total_seconds: float
    row_rounds: int = 0
    round_tokens: float = 0.0

    @classmethod
    def together(cls, runs: Sequence["Measured"]) -> "Measured":
        """The sum of batches that ran one after the other."""
        sums = {
            field.name: sum(getattr(run, field.name) for run in runs)
            for field in dataclasses.fields(cls)
            if field.name != "tokens"
        }
        return cls(tokens=[tokens for run in runs for tokens in run.tokens], **sums)

    @property
    def decode_rate(self) -> float:
        return self.decode_tokens / self.decode_seconds

    @property
    def total_rate(self) -> float:
        return sum(map(len, self.tokens)) / self.total_seconds

    @property
    def accept_length(self) -> float | None:
        """Tokens emitted by rounds / rounds; None where there are no rounds to count."""
        return self.round_tokens / self.row_rounds if self.row_rounds else None

    @property
    def round_ms(self) -> float:
        return 1000 * self.decode_seconds / self.rounds


class Variant(Protocol):
    """Anything that answers a batch of prompts with a fixed number of tokens each."""

    versions: dict[str, str]

    def run(self, batch: Batch) -> Measured: ...

    def close(self) -> None: ...


def parse_variant(name: str, spec: SpecConfig | None, engine: EngineConfig) -> tuple[SpecConfig | None, EngineConfig]:
    """The settings of a variant: [plain-](v1 | v2 | rN)[:SxKxN][@DTYPE], where plain alone is plain-v2.

    SxKxN are num_steps, eagle_topk and num_draft_tokens; a tree runs on the schedule that is named. DTYPE is what its
    weights are stored as.

    Raises:
        ValueError: the name is none of these, or it speculates and `spec` is None.
    """
    whole = name
    name, _, weight_dtype = name.partition("@")
    if weight_dtype:
        engine = dataclasses.replace(engine, weight_dtype=weight_dtype)
    name, _, shape = name.partition(":")
    if shape and (spec is None or name.startswith("plain")):
        raise ValueError(
            f"--variants has {whole!r}, a shape without drafts; set --speculative-algorithm, and v1 or v2."
        )
    if spec is not None and shape:
        spec = dataclasses.replace(spec, overlap_trees=name != "v1", **_sizes(whole, shape))
    schedule = "v2" if name == "plain" else name.removeprefix("plain-")
    rounds = schedule[1:] if schedule.startswith("r") else ""
    if schedule not in ("v1", "v2") and not (rounds.isascii() and rounds.isdecimal() and int(rounds) > 0):
        raise ValueError(f"--variants has {name!r}; use plain, v1, v2 or rN (as r4), or plain-v1, plain-v2, plain-rN.")
    if not name.startswith("plain") and spec is None:
        raise ValueError(f"--variants has {name!r}, which speculates; set --speculative-algorithm.")
    return None if name.startswith("plain") else spec, dataclasses.replace(
        engine,
        disable_overlap_schedule=schedule == "v1",
        rounds_per_dispatch=int(rounds) if rounds else engine.rounds_per_dispatch,
        simulate_accept_len=None if name.startswith("plain") else engine.simulate_accept_len,
    )


def _sizes(name: str, shape: str) -> dict[str, int]:
    """The three numbers of a shape as fields of SpecConfig."""
    sizes = shape.split("x")
    if len(sizes) != 3 or not all(size.isascii() and size.isdecimal() for size in sizes):
        raise ValueError(f"--variants has {name!r}; give num_steps, eagle_topk and num_draft_tokens, as in v2:5x4x8.")
    return dict(zip(("num_steps", "eagle_topk", "num_draft_tokens"), map(int, sizes), strict=True))


class JaxspecVariant:
    """An engine of this library."""

    def __init__(self, llm: "jaxspec.LLM", params: SamplingParams):
        self.llm = llm
        self.versions: dict[str, str] = {}
        self._params = params

    def run(self, batch: Batch) -> Measured:
        started = time.perf_counter()
        waiting = set(range(len(batch)))  # rows without a first token
        window_start, dispatches, decode_tokens = started, 0, 0
        outputs = {}
        for chunk in self.llm.stream(batch, self._params):
            if not waiting:
                decode_tokens += len(chunk.token_ids)
            elif chunk.token_ids and chunk.prompt_index in waiting:
                waiting.remove(chunk.prompt_index)
                if not waiting:
                    window_start, dispatches = time.perf_counter(), self.llm.metrics.decode_dispatches
            if chunk.output is not None:
                outputs[chunk.prompt_index] = chunk.output
        finished = time.perf_counter()
        dispatches = self.llm.metrics.decode_dispatches - dispatches
        return Measured(
            tokens=[outputs[i].token_ids for i in range(len(batch))],
            decode_tokens=decode_tokens,
            decode_seconds=finished - window_start,
            rounds=dispatches * self.llm.plan.rounds_per_dispatch,
            total_seconds=finished - started,
            row_rounds=sum(output.rounds for output in outputs.values()),
            round_tokens=sum((output.accept_length or 0.0) * output.rounds for output in outputs.values()),
        )

    def close(self) -> None:
        self.llm.close()
