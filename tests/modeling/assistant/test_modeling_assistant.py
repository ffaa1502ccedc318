"""AssistantDraftModel: loading, saving, vocabularies, PARD, and what is refused."""

from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoModel, MambaConfig, MambaForCausalLM, PreTrainedTokenizerFast

from hf_longspec import AssistantDraftModel
from hf_longspec.hub import Card, write_repository
from hf_longspec.modeling.assistant.generation_assistant import AssistantDrafter, Translation
from tests.modeling.calls import LENGTHS, check_sampled_text, generate
from tests.pairwise import few
from tests.tiny_targets import tiny_target
from tests.tiny_tokenizers import byte_tokenizer, character_tokenizer
from tests.watching import after


@pytest.fixture(scope="module")
def model():
    return tiny_target("qwen3", vocab_size=12, num_hidden_layers=1)


@pytest.fixture(scope="module")
def small():
    return tiny_target("llama", 5, vocab_size=12, num_hidden_layers=2)


def with_tokenizer(folder, tokenizer, model):
    """Save a model and a tokenizer in a folder, and return it."""
    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder)
    return folder


@pytest.fixture
def named(tmp_path, model, small):
    """Return the target and a folder with the small model, both with the tokenizer of nine characters."""
    tokenizer = character_tokenizer("abcdefghi")
    folder = with_tokenizer(tmp_path / "target", tokenizer, model)
    target = type(model).from_pretrained(folder)
    return target, with_tokenizer(tmp_path / "small", tokenizer, small)


@pytest.mark.parametrize("weights", [None, False])
def test_a_saved_draft_loads_with_its_model(named, tmp_path, weights):
    """By default the weights are written if the model's name is that of a folder."""
    target, folder = named
    draft = AssistantDraftModel.from_pretrained(folder, target=target, num_assistant_tokens=2)
    assert draft.assistant.dtype == target.dtype
    generate(target, draft)
    own = draft.assistant.generation_config.to_diff_dict()
    draft.save_pretrained(tmp_path / "saved", assistant_weights=weights)
    assert (tmp_path / "saved" / "assistant" / "model.safetensors").is_file() == (weights is not False)
    assert not (tmp_path / "saved" / "model.safetensors").exists()
    loaded = AutoModel.from_pretrained((tmp_path / "saved").resolve())
    # not those of the draft, whose file has the same name in the folder above
    assert loaded.assistant.generation_config.to_diff_dict().keys() ^ own.keys() <= {"_from_model_config"}
    assert loaded.config.assistant_name_or_path == (str(folder) if weights is False else "./assistant")
    assert loaded.setting("num_assistant_tokens") == 2
    for name, weight in draft.assistant.named_parameters():
        assert torch.equal(weight, loaded.assistant.get_parameter(name))
    assert torch.equal(generate(target, loaded), generate(target, None))
    assert loaded.last_speculation.acceptance_histogram == draft.last_speculation.acceptance_histogram
    loaded.save_pretrained(tmp_path / "again", assistant_weights=weights)
    for file in ("config.json", "generation_config.json"):
        assert (tmp_path / "again" / file).read_text() == (tmp_path / "saved" / file).read_text()


def test_a_published_draft_brings_the_weights_of_its_model(named, tmp_path):
    target, folder = named
    draft = AssistantDraftModel.from_pretrained(folder, target=target, num_assistant_tokens=2)
    files = write_repository(draft, tmp_path / "published", Card(base_model="org/target"))
    assert Path("assistant/model.safetensors") in files and Path("longspec_draft.py") in files
    loaded = AutoModel.from_pretrained(tmp_path / "published", trust_remote_code=True)
    assert torch.equal(generate(target, loaded), generate(target, None))
    assert loaded.last_speculation.num_accepted_draft_tokens > 0
    assert "license: apache-2.0" not in (tmp_path / "published" / "README.md").read_text()


def test_a_hub_id_is_saved_as_a_name(model, small, tmp_path):
    draft = AssistantDraftModel.from_model(small, model)
    draft.config.assistant_name_or_path = "org/small"
    draft.save_pretrained(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "generation_config.json"]
    assert '"org/small"' in (tmp_path / "config.json").read_text()


def test_an_adapter_is_not_saved_without_its_base(model, tmp_path):
    peft = pytest.importorskip("peft")
    base = tiny_target("llama", 5, vocab_size=12)
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    draft = AssistantDraftModel.from_model(peft.get_peft_model(base, config).eval(), model, num_assistant_tokens=2)
    assert torch.equal(generate(model, draft), generate(model, None))
    with pytest.raises(ValueError, match="adapter, which would be saved without its base: merge it first"):
        draft.save_pretrained(tmp_path / "no")
    assert not (tmp_path / "no").exists()


