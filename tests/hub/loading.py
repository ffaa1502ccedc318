"""Load published drafts in a separate process, and print the results as JSON.

    python loading.py absent|installed|remote-first|package-first FOLDER

FOLDER holds `target`, `drafts/<kind>`, and a Hub cache with `org/<kind>`, `org/<kind>-on-engine` and `org/engine`. With
`absent`, hf_longspec cannot be imported. With `installed` it can, and nobody has done so. With `remote-first` it is
imported after the copies are loaded, with `package-first` before; it is hidden while they are.
"""

import importlib
import json
import sys
from pathlib import Path

import torch
from transformers import AutoModel, AutoModelForCausalLM, GenerationMixin
from transformers.dynamic_module_utils import get_class_from_dynamic_module
from transformers.generation.streamers import BaseStreamer

PACKAGE = "hf_longspec"
CLASSES = {
    "longspec": "LongSpecDraftModel",
    "tokenswift": "TokenSwiftDraftModel",
    "specattn": "SpecAttnDraftModel",
    "longspec_plain": "PlainDraftModel",
    "longspec_ngram": "NgramDraftModel",
}
KINDS = tuple(CLASSES)
ENGINE_COMMIT = f"{99:040x}"


class Absent:
    """An import hook that makes hf_longspec look uninstalled."""

    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == PACKAGE:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


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
        self.options = {"max_new_tokens": 16, "do_sample": False, "eos_token_id": None}
        self.text = self.model.generate(**self.batch, **self.options)

    def agrees(self, draft, **options):
        """Return whether the draft gives the same text, and this package's loop made it."""
        draft.last_speculation = None
        out = self.model.generate(**self.batch, **self.options, assistant_model=draft, **options)
        ran = draft.last_speculation is not None and draft.last_speculation.num_forwards > 0
        return ran and torch.equal(out, self.text)

    def streams(self, draft, **options):
        streamer = Collected()
        inputs = self.single | self.options
        out = self.model.generate(**inputs, assistant_model=draft, streamer=streamer, **options)
        return streamer.ended and streamer.tokens == out[0].tolist() == self.text[0].tolist()


def stock():
    """Return transformers' own function, found by unwrapping, and the number of wrappers around it."""
    function, layers = GenerationMixin._assisted_decoding, 0
    while hasattr(function, "__wrapped__"):
        function, layers = function.__wrapped__, layers + 1
    return function, layers


def remote(name):
    return AutoModel.from_pretrained(name, trust_remote_code=True)


def came_from(draft):
    return type(draft).__module__.split(".")[0]


def without_the_route(target, draft, name):
    """Return whether `custom_generate` decodes correctly while the route is removed."""
    patched = GenerationMixin._assisted_decoding
    GenerationMixin._assisted_decoding = stock()[0]
    try:
        options = {"custom_generate": name, "trust_remote_code": True}
        return target.agrees(draft, **options) and target.streams(draft, **options)
    finally:
        GenerationMixin._assisted_decoding = patched


def brings_its_code(folder):
    """Return whether a saved draft refers to classes in its own folder, not in the repository it was loaded from."""
    named = json.loads((folder / "config.json").read_text(encoding="utf-8"))["auto_map"]
    return set(named) == {"AutoConfig", "AutoModel"} and all(
        (folder / f"{name.split('.')[0]}.py").is_file() for name in named.values()
    )


def load_everywhere(folder, target):
    """Check every kind loaded from the Hub cache and from a folder, saved and loaded again, and without the route."""
    found = {}
    for kind in KINDS:
        hub, local = remote(f"org/{kind}"), remote(folder / "drafts" / kind)
        hub.save_pretrained(folder / "saved" / kind)
        again = remote(folder / "saved" / kind)
        settings = [
            {name: draft.setting(name) for name in draft.settings} | draft.config.target
            for draft in (hub, local, again)
        ]
        found[kind] = {
            "modules": [came_from(draft) for draft in (hub, local, again)],
            "hub": target.agrees(hub),
            "folder": target.agrees(local),
            "saved": target.agrees(again),
            "streamed": target.streams(hub),
            "custom_generate": without_the_route(target, hub, f"org/{kind}"),
            "custom_generate_folder": without_the_route(target, local, str(folder / "drafts" / kind)),
            "saved_with_code": brings_its_code(folder / "saved" / kind),
            "settings": settings[0] == settings[1] == settings[2],
            "engine": engine_agrees(target, kind),
            "gate": len(hub.last_speculation.gate_decisions),
            "route_layers": stock()[1],
        }
    return found


