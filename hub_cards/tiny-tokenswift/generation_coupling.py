# Published with a draft by hf_longspec, Apache-2.0.
"""Candidates in the order in which the target would choose them, were the draft's logits its own.

The target's rule decides by more than logits: processors change them, and when it samples, so does the noise of the
position. Neither is a secret. A draft that looks at both proposes what the target takes whenever their laws agree,
instead of what is likely before the dice are cast. The target's choice never looks at the draft: its law stays what it
was, and its text for a given seed too. https://huggingface.co/papers/2408.07978 has the bound for one draw; here the
candidates of whole trees are ranked so.
"""

from collections.abc import Callable, Sequence

import torch

from .generation_contextual_penalty import ContextualPenaltyLogitsProcessor
from .generation_logits import TokenRule, warped
from .generation_verification import log_lead

# A token that is behind the first one by x is taken to be the target's choice exp(-2 x) times as often. Chains do not
# depend on it, trees little: with 4+4+4+3 nodes of the bundled draft tau was 3.30, 3.45, 3.54, 3.50 at 0.5, 1, 2, 3.3.
SHARPNESS = 2.0
# Processors that compute with tensors and numbers alone: graphs can hold them.
IN_GRAPHS = {
    "TemperatureLogitsWarper",
    "TopKLogitsWarper",
    "TopPLogitsWarper",
    "MinPLogitsWarper",
    ContextualPenaltyLogitsProcessor.__name__,
}


Paths = torch.Tensor | Callable[[], torch.Tensor]


class Coupling:
    """Scores that candidates are ranked by.

    Args:
        rule ([`TokenRule`], *optional*): The target's. Without one, logits are taken as they are.

    Attributes:
        idle (`bool`): Whether the rule is the argmax of the logits, so that they rank the candidates themselves.
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
        """Whether `scores` may be part of a graph now: not yet, while a text is shorter than a processor's window."""
        return self._tensors_only and (self._rule is None or self._rule.has_recent)

    @property
    def key(self) -> tuple:
        """What such a graph has compiled in."""
        return self._key if self.fits_graphs else ()

    def known(self, depths: int) -> tuple[torch.Tensor, ...]:
        """What decides about the next `depths` tokens beside logits, as far as there is such.

        Returns:
            The noise `(B, depths, V)`, if the target samples; the last tokens of the texts `(B, window)`, if processors
            look at them and at no others.
        """
        if self._rule is None:
            return ()
        noise = (self._rule.noise_of(depths),) if self._samples else ()
        recent = None if self._history_free else self._rule.recent()
        return noise if recent is None else (*noise, recent)

    def scores(self, logits: torch.Tensor, known: Sequence[torch.Tensor], depth: int, paths: Paths) -> torch.Tensor:
        """The logarithm of how likely each token is to be chosen, up to a constant per node.

        Args:
            logits (`torch.Tensor` of shape `(B, n, V)`): The draft's, after nodes of one depth.
            known (sequence of `torch.Tensor`): What the method of this name gave.
            depth (`int`): Drafted tokens that lead to these nodes.
            paths (`torch.Tensor` of shape `(B, n, depth)` or `Callable`): Those tokens, or what gives them, which is
                called if a processor has to see them.

        Returns:
            `torch.Tensor` of shape `(B, n, V)`.
        """
        if self.idle:
            return logits
        logits = logits.to(self._device)  # from where the head is, if the target is divided among devices
        recent = known[-1] if len(known) > self._samples else None
        scores = self._processed(logits, recent, depth, paths)
        return SHARPNESS * log_lead(scores, known[0][:, depth, None]) if self._samples else scores

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
