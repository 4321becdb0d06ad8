"""The resolved plan as data: what runs, and a note for each value that the user did not set to what it is."""

import dataclasses
import logging
from typing import Any

from jaxspec.outputs import Exactness

# The kinds of note, and what they mean under strict=True.
AUTO = "auto"  # a value the user left open was filled in
REQUESTED = "requested"  # the settings themselves ask for it, at a cost worth saying
OVERRIDE = "override"  # a value the user set was replaced
FALLBACK = "fallback"  # something slower runs than what was asked for or is the default
WARNING = "warning"  # a setting has no effect, or something could not be checked
REFUSED_BY_STRICT = (OVERRIDE, FALLBACK, WARNING)

_LOGGER = logging.getLogger("jaxspec")


@dataclasses.dataclass(frozen=True)
class Note:
    """One value that is not what the user set, or that is worth a word.

    Attributes:
        field: the setting, e.g. "num_draft_tokens".
        before: what the user set; None is nothing.
        after: what runs; None is a setting without effect, `before` is a value left as it is.
        reason: why, and what to set where one would have it otherwise.
        kind: one of the kinds above.
    """

    field: str
    before: object
    after: object
    reason: str
    kind: str = AUTO

    def __str__(self) -> str:
        change = f"={self.after}" if self.before == self.after else f": {self.before} -> {self.after}"
        return f"[{self.kind}] {self.field}{change} ({self.reason})"


@dataclasses.dataclass(frozen=True, kw_only=True)
class TargetInfo:
    """What resolving needs to know of the target.

    Attributes:
        architecture: e.g. "LlamaForCausalLM".
        max_position: tokens of context the model was built for.
        num_mtp_layers: layers of the model's own draft head (multi-token prediction); 0 is none.
        tokenizer_hash: fingerprint of the tokenizer's table, None where there is no tokenizer.
        has_recurrent_state: layers keep one state for all tokens so far, which has one past.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    max_position: int
    num_mtp_layers: int = 0
    tokenizer_hash: str | None = None
    has_recurrent_state: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class DraftInfo:
    """What resolving needs to know of a draft checkpoint; the fields are those of `TargetInfo`.

    `max_position` is None for a draft head: what its config says is the length it was trained on, and no limit.
    `draft_vocab` is how many tokens a head chooses from, None where it chooses from the whole vocabulary.
    """

    architecture: str
    vocab_size: int
    max_position: int | None
    tokenizer_hash: str | None = None
    draft_vocab: int | None = None
    has_recurrent_state: bool = False

    @property
    def num_tokens(self) -> int:
        """Tokens that the draft chooses from."""
        return self.vocab_size if self.draft_vocab is None else self.draft_vocab


@dataclasses.dataclass(frozen=True, kw_only=True)
class SpecPlan:
    """What runs. Nothing in it is open.

    Attributes:
        algorithm: the draft method, or "NONE" for plain decoding.
        draft_model: None where no checkpoint drafts; with algorithm "EAGLE", the target's own head does.
        num_steps: longest draft path, in tokens; 0 for plain decoding.
        eagle_topk: branches kept per step; 1 is a chain.
        num_draft_tokens: nodes a round verifies, root included; 1 for plain decoding.
        static_tree: the nodes of a tree of fixed form, see `SpecConfig`; None where there is none.
        merge: the second draft method that fills the same tree, and its chain's length; None and 0 where there is none.
        rounds_in_flight: 0 waits for each round (v1), 1 overlaps one (v2).
        rounds_per_dispatch: rounds the device runs before the host looks.
        num_pages: pages of the KV pool, of page_size tokens each.
        prefix_caching: whether pages of requests that began alike are shared.
        chunked_prefill_size: most tokens of a prompt computed in one step.
        decode_row_buckets: batch sizes that decoding is compiled for, ascending.
        prefill_chunk_buckets: chunk lengths that prefill is compiled for, ascending.
        scan_layers: whether equal layers are stacked and scanned over.
        accept_rule, ..., accept_threshold_acc: how drafts are judged, see `SpecConfig`.
        attention_backend: "xla", or "cpu" for the CPU's kernel.
        weight_layout: "plain" arrays, or "panels" for the CPU's kernel.
        weight_dtype: what weights that are multiplied are stored as; "int8" is one scale for some values of a column.
        simulate_accept_len: mean tokens of a round whose drafts are accepted unseen, so that the output is not the
            model's; None where the target judges.
        notes: what was filled in, replaced or found worth saying, in the order it was decided.
    """

    algorithm: str
    draft_model: str | None
    num_steps: int
    eagle_topk: int
    num_draft_tokens: int
    static_tree: tuple[tuple[int, ...], ...] | None = None
    merge: str | None = None
    merge_draft_model: str | None = None
    merge_num_steps: int = 0
    rounds_in_flight: int
    rounds_per_dispatch: int
    max_running_requests: int
    accept_rule: str
    block_verification: bool = False
    accept_threshold_single: float = 1.0
    accept_threshold_acc: float = 1.0
    shared_noise: bool
    ngram_min_match: int
    ngram_max_match: int
    max_model_len: int
    page_size: int
    num_pages: int
    chunked_prefill_size: int
    decode_row_buckets: tuple[int, ...]
    prefill_chunk_buckets: tuple[int, ...]
    dtype: str
    attention_backend: str
    scan_layers: bool
    weight_layout: str = "plain"
    weight_dtype: str = "float32"
    simulate_accept_len: float | None = None
    prefix_caching: bool = True
    notes: tuple[Note, ...] = ()

    @property
    def exactness(self) -> Exactness:
        """What sampled output is to plain decoding's; greedy output is the same, token for token, if not simulated."""
        if self.simulate_accept_len is not None or min(self.accept_threshold_single, self.accept_threshold_acc) < 1:
            return "lossy"
        return "token" if self.accept_rule == "coupled" else "law"

    @property
    def path_len(self) -> int:
        """Most tokens that one round commits."""
        return max(self.num_steps, self.merge_num_steps) + 1

    def describe(self) -> str:
        """Returns one line of values, then one line a note."""
        return "\n".join([self._values(), *(f"  {note}" for note in self.notes)])

    def log(self) -> None:
        """Writes `describe` to the logger "jaxspec": automatic values as info, other notes as warnings."""
        _LOGGER.info("%s", self._values())
        for note in self.notes:
            _LOGGER.log(logging.INFO if note.kind == AUTO else logging.WARNING, "plan: %s", note)

    def settings(self) -> dict[str, Any]:
        """What is set, by name, without the notes; of a merged method only where there is one."""
        names = [field.name for field in dataclasses.fields(self) if field.name != "notes"]
        if self.merge is None:
            names.remove("merge_num_steps")
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}

    def _values(self) -> str:
        values = self.settings()
        values["rounds_in_flight"] = f"{self.rounds_in_flight} ({'v2' if self.rounds_in_flight else 'v1'})"
        return "plan: " + ", ".join(f"{name}={value}" for name, value in values.items())
