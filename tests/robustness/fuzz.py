"""Random calls of `generate` with a draft, each written as a script that makes the call and compares: the nightly fuzz.

The test executes the script that a failure prints: in the repository, `python - < script.py`. To cover more, extend a
strategy (cases.py), and the part of the script that it feeds; add what is refused to `Call.refusal`.
"""

import math
from dataclasses import dataclass, replace
from typing import Any

from hypothesis import strategies as st

from hf_longspec.generation.cache import CACHE_NAME
from tests.robustness import comparison
from tests.robustness.architecture_variants import LIMIT, LIMIT_OF_DYNAMIC, VARIANTS
from tests.robustness.cases import END, character, drafts, maybe, processors, stopping, targets
from tests.robustness.user_processors import PROCESSORS

ROPES = {label: fields for label, (name, fields) in VARIANTS.items() if label.startswith("rope") and name == "llama"}
ROPE_TARGETS = ("llama", "qwen2", "qwen3", "olmo2", "granite")
# Where frequencies depend on the forward, the text of a chunk or a further turn depends on it too.
LIMITS = {"longrope": LIMIT, "dynamic": LIMIT_OF_DYNAMIC - 1}
SMALL = ("llama", "mistral", "gemma2", "gpt_oss", "deepseek_v3")
EXPERTS = ("qwen3_moe", "mixtral", "gpt_oss", "deepseek_v3")
CACHED = ("lent", "bare", "returned")
PLANS = ("once",) * 5 + ("again", *CACHED)
# Options under which the end token may be forbidden.
FORBIDDING = {"min_length", "min_new_tokens", "suppress_tokens", "begin_suppress_tokens", "bad_words_ids"}
FORBIDDING |= {"no_repeat_ngram_size"}  # also after the end of a row, where drafted tokens follow
# Kinds of processors of users, but for those that need more of a call, one vocabulary, or an error.
OF_ONE_CALL = {"fails_at_its_sixth_call", "runs_the_target"}
OWN = sorted(
    name
    for name, entry in PROCESSORS.items()
    if name not in OF_ONE_CALL and entry.apply(None).options.keys() == {"logits_processor"}
)
# In bfloat16, two computations of a logit of these models differ by about 1 in dense ones (docs/guarantees.md), and
# by more where rounding chose another expert. Logits have a standard deviation of 3.
GAP, GAP_OF_EXPERTS = 2.5, 8.0


@dataclass(frozen=True)
class Call:
    """One call, or a few that belong together."""

    target: tuple  # arguments of `tiny_target`: name, and config fields as pairs
    lengths: tuple[int, ...]  # of the prompts
    kind: str  # of the draft
    settings: dict[str, Any]  # of the draft
    options: dict[str, Any]  # of `generate`
    stop_at: tuple[int, int] | None  # remainder and divisor of [`LastToken`]
    penalty: tuple[float, int, int | None] | None  # arguments of `ContextualPenaltyLogitsProcessor`
    allowed: int | None  # divisor of [`allowed_tokens`]
    do_sample: bool
    weights: int  # seed of the target's weights
    dtype: str  # of the target
    attention: str | None  # `attn_implementation` of the target that speculates
    # `once`, `again` (twice with the same draft), or `lent`, `bare` or `returned`: a second turn on a cache with or
    # without a config, or on the returned one
    plan: str
    beside: bool  # the second turn has no draft
    gate: bool  # of the draft
    compiles: bool  # the draft compiles its steps
    wanted: str  # `text` for a tensor, `dict`, or `scores` for scores and logits as well
    masked: bool  # the attention mask is passed
    streamed: bool  # a streamer is passed
    small: tuple | None  # name, config fields and dtype of the model that drafts
    end: int  # the end token, if the options name no other
    gaps: int | None  # distance of the zeros between tokens in the attention mask
    int32: bool  # prompts are int32
    own: str | None  # name of a processor of a user

    @property
    def overrides(self) -> dict[str, Any]:
        return dict(self.target[1])

    @property
    def vocab(self) -> int:
        return self.overrides["vocab_size"]

    @property
    def limit(self) -> float:
        """Position at which the rotary frequencies change."""
        return LIMITS.get(self.overrides.get("rope_parameters", {}).get("rope_type"), math.inf)

    @property
    def text_is_fixed(self) -> bool:
        return not (self.do_sample and self.settings.get("acceptance", "coupled") == "rejection")

    @property
    def refusal(self) -> str | None:
        """Pattern of the message, if the call is to be refused."""
        settings = self.settings
        if self.target[0] == "deepseek_v3" and (self.kind == "longspec" or settings.get("granularity") == "kv_head"):
            return "MLA"
        wrong = [name for name in ("tree_widths", "ngram_candidates") if settings.get(name)]
        if not self.text_is_fixed and wrong:
            return f"acceptance='rejection' with ({'|'.join(wrong)})"
        return None


