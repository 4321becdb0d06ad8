"""Counts of what the rounds emitted: per request, and the totals of an engine."""

import dataclasses
from collections.abc import Iterable
from typing import NamedTuple

from jaxspec.outputs import Exactness


class Emission(NamedTuple):
    """What one retired step added to a request: a round, or the end of a prefill."""

    count: int  # tokens emitted, >= 1
    accepted: int  # drafts among them, 0..min(count, proposed)
    proposed: int  # drafts that were verified
    is_round: bool  # False for the one token that ends a prefill


@dataclasses.dataclass
class RoundStats:
    """Sums over rounds; the token that ends a prefill is counted apart.

    Attributes:
        rounds: verify rounds of one row that emitted at least one token.
        round_tokens: tokens emitted by those rounds, bonus tokens included.
        prefill_tokens: tokens emitted by prefills, one for each prefill that ended.
        accepted: drafts that were emitted.
        proposed: drafts that were verified.
        accepted_per_position: entry j is how many rounds accepted at least j + 1 drafts.
    """

    rounds: int = 0
    round_tokens: int = 0
    prefill_tokens: int = 0
    accepted: int = 0
    proposed: int = 0
    accepted_per_position: list[int] = dataclasses.field(default_factory=list)

    @classmethod
    def of(cls, emissions: Iterable[Emission]) -> "RoundStats":
        stats = cls()
        for emission in emissions:
            stats.add(emission)
        return stats

    def add(self, emission: Emission) -> None:
        self._count(emission, 1)

    def remove(self, emission: Emission) -> None:
        """Takes back an emission that was added before, when the tokens are cut."""
        self._count(emission, -1)

    @property
    def emitted(self) -> int:
        return self.round_tokens + self.prefill_tokens

    @property
    def accept_length(self) -> float | None:
        """Tokens emitted by rounds / rounds; None before the first round."""
        return self.round_tokens / self.rounds if self.rounds else None

    @property
    def accept_rate(self) -> float | None:
        """Accepted drafts / proposed drafts; None before the first draft."""
        return self.accepted / self.proposed if self.proposed else None

    def _count(self, emission: Emission, sign: int) -> None:
        if not emission.is_round:
            self.prefill_tokens += sign * emission.count
            return
        self.rounds += sign
        self.round_tokens += sign * emission.count
        self.accepted += sign * emission.accepted
        self.proposed += sign * emission.proposed
        positions = self.accepted_per_position
        positions.extend([0] * (emission.accepted - len(positions)))
        for j in range(emission.accepted):
            positions[j] += sign


def cut_emissions(emissions: list[Emission], num_tokens: int) -> tuple[list[Emission], list[Emission]]:
    """Splits the emissions at a token count.

    A round that is cut in the middle keeps its first tokens. Those are drafts: the bonus token is the last of a round.
    What it proposed stays, since it was verified.

    Returns:
        (kept, removed): `kept` emit exactly `num_tokens` tokens, or all where there are fewer; `removed` are the
        emissions of the input, as they were, that are not whole in `kept`.
    """
    kept: list[Emission] = []
    left = num_tokens
    for i, emission in enumerate(emissions):
        if emission.count > left:
            if left:
                kept.append(emission._replace(count=left, accepted=min(emission.accepted, left)))
            return kept, emissions[i:]
        kept.append(emission)
        left -= emission.count
    return kept, []


@dataclasses.dataclass
class EngineMetrics:
    """Totals of an engine since it was made; only retired work is counted.

    Attributes:
        requests: requests that were added.
        finished: requests that are finished, aborts included.
        prompt_tokens: prompt tokens of the requests that were added.
        prefilled_tokens: tokens whose prefill was dispatched, recomputation after preemption included.
        reused_tokens: tokens that were in the pages of an earlier request that began alike, and not computed again.
        preemptions: how often a request lost its row to an older one.
        prefill_dispatches, decode_dispatches: batches planned; a decode batch is `rounds_per_dispatch` rounds.
        prefill_seconds, decode_seconds: host wall time spent in prefill and in decode, as measured by the engine.
        stats: sums over the retired rounds of all rows.
        exactness: what sampled output is to plain decoding's, see `SpecPlan.exactness`; "lossy" puts speed before it.
        simulate_accept_len: where acceptance is simulated (see `EngineConfig`), so that none of it was earned.
    """

    requests: int = 0
    finished: int = 0
    prompt_tokens: int = 0
    prefilled_tokens: int = 0
    reused_tokens: int = 0
    preemptions: int = 0
    prefill_dispatches: int = 0
    decode_dispatches: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    stats: RoundStats = dataclasses.field(default_factory=RoundStats)
    exactness: Exactness = "token"
    simulate_accept_len: float | None = None

    @property
    def emitted_tokens(self) -> int:
        return self.stats.emitted

    @property
    def rounds(self) -> int:
        return self.stats.rounds

    @property
    def accepted(self) -> int:
        return self.stats.accepted

    @property
    def proposed(self) -> int:
        return self.stats.proposed

    @property
    def accepted_per_position(self) -> list[int]:
        return self.stats.accepted_per_position

    @property
    def accept_length(self) -> float | None:
        return self.stats.accept_length

    @property
    def accept_rate(self) -> float | None:
        return self.stats.accept_rate
