"""Parts of the random calls of fuzz.py: plain data, so that a failing call prints as what has to be typed."""

from typing import Any

import torch
from hypothesis import strategies as st
from transformers.generation.stopping_criteria import StoppingCriteria

from hf_longspec.attention_backends.scores import GRANULARITIES
from hf_longspec.modeling import settings
from hf_longspec.modeling.specattn.generation_specattn import SELECTIONS
from tests.tiny_targets import TINY_TARGETS

END = 1  # the end token unless a case has others
FIXED_LAYERS = ("gemma2", "gemma3", "gpt_oss", "cohere2", "smollm3", "deepseek_v3")  # rows with a list of layers
WINDOWED = ("mistral", "gemma2", "gemma3", "gpt_oss", "cohere2")


class LastToken(StoppingCriteria):
    """Ends a row at a token of one residue class, in a row's own rhythm."""

    def __init__(self, remainder: int, divisor: int):
        self.remainder, self.divisor = remainder, divisor

    def __call__(self, input_ids, scores, **kwargs):
        return (input_ids[:, -1] + input_ids[:, -2]) % self.divisor == self.remainder


def allowed_tokens(vocab: int, divisor: int) -> Any:
    """A constraint that depends on the row, the length and the last token."""

    def allowed(row: int, ids: torch.Tensor) -> list[int]:
        return [token for token in range(vocab) if (token + row + len(ids) + int(ids[-1])) % divisor]

    return allowed


def character(token: int) -> str:
    """Of tokens from 3 on: a, b, c..., which transformers needs to read a tokenizer's vocabulary."""
    return chr(ord("a") + token - 3) if token < 29 else chr(0x4E00 + token)


def maybe(strategy: st.SearchStrategy) -> st.SearchStrategy:
    """None three times out of four, so that a call has few options at once."""
    return st.one_of(st.none(), st.none(), st.none(), strategy)


@st.composite
def targets(draw) -> tuple[str, dict[str, Any]]:
    """Name and config fields."""
    name = draw(st.sampled_from(TINY_TARGETS))
    overrides: dict[str, Any] = {"vocab_size": draw(st.sampled_from([24, 61, 128]))}
    if name not in FIXED_LAYERS:
        overrides["num_hidden_layers"] = draw(st.sampled_from([1, 3]))
    if name != "deepseek_v3":
        heads, kv_heads = draw(st.sampled_from([(4, 2), (4, 1), (4, 4), (2, 2)]))
        overrides |= {"num_attention_heads": heads, "num_key_value_heads": kv_heads}
    if name in WINDOWED:
        overrides["sliding_window"] = draw(st.sampled_from([5, 16]))
    return name, overrides


NUMBERS = st.integers(1, 5)
WIDTHS = st.lists(st.integers(1, 8), min_size=1, max_size=4)
BOTH_RULES = {"acceptance": st.sampled_from(["rejection", "coupled"])}
OF_NGRAMS = {"ngram_size": st.integers(1, 4), "ngram_source": st.sampled_from(settings.NGRAMS["ngram_source"].choices)}
OF_NGRAMS |= {"ngram_preload": st.booleans()}
NGRAMS = {"ngram_candidates": st.integers(0, 3), "ngram_num_tokens": st.integers(1, 6)} | OF_NGRAMS
SPARSE = BOTH_RULES | {
    "num_assistant_tokens": NUMBERS,
    "sparse_ratio": st.sampled_from([0.05, 0.5, 1.0]),
    "sparse_min_tokens": st.integers(1, 20),
}
EAGLE3_FLAGS = ("own_embedding", "own_head", "norm_before_residual", "norm_output", "qk_norm", "attention_bias")
# Settings of each kind of draft that do not depend on one another.
SETTINGS: dict[str, dict[str, st.SearchStrategy]] = {
    "tree": {
        "num_nodes": st.integers(5, 12),  # at least its seeding chain of 5
        "luck": st.sampled_from([0.3, 0.7, 1.0]),
        "chain": st.booleans(),
        "seed": st.integers(0, 99),
    },
    "plain": {},
    "ngram": {
        "num_assistant_tokens": st.integers(1, 8),
        "ngram_candidates": st.integers(1, 4),
        "ngram_memory": st.sampled_from([0, 40]),
    }
    | OF_NGRAMS,
    "specattn": SPARSE
    | {
        "selection": st.sampled_from(SELECTIONS),
        "score": st.sampled_from(["logits", "weights"]),
        "granularity": st.sampled_from(GRANULARITIES),
    },
    "longspec": {"cross_attention": st.booleans()},
    "tokenswift": {
        "self_draft": st.sampled_from(["verify_hidden", "partial_kv"]),
        "partial_kv_policy": st.sampled_from(["dynamic", "static", "full"]),
        "partial_kv_budget": st.integers(20, 40),
        "partial_kv_recent": st.integers(0, 8),
    },
    "assistant": BOTH_RULES
    | {
        "window": st.sampled_from([None, 3, 16]),
        "sinks": st.integers(0, 4),
        "prefill_chunk_size": st.sampled_from([3, 2048]),
    },
    "eagle3": {"tree_widths": WIDTHS, "window": st.sampled_from([None, "trained", 4, 9]), "sinks": st.integers(0, 4)}
    | dict.fromkeys(EAGLE3_FLAGS, st.booleans()),
}
# Those with more to vary are drawn more often.
KINDS = (*SETTINGS, "tree", "eagle3", "assistant")