@st.composite
def calls(draw: Any, compiles: bool = False) -> Call:
    """One call."""
    name, overrides = draw(targets())
    lengths, do_sample = tuple(draw(st.lists(st.integers(2, 40), min_size=1, max_size=4))), draw(st.booleans())
    longest, vocab = max(lengths), overrides["vocab_size"]
    options = draw(stopping(longest, vocab)) | draw(processors(longest, vocab, do_sample))
    if (chunk := draw(maybe(st.integers(1, 17)))) is not None:
        options["prefill_chunk_size"] = chunk
    kind, settings = draw(drafts(vocab))
    if name in ROPE_TARGETS and draw(st.booleans()):
        name, overrides = "llama", overrides | ROPES[draw(st.sampled_from(sorted(ROPES)))]
    elif name in ("llama", "gemma3", "qwen3"):
        overrides["tie_word_embeddings"] = draw(st.booleans())
    dtype = draw(st.sampled_from(["float32"] * 3 + ["bfloat16"]))
    gate, small, vocab = draw(st.booleans()), None, overrides["vocab_size"]
    if kind == "assistant" and (settings["window"] is None or draw(st.booleans())):
        size = max(vocab + draw(st.sampled_from([0, 0, 3, -2])), settings.get("pard_token", 0) + 1)
        small = draw(st.sampled_from(SMALL)), {"vocab_size": size}, draw(st.sampled_from(["float32", dtype]))
    if kind == "tokenswift":
        settings |= draw(st.sampled_from([{}, {"chained": False}, {"sequential": True}]))
    lengths = (*lengths, 1) if draw(st.booleans()) else lengths
    if limit := LIMITS.get(overrides.get("rope_parameters", {}).get("rope_type"), 0):
        dtype = "float32"  # the audit of other types runs one forward, of one set of frequencies
        longer = limit - draw(st.integers(-4, 10)) - max(lengths)  # texts that reach the change
        lengths = tuple(max(1, length + longer) for length in lengths)
        options |= {name: options[name] + longer for name in ("max_length", "min_length") if name in options}
    if implementation := draw(maybe(st.sampled_from(["static", "dynamic"]))):
        options["cache_implementation"] = implementation
    call = Call(
        target=(name, tuple(sorted(overrides.items()))),
        lengths=lengths,
        kind=kind,
        settings=settings,
        options=options,
        stop_at=draw(maybe(st.tuples(st.integers(0, 4), st.just(5)))),
        penalty=draw(maybe(st.tuples(st.sampled_from([0.8, 1.5]), st.integers(1, 9), st.sampled_from([None, 0])))),
        allowed=draw(maybe(st.integers(2, 4))),
        do_sample=do_sample,
        weights=draw(st.integers(0, 2)),
        dtype=dtype,
        attention=draw(st.sampled_from([None, None, "hf_longspec", "eager"])),
        plan="once" if limit else draw(st.sampled_from(PLANS)),
        beside=draw(st.booleans()),
        gate=gate,
        compiles=compiles,
        wanted=draw(st.sampled_from(["text", "dict", "scores"])),
        masked=draw(st.sampled_from([True, True, True, False])),
        streamed=draw(st.sampled_from([False, False, True])),
        small=small,
        end=END,
        gaps=None if limit else draw(maybe(st.integers(2, 5))),
        int32=draw(st.booleans()),
        own=draw(maybe(st.sampled_from(OWN))),
    )
    return within_reach(call)


