"""Coupling: rank candidates as the target would choose them if the draft's logits were its own.

The target's choice depends on its logits, on the logits processors and, when it samples, on the noise of the position.
The last two are known while drafting. A draft that applies both proposes the very token that the target will draw
whenever the two distributions agree. The target's choice does not depend on the draft, so the distribution of the text,
and the text for a given seed, stay the same. https://huggingface.co/papers/2408.07978 bounds the acceptance of one such
draw; here all candidates of a tree are ranked this way.
"""

from collections.abc import Callable, Sequence

import torch

from .contextual_penalty import ContextualPenaltyLogitsProcessor
from .logits import TokenRule, warped
from .verification import perturbed_log_probs

# A token whose perturbed log-probability is lower than the largest one by x counts as exp(-2 x) times as likely to be
# chosen. Chains do not depend on this factor, trees little: with 4+4+4+3 nodes of the bundled draft tau was 3.30, 3.45,
# 3.54, 3.50 at 0.5, 1, 2, 3.3.
SHARPNESS = 2.0
# Processors that compute with tensors and numbers alone, so that they can be part of a graph.
IN_GRAPHS = {
    "TemperatureLogitsWarper",
    "TopKLogitsWarper",
    "TopPLogitsWarper",
    "MinPLogitsWarper",
    ContextualPenaltyLogitsProcessor.__name__,
}


Paths = torch.Tensor | Callable[[], torch.Tensor]


class Coupling:
    """Compute the scores that candidates are ranked by.

    Args:
        rule ([`TokenRule`], *optional*): The target's. Without one, logits are taken as they are.

    Attributes:
        idle (`bool`): Whether the rule is the argmax of the logits, so that the logits are the scores.
    """

    def __init__(self, rule: TokenRule | None):
        self._rule = rule
        self._device = None if rule is None else rule.sequences.tokens.device
        self._samples = rule is not None and rule.do_sample
        self._processors = () if rule is None else tuple(rule.processors)
        self.idle = not (self._samples or self._processors)
        self._history_free = rule is None or rule.history_free
        names = [type(processor).__name__ for processor in self._processors]
        self._tensors_only = IN_GRAPHS.issuperset(names)
        settings = (tuple(vars(processor).items()) for processor in self._processors)
        self._key = (self._samples, *zip(names, settings, strict=True)) if self._tensors_only else ()

    @property
    def fits_graphs(self) -> bool:
        """Whether `scores` may be part of a graph now. It may not while a text is shorter than a processor's window."""
        return self._tensors_only and (self._rule is None or self._rule.has_recent)

    @property
    def key(self) -> tuple:
        """Settings that such a graph depends on."""
        return self._key if self.fits_graphs else ()

    def known(self, depths: int) -> tuple[torch.Tensor, ...]:
        """Return the tensors besides logits that decide the next `depths` tokens.

        Returns:
            `tuple[torch.Tensor, ...]`: The noise `(B, depths, V)` if the target samples, and the last tokens of the
            texts `(B, window)` if processors depend on these alone.
        """
        if self._rule is None:
            return ()
        noise = (self._rule.noise_of(depths),) if self._samples else ()
        recent = None if self._history_free else self._rule.recent()
        return noise if recent is None else (*noise, recent)

    def scores(self, logits: torch.Tensor, known: Sequence[torch.Tensor], depth: int, paths: Paths) -> torch.Tensor:
        """Return the log-probability that each token is chosen, up to a constant per node.

        Args:
            logits (`torch.Tensor` of shape `(B, n, V)`): The draft's, after nodes of one depth.
            known (sequence of `torch.Tensor`): Result of [`Coupling.known`].
            depth (`int`): Drafted tokens that lead to these nodes.
            paths (`torch.Tensor` of shape `(B, n, depth)` or `Callable`): Those tokens, or a function that returns
                them, which is called only if a processor needs them.

        Returns:
            `torch.Tensor` of shape `(B, n, V)`.
        """
        if self.idle:
            return logits
        logits = logits.to(self._device)  # from the device of the head, if the target is sharded
        recent = known[-1] if len(known) > self._samples else None
        scores = self._processed(logits, recent, depth, paths)
        return SHARPNESS * perturbed_log_probs(scores, known[0][:, depth, None]) if self._samples else scores

    def _processed(self, logits: torch.Tensor, recent: torch.Tensor | None, depth: int, paths: Paths) -> torch.Tensor:
        if self._history_free:
            return warped(self._processors, logits)
        tokens = paths() if callable(paths) else paths
        if recent is not None:
            earlier = recent[:, None].expand(-1, logits.shape[1], -1)
            return warped(self._processors, logits, torch.cat([earlier, tokens], 2)[..., -recent.shape[1] :])
        rule = self._rule
        assert rule is not None
        scores = []
        for node in range(logits.shape[1]):
            for place in range(depth):
                rule.sequences.try_out(place, tokens[:, node, place])
            scores.append(rule.scores_at(logits[:, node], depth))
        return torch.stack(scores, 1)
