"""Long texts with marks: the counts at a mark, the baselines after it, and the table."""

import hf_longspec
from benchmarks.decoder import MODES, Decoding
from benchmarks.long_generation import LongBenchmark, LongRow
from benchmarks.runner import Run
from hf_longspec.cli.files import read_records
from hf_longspec.cli.measuring import HF, PLAIN, HfMethod


def test_every_row_has_its_marks(target, prompts, tmp_path):
    plain = hf_longspec.PlainDraftModel.from_target(target)
    ngram = hf_longspec.NgramDraftModel.from_target(target, num_assistant_tokens=3, ngram_candidates=1)
    benchmark = LongBenchmark(target, prompts.tokens[:1, :20], [15, 30])
    sampled = Decoding(temperature=1.0, min_p=0.05, penalty=1.3, window=9)
    baselines = {HF: HfMethod(), PLAIN: plain}
    with Run(tmp_path / "long.jsonl", "long", 60) as results:
        for name, draft, tokens, decoding in (("mine", ngram, 30, sampled), (PLAIN, plain, 30, sampled),
                                              ("mine", ngram, 15, MODES["greedy"])):  # fmt: skip
            row = LongRow(name, draft, tokens, decoding)
            benchmark.measure(row, baselines if draft is plain else {}, 5, results)
    records = read_records(tmp_path / "long.jsonl")
    rows = [record for record in records if record["kind"] == "long"]
    assert [(row["method"], row["mode"], row["penalised"], row["mark"]) for row in rows] == [
        ("mine", "sample", True, 15),
        ("mine", "sample", True, 30),
        (PLAIN, "sample", True, 15),
        (PLAIN, "sample", True, 30),
        ("mine", "greedy", False, 15),
    ]
    assert all(row["tau"] == 1.0 and row["alpha"] == row["beta"] == 0.0 for row in rows if row["method"] == PLAIN)
    assert all(row["tokens_per_second"] > 0 for row in rows)
    baselines = [(row["method"], row["mark"]) for row in records if row["kind"] == "baseline"]
    assert baselines == [(HF, 30), (PLAIN, 30), (HF, 15), (PLAIN, 15)]
