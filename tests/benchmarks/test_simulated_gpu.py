"""`benchmarks/gpu.py` from a checkout, on a simulated CUDA device: the command that a GPU runs, with captured steps."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.gpu_attention import LOWER_BOUND
from benchmarks.gpu_goals import COMPILE, FUSED, GRAPH, OFF
from benchmarks.gpu_run import SMOKE
from benchmarks.records import read_records
from hf_longspec.cli.measuring import HF, PLAIN
from tests.benchmarks.test_gpu import BARE, FEW_BITS, FIRST, HIDDEN, OTHERS, of, warnings_of
from tests.simulated_cuda import why_not

pytest.importorskip("triton", reason="captured steps need Triton's kernels")
pytestmark = pytest.mark.soak  # `make test-torch-min` runs it

TRITON = "hf_longspec_triton"
KERNELS = "captures,kernels,baselines,products"
MINUTES = 25  # of a run at most, on a machine that does other things meanwhile


def run(tmp_path, sections, dtype):
    """The lines of a run where only torch, triton and transformers are installed (`-S`: not even this package)."""
    if (reason := why_not()) is not None:
        pytest.skip(reason)
    script, output = tmp_path / "bare.py", tmp_path / "gpu.jsonl"
    script.write_text(BARE.replace("{hidden}", repr(HIDDEN)))
    packages = next(path for path in sys.path if path.endswith("site-packages"))
    program = Path(__file__).with_name("simulated_gpu.py")
    options = ["--sections", sections, "--dtype", dtype, "--contexts", "96", "--threads", "1", "--output", output]
    options += ["--minutes", MINUTES]
    command = [sys.executable, "-S", script, json.dumps([list(map(str, (tmp_path, program, *options)))])]
    environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": packages, "OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "1"}
    limit = {"timeout": 60 * MINUTES + 60}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, **limit)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "could not be captured" not in done.stdout + done.stderr
    records = read_records(output)
    (ceiling,) = of(records, "gpu_ceilings")
    assert ceiling["tb_per_second"] == max(ceiling["read_tb_per_second"], ceiling["copy_tb_per_second"])
    assert ceiling["gpu"] == "simulated" and records[-1]["kind"] == "end"
    assert not of(records, "failed")
    return records


def check_modes(rows, names, modes, hf_modes=()):
    """Every row was run in every mode, and those of captured steps captured and replayed."""
    expected = [(name, mode) for name in names for mode in (hf_modes if name == HF else modes)]
    assert [(row["draft"], row["mode"]) for row in rows] == expected
    for row in rows:
        is_captured = row["mode"] in (GRAPH, FUSED, COMPILE)
        assert bool(row["captures"]) == bool(row["replays"]) == is_captured and not warnings_of(row)


def test_plain_specattn_and_longspec_as_they_are_and_captured(tmp_path):
    """Every timed iteration speculates, and the text is that of the loop without a draft; exact, as in float32."""
    records = run(tmp_path, "forwards,iterations,uncaptured,compiled,drafts,few bits", "float32")
    check_modes(of(records, "iteration", section="iterations"), FIRST, (FUSED, GRAPH), ("sdpa",))
    check_modes(of(records, "iteration", section="uncaptured"), FIRST[:2], (OFF,), ("eager",))
    check_modes(of(records, "iteration", section="compiled"), FIRST[:2], (COMPILE,), ("static cache",))
    check_modes(of(records, "iteration", section="drafts"), OTHERS, (FUSED,))
    check_modes(of(records, "iteration", section="few bits"), FEW_BITS, (FUSED,))
    for row in of(records, "iteration"):
        assert row["backend"] == (row["mode"] if row["draft"] == HF else TRITON)
        assert row["same_tokens"] == SMOKE.tokens and row["ms"]["median"] > 0 and row["floor_ms"] > 0
        few = {PLAIN: 0, HF: 0, "n-grams": row["speculated"]}  # these draft where the text repeats itself
        assert row["speculated"] == few.get(row["draft"], row["iterations"])
    for mode in (OFF, GRAPH, FUSED):  # a mode replays no graphs of another one
        found = of(records, "forward", forward="ours", mode=mode)
        assert [(row["nodes"], row["captures"]) for row in found] == [(n, int(mode != OFF)) for n in SMOKE.nodes]


def test_kernels(tmp_path):
    """Triton's kernels are timed as graphs; no section ends early."""
    records = run(tmp_path, KERNELS, "bfloat16")
    assert {line["section"] for line in of(records, "section")} == {"ceilings", *KERNELS.split(",")}
    assert len(of(records, "capture")) == 5
    kernels = of(records, "kernel", backend=TRITON)
    assert {row["nodes"] for row in kernels} == set(SMOKE.nodes) and {row["how"] for row in kernels} == {"graph"}
    products = of(records, "product", kernel="torch")
    assert len(products) == len(SMOKE.vectors) * len(SMOKE.matrices) and {row["how"] for row in products} == {"graph"}
    assert LOWER_BOUND in {row["baseline"] for row in of(records, "baseline")}
