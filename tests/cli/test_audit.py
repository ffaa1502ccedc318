"""`audit`: verdicts and exit codes for right decoding, and for verifiers that were broken on purpose."""

import json

import pytest
import torch

import hf_longspec.generation.sampling as rules
from hf_longspec.generation.verification import Acceptance, accept_greedy, accept_sampled

pytestmark = pytest.mark.usefixtures("every_step_speculates")
# A SpecAttn draft that reads next to nothing, and so is wrong often.
BLIND = ["--draft", "specattn", "--set", "sparse_min_tokens=4", "--set", "sparse_ratio=0.02"]
BLIND += ["--set", "selection=window"]
SHORT = ["--max-new-tokens", 24, "--context", 96]
SAMPLED = ["--max-new-tokens", 4, "--context", 24, "--samples", 128, "--sample-tokens", 3, "--batch", 128]
SAMPLED += ["--temperature", 1.5, "--set", "num_assistant_tokens=2", "--draft", "ngram"]


@pytest.fixture
def audit(command, tiny):
    def run(*arguments):
        result = command("audit", tiny.notes, "--target", tiny.target, *SHORT, "--json", *arguments)
        return result.exit_code, json.loads(result.stdout) if result.stdout else result.stderr

    return run


def accept_everything(tree, logits):
    """A broken greedy rule: the whole chain, whatever the target says."""
    tokens = torch.cat([tree.tokens[:, 1:], logits[:, -1].argmax(-1)[:, None]], dim=1)
    path = torch.arange(tree.num_nodes).expand_as(tree.tokens)
    return Acceptance(path, torch.full_like(tree.tokens[:, 0], tree.num_nodes), tokens)


@pytest.mark.parametrize(
    ("draft", "dtype"), [("longspec", "float32"), ("tokenswift", "bfloat16"), ("plain", "float32")]
)
def test_right_decoding_passes(audit, tiny, draft, dtype):
    status, found = audit("--draft", getattr(tiny, draft, draft), "--dtype", dtype)
    assert status == 0
    assert found["verdict"] in (("exact",) if dtype == "float32" else ("exact", "near-tie"))
    (prompt,) = found["prompts"]
    assert prompt["prompt_tokens"] == 96
    assert len(prompt["teacher_forced"]["margins"]) == 24
    if dtype == "float32":
        assert prompt["identical"] and prompt["first_difference"] is None
        assert min(prompt["teacher_forced"]["margins"]) >= 0
    if draft != "plain":
        assert prompt["tau"] > 1, "nothing was accepted, so nothing was audited"


def test_a_greedy_rule_that_accepts_everything_is_caught(audit, command, tiny, monkeypatch):
    """Also in bfloat16, where two right computations may differ."""
    how = [*BLIND, "--dtype", "bfloat16"]
    assert audit(*how)[0] == 0
    monkeypatch.setattr(rules, "accept_greedy", accept_everything)
    status, found = audit(*how)
    assert status == 1 and found["verdict"] == "NOT lossless"
    (prompt,) = found["prompts"]
    checked = prompt["teacher_forced"]
    assert prompt["first_difference"] == checked["first_divergence"]
    assert checked["margins"][checked["first_failure"]] < -checked["eps"]
    assert checked["max_gap"] == -min(checked["margins"])
    shown = command("audit", tiny.notes, "--target", tiny.target, *SHORT, *how)
    assert shown.exit_code == 1 and shown.stdout.rstrip().endswith("NOT lossless")
    assert "tokens are the model's argmax. Largest gap" in shown.stdout  # on one line


def test_near_ties_only_are_no_failure(audit, monkeypatch):
    """The runner-up once, and an eps above its distance: a near-tie in bfloat16, another text in float32."""

    def second_best(tree, logits):
        if logits.shape[1] == 1:  # the first token, which the prompt's own forward gives
            logits = logits.clone().scatter_(-1, logits.argmax(-1, keepdim=True), -100.0)
        return accept_greedy(tree, logits)

    monkeypatch.setattr(rules, "accept_greedy", second_best)
    status, found = audit("--draft", "ngram", "--dtype", "bfloat16", "--eps", 50)
    assert (status, found["verdict"]) == (0, "near-tie")
    assert found["prompts"][0]["teacher_forced"]["margins"][0] < 0
    assert audit("--draft", "ngram", "--dtype", "float32", "--eps", 50)[0] == 1


def broken_walk(tree, scores, noise):
    """Draws from a colder distribution than the target's."""
    return accept_sampled(tree, scores * 3, noise)


def test_a_broken_rule_of_sampling_is_caught(audit, monkeypatch):
    status, found = audit(*SAMPLED)
    assert status == 0 and found["sampling"]["verdict"] == "follows the distribution"
    assert found["sampling"]["num_samples"] == 128
    monkeypatch.setattr(rules, "accept_sampled", broken_walk)
    status, found = audit(*SAMPLED)
    assert status == 1
    assert found["prompts"][0]["verdict"] == "exact", "the greedy rule is not the one that was broken"
    assert found["sampling"]["verdict"] == "does NOT follow the distribution"
    assert found["sampling"]["max_sigma"] > 5


def test_several_prompts_are_named(command, tiny, tmp_path):
    other = tmp_path / "other.txt"
    other.write_text("import os\nimport sys\n" * 20)
    result = command("audit", tiny.notes, other, "--prompt", "def main(", "--target", tiny.target, *SHORT,
                     "--draft", "ngram", env={"COLUMNS": "400"})  # fmt: skip
    rows = [line for line in result.stdout.splitlines() if line.count("exact") == 1 and "none" in line]
    assert result.exit_code == 0 and result.stdout.rstrip().endswith("\nexact")
    assert [row.split()[1] for row in rows] == [str(tiny.notes), str(other), "--prompt"]
