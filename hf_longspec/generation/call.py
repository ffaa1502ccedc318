"""One call of `generate`: its arguments, its prompts and cache, and the reasons why it cannot use the draft.

[`Call.why_not`] raises errors if target, draft or arguments are wrong, before any work is done. It returns a reason if
they fit and only this call cannot use the draft. The setting `on_unsupported` of the draft decides whether the call
then runs without the draft or is an error. What only some calls need is a special case, see `special_case.py`.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from itertools import chain
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation.logits_process import LogitsProcessorList
from transformers.generation.stopping_criteria import StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer
from transformers.utils import logging

from .cache import CACHE_NAME, SpeculativeCache
from .compiled.compiled_steps import runner_of
from .sampling import TokenRule, declared, is_history_free
from .special_case import SPECIAL_CASES
from .target import Known, TargetView
from .target_modules import foreign_methods

# Settings of the assistants of transformers, and `dola_layers`, for which `generate` runs code of the Hub.
ASSISTANT_SETTINGS = (
    "assistant_confidence_threshold",
    "assistant_early_exit",
    "assistant_ensemble_weight",
    "assistant_lookbehind",
    "dola_layers",
    "max_matching_ngram_size",
    "num_assistant_tokens",
    "num_assistant_tokens_schedule",
    "prompt_lookup_num_tokens",
    "speculation_type",
    "target_lookbehind",
    "use_mtp",
)


# Keyword arguments of `generate` for the model that the loop reads itself, or makes itself.
KNOWN_MODEL_KWARGS = {
    "attention_mask",
    "cache_position",
    "inputs_tensor",
    "logits_to_keep",
    "output_attentions",
    "output_hidden_states",
    CACHE_NAME,
    "position_ids",
    "synced_gpus",
    "tokenizer",
    "use_cache",
}
# Names of special cases, in the order in which their reasons are looked for.
USER_CACHE, PROCESSORS = f"{CACHE_NAME} with tokens", "logits processors"
IMAGES, HOOKS, GRAMMAR = "inputs beside the tokens", "forward hooks", "a grammar"
COPIES, SHARDED = "copies of a prompt", "sharded weights"
PACKED, HALF_PRECISION, PROMPT_PROGRESS = "packed weights", "half precision on a CPU", "a progress bar"
# Number of weights from which products on a CPU are worth packing.
LARGE = 2**20
# The targets and settings for which drafts were last checked.
_checked: WeakKeyDictionary[torch.nn.Module, tuple[Known, dict[str, Any]]] = WeakKeyDictionary()


class Call:
    """One call of `generate`: its arguments, which are those of [`decode`], and the parts that run it.

    Attributes:
        prompts ([`Prompts`]): Prompts without their padding.
        store ([`CallCache`]): Cache of the loop, and of the user.
        session_class (*optional*): Subclass of [`Session`] that runs the call; special cases choose it.
        prompts_class (`type`): Subclass of [`Prompts`]; the verification mode and special cases choose it.
        rule_class (`Callable`): Makes the [`TokenRule`] of the call; special cases choose it.
        more_nodes (`int`): Number of nodes that a special case adds to trees.
        inputs (`dict[str, Any]`): Inputs of the first forward beside the tokens, which a special case has read.
    """

    prompts: "Prompts"

    def __init__(
        self,
        model: PreTrainedModel,
        draft: Any,
        input_ids: torch.Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        config: GenerationConfig,
        streamer: BaseStreamer | None,
        model_kwargs: dict[str, Any],
    ):
        mode, device = draft.setting("compile"), input_ids.device
        is_eager = mode == "off" or (mode == "auto" and device.type != "cuda")
        self.target = TargetView(model, None if is_eager else runner_of(mode, model, draft, device))
        self.draft, self.input_ids = draft, input_ids
        self.logits_processor, self.stopping_criteria = logits_processor, stopping_criteria
        self.config, self.streamer, self.model_kwargs = config, streamer, model_kwargs
        self.mask, self.position_ids = model_kwargs.get("attention_mask"), model_kwargs.get("position_ids")
        # the type of generated tokens, with any tokens in the place of those that the cache alone has
        self.tokens = pad(input_ids.long(), (self.columns_apart, 0))
        self.store = CallCache()
        self.session_class: Any = None
        self.prompts_class: Any = Prompts
        self.inputs: dict[str, Any] = {}
        self.more_nodes = 0
        self.rule_class: Callable[..., TokenRule] = TokenRule

    @cached_property
    def max_length(self) -> int:
        """Maximum number of tokens of a row, prompt included."""
        return max_length_of(self.config, self.target, self.input_ids.shape[1]) + self.columns_apart

    @cached_property
    def columns_apart(self) -> int:
        """Number of columns that the cache holds and `input_ids` lacks: new tokens alone come with the whole mask."""
        cache, width = self.model_kwargs.get(CACHE_NAME), self.input_ids.shape[1]
        # transformers drops a mask without zeros, from 5.24 on
        whole = (getattr(self.config, "_mask_length", None) or width) if self.mask is None else self.mask.shape[1]
        return whole - width if whole > width and cache is not None and cache.get_seq_length() == whole - width else 0

    @cached_property
    def special_cases(self) -> list[str]:
        """Names of the special cases in this call, in the order of their reasons and, from the inside, drafters."""
        others = (value for name, value in self.model_kwargs.items() if name not in KNOWN_MODEL_KWARGS)
        has_axes = self.position_ids is not None and self.position_ids.dim() > 2
        cases = {
            SHARDED: torch.distributed.is_available() and torch.distributed.is_initialized(),
            USER_CACHE: self.model_kwargs.get(CACHE_NAME) is not None and self._passes_cache(),
            GRAMMAR: any(declared(processor, "is_grammar") for processor in self.logits_processor),
            PROCESSORS: not all(map(is_history_free, self.logits_processor)),
            IMAGES: has_axes or any(value is not None for value in others),
            COPIES: len(self.input_ids) > 1 and self._has_copies(),
            HOOKS: self.target.has_hooks and self.draft.setting("check_target"),
            PACKED: self.draft.setting("compile") == "auto" and self._is_large_on_cpu,
            HALF_PRECISION: self.target.model.dtype.itemsize == 2 and self._is_large_on_cpu,
            PROMPT_PROGRESS: _shows_bars(),
        }
        return [name for name, is_present in cases.items() if is_present] + self.target.special_cases

    @cached_property
    def _is_large_on_cpu(self) -> bool:
        parameters = list(self.target.model.parameters())
        return {part.device.type for part in parameters} == {"cpu"} and sum(map(torch.numel, parameters)) >= LARGE

    def _has_copies(self) -> bool:
        return len(set(map(tuple, self.input_ids.tolist()))) < len(self.input_ids)

    def _passes_cache(self) -> bool:
        """Return whether the user passed a cache, or asks for one of another kind than the loop makes."""
        cache, implementation = self.model_kwargs[CACHE_NAME], self.config.cache_implementation
        is_users = getattr(cache, "_is_user_defined", False) or isinstance(cache, SpeculativeCache)
        return is_users or implementation is not None or int(cache.get_seq_length()) > 0

    def why_not(self) -> str | None:
        """Return why this call cannot be decoded with the draft, and what to do; `None` if it can."""
        if (reason := why_not_in_training(self.target.model)) is not None:  # before a trial draws random numbers
            return reason
        if foreign := foreign_methods(self.target.model):
            return f"{', '.join(foreign)}: drafts do not run what is not of transformers. Use that of transformers."
        self._refuse_unsupported()
        if not self.input_ids.shape[1] and self.model_kwargs.get("inputs_embeds") is None:
            raise ValueError(
                f"input_ids has shape {tuple(self.input_ids.shape)}, expected at least one token, which plain generate "
                "needs, too. Pass the whole text, or leave its last token out of the cache."
            )
        if (reason := why_not_begun(self.tokens, self.config, self.model_kwargs)) is not None:
            return reason
        self._refuse_mask()
        if (rows := self._rows_with_gaps()) and (cause := self._counts_columns()) is not None:
            return (
                f"attention_mask has zeros between tokens in the rows {rows}, as of a batched chat whose rows ended at "
                f"different places, with {cause}. Pass one row at a time, or move the zeros to the left of each row."
            )
        self.prompts_class = self.target.mode.prompts_class or Prompts
        for name in self.special_cases:
            SPECIAL_CASES[name].change(self)
        if self.position_ids is not None:
            refuse_positions(self.position_ids, self.tokens, self.mask, apart=self.columns_apart)
        self.store.refuse(self)
        self.prompts = self.prompts_class(self)
        # those first whose finding costs least
        return next(
            chain(self.prompts.why_not(), *(SPECIAL_CASES[name].why_not(self) for name in self.special_cases)), None
        )

    def _rows_with_gaps(self) -> list[int]:
        """Return the rows with padding between tokens."""
        if self.mask is None:
            return []
        is_token = self.mask.bool()
        rows: list[int] = (is_token[:, :-1] & ~is_token[:, 1:]).any(1).nonzero().flatten().tolist()
        return rows

    def _counts_columns(self) -> str | None:
        """Return with what the text depends on the columns of padding between tokens; `None` if it does not."""
        cache = self.model_kwargs.get(CACHE_NAME)
        if USER_CACHE in self.special_cases and not isinstance(cache, SpeculativeCache):
            return f"a {type(cache).__name__}, which has a column for each of them"
        if IMAGES in self.special_cases:
            return "inputs beside the tokens"
        if self.target.mode.counts_columns or any(
            0 < (window or 0) < self.max_length for window in self.target.windows
        ):
            return f"layers of {type(self.target.model).__name__} that count them"
        return None

    def _refuse_unsupported(self) -> None:
        """Refuse a call whose target, draft or settings are wrong, with the value, the rule and the remedy."""
        refuse_target(self.target, type(self.draft), self.max_length)
        reason, mode = None, self.draft.setting("compile")
        if mode not in ("auto", "off") and self.target.ranks is not None:
            reason = f"tensor parallelism ({self.target.ranks.size} processes)"
        elif mode == "compile":
            reason = self.target.mode.why_not_fixed(type(self.target.model).__name__)
        if reason is not None:
            raise ValueError(f"compile={mode!r} is not supported with {reason}. Set compile='off'.")
        state = self.target.known, self.draft.generation_config.to_dict()
        if _checked.get(self.draft) != state:
            self.draft.check(self.target)
            _checked[self.draft] = state
        if self.config.do_sample:
            self.draft.check_sampling()
        _refuse_assistant_settings(self.config, self.target.model.generation_config)

    def _refuse_mask(self) -> None:
        """Refuse a mask that does not fit the prompts."""
        mask, tokens = self.mask, self.tokens
        if mask is not None and mask.shape != tokens.shape:
            raise ValueError(
                f"attention_mask has shape {tuple(mask.shape)}, and input_ids has shape {tuple(tokens.shape)}. Pass "
                "the mask of the whole text, also on a second turn."
            )
        if mask is not None and not bool(mask[:, -1].all()):
            rows = (mask[:, -1] == 0).nonzero().flatten().tolist()
            raise ValueError(
                f"attention_mask ends with 0 in the rows {rows}: right padding is not supported. Tokenize with "
                "padding_side='left'."
            )
        if mask is not None and not bool(mask.all()) and self.target.counts_padding:
            raise ValueError(
                f"attention_mask has padding, and the forward of {type(self.target.model).__name__} takes no "
                "position_ids or widens the mask, so plain generate counts the padding. Pass one prompt, or prompts of "
                "equal length."
            )


def refuse_positions(
    positions: torch.Tensor, tokens: torch.Tensor, mask: torch.Tensor | None, first: Any = 0, apart: int = 0
) -> None:
    """Refuse positions `(batch or 1, P)` that do not count the tokens of a mask from `first` on, as the loop does.

    Without those of the first `apart` columns, which a cache holds, they are right, too.
    """
    is_token = torch.ones_like(tokens) if mask is None else mask
    places = is_token.long().cumsum(-1) - 1
    if apart and positions.shape[-1] == tokens.shape[1] - apart:  # those of the new tokens alone
        places, is_token, tokens = places[:, apart:], is_token[:, apart:], tokens[:, apart:]
    if positions.shape[-1] != tokens.shape[1] or bool(((positions != places + first) & is_token.bool()).any()):
        raise ValueError(
            f"position_ids of shape {tuple(positions.shape)} do not count the tokens of input_ids, shape "
            f"{tuple(tokens.shape)}, from {apart}. Drop position_ids, and pass the whole text also on a second turn, "
            "or its new tokens with attention_mask of the whole."
        )


def _shows_bars() -> bool:
    """Return whether standard error is a terminal, and transformers' progress bars are on."""
    return sys.stderr is not None and sys.stderr.isatty() and bool(logging.is_progress_bar_enabled())


