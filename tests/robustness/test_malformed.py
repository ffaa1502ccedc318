"""A draft's folder with something wrong in it: one line that says what, as ValueError or OSError, and no draft."""

import json
import random
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModel, AutoModelForCausalLM

from hf_longspec import AssistantDraftModel, MtpDraftModel
from tests.robustness.drafts import ALL_KINDS, VARIANTS, make_draft
from tests.tiny_targets import tiny_target


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Sound folders by kind."""
    target, folder = tiny_target("llama"), tmp_path_factory.mktemp("drafts")
    for kind in ("specattn", "longspec", "tokenswift"):
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
        ("longspec", {"target": "llama"}, "target='llama'"),
        ("longspec", {"hidden_act": "nope"}, "hidden_act='nope'"),
        ("longspec", {"num_attention_heads": 3}, "shapes of"),
        ("tokenswift", {"num_heads": 10**9}, "num_heads=1000000000.* 256"),
        ("tokenswift", {"num_heads": 5}, " 9 .*weights"),
    ],
    ids=str,
)
def test_values(broken, kind, changes, match):
    folder = broken(kind)
    edit(folder / "config.json", **changes)
    refuses(folder, ValueError, match)


@pytest.mark.parametrize(
    ("change", "match"),
    [(cut, "weights in .* cannot be read"), (Path.unlink, "no file named model.safetensors")],
    ids=["cut short", "missing"],
)
def test_unreadable_weights(broken, change, match):
    folder = broken("longspec")
    change(folder / "model.safetensors")
    refuses(folder, OSError, match)


def test_settings_are_refused_when_they_are_used(broken):
    """Loading leaves them to be corrected."""
    folder = broken("longspec")
    edit(folder / "generation_config.json", tree_widths="4,4")
    draft = AutoModel.from_pretrained(folder)
    target = tiny_target("llama")
    with pytest.raises(ValueError, match="tree_widths=") as caught:
        target.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=3, do_sample=False, assistant_model=draft)
    assert len(str(caught.value).splitlines()) == 1


NESTED = "[" * 100_000 + "]" * 100_000  # more than Python's parser follows
VALUES = ("x", None, True, -1, 0, 10**9, 10**30, 1.5, [], [1], ["a"], {}, {"a": 1}, "\u00fc" * 400, ...)
FILES = (b"", b"{", b"[1]", b"null", b"3", b'{"a": "\xfc"}', b"\xef\xbb\xbf{}", NESTED.encode())
SAVED = (*(kind for kind in ALL_KINDS if kind not in VARIANTS), "small")
# Worded by transformers, which may be older than the files: `test_model_type`.
OF_TRANSFORMERS = {"model_type"}


def fields_of(value, path=()):
    """Paths of all fields, those of objects and lists inside included."""
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield (*path, key)
        yield from fields_of(inner, (*path, key))


def mutations(file):
    """What may stand in a JSON file in place of its content, and the field that is wrong."""
    content = json.loads(file.read_text())
    paths = [path for path in fields_of(content) if path[-1] not in OF_TRANSFORMERS]
    for *outer, last in paths[: 12 if file.name.endswith("index.json") else None]:
        for value in (*VALUES, NESTED):
            changed = inner = json.loads(file.read_text())
            for key in outer:
                inner = inner[key]
            inner[last] = value
            if value is ...:
                del inner[last]
            field = next((key for key in (last, *reversed(outer)) if isinstance(key, str)), None)
            text = json.dumps(changed).replace(f'"{NESTED}"', NESTED)
            yield text.encode(), None if value == NESTED else field
    yield from ((content, None) for content in FILES)


@pytest.fixture(scope="module")
def of_kind(tmp_path_factory):
    """`of_kind(kind)`: the class and the folder of a saved draft."""

    def make(kind):
        folder = tmp_path_factory.mktemp(kind)
        if kind == "mtp":
            fixture = Path(__file__).parents[1] / "modeling/mtp/fixtures/deepseek_v3"
            draft = MtpDraftModel.from_target(AutoModelForCausalLM.from_pretrained(fixture).eval())
        elif kind == "small":
            draft = AssistantDraftModel.from_model(tiny_target("llama", 5, num_hidden_layers=1), tiny_target("llama"))
        else:
            draft = make_draft(kind, tiny_target("llama"))
        draft.save_pretrained(folder, **({"max_shard_size": "20KB"} if kind == "eagle3" else {}))
        return type(draft), folder

    return make


def check_mutations(of_kind, kind, count):
    """A clean load, or one line with the file and, unless weights contradict it, the field."""
    cls, folder = of_kind(kind)
    files = sorted(folder.rglob("*.json"))
    assert "model.safetensors.index.json" in {file.name for file in files} or kind != "eagle3"
    found = [(file, *mutation) for file in files for mutation in mutations(file)]
    wrong, refused = [], 0
    for file, content, field in random.Random(7).sample(found, min(count, len(found))):
        sound = file.read_bytes()
        file.write_bytes(content)
        try:
            cls.from_pretrained(folder)
        except Exception as error:
            line, refused = str(error), refused + 1
            is_named = file.name in line and (field is None or str(field) in line or "weights" in line)
            if type(error) not in (ValueError, OSError) or len(line.splitlines()) != 1 or not is_named:
                wrong.append((type(error).__name__, file.name, field, content[:0] or content[-80:], line[:300]))
        finally:
            file.write_bytes(sound)
    assert not wrong and refused
    cls.from_pretrained(folder)


@pytest.mark.parametrize("kind", SAVED)
def test_any_content_of_a_file_loads_or_is_one_line(of_kind, kind):
    check_mutations(of_kind, kind, 15)


@pytest.mark.soak
@pytest.mark.parametrize("kind", SAVED)
def test_every_mutation_loads_or_is_one_line(of_kind, kind):
    check_mutations(of_kind, kind, 10**6)
