"""Load published drafts in separate processes, and check what they are and generate.

    python -S loading.py FOLDER ROOT

FOLDER holds `target`, `drafts/<kind>`, and a Hub cache with `org/<kind>`, `org/<kind>-on-engine` and `org/engine`. Each
case runs in a fork of this process, which has imported torch and transformers. The package is installed in none of
them, as `-S` reads no files of installations, except where ROOT is put on the path.
"""

import importlib
import json
import shutil
import sys
from multiprocessing import get_context
from pathlib import Path

import torch
from transformers import AutoModel, AutoModelForCausalLM, dynamic_module_utils
from transformers.generation.streamers import BaseStreamer

PACKAGE = "hf_longspec"
FOLDER, ROOT = map(Path, sys.argv[1:3]) if __name__ == "__main__" else (Path(), Path())
ENGINE = FOLDER / f"hub/models--org--engine/snapshots/{99:040x}"
OWN = FOLDER / f"hub/models--org--longspec/snapshots/{0:040x}"
FOREIGN = ("cli",)


class Collected(BaseStreamer):
    def __init__(self):
        self.tokens, self.ended = [], False

    def put(self, value):
        self.tokens += value.flatten().tolist()

    def end(self):
        self.ended = True


class Target:
    """The target and its own continuation of a left-padded batch of different lengths, in float32."""

    def __init__(self, folder):
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        ids = torch.randint(3, 128, (2, 37), generator=torch.Generator().manual_seed(1))
        ids[1, :14] = 0
        mask = torch.ones_like(ids)
        mask[1, :14] = 0
        self.batch = {"input_ids": ids, "attention_mask": mask, "pad_token_id": 0}
        self.single = {"input_ids": ids[:1], "attention_mask": mask[:1], "pad_token_id": 0}
        self.options = {"max_new_tokens": 10, "do_sample": False, "eos_token_id": None}
        self.text = self.model.generate(**self.batch, **self.options)

    def agrees(self, draft, **options):
        """Return whether the draft gives the same text, and the loop of the package made it."""
        draft.last_speculation = None
        out = self.model.generate(**self.batch, **self.options, assistant_model=draft, **options)
        ran = draft.last_speculation is not None and draft.last_speculation.num_forwards > 0
        return ran and torch.equal(out, self.text)

    def streams(self, draft, **options):
        streamer = Collected()
        inputs = self.single | self.options
        out = self.model.generate(**inputs, assistant_model=draft, streamer=streamer, **options)
        return streamer.ended and streamer.tokens == out[0].tolist() == self.text[0].tolist()


def check(kind, **facts):
    """Fail with the names of the kind and of the facts that are not true."""
    wrong = [name for name, fact in facts.items() if fact is not True]
    assert not wrong, f"{kind}: {', '.join(wrong)}"


def remote(name):
    return AutoModel.from_pretrained(name, trust_remote_code=True)


def package_of(draft):
    """Return the folder of the package whose class a draft has."""
    (*_, folder) = Path(sys.modules[type(draft).__module__].__file__).parents[:3]
    return folder


def load_copies(place, kinds, names, saved, engine):
    """Load drafts in a process without the package, which then has the copy in `place`; save and publish them."""
    target = Target(FOLDER / "target")
    for kind in kinds:
        draft = remote(name := str(names).format(kind))
        draft.save_pretrained(FOLDER / saved / kind)
        again, facts = FOLDER / "again" / saved / kind, importlib.import_module(f"{PACKAGE}.hub")
        repo = f"org/{kind}" if engine is None else f"org/{kind}-on-engine"
        files = facts.write_repository(draft, again, facts.Card(base_model="org/tiny-target"), repo, engine)
        first = FOLDER / ("drafts" if engine is None else "on-engine") / kind
        check(
            f"{kind} of {name}",
            code=package_of(draft) == place / PACKAGE,
            text=target.agrees(draft),
            streamed=target.streams(draft),
            published_again=all((again / file).read_bytes() == (first / file).read_bytes() for file in files),
        )
    modules = [name for name in sys.modules if name.startswith(tuple(f"{PACKAGE}.{part}" for part in FOREIGN))]
    check("copies", no_commands=not modules, no_typer="typer" not in sys.modules)