class Prompts:
    """Prompts of a call without their padding.

    Attributes:
        padding (`torch.LongTensor` of shape `(batch,)`, *optional*): Number of padding tokens of every row; `None` if
            all are 0.
        past_lengths (`list[int]`): Number of tokens of every row that the cache holds.
        by_chains (`bool`): Whether the prompts run as chains that are verified, since their rows differ.
        texts (`list[torch.LongTensor]`): Tokens `(T,)` of every row, those in the cache included.
        new (`list[torch.LongTensor]`): Tokens of every row that the cache does not hold.
        is_whole (`bool`): Whether prompts run with their last tokens, which then run again.
        places (`Sequence[int]`): Row of the forwards that reads the prompt of each row.
        offsets (`torch.LongTensor` of shape `(batch, 1)`, *optional*): Position of the last token of every row, minus
            its place in the text; `None` if all are 0.
        logits (`torch.Tensor` of shape `(batch, vocab)`, *optional*): Logits of the last token of each prompt, if a
            forward that is not repeated has computed them.
    """

    is_whole = False
    offsets: torch.Tensor | None = None
    logits: torch.Tensor | None = None

    def __init__(self, call: Call):
        self.call, self.target, self.input_ids = call, call.target, call.tokens
        self.chunk_size: int | None = call.config.prefill_chunk_size
        mask = torch.ones_like(self.input_ids) if call.mask is None else call.mask
        self.texts = unpadded(self.input_ids, mask)
        self.past_lengths = call.store.past_lengths(mask)
        padding = (mask == 0).sum(1)
        self.padding = padding if bool(padding.any()) else None
        self.by_chains = len(set(self.past_lengths)) > 1
        self.new = [text[count:] for text, count in zip(self.texts, self.past_lengths, strict=True)]
        self.places: Sequence[int] = range(len(self.texts))

    def why_not(self) -> Iterator[str]:
        """Yield reasons why the draft cannot be used with these prompts."""
        return iter(())

    def tree_slots(self, nodes: int) -> int:
        """Return the number of slots after the committed tokens that trees of `nodes` nodes and chains need."""
        return max(nodes, self.target.mode.chain_tokens) if self.by_chains else nodes

    def begin(self, cache: SpeculativeCache) -> None:
        """Prepare a cache, which may have served another call, for these prompts."""
        cache.rows.offsets = self.offsets

    @property
    def text_sizes(self) -> list[int]:
        """How many tokens at the end of each prompt are text."""
        return [len(prompt) for prompt in self.new]

    def prefill(self, cache: SpeculativeCache, seed_tokens: int) -> list[torch.Tensor]:
        """Run all but the last tokens of every row under the model's own attention, right-padded, possibly in chunks.

        If rows differ (`by_chains`), chains are verified instead.

        Returns:
            `list[torch.LongTensor]`: Last tokens of every row, which are not in the cache: `seed_tokens` at most, or
            one more if the verification mode asks for it.
        """
        sizes = self.tails(seed_tokens)
        heads = [prompt[: len(prompt) - size] for prompt, size in zip(self.new, sizes, strict=True)]
        self.run(cache, heads)
        cache.set_lengths([count + len(head) for count, head in zip(self.past_lengths, heads, strict=True)])
        return [prompt[len(head) :] for prompt, head in zip(self.new, heads, strict=True)]

    def tails(self, seed_tokens: int) -> list[int]:
        """Return how many last tokens of each row run as a verification."""
        return [min(seed_tokens, size) for size in self.text_sizes]

    def run(self, cache: SpeculativeCache, heads: list[torch.Tensor]) -> None:
        """Append keys and values of the beginnings of prompts to a cache."""
        if self.by_chains:
            with self.target.attention():
                self.target.prefill_rows(heads, cache, self.chunk_size)
        elif max(map(len, heads)):
            tokens = pad_sequence(self.new if self.is_whole else heads, batch_first=True)
            self.target.prefill(tokens, cache, self.chunk_size)


