"""Eagle3DraftModel: one decoder layer on states of three layers of the target, run once per drafted token."""

import copy
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any, ClassVar, Self

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.utils.deprecation import deprecate_kwarg

from ...generation.target import TargetView
from ...generation.target_modules import final_norm_of, layer_at, refuse_compiled_forward
from ..base import DraftModel
from ..loading import HUB_KWARGS
from ..settings import WIDTHS, Setting
from .configuration_eagle3 import Eagle3Config, default_layer_ids
from .generation_eagle3 import Eagle3Drafter
from .layers_eagle3 import Attend, ChainedAttention, Eagle3Layer, Rotary

# The value of `window` that stands for the number of positions that the draft was trained with.
TRAINED = "trained"


class Eagle3DraftModel(DraftModel):
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
    drafter_class = Eagle3Drafter
    _no_split_modules = ["Eagle3Layer"]
    settings: ClassVar[dict[str, Any]] = {
        "tree_widths": WIDTHS,  # 16 nodes with the root, which is a whole tile of the kernels
        "window": Setting(
            TRAINED,
            "Number of last entries that are kept; 'trained' is the length that the draft was trained with, and None "
            "keeps all of the text.",
            int,
            choices=(TRAINED,),
        ),
        "sinks": Setting(4, "Number of first entries that are kept besides.", int, least=0),
        "rope_theta": Setting(None, "Base of the draft's rotary embedding, in place of the config's.", float),
        "target_layer_ids": Setting(None, "The layers of the target that are read, in place of the config's."),
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
        self.norm = nn.RMSNorm(config.hidden_size, eps=eps)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size) if config.own_embedding else None
        size = config.draft_vocab_size or config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, size, bias=False) if config.own_head else None
        # Target id of draft token i is i + d2t[i].
        self.register_buffer("d2t", torch.zeros(size, dtype=torch.long) if config.draft_vocab_size else None)
        self.post_init()

    @classmethod
    def from_target(cls, target: PreTrainedModel, **overrides: Any) -> Self:
        """Return an untrained draft for `target` in eval mode at its `place`, with copies of embedding and head."""
        draft = super().from_target(target, **overrides)
        draft.copy_from(target)
        return draft

    @classmethod
    def check_structure(cls, target: PreTrainedModel) -> None:
        """Refuse targets without a final norm."""
        final_norm_of(target)

    @torch.no_grad()
    def copy_from(self, target: PreTrainedModel) -> None:
        """Copy the target's embedding and the rows of its head into those that the draft has of its own.

        Raises:
            ValueError: If the draft has another width, or the target's weights are not in memory.
        """
        for part, module, what in (
            (self.embed_tokens, target.get_input_embeddings(), "own_embedding"),
            (self.lm_head, target.get_output_embeddings(), "own_head"),
        ):
            if part is None:
                continue
            if module.weight.is_meta or module.weight.shape[1] != part.weight.shape[1]:
                raise ValueError(
                    f"{what}=True: cannot copy the target's rows, which have shape {tuple(module.weight.shape)} on "
                    f"{module.weight.device}. Load the target without offloading, with the width of the draft."
                )
            ids = self.token_ids.to(module.weight.device)
            rows = module.weight if part is self.embed_tokens else module.weight[ids]
            part.weight.copy_(rows)

    @classmethod
    def _load(
        cls, path: Any, target: PreTrainedModel | None, *args: Any, **kwargs: Any
    ) -> tuple["Eagle3DraftModel", dict[str, Any]]:
        """Load a draft of this package, or an EAGLE-3 checkpoint as other projects publish it.

        Such a checkpoint needs the target if it does not say which layers of it are read. The code that a repository
        may contain is never run.
        """
        try:
            reader = import_module("hf_longspec.modeling.eagle3.convert_eagle3")  # by name, as published copies lack it
        except ImportError:
            reader = None
        if reader is not None and kwargs.get("config") is None:
            hub = {name: value for name, value in kwargs.items() if name in HUB_KWARGS}
            draft = reader.from_other_format(path, target, kwargs.get("dtype"), **hub)
            if draft is not None:
                return draft, {}
        return super()._load(path, target, *args, **kwargs)

    @deprecate_kwarg("taps", version="1.0", new_name="aux_hidden_states")  # the name in earlier versions
    def forward(
        self,
        aux_hidden_states: torch.Tensor,
        tokens: torch.LongTensor,
        steps: int = 1,
        target: PreTrainedModel | None = None,
        position_ids: torch.LongTensor | None = None,
        window: int | None = None,
        sinks: int = 0,
        score: Callable[[int, torch.Tensor], Any] | None = None,
    ) -> list[Any]:
        """Return the logits of chained steps over whole texts, in which every drafted token is that of the text.

        Args:
            aux_hidden_states (`torch.Tensor` of shape `(B, T, num_aux_hidden_states * target_hidden_size)`): Inputs of
                the target's layers `target_layer_ids` at each of the T entries, joined.
            tokens (`torch.LongTensor` of shape `(B, T)`): Token of each entry, the one after the token of the states.
            steps (`int`, *optional*, defaults to 1): Number of chained steps.
            target (`PreTrainedModel`, *optional*): The target, for drafts without an embedding or head of their own.
            position_ids (`torch.LongTensor` of shape `(B, T)`, *optional*): Positions of the entries. 0, 1, 2, ... by
                default.
            window (`int`, *optional*): Number of entries of the text that each place attends to, in layers that were
                not trained with a window of their own. All by default.
            sinks (`int`, *optional*, defaults to 0): First entries that all places attend to beside the window.
            score (`Callable`, *optional*): Function of the step and of its outputs `(B, T - s, hidden)`, for training.

        Returns:
            `list[torch.Tensor]`: For each step s, logits `(B, T - s, draft vocabulary)`, or the result of `score`. Row
            p follows the entries 0 to p and s drafted tokens, those of entries p + 1 to p + s.
        """
        rotary = self.rotary_embedding(tokens.device)
        length = tokens.shape[1]
        places = torch.arange(length, device=tokens.device).expand_as(tokens)
        positions = places if position_ids is None else position_ids
        embedded, states = self.embed(tokens, target), self.features(aux_hidden_states.to(self.dtype))
        logits: list[Any] = []
        # layers trained with a window saw no sinks beside it
        spans = [(size, 0) if size else (window, sinks) for size in self.config.window_of_layers]
        attention = ChainedAttention(spans)
        for step in range(steps):
            count = length - step
            angles = rotary(states, positions[:, step:])
            outputs, states = self.run(states[:, :count], embedded[:, step:], angles, attention)
            logits.append(self.logits(outputs, target) if score is None else score(step, outputs))
        return logits

    def features(self, aux_hidden_states: torch.Tensor) -> torch.Tensor:
        """Project auxiliary hidden states `(B, T, layers * hidden)` to the width of the draft, `(B, T, hidden)`."""
        if self.input_norm is not None:
            aux_hidden_states = self.input_norm(aux_hidden_states)
        if self.fc_norm is not None:
            parts = aux_hidden_states.chunk(self.config.num_aux_hidden_states, -1)
            aux_hidden_states = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], -1)
        features: torch.Tensor = self.fc(aux_hidden_states)
        return features

    def embed(self, tokens: torch.Tensor, target: PreTrainedModel | None = None) -> torch.Tensor:
        """Return embeddings `(B, T, hidden)` of target ids `(B, T)`, without a factor that the target applies.

        Raises:
            ValueError: If the draft has no embedding of its own, and no target is given.
        """
        if self.embed_tokens is not None:
            embedded: torch.Tensor = self.embed_tokens(tokens)
            return embedded
        module = _part_of(target, "embedding").get_input_embeddings()
        embedded = module(tokens.to(module.weight.device) if module.weight.device.type != "meta" else tokens)
        scale = getattr(module, "embed_scale", None)  # of gemma, whose table EAGLE-3 reads as it is
        return (embedded if scale is None else embedded / scale).to(self.norm.weight)

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

    def logits(self, outputs: torch.Tensor, target: PreTrainedModel | None = None) -> torch.Tensor:
        """Return logits `(..., draft vocabulary)` of normalised outputs `(..., hidden)`.

        Raises:
            ValueError: If the draft has no head of its own, and no target is given.
        """
        if self.lm_head is not None:
            logits: torch.Tensor = self.lm_head(outputs)
            return logits
        head = _part_of(target, "head").get_output_embeddings()
        logits = head(outputs)
        return logits if self.d2t is None else logits[..., self.token_ids.to(logits.device)]

    @property
    def token_ids(self) -> torch.Tensor:
        """Target ids `(draft vocabulary,)` of the draft's tokens, in increasing order in all published drafts."""
        if self.d2t is None:
            return torch.arange(self.config.vocab_size, device=self.fc.weight.device)
        return torch.arange(len(self.d2t), device=self.d2t.device) + self.d2t

    def set_vocabulary(self, token_ids: Sequence[int], target: PreTrainedModel | None = None) -> None:
        """Choose the tokens that a draft with a reduced vocabulary proposes, such as the most frequent ones.

        Args:
            token_ids (`Sequence[int]`): As many different ids as `draft_vocab_size`.
            target (`PreTrainedModel`, *optional*): The target, whose rows are copied into a head of the draft's own.

        Raises:
            ValueError: If the number of ids is another one, or an id is outside of the vocabulary or repeated.
        """
        ids = sorted({int(token) for token in token_ids})
        size = self.config.draft_vocab_size
        if len(ids) != size or len(ids) != len(token_ids) or ids[0] < 0 or ids[-1] >= self.config.vocab_size:
            raise ValueError(
                f"{len(token_ids)} token ids, {len(ids)} of them distinct: expected draft_vocab_size={size} distinct "
                f"ids from 0 to {self.config.vocab_size - 1}."
            )
        self.d2t.copy_(torch.tensor(ids) - torch.arange(len(ids)))
        if target is not None:
            self.copy_from(target)

    def rotary_embedding(self, device: torch.device) -> nn.Module:
        """Return the rotary embedding of the draft, a function of a tensor (for its dtype) and positions `(B, T)`."""
        theta = self.effective("rope_theta")
        config = copy.deepcopy(self.config)
        if theta is not None:
            config.rope_parameters = (config.rope_parameters or {}) | {"rope_theta": float(theta)}
        return LlamaRotaryEmbedding(config).to(device)

    def effective(self, name: str) -> Any:
        """Return the value of a setting, or if it is `None` that of the config."""
        value = getattr(self.generation_config, name, None)
        return getattr(self.config, name, None) if value is None else value

    def num_out_of_vocabulary(self, rows: Sequence[Sequence[int]]) -> int:
        """Return how many tokens of some rows this draft cannot propose."""
        if self.d2t is None:
            return 0
        vocabulary = set(self.token_ids.tolist())
        return sum(token not in vocabulary for row in rows for token in row)

    @property
    def prompt_tokens(self) -> int:
        """Number of last tokens of a text whose entries are kept; practically all without a window."""
        window: Any = getattr(self.generation_config, "window", TRAINED)
        window = self.config.trained_max_length if window == TRAINED else window
        return sys.maxsize if window is None else int(window)

    def layers_of(self, text: Any) -> tuple[int, ...]:
        """Return the layers of a target with this text config whose inputs are read.

        Raises:
            ValueError: If they are not as many as the draft reads.
        """
        layers = self.effective("target_layer_ids") or (
            default_layer_ids(text.num_hidden_layers) if self.config.num_aux_hidden_states == 3 else []
        )
        count = self.config.num_aux_hidden_states
        if not isinstance(layers, list | tuple) or len(layers) != count or not all(type(j) is int for j in layers):
            raise ValueError(
                f"target_layer_ids={layers!r}: expected a list of {count} integers (num_aux_hidden_states). The input "
                "of layer j of the target is its hidden_states[j]. Set draft.generation_config.target_layer_ids."
            )
        return tuple(layers)

    def max_nodes(self, target: TargetView) -> int:
        """Return the number of nodes of a tree, root included."""
        return 1 + sum(self.setting("tree_widths"))

    def check_settings(self, target: TargetView) -> None:
        """Refuse targets of other sizes, and layers that do not exist."""
        refuse_compiled_forward(target.model)
        self._check_target(target)
        for layer in self.layers_of(target.config):
            layer_at(target.model, layer)

    def _check_target(self, target: TargetView) -> None:
        for name, size in (
            ("vocab_size", target.config.vocab_size),
            ("target_hidden_size", target.config.hidden_size),
        ):
            if (recorded := getattr(self.config, name)) != size:
                raise ValueError(
                    f"the draft has {name}={recorded}, but the target has {size}. Pass the target that the draft was "
                    "trained for."
                )
        if self.config.hidden_size != target.config.hidden_size and not (self.embed_tokens and self.lm_head):
            raise ValueError(
                f"the draft has hidden_size={self.config.hidden_size} and no embedding or head of its own, but the "
                f"target's have {target.config.hidden_size}. Pass the target that the draft was trained for."
            )


def _part_of(target: PreTrainedModel | None, part: str) -> PreTrainedModel:
    if target is None:
        raise ValueError(f"this draft has no {part} of its own and uses the target's: pass target=.")
    return target
