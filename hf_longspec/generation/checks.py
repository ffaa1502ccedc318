"""Everything that is refused, with value, rule and remedy, before any work is done."""

from typing import Any

import torch
from transformers import GenerationConfig
from transformers.generation.logits_process import LogitsProcessorList

from .logits import refuse_stateful
from .target import TargetView

# What the loop takes from generate()'s keyword arguments for the model; anything else would be silently dropped.
KNOWN_MODEL_KWARGS = {
    "attention_mask",
    "cache_position",
    "inputs_tensor",
    "logits_to_keep",
    "output_attentions",
    "output_hidden_states",
    "past_key_values",
    "position_ids",
    "synced_gpus",
    "tokenizer",
    "use_cache",
}


def refuse_unsupported(
    target: TargetView,
    draft: Any,
    input_ids: torch.Tensor,
    processors: LogitsProcessorList,
    config: GenerationConfig,
    model_kwargs: dict[str, Any],
) -> None:
    """Raise ValueError if this call cannot be decoded speculatively, naming every reason."""
    refuse_target(target, type(draft))
    if target.ranks is not None and (mode := draft.setting("compile")) in ("compile", "graph"):
        raise ValueError(
            f"compile={mode!r}: the target is divided among {target.ranks.size} processes, and steps with "
            "communication between them are not compiled. Use compile='off'."
        )
    draft.check(target)
    if config.do_sample:
        draft.check_sampling()
    refuse_stateful(processors)
    _refuse_inputs(input_ids, config, model_kwargs)
    _refuse_foreign_cache(model_kwargs.get("past_key_values"))


def refuse_target(target: TargetView, draft: type) -> None:
    """Raise ValueError if no draft can be used with this model, naming every reason."""
    if reasons := target.why_not():
        raise ValueError(
            f"{type(target.model).__name__} cannot be used with assistant_model={draft.__name__}: "
            + "; ".join(reasons)
            + ". Call generate() without assistant_model."
        )


def _refuse_inputs(input_ids: torch.Tensor, config: GenerationConfig, model_kwargs: dict[str, Any]) -> None:
    if model_kwargs.get("inputs_embeds") is not None or input_ids.shape[1] == 0:
        raise ValueError("inputs_embeds cannot be drafted from: pass input_ids, or call generate() without a draft.")
    unknown = sorted(
        name for name, value in model_kwargs.items() if name not in KNOWN_MODEL_KWARGS and value is not None
    )
    if unknown:
        raise ValueError(
            f"the arguments {', '.join(unknown)} would not reach the model: speculative decoding runs on token ids "
            "alone. Drop them, or call generate() without assistant_model."
        )
    if not model_kwargs.get("use_cache", True):
        raise ValueError("use_cache=False: speculative decoding needs the cache. Drop the argument.")
    for name in ("output_attentions", "output_hidden_states"):
        if getattr(config, name) and config.return_dict_in_generate:
            raise ValueError(
                f"{name}=True is not supported with a draft: a verified tree has no such tensors per emitted token. "
                "Run the model once on out.sequences to get them."
            )
    mask = model_kwargs.get("attention_mask")
    if mask is not None and (mask.shape != input_ids.shape or not bool(mask[:, -1].all())):
        raise ValueError(
            f"attention_mask has shape {tuple(mask.shape)} and must have that of input_ids, {tuple(input_ids.shape)}, "
            "with its padding on the left, so that every row ends with a token. Tokenize with padding_side='left'."
        )
    _refuse_positions(input_ids, mask, model_kwargs.get("position_ids"))


def _refuse_positions(input_ids: torch.Tensor, mask: torch.Tensor | None, positions: torch.Tensor | None) -> None:
    """Generate makes the positions itself unless the user does; the loop counts tokens and takes no others."""
    if positions is None:
        return
    keep = torch.ones_like(input_ids) if mask is None else mask
    if positions.shape[-1] == input_ids.shape[1]:
        wrong = (positions != keep.long().cumsum(-1) - 1) & keep.bool()
        if not bool(wrong.any()):
            return
    raise ValueError(
        f"position_ids of shape {tuple(positions.shape)} do not count the tokens of input_ids, shape "
        f"{tuple(input_ids.shape)}, from 0. Drop position_ids, and pass the whole text also on a second turn."
    )


def _refuse_foreign_cache(cache: Any) -> None:
    if cache is None or getattr(cache, "_is_longspec_cache", False):
        return
    if cache.get_seq_length() > 0:
        raise ValueError(
            f"past_key_values is a {type(cache).__name__} that already holds {cache.get_seq_length()} tokens, and only "
            "a SpeculativeCache can be continued. Pass SpeculativeCache(config, batch_size, max_length) from the "
            "first turn on, or leave the argument out and pass the whole sequence."
        )


def max_length_of(config: GenerationConfig, target: TargetView, prompt_length: int) -> int:
    """Most tokens that a row of this call can reach.

    Raises:
        ValueError: If nothing says so.
    """
    limit = config.max_length or getattr(target.config, "max_position_embeddings", None)
    if limit is None:
        raise ValueError("generation has no length limit: pass max_new_tokens or max_length.")
    return max(limit, prompt_length + 1)


def pad_token_id_of(config: GenerationConfig) -> int:
    """What fills finished rows."""
    pad = getattr(config, "_pad_token_tensor", None)
    return int(pad) if pad is not None else 0
