"""Calls that cannot be served although model and draft fit: decoded without the draft, or an error, as it says."""

import copy
import re

import pytest
import torch
from torch import nn
from transformers import DynamicCache, QuantizedCache, StaticCache
from transformers.cache_utils import Cache, DynamicLayer

from hf_longspec import NgramDraftModel, PlainDraftModel
from hf_longspec.generation.cache import CACHE_NAME
from hf_longspec.generation.target import TargetView
from tests.robustness.enumeration import build
from tests.tiny_targets import tiny_prompts, tiny_target
from tests.tiny_tokenizers import byte_tokenizer
from tests.user_objects import Recorder

OPTIONS = {"max_new_tokens": 7, "pad_token_id": 0, "return_dict_in_generate": True, "output_scores": True}


def run(model, call, draft, route="assistant_model", **options):
    """Result, streamed tokens, and the next random number."""
    torch.manual_seed(3)
    recorder = Recorder()
    how = {"assistant_model": draft} if route == "assistant_model" else {"custom_generate": draft.custom_generate}
    out = model.generate(**(OPTIONS | call | options), **({} if draft is None else how), streamer=recorder)
    return out, (recorder.puts, recorder.ends), torch.rand(1).item()


def fresh(call):
    """The call with a cache of its own."""
    return call | ({CACHE_NAME: copy.deepcopy(call[CACHE_NAME])} if CACHE_NAME in call else {})


def check_unsupported(make_model, reason, call, draft_class=PlainDraftModel, stock_error=None):
    """Refused with `reason` under "error"; under "plain" equal to `generate`, which may raise `stock_error`."""
    model = make_model()
    draft = draft_class.from_target(model, on_unsupported="error")
    own, given = sorted(vars(model)), fresh(call)
    with pytest.raises(ValueError, match=reason) as caught:
        run(model, given, draft)
    assert "on_unsupported" in str(caught.value) and draft.last_speculation is None
    assert sorted(vars(model)) == own
    if CACHE_NAME in call:
        check_same_cache(given[CACHE_NAME], call[CACHE_NAME])
    if stock_error is not None:
        draft.generation_config.on_unsupported = "plain"
        for assistant in (None, draft):
            with pytest.raises(stock_error):
                run(model, fresh(call), assistant)
        assert re.search(reason, draft.last_speculation.reason)
        return
    check_plain(make_model, reason, call, draft_class, do_sample=False)


def check_plain(make_model, reason, call, draft_class, route="assistant_model", **options):
    model = make_model()
    draft = draft_class.from_target(model)
    given, expected = fresh(call), fresh(call)
    out, streamed, number = run(model, given, draft, route, **options)
    stock, stock_streamed, stock_number = run(make_model(), expected, None, **options)
    assert (type(out), number) == (type(stock), stock_number)
    assert route == "custom_generate" or streamed == stock_streamed
    spent = draft.last_speculation
    assert re.search(reason, spent.reason) and spent.num_forwards == 0 and spent.reason in str(spent)
    if isinstance(out, torch.Tensor):
        assert torch.equal(out, stock)
    else:
        assert torch.equal(out.sequences, stock.sequences) and out.speculation is spent
        assert all(map(torch.equal, out.scores, stock.scores))
        assert type(out.past_key_values) is type(stock.past_key_values)
        if stock.past_key_values is not None:
            check_same_cache(out.past_key_values, stock.past_key_values)
        for field in ("hidden_states", "attentions"):
            assert (getattr(out, field) is None) == (getattr(stock, field) is None)
            steps = zip(getattr(out, field) or (), getattr(stock, field) or (), strict=True)
            assert all(torch.equal(*layer) for step in steps for layer in zip(*step, strict=True))
    if CACHE_NAME in given:
        check_same_cache(given[CACHE_NAME], expected[CACHE_NAME])


def check_same_cache(cache, expected):
    assert int(cache.get_seq_length()) == int(expected.get_seq_length())
    for layer, other in zip(cache.layers, expected.layers, strict=True):
        assert type(layer) is type(other)
        if isinstance(getattr(layer, "keys", None), torch.Tensor):
            assert torch.equal(layer.keys, other.keys) and torch.equal(layer.values, other.values)


class OtherLayer(DynamicLayer):
    pass


class OtherCache(Cache):
    def __init__(self):
        super().__init__(layer_class_to_replicate=OtherLayer)


@torch.no_grad()
def filled(model, cache, tokens):
    model(tiny_prompts(128, (9,))[0][:, :tokens], **{CACHE_NAME: cache})
    return cache


