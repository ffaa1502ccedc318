"""Eagle3DraftModel: one decoder layer on states of three layers of the target, run once per drafted token."""

from typing import Any, ClassVar

import torch
from torch import nn

from ...generation.drafter import Binding
from ..families.aux_drafter import AuxDrafter
from ..families.aux_hidden_states import AuxDraftModel
from ..families.aux_layers import Attend, Rotary
from ..settings import WIDTHS, Setting
from .configuration_eagle3 import Eagle3Config
from .generation_eagle3 import Eagle3Drafter, ParallelEagle3Drafter
from .layers_eagle3 import Eagle3Layer
from .texts_eagle3 import draft_logits, forward_on_texts


class Eagle3DraftModel(AuxDraftModel):
    """A draft of one decoder layer, which reads the target's residual stream at three places.

    An entry joins these auxiliary hidden states of one token with the embedding of the next. Its keys and values are
    the draft's own; with one layer they depend on the entry alone, so that a window over the last entries is exact.

    ```python
    draft = Eagle3DraftModel.from_pretrained("yuhuili/EAGLE3-LLaMA3.1-Instruct-8B", target=target)
    target.generate(**inputs, assistant_model=draft)
    ```

    Source: EAGLE-3, https://huggingface.co/papers/2503.01840.
    """

    config_class = Eagle3Config
    reads_published = True
    _no_split_modules = ["Eagle3Layer"]
    settings: ClassVar[dict[str, Any]] = {
        "tree_widths": WIDTHS,  # 16 nodes with the root, which is a whole tile of the kernels
        "norm_output": Setting(None, "As the field of the config, which it replaces.", bool),
    }

    def __init__(self, config: Eagle3Config, *args: Any, **kwargs: Any):
        super().__init__(config, *args, **kwargs)
        width = config.num_aux_hidden_states * config.target_hidden_size
        eps = config.rms_norm_eps
        self.fc = nn.Linear(width, config.hidden_size, bias=config.fc_bias)
        self.input_norm = nn.RMSNorm(width, eps=eps) if config.norm_before_fc else None
        norms = [nn.RMSNorm(config.target_hidden_size, eps=eps) for _ in range(config.num_aux_hidden_states)]
        self.fc_norm = nn.ModuleList(norms) if config.fc_norm else None
        self.layers = nn.ModuleList(Eagle3Layer(config, index) for index in range(config.num_hidden_layers))
        parallel = config.mask_token_id is not None
        # not zero, where the gradient of a norm is large
        mask_hidden = config.initializer_range * torch.randn(1, 1, width) if parallel else None
        self.mask_hidden = None if mask_hidden is None else nn.Parameter(mask_hidden)
        self.add_ends(config)

    forward = forward_on_texts
    draft_logits = draft_logits

    def features(self, aux_hidden_states: torch.Tensor) -> torch.Tensor:
        """Project auxiliary hidden states `(B, T, layers * hidden)` to the width of the draft, `(B, T, hidden)`."""
        if self.input_norm is not None:
            aux_hidden_states = self.input_norm(aux_hidden_states)
        if self.fc_norm is not None:
            parts = aux_hidden_states.chunk(self.config.num_aux_hidden_states, -1)
            aux_hidden_states = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], -1)
        return self.fc(aux_hidden_states)

    def run(
        self,
        states: torch.Tensor,
        embedded: torch.Tensor,
        angles: Rotary,
        attend: Attend,
        query_places: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run the layers.

        Args:
            states (`torch.Tensor` of shape `(B, T, hidden)`): Features of the target, or the parents' states.
            embedded (`torch.Tensor` of shape `(B, T, hidden)`): Embeddings of the entries' tokens.
            angles (`tuple[torch.Tensor, torch.Tensor]`): Cosines and sines of the entries' positions.
            attend (`Callable`): Attention of a layer, from its index, query `(B, H, n, D)`, key and value
                `(B, K, T, D)` to `(B, H, n, D)`.
            query_places (`torch.LongTensor` of shape `(B, n)`, *optional*): Entries to compute. All by default.

        Returns:
            `tuple[torch.Tensor, torch.Tensor]`: Normalised outputs `(B, n, hidden)`, from which logits are computed,
            and the states `(B, n, hidden)` that the next step reads.
        """
        for index, layer in enumerate(self.layers):
            is_last = index == len(self.layers) - 1
            states = layer(states, embedded if index == 0 else None, angles, attend, query_places if is_last else None)
        outputs = self.norm(states)
        return outputs, outputs if self.effective("norm_output") else states

    def with_mask_rows(
        self, aux_hidden_states: torch.Tensor, tokens: torch.Tensor, count: int, target: Any = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return embeddings and features `(B, T + count, hidden)` of T entries, and of the rows that P-EAGLE adds."""
        masks = tokens.new_full((len(tokens), count), self.config.mask_token_id)
        assert self.mask_hidden is not None
        hidden = self.mask_hidden.expand(len(tokens), count, -1)
        embedded = self.embed(torch.cat([tokens, masks], 1), target)
        return embedded, self.features(torch.cat([aux_hidden_states, hidden], 1))

    def make_drafter(self, binding: Binding) -> AuxDrafter:
        return (Eagle3Drafter if self.mask_hidden is None else ParallelEagle3Drafter)(binding, self)