class CallCache:
    """The cache of one call, which the loop makes. Special cases have subclasses for caches of the user."""

    # whether the user gets the cache back, so that the next call cannot have its buffers
    is_users = False

    def refuse(self, call: Call) -> None:
        """Refuse a cache that does not fit the call."""

    def past_lengths(self, mask: torch.Tensor) -> list[int]:
        """Return how many tokens of every row the cache holds, if `mask` `(batch, P)` is 0 at the padding."""
        return [0] * len(mask)

    def open(self, call: Call, nodes: int, earlier: SpeculativeCache | None) -> SpeculativeCache:
        """Return the cache of the loop, with room for trees of `nodes` nodes: that of an earlier call, or a new one."""
        cache = earlier
        if cache is None:
            cache = SpeculativeCache(call.target.config, len(call.tokens), call.max_length, tree_slots=nodes)
        cache.reserve(call.max_length, nodes)
        return cache

    def settle(self, session: Any, is_kept: bool) -> None:
        """Leave the text of a call in the cache; `is_kept` says whether the cache could be cut to it."""
        session.cache.rows.padding = session.prompts.padding
        if session.outputs.as_dict:
            pack_if_mostly_free(session.cache)

    def returned(self, cache: SpeculativeCache) -> Any:
        """Return the cache that is a part of the result."""
        return cache


