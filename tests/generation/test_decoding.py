"""The whole loop against plain `generate` of the bare model, which shares no code with it: greedy, float32."""

import copy
import threading

import pytest
import torch
from transformers import pipeline
from transformers.generation.stopping_criteria import StoppingCriteria, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

from hf_longspec import PlainDraftModel, SpecAttnDraftModel, SpeculativeCache
from hf_longspec.generation.target_modules import TargetEnds, final_norm_of
from hf_longspec.testing import TINY_TARGETS, WINDOW, RandomTreeDrafter, tiny_target

# Windows of 16 tokens are full from the first step in some rows and fill up in others; the prompt of 3 tokens is
# shorter than every seed chain.
ONE, RAGGED = (21,), (33, 3, 13)
BATCHES = pytest.mark.parametrize("lengths", [ONE, RAGGED], ids=["one", "ragged"])
KINDS = pytest.mark.parametrize("kind", ["tree", "chain", "specattn"])

# An end token that no greedy text of these targets holds: what is compared shall be long.
NEVER = 1

# float32 sums in another order. Logits have a standard deviation of 3; differences of 2e-5 were seen.
LOGIT_TOLERANCE = 1e-4


def test_a_drafter_is_told_what_was_emitted_and_what_the_final_norm_was_given(plain_run, monkeypatch):
    monkeypatch.setattr(RandomTreeDrafter, "wants_hidden", True)
    run = plain_run("qwen3", RAGGED, max_new_tokens=17, eos_token_id=NEVER)
    draft = run.draft("tree", num_nodes=9, luck=0.5)
    run.again(draft)
    norm, ends = final_norm_of(run.model), TargetEnds(run.model)
    told = [[], [], []]
    for number, step in enumerate(draft.verifications):
        best = ends.head(norm(step.hidden)).argmax(-1)
        for row, tokens in enumerate(step.tokens):
            kept = step.path[row, : len(tokens)] if number else [step.num_nodes[row] - 1]  # the seed emits one token
            assert [int(best[row, node]) for node in kept] == tokens
            told[row] += tokens
    # the last step is told to nobody
    assert all(text[: len(row)] == row and len(row) > 9 for text, row in zip(run.generated, told, strict=True))


@pytest.mark.parametrize("name", TINY_TARGETS)
@BATCHES
class TestEveryTarget:
    def test_random_trees(self, plain_run, name, lengths):
        run = plain_run(name, lengths, max_new_tokens=20, eos_token_id=NEVER)
        draft = run.draft("tree", num_nodes=9, luck=0.5)
        assert run.again(draft).tolist() == run.sequences.tolist()
        histogram = draft.last_speculation.acceptance_histogram
        assert histogram[0] > 0 and sum(histogram[2:]) > 0  # nothing accepted, several tokens accepted at once
        firsts = {path[1] for v in draft.verifications for path in v.path.tolist() if len(path) > 1}
        assert firsts - {0, 1}  # a path led past a sibling that was refused

    def test_random_chains(self, plain_run, name, lengths):
        run = plain_run(name, lengths, max_new_tokens=20, eos_token_id=NEVER)
        draft = run.draft("chain", num_nodes=6, luck=0.6)
        assert run.again(draft).tolist() == run.sequences.tolist()
        histogram = draft.last_speculation.acceptance_histogram
        assert histogram[0] > 0 and sum(histogram[2:]) > 0


@pytest.mark.parametrize(
    "settings",
    [
        {"selection": "all_rows"},
        {"selection": "last_accepted"},
        {"selection": "window"},
        {"selection": "quest"},
        {"score": "logits"},
        {"score": "weights", "selection": "all_rows", "granularity": "kv_head"},
        {"granularity": "kv_head"},
        {"selection": "last_accepted", "granularity": "kv_head"},
    ],
    ids=lambda settings: "-".join(settings.values()),
)
@pytest.mark.parametrize("name", ["llama", "gpt_oss", "gemma2"])
def test_every_way_to_select(plain_run, name, settings):
    run = plain_run(name, RAGGED, max_new_tokens=9)
    draft = run.draft("specattn", **settings)
    assert run.again(draft).tolist() == run.sequences.tolist()
    assert draft.last_speculation.num_draft_tokens > 0


@pytest.mark.parametrize("name", ["mistral", "gemma3", "gpt_oss"])
@pytest.mark.parametrize("length", [WINDOW - 1, WINDOW, 3 * WINDOW + 1])
def test_around_a_full_window(plain_run, name, length):
    run = plain_run(name, (length,), max_new_tokens=2 * WINDOW)
    for kind in ("tree", "chain"):
        assert run.again(run.draft(kind, num_nodes=11)).tolist() == run.sequences.tolist()


