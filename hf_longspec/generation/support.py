"""Checks of the arguments of a call, before any work is done.

- [`refuse_unsupported`] raises errors: unsupported targets, wrong settings, contradictory arguments.
- [`why_not_begun`] and [`why_not`] return a reason if model and draft fit and only this call cannot use the draft. The
  setting `on_unsupported` of the draft decides whether the call then runs without the draft or is an error.
"""

from collections.abc import Iterator
from typing import Any

import torch
from transformers import GenerationConfig, GenerationMixin, PreTrainedModel
from transformers.generation.logits_process import LogitsProcessorList

from .cache import CACHE_NAME
from .inputs import TOKEN_TYPES, Prompts, inputs_beside_tokens, names_of, of_every_forward
from .masked import MASKED, first_count_that_matters
from .processors import why_stateful
from .recurrences import has_input_bias, ignores_earlier_states
from .target import TargetView
from .user_cache import refuse_cache, why_not_stored

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
    config: GenerationConfig,
) -> None:
    """Refuse a call whose target, draft or settings are wrong, with the value, the rule and the remedy."""
    refuse_target(target, type(draft), max_length_of(config, target, input_ids.shape[1]))
    _refuse_training_mode(target.model)
    if (mode := draft.setting("compile")) not in ("auto", "off") and (reason := _why_not_fixed(target)):
        raise ValueError(f"compile={mode!r} is not supported with {reason}. Set compile='off'.")
    draft.check(target)
    if config.do_sample:
        draft.check_sampling()
    _refuse_assistant_settings(config, target.model.generation_config)


def _why_not_fixed(target: TargetView) -> str | None:
    """Return with what steps cannot be compiled or captured; `None` if they can."""
    name = type(target.model).__name__
    if target.ranks is not None:
        return f"tensor parallelism ({target.ranks.size} processes)"
    if target.has_states:
        return f"recurrent states, which {name} has"
    return f"{name}, whose nodes are verified by a mask that grows with the text" if target.way is MASKED else None


def why_not_begun(input_ids: torch.Tensor, config: GenerationConfig, model_kwargs: dict[str, Any]) -> str | None:
    """Return why the loop has no prompts or results as these arguments ask for, and what to do; `None` if it has."""
    if model_kwargs.get("inputs_embeds") is not None or input_ids.shape[1] == 0:
        return "inputs_embeds is not supported with a draft. Pass input_ids."
    if not model_kwargs.get("use_cache", True):
        return "use_cache=False is not supported with a draft. Drop the argument."
    for name in ("output_attentions", "output_hidden_states"):
        if getattr(config, name) and config.return_dict_in_generate:
            return f"{name}=True is not supported with a draft. Run the model once on out.sequences to get them."
    mask = model_kwargs.get("attention_mask")
    empty = [] if mask is None else (mask == 0).all(-1).nonzero().flatten().tolist()
    if empty:
        return (
            f"attention_mask is 0 everywhere in the rows {empty}, whose text depends on the padding. Drop these rows, "
            "or begin each with a token."
        )
    return None


def why_not(prompts: Prompts, processors: LogitsProcessorList) -> str | None:
    """Return why a call with these prompts cannot be decoded with a draft, and what to do; `None` if it can."""
    return next(_reasons(prompts, processors), None)


def _reasons(prompts: Prompts, processors: LogitsProcessorList) -> Iterator[str]:
    """Yield reasons, those first whose finding costs least."""
    if reason := why_not_stored(prompts.cache, prompts.config.cache_implementation):
        yield reason
    if prompts.target.has_states:
        yield from _reasons_of_states(prompts)
    if prompts.target.way is MASKED:
        yield from _reasons_of_masks(prompts)
    implementation = str(prompts.target.config._attn_implementation)
    if "flash" in implementation and prompts.counts_gaps:
        yield (
            f"attention_mask has zeros between tokens, which sliding windows under attn_implementation="
            f"{implementation!r} do not count in the prompt. Move the zeros to the left of each row, or load the model "
            "with another attn_implementation."
        )
    yield from why_stateful(processors, prompts)
    if prompts.inputs or prompts.offsets is not None:
        yield from _reasons_of_positions(prompts)
    if prompts.inputs:
        yield from _reasons_of_inputs(prompts, prompts.inputs)
    if prompts.rotary is not None and (reason := prompts.rotary.why_not(prompts)):
        yield reason


