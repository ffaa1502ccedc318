"""Load published drafts in separate processes, and check what they are and generate.

    python loading.py FOLDER

FOLDER holds `target`, `drafts/<kind>`, and a Hub cache with `org/<kind>`, `org/<kind>-on-engine` and `org/engine`.
Every mode runs in a fork of this process, which has imported torch and transformers. With `absent`, hf_longspec cannot
be imported. With `package-first` it can, and is at first imported by nobody but transformers; then the copies are
loaded beside it. With `remote-first` it is imported after the copies are loaded, and hidden while they are.
"""

import importlib
import json
import logging
import sys
from multiprocessing import get_context
from pathlib import Path
from unittest import mock

import torch
from transformers import AutoModel, AutoModelForCausalLM, GenerationMixin, dynamic_module_utils
from transformers.dynamic_module_utils import get_class_from_dynamic_module
from transformers.generation.streamers import BaseStreamer

PACKAGE = "hf_longspec"
MODES = ("absent", "package-first", "remote-first")
# Drafts whose copies run beside the package if they were published, by the one that was imported first.
BESIDE = {"package": ("tokenswift", "specattn"), "remote": ("longspec", "longspec_ngram")}
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
        self.options = {"max_new_tokens": 10, "do_sample": False, "eos_token_id": None}
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


def check(kind, **facts):
    """Fail with the names of the kind and of the facts that are not true."""
    wrong = [name for name, fact in facts.items() if fact is not True]
    assert not wrong, f"{kind}: {', '.join(wrong)}"


def kinds_in(folder):
    """Return the kinds that were published, which a process without the package cannot ask it for."""
    return sorted(path.name for path in (folder / "drafts").iterdir())


def remote(name):
    return AutoModel.from_pretrained(name, trust_remote_code=True)


def came_from(draft):
    return type(draft).__module__.split(".")[0]


def named_code(folder):
    return json.loads((folder / "config.json").read_text(encoding="utf-8")).get("auto_map", {})


def without_the_route(target, draft, name):
    """Return whether `custom_generate` decodes correctly while the route is removed."""
    patched = GenerationMixin._assisted_decoding
    GenerationMixin._assisted_decoding = stock()[0]
    try:
        options = {"custom_generate": str(name), "trust_remote_code": True}
        return target.agrees(draft, **options) and target.streams(draft, **options)
    finally:
        GenerationMixin._assisted_decoding = patched


def load_everywhere(folder, target):
    """Check every kind loaded from the Hub cache and saved; two of them also loaded again, and without the route."""
    for kind in kinds_in(folder):
        hub, saved = remote(f"org/{kind}"), folder / "saved" / kind
        hub.save_pretrained(saved)
        code = named_code(saved)
        check(
            kind,
            code_of_the_repository=came_from(hub) == "transformers_modules",
            saved_with_code=set(code) == {"AutoConfig", "AutoModel"}
            and all((saved / f"{name.split('.')[0]}.py").is_file() for name in code.values()),
            text=target.agrees(hub),
            code_of_the_engine=is_on_engine(remote(f"org/{kind}-on-engine")),
            gate_is_off=hub.last_speculation.gate_decisions == [],
            one_route=stock()[1] == 1,  # though every copy installs it
        )
        if kind in ("longspec", "specattn"):  # with weights, and without
            copies = [hub, local := remote(folder / "drafts" / kind), again := remote(saved)]
            settings = [{name: one.setting(name) for name in one.settings} | one.config.target for one in copies]
            name = f"org/{kind}-on-engine"
            pinned = AutoModel.from_pretrained(name, trust_remote_code=True, code_revision=ENGINE_COMMIT)
            check(
                kind,
                pinned_engine=is_on_engine(pinned) and target.agrees(pinned),
                text_from_a_folder=target.agrees(local),
                code_of_the_copies=[came_from(draft) for draft in copies] == ["transformers_modules"] * 3,
                settings=settings[0] == settings[1] == settings[2],
                text_after_saving=target.agrees(again),
                streamed=target.streams(hub),
                custom_generate=without_the_route(target, hub, f"org/{kind}"),
                custom_generate_from_a_folder=without_the_route(target, local, folder / "drafts" / kind),
            )
    refusals(target)
    a_gpu_without_the_package()


def a_gpu_without_the_package():
    """Check that loading a copy where there is a GPU says once that the package is faster."""
    said = []
    logging.getLogger().addHandler(handler := logging.Handler())
    handler.emit = lambda record: said.append(record.getMessage())
    for name in [name for name in sys.modules if name.endswith(".modeling_longspec")]:
        del sys.modules[name]  # the entry, which is run again
    with mock.patch("torch.cuda.is_available", return_value=True):
        drafts = [remote("org/longspec") for _ in range(2)]
    logging.getLogger().removeHandler(handler)
    about = [text for text in said if "install hf_longspec" in text]
    check("gpu", said_once=len(about) == 1 and "Triton" in about[0], copies=len(drafts) == 2)


def is_on_engine(draft):
    """Return whether the class of a draft came from the repository of the code, not from the draft's own."""
    return type(draft).__module__.split(".")[1:3][-1] == "engine"


