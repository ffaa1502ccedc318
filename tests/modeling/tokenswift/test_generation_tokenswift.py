"""TokenSwift's drafter: every branch can be accepted, and the heads draft from the state at the last accepted token."""

import random
from itertools import product

import pytest
import torch

from hf_longspec.generation.target_modules import TargetEnds
from hf_longspec.modeling.tokenswift.generation_tokenswift import TokenSwiftDrafter
from tests.modeling.calls import LENGTHS, NEVER
from tests.modeling.tokenswift.oracle_heads import with_oracle
from tests.modeling.tokenswift.restated_heads import restated_heads
from tests.rounding import rounding
from tests.tiny_targets import random_tokenswift_draft
from tests.valid_tree import check_tree
from tests.watching import after

MODES = {"verify_hidden": {"self_draft": "verify_hidden"}}
MODES |= {"full": {"self_draft": "partial_kv", "partial_kv_policy": "full"}}


@pytest.fixture
def watch(monkeypatch):
    """One entry per iteration: the texts that are committed or about to be, the tree, and the verification."""
    records = []

    def note(tree, drafter, root):
        check_tree(tree)
        records.append({"generated": list(map(list, drafter.binding.rule.sequences.generated)), "tree": tree})

    after(monkeypatch, TokenSwiftDrafter, "propose", note)
    seen = lambda _, own, verification: records and records[-1].update(verification=verification)  # noqa: E731
    after(monkeypatch, TokenSwiftDrafter, "observe", seen)
    return records


@pytest.mark.parametrize("mode", ["verify_hidden", "full"])
def test_every_branch_can_be_accepted(plain_run, watch, mode):
    """With heads that know the text, every combination of ranks in turn, and every depth at which they go wrong."""
    leaves = list(product(range(3), repeat=3))
    cases = leaves + [path[:depth] for depth in (0, 1, 2) for path in leaves[4:5]]
    first = 1 if mode == "full" else 0  # the target's own prediction, which is always right under `full`
    run = plain_run("llama", (21,), max_new_tokens=1 + 5 * len(cases), eos_token_id=NEVER)

    def ranks(iteration, row, level):
        case = cases[iteration % len(cases)]
        return case[level] if level < len(case) else None

    draft = with_oracle(random_tokenswift_draft(run.model, **MODES[mode]), run.generated, ranks)
    assert run.again(draft).tolist() == run.sequences.tolist()
    assert len(watch) > len(cases)
    widths = [1] * first + [3, 3, 3]
    nodes = [path for depth in range(len(widths) + 1) for path in product(*map(range, widths[:depth]))]
    for record, case in zip(watch, cases, strict=False):
        path = (0,) * first + case
        verification = record["verification"]
        assert verification.num_nodes.host == (len(path) + 1,)
        expected = [nodes.index(path[:depth]) for depth in range(len(path) + 1)]
        assert verification.path[0, : len(path) + 1].tolist() == expected


@pytest.mark.parametrize(
    ("name", "mode", "sequential", "tokens"),
    [
        ("llama", "full", False, None),
        ("cohere2", "verify_hidden", False, 11),
        ("deepseek_v3", "full", False, None),
        ("llama", "verify_hidden", True, None),
        ("gemma2", "full", True, 7),
        ("granite", "verify_hidden", True, 9),
    ],
)
def test_candidates_are_the_best_of_each_head_at_the_last_accepted_token(
    plain_run, watch, name, mode, sequential, tokens
):
    """Every node's children against a forward over the whole text and heads restated in float64."""
    run = plain_run(name, LENGTHS, max_new_tokens=10, eos_token_id=NEVER)
    settings = MODES[mode] | {"tree_branching": [2, 3, 1, 2], "sequential": sequential}
    draft = random_tokenswift_draft(run.model, **settings)
    if tokens is not None:
        draft.set_vocabulary(random.Random(tokens).sample(range(run.model.config.vocab_size), tokens))
    assert run.again(draft).tolist() == run.sequences.tolist()
    ends, own = TargetEnds(run.model), int(mode == "full")
    layers = run.model.config.num_hidden_layers + draft.config.num_heads
    caught = []
    handle = run.model.model.norm.register_forward_pre_hook(lambda module, inputs: caught.append(inputs[0]))

    def logits_after(hidden, path):
        """Return the result of the last head that has seen all tokens of a path, whose first is the root."""
        embedded = torch.cat([hidden[None], ends.embed(torch.tensor([path]))[0]]) if sequential else None
        sizes = len(path), draft.config.rms_norm_eps, draft.config.chained
        states = restated_heads(draft.state_dict(), "heads.layers.", hidden.expand(len(path) + 1, -1), *sizes, embedded)
        logits = ends.head(states[-1, 0].float())
        return torch.full_like(logits, -torch.inf).index_copy(0, draft.token_ids, logits[draft.token_ids])

    checked = 0
    for record in watch[:3]:
        tree = record["tree"]
        for row, prompt in enumerate(run.inputs["input_ids"]):
            text = [*prompt[run.inputs["attention_mask"][row].bool()].tolist(), *record["generated"][row]]
            with torch.no_grad():
                caught.clear()
                own_logits = run.model(torch.tensor([text]), use_cache=False).logits[0, -1]
                hidden = caught[0][0, -1 - (1 - own)]
                for node in range(tree.num_nodes):
                    children = (tree.parents[row] == node).nonzero().flatten()
                    if not len(children):
                        continue
                    path = tree.tokens[row][tree.mask[row, node]].tolist()[own:]  # in level order, from the root down
                    scores = logits_after(hidden, path) if path else own_logits
                    found = scores[tree.tokens[row, children]]
                    best = scores.topk(len(children)).values
                    torch.testing.assert_close(found, best, **rounding(scores, layers))
                    checked += 1
    handle.remove()
    assert checked >= 3 * 3 * (1 + 3 + 3)