@pytest.mark.parametrize(
    ("of_target", "of_draft", "settings"),
    [(15, 12, {"tree_widths": [4, 2]}), (15, 12, {"acceptance": "rejection"}), (12, 17, {"acceptance": "rejection"})],
    ids=str,
)
def test_vocabularies_may_differ_by_padding(tmp_path, of_target, of_draft, settings):
    """The tokenizer has 12 tokens; the target may emit padding, which the draft cannot read."""
    tokenizer = character_tokenizer("abcdefghi")
    folders = [
        with_tokenizer(tmp_path / name, tokenizer, tiny_target(kind, 2, vocab_size=size))
        for name, kind, size in (("target", "qwen3", of_target), ("small", "llama", of_draft))
    ]
    target = type(tiny_target("qwen3")).from_pretrained(folders[0])
    draft = AssistantDraftModel.from_pretrained(folders[1], target=target, num_assistant_tokens=2, **settings)
    assert torch.equal(generate(target, draft, vocab_size=12), generate(target, None, vocab_size=12))
    torch.manual_seed(5)
    generate(target, draft, vocab_size=12, do_sample=True)
    assert draft.last_speculation.num_accepted_draft_tokens > 0


def permuted(model, folder, characters):
    """Save a model that is the same with other numbers of the characters "abcdefghi", and its tokenizer."""
    own, other = character_tokenizer("abcdefghi"), character_tokenizer(characters)
    order = [own.get_vocab().get(token, 0) for token, _ in sorted(other.get_vocab().items(), key=lambda pair: pair[1])]
    copy = tiny_target("qwen3", vocab_size=len(order), num_hidden_layers=1)
    copy.load_state_dict(
        {name: weight[order] if weight.shape[0] == 12 else weight for name, weight in model.state_dict().items()}
    )
    return with_tokenizer(folder, other, copy)


def all_accepted(draft):
    """Whether all drafts were accepted to the last token, except those that the end of a row cut."""
    *shorter, full = draft.last_speculation.acceptance_histogram
    return full > 5 and sum(shorter) <= len(LENGTHS)


class TestOtherTokenizers:
    @pytest.mark.parametrize(
        "settings",
        few([{"tree_widths": [3, 2]}, {"window": 8}, {"ngram_candidates": 2}, {"compile": "compile"}], 1),
        ids=str,
    )
    def test_a_model_that_differs_in_its_numbers_alone_is_always_right(
        self, named, tmp_path, model, graphs, run_as_they_are, settings
    ):
        target, _ = named
        folder = permuted(model, tmp_path / "other", "ihgfedcba")
        draft = AssistantDraftModel.from_pretrained(folder, target=target, num_assistant_tokens=2, **settings)
        assert torch.equal(generate(target, draft, vocab_size=12), generate(target, None, vocab_size=12))
        if not {"window", "ngram_candidates"} & settings.keys():  # a part of the text; n-grams are longer
            assert all_accepted(draft)
        if "compile" not in settings:  # which would trace all graphs again
            check_sampled_text(target, draft, vocab_size=12)
        assert draft.last_speculation.num_accepted_draft_tokens > 0
        assert not run_as_they_are and (graphs.frame_count > 0) == ("compile" in settings)

    def test_tokens_that_the_model_lacks_are_read_as_others_and_not_proposed(self, named, tmp_path, model, monkeypatch):
        (target, _), proposed = named, []
        note = lambda tree, *_: proposed.extend(tree.tokens[:, 1:].flatten().tolist())  # noqa: E731
        after(monkeypatch, AssistantDrafter, "propose", note)
        folder = permuted(model, tmp_path / "other", "ihgfedcb")
        draft = AssistantDraftModel.from_pretrained(folder, target=target, acceptance="rejection")
        assert draft.translation.shared.tolist() == [True] * 3 + [False] + [True] * 8
        assert torch.equal(generate(target, draft, vocab_size=12), generate(target, None, vocab_size=12))
        generate(target, draft, vocab_size=12, do_sample=True)
        assert 3 not in proposed and len(set(proposed)) > 5
        assert draft.last_speculation.num_accepted_draft_tokens > 0

    def test_pieces_of_a_token_are_read_to_the_last_one(self):
        whole, bytes_alone = byte_tokenizer(texts=["the cat " * 9]), byte_tokenizer(special=[])
        found = Translation.between(whole, bytes_alone, len(whole) + 2, len(bytes_alone))
        for token in (whole("the cat")["input_ids"][0], whole("c")["input_ids"][0]):
            text = whole.decode([token])
            assert bytes_alone.decode([found.tokens[token]]) == text[-1] and found.shared[token] == (len(text) == 1)
        assert len(found.tokens) == len(whole) + 2 and not found.shared[-2:].any()

    def test_a_saved_draft_translates(self, named, tmp_path, model):
        """Loaded without its target, too."""
        target, _ = named
        folder = permuted(model, tmp_path / "other", "ihgfedcba")
        AssistantDraftModel.from_pretrained(folder, target=target).save_pretrained(tmp_path / "saved")
        for loaded in (
            AutoModel.from_pretrained(tmp_path / "saved"),
            AssistantDraftModel.from_pretrained(tmp_path / "saved", target=target),
        ):
            assert torch.equal(*(generate(target, one, vocab_size=12, max_new_tokens=16) for one in (loaded, None)))
            assert all_accepted(loaded)

    def test_what_cannot_be_translated_is_refused(self, named, tmp_path, model):
        target, _ = named
        more = tiny_target("llama", vocab_size=20)
        message = r"LlamaForCausalLM \(20 tokens\).*differ, and the tokenizer of Llama.* not found"
        with pytest.raises(ValueError, match=message):
            AssistantDraftModel.from_model(more, target)
        other = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({"x": 0}, unk_token="x")))
        with pytest.raises(ValueError, match="share no token"):
            AssistantDraftModel.from_model(more, target, assistant_tokenizer=other)
        more.config.pard_token = 3
        with pytest.raises(ValueError, match="pard_token=3: a PARD model needs the tokenizer of the target"):
            AssistantDraftModel.from_model(more, target, assistant_tokenizer=character_tokenizer("ihgfedcba"))


