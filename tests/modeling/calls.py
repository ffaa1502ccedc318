"""One call of `generate` with a draft, as most tests of drafts make it."""

from weakref import WeakKeyDictionary

import torch

from hf_longspec import PlainDraftModel
from tests.generation.conftest import SHARED
from tests.tiny_targets import tiny_prompts

LENGTHS = (33, 3, 13)
NEVER = 999  # no token of the tiny targets
GREEDY = {"max_new_tokens": 10, "eos_token_id": NEVER, "pad_token_id": 0, "do_sample": False}


def generate(model, draft, lengths=LENGTHS, vocab_size=None, **options):
    """Continue random prompts, greedily and to the full length unless the options say otherwise."""
    input_ids, mask = tiny_prompts(vocab_size or model.config.vocab_size, lengths)
    return model.generate(input_ids, attention_mask=mask, assistant_model=draft, **GREEDY | options)


_texts = WeakKeyDictionary()


def reference(model, draft, lengths=LENGTHS, **options):
    """The text of `generate` without a draft, or of the loop with the plain one; kept where tests share the target."""
    texts = _texts.setdefault(model, {}) if model in SHARED else {}
    key = repr((draft, lengths, sorted(options.items())))
    if key not in texts:
        torch.manual_seed(5)
        texts[key] = generate(model, draft and draft.from_target(model), lengths, **options)
    return texts[key]


def check_sampled_text(model, draft, **options):
    """At equal seed, the text is that of the loop without a draft."""
    options = {"do_sample": True} | options
    torch.manual_seed(5)
    assert torch.equal(generate(model, draft, **options), reference(model, PlainDraftModel, **options))


def check_text(target, draft, **options):
    """The text is that of `generate`, or when sampled that of the loop without a draft; drafted tokens are accepted."""
    options = {"max_new_tokens": 16} | options
    if options.get("do_sample"):
        check_sampled_text(target, draft, **options)
    else:
        assert torch.equal(generate(target, draft, **options), reference(target, None, **options))
    stats = draft.last_speculation
    assert 0 < stats.num_accepted_draft_tokens < stats.num_draft_tokens


def watch_levels(monkeypatch, drafter, ends=lambda changing: changing[2].gather(1, changing[3])):
    """A list that gets, for each draft, the last known place of every row and what each level computed."""
    found = []

    def level(self, changing, depth, prefix, run=drafter.level):
        result = run(self, changing, depth, prefix)
        if not depth:
            found.append((ends(changing)[:, 0].tolist(), []))
        found[-1][1].append(result)
        return result

    monkeypatch.setattr(drafter, "level", level)
    return found
