"""Whole calls on an NVIDIA GPU, in captured steps and as they are: the texts of `generate` there, in float32."""

import math
from contextlib import contextmanager
from importlib.util import find_spec

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs an NVIDIA GPU", allow_module_level=True)

from torch.utils._pytree import tree_map_only
from transformers.utils import is_flash_linear_attention_available

from benchmarks.gpu_iterations import counted_graphs
from hf_longspec import Batcher, GrammarDraftModel, PlainDraftModel, StructuredOutput
from hf_longspec.generation.special_cases import masked
from hf_longspec.generation.target import TargetView
from hf_longspec.modeling.shared import low_bit_products
from tests.generation import test_captured_states as states
from tests.generation.drafted_calls import drafted, generated
from tests.generation.test_on_simulated_cuda import BATCHES, DRAFTERS, generate, make_draft
from tests.generation.test_recurrent_states import SEEDS
from tests.modeling.test_contract import draft_of
from tests.pairwise import pairwise
from tests.robustness.enumeration import build, with_capturable_experts
from tests.tiny_targets import tiny_prompts, tiny_target
from tests.tiny_tokenizers import byte_tokenizer

pytestmark = pytest.mark.usefixtures("every_step_speculates")

MODES = "graph", "fused"
HYBRID_TYPES = [*states.TYPES, "bamba", "lfm2", "nemotron_h", "qwen3_next"]


class Gpu:
    """The part of [`SimulatedCuda`] that tests of texts need, on the real device."""

    def __init__(self, counts):
        self._counts = counts

    @property
    def graphs(self):
        return range(self._counts.captures)

    @property
    def replays(self):
        return self._counts.replays

    def place(self, value):
        """Return tensors on the device, and modules moved to it."""
        if isinstance(value, torch.nn.Module):
            return value.to("cuda")
        return tree_map_only(torch.Tensor, lambda x: x.to("cuda"), value)

    def fetch(self, value):
        return value.cpu()


@contextmanager
def real():
    with counted_graphs() as counts:
        yield Gpu(counts)


@pytest.fixture
def gpu(caplog):
    with real() as device:
        yield device
    assert "could not be captured" not in caplog.text


@pytest.fixture
def steps(monkeypatch, request):
    """The tests of the simulated device run on the real one, with steps in a mode."""
    placed = states.on_device

    @contextmanager
    def on_device(model, *drafts):
        with placed(model, *drafts) as (device, target):
            for draft in drafts:
                draft.generation_config.compile = request.param
            yield device, target

    monkeypatch.setattr(states, "simulated", real)
    monkeypatch.setattr(states, "on_device", on_device)


@torch.no_grad()
@pytest.mark.parametrize(
    ("name", "mode", "sampled", "lengths"),
    pairwise([*DRAFTERS, "longspec_mtp", "longspec_dflash"], MODES, (False, True), BATCHES),
)
def test_texts_of_drafts(gpu, name, mode, sampled, lengths):
    """Greedily that of stock `generate`; sampled that of steps as they are."""
    model = tiny_target("llama", vocab_size=24)
    draft = gpu.place(make_draft(name, model) if name in DRAFTERS else draft_of(name, model))
    prompts = gpu.place(tiny_prompts(24, lengths))
    gpu.place(model)
    draft.generation_config.compile = "off"
    expected = generate(model, draft if sampled else None, *prompts, sampled)
    draft.generation_config.compile = mode
    for _ in range(2):
        assert generate(model, draft, *prompts, sampled).tolist() == expected.tolist()
    assert gpu.replays


def made(name):
    return with_capturable_experts(build(name, SEEDS.get(name, 0)))


def check(model, chain, lengths):
    inputs = states.inputs_of(lengths)
    with real() as device:
        text = device.fetch(generated(device.place(model), **{k: device.place(v) for k, v in inputs.items()}))
    draft = drafted(model.to("cpu"), chain, text, max(lengths))
    stats = states.check(model, draft, lengths, text=text)
    assert 1 < stats.num_emitted_tokens / stats.num_spec_steps < draft.num_nodes


WAYS = MODES, (True, False), (states.ONE, states.RAGGED)


@torch.no_grad()
@pytest.mark.parametrize(("name", "steps", "chain", "lengths"), pairwise(HYBRID_TYPES, *WAYS), indirect=["steps"])
def test_texts_of_hybrid_targets(steps, name, chain, lengths):
    check(made(name), chain, lengths)


@torch.no_grad()
@pytest.mark.parametrize(
    ("name", "steps", "chain", "lengths"), pairwise(states.MASKED_TYPES, *WAYS), indirect=["steps"]
)
def test_texts_of_targets_verified_by_a_mask(steps, name, chain, lengths, monkeypatch):
    monkeypatch.setattr(masked, "MOST_OF_MASK", 1.0)
    check(made(name), chain, lengths)


