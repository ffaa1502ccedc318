"""Checks of a call: of its arguments before any work is done, and of the target before the first token.

- [`refuse_unsupported`] raises errors: unsupported targets, wrong settings, contradictory arguments.
- [`why_not`] returns a reason if model and draft fit and only this call cannot use the draft. The setting
  `on_unsupported` of the draft decides whether the call then runs without the draft or is an error.
- [`check_target`] compares tree verification with a plain forward after the prompt, once per kind of target.

[`check_target`] runs after the prefix of the longest row. It verifies a tree with two branches: the last tokens of the
prompt, and before them the same tokens in reverse. The logits of the former must equal those of a plain forward over
the same tokens under the model's own attention. They do not if the tree is verified without `position_ids`, the tree
mask, a softcap, sinks, or a window that is shorter than the prefix.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from transformers import GenerationConfig, GenerationMixin, PreTrainedModel
from transformers.generation.logits_process import LogitsProcessorList
from transformers.utils import logging

from .cache import CACHE_NAME, SpeculativeCache
from .draft_tree import DraftTree
from .inputs import TOKEN_TYPES, Prompts, inputs_beside_tokens, names_of, of_every_forward
from .masked import MASKED, first_count_that_matters
from .processors import why_stateful
from .recurrences import has_input_bias, ignores_earlier_states
from .target import TargetView
from .user_cache import refuse_cache, why_not_stored

logger = logging.get_logger(__name__)

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

# Number of tokens that are compared. The tree has one node less than twice this number.
NUM_TOKENS = 4

# Largest difference of two logits, relative to their standard deviation. Measured on the tiny targets of the tests:
# at most 4e-6 in float32; at least 0.6 without the window, the softcap, the sinks, the positions or the mask.
TOLERANCE = 0.02
# In half precision, rounding changes logits (0.07 in bfloat16) and the choice of experts in near-ties (0.8, gpt_oss).
HALF_TOLERANCE = 0.5

_checked: set[tuple[Any, ...]] = set()


def refuse_unsupported(
    target: TargetView,
    draft: Any,
    input_ids: torch.Tensor,
    config: GenerationConfig,
    model_kwargs: dict[str, Any],
) -> None:
    """Refuse a call whose target, draft or arguments are wrong, with the value, the rule and the remedy."""
    refuse_target(target, type(draft), max_length_of(config, target, input_ids.shape[1]))
    _refuse_training_mode(target.model)
    if (mode := draft.setting("compile")) not in ("auto", "off") and (reason := _why_not_fixed(target)):
        raise ValueError(f"compile={mode!r} is not supported with {reason}. Set compile='off'.")
    draft.check(target)
    if config.do_sample:
        draft.check_sampling()
    _refuse_inputs(target, input_ids, config, model_kwargs)
    _refuse_assistant_settings(config, target.model.generation_config)
    cache, mask = model_kwargs.get(CACHE_NAME), model_kwargs.get("attention_mask")
    refuse_cache(cache, input_ids, mask, target.config)


def _why_not_fixed(target: TargetView) -> str | None:
    """Return with what steps cannot be compiled or captured; `None` if they can."""
    name = type(target.model).__name__
    if target.ranks is not None:
        return f"tensor parallelism ({target.ranks.size} processes)"
    if target.has_states:
        return f"recurrent states, which {name} has"
    return f"{name}, whose nodes are verified by a mask that grows with the text" if target.way is MASKED else None


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
    yield from why_stateful(processors, prompts.input_ids, prompts.target.model, prompts.target.vocab_size)
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


def _refuse_inputs(
    target: TargetView, input_ids: torch.Tensor, config: GenerationConfig, model_kwargs: dict[str, Any]
) -> None:
    if model_kwargs.get("inputs_embeds") is not None or input_ids.shape[1] == 0:
        raise ValueError(
            "inputs_embeds is not supported with a draft. Pass input_ids, or call generate() without a draft."
        )
    if not model_kwargs.get("use_cache", True):
        raise ValueError("use_cache=False is not supported with a draft. Drop the argument.")
    for name in ("output_attentions", "output_hidden_states"):
        if getattr(config, name) and config.return_dict_in_generate:
            raise ValueError(
                f"{name}=True is not supported with a draft. Run the model once on out.sequences to get them."
            )
    if (layers := getattr(config, "dola_layers", None)) is not None:
        raise ValueError(
            f"dola_layers={layers!r} is not supported with a draft. Drop dola_layers, or call generate() without "
            "assistant_model."
        )
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
    """Refuse settings of transformers' own assistants, as the settings of a draft are in its `generation_config`."""
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


