"""The contract of every draft, with settings with which something is drafted, accepted and refused.

The drafts are those of the registry, and those of examples/drafts, which are registered as a user's are.
"""

from itertools import cycle, product, zip_longest

import pytest
import torch
from transformers import AutoModel, DynamicCache

from hf_longspec import SpeculativeCache
from hf_longspec.auditing import NOT_LOSSLESS, audit
from hf_longspec.generation.cache import CACHE_NAME
from hf_longspec.generation.target import TargetView
from hf_longspec.modeling import register_draft
from tests.example_drafts import EXAMPLES
from tests.generation.tiny_models import ATTENTION
from tests.modeling.calls import GREEDY, LENGTHS, NEVER, check_sampled_text, generate, reference
from tests.pairwise import few
from tests.rounding import rounding
from tests.tiny_targets import TINY_TARGETS, made_for, randomize, tiny_prompts, tiny_target

DRAFTS = register_draft.DRAFTS | EXAMPLES
SETTINGS = {
    "longspec_eagle3": {"tree_widths": [6, 4], "window": 8, "sinks": 2, "fc_norm": True},
    "longspec": {"window": 8, "tree_widths": [6, 4]},
    "longspec_dflash": {"num_tree_nodes": 12, "block_size": 5, "window": 8, "sinks": 2, "num_hidden_layers": 3},
    "longspec_mtp": {"tree_widths": [6, 4], "window": 8, "sinks": 2},
    "longspec_gemma4_assistant": {"tree_widths": [6, 4]},
    # coupled: with rejection sampling the text has the target's distribution and not the plain loop's tokens
    "specattn": {"num_assistant_tokens": 3, "sparse_ratio": 0.5, "sparse_min_tokens": 6, "acceptance": "coupled"},
    "longspec_quest": {"num_assistant_tokens": 3, "sparse_ratio": 0.3, "sparse_min_tokens": 6, "acceptance": "coupled"}
    | {"page_size": 3, "num_dense_layers": 0},
    "tokenswift": {"num_heads": 2, "tree_branching": [1, 5, 2]},
    "longspec_ngram": {"num_assistant_tokens": 4},
    # the target drafts for itself, on few tokens, so that every architecture is a draft as well
    "longspec_token_recycling": {"num_nodes": 8, "max_depth": 3},
    "longspec_assistant": {"num_assistant_tokens": 3, "window": 5, "sinks": 1},
}
# Of the weights with which a draft has luck often enough.
SEEDS = {"longspec_mtp": 5}
REFUSED = {(kind, "deepseek_v3"): "MLA" for kind in ("longspec", "longspec_quest", "longspec_gemma4_assistant")}
FEW_TOKENS = {"vocab_size": 12}
WARPED = {"temperature": 0.8, "top_k": 8, "repetition_penalty": 1.1}
NEW = 10
KINDS = pytest.mark.parametrize("kind", DRAFTS)


def draft_of(kind, model, **settings):
    draft = made_for(DRAFTS[kind].model, model, **(SETTINGS.get(kind, {}) | {"on_unsupported": "error"} | settings))
    randomize(draft, SEEDS.get(kind, 3))
    return draft


def check_drafted(draft, model):
    """Something was accepted and something refused, unless the draft proposes nothing at all."""
    stats, kind = draft.last_speculation, draft.config.model_type
    assert stats.num_forwards > 0, f"expected that {kind} decodes, but the call went on without it: {stats.reason}"
    accepted, drafted = stats.num_accepted_draft_tokens, stats.num_draft_tokens
    assert draft.num_tree_nodes(TargetView(model)) == 1 or 0 < accepted < drafted, (
        f"expected that some of the {drafted} tokens that {kind} drafted are accepted and some refused, but {accepted} "
        f"were accepted. If observe() is right, choose other SETTINGS[{kind!r}] or SEEDS[{kind!r}]: fewer candidates "
        "are refused more often."
    )