@BATCHES
def test_no_draft_at_all(plain_run, lengths):
    run = plain_run("qwen3", lengths, max_new_tokens=12)
    draft = run.draft("plain")
    assert run.again(draft).tolist() == run.sequences.tolist()
    assert draft.last_speculation.mean_acceptance_length == 1.0


@pytest.mark.parametrize("max_new_tokens", range(1, 10))
@BATCHES
def test_max_new_tokens_is_exact(plain_run, lengths, max_new_tokens):
    run = plain_run("llama", lengths, max_new_tokens=max_new_tokens)
    hints = plain_run("llama", lengths, max_new_tokens=20).generated  # the draft knows what would come after the end
    for kind in ("tree", "chain"):
        draft = run.draft(kind, luck=1.0, hints=hints)
        out = run.again(draft)
        assert out.shape[1] == run.prompt_length + max_new_tokens
        assert out.tolist() == run.sequences.tolist()
    assert run.again(run.draft("specattn", sparse_ratio=1.0)).tolist() == run.sequences.tolist()


@KINDS
@BATCHES
def test_max_length(plain_run, kind, lengths):
    run = plain_run("qwen2", lengths, max_length=max(lengths) + 7)
    out = run.again(run.draft(kind))
    assert out.shape[1] == max(lengths) + 7
    assert out.tolist() == run.sequences.tolist()


@KINDS
@BATCHES
def test_list_of_end_tokens(plain_run, kind, lengths):
    free = plain_run("llama", lengths, max_new_tokens=18)
    # end tokens that the rows really emit, in the middle
    ends = sorted({row[5 + 2 * index] for index, row in enumerate(free.generated)})
    run = plain_run("llama", lengths, max_new_tokens=18, eos_token_id=[126, *ends])
    draft = run.draft(kind, **({} if kind == "specattn" else {"hints": free.generated, "luck": 0.9}))
    assert run.again(draft).tolist() == run.sequences.tolist()
    assert (run.sequences[:, run.prompt_length :] == 0).any() or len(lengths) == 1  # some row ended before the others
    assert run.sequences.shape[1] < run.prompt_length + 18


@KINDS
def test_max_time_stops_after_the_first_token(plain_run, kind):
    run = plain_run("llama", RAGGED, max_new_tokens=9, max_time=1e-9)
    out = run.again(run.draft(kind))
    assert out.shape[1] == run.prompt_length + 1
    assert out.tolist() == run.sequences.tolist()


@KINDS
@BATCHES
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_scores_and_logits_are_those_of_plain_generate(plain_run, name, kind, lengths):
    free = plain_run(name, lengths, max_new_tokens=10)
    end = free.generated[0][5]
    options = {"max_new_tokens": 10, "eos_token_id": end, "repetition_penalty": 1.2, "return_dict_in_generate": True}
    run = plain_run(name, lengths, **options, output_scores=True, output_logits=True)
    plain, run.sequences = run.sequences, run.sequences.sequences
    out = run.again(run.draft(kind))
    assert out.sequences.tolist() == run.sequences.tolist()
    assert len(out.scores) == len(out.logits) == len(plain.scores)
    growing = torch.ones(len(lengths), dtype=torch.bool)
    for position in range(len(plain.scores)):
        for ours, theirs in ((out.scores, plain.scores), (out.logits, plain.logits)):
            assert ours[position].dtype == torch.float32
            torch.testing.assert_close(
                ours[position][growing], theirs[position][growing], atol=LOGIT_TOLERANCE, rtol=LOGIT_TOLERANCE
            )
        growing &= run.sequences[:, run.prompt_length + position] != end
    assert out.speculation is not None and out.past_key_values is not None
    assert out.attentions is None and out.hidden_states is None


@pytest.mark.parametrize("penalty", [1.0, 1.2])
def test_scores_and_logits_only_where_asked(plain_run, penalty):
    """With a history, scores are computed one by one on the way down a tree; they must not be kept either."""
    run = plain_run("llama", ONE, max_new_tokens=4, repetition_penalty=penalty)
    bare = run.again(run.draft("tree"), return_dict_in_generate=True)
    assert bare.scores is None and bare.logits is None
    assert isinstance(run.again(run.draft("tree")), torch.Tensor)


