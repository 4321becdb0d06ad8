"""Texts as token ids, and the batches they make."""

import json

import numpy as np
import pytest

from jaxspec.tokenizer import Tokenizer
from jaxspec.training.examples import BUCKET, Example, epoch_batches, make_batch, read_examples
from tests.scripts.tiny_model import write_tiny_model


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Tokenizer:
    return Tokenizer.from_folder(write_tiny_model(tmp_path_factory.mktemp("model")))


def read(tmp_path, tokenizer, *records, max_length: int = 1000) -> list[Example]:
    path = tmp_path / "data.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return list(read_examples(path, tokenizer, max_length=max_length))


def test_an_answer_counts_and_its_prompt_does_not(tmp_path):
    (example,) = read(tmp_path, None, {"prompt_ids": [1, 2, 3], "output_ids": [4, 5]})
    assert example.ids.tolist() == [1, 2, 3, 4, 5]
    assert example.is_answer.tolist() == [False, False, False, True, True]
    (cut,) = read(tmp_path, None, {"prompt_ids": [1, 2, 3], "output_ids": [4, 5]}, max_length=4)
    assert (cut.ids.tolist(), cut.is_answer.tolist()) == ([1, 2, 3, 4], [False, False, False, True])
    assert read(tmp_path, None, {"prompt_ids": [1, 2, 3], "output_ids": [4, 5]}, max_length=3) == []


def test_what_the_assistant_says_counts_in_a_chat_with_its_end(tmp_path, tokenizer):
    chat = [("user", "a"), ("assistant", "bc"), ("user", "d"), ("assistant", "e"), ("user", "unanswered")]
    (example,) = read(tmp_path, tokenizer, {"messages": [{"role": role, "content": text} for role, text in chat]})
    counted = example.ids[example.is_answer].tolist()
    assert tokenizer.decode(counted, skip_special_tokens=False) == "bc<|im_end|>\ne<|im_end|>\n"
    whole = tokenizer.decode(example.ids.tolist(), skip_special_tokens=False)
    assert whole.startswith("<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nbc<|im_end|>\n<|im_start|>user\nd")
    assert "unanswered" not in whole


def test_all_of_a_text_counts_but_its_first_token(tmp_path, tokenizer):
    (example,) = read(tmp_path, tokenizer, {"text": "abc"})
    assert tokenizer.decode(example.ids.tolist()) == "abc"
    assert example.is_answer.tolist() == [False, True, True]


@pytest.mark.parametrize(
    ("record", "said"),
    [
        ({"x": 1}, "has no output_ids, messages, conversations or text"),
        ({"output_ids": [1]}, "output_ids or prompt_ids that are no list"),
        ({"text": "a"}, "the target has no tokenizer"),
    ],
)
def test_other_records_are_refused(tmp_path, record, said):
    with pytest.raises(ValueError, match=said):
        read(tmp_path, None, record)


def test_an_epoch_holds_every_example_once_in_batches_of_about_one_length():
    lengths = np.random.default_rng(0).integers(5, 500, 1003).tolist()
    batches = epoch_batches(lengths, 8, seed=3, epoch=1)
    assert {len(batch) for batch in batches} == {8}
    flat = np.concatenate(batches)
    assert sorted(flat[flat >= 0].tolist()) == list(range(1003))
    spread = [np.ptp(np.asarray(lengths)[batch[batch >= 0]]) for batch in batches]
    assert np.mean(spread) < 40
    again = epoch_batches(lengths, 8, seed=3, epoch=1)
    assert all((one == two).all() for one, two in zip(batches, again, strict=True))
    other = epoch_batches(lengths, 8, seed=3, epoch=2)
    assert any((one != two).any() for one, two in zip(batches, other, strict=True))


def test_a_batch_is_padded_to_a_shape_that_others_have():
    examples = [Example(np.arange(length, dtype=np.int32), np.ones(length, bool)) for length in (3, BUCKET + 1)]
    batch = make_batch(examples, np.array([1, 0, -1]))
    assert batch.ids.shape == batch.is_answer.shape == (3, 2 * BUCKET)
    assert batch.ids[0, : BUCKET + 1].tolist() == list(range(BUCKET + 1))
    assert batch.is_answer.sum(axis=1).tolist() == [BUCKET + 1, 3, 0]
