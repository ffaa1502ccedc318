"""examples/quicktour.ipynb: its cells run in order, and print what is committed."""

import json
import shutil

import pytest

from tests.docs.blocks import PROJECT, lasting

NOTEBOOK = json.loads((PROJECT / "examples" / "quicktour.ipynb").read_text(encoding="utf-8"))
CELLS = [cell for cell in NOTEBOOK["cells"] if cell["cell_type"] == "code"]


def outputs_of(cell):
    return "".join("".join(output.get("text", "")) for output in cell["outputs"])


@pytest.mark.parametrize("sizes", ["400, 16", pytest.param("2048, 128", marks=pytest.mark.soak)])
def test_the_cells_run(sizes, tmp_path, monkeypatch, capsys):
    """They print what is committed, unless they run on less text."""
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    shutil.copytree(PROJECT / "hub_cards", tmp_path / "hub_cards")
    (tmp_path / "examples").mkdir()
    monkeypatch.chdir(tmp_path / "examples")
    names = {}
    for cell in CELLS:
        code = "".join(cell["source"])
        code = code.replace("NEW_TOKENS = 2048, 128", f"NEW_TOKENS = {sizes}")
        exec(compile(code, "quicktour.ipynb", "exec"), names)  # noqa: S102 - our own notebook
        (words, taus), (printed, measured) = map(lasting, (outputs_of(cell), capsys.readouterr().out))
        assert "another text" not in printed and "sampled text: False" not in printed
        assert sizes != "2048, 128" or (words == printed and taus == pytest.approx(measured, rel=0.05))
    assert set(names["drafts"]) == {"n-grams", "SpecAttn", "LongSpec"}
    assert all(draft.last_speculation.num_draft_tokens > 0 for draft in names["drafts"].values())
    (figure,) = map(matplotlib.pyplot.figure, matplotlib.pyplot.get_fignums())
    assert [len(panel.patches) > 0 for panel in figure.axes] == [True] * 3
    matplotlib.pyplot.close(figure)


def test_the_committed_output_is_that_of_one_run():
    assert [cell["execution_count"] for cell in CELLS] == list(range(1, len(CELLS) + 1))
    shown = "".join(map(outputs_of, CELLS))
    assert shown.count("same text") == 5 and "another text" not in shown
    assert "same sampled text: True" in shown and "exact: 128 of 128" in shown
    assert any("image/png" in output.get("data", {}) for cell in CELLS for output in cell["outputs"])
    assert not [output for cell in CELLS for output in cell["outputs"] if output["output_type"] == "error"]
    assert str(PROJECT) not in json.dumps(NOTEBOOK) and "/home/" not in json.dumps(NOTEBOOK)