def pack_if_mostly_free(cache: SpeculativeCache) -> None:
    """Copy the tokens of a cache that the user gets, if they fill less than half of its buffers."""
    if 2 * cache.lengths.longest < cache.max_length + cache.tree_slots:
        cache.pack()


def unpadded(values: torch.Tensor, mask: torch.Tensor) -> list[torch.Tensor]:
    """Return the rows of `(batch, P)` values without padding, where `mask` is 0."""
    return [row[keep.bool()] for row, keep in zip(values, mask, strict=True)]


def why_not_begun(input_ids: torch.Tensor, config: GenerationConfig, model_kwargs: dict[str, Any]) -> str | None:
    """Return why the loop has no prompts or results as these arguments ask for, and what to do; `None` if it has."""
    if model_kwargs.get("inputs_embeds") is not None:
        return "inputs_embeds is not supported with a draft. Pass input_ids."
    if not model_kwargs.get("use_cache", True):
        return "use_cache=False is not supported with a draft. Drop the argument."
    for name in ("output_attentions", "output_hidden_states"):
        if getattr(config, name) and config.return_dict_in_generate:
            return f"{name}=True is not supported with a draft. Run the model once on out.sequences to get them."
    mask, positions = model_kwargs.get("attention_mask"), model_kwargs.get("position_ids")
    widths = {one.shape[-1] for one in (mask, positions) if one is not None}
    if config.token_healing and widths - {input_ids.shape[1]}:
        return (
            "token_healing=True has changed the length of the prompts, and plain generate keeps the mask and the "
            "positions of those before. Call model.heal_tokens first, and pass its tokens with a mask of their own."
        )
    empty = [] if mask is None else (mask == 0).all(-1).nonzero().flatten().tolist()
    if empty:
        return (
            f"attention_mask is 0 everywhere in the rows {empty}, whose text depends on the padding. Drop these rows, "
            "or begin each with a token."
        )
    return None


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


