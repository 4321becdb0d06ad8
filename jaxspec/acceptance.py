"""Says aloud when drafts are hardly ever accepted: the output is right all the same, so nothing else would show it."""

import logging

from jaxspec.metrics import RoundStats

_LOGGER = logging.getLogger("jaxspec")
MANY_ROUNDS = 256
NEAR_NOTHING = 0.05  # accepted drafts per round

_HEAD = (
    "the head was trained for another target, or with another rope_theta or rope_scaling than its config.json "
    "(or the plan's note on it) says"
)
LIKELY_CAUSES = {
    "EAGLE": f"{_HEAD}, or it reads the hidden state before the final norm",
    "EAGLE3": f"{_HEAD}, eagle_aux_hidden_state_layer_ids names other layers than it was trained on (the dialects "
    "count them one apart), or d2t is another head's",
    "STANDALONE": "draft_model is of another kind than the target (base and chat, or another family), or its weights "
    "are not those of its config.json",
    "NEXTN": "the target was trained further, or merged with another, and its own draft layer was not",
    "NGRAM": "the texts do not repeat themselves; prompt lookup then only costs",
}


class AcceptanceWatch:
    """Warns once, on the logger "jaxspec"."""

    def __init__(self, algorithm: str):
        self._algorithm = algorithm
        self._causes = LIKELY_CAUSES.get(algorithm)  # None where nothing drafts, and once it was said

    def look(self, stats: RoundStats) -> None:
        """Takes in an engine's totals, after any step."""
        if self._causes is None or stats.rounds < MANY_ROUNDS or stats.accepted >= NEAR_NOTHING * stats.rounds:
            return
        causes, self._causes = self._causes, None
        _LOGGER.warning(
            "%s: %d of %d drafts were accepted in %d rounds, so speculation only costs. Likely causes: %s; or requests "
            "are sampled at a high temperature. Correct that, or leave out spec for plain decoding.",
            self._algorithm,
            stats.accepted,
            stats.proposed,
            stats.rounds,
            causes,
        )
