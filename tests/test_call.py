"""What counts as a prompt, and one clear line for what does not."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.call import as_prompts, encode_prompt, params_for
from jaxspec.config import SamplingParams
from tests.loading.vocabularies import CHAT, byte_level_keys, from_metadata

CHATTY = from_metadata(byte_level_keys(), chat_template=CHAT)


def ids_of(prompts: Any) -> list[list[int]]:
    return [encode_prompt(prompt, index, CHATTY) for index, prompt in enumerate(as_prompts(prompts))]


def refusal(prompts: Any, kind: type[Exception]) -> str:
    with pytest.raises(kind) as error:
        ids_of(prompts)
    assert error.type is kind
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize(
    ("prompts", "ids"),
    [
        ([1, 2], [[1, 2]]),
        ((np.int64(1), 2), [[1, 2]]),
        (range(1, 4), [[1, 2, 3]]),
        ([[1, 2], [3]], [[1, 2], [3]]),
        (np.array([1, 2]), [[1, 2]]),
        (np.array([7], np.uint8), [[7]]),
        (jnp.array([1, 2]), [[1, 2]]),
        ([np.array([1, 2]), np.array([3])], [[1, 2], [3]]),
        ([np.array([3]), [4, np.int32(5)]], [[3], [4, 5]]),
        ([np.array(3), np.array(4)], [[3, 4]]),
    ],
)
def test_integers_in_lists_and_arrays_are_token_ids(prompts, ids):
    got = ids_of(prompts)
    assert got == ids
    assert {type(token) for row in got for token in row} == {int}
    assert not any(isinstance(prompt, np.ndarray) for prompt in as_prompts(prompts))


@pytest.mark.parametrize(
    ("prompts", "kind", "parts"),
    [
        (b"abc", TypeError, ["prompts is a bytes", "decode bytes first"]),
        (bytearray(b"abc"), TypeError, ["prompts is a bytearray", "decode"]),
        (memoryview(b"abc"), TypeError, ["prompts is a memoryview", "decode"]),
        (["a", b"abc"], TypeError, ["prompt 1 is a bytes", "decode bytes first"]),
        (None, TypeError, ["prompts is a NoneType", "give a string, token ids, chat messages"]),
        (5, TypeError, ["prompts is a int"]),
        ([], ValueError, ["empty list"]),
        ([1, "a"], TypeError, ["prompt 0 is a int", "not a mixture"]),
        ([[1], [2.0]], TypeError, ["prompt 1 is a list", "not a mixture"]),
        ([[True]], TypeError, ["prompt 0 is a list"]),
        (np.zeros((2, 3), int), ValueError, ["prompts is an array of shape (2, 3)", "1-D", "list"]),
        ([[1], np.zeros((1, 1), int)], ValueError, ["prompt 1 is an array of shape (1, 1)"]),
        (np.array([1.0]), TypeError, ["prompts is an array of float64", "integers"]),
        ([np.array([True])], TypeError, ["prompt 0 is an array of bool", "integers"]),
        (np.array(["a"]), TypeError, ["prompts is an array of <U1"]),
    ],
)
def test_what_is_no_prompt_is_refused(prompts, kind, parts):
    message = refusal(prompts, kind)
    for part in parts:
        assert part in message


def said(content: Any, **changes: Any) -> dict[str, Any]:
    return {"role": "user", "content": content, **changes}


def test_content_in_parts_of_text_is_joined():
    parts = [{"type": "text", "text": "he"}, {"type": "text", "text": "llo"}]
    assert ids_of([said(parts)]) == ids_of([said("hello")])
    assert ids_of([said([])]) == ids_of([said("")])


@pytest.mark.parametrize(
    ("message", "kind", "parts"),
    [
        (said(None), TypeError, ["content of type NoneType; give a string"]),
        (said(5), TypeError, ["content of type int; give a string"]),
        (said(b"x"), TypeError, ["content of type bytes; give a string"]),
        (said([5]), ValueError, ["content part of type 'int'"]),
        (
            said([{"type": "image_url", "image_url": "x"}]),
            ValueError,
            ["content part of type 'image_url'", "give a str"],
        ),
        (said([{"type": "text"}]), ValueError, ["content part of type 'text' without its text"]),
        (said("x", role=None), TypeError, ["role=None; give a string"]),
        ({"content": "x"}, ValueError, ["needs 'role' and 'content'; it has 'content'"]),
        ({"role": "user"}, ValueError, ["needs 'role' and 'content'; it has 'role'"]),
        ({}, ValueError, ["it has nothing"]),
        (said("\ud800"), ValueError, [r"the text has '\ud800' at position"]),
    ],
)
def test_a_chat_message_that_is_not_text_is_refused_with_its_place(message, kind, parts):
    number = refusal(["fine", [said("fine"), message]], kind)
    assert number.startswith("prompt 1: ")
    assert "chat message 1 " in number or "the text has" in number
    for part in parts:
        assert part in number


def test_half_of_a_surrogate_pair_is_refused_with_its_place():
    message = refusal(["fine", "ab\ud800c"], ValueError)
    for part in ("prompt 1: the text has", r"'\ud800' at position 2", "surrogate", 'errors="replace"'):
        assert part in message


def test_a_template_that_fails_on_the_messages_is_named():
    tokenizer = from_metadata(byte_level_keys(), chat_template="{{ messages[0].content + 1 }}")
    with pytest.raises(ValueError, match="prompt 3: the model's chat template refuses the messages: can only conc"):
        encode_prompt([said("x")], 3, tokenizer)


@pytest.mark.parametrize("params", [3, {"temperature": 0.0}, "greedy", SamplingParams])
def test_params_of_another_class_are_refused(params):
    with pytest.raises(TypeError, match="SamplingParams"):
        params_for(params, 1)