def copies_of_the_code(folder, kinds):
    """Return drafts of the published classes of some kinds, loaded while the package is hidden."""
    # and what a copy found when it was loaded beside the package
    loaded = [name for name in sys.modules if name.split(".")[0] in (PACKAGE, "transformers_modules")]
    hidden = {name: sys.modules.pop(name) for name in loaded}
    sys.meta_path.insert(0, absent := Absent())
    copies = {}
    for kind in kinds:  # AutoModel would take an installed class that is registered
        name = named_code(folder / "drafts" / kind)["AutoModel"]
        copies[kind] = get_class_from_dynamic_module(name, f"org/{kind}").from_pretrained(f"org/{kind}")
    sys.meta_path.remove(absent)
    sys.modules.update({name: module for name, module in hidden.items() if name.split(".")[0] == PACKAGE})
    return copies


def both_copies(folder, target, first):
    """Check that the installed package and the published copies generate in one process."""
    published = kinds_in(folder)
    copies = copies_of_the_code(folder, [kind for kind in BESIDE[first] if kind in published])
    check(first, package_was_hidden=(PACKAGE in sys.modules) == (first == "package"))
    package = importlib.import_module(PACKAGE)
    for kind, copied in copies.items():
        installed = AutoModel.from_pretrained(folder / "drafts" / kind)
        wins = [came_from(remote(f"org/{kind}")), came_from(AutoModel.from_pretrained(f"org/{kind}"))]
        check(
            kind,
            both_codes=[came_from(installed), came_from(copied)] == ["hf_longspec", "transformers_modules"],
            installed_wins=wins == ["hf_longspec"] * 2,  # with the flag and without
            copied=target.agrees(copied),
        )
        cache = package.SpeculativeCache(target.model.config, 2, 64)
        given = {package.generation.cache.CACHE_NAME: cache}
        check(
            kind,
            installed=target.agrees(installed),
            copied_again=target.agrees(copied),
            cache_of_the_other=target.agrees(copied, **given) and cache.get_seq_length() > 37,
            custom_generate=without_the_route(target, copied, f"org/{kind}"),
            published_again=published_again(copied, kind, folder),
            one_route=stock()[1] == 1,
        )


def the_package_instead(folder, target):
    """Check that drafts are loaded by the installed package, although nobody has imported it."""
    check("before", not_imported=PACKAGE not in sys.modules)
    for kind in kinds_in(folder):
        draft, saved = remote(f"org/{kind}"), folder / "saved-by-package" / kind
        draft.save_pretrained(saved)
        weights = [] if draft.weightless else [".safetensors"]
        check(
            kind,
            package_is_used=came_from(draft) == came_from(remote(f"org/{kind}-on-engine")) == PACKAGE,
            no_code_of_the_copy=not [name for name in sys.modules if f"{kind}." in name and is_engine(name)],
            files=sorted(path.suffix for path in saved.iterdir()) == sorted([".json", ".json", *weights]),
            saved_names_no_code=named_code(saved) == {},
        )
    check("package", text=target.agrees(draft))


def is_engine(name):
    """Whether a module is one of a copy, other than the entry that `auto_map` names."""
    return name.startswith("transformers_modules") and name.split(".")[-1] in ("decoding", "cache", "target", "draft")


def refusals(target):
    """Check that a copy refuses in one line settings that need the package."""
    for name, value in {"compile": "compile", "ngram_candidates": 2, "ranks": 2}.items():
        draft = remote("org/longspec")
        setattr(*((target.model, "_tp_size") if name == "ranks" else (draft.generation_config, name)), value)
        try:
            target.agrees(draft)
        except ValueError as error:
            check(name, remedy="install the package hf_longspec" in str(error).lower(), one_line="\n" not in str(error))
        else:
            check(name, refused=False)
    del target.model._tp_size
    try:
        remote("org/longspec")(input_ids=None)
    except NotImplementedError as error:
        check("forward", remedy="install the package hf_longspec" in str(error))
    else:
        check("forward", refused=False)


def published_again(copied, kind, folder):
    """Return whether the installed package writes the same repository for the copy as for the original draft."""
    hub = importlib.import_module(f"{PACKAGE}.hub")
    again, first = folder / "again" / kind, folder / "drafts" / kind
    files = hub.write_repository(copied, again, hub.Card(base_model="org/tiny-target"), f"org/{kind}")
    return all((again / file).read_bytes() == (first / file).read_bytes() for file in files)


def imports_of(read):
    """Return `get_imports` of transformers, which parses a file for every file that imports it, for a text once."""
    known = {}

    def found(filename):
        text = Path(filename).read_bytes()
        if text not in known:
            known[text] = read(filename)
        return known[text]

    return found


def main(mode, folder):
    dynamic_module_utils.get_imports = imports_of(dynamic_module_utils.get_imports)
    dynamic_module_utils.HF_MODULES_CACHE = str(folder / f"modules-{mode}")
    if mode == "absent":
        sys.meta_path.insert(0, Absent())
    target = Target(folder / "target")
    if mode == "absent":
        load_everywhere(folder, target)
    else:
        if mode == "package-first":
            the_package_instead(folder, target)
        both_copies(folder, target, mode.split("-")[0])
    check(mode, imported=(PACKAGE in sys.modules) == (mode != "absent"))
    check(mode, stock_is_transformers=stock()[0].__module__ == "transformers.generation.utils")
    print(f"{mode}: {' '.join(kinds_in(folder))}", flush=True)


if __name__ == "__main__":
    for mode in MODES:
        process = get_context("fork").Process(target=main, args=(mode, Path(sys.argv[1])))
        process.start()
        process.join()