def test_a_name_is_no_model(model):
    with pytest.raises(ValueError, match="expected a loaded model, but got 'org/small'"):
        AssistantDraftModel.from_model("org/small", model)


def test_what_cannot_draft_is_refused(model, small, named):
    sizes = {"vocab_size": 12, "hidden_size": 16, "num_hidden_layers": 1}
    mamba, make = MambaForCausalLM(MambaConfig(**sizes, state_size=4)), AssistantDraftModel.from_model
    bare = AssistantDraftModel(make(small, model).config)
    for attempt, message in (
        (lambda: make(small, model, pard_token=12), "pard_token=12: .* tokens 0 to 11"),
        (lambda: make(small, model, pard_token=3, tree_widths=[2, 2]), r"tree_widths=\[2, 2\] with pard_token=3"),
        (lambda: make(mamba, model), "assistant=MambaForCausalLM cannot draft: "),  # it cannot be rolled back
        (lambda: AssistantDraftModel.from_pretrained(named[1]), "model_type='llama' and is not a saved draft: pass ta"),
        (lambda: generate(model, bare), "was not loaded: load the draft with from_pretrained"),
    ):
        with pytest.raises(ValueError, match=message):
            attempt()


@pytest.mark.parametrize("settings", [{"window": 8}, {"ngram_candidates": 1, "ngram_num_tokens": 3}], ids=str)
def test_pard_drafts_in_one_forward(model, small, settings, monkeypatch):
    draft = AssistantDraftModel.from_model(small, model, num_assistant_tokens=4, pard_token=11, **settings)
    expected, forwards, first = generate(model, None), [], []
    # the prefill's, and those of the check of the settings
    after(monkeypatch, AssistantDrafter, "start", lambda *_: first.append(len(forwards)))
    with small.register_forward_hook(lambda *_: forwards.append(1)):
        assert torch.equal(generate(model, draft), expected)
    assert len(forwards) - first[0] == draft.last_speculation.num_forwards > 5
    assert draft.last_speculation.num_accepted_draft_tokens > 0


@torch.no_grad()
def test_pard_proposes_what_follows_root_and_masks(monkeypatch):
    """Over several steps: the argmax of a plain forward over text, root and masks, at the root and each mask."""
    length, mask_token = 4, 11
    model = tiny_target("qwen3", 3, vocab_size=12)
    small = tiny_target("llama", 5, vocab_size=12, pard_token=mask_token)
    draft = AssistantDraftModel.from_model(small, model, num_assistant_tokens=length)  # the mask token is found
    proposed, prompts = [], (21, 5, 13, 1)
    note = lambda tree, own, root: proposed.append((own.binding.cache.lengths.host, tree.tokens))  # noqa: E731
    after(monkeypatch, AssistantDrafter, "propose", note)
    texts = generate(model, draft, prompts, max_new_tokens=20)
    assert draft.last_speculation.num_accepted_draft_tokens > 3
    width = max(prompts)
    for lengths, tokens in proposed:
        for row, committed in enumerate(lengths):
            start = width - prompts[row]
            end = start + committed + 1
            if end + length - 1 > texts.shape[1]:  # positions stay below that of the longest text
                continue
            masks = torch.full((length - 1,), mask_token)
            logits = small(torch.cat([texts[row, start:end], masks])[None]).logits[0]
            assert tokens[row].tolist() == [int(texts[row, end - 1]), *logits[-length:].argmax(-1).tolist()]


def test_a_model_in_training_and_in_another_dtype_drafts_in_eval_mode(model):
    small = tiny_target("llama", 5, vocab_size=12, attention_dropout=0.9).to(torch.bfloat16).train()
    draft, histograms = AssistantDraftModel.from_model(small, model, tree_widths=[3, 3]), []
    for _ in range(2):
        assert torch.equal(generate(model, draft), generate(model, None))
        histograms.append(draft.last_speculation.acceptance_histogram)
    assert small.training and histograms[0] == histograms[1] and histograms[0][1] > 0