def _reasons_of_states(prompts: Prompts) -> Iterator[str]:
    """Yield reasons why recurrent states would differ from those of plain `generate`."""
    model = prompts.target.model
    if prompts.has_gaps:
        yield (
            "attention_mask has zeros between tokens, where recurrent states of plain generate decay. Move the zeros "
            "to the left of each row."
        )
    if prompts.mask is not None and has_input_bias(model):
        yield (
            f"attention_mask has padding, which the biases of the recurrent layers of {type(model).__name__} turn into "
            "inputs. Pass prompts of equal length, or one at a time."
        )
    plain = prompts.plain
    if plain.chunk == 1 and max(plain.lags) > plain.stored:
        yield (
            "prefill_chunk_size=1 with padding: recurrent layers of plain generate read the padding in forwards of one "
            "token. Set prefill_chunk_size to 2 or more, or pass prompts of equal length."
        )
    if ignores_earlier_states(model):
        chunk_size = prompts.config.prefill_chunk_size
        if chunk_size is not None and chunk_size < prompts.input_ids.shape[1]:
            yield (
                f"prefill_chunk_size={chunk_size}: transformers' Mamba-1 layers begin anew with each chunk, so plain "
                "generate gives another text. Drop prefill_chunk_size."
            )
        if stored := max(prompts.held):
            yield (
                f"{CACHE_NAME} holds {stored} tokens, whose states transformers' Mamba-1 layers ignore with several "
                f"new tokens. Drop {CACHE_NAME}."
            )


def _reasons_of_masks(prompts: Prompts) -> Iterator[str]:
    """Yield reasons why masks over prefix and nodes would differ from those of plain `generate`."""
    kind = type(prompts.target.model).__name__
    if prompts.has_gaps:
        yield (
            f"attention_mask has zeros between tokens, which is not supported with the masks of {kind}. Move the zeros "
            "to the left of each row."
        )
    if prompts.inputs:
        yield (
            f"{names_of(prompts.inputs)}: inputs beside the tokens are not supported with the masks of {kind}. Pass "
            "text only."
        )
    limit = first_count_that_matters(prompts.target.config)
    if prompts.max_length > limit and (len(prompts.texts) > 1 or prompts.mask is not None):
        yield (
            f"max_length={prompts.max_length}: from {limit} tokens on (floor_scale), {kind} scales queries by "
            "positions that count the padding of a batch. Pass one prompt without padding, or a smaller max_length."
        )


def _reasons_of_positions(prompts: Prompts) -> Iterator[str]:
    """Yield reasons why positions after images (M-RoPE) would differ from those of plain `generate`."""
    model = prompts.target.model
    names = names_of(prompts.inputs) or (CACHE_NAME if any(prompts.held) else "position_ids")
    counts_on = type(model).prepare_inputs_for_generation is GenerationMixin.prepare_inputs_for_generation
    if any(hasattr(part, "rope_deltas") for part in model.modules()) and not (counts_on and prompts.axes is not None):
        yield (
            f"{names}: multimodal positions (M-RoPE), as {type(model).__name__} uses them, are not supported with a "
            "draft. Pass text only, in a new cache."
        )
    if prompts.offsets is not None and prompts.rotary is not None:
        yield (
            f"{names}: positions that differ from the places of tokens by {prompts.offsets.flatten().tolist()} "
            "(M-RoPE) are not supported with rotary frequencies that change (rope_parameters). Pass text only, "
            "in a new cache."
        )


