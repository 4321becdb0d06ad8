"""Trees of fixed form: what may be given, and the plan that comes of it."""

import json

import pytest

from jaxspec.config import SpecConfig
from tests.plans import note_of, notes_of, plan_of, refusal, shape_of

PATHS = [[1], [0, 0], [0], [0, 0, 2]]
SORTED = ((0,), (1,), (0, 0), (0, 0, 2))


def test_paths_and_a_file_of_them_are_the_same(tmp_path):
    file = tmp_path / "tree.json"
    file.write_text(json.dumps(PATHS))
    for given in (PATHS, [tuple(path) for path in PATHS], file, str(file)):
        assert SpecConfig(algorithm="NGRAM", static_tree=given).static_tree == SORTED


@pytest.mark.parametrize(
    ("paths", "words"),
    [
        ([], ["0 nodes", "from 1 to 1024"]),
        ([[]], ["static_tree[0]", "root"]),
        ([[0], [0, -1]], ["static_tree[1][1]=-1"]),
        ([[0], [1, 0]], ["[1, 0]", "add [1]"]),
        ([[0], [1], [0]], ["[0] twice"]),
        ([[0]] * 1025, ["1025 nodes"]),
        ([[1024]], ["static_tree[0][0]=1024", "from 0 to 1023"]),
    ],
)
def test_what_is_no_tree_is_refused(paths, words):
    with pytest.raises(ValueError, match="static_tree") as error:
        SpecConfig(algorithm="NGRAM", static_tree=paths)
    assert all(word in str(error.value) for word in words), str(error.value)


@pytest.mark.parametrize("paths", [3, [0, 1], "[[0]", [["0"]], {"0": 1}, [[0.5]]])
def test_what_is_no_list_of_paths_is_refused(paths):
    with pytest.raises((TypeError, FileNotFoundError), match="static_tree"):
        SpecConfig(algorithm="NGRAM", static_tree=paths)


@pytest.mark.parametrize("text", ["[[0], [1]", "[" * 100000 + "]" * 100000])
def test_a_file_that_is_not_json_is_named(tmp_path, text):
    file = tmp_path / "tree.json"
    file.write_text(text)
    with pytest.raises(ValueError, match=r"tree\.json' is not JSON"):
        SpecConfig(algorithm="NGRAM", static_tree=file)
    file.write_text("[[1, 0]]")
    with pytest.raises(ValueError, match=r"tree\.json: static_tree has \[1, 0\]"):
        SpecConfig(algorithm="NGRAM", static_tree=file)


@pytest.mark.parametrize("algorithm", ["EAGLE", "EAGLE3", "STANDALONE", "NGRAM"])
def test_the_three_numbers_are_the_trees(algorithm):
    plan = plan_of(algorithm, static_tree=PATHS)
    assert (shape_of(plan), plan.static_tree, plan.rounds_in_flight) == ((3, 3, 5), SORTED, 0)
    assert [note.after for note in notes_of(plan, "num_steps", "eagle_topk", "num_draft_tokens")] == [3, 3, 5]
    assert "overlap_trees=True" in note_of(plan, "rounds_in_flight").reason
    assert plan_of(algorithm, static_tree=PATHS, overlap_trees=True, num_steps=3).rounds_in_flight == 1


def test_a_static_chain_is_a_chain():
    plan = plan_of("EAGLE3", static_tree=[[0], [0, 0]])
    assert (shape_of(plan), plan.rounds_in_flight) == ((2, 1, 3), 1)


def test_a_number_that_is_not_the_trees_is_refused():
    assert "num_draft_tokens=8 is not what static_tree has, 5" in refusal(
        "EAGLE3", static_tree=PATHS, num_draft_tokens=8
    )