@pytest.mark.parametrize("kind", ["tree", "specattn"])
@pytest.mark.parametrize("chunk", [1, 7, 64])
@pytest.mark.parametrize("name", ["gemma3", "deepseek_v3"])
def test_chunked_prefill(plain_run, monkeypatch, name, kind, chunk):
    run = plain_run(name, (43, 3, 20), max_new_tokens=4)
    widths = []
    forward = type(run.model).forward

    def spy(self, input_ids=None, **kwargs):
        widths.append(input_ids.shape[1])
        return forward(self, input_ids=input_ids, **kwargs)

    monkeypatch.setattr(run.model, "forward", spy.__get__(run.model))
    draft = run.draft(kind)
    assert run.again(draft, prefill_chunk_size=chunk).tolist() == run.sequences.tolist()
    assert max(widths) <= max(chunk, draft.max_nodes(None), 5)
    widths.clear()
    run.again(draft)
    assert max(widths) > 30


@KINDS
@pytest.mark.parametrize("mask", [None, "ones"])
def test_without_attention_mask_and_with_ones(plain_run, kind, mask):
    run = plain_run("qwen3", (19, 19, 19), max_new_tokens=8)
    run.inputs["attention_mask"] = None if mask is None else torch.ones_like(run.inputs["input_ids"])
    assert run.again(run.draft(kind)).tolist() == run.sequences.tolist()


@pytest.mark.parametrize("kind", ["tree", "specattn"])
@pytest.mark.parametrize("name", ["gemma3", "gpt_oss"])
@pytest.mark.parametrize("attention", ["eager", "sdpa", "hf_longspec", "hf_longspec_reference", "hf_longspec_torch"])
def test_every_attention_implementation_of_the_target(plain_run, target, name, kind, attention):
    if (name, attention) == ("gpt_oss", "sdpa"):
        pytest.skip("transformers has no sdpa for gpt_oss")
    expected = plain_run(name, RAGGED, max_new_tokens=8).sequences
    run = plain_run(target(name, attn_implementation=attention), RAGGED, max_new_tokens=8)
    assert run.sequences.tolist() == expected.tolist()  # our attention serves plain generate too
    assert run.again(run.draft(kind)).tolist() == expected.tolist()
    assert run.model.config._attn_implementation == attention


def test_two_threads_generate_on_one_model(plain_run, target):
    model = target("gemma3", attn_implementation="hf_longspec")
    runs = [plain_run(model, lengths, max_new_tokens=24) for lengths in (ONE, RAGGED)]
    results, barrier = {}, threading.Barrier(2)

    def work(index):
        barrier.wait()
        for repeat in range(2):
            results[index, repeat] = runs[index].again(runs[index].draft("tree")).tolist()

    threads = [threading.Thread(target=work, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {(i, repeat): runs[i].sequences.tolist() for i in range(2) for repeat in range(2)}


@KINDS
@pytest.mark.parametrize("name", ["llama", "gpt_oss"])
def test_rows_do_not_interact(plain_run, name, kind):
    batch = plain_run(name, RAGGED, max_new_tokens=8)
    out = batch.again(batch.draft(kind))
    for row, length in enumerate(RAGGED):
        inputs = {k: v[row : row + 1, -length:] for k, v in batch.inputs.items() if isinstance(v, torch.Tensor)}
        draft = batch.draft(kind, **({} if kind == "specattn" else {"hints": batch.generated[row : row + 1]}))
        alone = batch.model.generate(**inputs, do_sample=False, max_new_tokens=8, assistant_model=draft)
        assert alone[0, length:].tolist() == out[row, batch.prompt_length :].tolist()


class Interruption(Exception):
    pass


class RaisingStreamer(BaseStreamer):
    def __init__(self, calls):
        self.calls = calls

    def put(self, value):
        self.calls -= 1
        if self.calls < 0:
            raise Interruption

    def end(self):
        pass


class RaisingCriterion(StoppingCriteria):
    def __init__(self, length):
        self.length = length

    def __call__(self, input_ids, scores, **kwargs):
        if input_ids.shape[1] >= self.length:
            raise Interruption
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)


@KINDS
@pytest.mark.parametrize("where", ["streamer", "criterion"])
@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_an_interrupted_call_leaves_everything_as_it_was(plain_run, name, kind, where):
    run = plain_run(name, ONE, max_new_tokens=12)
    model, cache = run.model, SpeculativeCache(run.model.config, 1, 64)
    before = model.config._attn_implementation, model.generation_config.to_dict(), dict(vars(model))
    weights = {key: value.clone() for key, value in model.state_dict().items()}
    stop = (
        {"streamer": RaisingStreamer(6)}
        if where == "streamer"
        else {"stopping_criteria": StoppingCriteriaList([RaisingCriterion(run.prompt_length + 5)])}
    )
    draft = run.draft(kind)
    with pytest.raises(Interruption):
        run.again(draft, past_key_values=cache, **stop)
    assert (model.config._attn_implementation, model.generation_config.to_dict(), dict(vars(model))) == before
    assert all(torch.equal(value, weights[key]) for key, value in model.state_dict().items())
    assert draft.last_speculation is not None
    # the cache is as it was given: nobody has the text that it would belong to
    assert cache.get_seq_length() == 0
    options = {"do_sample": False, "max_length": run.sequences.shape[1]}
    for more in ({}, {"assistant_model": run.draft("specattn")}):
        prompt = run.sequences[:, : run.prompt_length]
        out = model.generate(prompt, past_key_values=copy.deepcopy(cache), **options, **more)
        assert out.tolist() == run.sequences.tolist()
    assert run.again(run.draft(kind)).tolist() == run.sequences.tolist()


def test_a_nested_config_gets_its_attention_back(target):
    """Setting an implementation touches the sub-configs too; so must restoring it."""
    model = tiny_target("llama")
    model.config._attn_implementation = "sdpa"
    draft = PlainDraftModel.from_target(model)
    model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=3, do_sample=False, assistant_model=draft)
    assert model.config._attn_implementation == "sdpa" and model.model.config._attn_implementation == "sdpa"


