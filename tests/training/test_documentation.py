"""The calls in docs/training.md, as they stand but for their sizes."""

import re
from pathlib import Path

import pytest

from tests.tiny_targets import write_mtp_layers

PROJECT = Path(__file__).resolve().parents[2]
SMALLER = {"max_steps=2000": "max_steps=1", "args, 1024)": "args, 40)", "max_new_tokens=64": "max_new_tokens=4"}
SMALLER |= {"size=4": "size=1"}


def test_the_calls_run(tmp_path, monkeypatch, capsys):
    pytest.importorskip("peft")
    text = (PROJECT / "docs" / "training.md").read_text(encoding="utf-8")
    train, heads, eagle3, export, dflash, mtp, adapt = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    for size, smaller in SMALLER.items():
        assert size in train
        train = train.replace(size, smaller)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "hub_cards").symlink_to(PROJECT / "hub_cards")
    (tmp_path / "notes.txt").write_text((PROJECT / "LICENSE").read_text(encoding="utf-8")[:1200], encoding="utf-8")
    names = {}
    exec(train, names)  # noqa: S102 - the documentation's own code
    assert "longspec: tau" in capsys.readouterr().out
    assert len(names["rows"]) > 6 and names["rows"][-1]["input_ids"][-1] == names["tokenizer"].eos_token_id
    own = dict(names)
    write_mtp_layers(own["target"], tmp_path)
    own["target"].config._name_or_path = str(tmp_path)
    for block in (heads, eagle3, export, dflash, mtp):
        exec(re.sub(r"max_steps=\d+", "max_steps=1", block), own)  # noqa: S102 - likewise
    for name in ("heads", "eagle3", "dflash", "mtp"):
        assert (tmp_path / "runs" / name / "checkpoint-1" / "model.safetensors").is_file()
    assert (tmp_path / "runs" / "eagle3-for-vllm" / "model.safetensors").is_file()
    exec(adapt, names)  # noqa: S102 - likewise
    assert (tmp_path / "runs" / "draft" / "checkpoint-1" / "adapter_model.safetensors").is_file()
