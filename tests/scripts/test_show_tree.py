"""`scripts/show_tree.py`: the tree that a round drafts, what is accepted of it, and the picture."""

import re

import jax.numpy as jnp
import numpy as np
import pytest

import show_tree
from jaxspec.step import RoundView
from jaxspec.tree import DraftTree
from tests.cases import cases, engine_of, follow, truth
from tests.tiny import requests_of

NGRAM = ("--speculative-algorithm", "NGRAM", "--speculative-num-steps", "3")
TREE = ("--speculative-eagle-topk", "2", "--speculative-num-draft-tokens", "6")


def view(scores: list[float] | None) -> RoundView:
    """A root with two children, the second of them empty, and a chain below the first."""
    tree = DraftTree(
        jnp.array([5, 6, -1, 7, 8]),
        jnp.array([-1, 0, 0, 1, 3]),
        None if scores is None else jnp.array(scores, jnp.float32),
    )
    return RoundView(
        tree=tree,
        drawn=jnp.array([6, 7, 0, 9, 0]),
        logprobs=jnp.log(jnp.array([1.0, 0.5, 0.1, 0.25, 0.2])),
        path=jnp.array([0, 1, 3, 3]),
        count=jnp.array(3),
    )


def test_nodes_say_who_believed_what_and_what_was_accepted():
    drawn = show_tree.read_round(view([0.0, -1.0, -2.0, -3.0, -3.5]), str, 12)
    assert drawn.title == "after 12 tokens: 2 of 3 drafts accepted, 3 tokens emitted"
    assert [node.is_accepted for node in drawn.nodes.values()] == [False, True, True, False]
    assert {index: node.instead for index, node in drawn.nodes.items()} == {0: None, 1: None, 3: "'9'", 4: None}
    assert [node.draft for node in drawn.nodes.values()][1:] == pytest.approx(np.exp([-1.0, -2.0, -0.5]))
    assert [node.target for node in drawn.nodes.values()] == pytest.approx([1.0, 0.5, 0.25, 0.2])
    assert all(node.draft is None for node in show_tree.read_round(view(None), str, 0).nodes.values())


def test_a_preview_is_what_the_round_then_does():
    """Nothing is changed by looking, and what was seen comes to pass."""
    engine = engine_of("tree", "v1")
    follow(engine, truth(), (2, 3, 0, 1))
    (request,) = requests_of([list(cases()[0].prompt)], cases()[0].params)
    engine.add(request)
    seen = 0
    while not request.is_finished:
        before = len(request.output_ids)
        views = engine.preview()
        engine.step()
        for owner, now in views:
            assert owner is request
            count = int(now.count)
            assert now.drawn[now.path[:count]].tolist() == request.output_ids[before : before + count]
            assert before + count == len(request.output_ids)
            seen += 1
    assert seen > 5
    assert request.output_ids == list(truth()[0][len(cases()[0].prompt) :])


def test_a_round_in_flight_cannot_be_looked_at():
    engine = engine_of("chain", "v2")
    follow(engine, truth(), (1,))
    engine.add(requests_of([list(cases()[0].prompt)], cases()[0].params)[0])
    engine.step()
    engine.step()
    with pytest.raises(RuntimeError, match="set disable_overlap_schedule=True"):
        engine.preview()


def test_rounds_are_printed_and_drawn(small, capsys, tmp_path):
    picture = tmp_path / "round.png"
    flags = [*small, *NGRAM, *TREE, "--prompt", "abcabcabcab", "--after", "4", "--rounds", "2", "--png", str(picture)]
    assert show_tree.main([*flags, "--ignore-eos", "--temperature", "0"]) == 0
    out = capsys.readouterr().out
    assert len(re.findall(r"after \d+ tokens: \d of \d drafts accepted", out)) == 2
    assert "target goes on with" in out
    for name in ("round-1.png", "round-2.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "give --speculative-algorithm"),
        ([*NGRAM, "--after", "9", "--max-new-tokens", "4"], "ended before --after 9 tokens"),
    ],
)
def test_what_cannot_be_shown_is_said(small, flags, message):
    with pytest.raises(ValueError, match=message):
        show_tree.main([*small, "--prompt", "abc", *flags])