def foreign_layers(model):
    cache = DynamicCache(config=model.config)
    cache.layers[1] = OtherLayer()
    return filled(model, cache, 4)


def quantized(model):
    """Made without `__init__`, which needs a package."""
    cache = QuantizedCache.__new__(QuantizedCache)
    Cache.__init__(cache, layer_class_to_replicate=DynamicLayer)
    return cache


CACHES = {
    "other-filled": (
        lambda model: filled(model, OtherCache(), 4),
        "a OtherCache; only DynamicCache.*Pass a DynamicCache",
    ),
    "static-short": (
        lambda model: StaticCache(config=model.config, max_cache_len=14),
        "a StaticCache of 14 slots, and the text may have 16 tokens. Make it with max_cache_len=15 or more",
    ),
    "quantized": (quantized, "QuantizedCache"),
    "other-layers": (foreign_layers, "a DynamicCache; layers of the kind OtherLayer"),
}


@pytest.mark.parametrize("name", CACHES)
def test_caches(target, name):
    make, reason = CACHES[name]
    model = target("llama")
    input_ids, mask = tiny_prompts(128, (9,))
    call = {"input_ids": input_ids, "attention_mask": mask, CACHE_NAME: make(model)}
    check_unsupported(lambda: model, reason, call, stock_error=IndexError if name == "static-short" else None)
    if name == "other-filled":
        check_plain(lambda: model, reason, call, PlainDraftModel, "custom_generate", do_sample=True)
        check_plain(lambda: model, reason, call, PlainDraftModel, do_sample=True, return_dict_in_generate=False)


@pytest.mark.parametrize("name", ["quantized", "offloaded"])
def test_ways_of_storing(target, name, monkeypatch):
    """Such caches need a package or a GPU: `generate` gets to make them, as without a draft, and here makes another."""
    model, made = target("llama"), []

    def prepare(config, model_kwargs, *args):
        made.append(config.cache_implementation)
        model_kwargs[CACHE_NAME] = OtherCache()

    monkeypatch.setattr(model, "_prepare_cache_for_generation", prepare)
    input_ids, mask = tiny_prompts(128, (9, 4))
    reason = f"cache_implementation='{name}': quantized and offloaded caches are not supported with a draft. Drop"
    call = {"input_ids": input_ids, "attention_mask": mask, "cache_implementation": name}
    check_unsupported(lambda: model, reason, call)
    assert len(made) == 2  # the refused call made none


EMPTY_ROW = torch.tensor([[0] * 9, [0] * 3 + [1] * 6, [1] * 9])


def arguments_of(name, model):
    """Arguments of a call of three rows, and a part of the reason."""
    input_ids, mask = tiny_prompts(128, (7, 9, 3))
    call = {"input_ids": input_ids, "attention_mask": mask}
    embeddings = {"inputs_embeds": model.get_input_embeddings()(input_ids).detach() + 0.1, "attention_mask": mask}
    return {
        "embeddings": (embeddings, "inputs_embeds is not supported with a draft. Pass input_ids"),
        "hidden states": (call | {"output_hidden_states": True}, "output_hidden_states=True.*Run the model once"),
        "attentions": (call | {"output_attentions": True}, "output_attentions=True.*Run the model once"),
        "no cache": (call | {"use_cache": False}, "use_cache=False.*Drop"),
        "empty row": (call | {"attention_mask": EMPTY_ROW}, r"attention_mask is 0 everywhere in the rows \[0\]"),
    }[name]


@pytest.mark.parametrize("name", ["embeddings", "hidden states", "attentions", "no cache", "empty row"])
def test_what_plain_decoding_serves(name):
    def make():
        return tiny_target("llama", attn_implementation="eager")  # sdpa returns no attentions

    call, reason = arguments_of(name, make())
    check_unsupported(make, reason, call)
    check_plain(make, reason, call, NgramDraftModel, do_sample=True)


@pytest.mark.parametrize(
    ("name", "inputs"),
    [("llama", "labels"), ("mistral", "labels"), ("qwen3_5_text", "labels"), ("ctrl", "token_type_ids")],
)
@pytest.mark.parametrize("lengths", [(9,), (9, 9), (19, 5, 12)])
def test_inputs_that_no_forward_gets(name, inputs, lengths):
    """Neither in prompts of different lengths nor beside a mask or a state."""
    model = tiny_target(name) if name in ("llama", "mistral") else build(name)
    input_ids, mask = tiny_prompts(128, lengths)
    call = {"input_ids": input_ids, "attention_mask": mask if name != "ctrl" else None, "do_sample": False}
    call[inputs] = input_ids
    draft = NgramDraftModel.from_target(model)
    out, expected = run(model, call, draft)[0], run(model, call, None)[0]
    assert torch.equal(out.sequences, expected.sequences)
    assert draft.last_speculation.reason is None and draft.last_speculation.num_forwards