def _reasons_of_inputs(prompts: Prompts, inputs: dict[str, Any]) -> Iterator[str]:
    """Yield reasons why text after these inputs beside the tokens would differ from that of plain `generate`."""
    target, input_ids = prompts.target, prompts.input_ids
    names, kind = names_of(inputs), type(target.model).__name__
    if repeated := sorted(of_every_forward(target, input_ids, inputs)):
        yield (
            f"{', '.join(repeated)}: plain generate passes it to every forward, and speculative decoding to the first "
            "one only. Drop it if it is not needed."
        )
    chunk_size = prompts.config.prefill_chunk_size
    if chunk_size is not None and chunk_size < input_ids.shape[1]:
        yield (
            f"prefill_chunk_size={chunk_size} is not supported with {names}, as the prompt then runs in one forward. "
            "Drop prefill_chunk_size."
        )
    if stored := max(prompts.held):
        yield (
            f"{CACHE_NAME} holds {stored} tokens, and {names} needs an empty cache. Drop {CACHE_NAME}, or drop "
            "the inputs if the cache already contains them."
        )
    tensors = {name: value for name, value in inputs.items() if isinstance(value, torch.Tensor)}
    of_tokens = {name for name, value in tensors.items() if value.shape[:2] == input_ids.shape}
    if (prompts.mask is not None or target.has_states) and (unknown := sorted(of_tokens - set(TOKEN_TYPES))):
        yield (
            f"{', '.join(unknown)}: inputs with a value for each token are not supported with padding or recurrent "
            "states. Pass prompts of equal length, or one at a time."
        )
    if target.has_states and len(set(map(len, prompts.texts))) > 1:
        yield (
            f"{names}: prompts of different lengths are not supported with such inputs and recurrent states. Pass "
            "prompts of equal length, or one at a time."
        )
    if prompts.counts_gaps:
        yield (
            f"attention_mask has zeros between tokens, which are not supported with {names} on a target with sliding "
            "windows. Move the zeros to the left of each row."
        )
    if (largest := int(input_ids.max())) >= target.vocab_size:
        yield (
            f"input_ids contains {largest}, and the vocabulary has {target.vocab_size} tokens: drafts embed "
            "placeholders as well. Use a placeholder of the vocabulary."
        )
    if prompts.rotary is not None and (column := prompts.rotary.column) < prompts.max_length:
        yield (
            f"max_length={prompts.max_length} with {names}: rotary frequencies change at position {column}, where the "
            f"prompt may have to run again, without these inputs. Keep max_length at {column} or below."
        )
    if not (sizes := prompts.text_sizes):
        yield (
            f"{names}: the decoder of {kind} does not get one embedding per token, at the position of the token. Pass "
            "text only."
        )
    elif 0 in sizes:
        yield (
            f"the prompt of row {sizes.index(0)} does not end with text: its last token belongs to {names}. Add a "
            "token of text."
        )


