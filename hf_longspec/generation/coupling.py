"""Candidates in the order in which the target would choose them, were the draft's logits its own.

The target's rule decides by more than logits: processors change them, and when it samples, so does the noise of the
position. Neither is a secret. A draft that looks at both proposes what the target takes whenever their laws agree,
instead of what is likely before the dice are cast. The target's choice never looks at the draft: its law stays what it
was, and its text for a given seed too. https://huggingface.co/papers/2408.07978 has the bound for one draw; here the
candidates of whole trees are ranked so.
"""

from collections.abc import Callable, Sequence

import torch

from .logits import TokenRule, warped
from .verification import log_lead

# A token that is behind the first one by x is taken to be the target's choice exp(-2 x) times as often. Chains do not
# depend on it, trees little: with 4+4+4+3 nodes of the bundled draft tau was 3.30, 3.45, 3.54, 3.50 at 0.5, 1, 2, 3.3.
SHARPNESS = 2.0
# Processors that compute with tensors and numbers alone, and look at no token: graphs can hold them.
IN_GRAPHS = {"TemperatureLogitsWarper", "TopKLogitsWarper", "TopPLogitsWarper", "MinPLogitsWarper"}


class Coupling:
    """Scores that candidates are ranked by.

    Args:
        rule ([`TokenRule`], *optional*): The target's. Without one, logits are taken as they are.

    Attributes:
        idle (`bool`): Whether the rule is the argmax of the logits, so that they rank the candidates themselves.
        fits_graphs (`bool`): Whether `scores` may be part of a graph. Its `paths` are not asked for then.
        key (`tuple`): What such a graph has compiled in.
    """

    def __init__(self, rule: TokenRule | None):
        self._rule = rule
        self._device = None if rule is None else rule.sequences.tokens.device
        self._samples = rule is not None and rule.do_sample
        self._processors = () if rule is None else tuple(rule.processors)
        self.idle = not (self._samples or self._processors)
        self._history_free = rule is None or rule.history_free
        names = [type(processor).__name__ for processor in self._processors]
        self.fits_graphs = self._history_free and IN_GRAPHS.issuperset(names)
        settings = (tuple(vars(processor).items()) for processor in self._processors)
        self.key = (self._samples, *zip(names, settings, strict=True)) if self.fits_graphs else ()

    def noise(self, depths: int) -> tuple[torch.Tensor, ...]:
        """What decides about the next `depths` tokens, `(B, depths, V)`, if the target samples; otherwise nothing."""
        return (self._rule.noise_of(depths),) if self._samples and self._rule is not None else ()

    def scores(
        self, logits: torch.Tensor, noise: Sequence[torch.Tensor], paths: Callable[[], torch.Tensor] | None = None
    ) -> torch.Tensor:
        """The logarithm of how likely each token is to be chosen, up to a constant per node.

        Args:
            logits (`torch.Tensor` of shape `(B, n, V)`): The draft's, after some nodes.
            noise (sequence of at most one `torch.Tensor` of shape `(B, n, V)` or `(B, 1, V)`): The rows that `noise`
                gave for the tokens that follow them.
            paths (`Callable`, *optional*): Gives the drafted tokens `(B, n, k)` that lead to them, as far as they are
                known, if a processor has to see them.

        Returns:
            `torch.Tensor` of shape `(B, n, V)`.
        """
        if self.idle:
            return logits
        logits = logits.to(self._device)  # from where the head is, if the target is divided among devices
        scores = warped(self._processors, logits) if self._history_free else self._processed(logits, paths)
        return SHARPNESS * log_lead(scores, noise[0]) if noise else scores

    def _processed(self, logits: torch.Tensor, paths: Callable[[], torch.Tensor] | None) -> torch.Tensor:
        rule = self._rule
        assert rule is not None and paths is not None
        tokens, scores = paths(), []
        for node in range(logits.shape[1]):
            for place in range(tokens.shape[2]):
                rule.sequences.try_out(place, tokens[:, node, place])
            scores.append(rule.scores_at(logits[:, node], tokens.shape[2]))
        return torch.stack(scores, 1)