def check_same(text, expected, draft, whose):
    """Two texts are equal; else the first difference is named."""
    if not torch.equal(text, expected):
        row, column = (text != expected).nonzero()[0].tolist() if text.shape == expected.shape else ("?", "?")
        raise AssertionError(
            f"expected the text of {whose}, whatever {draft.config.model_type} proposes, but row {row} differs from "
            f"column {column} on:\n{text.tolist()}\n{expected.tolist()}\nA tree has its root at node 0 and parents "
            "before children, and observe() follows verification.path."
        )


# They read tokens, logits or hidden states, whatever the attention of the target is.
WITHOUT_KEYS = ("longspec_ngram", "longspec_eagle3", "longspec_dflash", "tokenswift")
WITHOUT_KEYS += ("longspec_token_recycling", "longspec_plain")
# The other drafts on every kind of attention, every second pair in `make soak`, and one of these on every target;
# `make models` runs all on all.
WITH_KEYS = product(sorted(DRAFTS.keys() - {*WITHOUT_KEYS}), ATTENTION)
CASES = [pytest.param(*case, marks=marks) for case, marks in zip(WITH_KEYS, cycle(((), pytest.mark.soak)))]
CASES += [*zip(cycle(WITHOUT_KEYS), TINY_TARGETS)]


@pytest.mark.parametrize(("kind", "name"), CASES)
def test_greedy_text_is_that_of_stock_generate(target, kind, name):
    model = target(name, **FEW_TOKENS)
    if (kind, name) in REFUSED:
        with pytest.raises(ValueError, match=REFUSED[kind, name]):
            draft_of(kind, model)
        return
    draft = draft_of(kind, model)
    check_same(generate(model, draft), reference(model, None), draft, "generate() without a draft")
    check_drafted(draft, model)


# Every draft with or without processors; most others are below in other settings, all with processors.
SAMPLED = [*zip(DRAFTS, cycle(("llama", "gpt_oss", "gemma3")), cycle(({}, WARPED)))]


@pytest.mark.parametrize(("kind", "name", "options"), SAMPLED, ids=str)
def test_sampled_text_is_that_of_the_plain_loop(target, kind, name, options):
    model = target(name, **FEW_TOKENS)
    draft = draft_of(kind, model)
    check_sampled_text(model, draft, **options)
    check_drafted(draft, model)


NGRAMS = {"ngram_candidates": 3, "ngram_num_tokens": 5}
PARTIAL = {"self_draft": "partial_kv", "partial_kv_budget": 27, "partial_kv_recent": 9}
# Drafts that draft in another way with other settings.
VARIANTS = [
    ("tokenswift", "llama", PARTIAL | NGRAMS | {"partial_kv_budget": 19}),
    ("tokenswift", "gemma3", PARTIAL | {"partial_kv_policy": "static", "tree_branching": [3, 1, 4]}),
    ("tokenswift", "deepseek_v3", PARTIAL | {"partial_kv_policy": "full", "tree_branching": [2]}),
    ("tokenswift", "gpt_oss", {"sequential": True, "tree_branching": [1, 6, 3], "draft_vocab_size": 7}),
    ("tokenswift", "deepseek_v3", NGRAMS),
    ("longspec_eagle3", "gpt_oss", {"draft_vocab_size": 7, "tree_widths": [1, 1, 1]}),
    ("longspec_eagle3", "llama", NGRAMS),
    ("longspec_eagle3", "gemma3", {"mask_token_id": 5, "num_hidden_layers": 2, "layer_windows": [3, None]}),
    ("longspec_dflash", "gemma2", {"num_tree_nodes": None, "layer_windows": [5, 5, None], "causal_windows": True}),
    ("longspec_dflash", "llama", NGRAMS | {"markov_rank": 4, "sample_from_anchor": True, "markov_head_type": "rnn"}),
    ("longspec_dflash", "qwen3", {"selector_rank": 4, "selector_top_k": 3, "conv_kernel_size": 2}),
    ("longspec_dflash", "gpt_oss", {"draft_vocab_size": 7, "own_head": True, "markov_rank": 3}),
    ("longspec_dflash", "gemma3", NGRAMS | {"confidence_head": "hidden"}),
    ("longspec_mtp", "qwen3", {"tree_widths": [1, 1, 1], "window": "all"}),
    ("longspec_mtp", "deepseek_v3", NGRAMS),
    ("longspec_gemma4_assistant", "gemma3", NGRAMS),
    ("longspec", "llama", NGRAMS),
    ("specattn", "deepseek_v3", NGRAMS),
    ("longspec_quest", "llama", {"sparse_ratio": 1.0, "sparse_min_tokens": 1000}),
    ("longspec_assistant", "gemma3", {"tree_widths": [4, 3]}),
    ("longspec_assistant", "qwen3", NGRAMS | {"num_assistant_tokens": 2}),
    ("longspec_assistant", "llama", NGRAMS | {"tree_widths": [4, 3], "window": 5}),
]


