import pytest
import torch

import hf_longspec
from hf_longspec.bench import decoding
from hf_longspec.bench.decoding import Decoder, HfMethod
from hf_longspec.bench.engine import HF, PLAIN, Cell, EngineBenchmark, order_of_cells
from hf_longspec.bench.prefill import prefill, refuse_windows, row_windows
from hf_longspec.bench.progress import Progress
from hf_longspec.bench.reports import engine_report
from hf_longspec.bench.results import ResultFile, read_records
from hf_longspec.bench.timing import TimeGuard, TokenClock
from hf_longspec.testing import tiny_target


def make_drafts(model):
    return {
        PLAIN: hf_longspec.PlainDraftModel.from_target(model),
        "SpecAttn": hf_longspec.SpecAttnDraftModel.from_target(model, num_assistant_tokens=3, sparse_min_tokens=8),
    }


def measure(target, prompts, tmp_path, guard=None, make_drafts=make_drafts):
    benchmark = EngineBenchmark({"float32": target}, make_drafts, prompts, tokens=9, repeats=2, bandwidth=10.0)
    with ResultFile(tmp_path / "engine.jsonl", "engine", engine_report, guard or TimeGuard(1), {}) as results:
        benchmark.measure(Cell(40, 2, "float32"), results, Progress(1, quiet=True))
    return read_records(tmp_path / "engine.jsonl")


@pytest.mark.parametrize("name", [HF, PLAIN, "SpecAttn"])
@pytest.mark.parametrize("rows", [slice(0, 1), slice(1, 3)], ids=str)
def test_text_from_a_prefilled_cache_is_that_of_the_whole_prompt(target, prompts, name, rows):
    prompt = prompts.prompt(rows, 40)
    truth = target.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=9, do_sample=False)
    decoder = Decoder(target, prompts, tokens=9)
    for _ in range(2):  # the second run finds the buffer of the first
        run = decoder.run({HF: HfMethod(), **make_drafts(target)}[name], rows, 40, "greedy", seed=0)
        assert torch.equal(run.text, truth[:, 40:])
        assert run.tokens == 8 * len(truth)
        assert run.seconds > 0


def test_prompt_lookup_is_clocked_from_its_first_tokens_on(target, prompts):
    """Several tokens arrive at once: those of the first arrival are not decoded on the clock, all others are."""
    prompt = prompts.prompt(slice(0, 1), 40)
    truth = target.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=9, do_sample=False)
    method = HfMethod({"prompt_lookup_num_tokens": 3}, max_batch=1)
    run = Decoder(target, prompts, tokens=9).run(method, slice(0, 1), 40, "greedy", seed=0)
    assert torch.equal(run.text, truth[:, 40:])
    assert 5 <= run.tokens <= 8 and 1 <= run.steps <= run.tokens and run.shares == {}


def test_methods_that_decode_single_prompts_are_left_out_of_batches(target, prompts, tmp_path):
    def with_lookup(model):
        return make_drafts(model) | {"lookup": HfMethod({"prompt_lookup_num_tokens": 3}, max_batch=1)}

    records = measure(target, prompts, tmp_path, make_drafts=with_lookup)
    assert {record["method"] for record in records if record["kind"] == "decoding"} == {HF, PLAIN, "SpecAttn"}


def test_control_c_is_raised_and_nothing_is_measured(target, prompts, monkeypatch):
    """With a draft, `generate` returns what it has."""

    class Interrupted(TokenClock):
        def put(self, value):
            super().put(value)
            if self.num_tokens == 3:
                raise KeyboardInterrupt

    monkeypatch.setattr(decoding, "TokenClock", Interrupted)
    for method in (HfMethod(), *make_drafts(target).values()):
        with pytest.raises(KeyboardInterrupt):
            Decoder(target, prompts, tokens=9).run(method, slice(0, 1), 40, "greedy", seed=0)


def test_a_run_leaves_the_prompts_as_they_were(target, prompts):
    before = [part.clone() for layer in prompts.layers for part in layer]
    decoder = Decoder(target, prompts, tokens=5)
    for draft in (HfMethod(), *make_drafts(target).values()):
        decoder.run(draft, slice(0, 2), 50, "sample", seed=1)
    assert all(torch.equal(a, b) for a, b in zip(before, (p for layer in prompts.layers for p in layer), strict=True))


