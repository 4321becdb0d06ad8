"""Two methods in one tree: each round goes as far as the better of them."""

import pytest

from jaxspec.draft.merged import Merged
from tests.cases import MAX_LEN, NUM_CASES, NUM_ROWS, SCRIPTED, cases, plain, play, target, truth
from tests.scripted import NO_DRAFT, Scripted, expected_emissions, script_leaves
from tests.tiny import make_engine

# By the number of committed tokens: how many drafts of each are right. One is better, the other, both alike, neither.
SCRIPTS = ((3, 0, 2, 1, NO_DRAFT, 3, 0, 0), (0, 3, 2, NO_DRAFT, 1, 2, 1, NO_DRAFT))
KINDS = {"two chains": ("chain", "chain"), "a chain and a tree": ("chain", "tree"), "two trees": ("tree", "tree")}


@pytest.mark.parametrize("kinds", KINDS)
@pytest.mark.parametrize("rounds_in_flight", [0, 1])
def test_the_accept_length_is_the_better_methods_round_by_round(kinds, rounds_in_flight):
    first, second = (SCRIPTED[kind] for kind in KINDS[kinds])
    method = Merged((first, second), first.num_draft_tokens + second.num_draft_tokens - 1)
    leaves = tuple(script_leaves(truth(), script, max_len=MAX_LEN, num_sequences=NUM_CASES) for script in SCRIPTS)
    engine = make_engine(
        target(),
        method,
        leaves,
        num_rows=NUM_ROWS,
        max_model_len=MAX_LEN,
        rounds_in_flight=rounds_in_flight,
        chunked_prefill_size=None,
        prefill_chunk_buckets=(MAX_LEN,),
        decode_row_buckets=(NUM_ROWS,),
    )
    better = [max(pair) for pair in zip(*SCRIPTS, strict=True)]
    chain = Scripted(first.num_steps, is_chain=True)
    for request, expected in zip(play(engine, cases()), plain(), strict=True):
        assert request.output_ids == expected.output_ids
        found = [(emission.count, emission.accepted) for emission in request.emissions]
        assert found == [(step.count, step.accepted) for step in expected_emissions(chain, better, request)]