def from_the_engine(kinds):
    load_copies(ENGINE, kinds, "org/{}-on-engine", "saved-on-engine", f"org/engine@{99:040x}")


def from_their_repository(kinds):
    load_copies(OWN, kinds, "org/{}", "saved", None)


def from_folders(kinds):
    load_copies(FOLDER / "drafts" / kinds[0], kinds, FOLDER / "drafts/{}", "saved-from-folder", None)


def saved_drafts(kinds):
    load_copies(FOLDER / "saved" / kinds[0], kinds, FOLDER / "saved/{}", "saved-again", None)


def the_installed_package(kinds):
    """The package is used, although nobody has imported it, and a saved draft names no code."""
    sys.path.insert(0, str(ROOT))
    target = Target(FOLDER / "target")
    check("before", not_imported=PACKAGE not in sys.modules)
    for kind in kinds:
        draft, saved = remote(f"org/{kind}-on-engine"), FOLDER / "saved-by-package" / kind
        draft.save_pretrained(saved)
        check(
            kind,
            package_is_used=package_of(draft) == package_of(remote(f"org/{kind}")) == ROOT / PACKAGE,
            text=target.agrees(draft),
            saved_without_code={path.suffix for path in saved.iterdir()} <= {".json", ".safetensors"},
            saved_names_no_code="auto_map" not in json.loads((saved / "config.json").read_text()),
        )


def newer_than_the_package(kinds):
    """Drafts of a newer version are refused in one line, those of new kinds too, before and after the import."""
    sys.path.insert(0, str(ROOT))
    folder = FOLDER / "newer"
    for name in ("known", "unknown"):
        shutil.copytree(FOLDER / "on-engine" / kinds[0], folder / name)
        replace(folder / name / "longspec_draft.py", '"0.1.0"', '"99.0"')
        replace(folder / name / "config.json", '"hf_longspec_version": "0.1.0"', '"hf_longspec_version": "99.0"')
    config = json.loads((folder / "unknown/config.json").read_text())
    (folder / "unknown/config.json").write_text(json.dumps(config | {"model_type": "longspec_tomorrow"}))
    for name in ("known", "unknown", "known"):
        try:
            remote(folder / name)
        except ValueError as error:
            needs = "needs hf_longspec 99.0 or newer, and this process has 0.1.0" in str(error)
            check(name, one_line="\n" not in str(error), versions=needs, remedy="pip install --upgrade" in str(error))
        else:
            check(name, refused=False)


def without_any_copy(kinds):
    shutil.copytree(FOLDER / "drafts" / kinds[0], folder := FOLDER / "incomplete")
    shutil.rmtree(folder / PACKAGE)
    try:
        remote(folder)
    except ImportError as error:
        check("incomplete", remedy="Run `pip install hf_longspec`" in str(error), one_line="\n" not in str(error))
    else:
        check("incomplete", refused=False)


def an_earlier_revision(kinds):
    """The copy is that of the draft's own commit."""
    repository, last = OWN.parents[1], f"{77:040x}"
    shutil.copytree(OWN, repository / "snapshots" / last, symlinks=True)
    (repository / "refs/main").write_text(last)
    draft = AutoModel.from_pretrained("org/longspec", trust_remote_code=True, revision=OWN.name)
    check("revision", code=package_of(draft) == OWN / PACKAGE)


def replace(path, old, new):
    text = path.read_text()
    assert old in text, f"{path} lacks {old}"
    path.write_text(text.replace(old, new))


CASES = (from_the_engine, from_their_repository, from_folders, saved_drafts)
CASES += (the_installed_package, newer_than_the_package, without_any_copy, an_earlier_revision)


def main(case, kinds):
    dynamic_module_utils.HF_MODULES_CACHE = str(FOLDER / f"modules-{case.__name__}")
    check(case.__name__, not_installed=importlib.util.find_spec(PACKAGE) is None)
    case(kinds)
    print(case.__name__, *kinds, flush=True)


if __name__ == "__main__":
    for case in CASES:
        kinds = sorted(path.name for path in (FOLDER / "drafts").iterdir())
        process = get_context("fork").Process(target=main, args=(case, kinds))
        process.start()
        process.join()
