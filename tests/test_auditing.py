"""The audit, against text of plain `generate`, text that was tampered with, and one forward over the whole sequence."""

import pytest
import torch

from hf_longspec import auditing
from hf_longspec.auditing import audit, compare
from tests.tiny_targets import EOS_TOKEN_ID, PAD_TOKEN_ID, tiny_prompts, tiny_target

LENGTHS, NEW_TOKENS = (23, 9, 17), 24
PROMPT_LENGTH = max(LENGTHS)
# Beyond float32 rounding of logits of magnitude 10, far below the distance of two tokens chosen at random.
LOGIT_TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def target():
    return tiny_target("llama")


@pytest.fixture(scope="module")
def prompts():
    return tiny_prompts(128, LENGTHS)


@pytest.fixture(scope="module")
def generated(target, prompts):
    input_ids, attention_mask = prompts
    return plain_generate(target, input_ids, attention_mask)


def plain_generate(model, input_ids, attention_mask, **kwargs):
    kwargs = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "eos_token_id": None} | kwargs
    return model.generate(input_ids, attention_mask=attention_mask, pad_token_id=PAD_TOKEN_ID, **kwargs)


@pytest.fixture(scope="module")
def mask(prompts):
    return torch.cat([prompts[1], torch.ones(3, NEW_TOKENS, dtype=torch.long)], dim=1)


def tamper(text, *places):
    """Another token at each place `(row, column)`, and not a special one."""
    text = text.clone()
    for row, column in places:
        text[row, column] = 3 + (text[row, column] - 2) % 125
    return text


@torch.no_grad()
def read(model, text, mask):
    """Logits of one masked forward over whole rows."""
    return model(text, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp_min(0)).logits


@pytest.mark.parametrize("name", ["gemma2", "gemma3", "gpt_oss", "deepseek_v3"])
def test_plain_generate_is_exact_in_float32(name, prompts, monkeypatch):
    """In chunks smaller than a window."""
    monkeypatch.setattr(auditing, "CHUNK_TOKENS", 5)
    model = tiny_target(name)
    text = plain_generate(model, *prompts)
    report = audit(model, text, PROMPT_LENGTH, prompts[1], eos_token_id=[])
    assert report.verdict == "exact", str(report)
    assert report.num_tokens == report.num_argmax == len(LENGTHS) * NEW_TOKENS
    assert report.first_divergence is report.first_failure is None
    assert report.max_gap == 0


@pytest.mark.parametrize(
    ("wrong", "chunk"),
    [([], 22), ([(0, PROMPT_LENGTH)], 1024), ([(2, -1)], 1), ([(0, 32), (2, 27), (1, 29)], 23)],
    ids=str,
)
def test_margins_are_the_distances_to_the_best_other_token(target, prompts, generated, mask, wrong, chunk, monkeypatch):
    """Against one masked forward, whatever the chunks; wrong tokens are found, the earliest of several first."""
    monkeypatch.setattr(auditing, "CHUNK_TOKENS", chunk)
    text = tamper(generated, *wrong)
    logits = read(target, text, mask)
    report = audit(target, text, PROMPT_LENGTH, prompts[1], eos_token_id=[])
    assert report.margins.shape == (3 * NEW_TOKENS, 4)
    for row, column, margin, allowed in report.margins.tolist():
        others, token = logits[int(row), int(column) - 1].clone(), text[int(row), int(column)]
        own, others[token] = others[token].item(), -torch.inf
        assert margin == pytest.approx(own - others.max().item(), abs=LOGIT_TOLERANCE)
        assert 0 < allowed < LOGIT_TOLERANCE
    margins, columns = report.margins[:, 2], report.margins[:, 1]
    assert torch.equal(columns, columns.sort().values)
    assert report.num_argmax == int((margins >= 0).sum()) and report.max_gap == max(0, -margins.min())
    first = min(((row, column % text.shape[1]) for row, column in wrong), key=lambda place: place[1], default=None)
    assert report.verdict == ("NOT lossless" if wrong else "exact")
    assert report.first_divergence == report.first_failure == first


def test_a_second_best_token_within_eps_is_a_near_tie(target, prompts, generated, mask):
    """The runner-up in place of the last token, once with eps above its gap and once below."""
    (best, second), tokens = read(target, generated, mask)[0, -2].topk(2)
    gap = (best - second).item()
    runner_up = generated.clone()
    runner_up[0, -1] = tokens[1]
    near = audit(target, runner_up, PROMPT_LENGTH, prompts[1], eps=gap + LOGIT_TOLERANCE, eos_token_id=[])
    assert near.verdict == "near-tie" and near.first_failure is None
    assert near.first_divergence == (0, generated.shape[1] - 1) and near.num_argmax == near.num_tokens - 1
    assert near.max_gap == pytest.approx(gap, abs=LOGIT_TOLERANCE)
    far = audit(target, runner_up, PROMPT_LENGTH, prompts[1], eps=gap - LOGIT_TOLERANCE, eos_token_id=[])
    assert far.verdict == "NOT lossless" and far.first_failure == far.first_divergence