@KINDS
@pytest.mark.parametrize("name", ["llama", "gpt_oss", "gemma2", "deepseek_v3"])
def test_bfloat16_runs_and_stays_finite(plain_run, target, name, kind):
    run = plain_run(target(name, dtype=torch.bfloat16), RAGGED, max_new_tokens=10, min_new_tokens=10)
    out = run.again(
        run.draft(kind), return_dict_in_generate=True, output_scores=True, output_logits=True, do_sample=True
    )
    assert out.sequences.shape == run.sequences.shape
    assert all(torch.isfinite(logits).all() for logits in out.logits)
    assert not any(torch.isnan(scores).any() for scores in out.scores)
    assert out.past_key_values.layers[0].keys.dtype == torch.bfloat16
    assert out.speculation.num_spec_steps > 0


@KINDS
@BATCHES
def test_lora_target(kind, lengths, plain_run):
    peft = pytest.importorskip("peft")
    model = tiny_target("llama")
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    torch.manual_seed(0)
    lora = peft.get_peft_model(model, config).eval()
    run = plain_run(lora, lengths, max_new_tokens=10)
    draft = run.draft(kind) if kind != "specattn" else SpecAttnDraftModel.from_target(model, sparse_min_tokens=6)
    assert run.again(draft).tolist() == run.sequences.tolist()
    assert draft.last_speculation.num_spec_steps > 0
    bare = plain_run("llama", lengths, max_new_tokens=10)
    assert bare.sequences.tolist() != run.sequences.tolist()  # the adapter is felt
    with lora.disable_adapter():
        assert run.again(draft).tolist() == bare.sequences.tolist()


@KINDS
def test_offloaded_target(kind, plain_run):
    accelerate = pytest.importorskip("accelerate")
    model = tiny_target("qwen3")
    accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
    assert model.model.layers[0].mlp.up_proj.weight.device.type == "meta"
    expected = plain_run("qwen3", RAGGED, max_new_tokens=6).sequences
    run = plain_run(model, RAGGED, max_new_tokens=6)
    assert run.sequences.tolist() == expected.tolist()
    assert run.again(run.draft(kind)).tolist() == expected.tolist()


@pytest.mark.parametrize("lengths", [(4,), (6, 2, 9)], ids=["one", "ragged"])
def test_pipeline(tokenizer, lengths):
    model = tiny_target("llama", vocab_size=len(tokenizer))
    texts = ["".join("abcdefghij"[(3 * i + j) % 10] for j in range(n)) for i, n in enumerate(lengths)]
    options = {"tokenizer": tokenizer, "batch_size": len(texts), "device": "cpu"}
    plain = pipeline("text-generation", model=model, **options)
    draft = SpecAttnDraftModel.from_target(model, sparse_min_tokens=4)
    drafted = pipeline("text-generation", model=model, assistant_model=draft, **options)
    call = {"do_sample": False, "max_new_tokens": 9}
    assert drafted(texts, **call) == plain(texts, **call)
    assert draft.last_speculation.num_spec_steps > 0
