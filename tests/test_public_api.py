"""The names and the effects of `import hf_longspec`: new names, and one patch (tests/generation/test_route.py)."""

import json
import re
import subprocess
import sys
import textwrap
import tomllib
from pathlib import Path

import pytest

import hf_longspec

PACKAGE = Path(hf_longspec.__file__).parent
PROJECT = PACKAGE.parent

# Runs in a process of its own. Everything the package could touch is loaded first; then every attribute of every class
# and every module of transformers, the entries of their containers, and torch's global settings are compared. Before, a
# fork imports the package where its optional packages are missing, and decides what runs.
OBSERVE = textwrap.dedent(
    """
    import importlib, inspect, json, logging, os, sys, warnings
    import torch, transformers
    for name in ("generation.utils", "generation.candidate_generator", "generation.stopping_criteria", "cache_utils",
                 "masking_utils", "modeling_utils", "models.auto.modeling_auto", "models.llama.modeling_llama",
                 "integrations.sdpa_attention", "utils.logging", "pipelines.base"):
        importlib.import_module("transformers." + name)
    from transformers import AutoModelForCausalLM, LlamaConfig
    sizes = dict(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2, vocab_size=8)
    model = AutoModelForCausalLM.from_config(LlamaConfig(**sizes))
    model.generate(torch.tensor([[3, 4]]), max_new_tokens=2, do_sample=False, pad_token_id=0)

    def without_optional_packages():
        for name in ("triton", "flash_attn", "flash_attn_interface", "kernels"):
            sys.modules[name] = None
        import hf_longspec
        from hf_longspec.attention_backends import flash
        from hf_longspec.attention_backends.interface import register
        from hf_longspec.attention_backends.registry import AttentionCall, select
        from hf_longspec.attention_backends.triton.commit import can_move
        register()
        print(can_move(torch.device("cuda")), flash.flash_function(9), flash.flash_function(8))
        call = AttentionCall(torch.device("cpu"), torch.float32, 64, 64)
        print(select(call).name)
        try:
            select(call, "hf_longspec_triton")
        except ValueError as error:
            print(error, flush=True)

    if not (child := os.fork()):
        try:
            without_optional_packages()
        finally:
            os._exit(0)
    os.waitpid(child, 0)

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
                content = getattr(value, "_extra_content", value) if isinstance(value, dict) else value
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
    *told, last = result.stdout.splitlines()
    return {**json.loads(last), "without optional packages": told}


def test_import_wraps_three_functions_of_transformers_and_adds_names_to_registries(effects):
    wrapped = "generation.utils.GenerationMixin._assisted_decoding", "pipelines.base.load_assistant_model"
    wrapped += ("generation.utils.GenerationMixin._validate_generation_mode",)
    assert effects["changed"] == sorted(f"transformers.{name}" for name in wrapped)
    assert effects["removed"] == effects["added"] == effects["lost"] == []
    for registry, names in effects["entries"].items():
        if "Attention" in registry:
            assert all(name.startswith("hf_longspec") for name in names), (registry, names)
        else:
            assert registry.startswith("transformers.models.auto"), (registry, names)
            assert all(re.match("longspec|specattn|tokenswift", name) for name in names), (registry, names)
    text = str(sorted(effects["entries"]))
    for registry in ("AttentionInterface", "AttentionMaskInterface", "CONFIG_MAPPING", "MODEL_MAPPING"):
        assert registry in text


def test_import_changes_no_global_setting_and_loads_no_optional_package(effects):
    before, after = effects["settings"]
    assert after == before
    assert effects["packages"] == ["hf_longspec"]


def test_without_optional_packages_torch_computes_and_a_refusal_says_what_is_missing(effects):
    told = effects["without optional packages"]
    assert told[:2] == ["False None None", "hf_longspec_torch"]
    assert any("hf_longspec_triton: triton is not installed: pip install triton" in line for line in told)


def test_every_public_name_resolves():
    assert len(set(hf_longspec.__all__)) == len(hf_longspec.__all__)
    for name in hf_longspec.__all__:
        assert getattr(hf_longspec, name).__module__.startswith("hf_longspec."), name


def test_version_is_stated_once():
    project = tomllib.loads((PROJECT / "pyproject.toml").read_text(encoding="utf-8"))
    assert "version" not in project["project"] and project["project"]["dynamic"] == ["version"]
    assert project["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "hf_longspec.__version__"}
    assert f"## {hf_longspec.__version__}" in (PROJECT / "CHANGELOG.md").read_text(encoding="utf-8")
