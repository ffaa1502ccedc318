"""The partial cache against one list of positions per row, layer and head; what it copies; when it is built."""

import pytest

from hf_longspec.modeling.tokenswift.generation_tokenswift import TokenSwiftDrafter
from tests.attention_backends import reference  # noqa: F401 - registers its name
from tests.modeling.tokenswift.oracle_heads import with_oracle
from tests.modeling.tokenswift.restated_partial_kv import Attended, Slots
from tests.tiny_targets import random_tokenswift_draft
from tests.watching import after

LENGTHS = (57, 3, 39)
NEVER = 999  # no token of the tiny targets
BUDGET, RECENT = 21, 5
SMALL = {"self_draft": "partial_kv", "partial_kv_budget": BUDGET, "partial_kv_recent": RECENT}
REACH = 5  # levels of the default tree, and the token after them


@pytest.fixture
def watch(monkeypatch):
    """A list that gets one entry per commit: the rows that were due, the verification, and the entries after it."""
    records = []
    note = lambda _, own, seen: records.append({"due": own.due, "verification": seen, "held": held(own)})  # noqa: E731
    after(monkeypatch, TokenSwiftDrafter, "observe", note)
    return records


def held(drafter):
    """Positions that row, layer and head hold, in slot order: found by comparing keys and values bit by bit."""
    found, cache = {}, drafter.binding.cache
    for index in drafter.partial.sparse_layers:
        full, own = cache.layers[index], drafter.partial.layers[index]
        for row, (length, used) in enumerate(zip(cache.lengths.host, drafter.partial.used.lengths.host, strict=True)):
            for head in range(full.keys.shape[1]):
                match = (own.keys[row, head, :used, None] == full.keys[row, head, None, :length]).all(-1)
                match &= (own.values[row, head, :used, None] == full.values[row, head, None, :length]).all(-1)
                assert match.sum(1).tolist() == [1] * used
                found[row, index, head] = match.int().argmax(1).tolist()
    return found


def lucky(iteration, row, level):
    """Some iterations accept much, others nothing, and no two rows the same."""
    return [0, 2, None, 1][(iteration * 7 + row * 3 + level * level) % 4]


def generate(plain_run, name, lengths=LENGTHS, new=48, ranks=lucky, **settings):
    """A greedy generation, checked against the bare model's; the texts of all rows, and the draft."""
    run = plain_run(name, lengths, max_new_tokens=new, eos_token_id=NEVER)
    draft = with_oracle(random_tokenswift_draft(run.model, **(SMALL | settings)), run.generated, ranks)
    assert run.again(draft).tolist() == run.sequences.tolist()
    padded = zip(run.inputs["input_ids"], run.inputs["attention_mask"].bool(), run.generated, strict=True)
    return run.model, [prompt[keep].tolist() + text for prompt, keep, text in padded], draft


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("qwen3", {"partial_kv_budget": 26, "partial_kv_recent": 12}),
        ("gemma3", {"partial_kv_recent": 0}),
        ("deepseek_v3", {}),
    ],
)
def test_buffers_hold_what_a_list_per_row_layer_and_head_holds(plain_run, watch, name, settings):
    """Over a whole generation: which positions, their keys and values bit by bit, and which rows are built when."""
    model, texts, _ = generate(plain_run, name, **settings)
    budget, recent = settings.get("partial_kv_budget", BUDGET), settings.get("partial_kv_recent", RECENT)
    one_for_all = name == "deepseek_v3"  # heads share their cache, and with it the selection
    slots, builds = {}, [0] * len(LENGTHS)
    for record in watch:
        verification = record["verification"]
        due = []
        for row, text in enumerate(texts):
            prefix, kept = verification.prefix_lengths.host[row], verification.num_nodes.host[row]
            places = [place for place in record["held"] if place[0] == row]
            if any(place not in slots or slots[place].room < REACH for place in places):
                due.append(row)
                builds[row] += 1
                query = prefix + max(kept, 1) - 1
                attended = Attended(model, text[: query + 1])
                for _, layer, head in places:
                    if one_for_all:
                        scores = attended.weights(layer, query, prefix)
                    else:
                        scores = attended.scores(layer, head, query, prefix)
                    slots[row, layer, head] = Slots(scores, budget, recent)
            for place in places:
                for position in range(prefix, prefix + kept):
                    slots[place].add(position)
                assert record["held"][place] == slots[place].positions
        assert record["due"] == due
        assert (verification.capture is None) == (not due)
    assert min(builds) >= 2 and max(builds) >= 3
    assert len(watch) > 2 * sum(bool(record["due"]) for record in watch)


def test_static_buffers_stay_as_the_prompt_left_them(plain_run, watch):
    generate(plain_run, "llama", new=24, partial_kv_policy="static")
    assert all(record["held"] == watch[0]["held"] for record in watch)
    assert [record["due"] for record in watch if record["due"]] == [[0, 1, 2]]
    for (row, _, _), positions in watch[0]["held"].items():
        # the last prompt token came after the queries that scored the others
        assert set(positions) <= set(range(LENGTHS[row] - 1))
        assert len(positions) == min(BUDGET, LENGTHS[row] - 1)