@pytest.mark.parametrize(("kind", "name", "settings"), few(VARIANTS, 7), ids=str)
def test_settings_change_no_text(target, kind, name, settings):
    model = target(name, **FEW_TOKENS)
    draft = draft_of(kind, model, **settings)
    check_same(generate(model, draft), reference(model, None), draft, "generate() without a draft")
    assert draft.last_speculation.num_accepted_draft_tokens > 0, "expected that something is accepted"
    check_sampled_text(model, draft, **WARPED)


CHAIN = {"num_assistant_tokens": 4}
READS_EVERYTHING = {
    "specattn": CHAIN | {"sparse_ratio": 1.0},
    "longspec_quest": CHAIN | {"sparse_ratio": 1.0, "page_size": 5},
    "longspec_assistant": CHAIN | {"window": None},  # the target drafts for itself
    "tokenswift": PARTIAL | {"partial_kv_policy": "full", "partial_kv_budget": 4096},
}
WHOLE = few(
    [(kind, name, {}) for kind, name in product(READS_EVERYTHING, ATTENTION) if (kind, name) not in REFUSED], 14
)
# Paths of n-grams that are accepted take nothing from what the draft knows.
WHOLE += [(kind, "llama", NGRAMS | {"num_assistant_tokens": 1}) for kind in [*READS_EVERYTHING][:3]]


@pytest.mark.parametrize(("kind", "name", "settings"), WHOLE, ids=str)
def test_a_draft_that_reads_everything_is_the_target(target, kind, name, settings):
    """All of its chain is accepted. It is not if an entry, a position or a window of its cache is off by one."""
    model = target(name, **(FEW_TOKENS if settings else {}))
    draft = draft_of(kind, model, **(READS_EVERYTHING[kind] | settings))
    new = 40 if settings else 1 + 3 * 5  # the first token, and three verifications
    generate(model, draft, (57, 3, 39), max_new_tokens=new)
    found = draft.last_speculation.acceptance_histogram
    if settings:  # the last step of a row is cut
        assert found[0] <= 3 < sum(found) and draft.last_speculation.num_accepted_ngram_tokens > 0
    elif kind == "tokenswift":  # the target's own prediction; what its heads add is random
        assert found[0] <= 3 < sum(found)
    else:
        assert found == [0, 0, 0, 0, 3 * 3]


# The others keep a share of the target's cache, or the text.
BOUNDED = [(kind, {}) for kind in DRAFTS if kind not in ("specattn", "longspec_quest", "longspec_ngram")]


@pytest.mark.parametrize(("kind", "settings"), few([*BOUNDED, ("tokenswift", PARTIAL)], 6), ids=str)
def test_memory_does_not_grow_with_the_context(target, kind, settings):
    model, sizes = target("llama", **FEW_TOKENS), set()
    draft = draft_of(kind, model, **settings)
    for length, new in ((90, 5), (90, 21), (220, 5)):
        generate(model, draft, (length, 30), max_new_tokens=new)
        sizes.add(draft.last_speculation.draft_state_bytes)
    assert len(sizes) == 1, f"expected one size of state_bytes for texts of 95, 111 and 225 tokens, found {sizes}"


