"""Takes a request's part of a verdict into the request, after checking it against what the host knows."""

from typing import NamedTuple

from jaxspec.batches import LENGTH, RUNNING, STOP, EchoArrays, PrefillChunk, VerdictArrays
from jaxspec.metrics import Emission, RoundStats, cut_emissions
from jaxspec.outputs import TokenLogprobs
from jaxspec.request import Request


class Step(NamedTuple):
    """One round of one request, or the end of its prefill."""

    token_ids: list[int]
    logprobs: list[TokenLogprobs]  # empty when not asked for
    emission: Emission
    finish: int  # RUNNING, STOP or LENGTH


def read_steps(request: Request, verdict: VerdictArrays, index: int, *, is_round: bool) -> list[Step]:
    """The steps of the request at batch position `index`, up to the one that finished it.

    Rounds after that one emit nothing; they are no steps.

    Raises:
        RuntimeError: the device's account cannot be right for this request.
    """
    steps: list[Step] = []
    num_outputs = len(request.output_ids)
    for r in range(verdict.counts.shape[0]):
        count, finish = int(verdict.counts[r, index]), int(verdict.finish[r, index])
        if steps and steps[-1].finish != RUNNING:
            if count:
                raise _wrong(request, f"{count} tokens were emitted after the round that finished it")
            continue
        token_ids = verdict.tokens[r, index, :count].tolist()
        num_outputs += count
        _check_tokens(request, token_ids, count, finish, num_outputs)
        emission = _emission(request, verdict, r, index) if is_round else Emission(count, 0, 0, False)
        logprobs = [] if request.params.logprobs is None else _logprobs(request, verdict, r, index, token_ids)
        steps.append(Step(token_ids, logprobs, emission, finish))
    return steps


def append_steps(
    request: Request, steps: list[Step], stats: RoundStats
) -> tuple[list[int], list[TokenLogprobs] | None]:
    """Appends the steps to the request and counts them in `stats`.

    Returns:
        The new tokens, and their logprobs; None for these when the request does not ask for them.
    """
    token_ids = [token for step in steps for token in step.token_ids]
    logprobs = [entry for step in steps for entry in step.logprobs]
    request.output_ids += token_ids
    request.logprobs += logprobs
    for step in steps:
        request.emissions.append(step.emission)
        stats.add(step.emission)
    return token_ids, None if request.params.logprobs is None else logprobs


def append_prompt_logprobs(chunk: PrefillChunk, echo: EchoArrays | None, index: int) -> None:
    """Takes the log-probabilities of the prompt's tokens that follow those of a chunk, where its request wants them.

    What is known already (the request was preempted, and is computed anew) is left as it is.

    Raises:
        RuntimeError: it wants them, and the device gave none.
    """
    request = chunk.request
    if not request.wants_prompt_logprobs:
        return
    known, prompt = request.prompt_logprobs, request.prompt_ids
    first, end = len(known) - 1 - chunk.start, min(len(chunk.tokens), len(prompt) - 1 - chunk.start)
    if first >= end:
        return
    if first < 0:
        raise _wrong(request, f"{-first} tokens of its prompt before token {chunk.start} were not computed for it")
    if echo is None:
        raise _wrong(request, "it asks for prompt_logprobs and the verdict has none")
    num_top = request.params.prompt_logprobs or 0
    chosen, ids, top = (leaf[index, first:end].tolist() for leaf in echo)
    for token, logprob, best, values in zip(prompt[len(known) :], chosen, ids, top):
        known.append(TokenLogprobs(token_id=token, logprob=logprob, top=dict(zip(best[:num_top], values[:num_top]))))


def cut_outputs(request: Request, keep: int, stats: RoundStats) -> None:
    """Drops the outputs beyond `keep` tokens from everything that counts them, `stats` included.

    Raises:
        RuntimeError: the request has fewer than `keep` outputs.
    """
    if not 0 <= keep <= len(request.output_ids):
        raise _wrong(request, f"{keep} outputs are to be kept")
    del request.output_ids[keep:]
    del request.logprobs[keep:]
    kept, removed = cut_emissions(request.emissions, keep)
    for emission in removed:
        stats.remove(emission)
    for emission in kept[len(request.emissions) - len(removed) :]:
        stats.add(emission)
    request.emissions = kept


def _check_tokens(request: Request, token_ids: list[int], count: int, finish: int, num_outputs: int) -> None:
    """Checks one step; `num_outputs` includes its tokens."""
    if count < 1 or len(token_ids) != count:
        raise _wrong(request, f"a live row emitted {count} tokens, with room for {len(token_ids)}")
    if num_outputs > request.budget:
        raise _wrong(request, f"{num_outputs} tokens are more than its budget")
    if finish == RUNNING and num_outputs == request.budget:
        raise _wrong(request, "its budget is reached and the device goes on")
    if finish == LENGTH and num_outputs < request.budget:
        raise _wrong(request, f"the device ended it by length after {num_outputs} tokens")
    if finish == STOP and token_ids[-1] not in request.stop_ids:
        raise _wrong(request, f"the device stopped at token {token_ids[-1]}, which is none of {request.stop_ids}")
    if finish not in (RUNNING, STOP, LENGTH):
        raise _wrong(request, f"finish code {finish} is unknown")


def _emission(request: Request, verdict: VerdictArrays, r: int, index: int) -> Emission:
    if verdict.accepted is None or verdict.proposed is None:
        raise _wrong(request, "a round came without its accepted and proposed counts")
    count = int(verdict.counts[r, index])
    accepted, proposed = int(verdict.accepted[r, index]), int(verdict.proposed[r, index])
    if not 0 <= accepted <= min(count, proposed):
        raise _wrong(request, f"{accepted} drafts accepted, of {proposed} proposed and {count} tokens emitted")
    return Emission(count, accepted, proposed, True)


def _logprobs(
    request: Request, verdict: VerdictArrays, r: int, index: int, token_ids: list[int]
) -> list[TokenLogprobs]:
    if verdict.logprobs is None:
        raise _wrong(request, "it asks for logprobs and the verdict has none")
    num_top = request.params.logprobs or 0
    rows: list[tuple[list[int], list[float]]] = [([], [])] * len(token_ids)
    if num_top:
        if verdict.top_ids is None or verdict.top_logprobs is None or verdict.top_ids.shape[-1] < num_top:
            raise _wrong(request, f"it asks for {num_top} top logprobs and the verdict has fewer")
        ids = verdict.top_ids[r, index, : len(token_ids), :num_top].tolist()
        rows = list(zip(ids, verdict.top_logprobs[r, index, : len(token_ids), :num_top].tolist()))
    chosen = verdict.logprobs[r, index, : len(token_ids)].tolist()
    return [
        TokenLogprobs(token_id=token, logprob=logprob, top=dict(zip(*row)))
        for token, logprob, row in zip(token_ids, chosen, rows)
    ]


def _wrong(request: Request, what: str) -> RuntimeError:
    return RuntimeError(
        f"request {request.id}: {what}; prompt {len(request.prompt_ids)}, outputs {len(request.output_ids)}, "
        f"budget {request.budget}, epoch {request.epoch}, row {request.row}, rounds in flight {request.in_flight}."
    )