def check_target(
    target: TargetView,
    cache: SpeculativeCache,
    texts: Sequence[torch.Tensor],
    limit: int,
    logits: torch.Tensor | None = None,
) -> None:
    """Compare verification and plain forward after the longest row of `cache`, once per process and kind of target.

    A kind is given by class, config, dtype of the weights and attention implementation, and by whether there is room
    for a tree of more than a root. The check runs the last few tokens of one of the `texts`, at positions below
    `limit`, and writes only to free slots of the cache. Call it outside of [`TargetView.attention`].

    With `logits` `(batch, vocab)` of the last token of every text, from one forward over the text with images and the
    like, it also verifies the end of a text that is not in the cache, which must run without these inputs.

    Raises:
        ValueError: If the logits disagree in float32. In other precisions a warning is logged.
    """
    row = max(range(cache.batch_size), key=cache.lengths.host.__getitem__)
    start = cache.lengths.host[row]
    # A draft that only verifies roots pays for no more.
    slots = min(cache.tree_slots, cache.max_length + cache.tree_slots - start)
    count = max(1, min(NUM_TOKENS, len(texts[row]), limit - start, (slots + 1) // 2))
    implementation, settings = str(target.config._attn_implementation), target.config.to_json_string(use_diff=False)
    dtype = target.model.dtype, torch.is_autocast_enabled(texts[row].device.type)
    kind = type(target.model), *dtype, implementation, settings, logits is not None, count > 1
    if kind in _checked:
        return
    chain = texts[row][None, -count:]
    tree, nodes = _two_branches(chain)
    positions = torch.arange(start, start + count, device=chain.device)[None]
    view = _row_of(cache, row, target, room=tree.num_nodes)
    # one token at a time, as plain generate does: with states, some functions for several tokens differ from it, and
    # the choice of an indexer depends on the number of tokens if there are ties
    is_single = target.has_states or target.way is MASKED
    parts = [slice(i, i + 1) for i in range(count)] if is_single else [slice(None)]
    steps = ({"input_ids": chain[:, part], "position_ids": view.position_ids(positions[:, part])} for part in parts)
    logits_of = [target.model(**step, **{CACHE_NAME: view}, use_cache=True).logits for step in steps]
    plain = torch.cat(logits_of, 1)
    view = _row_of(cache, row, target, room=tree.num_nodes)
    with target.attention():
        verified = target.verify(tree, view).logits[:, nodes]
    _compare(target, verified.float(), plain.to(verified.device).float())
    if logits is not None:
        end = texts[row][None, start:]
        view = _row_of(cache, row, target, room=end.shape[1])
        with target.attention():
            verified = target.verify(DraftTree.chain(end), view).logits[:, -1]
        _compare(target, verified.float(), logits[row, None].to(verified.device).float())
    _checked.add(kind)


def _two_branches(chain: torch.Tensor) -> tuple[DraftTree, list[int]]:
    """Return a tree of `chain` `(1, n)` and a wrong branch, whose nodes come first, and the indices of the chain."""
    drafted = chain.shape[1] - 1
    tokens = torch.cat([chain[:, :1], chain[:, 1:].flip(1), chain[:, 1:]], dim=1)
    branch = list(range(1, drafted))
    parents = [-1, *[0, *branch][:drafted], *[0, *(node + drafted for node in branch)][:drafted]]
    tree = DraftTree(
        tokens,
        torch.tensor([parents], device=chain.device),
        torch.ones_like(tokens, dtype=torch.bool),
        max_depth=drafted,
    )
    return tree, [0, *range(drafted + 1, 2 * drafted + 1)]


def _row_of(cache: SpeculativeCache, row: int, target: TargetView, room: int) -> SpeculativeCache:
    """Return one row of a cache as a separate cache over the same buffers, which writes after the committed tokens."""
    length = cache.lengths.host[row]
    view = SpeculativeCache(target.config, 1, length + room, tree_slots=room)
    for view_state, state in zip(view.state_layers, cache.state_layers, strict=True):
        view_state.put(state.copied(row))
    for view_layer, layer in zip(view.key_layers, cache.key_layers, strict=True):
        if layer.is_initialized:
            view_layer.keys, view_layer.values = layer.keys[row : row + 1], layer.values[row : row + 1]
            view_layer.device, view_layer.is_initialized = layer.keys.device, True
    view.set_lengths([length])
    view.rows.offsets = None if cache.rows.offsets is None else cache.rows.offsets[row : row + 1]
    return view


def _compare(target: TargetView, verified: torch.Tensor, plain: torch.Tensor) -> None:
    is_same = (verified == plain) | (verified.isnan() & plain.isnan())  # also where a model masks tokens with -inf
    gap = (verified - plain).masked_fill(is_same, 0).abs().max().item()
    if gap == 0:
        return
    spread = plain[plain.isfinite()].std().item()
    is_exact = not torch.is_autocast_enabled(verified.device.type) and _computes_exactly(target.model)
    tolerance = (TOLERANCE if is_exact else HALF_TOLERANCE) * spread
    if gap <= tolerance:
        return
    name = type(target.model).__name__
    difference = (
        f"the logits of a verified tree and of a plain forward over the same tokens differ by up to {gap:.3g}; the "
        f"tolerance is {tolerance:.3g} ({tolerance / spread if spread else math.nan:.3g} of their standard deviation)"
    )
    if is_exact:
        raise ValueError(
            f"{name} cannot be verified: {difference}. It may ignore position_ids, the tree mask or its own "
            "sliding window. Call generate() without assistant_model, and report the model. "
            "draft.generation_config.check_target = False skips this check, and the text may then be wrong."
        )
    logger.warning(
        "%s: %s. In this precision, rounding or another choice of experts can be the cause. Compare in float32, or "
        "check the text with hf_longspec.audit.",
        name,
        difference,
    )


def _computes_exactly(model: torch.nn.Module) -> bool:
    """Return whether the model computes in float32: no half precision, no quantised weights or activations, no TF32."""
    if getattr(model, "is_quantized", False) or torch.get_float32_matmul_precision() != "highest":
        return False
    if any(hasattr(module, "_packed_params") for module in model.modules()):  # torch's dynamic int8
        return False
    return all(weight.dtype in (torch.float32, torch.float64) for weight in model.parameters())
