# Published with a draft by hf_longspec, Apache-2.0.
"""Candidates in the order in which the target would choose them, were the draft's logits its own.

The target's rule decides by more than logits: processors change them, and when it samples, so does the noise of the
position. Neither is a secret. A draft that looks at both proposes what the target takes whenever their laws agree,
instead of what is likely before the dice are cast. The target's choice never looks at the draft: its law stays what it
was, and its text for a given seed too. https://huggingface.co/papers/2408.07978 has the bound for one draw; here the
candidates of whole trees are ranked so.
"""

from collections.abc import Callable

import torch

from .generation_logits import TokenRule
from .generation_verification import log_lead

# A token that is behind the first one by x is taken to be the target's choice exp(-2 x) times as often. Chains do not
# depend on it, trees little: with 4+4+4+3 nodes of the bundled draft tau was 3.30, 3.45, 3.54, 3.50 at 0.5, 1, 2, 3.3.
SHARPNESS = 2.0


class Coupling:
    """Scores that candidates are ranked by.

    Args:
        rule ([`TokenRule`], *optional*): The target's. Without one, logits are taken as they are.

    Attributes:
        idle (`bool`): Whether the rule is the argmax of the logits, so that they rank the candidates themselves.
    """

    def __init__(self, rule: TokenRule | None):
        self.rule = rule
        self.idle = rule is None or not (rule.do_sample or rule.processors)

    def scores(self, logits: torch.Tensor, depth: int, paths: Callable[[], torch.Tensor]) -> torch.Tensor:
        """The logarithm of how likely each token is to be chosen, up to a constant per node.

        Args:
            logits (`torch.Tensor` of shape `(B, n, V)`): The draft's, after nodes of `depth`.
            depth (`int`): Of these nodes; the root has 0.
            paths (`Callable`): Gives the drafted tokens `(B, n, k)` that lead to them, as far as they are known,
                `k <= depth`, if a processor has to see them.

        Returns:
            `torch.Tensor` of shape `(B, n, V)`.
        """
        if self.idle or self.rule is None:
            return logits
        scores = _processed(self.rule, logits, paths)
        if not self.rule.do_sample:
            return scores
        return SHARPNESS * log_lead(scores, self.rule.noise_at(depth)[:, None])


def _processed(rule: TokenRule, logits: torch.Tensor, paths: Callable[[], torch.Tensor]) -> torch.Tensor:
    if rule.history_free:
        return rule.scores_of_all(logits)
    tokens, scores = paths(), []
    for node in range(logits.shape[1]):
        for place in range(tokens.shape[2]):
            rule.sequences.try_out(place, tokens[:, node, place])
        scores.append(rule.scores_at(logits[:, node], tokens.shape[2]))
    return torch.stack(scores, 1)
