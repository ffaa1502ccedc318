"""MtpDraftModel: the layers for multi-token prediction in the target's checkpoint, run once per drafted token."""

from collections.abc import Callable
from functools import partial
from pkgutil import resolve_name
from typing import Any, ClassVar, Self
from weakref import ref

import torch
from torch import nn
from transformers import PreTrainedModel

from ...generation.call import refuse_target
from ...generation.target import TargetView
from ...generation.target_modules import TargetParts, decoder_of, final_norm_of, refuse_compiled_forward
from ..base import DraftModel
from ..settings import WIDTHS, Setting
from ..shared.texts import up_to
from .configuration_mtp import MtpConfig
from .generation_mtp import MtpDrafter
from .layers_mtp import MtpLayer, decoder_like


class MtpDraftModel(DraftModel):
    """A draft of the layers that were trained with the target and lie in its checkpoint, where transformers skips them.

    An entry joins the output of the target's final norm at one token with the embedding of the next. Embedding, head
    and rotary embedding are the target's. One layer is run again for every drafted token, on its own output in place of
    the target's; of several layers, each drafts one token.

    ```python
    draft = MtpDraftModel.from_target(target)
    target.generate(**inputs, assistant_model=draft)
    ```

    Source: DeepSeek-V3, https://huggingface.co/papers/2412.19437, section 2.2.
    """

    config_class = MtpConfig
    drafter_class = MtpDrafter
    _no_split_modules = ["MtpLayer"]
    settings: ClassVar[dict[str, Any]] = {
        "tree_widths": WIDTHS,
        # DeepSeek-V3 was trained on texts of this length first (section 4.2 of the paper)
        "window": Setting(4096, "Number of last entries that are kept, or 'all'.", int, choices=("all",)),
        "sinks": Setting(4, "Number of first entries that are kept besides.", int, least=0),
    }

    def __init__(self, config: MtpConfig, *args: Any, **kwargs: Any):
        super().__init__(config, *args, **kwargs)
        decoder = decoder_like(config)
        self.layers = nn.ModuleList(MtpLayer(config, decoder) for _ in range(config.num_mtp_layers))
        self._target: ref[PreTrainedModel] | None = None  # the one that was checked last
        self.post_init()

    def _set_gradient_checkpointing(self, *args: Any, **kwargs: Any) -> None:
        """Checkpoint MTP layers as a whole: a decoder layer that is checkpointed itself gets no cache."""
        super()._set_gradient_checkpointing(*args, **kwargs)
        for layer in self.layers:
            for module in layer.block.modules():  # type: ignore[union-attr]
                if hasattr(module, "gradient_checkpointing"):
                    module.gradient_checkpointing = False

    @classmethod
    def from_target(cls, target: PreTrainedModel, checkpoint: str | None = None, **overrides: Any) -> Self:
        """Return the draft that lies in the target's checkpoint, in eval mode at its `place`.

        The checkpoint is the folder that the target was loaded from, or its files in the cache of the Hub. The tensors
        of the MTP layers alone are read.

        Args:
            target (`PreTrainedModel`): The target.
            checkpoint (`str`, *optional*): Folder or Hub id of the checkpoint, if the target was not loaded from it.
            overrides (`Any`): Settings of the draft by name.

        Raises:
            ValueError: If the target was not loaded from a checkpoint, or it holds no MTP layers, or layers of a kind
                that is not supported.
        """
        view = TargetView(target)
        settings = cls._settings_of(overrides)
        cls.check_structure(target)
        refuse_target(view, cls)
        # by name, as the code of a draft imports no conversion
        found = resolve_name("hf_longspec.modeling.mtp.convert_mtp:MtpCheckpoint").of(target, checkpoint)
        config = cls.config_class.from_target(target, **(found.fields | overrides))
        if (depth := config.num_mtp_layers) > 1:
            settings = {"tree_widths": WIDTHS.default[:depth]} | settings
        with torch.device("meta"):
            draft = cls(config)
        dtype = target.get_input_embeddings().weight.dtype
        draft.load_state_dict(found.tensors(draft.state_dict(), dtype), assign=True)
        return draft._beginning(view, settings)

    @classmethod
    def check_structure(cls, target: PreTrainedModel) -> None:
        """Refuse targets without rotary positions or a final norm, and those whose layers cannot be MTP layers."""
        decoder_of(target)
        final_norm_of(target)
        decoder_like(cls.config_class.from_target(target))

    def forward(
        self,
        hidden_states: torch.Tensor,
        tokens: torch.Tensor,
        steps: int = 1,
        target: PreTrainedModel | None = None,
        window: int | None = None,
        sinks: int = 0,
        score: Callable[[int, torch.Tensor], Any] | None = None,
    ) -> list[Any]:
        """Return the logits of chained steps over whole texts, in which every drafted token is that of the text.

        Args:
            hidden_states (`torch.Tensor` of shape `(B, T, hidden)`): Output of the target's final norm at T tokens.
            tokens (`torch.LongTensor` of shape `(B, L)`): The tokens after the first of these, at least T.
            steps (`int`, *optional*, defaults to 1): Number of chained steps, at most that of several layers.
            target (`PreTrainedModel`, *optional*): The target; by default the one that the draft was checked with.
            window (`int`, *optional*): Number of entries of the text that each place attends to. All by default.
            sinks (`int`, *optional*, defaults to 0): First entries that all places attend to in addition to the window.
            score (`Callable`, *optional*): Function of the step and of its outputs `(B, n, hidden)`, for training.

        Returns:
            `list[torch.Tensor]`: For each step s, logits `(B, n, vocab)`, or the result of `score`, of the
            n = min(T, L - s) first entries. Row p follows the entries 0 to p and the tokens p + 1 to p + s.
        """
        parts, results = self.parts_of(target), []
        states, entries = hidden_states.to(self.dtype), TextEntries(window, sinks)
        for step in range(steps):
            layer, store = self.layers[0], partial(entries, step)
            if len(self.layers) > 1:  # each with its own entries
                layer, store = self.layers[step], partial(TextEntries(window, sinks), 0)
            after = tokens[:, step : step + states.shape[1]]
            states = states[:, : after.shape[1]]
            positions = (step + torch.arange(after.shape[1], device=after.device)).expand_as(after)
            states = layer(states, parts.embed(after).to(states), positions, parts.rotary(positions, states), store)
            results.append(parts.head(states) if score is None else score(step, states))
        return results

    def parts_of(self, target: PreTrainedModel | None = None) -> TargetParts:
        """Return embedding, head and rotary embedding of the target; by default of the one that was checked last.

        Raises:
            ValueError: If there is none.
        """
        target = self._target() if target is None and self._target is not None else target
        if target is None:
            raise ValueError("this draft uses the target's embedding and head: pass target=.")
        return TargetParts(target, self.config.layer_idx)

    @property
    def prompt_tokens(self) -> int:
        window = self.setting("window")
        return 2**62 if window == "all" else int(window)

    def layers_of(self, text: Any) -> tuple[int, ...]:
        """Return the place of the target whose input is read: its final norm, which the draft applies itself."""
        return (text.num_hidden_layers,)

    def check_settings(self, target: TargetView) -> None:
        """Refuse trees that are deeper than there are layers, if there are several, and their compilation."""
        refuse_compiled_forward(target.model)
        depth, compiled = len(self.setting("tree_widths")), self.setting("compile")
        if 1 < len(self.layers) < depth:
            raise ValueError(
                f"tree_widths has {depth} levels: this draft has {len(self.layers)} layers, each of which drafts one "
                f"token. Set at most {len(self.layers)} widths."
            )
        if len(self.layers) > 1 and compiled not in ("auto", "off"):
            raise ValueError(
                f"compile={compiled!r}: the steps of a draft with {len(self.layers)} MTP layers are not compiled. Set "
                "compile to 'auto' or 'off'."
            )
        self._target = ref(target.model)


class TextEntries:
    """Keys and values of chained steps over whole texts, in one layer.

    Place p of every step attends to the entries of the text up to p, the last `window` of them and the first `sinks`,
    and to its own entries of later steps. Later steps may have fewer places.
    """

    def __init__(self, window: int | None = None, sinks: int = 0) -> None:
        self._parts: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._window, self._sinks = window, sinks

    def __call__(
        self, step: int, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Store a step, and return keys and values of all up to it, with its mask."""
        steps = up_to(step, self._parts, (keys, values))
        count, length = keys.shape[2], steps[0][0].shape[2]
        entries = torch.arange(length, device=keys.device)
        places = entries[:count, None]
        own = [entries[: part.shape[2]] == places for part, _ in steps[1:]]
        seen = entries <= places
        if self._window is not None:
            seen = seen & ((entries > places - self._window) | (entries < self._sinks))
        whole = torch.cat([seen, *own], 1).expand(len(keys), -1, -1)
        return *(torch.cat(parts, 2) for parts in zip(*steps, strict=True)), whole  # type: ignore[return-value]