@st.composite
def drafts(draw, vocab: int) -> tuple[str, dict[str, Any]]:
    """Kind and settings, n-grams included."""
    kind = draw(st.sampled_from(KINDS))
    settings = draw(st.fixed_dictionaries(SETTINGS[kind]))
    if kind not in ("tree", "plain", "ngram"):
        settings |= draw(st.just({}) | st.fixed_dictionaries(NGRAMS))
    if kind == "longspec":
        widths = draw(st.lists(st.integers(1, 20), min_size=1, max_size=4))
        settings |= {"tree_widths": widths, "window": draw(st.integers(len(widths) + 2, 14))}
    if kind == "tokenswift":
        branching = draw(st.lists(st.integers(1, 4), min_size=2, max_size=4))
        settings |= {"num_heads": len(branching) - 1, "tree_branching": branching}
    if kind == "assistant":
        shapes = {"tree_widths": WIDTHS.filter(lambda widths: set(widths) != {1})}, {"num_assistant_tokens": NUMBERS}
        shape = draw(st.sampled_from((*shapes, shapes[1] | {"pard_token": st.just(vocab - 1)})))
        settings |= draw(st.fixed_dictionaries(shape))
    if kind == "eagle3":
        count = settings["num_hidden_layers"] = draw(st.integers(1, 2))
        options = {"layer_windows": st.lists(st.integers(2, 9), min_size=count, max_size=count)}
        options |= {"draft_vocab_size": st.integers(3, vocab)}
        options |= {"target_layer_ids": st.lists(st.integers(0, 1), min_size=3, max_size=3)}
        settings |= {name: value for name in options if (value := draw(maybe(options[name]))) is not None}
        if norm := draw(st.sampled_from([None, "norm_before_fc", "fc_norm"])):
            settings[norm] = True
    return kind, settings


@st.composite
def stopping(draw, prompt_length: int, vocab: int) -> dict[str, Any]:
    """Length limits, end tokens and stop strings."""
    new = draw(st.integers(1, 20))
    options: dict[str, Any] = {"max_length": prompt_length + new} if draw(st.booleans()) else {"max_new_tokens": new}
    tokens = st.integers(3, vocab - 1)
    if (ends := draw(maybe(st.lists(tokens, min_size=1, max_size=6, unique=True)))) is not None:
        options["eos_token_id"] = ends
        if draw(st.booleans()):
            options["pad_token_id"] = ends[0]
    if (strings := draw(maybe(st.lists(st.lists(tokens, min_size=1, max_size=2), min_size=1, max_size=4)))) is not None:
        options["stop_strings"] = ["".join(map(character, string)) for string in strings]
    return options


@st.composite
def processors(draw, prompt_length: int, vocab: int, do_sample: bool) -> dict[str, Any]:
    """Arguments of `generate` that add logits processors; those of sampling only when it samples."""
    tokens = st.integers(3, vocab - 1)
    some = st.lists(tokens, min_size=1, max_size=5, unique=True)
    choices: dict[str, st.SearchStrategy] = {
        "repetition_penalty": st.sampled_from([0.8, 1.3]),
        "no_repeat_ngram_size": st.integers(2, 3),
        "min_new_tokens": st.integers(1, 8),
        "min_length": st.integers(1, prompt_length + 6),
        "suppress_tokens": some,
        "begin_suppress_tokens": some,
        "bad_words_ids": st.lists(st.lists(tokens, min_size=1, max_size=2), min_size=1, max_size=3),
        "sequence_bias": st.lists(
            st.tuples(st.lists(tokens, min_size=1, max_size=2), st.just(4.0)), min_size=1, max_size=2
        ).map(lambda pairs: {tuple(ids): bias for ids, bias in pairs}),
        "forced_eos_token_id": tokens,
        "renormalize_logits": st.just(True),
        "remove_invalid_values": st.just(True),
    }
    if do_sample:
        choices |= {
            "temperature": st.sampled_from([0.3, 0.8, 1.5]),
            "top_k": st.sampled_from([0, 1, 5]),
            "top_p": st.sampled_from([0.3, 0.9]),
            "min_p": st.sampled_from([0.02, 0.2]),
            "typical_p": st.sampled_from([0.3, 0.9]),
            "eta_cutoff": st.just(0.02),
            "epsilon_cutoff": st.just(0.02),
            "top_h": st.sampled_from([0.4, 0.8]),
        }
    else:  # it makes NaN of the score of an end token that another processor forbids, which cannot be sampled
        choices["exponential_decay_length_penalty"] = st.just((2, 1.2))
    options = {name: draw(maybe(strategy)) for name, strategy in choices.items()}
    # what the stock generate cannot do either: it refuses the first pair, and the second makes distributions of NaN
    if options["forced_eos_token_id"] in (options["suppress_tokens"] or ()):
        options["forced_eos_token_id"] = None
    if options["forced_eos_token_id"] is not None and not do_sample:
        options["exponential_decay_length_penalty"] = None
    return {name: value for name, value in options.items() if value is not None}
