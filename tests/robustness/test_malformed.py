"""A draft's folder with something wrong in it: one line that says what, as ValueError or OSError, and no draft."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModel

from tests.robustness.drafts import make_draft
from tests.tiny_targets import tiny_target

TRAINED = ("longspec", "tokenswift")


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Sound folders by kind."""
    target, folder = tiny_target("llama"), tmp_path_factory.mktemp("drafts")
    for kind in ("specattn", *TRAINED):
        make_draft(kind, target).save_pretrained(folder / kind)
    return folder


@pytest.fixture
def broken(saved, tmp_path):
    """`broken(kind)`: a copy to break."""

    def make(kind):
        return shutil.copytree(saved / kind, tmp_path / kind)

    return make


def edit(path, **changes):
    """Set or, with None, remove keys of a JSON file."""
    content = {key: value for key, value in (json.loads(path.read_text()) | changes).items() if value is not None}
    path.write_text(json.dumps(content))


def cut(path):
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])


def refuses(folder, error, match):
    """Loading fails with one line, by the Auto class and by the class of the draft."""
    with pytest.raises(error, match=match) as caught:
        AutoModel.from_pretrained(folder)
    assert len(str(caught.value).splitlines()) == 1
    assert type(caught.value) in (ValueError, OSError)


# Drafts share what reads a folder, so each mistake is made in a folder of one kind.
@pytest.mark.parametrize(("kind", "name"), [("specattn", "config.json"), ("longspec", "generation_config.json")])
def test_a_file_that_was_cut_short(broken, kind, name):
    folder = broken(kind)
    cut(folder / name)
    refuses(folder, OSError, f"{name}' is not a valid JSON file")


@pytest.mark.parametrize("kind", ["specattn", "tokenswift"])
def test_no_settings_are_the_defaults(broken, kind):
    folder = broken(kind)
    (folder / "generation_config.json").unlink()
    draft = AutoModel.from_pretrained(folder)
    name, default = next(iter(type(draft).settings.items()))
    assert draft.config.model_type == kind and getattr(draft.generation_config, name) == default


def test_model_type(broken):
    """Worded by transformers: what it does not know may be newer than it is."""
    folder = broken("specattn")
    edit(folder / "config.json", model_type="no_such_draft")
    with pytest.raises(ValueError, match="model type `no_such_draft`"):
        AutoModel.from_pretrained(folder)
    edit(folder / "config.json", model_type=None)
    refuses(folder, ValueError, "Should have a `model_type` key in its config.json")


@pytest.mark.parametrize(
    ("kind", "changes", "match"),
    [
        ("specattn", {"vocab_size": "x"}, "vocab_size='x'"),
        ("longspec", {"vocab_size": True}, "vocab_size=True"),
        ("specattn", {"vocab_size": None}, "vocab_size=0"),
        ("longspec", {"target": "llama"}, "target='llama'"),
        ("longspec", {"window": "eight"}, "window='eight'"),
        ("longspec", {"noise_range": 3}, "noise_range=3"),
        ("longspec", {"rms_norm_eps": "small"}, "rms_norm_eps='small'"),
        ("longspec", {"cross_attention": "yes"}, "cross_attention='yes'"),
        ("longspec", {"hidden_act": "nope"}, "hidden_act='nope'"),
        ("longspec", {"num_attention_heads": 3}, "shapes of"),
        ("tokenswift", {"num_heads": -1}, "num_heads=-1"),
        ("tokenswift", {"num_heads": 10**9}, "num_heads=1000000000.* 256"),
        ("tokenswift", {"hidden_size": 10**9}, "hidden_size=1000000000.* 131,072"),
        ("longspec", {"window": 10**9}, "window=1000000000.* 1,048,576"),
        ("longspec", {"noise_range": [1, 10**9]}, r"noise_range=\[1, 1000000000\].* 4,096"),
        ("tokenswift", {"num_heads": 5}, " 9 .*weights"),
        ("tokenswift", {"hidden_size": None}, "shapes of"),
    ],
    ids=str,
)
def test_values(broken, kind, changes, match):
    folder = broken(kind)
    edit(folder / "config.json", **changes)
    refuses(folder, ValueError, match)


@pytest.mark.parametrize(
    ("kind", "change", "match"),
    [
        ("longspec", cut, "weights in .* cannot be read"),
        ("tokenswift", lambda path: torch.save({"a": torch.ones(2)}, path), "weights in .* cannot be read"),
        ("longspec", Path.unlink, "no file named model.safetensors"),
    ],
    ids=["cut short", "a pickle", "missing"],
)
def test_unreadable_weights(broken, kind, change, match):
    folder = broken(kind)
    change(folder / "model.safetensors")
    refuses(folder, OSError, match)


@pytest.mark.parametrize(("kind", "other"), [TRAINED, TRAINED[::-1]])
def test_weights_of_another_draft(broken, saved, kind, other):
    folder = broken(kind)
    shutil.copy(saved / other / "model.safetensors", folder)
    refuses(folder, ValueError, r"\d+ .*weights")


def test_settings_are_refused_when_they_are_used(broken):
    """Loading leaves them to be corrected."""
    folder = broken("longspec")
    edit(folder / "generation_config.json", tree_widths="4,4")
    draft = AutoModel.from_pretrained(folder)
    target = tiny_target("llama")
    with pytest.raises(ValueError, match="tree_widths=") as caught:
        target.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=3, do_sample=False, assistant_model=draft)
    assert len(str(caught.value).splitlines()) == 1
