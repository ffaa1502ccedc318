"""Every decoder of transformers under every draft: the text of the stock `generate`, or a refusal with a known reason.

Types come from the mapping of `AutoModelForCausalLM`, so that those of a newer transformers appear by themselves. Each
is built from a configuration shrunk by rules, with peaked random weights.
"""

import copy
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from hf_longspec.generation.target import TargetView
from tests.robustness.drafts import make_draft
from tests.robustness.peaked_weights import peak
from tests.robustness.shrunk_configs import VOCAB_SIZE, shrunk_config
from tests.tiny_targets import RandomTreeDraftModel, tiny_prompts

TYPES: tuple[str, ...] = tuple(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)

BATCHES: dict[str, tuple[int, ...]] = {"one": (37,), "ragged": (23, 9, 40)}
NEW_TOKENS = 14
MOST_PARAMETERS = 20_000_000
FEWEST_DISTINCT_TOKENS = 3, 16  # of a row, and of all rows; texts of fewer show little
SEEDS = 12  # of weights to try until texts vary

DRAFTS = ("tree", "ngram", "specattn", "longspec", "tokenswift", "partial", "eagle3", "assistant")
SETTINGS: dict[str, dict[str, Any]] = {
    "longspec": {"tree_widths": [12, 11]},
    "tokenswift": {"tree_branching": [1, 12, 2]},
}

# sdpa has no softcap: transformers 5.17 ignores it there, and later versions refuse.
ATTENTION = dict.fromkeys(("gemma2", "vaultgemma"), "eager")

# Texts of permitted refusals, and their names in the table. Any other exception is a failure.
REASONS: tuple[tuple[str, str], ...] = (
    ("encoder-decoder", "encoder-decoder"),
    ("layers, whose state cannot branch into a tree", "recurrent layers"),
    (
        "whose choice of keys the attention backends cannot follow|selects keys for each query",
        "layers that choose keys",
    ),
    ("it has no attention layers", "no attention layers"),
    ("convolution states each", "several convolution states per layer"),
    ("do not call the functions of transformers that keep states", "recurrent layers with functions of their own"),
    ("it is stateful|assisted generation is not supported with stateful models", "recurrent layers"),
    ("share one module, whose layer_idx names none of them", "attention layers that share one module"),
    ("it has chunked attention", "chunked attention"),
    ("failed under a mask of its own|does not follow a mask over prefix and nodes", "no mask of its own"),
    ("may count a window by slots of the cache", "window by slots"),
    ("does not go through transformers' AttentionInterface", "no `AttentionInterface`"),
    ("never called the attention backend", "no `AttentionInterface`"),
    ("a forward of two tokens failed under its attention", "no `AttentionInterface`"),
    ("whose nodes are verified by masks", "masked"),
    ("a learned bias to the scores|add values of their own to the scores", "bias of the scores"),
    ("attend to later tokens", "not causal"),
    ("neither causal nor a sliding window", "mask of its own"),
    ("takes positions from the length of its cache|so plain generate counts the padding", "positions from the cache"),
    ("which its attention does not apply and transformers' cache does", "left-over window"),
    ("cannot be verified: ", "fails the comparison with a plain forward"),
    ("rotary frequencies change at", "rotary frequencies that change"),
    ("has no rotary embedding beside its layers|with a function apply_rotary_pos_emb", "no rotary embedding"),
    (r"caches one latent for all heads \(MLA\)", "MLA"),
    ("the target has value heads of", "value heads of another size"),
    ("has no final norm under one of the names", "no final norm"),
    ("layers. Pass indices from 0 to", "other layers than its configuration counts"),
    ("and the draft reads one stream", "several streams of states"),
)

# Types that transformers itself cannot make of a configuration or generate with, and what it says.
UNBUILDABLE: dict[str, str] = {
    "blt": "has no attribute 'num_hidden_layers'",  # the stock generate counts layers
    "cohere_compass_text": "The expanded size of the tensor",  # 5.17: positions of images with the default settings
    "gemma3n": "TimmWrapperModel requires the",  # its eyes are another package's
    "gemma4_assistant": "layer types producing a cache|must be shared|parameters, which",
    "gemma4_unified_assistant": "layer types producing a cache|parameters, which",
    "musicgen": "MusicgenConfig|text_encoder",  # the class of the mapping takes the configuration of its decoder
    "musicgen_melody": "MusicgenMelodyConfig|text_encoder",
}


class Unbuildable(Exception):
    """A type that transformers itself cannot make or run, with its reason."""


@dataclass
class Outcome:
    """The result of one draft on one type."""

    kind: str  # `identical`, `refused`, `different` or `unclear`
    detail: str = ""  # the reason of a refusal as the table puts it, an error's text, or where texts differ

    @property
    def failed(self) -> bool:
        return self.kind not in ("identical", "refused")


@dataclass
class Stock:
    """A tiny model of one type, and what the stock `generate` makes of the prompts."""

    model: Any
    poor: str | None = None  # why its texts prove nothing
    texts: dict[str, torch.Tensor] = field(default_factory=dict)

    def arguments(self, batch: str) -> dict[str, Any]:
        """Of `generate`; the special tokens of the vocabulary's end are no prompts."""
        input_ids, mask = tiny_prompts(VOCAB_SIZE - 1, BATCHES[batch])
        options = {"do_sample": False, "max_new_tokens": NEW_TOKENS, "eos_token_id": None, "pad_token_id": 0}
        return {"input_ids": input_ids, "attention_mask": mask, **options}

    def text(self, batch: str) -> torch.Tensor:
        """The text of an equal model that no draft has touched."""
        if batch not in self.texts:
            self.texts[batch] = copy.deepcopy(self.model).generate(**self.arguments(batch))
        return self.texts[batch]

    def generated(self, batch: str) -> list[list[int]]:
        return self.text(batch)[:, max(BATCHES[batch]) :].tolist()