def engine_agrees(target, kind):
    """Return whether a draft works whose code is in another repository, pinned by `code_revision` or not."""
    name = f"org/{kind}-on-engine"
    pinned = AutoModel.from_pretrained(name, trust_remote_code=True, code_revision=ENGINE_COMMIT)
    drafts = [remote(name), pinned]
    origins = {type(draft).__module__.split(".")[1:3][-1] for draft in drafts}
    return all(map(target.agrees, drafts)) and origins == {"engine"}


def copies_of_the_code(first):
    """Return drafts of the published classes of every kind, loaded while the package is hidden."""
    if first == "package":
        importlib.import_module(PACKAGE)
    hidden = {name: sys.modules.pop(name) for name in list(sys.modules) if name.split(".")[0] == PACKAGE}
    sys.meta_path.insert(0, absent := Absent())
    copies = {}
    for kind in KINDS:  # AutoModel would take an installed class that is registered
        name = f"modeling_{kind.removeprefix('longspec_')}.{CLASSES[kind]}"
        copies[kind] = get_class_from_dynamic_module(name, f"org/{kind}").from_pretrained(f"org/{kind}")
    sys.meta_path.remove(absent)
    sys.modules.update(hidden)
    return copies


def both_copies(folder, target, first):
    """Check that the installed package and the published copies generate in one process."""
    copies = copies_of_the_code(first)
    found = {"alone_imported": PACKAGE in sys.modules}
    package = importlib.import_module(PACKAGE)
    for kind, copied in copies.items():
        installed = AutoModel.from_pretrained(folder / "drafts" / kind)
        cache = package.SpeculativeCache(target.model.config, 2, 64)
        found[kind] = {
            "modules": [came_from(installed), came_from(copied)],
            "wins": [came_from(remote(f"org/{kind}")), came_from(AutoModel.from_pretrained(f"org/{kind}"))],
            "installed": target.agrees(installed),
            "copied": target.agrees(copied),
            "installed_again": target.agrees(installed),
            "cache_of_the_other": target.agrees(copied, past_key_values=cache) and cache.get_seq_length() > 37,
            "custom_generate": without_the_route(target, copied, f"org/{kind}"),
            "route_layers": stock()[1],
            "published_again": published_again(copied, kind, folder),
        }
    return found


def the_package_instead(folder, target):
    """Check that drafts are loaded by the installed package, although nobody has imported it."""
    found = {"imported_before": PACKAGE in sys.modules}
    for kind in KINDS:
        draft = remote(f"org/{kind}")
        draft.save_pretrained(folder / "saved-by-package" / kind)
        found[kind] = {
            "module": came_from(draft),
            "hub": target.agrees(draft),
            "engine": came_from(remote(f"org/{kind}-on-engine")),
            "copies_imported": sorted(name for name in sys.modules if f"{kind}." in name and is_engine(name)),
            "saved": sorted(path.suffix for path in (folder / "saved-by-package" / kind).iterdir()),
            "names_code": "auto_map" in json.loads((folder / "saved-by-package" / kind / "config.json").read_text()),
        }
    return found


def is_engine(name):
    """Whether a module is one of a copy, other than the entry that `auto_map` names."""
    return name.startswith("transformers_modules") and name.split(".")[-1] in ("decoding", "cache", "target", "draft")


def refusals(folder, target):
    """Messages of a copy for settings that need the package."""
    found = {}
    for name, value in {"compile": "compile", "ngram_candidates": 2}.items():
        draft = remote("org/longspec")
        setattr(draft.generation_config, name, value)
        try:
            target.agrees(draft)
        except ValueError as error:
            found[name] = str(error)
    target.model._tp_size = 2
    try:
        target.agrees(remote("org/longspec"))
    except ValueError as error:
        found["ranks"] = str(error)
    del target.model._tp_size
    return found


def published_again(copied, kind, folder):
    """Return whether the installed package writes the same repository for the copy as for the original draft."""
    hub = importlib.import_module(f"{PACKAGE}.hub")
    again, first = folder / "again" / sys.argv[1] / kind, folder / "drafts" / kind
    files = hub.write_repository(copied, again, hub.Card(base_model="org/tiny-target"), f"org/{kind}")
    return all((again / file).read_bytes() == (first / file).read_bytes() for file in files)


def main():
    mode, folder = sys.argv[1], Path(sys.argv[2])
    if mode == "absent":
        sys.meta_path.insert(0, Absent())
    target = Target(folder / "target")
    if mode == "absent":
        found = load_everywhere(folder, target) | {"refused": refusals(folder, target)}
    elif mode == "installed":
        found = the_package_instead(folder, target)
    else:
        found = both_copies(folder, target, mode.split("-")[0])
    found["imported"] = PACKAGE in sys.modules
    found["stock"] = stock()[0].__module__
    print(json.dumps(found))


if __name__ == "__main__":
    main()