# Rotated keys in float32 beside values in half precision; attention by matrix products; sinks and windows.
AUTOCAST = [*zip(DRAFTS, cycle(("llama", "gemma2", "gpt_oss")), cycle((torch.bfloat16, torch.float16)))]


@pytest.mark.parametrize(("kind", "name", "half"), few(AUTOCAST, 5), ids=str)
def test_under_autocast_every_token_is_the_choice_of_the_target(target, kind, name, half):
    """Up to rounding, as the target's own forwards under autocast have it; weights stay in float32."""
    model = target(name, **FEW_TOKENS)
    draft, (_, mask) = draft_of(kind, model), tiny_prompts(model.config.vocab_size, LENGTHS)
    with torch.autocast("cpu", dtype=half):
        text = generate(model, draft)
        report = audit(model, text, max(LENGTHS), mask, pad_token_id=NEVER, eos_token_id=NEVER)
    assert report.verdict != NOT_LOSSLESS and report.num_tokens == len(LENGTHS) * NEW
    assert model.dtype == torch.float32
    check_drafted(draft, model)
    assert torch.equal(generate(model, draft), reference(model, None))  # nothing of it is left


@KINDS
def test_rejected_drafts_are_rolled_back(target, kind):
    """The cache holds the keys and values of a plain forward over the text, and a second turn goes on with it."""
    model = target("gpt_oss", **FEW_TOKENS)
    draft = draft_of(kind, model)
    cache = SpeculativeCache(model.config, 1, 64, tree_slots=draft.num_tree_nodes(TargetView(model)))
    first = generate(model, draft, (21,), **{CACHE_NAME: cache}, max_new_tokens=14)  # enough to accept something
    check_drafted(draft, model)
    (length,) = cache.lengths.host
    assert length == first.shape[1] - 1, "expected all tokens in the cache but the last one, which is the next root"
    plain = DynamicCache()
    with torch.no_grad():
        model(first[:, :length], **{CACHE_NAME: plain})
    for layer, (ours, stock) in enumerate(zip(cache.layers, plain.layers, strict=True), start=1):
        for part, expected in ((ours.keys, stock.keys), (ours.values, stock.values)):
            torch.testing.assert_close(part[:, :, :length], expected, **rounding(expected, layer))
    second = model.generate(first, assistant_model=draft, **{CACHE_NAME: cache}, **GREEDY)
    assert torch.equal(second, model.generate(first, **GREEDY))


@pytest.mark.parametrize("kind", few(DRAFTS, 7))
def test_rows_do_not_influence_each_other(target, kind):
    """A row accepts in a batch what it accepts alone, in the same steps."""
    model = target("gemma3", **FEW_TOKENS)
    draft = draft_of(kind, model)
    generate(model, draft)
    together, alone = draft.last_speculation, []
    input_ids, mask = tiny_prompts(model.config.vocab_size, LENGTHS)
    for row, keep in zip(input_ids, mask.bool(), strict=True):
        model.generate(row[keep][None], assistant_model=draft, **GREEDY)
        alone.append(draft.last_speculation.acceptance_histogram)
    apart = [sum(counts) for counts in zip_longest(*alone, fillvalue=0)]
    assert together.acceptance_histogram == apart, (
        "expected as many accepted paths of each length as for the rows alone"
    )


@KINDS
def test_saving_and_loading(target, kind, tmp_path):
    model = target("llama", **FEW_TOKENS)
    draft = draft_of(kind, model)
    generate(model, draft)
    drafted = draft.last_speculation.acceptance_histogram
    draft.save_pretrained(tmp_path / "saved")
    loaded = AutoModel.from_pretrained(tmp_path / "saved")
    assert type(loaded) is type(draft) and type(loaded.config) is DRAFTS[kind].config
    assert (tmp_path / "saved" / "model.safetensors").is_file() != draft.weightless, (
        f"expected a file of weights unless weightless=True, and {type(draft).__name__} has "
        f"weightless={draft.weightless}"
    )
    assert {name: loaded.setting(name) for name in draft.settings} == {
        name: draft.setting(name) for name in draft.settings
    }
    weights = loaded.state_dict()
    assert weights.keys() == draft.state_dict().keys()
    assert all(torch.equal(weights[name], weight) for name, weight in draft.state_dict().items())
    loaded.save_pretrained(tmp_path / "again")
    for file in ("config.json", "generation_config.json"):
        assert (tmp_path / "again" / file).read_text() == (tmp_path / "saved" / file).read_text()
    check_same(generate(model, loaded), reference(model, None), loaded, "generate() without a draft")
    assert loaded.last_speculation.acceptance_histogram == drafted, (
        "expected what the draft accepted before it was saved"
    )