def with_capturable_experts(model: Any) -> Any:
    """Return a model whose experts, if it has any, run without reads: the default way has a kernel for CUDA."""
    if model._can_set_experts_implementation():
        model.set_experts_implementation("batched_mm")
    return model


def build(model_type: str, seed: int = 0, **overrides: Any) -> Any:
    """A tiny model of a type with peaked weights, or its own if it is refused; it may be [`Unbuildable`]."""
    try:
        config = shrunk_config(model_type, **overrides)
        with torch.device("meta"):
            size = sum(parameter.numel() for parameter in AutoModelForCausalLM.from_config(config).parameters())
    except Exception as error:
        raise Unbuildable(_line(error)) from error
    if size > MOST_PARAMETERS:
        raise Unbuildable(f"{size} parameters, which its default configuration hides from the rules")
    config = shrunk_config(model_type, **overrides)  # a model may write into its configuration
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        model = AutoModelForCausalLM.from_config(
            config, dtype=torch.float32, attn_implementation=ATTENTION.get(model_type)
        ).eval()
    if TargetView(model).why_not():
        return model
    try:
        peak(model, VOCAB_SIZE - 1, seed)
    except Exception as error:
        raise Unbuildable(_line(error)) from error
    model.generation_config.eos_token_id = None
    return model


def stock_of(model_type: str, **overrides: Any) -> Stock:
    """A model and its texts, with the first of a few seeds whose texts vary; may be [`Unbuildable`]."""
    for seed in range(SEEDS):
        stock = Stock(build(model_type, seed, **overrides))
        if TargetView(stock.model).why_not():
            if not hasattr(stock.model.config.get_text_config(decoder=True), "num_hidden_layers"):
                raise Unbuildable("the stock generate: the configuration has no attribute 'num_hidden_layers'")
            break  # no text is needed
        try:
            stock.poor = degenerate(stock)
        except Exception as error:
            raise Unbuildable(f"the stock generate: {_line(error)}") from error
        if stock.poor is None:
            break
    return stock


def degenerate(stock: Stock) -> str | None:
    """Why the texts of a model prove nothing, if so: they must vary, and depend on the beginning of the prompt."""
    rows = [row for batch in BATCHES for row in stock.generated(batch)]
    fewest, together = min(len(set(row)) for row in rows), len(set().union(*rows))
    if (fewest, together) != tuple(map(max, (fewest, together), FEWEST_DISTINCT_TOKENS)):
        return f"a text has {fewest} distinct tokens, and all texts {together}"
    arguments = stock.arguments("one")
    arguments["input_ids"] = arguments["input_ids"].clone()
    arguments["input_ids"][:, :8] = arguments["input_ids"][:, 8:16]
    other = copy.deepcopy(stock.model).generate(**arguments)[:, max(BATCHES["one"]) :].tolist()
    return None if other != stock.generated("one") else "the text does not depend on the first tokens of the prompt"


def outcome_of(stock: Stock, draft_kind: str, batch: str) -> Outcome:
    """The result of one draft on one batch."""
    try:
        draft = make(stock, draft_kind, batch)
        text = stock.model.generate(**stock.arguments(batch), assistant_model=draft)
    except ValueError as error:
        if (reason := known_reason(str(error))) is not None:
            return Outcome("refused", reason)
        return Outcome("unclear", _line(error))
    except Exception as error:
        return Outcome("unclear", _line(error))
    expected = stock.text(batch)
    if not torch.equal(text, expected):
        return Outcome("different", _first_difference(text, expected, max(BATCHES[batch])))
    if draft.last_speculation.num_spec_steps == 0:
        return Outcome("unclear", "nothing was drafted")
    return Outcome("identical")


def make(stock: Stock, kind: str, batch: str) -> Any:
    """A draft; the nodes of random trees hold some of the text that is to come."""
    if kind != "tree":
        return make_draft(kind, stock.model, **SETTINGS.get(kind, {}))
    draft = RandomTreeDraftModel.from_target(stock.model)
    if not TargetView(stock.model).why_not():
        draft.hints = stock.generated(batch)
    draft.generation_config.gate, draft.generation_config.on_unsupported = False, "error"
    return draft


def outcomes(stock: Stock, drafts: Sequence[str] = DRAFTS, batches: Sequence[str] = tuple(BATCHES)) -> Iterator[Any]:
    """Draft, batch and outcome of all of them."""
    for kind in drafts:
        for batch in batches:
            yield kind, batch, outcome_of(stock, kind, batch)


def known_reason(message: str) -> str | None:
    """How the table puts a refusal; None if it is not a known one."""
    return next((short for pattern, short in REASONS if re.search(pattern, message)), None)


@contextmanager
def quiet() -> Iterator[None]:
    """Default configurations of transformers warn of many things."""
    verbosity = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers.logging.set_verbosity(verbosity)


def _first_difference(text: torch.Tensor, expected: torch.Tensor, prompt_length: int) -> str:
    if text.shape != expected.shape:
        return f"shape {tuple(text.shape)} instead of {tuple(expected.shape)}"
    row, place = (text != expected).nonzero()[0].tolist()
    return f"row {row}, token {place - prompt_length} of {NEW_TOKENS}"


def _line(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:240]
