"""A draft that accepts next to nothing is said once, and with the likely causes."""

import pytest

from jaxspec.acceptance import LIKELY_CAUSES, MANY_ROUNDS, AcceptanceWatch
from jaxspec.draft import DRAFTS
from jaxspec.metrics import Emission, RoundStats


def stats_of(num_rounds: int, accepted_every: int) -> RoundStats:
    """Rounds of 3 drafts, of which one is accepted in every so many rounds."""
    accepted = [int(index % accepted_every == accepted_every - 1) for index in range(num_rounds)]
    return RoundStats.of(Emission(1 + one, one, 3, True) for one in accepted)


@pytest.mark.parametrize("algorithm", LIKELY_CAUSES)
def test_near_nothing_over_many_rounds_is_said_once(algorithm, caplog):
    watch = AcceptanceWatch(algorithm)
    watch.look(stats_of(MANY_ROUNDS - 1, accepted_every=50))
    assert not caplog.records
    for num_rounds in (MANY_ROUNDS, 2 * MANY_ROUNDS):
        watch.look(stats_of(num_rounds, accepted_every=50))
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    said = record.getMessage()
    assert said.startswith(f"{algorithm}: 5 of {3 * MANY_ROUNDS} drafts were accepted in {MANY_ROUNDS} rounds")
    assert LIKELY_CAUSES[algorithm] in said


def test_the_causes_of_a_heads_failure_are_named():
    for cause in ("layer_ids", "d2t", "another target", "rope_theta"):
        assert cause in LIKELY_CAUSES["EAGLE3"]


def test_a_working_draft_and_plain_decoding_are_no_reason_to_warn(caplog):
    AcceptanceWatch("EAGLE3").look(stats_of(10 * MANY_ROUNDS, accepted_every=10))
    AcceptanceWatch("NONE").look(RoundStats.of([Emission(1, 0, 0, True)] * MANY_ROUNDS))
    assert not caplog.records


def test_every_method_that_drafts_has_its_causes():
    assert set(LIKELY_CAUSES) == set(DRAFTS) - {"NONE"}