@pytest.mark.parametrize(
    ("kind", "name", "settings"),
    [
        *((kind, "llama", {}) for kind in DRAFTS),
        ("longspec", "gemma3", NGRAMS),
        ("longspec_quest", "gpt_oss", NGRAMS),
        ("tokenswift", "llama", PARTIAL),
    ],
    ids=str,
)
def test_inside_transformers_own_assisted_decoding(target, kind, name, settings, monkeypatch):
    """The stock loop takes the candidates of `get_candidates` and emits what plain `generate` emits, in fewer steps."""
    model = target(name, **FEW_TOKENS)
    drafter = draft_of(kind, model, **settings).candidate_generator(model, max_length=64)
    offered, get_candidates = [], drafter.get_candidates

    def counting(ids, *args, **kwargs):
        candidates, logits = get_candidates(ids)
        assert torch.equal(candidates[:, : ids.shape[1]], ids)
        offered.append(candidates.shape[1] - ids.shape[1])
        return candidates, logits

    drafter.get_candidates = counting
    expected = reference(model, None, (41,))
    monkeypatch.setattr(model, "_get_candidate_generator", lambda **kwargs: drafter)
    assert torch.equal(generate(model, None, (41,), prompt_lookup_num_tokens=3), expected)
    assert max(offered) == drafter.max_depth, (
        f"expected that get_candidates offers up to max_depth={drafter.max_depth} tokens, found {offered}"
    )
    assert drafter.max_depth == 0 or len(offered) < NEW, (
        f"expected that some candidates are accepted, so that {NEW} tokens take fewer than {NEW} steps, but there were "
        f"{len(offered)}. Choose settings with which they are, in SETTINGS[{kind!r}]."
    )


@pytest.mark.parametrize("kind", [kind for kind, draft in DRAFTS.items() if not draft.model.weightless])
def test_an_offloaded_target(kind):
    """Its weights wait on the meta device and come when a layer runs."""
    accelerate = pytest.importorskip("accelerate")
    model = tiny_target("qwen3", **FEW_TOKENS)
    expected, draft = reference(model, None), draft_of(kind, model)
    accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
    assert next(model.parameters()).device.type == "meta"
    assert torch.equal(generate(model, draft, max_new_tokens=8), expected[:, : max(LENGTHS) + 8])
    made_for(DRAFTS[kind].model, model)  # finds its place by the hook


@pytest.mark.parametrize(
    ("kind", "value"),
    [*zip((kind for kind, draft in DRAFTS.items() if not draft.model.weightless), cycle((torch.nan, torch.inf)))],
)
def test_a_draft_of_nan_changes_no_text(target, kind, value):
    model = target("llama", **FEW_TOKENS)
    draft = draft_of(kind, model)
    for weight in draft.parameters():
        torch.nn.init.constant_(weight, value)
    assert torch.equal(generate(model, draft), reference(model, None))
    check_sampled_text(model, draft, **WARPED)


@KINDS
def test_a_draft_in_another_dtype_or_in_training_is_copied_not_changed(target, kind):
    model = target("llama", **FEW_TOKENS)
    draft = draft_of(kind, model).to(torch.bfloat16).train()
    assert torch.equal(generate(model, draft), reference(model, None))
    assert all(module.training for module in draft.modules())
    assert draft.weightless or draft.dtype == torch.bfloat16