@torch.no_grad()
@pytest.mark.skipif(not is_flash_linear_attention_available(), reason="needs fla")
@pytest.mark.parametrize("name", ["qwen3_5_text", "qwen3_next", "kimi_linear", "olmo_hybrid"])
@pytest.mark.parametrize("mode", ["off", "fused"])
def test_texts_of_targets_that_call_kernels_of_fla(gpu, name, mode):
    model = gpu.place(made(name))
    assert TargetView(model).why_not() == []
    inputs = {key: gpu.place(value) for key, value in states.inputs_of(states.RAGGED).items()}
    text = generated(model, **inputs)
    draft = drafted(model, False, text, max(states.RAGGED))
    draft.generation_config.compile = mode
    assert generated(model, **inputs, assistant_model=draft).tolist() == text.tolist()
    assert draft.last_speculation.num_emitted_tokens > draft.last_speculation.num_spec_steps


@torch.no_grad()
@pytest.mark.parametrize(
    "settings",
    [{"draft_weights": "int4"}, {"draft_weights": "int8"}, {"draft_weights": "int4", "selection": "all"}],
    ids=str,
)
@pytest.mark.parametrize("mode", ["off", *MODES])
@pytest.mark.parametrize("by_gemlite", [False, True])
def test_texts_of_drafts_with_fewer_bits(gpu, settings, mode, by_gemlite, monkeypatch):
    if by_gemlite and (settings["draft_weights"] == "int8" or find_spec("gemlite") is None):
        pytest.skip("gemlite is not installed, or has nothing to do here")
    monkeypatch.setattr(low_bit_products, "ratio", lambda *_: 0.0 if by_gemlite else math.inf)
    model = gpu.place(tiny_target("llama", hidden_size=128, intermediate_size=256, head_dim=32, vocab_size=24))
    prompts = gpu.place(tiny_prompts(24, (23, 9, 40)))
    draft = draft_of("specattn", model, **settings)
    draft.generation_config.compile = mode
    expected = generate(model, None, *prompts, False)
    for _ in range(2):
        assert generate(model, draft, *prompts, False).tolist() == expected.tolist()
    stats = draft.last_speculation
    assert stats.num_accepted_draft_tokens > 0 and bool(gpu.replays) == (mode != "off")


@pytest.mark.skipif(find_spec("gemlite") is None, reason="needs gemlite")
@pytest.mark.parametrize(("rows", "columns"), [(128, 256), (576, 640), (1024, 4096)])
@pytest.mark.parametrize("vectors", [1, 2, 8])
@pytest.mark.parametrize("is_captured", [False, True])
def test_products_of_gemlite_are_those_of_torch(gpu, rows, columns, vectors, is_captured):
    device = torch.device("cuda", 0)
    assert low_bit_products.why_not_gemlite(device) is None
    assert 0 < low_bit_products.ratio(rows, columns, vectors, is_captured, device) < math.inf


@torch.no_grad()
@pytest.mark.parametrize("kind", ["longspec_ngram", "longspec", "specattn", "longspec_eagle3", "tokenswift", None])
def test_texts_of_requests_that_join(gpu, kind):
    model = gpu.place(tiny_target("gemma3", vocab_size=12))
    draft = None if kind is None else gpu.place(draft_of(kind, model))
    beside = draft or PlainDraftModel.from_target(model)
    how = {"eos_token_id": None, "pad_token_id": 0}
    settings = [how | {"do_sample": False}, how | {"do_sample": True, "temperature": 0.8, "top_k": 8}]
    requests = [
        (gpu.place(torch.randint(4, 12, (1, length))), settings[length % 2] | {"max_new_tokens": new})
        for length, new in ((21, 12), (3, 17), (13, 5), (2, 9), (30, 11))
    ]
    with Batcher(model, draft, rows=2, max_length=50, chunk_size=8) as batcher:
        futures = [batcher.submit(ids, seed=row, **how) for row, (ids, how) in enumerate(requests)]
        found = [future.result() for future in futures]
    for row, (ids, how) in enumerate(requests):
        torch.manual_seed(row)
        assert found[row].tolist() == model.generate(ids, assistant_model=beside, **how).tolist(), row


@torch.no_grad()
@pytest.mark.parametrize("kind", ["grammar", "longspec_ngram", "longspec"])
def test_texts_under_a_grammar(gpu, kind):
    pytest.importorskip("llguidance")
    tokenizer = byte_tokenizer()
    model = gpu.place(tiny_target("llama", vocab_size=len(tokenizer) + 6))
    schema = {"type": "object", "properties": {"id": {"type": "integer"}, "ok": {"type": "boolean"}}}
    schema |= {"required": ["id", "ok"], "additionalProperties": False}
    draft = GrammarDraftModel.from_target(model) if kind == "grammar" else gpu.place(draft_of(kind, model))
    texts = []
    for one in (None, draft):
        processor = StructuredOutput(tokenizer, json_schema=schema)
        ids, mask = gpu.place(tiny_prompts(40, (9, 14)))
        how = {"max_new_tokens": 40, "do_sample": False, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": 0}
        text = model.generate(ids, attention_mask=mask, assistant_model=one, logits_processor=[processor], **how)
        texts.append(text.tolist())
    assert texts[0] == texts[1] and draft.last_speculation.num_accepted_draft_tokens