@pytest.mark.parametrize("lengths", [(6,), (6, 4)])
def test_healed_prompts_of_another_length(lengths):
    """Plain `generate` keeps the mask and the positions of the prompts before; in the same length the draft is used."""
    tokenizer = byte_tokenizer(texts=["hello there, the other world"] * 20)
    tokenizer.bos_token, tokenizer.padding_side = "<bos>", "left"
    model = tiny_target("llama", vocab_size=len(tokenizer))
    reason = "token_healing=True has changed the length of the prompts.*Call model.heal_tokens first"
    for spaces in (0, 2):
        texts = ["hello th" + " " * spaces, "the o"][: len(lengths)]
        call = {**tokenizer(texts, return_tensors="pt", padding=True), "token_healing": True, "tokenizer": tokenizer}
        call.pop("token_type_ids", None)
        if spaces:
            check_unsupported(lambda: model, reason, call)
        else:
            draft = NgramDraftModel.from_target(model)
            drafted, plain = (run(model, call, one, do_sample=False)[0] for one in (draft, None))
            assert torch.equal(drafted.sequences, plain.sequences) and draft.last_speculation.reason is None


@pytest.mark.parametrize("is_masked", [False, True])
def test_no_tokens_after_a_full_cache(target, is_masked):
    """Plain `generate` fails too, in a forward over no token."""
    model, (input_ids, mask) = target("llama"), tiny_prompts(128, (9,))
    draft = NgramDraftModel.from_target(model)
    refusals = (None, RuntimeError, "0 elements"), (draft, ValueError, r"input_ids has shape \(1, 0\)")
    for one, error, message in refusals:
        call = {"input_ids": input_ids[:, :0], CACHE_NAME: filled(model, DynamicCache(config=model.config), 9)}
        with pytest.raises(error, match=message):
            run(model, call | ({"attention_mask": mask} if is_masked else {}), one)
    assert draft.last_speculation is None


def with_checkpointing():
    model = tiny_target("llama")
    # its name before transformers 5.23
    getattr(model, "activation_checkpointing_enable", getattr(model, "gradient_checkpointing_enable", None))()
    return model


def with_adapter():
    """An adapter with dropout, which is in training mode where PEFT adds it to a model that is not."""
    peft = pytest.importorskip("peft")
    torch.manual_seed(5)
    config = peft.LoraConfig(target_modules=["q_proj"], lora_dropout=0.3, init_lora_weights=False)
    return peft.get_peft_model(tiny_target("llama"), config).base_model.model.eval()


TRAINED = {
    "checkpointing": (with_checkpointing, "activation checkpointing"),
    "llama": (lambda: tiny_target("llama", attention_dropout=0.3), r"\(LlamaAttention, attention_dropout=0.3"),
    "mixtral": (lambda: tiny_target("mixtral", router_jitter_noise=0.2), r"\(MixtralSparse\w+, jitter_noise=0.2"),
    "gpt2": (lambda: build("gpt2"), r"\(Dropout, p=0.1"),
    "adapter": (with_adapter, r"\(Dropout, p=0.3"),
}


@pytest.mark.parametrize("name", TRAINED)
def test_training_mode(name, monkeypatch):
    """Found before a forward, which would draw random numbers; in eval mode nothing is found."""
    make, reason = TRAINED[name]
    input_ids, mask = tiny_prompts(128, (9, 5))
    call = {"input_ids": input_ids, "attention_mask": mask}
    model = make().eval()
    draft = PlainDraftModel.from_target(model)
    expected, out = (run(model, call, one)[0].sequences for one in (None, draft))
    assert torch.equal(out, expected) and draft.last_speculation.reason is None

    def trained():
        copied = copy.deepcopy(model)
        dropouts = [part for part in copied.modules() if isinstance(part, nn.Dropout)]
        for part in dropouts if name == "adapter" else [copied]:
            part.train()
        return copied

    reason += r".*Call model.eval\(\) first"
    check_unsupported(trained, reason, call)
    check_plain(trained, reason, call, PlainDraftModel, do_sample=True)
    if name != "checkpointing":
        assert not torch.equal(run(trained(), call, None)[0].sequences, expected)
    monkeypatch.setattr(TargetView, "why_not", None)  # runs the model
    run(trained(), call, draft)
