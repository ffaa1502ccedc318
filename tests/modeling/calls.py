"""One call of `generate` with a draft, as most tests of drafts make it."""

import torch

from hf_longspec import PlainDraftModel
from tests.tiny_targets import tiny_prompts

LENGTHS = (33, 3, 13)
NEVER = 999  # no token of the tiny targets
GREEDY = {"max_new_tokens": 16, "eos_token_id": NEVER, "pad_token_id": 0, "do_sample": False}


def generate(model, draft, lengths=LENGTHS, vocab_size=None, **options):
    """Continue random prompts, greedily and to the full length unless the options say otherwise."""
    input_ids, mask = tiny_prompts(vocab_size or model.config.vocab_size, lengths)
    return model.generate(input_ids, attention_mask=mask, assistant_model=draft, **GREEDY | options)


def check_sampled_text(model, draft, **options):
    """At equal seed, the text is that of the loop without a draft."""
    texts = []
    for beside in (PlainDraftModel.from_target(model), draft):
        torch.manual_seed(5)
        texts.append(generate(model, beside, **{"do_sample": True} | options))
    assert torch.equal(*texts)


def check_text(target, draft, **options):
    """The text is that of `generate`, or when sampled that of the loop without a draft; drafted tokens are accepted."""
    options = {"max_new_tokens": 30} | options
    if options.get("do_sample"):
        check_sampled_text(target, draft, **options)
    else:
        assert torch.equal(generate(target, draft, **options), generate(target, None, **options))
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
