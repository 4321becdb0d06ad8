"""What a batch run says of itself: a line of progress now and then, and JSON values at the end."""

import dataclasses
import time
from typing import Any

from jaxspec.metrics import EngineMetrics
from jaxspec.outputs import RequestOutput


@dataclasses.dataclass
class Totals:
    """Counts of a run.

    Attributes:
        num_rows: rows of the file.
        num_earlier: those that an earlier run has answered.
        num_answered, num_errors: those of this run.
        prompt_tokens, output_tokens: of the answered ones.
        finish_reasons: how many completions ended how.
        accept_length: tokens emitted by rounds / rounds; None before the first round.
        accept_rate: accepted drafts / proposed drafts; None before the first draft.
        started: seconds on the monotonic clock.
        seconds: how long the run took, once it is over; prefill is among it, and what was compiled meanwhile.
    """

    num_rows: int
    num_earlier: int
    num_answered: int = 0
    num_errors: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    finish_reasons: dict[str, int] = dataclasses.field(default_factory=dict)
    accept_length: float | None = None
    accept_rate: float | None = None
    started: float = dataclasses.field(default_factory=time.monotonic)
    seconds: float = 0.0

    def add(self, output: RequestOutput) -> None:
        """Counts an answer."""
        self.num_answered += 1
        self.prompt_tokens += len(output.prompt_token_ids)
        for completion in output.completions:
            self.output_tokens += len(completion.token_ids)
            reason = completion.finish_reason
            self.finish_reasons[reason] = self.finish_reasons.get(reason, 0) + 1

    def look(self, metrics: EngineMetrics) -> None:
        """Takes over what the engine counts."""
        self.seconds = time.monotonic() - self.started
        self.accept_length, self.accept_rate = metrics.accept_length, metrics.accept_rate

    @property
    def num_left(self) -> int:
        return self.num_rows - self.num_earlier - self.num_answered - self.num_errors

    @property
    def tokens_per_s(self) -> float | None:
        """Output tokens of the rows that are done, per second of the run."""
        return self.output_tokens / self.seconds if self.seconds else None

    @property
    def seconds_left(self) -> float | None:
        """At the pace of this run so far; None before the first answer."""
        done = self.num_answered + self.num_errors
        return self.num_left * self.seconds / done if done else None

    def line(self) -> str:
        """Progress for a person."""
        parts = [f"{self.num_rows - self.num_left} of {self.num_rows} rows"]
        if self.num_errors:
            parts.append(f"{self.num_errors} errors")
        if self.tokens_per_s is not None:
            parts.append(f"{self.tokens_per_s:.1f} tokens/s")
        if self.accept_length is not None:
            parts.append(f"accept length {self.accept_length:.2f}")
        if self.seconds_left is not None and self.num_left:
            parts.append(f"{_clock(self.seconds_left)} left")
        return ", ".join(parts)

    def values(self) -> dict[str, Any]:
        """JSON values."""
        values = {
            field.name: getattr(self, field.name) for field in dataclasses.fields(self) if field.name != "started"
        }
        return {**values, "tokens_per_s_with_prefill": self.tokens_per_s}


def _clock(seconds: float) -> str:
    """H:MM:SS."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}"
