"""The OpenAI batch format: requests with a custom_id, a url and a body; responses as that API would give them."""

import hashlib
import time
from collections.abc import Mapping
from typing import Any, Literal

from jaxspec.outputs import Completion, RequestOutput, TokenLogprobs
from jaxspec.tokenizer import Tokenizer

ID = "custom_id"
Kind = Literal["chat", "text"]
_URLS: dict[str, Kind] = {"/v1/chat/completions": "chat", "/v1/completions": "text"}
_ROW_FIELDS = frozenset((ID, "method", "url", "body"))
# What says nothing about the answer; `model` is what was asked for, and the response says what answered.
_NO_MATTER = ("model", "user", "metadata", "store", "service_tier")
_RENAMED = {"max_completion_tokens": "max_tokens"}


def read_request(row: Mapping[str, Any], number: int) -> tuple[Kind, Any, dict[str, Any]]:
    """What a row asks: its kind, its prompt, and the sampling parameters that it gives; null is not given.

    Raises:
        ValueError: a field is missing or unknown, or asks for another endpoint or for a stream.
        TypeError: the custom_id is no string, or the body no object.
    """
    if not isinstance(row.get(ID), str):
        raise TypeError(f"line {number} has {ID}={row.get(ID)!r}; give a string.")
    unknown = sorted(set(row) - _ROW_FIELDS)
    if unknown:
        raise ValueError(
            f"line {number} has {unknown}; a row of the batch format has {', '.join(sorted(_ROW_FIELDS))}."
        )
    kind = _URLS.get(row.get("url", ""))
    if kind is None or row.get("method", "POST") != "POST":
        urls = " or ".join(_URLS)
        raise ValueError(f"line {number} asks to {row.get('method')} {row.get('url')!r}; only POST to {urls} is known.")
    if not isinstance(row.get("body"), dict):
        raise TypeError(f"line {number} has body={row.get('body')!r}; give an object.")
    body = {name: value for name, value in row["body"].items() if value is not None and name not in _NO_MATTER}
    if body.pop("stream", False):
        raise ValueError(f"line {number} asks for a stream, which a file is not; leave stream out.")
    field = "messages" if kind == "chat" else "prompt"
    if field not in body:
        raise ValueError(f"line {number} has no {field} in its body, only {sorted(body)}.")
    prompt = body.pop(field)
    return kind, prompt, _as_params(kind, body, number)


def _as_params(kind: Kind, body: dict[str, Any], number: int) -> dict[str, Any]:
    params = {_RENAMED.get(name, name): value for name, value in body.items()}
    if len(params) < len(body):
        raise ValueError(f"line {number} has both max_tokens and max_completion_tokens; give one.")
    if kind == "chat":  # there, a switch and a count
        top = params.pop("top_logprobs", 0)
        wanted = params.pop("logprobs", False)
        if top and not wanted:
            raise ValueError(f"line {number} has top_logprobs={top!r} without logprobs; set logprobs to true.")
        if wanted:
            params["logprobs"] = top
    return params


def response_row(
    custom_id: str, kind: Kind, output: RequestOutput, *, model: str, tokenizer: Tokenizer | None
) -> dict[str, Any]:
    """The output row of an answer; `model` is what answered."""
    is_chat = kind == "chat"
    choose = _chat_choice if is_chat else _text_choice
    num_tokens = sum(len(completion.token_ids) for completion in output.completions)
    body = {
        "id": f"{'chatcmpl' if is_chat else 'cmpl'}-{_digest(custom_id)}",
        "object": "chat.completion" if is_chat else "text_completion",
        "created": int(time.time()),
        "model": model,
        "choices": [choose(completion, tokenizer) for completion in output.completions],
        "usage": {
            "prompt_tokens": len(output.prompt_token_ids),
            "completion_tokens": num_tokens,
            "total_tokens": len(output.prompt_token_ids) + num_tokens,
        },
    }
    return _row(custom_id, 200, body)


def error_row(custom_id: str, message: str) -> dict[str, Any]:
    """The output row of a request that cannot be answered."""
    error = {"message": message, "type": "invalid_request_error", "param": None, "code": None}
    return _row(custom_id, 400, {"error": error})


def is_error(row: Mapping[str, Any]) -> bool:
    """Whether an output row is of `error_row`."""
    return row["response"]["status_code"] != 200


def _row(custom_id: str, status: int, body: dict[str, Any]) -> dict[str, Any]:
    digest = _digest(custom_id)
    response = {"status_code": status, "request_id": f"req_{digest}", "body": body}
    return {"id": f"batch_req_{digest}", ID: custom_id, "response": response, "error": None}


def _digest(custom_id: str) -> str:
    return hashlib.blake2b(custom_id.encode(errors="surrogatepass"), digest_size=12).hexdigest()


def _chat_choice(completion: Completion, tokenizer: Tokenizer | None) -> dict[str, Any]:
    entries = completion.logprobs
    message = {"role": "assistant", "content": completion.text}
    if completion.reasoning is not None:
        message["reasoning_content"] = completion.reasoning
    return {
        "index": completion.index,
        "message": message,
        "logprobs": None if entries is None else {"content": [_chat_logprob(e, tokenizer) for e in entries]},
        "finish_reason": completion.finish_reason,
    }


def _chat_logprob(entry: TokenLogprobs, tokenizer: Tokenizer | None) -> dict[str, Any]:
    def named(token_id: int, logprob: float) -> dict[str, Any]:
        token = _say(token_id, tokenizer)
        return {"token": token, "logprob": logprob, "bytes": list(token.encode())}

    top = [named(token_id, logprob) for token_id, logprob in entry.top.items()]
    return {**named(entry.token_id, entry.logprob), "top_logprobs": top}


def _text_choice(completion: Completion, tokenizer: Tokenizer | None) -> dict[str, Any]:
    entries = completion.logprobs
    return {
        "index": completion.index,
        "text": completion.text,
        "logprobs": None if entries is None else _text_logprobs(entries, tokenizer),
        "finish_reason": completion.finish_reason,
    }


def _text_logprobs(entries: list[TokenLogprobs], tokenizer: Tokenizer | None) -> dict[str, Any]:
    return {
        "tokens": [_say(entry.token_id, tokenizer) for entry in entries],
        "token_logprobs": [entry.logprob for entry in entries],
        "top_logprobs": [{_say(i, tokenizer): value for i, value in entry.top.items()} for entry in entries],
    }


def _say(token_id: int, tokenizer: Tokenizer | None) -> str:
    """A token's text; its number where there is no tokenizer."""
    return str(token_id) if tokenizer is None else tokenizer.decode([token_id], skip_special_tokens=False)
