"""What counts as a round, and ratios that are safe at zero."""

from jaxspec.metrics import Emission, EngineMetrics, RoundStats, cut_emissions

PREFILL = Emission(1, 0, 0, False)
ROUNDS = [PREFILL, Emission(4, 3, 3, True), Emission(1, 0, 3, True), Emission(2, 2, 3, True)]


def test_sums_leave_the_prefill_token_apart():
    stats = RoundStats.of(ROUNDS)
    assert (stats.rounds, stats.round_tokens, stats.prefill_tokens, stats.emitted) == (3, 7, 1, 8)
    assert stats.accepted_per_position == [2, 2, 1]
    assert stats.accept_length == 7 / 3
    assert stats.accept_rate == 5 / 9


def test_ratios_are_none_without_rounds_and_without_drafts():
    assert RoundStats().accept_length is None
    assert EngineMetrics().accept_rate is None
    plain = RoundStats.of([PREFILL, Emission(1, 0, 0, True)])
    assert (plain.accept_length, plain.accept_rate) == (1.0, None)


def test_remove_takes_back_what_was_added():
    stats = RoundStats.of(ROUNDS)
    for emission in ROUNDS:
        stats.remove(emission)
    assert stats == RoundStats(accepted_per_position=[0, 0, 0])


def test_cut_keeps_whole_rounds_and_the_drafts_of_a_cut_one():
    assert cut_emissions(ROUNDS, 8) == (ROUNDS, [])
    kept, removed = cut_emissions(ROUNDS, 3)
    assert kept == [PREFILL, Emission(2, 2, 3, True)]
    assert removed == ROUNDS[1:]
    assert cut_emissions(ROUNDS, 5) == (ROUNDS[:2], ROUNDS[2:])
    assert cut_emissions(ROUNDS, 0) == ([], ROUNDS)


def test_engine_totals_read_through_to_their_stats():
    metrics = EngineMetrics(stats=RoundStats.of(ROUNDS))
    assert (metrics.rounds, metrics.emitted_tokens, metrics.accepted, metrics.proposed) == (3, 8, 5, 9)
    assert metrics.accepted_per_position == [2, 2, 1]
    assert metrics.accept_length == 7 / 3