def within_reach(call: Call) -> Call:
    """The nearest call that transformers itself can make, and whose text can be compared."""
    changes: dict[str, Any] = {}
    options, lengths = dict(call.options), call.lengths
    if call.plan in CACHED:
        changes |= {"masked": True}
    equal_rows = call.plan in CACHED and len(lengths) > 1  # none of which may end before the others
    if call.dtype == "bfloat16" or equal_rows:  # the audit is of plain logits
        kept = ("max_length", "max_new_tokens", "prefill_chunk_size", "cache_implementation")
        options = {name: options[name] for name in kept if name in options}
        changes |= {"do_sample": False, "penalty": None, "allowed": None, "stop_at": None, "own": None}
        changes |= {"end": comparison.NEVER} if equal_rows else {}
    if options.get("forced_eos_token_id") in options.get("begin_suppress_tokens", ()):
        del options["begin_suppress_tokens"]  # both at once forbid all tokens
    if call.allowed is not None or FORBIDDING & options.keys():
        options.pop("exponential_decay_length_penalty", None)  # the stock score of a forbidden end is NaN
    if call.plan in CACHED:
        options.pop("cache_implementation", None)
    if call.plan != "once":
        changes |= {"streamed": False}
    if call.gaps is not None and call.plan in ("lent", "bare"):  # without the draft: sampled as by stock `generate`
        changes |= {"do_sample": False}
    if call.gaps is not None:  # only a mask has them, and the audit knows none
        changes |= {"masked": True} if call.dtype == "float32" else {"gaps": None}
    if call.do_sample and not call.text_is_fixed:
        changes |= {"gate": False}  # where drafts end decides the text
    return replace(call, options=options, lengths=lengths, **changes)


IMPORTS = """# In the repository: python - < this file
import tempfile
from functools import partial
import torch
from transformers import DynamicCache
from hf_longspec import *
from tests.robustness.cases import *
from tests.robustness.comparison import *
from tests.robustness.user_processors import PROCESSORS
from tests.tiny_targets import *
from tests.tiny_tokenizers import character_tokenizer
"""
NAMES = {"plain": "Plain", "ngram": "Ngram", "specattn": "SpecAttn", "assistant": "Assistant"}
MAKERS = {kind: f"{name}DraftModel.from_target(model" for kind, name in NAMES.items()}
MAKERS |= {kind: f"random_{kind}_draft(model" for kind in ("longspec", "tokenswift", "eagle3")}


def script_of(call: Call) -> str:
    """The call as a script, which ends without an error if everything is as without a draft."""
    reference = "None"
    if call.do_sample and call.refusal is None:
        reference = "PlainDraftModel.from_target(stock)" if call.text_is_fixed else "make_draft(stock)"
    gap = GAP_OF_EXPERTS if call.target[0] in EXPERTS else GAP
    check = "check_text" if call.dtype == "float32" else f"partial(check_rounding, stock, {gap}, {call.end})"
    gaps = "" if call.gaps is None else f"\n    attention_mask[:, start // 2 : -1 : {call.gaps}] = 0"
    int32 = "\n    input_ids = input_ids.int()" if call.int32 else ""
    mask = '{"attention_mask": attention_mask}' if call.masked else "{}"
    body = f"""
def target(attention=None):
    how = dict(seed={call.weights}, dtype=torch.{call.dtype}, attn_implementation=attention)
    return tiny_target({call.target[0]!r}, **how, **{call.overrides})


{_draft(call)}

{_arguments(call)}

def prompts(seed):
    input_ids, attention_mask = tiny_prompts({call.vocab}, {call.lengths}, seed){gaps}{int32}
    return input_ids, attention_mask


def generate(model, draft=None, seed=0, **more):
    input_ids, attention_mask = prompts(seed)
    mask = {mask}
    torch.manual_seed(5)
    return model.generate(input_ids, assistant_model=draft, **(arguments() | mask | more))


def reference(stock, **more):
    return generate(stock, {reference}, **more)


torch.set_num_threads(1)
start, stock, model = {max(call.lengths)}, target(), target({call.attention!r})
check, streamed = {check}, {"Recorder()" if call.streamed else None}
expected = reference(stock, streamer=streamed, **WANTED)
{_plan(call)}
"""
    return IMPORTS + "\n" + body