def test_same_seed_same_sampled_text_in_the_plain_loop(target, prompts):
    decoder, plain = Decoder(target, prompts, tokens=6), make_drafts(target)[PLAIN]
    first, second, other = (decoder.run(plain, slice(0, 1), 40, "sample", seed).text for seed in (1, 1, 2))
    assert torch.equal(first, second)
    assert not torch.equal(first, other)


def test_every_method_is_measured_in_both_modes(target, prompts, tmp_path):
    records = measure(target, prompts, tmp_path)
    rows = [record for record in records if record["kind"] == "decoding"]
    assert {(row["mode"], row["method"]) for row in rows} == {
        (mode, method) for mode in ("sample", "greedy") for method in (HF, PLAIN, "SpecAttn")
    }
    for row in rows:
        assert row["tokens_per_second"]["count"] == 2
        assert 1 <= row["tau"] <= 4
        assert (row["tau"] == 1) or row["method"] == "SpecAttn"
        assert (row["draft_state_bytes"] > 0) == (row["method"] == "SpecAttn")
        assert row["method"] == HF or sum(row["shares"].values()) == pytest.approx(1, abs=1e-2)
    assert records[-1]["kind"] == "end"
    assert "| float32 | 40 | 2 | SpecAttn |" in (tmp_path / "engine.md").read_text()


def test_wrong_text_is_not_timed(target, prompts, tmp_path):
    other = tiny_target("llama", seed=1)

    class Wrong(hf_longspec.PlainDraftModel):
        """Decodes with other weights."""

        def longspec_decoding(self, model, input_ids, **kwargs):
            return super().longspec_decoding(other, input_ids, **kwargs)

    def wrong_drafts(model):
        return {PLAIN: Wrong.from_target(model)}

    records = measure(target, prompts, tmp_path, make_drafts=wrong_drafts)
    assert [record["kind"] for record in records] == ["environment", "skipped", "end"]
    assert "plain loop emits another float32 greedy text" in records[1]["reason"]


@pytest.mark.parametrize(("minutes", "reason"), [(0.0, "no time left"), (1e-6, "it would take")])
def test_what_does_not_fit_is_left_out(target, prompts, tmp_path, minutes, reason):
    records = measure(target, prompts, tmp_path, TimeGuard(minutes, now=lambda: 0.0))
    assert [record["kind"] for record in records] == ["environment", "skipped", "end"]
    assert reason in records[1]["reason"]


def test_rounded_prompts_keep_their_tokens(prompts):
    rounded = prompts.to(torch.bfloat16)
    assert rounded.tokens is prompts.tokens
    assert rounded.layers[0][0].dtype == torch.bfloat16


def test_windows_are_refused():
    with pytest.raises(ValueError, match="sliding-window or latent layers"):
        refuse_windows(tiny_target("mistral"))
    with pytest.raises(ValueError, match="sliding-window or latent layers"):
        prefill(tiny_target("deepseek_v3"), torch.ones(1, 4, dtype=torch.long))


def test_prompts_of_the_repeats_stay_in_range():
    for rows in row_windows(5, 3, repeats=7):
        assert 0 <= rows.start < rows.stop <= 5


def test_cells_begin_with_the_longest_context():
    cells = order_of_cells([16, 64], [1, 4], ["float32", "bfloat16"])
    assert [str(cell) for cell in cells[:3]] == [
        "float32, 64 tokens, batch 1",
        "bfloat16, 64 tokens, batch 1",
        "float32, 16 tokens, batch 1",
    ]
    assert len(cells) == 8


def test_times_are_dropped_when_a_later_turn_emits_other_text(target, prompts, tmp_path, monkeypatch):
    run = Decoder.run

    def run_with_a_slip(self, draft, rows, context, mode, seed, tokens=None):
        result = run(self, draft, rows, context, mode, seed, tokens)
        if draft is not None and mode == "greedy" and seed == 1:  # in the second turn only
            result.text[0, -1] += 1
        return result

    monkeypatch.setattr(Decoder, "run", run_with_a_slip)
    records = measure(target, prompts, tmp_path)
    assert [record["kind"] for record in records] == ["environment", "skipped", "end"]
    assert "times dropped" in records[1]["reason"]
    assert "turn 1" in records[1]["reason"]
