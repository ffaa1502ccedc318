"""The names and the effects of `import hf_longspec`: new names, and one removable patch."""

import importlib.util
import inspect
import json
import re
import subprocess
import sys
import textwrap
import tomllib
from pathlib import Path

import pytest
from transformers import GenerationMixin

import hf_longspec
from hf_longspec.generation import route

PACKAGE = Path(hf_longspec.__file__).parent
PROJECT = PACKAGE.parent
MANUALS = ["docs/contextual_penalty.md", "docs/long_generation.md", "docs/publishing.md"]

# Runs in a process of its own. Everything the package could touch is loaded first; then every attribute of every class
# and every module of transformers, the entries of their containers, and torch's global settings are compared.
OBSERVE = textwrap.dedent(
    """
    import importlib, inspect, json, logging, sys, warnings
    import torch, transformers
    for name in ("generation.utils", "generation.candidate_generator", "generation.stopping_criteria", "cache_utils",
                 "masking_utils", "modeling_utils", "models.auto.modeling_auto", "models.llama.modeling_llama",
                 "integrations.sdpa_attention", "utils.logging"):
        importlib.import_module("transformers." + name)
    from transformers import AutoModelForCausalLM, LlamaConfig
    sizes = dict(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2, vocab_size=8)
    model = AutoModelForCausalLM.from_config(LlamaConfig(**sizes))
    model.generate(torch.tensor([[3, 4]]), max_new_tokens=2, do_sample=False, pad_token_id=0)

    def holders():
        for name, module in list(sys.modules.items()):
            if name.split(".")[0] == "transformers":
                yield name, module, False
                for value in list(vars(module).values()):
                    if isinstance(value, type) and value.__module__.split(".")[0] == "transformers":
                        yield value.__module__ + "." + value.__qualname__, value, True

    def snapshot():
        attributes, entries = {}, {}
        for name, holder, is_class in holders():
            for attribute, value in list(vars(holder).items()):
                key = name + "." + attribute
                attributes[key] = (value, is_class)
                content = inspect.getattr_static(value, "_extra_content", value)
                if isinstance(content, (dict, set, list)):
                    entries[key] = {getattr(entry, "model_type", None) or str(entry) for entry in content}
        return attributes, entries

    def settings():
        return repr([
            torch.get_default_dtype(), torch.get_num_threads(), torch.get_default_device(), torch.is_grad_enabled(),
            torch.are_deterministic_algorithms_enabled(), torch.get_float32_matmul_precision(),
            torch.backends.cuda.flash_sdp_enabled(), torch.backends.cuda.math_sdp_enabled(),
            torch.default_generator.get_state().sum().item(), warnings.filters, logging.getLogger().handlers,
            transformers.utils.logging.get_verbosity(), sys.path,
        ])

    attributes, entries = snapshot()
    modules, before = set(sys.modules), settings()
    import hf_longspec
    new_attributes, new_entries = snapshot()
    tops = {name.split(".")[0] for name in set(sys.modules) - modules}
    print(json.dumps({
        "changed": sorted(k for k, (v, _) in attributes.items() if new_attributes.get(k, (v,))[0] is not v),
        "removed": sorted(set(attributes) - set(new_attributes)),
        "added": sorted(k for k, (_, is_class) in new_attributes.items() if is_class and k not in attributes
                        and k.rpartition(".")[0] + ".__module__" in attributes),
        "entries": {k: sorted(new_entries[k] - old) for k, old in entries.items() if new_entries.get(k, old) - old},
        "lost": sorted(k for k, old in entries.items() if old - new_entries.get(k, old)),
        "packages": sorted(tops - set(sys.stdlib_module_names) - {"torch", "transformers"}),
        "settings": [before, settings()],
    }))
    """
)


@pytest.fixture(scope="module")
def effects():
    result = subprocess.run([sys.executable, "-c", OBSERVE], capture_output=True, text=True, cwd=PROJECT, check=False)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


