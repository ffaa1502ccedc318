"""What a call cannot have: errors, and reasons for decoding it without the draft, all before any work is done.

A target that is not supported and contradictory arguments are errors. If model and draft fit and this call alone cannot
be served, the setting `on_unsupported` of the draft decides: the call is decoded without it, or is an error too.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation.logits_process import LogitsProcessorList

from .prompt_inputs import TOKEN_TYPES, Prompts, names_of, of_every_forward
from .sampling import refuse_stateful
from .target import TargetView
from .user_cache import refuse_cache, why_not_stored

# Values of the setting `on_unsupported`.
PLAIN, ERROR = "plain", "error"

# Settings that `generate` passes on to the assistants of transformers.
ASSISTANT_SETTINGS = (
    "assistant_confidence_threshold",
    "assistant_early_exit",
    "assistant_ensemble_weight",
    "assistant_lookbehind",
    "max_matching_ngram_size",
    "num_assistant_tokens",
    "num_assistant_tokens_schedule",
    "prompt_lookup_num_tokens",
    "speculation_type",
    "target_lookbehind",
    "use_mtp",
)


def refuse_unsupported(
    target: TargetView,
    draft: Any,
    input_ids: torch.Tensor,
    processors: LogitsProcessorList,
    config: GenerationConfig,
    model_kwargs: dict[str, Any],
) -> None:
    """Refuse a call whose target, draft or arguments are wrong, with the value, the rule and the remedy."""
    refuse_target(target, type(draft), max_length_of(config, target, input_ids.shape[1]))
    _refuse_training_mode(target.model)
    if target.ranks is not None and (mode := draft.setting("compile")) in ("compile", "graph"):
        raise ValueError(
            f"compile={mode!r}: the target is divided among {target.ranks.size} processes, and steps with "
            "communication between them are not compiled. Use compile='off'."
        )
    draft.check(target)
    if config.do_sample:
        draft.check_sampling()
    _refuse_inputs(target, input_ids, config, model_kwargs)
    _refuse_assistant_settings(config, target.model.generation_config)
    cache, mask = model_kwargs.get("past_key_values"), model_kwargs.get("attention_mask")
    refuse_cache(cache, input_ids, mask)
    refuse_stateful(processors, input_ids, target.vocab_size)


def why_not(prompts: Prompts) -> str | None:
    """Return why a call with these prompts cannot be decoded with a draft, and what to do; `None` if it can."""
    return next(_reasons(prompts), None)


def _reasons(prompts: Prompts) -> Iterator[str]:
    """Yield reasons, those first whose finding costs least."""
    target, config, max_length = prompts.target, prompts.config, prompts.max_length
    if reason := why_not_stored(prompts.cache, config.cache_implementation):
        yield reason
    implementation = str(target.config._attn_implementation)
    if "flash" in implementation and prompts.counts_gaps:
        yield (
            f"attention_mask has zeros between tokens, and attn_implementation={implementation!r}: plain generate "
            "counts them in the sliding windows of generated tokens, but not in those of the prompt. Move the zeros to "
            "the left of each row, or load the model with another attn_implementation."
        )
    if prompts.inputs:
        yield from _reasons_of_inputs(prompts, prompts.inputs)
    if prompts.rotary is not None:
        width, chunk_size = prompts.input_ids.shape[1], config.prefill_chunk_size
        if reason := prompts.rotary.why_not(width, max_length, max(prompts.held), chunk_size, prompts.by_chains):
            yield reason


def _reasons_of_inputs(prompts: Prompts, given: dict[str, Any]) -> Iterator[str]:
    """Yield reasons why text after these inputs beside the tokens would differ from that of plain `generate`."""
    target, input_ids = prompts.target, prompts.input_ids
    names, kind = names_of(given), type(target.model).__name__
    if any(hasattr(module, "rope_deltas") for module in target.model.modules()):
        yield (
            f"{names}: the positions of {kind} after an image do not count tokens (rope_deltas), and the loop counts "
            "tokens. Pass text alone."
        )
    if kept := sorted(of_every_forward(target, input_ids, given)):
        yield (
            f"{', '.join(kept)} would not reach the model: plain generate passes it to every forward, and speculative "
            "decoding passes inputs beside the tokens to the first one. Drop what is not needed."
        )
    chunk_size = prompts.config.prefill_chunk_size
    if chunk_size is not None and chunk_size < input_ids.shape[1]:
        yield (
            f"prefill_chunk_size={chunk_size} with {names}: such a prompt runs in one forward. Drop prefill_chunk_size."
        )
    if stored := max(prompts.held):
        yield (
            f"past_key_values holds {stored} tokens, and {names} would be input of the first forward. Leave "
            "past_key_values out, or drop the inputs if the cache holds what they gave."
        )
    tensors = {name: value for name, value in given.items() if isinstance(value, torch.Tensor)}
    of_tokens = {name for name, value in tensors.items() if value.shape[:2] == input_ids.shape}
    if prompts.mask is not None and (unknown := sorted(of_tokens - set(TOKEN_TYPES))):
        yield (
            f"{', '.join(unknown)} may have a value for each token, and attention_mask has padding, which the loop "
            "moves. Pass prompts of the same length, or one at a time."
        )
    if prompts.counts_gaps:
        yield (
            f"{names}, and attention_mask has zeros between tokens, which the target's sliding windows count in plain "
            "generate: such a prompt runs without them. Move the zeros to the left of each row."
        )
    if (largest := int(input_ids.max())) >= target.vocab_size:
        yield (
            f"input_ids contains {largest}, and the vocabulary has {target.vocab_size} tokens: drafts cannot look up "
            "placeholders outside of it. Use a placeholder of the vocabulary."
        )
    if prompts.rotary is not None and (column := prompts.rotary.column) < prompts.max_length:
        yield (
            f"max_length={prompts.max_length} with {names}: rotary frequencies change at position {column}, where the "
            f"loop may have to run the prompt again without these inputs. Keep max_length at {column} or below."
        )
    if not (sizes := prompts.text_sizes):
        yield (
            f"{names}: the decoder of {kind} did not get one embedding for each token, at the position of the token. "
            "Pass text alone."
        )
    elif 0 in sizes:
        yield (
            f"the prompt of row {sizes.index(0)} does not end with text: its last token belongs to {names}, and a "
            "draft continues text. Add a token of text."
        )


def refuse(reason: str | None) -> None:
    """Raise a reason of [`why_not`] as an error, if there is one."""
    if reason is not None:
        raise ValueError(
            f"{reason} Or set draft.generation_config.on_unsupported to {PLAIN!r}, or call generate() without a draft."
        )


def refuse_target(target: TargetView, draft: type, max_length: int | None = None) -> None:
    """Refuse a model that cannot be used with any draft, with every reason; see [`TargetView.why_not`]."""
    if reasons := target.why_not(max_length):
        raise ValueError(
            f"{type(target.model).__name__} cannot be used with assistant_model={draft.__name__}: "
            + "; ".join(reasons)
            + ". Call generate() without assistant_model."
        )


def _refuse_training_mode(model: PreTrainedModel) -> None:
    """Refuse what a model does in training mode only: gradient checkpointing and dropout."""
    training = [module for module in model.modules() if module.training]
    if model.training and any(getattr(module, "gradient_checkpointing", False) for module in training):
        raise ValueError(
            "gradient checkpointing is on and the model is in training mode, where it turns off the cache. Call "
            "model.eval() or model.gradient_checkpointing_disable() first."
        )
    for module in training:
        for part in (module, *module.children()):  # gpt2 reads the rate of its dropout module by its own mode
            kind = type(part).__name__
            for name, value in vars(part).items():
                is_rate = "drop" in name or "jitter" in name or (name == "p" and "Dropout" in kind)
                if is_rate and type(value) in (int, float) and value > 0:
                    raise ValueError(
                        f"the model is in training mode, where {kind} has dropout ({name}={value}): no two forwards "
                        "are the same, so drafted tokens cannot be verified. Call model.eval() first."
                    )


def _refuse_inputs(
    target: TargetView, input_ids: torch.Tensor, config: GenerationConfig, model_kwargs: dict[str, Any]
) -> None:
    if model_kwargs.get("inputs_embeds") is not None or input_ids.shape[1] == 0:
        raise ValueError("inputs_embeds cannot be drafted from: pass input_ids, or call generate() without a draft.")
    if not model_kwargs.get("use_cache", True):
        raise ValueError("use_cache=False: speculative decoding needs the cache. Drop the argument.")
    for name in ("output_attentions", "output_hidden_states"):
        if getattr(config, name) and config.return_dict_in_generate:
            raise ValueError(
                f"{name}=True is not supported with a draft: a verified tree has no such tensors per emitted token. "
                "Run the model once on out.sequences to get them."
            )
    if (layers := getattr(config, "dola_layers", None)) is not None:
        raise ValueError(
            f"dola_layers={layers!r}: DoLa compares the logits of several layers, and a draft is verified by those of "
            "the last one. Drop dola_layers, or call generate() without assistant_model."
        )
    mask = model_kwargs.get("attention_mask")
    if mask is not None and mask.shape != input_ids.shape:
        raise ValueError(
            f"attention_mask has shape {tuple(mask.shape)} and must have that of input_ids, {tuple(input_ids.shape)}. "
            "Pass the whole text with its mask, also on a second turn."
        )
    if mask is not None and not bool(mask[:, -1].all()):
        rows = (mask[:, -1] == 0).nonzero().flatten().tolist()
        raise ValueError(
            f"attention_mask ends with 0 in the rows {rows}: padding must be on the left, so that every row ends with "
            "a token. Tokenize with padding_side='left'."
        )
    if mask is not None and not bool(mask.all()) and target.counts_padding:
        raise ValueError(
            f"attention_mask has padding, and the forward of {type(target.model).__name__} takes no position_ids, so "
            "plain generate counts the padding as positions. Pass one prompt, or prompts of equal length."
        )
    _refuse_positions(input_ids, mask, model_kwargs.get("position_ids"))


def _refuse_positions(input_ids: torch.Tensor, mask: torch.Tensor | None, positions: torch.Tensor | None) -> None:
    """Refuse position ids of the user that do not count tokens, as the loop computes positions by counting."""
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


def _refuse_assistant_settings(config: GenerationConfig, of_model: GenerationConfig) -> None:
    """Refuse settings of transformers' own assistants, as the settings of a draft are in its `generation_config`."""
    defaults = GenerationConfig._get_default_generation_params()  # values that `generate` fills in by itself
    given = {name: getattr(config, name, None) for name in ASSISTANT_SETTINGS}
    for name, value in given.items():
        if value is not None and value not in (defaults.get(name), getattr(of_model, name, None)):
            raise ValueError(
                f"{name}={value!r} would have no effect: it is for the assistants of transformers. Drop it, and use "
                "the settings in draft.generation_config, such as draft.generation_config.num_assistant_tokens."
            )


def max_length_of(config: GenerationConfig, target: TargetView, prompt_length: int) -> int:
    """Return the maximum number of tokens of a row in this call, prompt included.

    Raises:
        ValueError: If neither the call nor the model's config has a limit.
    """
    limit = config.max_length or getattr(target.config, "max_position_embeddings", None)
    if limit is None:
        raise ValueError("generation has no length limit: pass max_new_tokens or max_length.")
    return max(limit, prompt_length + 1)


def pad_token_id_of(config: GenerationConfig) -> int:
    """Return the token that fills finished rows; 0 if the call has no padding token."""
    pad = getattr(config, "_pad_token_tensor", None)
    return int(pad) if pad is not None else 0


# Settings that are True, the default, or False, with the meaning of both.
FLAGS = {
    "gate": "True switches speculation off while it does not pay, False always speculates.",
    "check_target": ("True compares the first verification of a kind of target with a plain forward, False does not."),
}


def check_flags(setting: Callable[[str], Any]) -> None:
    """Refuse a value of one of `FLAGS` that is not a bool. `setting` returns the value of a setting by its name."""
    for name, meaning in FLAGS.items():
        if type(value := setting(name)) is not bool:
            raise ValueError(f"{name}={value!r}: expected True or False. {meaning}")