def test_rows_end_where_they_end(target, prompts, generated):
    """An end is audited, what fills the row up is not: padding, the end again, or padding after a stop string."""
    stop = int(generated[1, PROMPT_LENGTH + 10])
    text = plain_generate(target, *prompts, eos_token_id=stop)
    emitted = [row[PROMPT_LENGTH:].tolist() for row in text]
    lengths = [row.index(stop) + 1 if stop in row else len(row) for row in emitted]
    assert min(lengths) <= 11
    repeated, early, cut = text.clone(), text.clone(), generated.clone()
    for row, length in enumerate(lengths):
        repeated[row, PROMPT_LENGTH + length :] = stop
    row = lengths.index(max(lengths))
    early[row, PROMPT_LENGTH + 1], early[row, PROMPT_LENGTH + 2 :] = stop, PAD_TOKEN_ID
    cut[1, PROMPT_LENGTH + 6 :] = PAD_TOKEN_ID
    for filled, pad in ((text, None), (repeated, stop)):
        report = audit(target, filled, PROMPT_LENGTH, prompts[1], pad_token_id=pad, eos_token_id=stop)
        assert (report.verdict, report.num_tokens) == ("exact", sum(lengths))
    wrong = audit(target, early, PROMPT_LENGTH, prompts[1], eos_token_id=stop)
    assert wrong.first_failure == (row, PROMPT_LENGTH + 1)
    stopped = audit(target, cut, PROMPT_LENGTH, prompts[1], pad_token_id=PAD_TOKEN_ID, eos_token_id=EOS_TOKEN_ID)
    assert stopped.verdict == "exact" and stopped.num_tokens <= 2 * NEW_TOKENS + 6


def test_left_padding_is_inferred_as_in_generate(target, prompts, generated):
    """Without a mask, padding tokens in the prompt are masked; with one that hides nothing, they are read."""
    assert audit(target, generated, PROMPT_LENGTH, eos_token_id=[]).verdict == "exact"
    everything = torch.ones_like(prompts[0])
    assert audit(target, generated, PROMPT_LENGTH, everything, eos_token_id=[]).verdict == "NOT lossless"


@pytest.mark.parametrize(
    ("dtype", "change", "verdict", "first"),
    [
        (torch.float32, None, "exact", None),
        (torch.float32, "cut", "NOT lossless", NEW_TOKENS - 1),
        (torch.bfloat16, "cut", "NOT lossless", NEW_TOKENS - 1),
        (torch.float32, "token", "NOT lossless", 7),
        (torch.bfloat16, "plain token", "exact", 7),
    ],
    ids=str,
)
def test_a_comparison_reads_both_texts(dtype, change, verdict, first):
    """In float32 the texts must be the same; otherwise the speculative one must be whole and the model's."""
    model, prompt = tiny_target("llama", dtype=dtype), tiny_prompts(128, [9])[0]
    model.generation_config.eos_token_id = None
    plain = speculative = plain_generate(model, prompt, torch.ones_like(prompt))
    if change == "cut":
        speculative = speculative[:, :-1]
    elif change == "token":
        speculative = tamper(speculative, (0, 9 + 7))
    elif change == "plain token":
        plain = tamper(plain, (0, 9 + 7))
    compared = compare(model, plain, speculative, 9, NEW_TOKENS, eps=None if dtype == torch.float32 else 1.0)
    expected = (verdict, first, change != "cut")
    assert (compared.verdict.replace("near-tie", "exact"), compared.first_difference, compared.is_whole) == expected


def test_undefined_logits_are_a_failure(prompts, generated):
    model = tiny_target("llama")
    with torch.no_grad():
        model.lm_head.weight[7] = torch.nan
    assert audit(model, generated, PROMPT_LENGTH, prompts[1], eos_token_id=[]).verdict == "NOT lossless"


def test_forbidden_tokens_do_not_widen_the_tolerance(prompts, generated):
    """A head that bans a token by minus infinity leaves eps where it was."""
    model = tiny_target("llama")
    eps = audit(model, generated, PROMPT_LENGTH, prompts[1], eos_token_id=[]).eps
    token = torch.tensor([next(token for token in range(128) if token not in generated)])
    model.lm_head.register_forward_hook(lambda module, args, logits: logits.index_fill(-1, token, -torch.inf))
    banned = audit(model, generated, PROMPT_LENGTH, prompts[1], eos_token_id=[])
    assert banned.verdict == "exact"
    assert banned.eps == pytest.approx(eps, rel=0.5)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"prompt_length": 0}, "prompt_length=0"),
        ({"prompt_length": 47}, "prompt_length=47"),
        ({"attention_mask": torch.ones(3, 5)}, r"attention_mask has shape \(3, 5\)"),
        ({"attention_mask": torch.zeros(3, PROMPT_LENGTH)}, "row 0 is all padding"),
    ],
    ids=str,
)
def test_refusals(target, generated, arguments, message):
    with pytest.raises(ValueError, match=message):
        audit(target, generated, **({"prompt_length": PROMPT_LENGTH} | arguments))


def test_training_mode_is_refused(generated):
    with pytest.raises(ValueError, match=r"model\.eval\(\)"):
        audit(tiny_target("llama").train(), generated, PROMPT_LENGTH)
