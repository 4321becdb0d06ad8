"""What a line of a batch file may be, and one clear line for what it may not."""

import json
from typing import Any

import pytest

from jaxspec.offline.rows import Reading, name_of, read_row, seed_of
from jaxspec.sampling_params import SamplingParams

DEFAULTS = SamplingParams(temperature=0.5, max_tokens=9, seed=4)
CHAT = [{"role": "user", "content": "hi"}]


def row_of(values: object, **reading: Any):
    return read_row(json.dumps(values).encode(), 3, Reading(DEFAULTS, **reading))


def openai(body: dict, url: str = "/v1/chat/completions", **changes: Any) -> dict:
    return {"custom_id": "a", "method": "POST", "url": url, "body": {"model": "m", **body}, **changes}


@pytest.mark.parametrize(
    ("values", "prompt"),
    [
        ({"prompt": "Once"}, "Once"),
        ({"prompt": [1, 2]}, [1, 2]),
        ({"prompt_ids": [1, 2]}, [1, 2]),
        ({"messages": CHAT}, CHAT),
        (openai({"messages": CHAT}), CHAT),
        (openai({"prompt": "Once"}, "/v1/completions"), "Once"),
        (openai({"prompt": [1, 2]}, "/v1/completions"), [1, 2]),
    ],
)
def test_prompts_of_every_format(values, prompt):
    assert row_of(values).prompt == prompt


def test_a_row_has_its_own_parameters_and_its_own_seed():
    row = row_of({"id": 7, "prompt": "x", "temperature": 0, "stop": ["a"]})
    assert (row.name.id, row.params.temperature, row.params.stop, row.params.max_tokens) == (7, 0, ("a",), 9)
    assert row.params.seed == seed_of(4, "7") != row_of({"id": 8, "prompt": "x"}).params.seed
    assert row_of({"id": 7, "prompt": "x", "seed": 11}).params.seed == 11
    assert (
        row_of({"prompt": "x", "logit_bias": {"50": -1, "7": 2}}).params
        == row_of({"prompt": "x", "logit_bias": [[50, -1], [7, 2]]}).params
    )


def test_a_line_that_is_nested_too_deeply_is_an_error_of_its_own():
    with pytest.raises(ValueError, match="line 3 is nested too deeply"):
        read_row(b'{"prompt": ' + b"[" * 100_000, 3, Reading(DEFAULTS))


def test_openai_names_become_ours_and_null_is_not_given():
    body = {
        "messages": CHAT,
        "max_completion_tokens": 5,
        "logprobs": True,
        "top_logprobs": 2,
        "top_p": None,
        "top_k": 3,
    }
    params = row_of(openai(body)).params
    assert (params.max_tokens, params.logprobs, params.top_p, params.top_k) == (5, 2, 1.0, 3)
    assert row_of(openai({"messages": CHAT, "logprobs": False})).params.logprobs is None


def test_a_field_may_hold_the_prompt_and_others_be_copied():
    values = {"question": "2 + 2", "answer": "4", "id": "q"}
    row = row_of(values, field="question", copied=("answer",), is_chat=True, system="Be brief.")
    assert row.copied == {"answer": "4"}
    assert row.prompt == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2 + 2"}]
    with pytest.raises(ValueError, match="line 3 has 'answer', which is no field of a prompt"):
        row_of(values, field="question")


@pytest.mark.parametrize(
    ("values", "kind", "message"),
    [
        ([1], ValueError, "line 3 is a list; each line must be one JSON object"),
        ({"text": "x"}, ValueError, r"line 3 has no prompt; give one of prompt, messages, prompt_ids"),
        ({"prompt": "x", "messages": CHAT}, ValueError, "line 3 has prompt and messages"),
        ({"messages": "hi"}, TypeError, "messages='hi'; give a list of chat messages"),
        ({"prompt": 5}, TypeError, "prompt of 5; give a string, token ids or chat messages"),
        ({"prompt": "x", "id": [1]}, TypeError, r"id=\[1\]; give a string or an integer"),
        ({"prompt": "x", "tempreature": 1}, ValueError, "'tempreature'.*no setting of SamplingParams"),
        ({"prompt": "x", "max_new_tokens": 1}, TypeError, "use max_tokens"),
        ({"prompt": "x", "temperature": -1}, ValueError, "temperature=-1"),
        ({"prompt": "x", "stop": 5}, TypeError, "stop"),
        (openai({"messages": CHAT}, "/v1/embeddings"), ValueError, "'/v1/embeddings'; only POST to"),
        (openai({"messages": CHAT}, extra=1), ValueError, "'extra'"),
        (openai({"messages": CHAT, "stream": True}), ValueError, "asks for a stream"),
        (openai({"messages": CHAT, "tools": []}), ValueError, "'tools'"),
        (openai({"messages": CHAT, "top_logprobs": 2}), ValueError, "without logprobs"),
        (openai({"prompt": "x"}), ValueError, r"no messages in its body, only \['prompt'\]"),
        (openai({"messages": CHAT, "max_tokens": 1, "max_completion_tokens": 2}), ValueError, "has both"),
        ({"custom_id": 5, "body": {}}, TypeError, "custom_id=5; give a string"),
        ({"custom_id": "a", "url": "/v1/completions", "body": []}, TypeError, r"body=\[\]; give an object"),
    ],
)
def test_what_is_no_row_is_named(values, kind, message):
    with pytest.raises(kind, match=message):
        row_of(values)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (b'{"id": "a"}', "a"),
        (b'{"custom_id": "b", "id": "a"}', "b"),
        (b'{"id": true}', "line-4"),
        (b'{"body": {}}', "line-4"),
        (b'{"id": "a"', "line-4"),
        (b"\xff", "line-4"),
        (b"[]", "line-4"),
        (b"[" * 100_000, "line-4"),
    ],
)
def test_every_line_has_a_name(line, expected):
    assert name_of(line, 4).key == expected