def _draft(call: Call) -> str:
    settings, before, after = dict(call.settings), [], []
    if call.kind == "tree":
        maker = "RandomTreeDraftModel.from_target(model)"
        after = [f"draft.{name} = {value!r}" for name, value in settings.items()]
        after += ["draft.hints = expected.sequences[:, start:].tolist()"]
    elif call.small is not None:
        name, fields, dtype = call.small
        maker = f"AssistantDraftModel.from_model(small, model, **{settings})"
        before = [f"small = tiny_target({name!r}, 5, dtype=torch.{dtype}, **{fields})"]
        if fields["vocab_size"] != call.vocab:  # without names of tokenizers, models of two sizes are refused
            characters = "".join(map(character, range(3, min(fields["vocab_size"], call.vocab))))
            before += ["folder = tempfile.mkdtemp()", f"character_tokenizer({characters!r}).save_pretrained(folder)"]
            before += ["model.config._name_or_path = small.config._name_or_path = folder"]
    else:
        maker = f"{MAKERS[call.kind]}, **{settings})"
    may_be_plain = call.limit < math.inf or call.gaps is not None
    unsupported = "plain" if may_be_plain else "error"
    after += [f"draft.generation_config.gate = {call.gate}"]
    after += [f"draft.generation_config.on_unsupported = {unsupported!r}"]
    after += ["draft.generation_config.compile = 'compile'"] if call.compiles else []
    return _function("make_draft(model)", [*before, f"draft = {maker}", *after, "return draft"])


def _arguments(call: Call) -> str:
    """New objects every time."""
    options = {"do_sample": call.do_sample, "eos_token_id": call.end, "pad_token_id": 0} | call.options
    lines = [f"options = {options}"]
    if "stop_strings" in options:
        characters = "".join(map(character, range(3, call.vocab)))
        lines += [f"options['tokenizer'] = character_tokenizer({characters!r})"]
    if call.stop_at is not None:
        lines += [f"options['stopping_criteria'] = [LastToken{call.stop_at}]"]
    rules = [] if call.penalty is None else [f"ContextualPenaltyLogitsProcessor{call.penalty}"]
    rules += [] if call.own is None else [f"*PROCESSORS[{call.own!r}].apply(None).options['logits_processor']"]
    if rules:
        lines += [f"options['logits_processor'] = [{', '.join(rules)}]"]
    if call.allowed is not None:
        lines += [f"options['prefix_allowed_tokens_fn'] = allowed_tokens({call.vocab}, {call.allowed})"]
    return _function("arguments()", [*lines, "return options"])


def _function(signature: str, lines: list[str]) -> str:
    return f"def {signature}:\n" + "".join(f"    {line}\n" for line in lines)


def _plan(call: Call) -> str:
    first, second = "make_draft(model)", None if call.beside else "draft"
    caches = {"lent": "DynamicCache(config=model.config)", "bare": "DynamicCache()", "returned": "None"}
    if call.refusal is not None:
        more = {plan: f"{CACHE_NAME}={caches[plan]}" for plan in CACHED}
        return (
            f"check_refusal(lambda: generate(model, {first}, {more.get(call.plan, '')}), {call.refusal!r})\n"
            "check(expected, generate(model), start)"
        )
    if call.plan in CACHED:
        if call.plan == "returned" and (call.gaps is not None or len(set(call.lengths)) > 1):
            second = "draft"  # plain generation refuses a cache without columns for the padding
        where = "expected, prompts(0)[1], start"
        arguments = f"generate, target, model, draft, {where}, check, {caches[call.plan]}, {second}"
        return f"draft = {first}\ncheck_two_turns({arguments})"
    wanted = {"text": {}, "dict": {"return_dict_in_generate": True}, "scores": comparison.WANTED}[call.wanted]
    times, is_repeatable = 1 + (call.plan == "again"), not call.do_sample and call.limit == math.inf
    arguments = f"generate, model, {first}, expected, start, check, rerun, {times}, {wanted}, streamed, {is_repeatable}"
    return f"rerun = lambda seed: reference(with_noise(target(), seed))\ncheck_calls({arguments})"
