"""examples/quicktour.ipynb: its cells run in order, on fewer tokens, and what is committed came from them."""

import json
import shutil

import pytest

from tests.docs.blocks import PROJECT

NOTEBOOK = json.loads((PROJECT / "examples" / "quicktour.ipynb").read_text(encoding="utf-8"))
CELLS = [cell for cell in NOTEBOOK["cells"] if cell["cell_type"] == "code"]
SIZES = {"PROMPT_TOKENS, NEW_TOKENS = 4096, 256": "PROMPT_TOKENS, NEW_TOKENS = 64, 12"}
SIZES |= {"max_new_tokens=32": "max_new_tokens=6"}


def outputs_of(cell):
    return "".join("".join(output.get("text", "")) for output in cell["outputs"])


def test_the_cells_run(tmp_path, monkeypatch, capsys):
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    shutil.copytree(PROJECT / "hub_cards", tmp_path / "hub_cards")
    (tmp_path / "examples").mkdir()
    monkeypatch.chdir(tmp_path / "examples")
    code = "\n".join("".join(cell["source"]) for cell in CELLS)
    for size, smaller in SIZES.items():
        assert size in code
        code = code.replace(size, smaller)
    names = {}
    exec(compile(code, "quicktour.ipynb", "exec"), names)  # noqa: S102 - our own notebook
    printed = capsys.readouterr().out
    assert printed.count("same text") == 5 and "another text" not in printed
    assert "same sampled text: True" in printed and "exact: 12 of 12 tokens" in printed
    assert set(names["drafts"]) == {"n-grams", "SpecAttn", "LongSpec"}
    assert all(draft.last_speculation.num_draft_tokens > 0 for draft in names["drafts"].values())
    (figure,) = map(matplotlib.pyplot.figure, matplotlib.pyplot.get_fignums())
    assert [len(panel.patches) > 0 for panel in figure.axes] == [True] * 3
    matplotlib.pyplot.close(figure)


def test_the_committed_output_is_that_of_one_run():
    assert [cell["execution_count"] for cell in CELLS] == list(range(1, len(CELLS) + 1))
    shown = "".join(map(outputs_of, CELLS))
    assert shown.count("same text") == 5 and "another text" not in shown
    assert "same sampled text: True" in shown and "exact: 256 of 256" in shown
    assert any("image/png" in output.get("data", {}) for cell in CELLS for output in cell["outputs"])
    assert not [output for cell in CELLS for output in cell["outputs"] if output["output_type"] == "error"]
    assert str(PROJECT) not in json.dumps(NOTEBOOK) and "/home/" not in json.dumps(NOTEBOOK)
