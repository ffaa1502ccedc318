"""Steps run through the kernels' launches, and both sides continue the same text."""

import pytest
import torch

from benchmarks import host
from benchmarks.runner import Run
from hf_longspec.attention_backends.triton.config import INTERPRETED
from hf_longspec.cli.files import read_records
from hf_longspec.generation.cache import CACHE_NAME
from hf_longspec.generation.draft_tree import DraftTree

if not INTERPRETED:
    pytest.skip("where there is a GPU, the kernels take no tensors of the CPU", allow_module_level=True)

SMALL = host.SHAPE | {"num_hidden_layers": 3}


def test_a_row_whose_steps_launched_one_kernel_per_layer(tmp_path):
    with Run(tmp_path / "host.jsonl", "host", 600, quiet=True) as results:
        host.measure(results, SMALL, repeats=2)
    (row,) = [record for record in read_records(tmp_path / "host.jsonl") if record["kind"] == "host"]
    assert row["launches_per_step"] == row["layers"] == 3
    assert all(row[name]["count"] == 2 and row[name]["median"] > 0 for name in ("loop_us", "stock_us", "ratio"))


@torch.no_grad()
def test_both_sides_continue_the_same_text():
    """With the kernels of the installed backend, before the launches are replaced."""
    torch.manual_seed(0)
    case = host.HostCase(SMALL)
    position = torch.tensor([[host.PREFIX]])
    stock = case.model(input_ids=case.token, position_ids=position, **{CACHE_NAME: case.stock}).logits
    case.cache.set_lengths([host.PREFIX])
    with case.target.attention():
        ours = case.target.verify(DraftTree.root_only(case.token[0]), case.cache).logits
    torch.testing.assert_close(ours, stock, rtol=1e-4, atol=1e-5)