def refuse(reason: str | None) -> None:
    """Raise a reason of [`why_not`] as an error, if there is one."""
    if reason is not None:
        raise ValueError(
            f"{reason} Or set draft.generation_config.on_unsupported='plain', or call generate() without a draft."
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
    """Refuse what a model does in training mode only: activation checkpointing and dropout.

    All modules are read, as an adapter that is added to a model in eval mode is in training mode.
    """
    for module in model.modules():
        if not module.training:
            continue
        if model.training and getattr(module, "gradient_checkpointing", False):
            raise ValueError(
                "the model is in training mode with activation checkpointing, which disables the cache. Call "
                "model.eval() first."
            )
        for part in (module, *module.children()):  # gpt2 reads the rate of its dropout module by its own mode
            kind = type(part).__name__
            for name, value in vars(part).items():
                is_rate = "drop" in name or "jitter" in name or (name == "p" and "Dropout" in kind)
                if is_rate and type(value) in (int, float) and value > 0:
                    raise ValueError(
                        f"the model is in training mode with dropout ({kind}, {name}={value}), so drafted tokens "
                        "cannot be verified. Call model.eval() first."
                    )


def refuse_inputs(target: TargetView, input_ids: torch.Tensor, model_kwargs: dict[str, Any]) -> None:
    """Refuse masks, positions and caches that do not fit the prompts; call it if [`why_not_begun`] has no reason."""
    _refuse_positions(target, input_ids, model_kwargs)
    refuse_cache(model_kwargs.get(CACHE_NAME), input_ids, model_kwargs.get("attention_mask"), target.config)


def _refuse_positions(target: TargetView, input_ids: torch.Tensor, model_kwargs: dict[str, Any]) -> None:
    mask = model_kwargs.get("attention_mask")
    if mask is not None and mask.shape != input_ids.shape:
        raise ValueError(
            f"attention_mask has shape {tuple(mask.shape)}, and input_ids has shape {tuple(input_ids.shape)}. Pass the "
            "mask of the whole text, also on a second turn."
        )
    if mask is not None and not bool(mask[:, -1].all()):
        rows = (mask[:, -1] == 0).nonzero().flatten().tolist()
        raise ValueError(
            f"attention_mask ends with 0 in the rows {rows}: right padding is not supported. Tokenize with "
            "padding_side='left'."
        )
    if mask is not None and not bool(mask.all()) and target.counts_padding:
        raise ValueError(
            f"attention_mask has padding, and the forward of {type(target.model).__name__} takes no position_ids or "
            "widens the mask, so plain generate counts the padding. Pass one prompt, or prompts of equal length."
        )
    if (positions := model_kwargs.get("position_ids")) is None:
        return
    is_token = torch.ones_like(input_ids) if mask is None else mask
    counts = positions.shape[-1] == input_ids.shape[1]  # the loop computes positions by counting tokens
    places = is_token.long().cumsum(-1) - 1
    if counts and positions.dim() == 3:  # generate() makes them for M-RoPE
        if inputs_beside_tokens(target, model_kwargs):
            return
        positions = positions[-3:]
        places = places + positions[-1:, :, -1:] - places[:, -1:]  # they begin elsewhere if the cache holds an image
    if not counts or bool(((positions != places) & is_token.bool()).any()):
        raise ValueError(
            f"position_ids of shape {tuple(positions.shape)} do not count the tokens of input_ids, shape "
            f"{tuple(input_ids.shape)}, from 0. Drop position_ids, and pass the whole text also on a second turn."
        )


def _refuse_assistant_settings(config: GenerationConfig, of_model: GenerationConfig) -> None:
    """Refuse settings of transformers' own assistants, as the settings of a draft are in its `generation_config`.

    `dola_layers` is refused too: plain `generate` does not serve it, as the code for it is in a repository.
    """
    if (layers := getattr(config, "dola_layers", None)) is not None:
        raise ValueError(
            f"dola_layers={layers!r} is not supported with a draft. Drop dola_layers, or call generate() without "
            "assistant_model."
        )
    defaults = GenerationConfig._get_default_generation_params()  # values that `generate` fills in by itself
    settings = {name: getattr(config, name, None) for name in ASSISTANT_SETTINGS}
    for name, value in settings.items():
        if value is not None and value not in (defaults.get(name), getattr(of_model, name, None)):
            raise ValueError(
                f"{name}={value!r} has no effect on this draft. Set it in draft.generation_config instead, such as "
                "draft.generation_config.num_assistant_tokens."
            )


def max_length_of(config: GenerationConfig, target: TargetView, prompt_length: int) -> int:
    """Return the maximum number of tokens of a row in this call, prompt included."""
    limit = config.max_length or getattr(target.config, "max_position_embeddings", None)
    if limit is None:
        raise ValueError("generation has no length limit. Pass max_new_tokens or max_length.")
    return max(limit, prompt_length + 1)
