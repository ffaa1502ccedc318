"""Comparisons of a call of `generate` with the one without a draft: `start` columns of prompts, `expected` output."""

import re

import torch

from hf_longspec import audit
from hf_longspec.generation.cache import CACHE_NAME
from tests.user_objects import Recorder

WANTED = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
NEVER = 999  # no token of the tiny targets
# Only tokens this close may be taken for each other: a thousand roundings of float32 logits with a standard deviation
# of 3, and rarely met.
TIE = 1e-3
SCORE_TOLERANCE = 1e-3  # of logits with a standard deviation of 3, processed by the same processors


def first_differences(expected, sequences):
    """Of each row that differs: its number, the place where it does first, and both rows."""
    for row, (left, right) in enumerate(zip(expected.sequences.tolist(), sequences.tolist(), strict=True)):
        place = next((i for i, pair in enumerate(zip(left, right, strict=False)) if pair[0] != pair[1]), None)
        if place is not None:
            yield row, place, left, right


def tied(expected, sequences, start):
    """Whether the texts differ first where rounding chose between two tokens."""
    for row, place, left, right in first_differences(expected, sequences):
        scores = expected.scores[place - start][row]
        return bool((scores[left[place]] - scores[right[place]]).abs() < TIE)
    return False


def check_scores(expected, out, start):
    """Compare processed scores and raw logits of every token of a row, up to its end."""
    new = out.sequences[:, start:]
    assert len(out.scores) == len(out.logits) == new.shape[1]
    for row in range(len(new)):
        for place in range(new.shape[1]):
            if not bool(out.logits[place][row].any()):
                assert place > 0
                break  # the row was done
            for ours, theirs in ((out.scores, expected.scores), (out.logits, expected.logits)):
                mine, bare = ours[place][row], theirs[place][row].float()
                torch.testing.assert_close(mine, bare, atol=SCORE_TOLERANCE, rtol=SCORE_TOLERANCE, equal_nan=True)


def is_unstable(rerun, expected, sequences):
    """Whether noise of the size of rounding in the weights changes the text, as at a limit of a truncation."""
    for row, place, left, _ in first_differences(expected, sequences):
        return any(rerun(seed)[row, : place + 1].tolist() != left[: place + 1] for seed in range(10))
    return False


def with_noise(model, seed):
    """The model, with noise of some roundings in its weights."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(1 + 1e-6 * torch.randn(weight.shape, generator=generator))
    return model


def check_text(expected, sequences, start, mask=None, rerun=None):
    """Compare with the text without a draft; return whether it is the same, and not another one by rounding."""
    if sequences.tolist() == expected.sequences.tolist():
        return True
    by_rounding = tied(expected, sequences, start) or (rerun is not None and is_unstable(rerun, expected, sequences))
    assert by_rounding, f"{sequences.tolist()} instead of {expected.sequences.tolist()}"
    return False


def check_rounding(stock, gap, ends, expected, sequences, start, mask=None, rerun=None):
    """Compare a text in half precision with the target's own choices after the same tokens; return False."""
    report = audit(stock, sequences, start, mask, eps=gap, pad_token_id=0, eos_token_id=ends)
    assert report.verdict != "NOT lossless", report
    is_long = sequences.shape[1] >= expected.sequences.shape[1]
    assert is_long or all(ends in row[start:].tolist() for row in sequences), "a text is too short"
    return False


def state_of(*models):
    """Weights, settings, hooks and modes."""
    return [
        (
            {name: value.tolist() for name, value in model.state_dict().items()},
            model.generation_config.to_dict(),
            model.config._attn_implementation,
            [(len(one._forward_hooks), len(one._forward_pre_hooks), one.training) for one in model.modules()],
        )
        for model in models
    ]


def check_calls(generate, model, draft, expected, start, check, rerun, times, wanted, streamed, is_repeatable):
    """The text, the scores and the stream of every call; nothing else changes, and plain calls give the same text."""
    before, stream = state_of(model, draft), None
    for _ in range(times):
        if streamed is not None:
            stream = Recorder()
        out = generate(model, draft, streamer=stream, **wanted)
        if is_repeatable:  # no random number was drawn
            assert torch.equal(torch.get_rng_state(), torch.Generator().manual_seed(5).get_state())
        sequences = out if isinstance(out, torch.Tensor) else out.sequences
        if check(expected, sequences, start, rerun=rerun):
            assert streamed is None or vars(stream) == vars(streamed), f"{stream.puts} instead of {streamed.puts}"
            if "output_scores" in wanted:
                check_scores(expected, out, start)
    assert state_of(model, draft) == before
    if is_repeatable:
        check(expected, generate(model), start)


def check_two_turns(generate, target, model, draft, expected, mask, start, check, cache, second):
    """A longer text on the cache of the first turn, which `cache` is if it was lent."""
    out = generate(model, draft, **{CACHE_NAME: cache}, return_dict_in_generate=True)
    check(expected, out.sequences, start)
    assert cache is None or out.past_key_values is cache
    held, new = out.past_key_values.get_seq_length(), out.sequences.shape[1] - start
    has_columns = cache is not None or draft.last_speculation.reason is not None
    before = start if has_columns else int(mask.sum(1).max())  # a cache of ours has no columns for padding
    assert held == before + new - 1, f"{held} tokens are held"
    text = torch.cat([out.sequences, out.sequences[:, :4] + 0], 1)
    mask = torch.cat([mask, mask.new_ones(len(mask), text.shape[1] - start)], 1)
    turn = {"attention_mask": mask, "max_new_tokens": 7, "do_sample": False}
    turn |= {"eos_token_id": NEVER, "pad_token_id": 0}
    expected = target().generate(text, **turn, **WANTED)
    if hasattr(draft, "hints"):
        draft.hints = []
    again = model.generate(text, **{CACHE_NAME: out.past_key_values}, assistant_model=second, **turn)
    check(expected, again, text.shape[1], turn["attention_mask"])


def check_refusal(make_call, pattern):
    """Fail unless the call is refused by name."""
    try:
        make_call()
    except ValueError as error:
        found = str(error)
    else:
        found = "nothing"
    assert re.search(pattern, found), f"{found} instead of {pattern}"