def test_import_replaces_one_function_of_transformers(effects):
    assert effects["changed"] == ["transformers.generation.utils.GenerationMixin._assisted_decoding"]
    assert effects["removed"] == effects["added"] == effects["lost"] == []


def test_import_adds_registry_names_and_auto_classes_only(effects):
    for registry, names in effects["entries"].items():
        if "Attention" in registry:
            assert all(name.startswith("hf_longspec") for name in names), (registry, names)
        else:
            assert registry.startswith("transformers.models.auto"), (registry, names)
            assert all(re.match("longspec|specattn|tokenswift", name) for name in names), (registry, names)
    text = str(sorted(effects["entries"]))
    assert "AttentionInterface" in text
    assert "AttentionMaskInterface" in text
    assert "CONFIG_MAPPING" in text
    assert "MODEL_MAPPING" in text


def test_import_changes_no_global_setting(effects):
    before, after = effects["settings"]
    assert after == before


def test_import_loads_no_optional_package(effects):
    assert effects["packages"] == ["hf_longspec"]


@pytest.fixture
def route_as_found():
    """Whatever a test does to the route, the next one finds it installed."""
    yield
    route.uninstall()
    route.install()


@pytest.mark.usefixtures("route_as_found")
class TestRoute:
    def test_uninstall_restores_the_stock_function(self):
        assert route.is_installed()
        patched = GenerationMixin._assisted_decoding
        route.uninstall()
        stock = GenerationMixin._assisted_decoding
        assert not route.is_installed()
        assert stock is route.stock_assisted_decoding() is not patched
        assert stock.__code__.co_filename == inspect.getsourcefile(GenerationMixin)
        assert stock.__closure__ is None

    def test_installing_again_does_not_stack(self):
        stock = route.stock_assisted_decoding()
        for _ in range(3):
            route.install()
        assert route.stock_assisted_decoding() is stock
        route.uninstall()
        assert GenerationMixin._assisted_decoding is stock
        route.uninstall()
        assert GenerationMixin._assisted_decoding is stock

    def test_a_second_copy_does_not_stack(self):
        """As when a draft from the Hub brings its own `route.py`."""
        stock = route.stock_assisted_decoding()
        spec = importlib.util.spec_from_file_location("route_from_the_hub", route.__file__)
        copy = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(copy)
        copy.install()
        assert route.is_installed()
        assert copy.stock_assisted_decoding() is route.stock_assisted_decoding() is stock
        route.install()
        copy.uninstall()
        assert not route.is_installed()
        assert GenerationMixin._assisted_decoding is stock

    def test_other_assistants_take_the_stock_function(self, monkeypatch):
        route.uninstall()
        seen = []
        monkeypatch.setattr(GenerationMixin, "_assisted_decoding", lambda self, *args, **kwargs: seen.append(kwargs))
        route.install()
        GenerationMixin._assisted_decoding(None, assistant_model="an ordinary assistant", streamer=None)
        assert seen == [{"assistant_model": "an ordinary assistant", "streamer": None}]


def test_every_public_name_resolves():
    assert len(set(hf_longspec.__all__)) == len(hf_longspec.__all__)
    for name in hf_longspec.__all__:
        assert getattr(hf_longspec, name).__module__.startswith("hf_longspec."), name


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'NoSuchDraftModel'"):
        _ = hf_longspec.NoSuchDraftModel


@pytest.mark.parametrize("document", ["README.md", "CONTRIBUTING.md", "docs/design.md", *MANUALS])
def test_names_in_the_documentation_exist(document):
    text = (PROJECT / document).read_text(encoding="utf-8")
    named = set(re.findall(r"\bhf_longspec\.([A-Za-z]\w*)", text))
    folders = {path.stem for path in PACKAGE.iterdir()}
    assert not [name for name in sorted(named) if name not in folders and not hasattr(hf_longspec, name)]


def test_version_is_stated_once():
    declared = tomllib.loads((PROJECT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    assert hf_longspec.__version__ == declared
    assert f"## {declared}" in (PROJECT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_types_are_shipped():
    assert (PACKAGE / "py.typed").is_file()