def why_not_in_training(model: PreTrainedModel) -> str | None:
    """Return what a model does in training mode only, activation checkpointing or dropout, and what to do, or `None`.

    All modules are read, as an adapter that is added to a model in eval mode is in training mode.
    """
    for module in model.modules():
        if not module.training:
            continue
        if model.training and getattr(module, "gradient_checkpointing", False):
            return (
                "the model is in training mode with activation checkpointing, which may disable the cache. Call "
                "model.eval() first."
            )
        for part in (module, *module.children()):  # gpt2 reads the rate of its dropout module by its own mode
            kind = type(part).__name__
            for name, value in vars(part).items():
                is_rate = "drop" in name or "jitter" in name or (name == "p" and "Dropout" in kind)
                if is_rate and type(value) in (int, float) and value > 0:
                    return (
                        f"the model is in training mode with dropout ({kind}, {name}={value}), so drafted tokens "
                        "cannot be verified. Call model.eval() first."
                    )
    return None


def _refuse_assistant_settings(config: GenerationConfig, of_model: GenerationConfig) -> None:
    """Refuse settings of transformers' own assistants, as the settings of a draft are in its `generation_config`."""
    defaults = GenerationConfig._get_default_generation_params()  # values that `generate` fills in by itself
    settings = {name: getattr(config, name, None) for name in ASSISTANT_SETTINGS}
    for name, value in settings.items():
        if value is not None and value not in (defaults.get(name), getattr(of_model, name, None)):
            raise ValueError(
                f"{name}={value!r} has no effect on this draft. Drop it. Settings of a draft are in "
                "draft.generation_config, such as num_assistant_tokens."
            )


def max_length_of(config: GenerationConfig, target: TargetView, prompt_length: int) -> int:
    """Return the maximum number of tokens of a row in this call, prompt included."""
    limit = config.max_length or getattr(target.config, "max_position_embeddings", None)
    if limit is None:
        raise ValueError("generation has no length limit. Pass max_new_tokens or max_length.")
    return max(limit, prompt_length + 1)
