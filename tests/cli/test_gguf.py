"""Targets in GGUF files on the command line: their names, their text beside that of stock generate, and errors."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

from hf_longspec.cli import CommandError, models, options
from tests.gguf_files import write_tiny_gguf

PROMPT = "def area(self): return self.width * self.height\n" * 3


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    pytest.importorskip("gguf")
    write_tiny_gguf(file := tmp_path_factory.mktemp("models") / "tiny-Q8_0.gguf")
    return file


@pytest.fixture(scope="module")
def expected(file):
    """The text of transformers alone."""
    source = {"pretrained_model_name_or_path": file.parent, "gguf_file": file.name}
    tokenizer = AutoTokenizer.from_pretrained(**source)
    model = AutoModelForCausalLM.from_pretrained(
        **source, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
    )
    ids = tokenizer(PROMPT, return_tensors="pt").input_ids
    text = model.generate(ids, max_new_tokens=16, do_sample=False)[0, ids.shape[1] :]
    return tokenizer.decode(text, skip_special_tokens=True)


@pytest.mark.parametrize("draft", ["ngram", "self-int4"])
def test_the_text_is_that_of_transformers(file, expected, main, draft):
    how = "--prompt", PROMPT, "--max-new-tokens", 16, "--json", "--draft", draft, "--set", "gate=false"
    for named in (["--target", file], ["--target", file.parent, "--gguf-file", file.name]):
        status, out, err = main("generate", *how, *named)
        assert status == 0 and "Unpacking the weights of tiny-Q8_0.gguf to float32." in err
        result = json.loads(out)
        assert result["text"] == expected and result["target"] == str(file) and result["dtype"] == "float32"
        assert result["statistics"]["num_spec_steps"] > 0


def test_audit_of_a_gguf_file(file, main):
    status, out, _ = main("audit", "--prompt", PROMPT, "--target", file, "--max-new-tokens", 8, "--json")
    assert status == 0 and json.loads(out)


def test_serve_loads_the_unpacked_weights(file):
    serve = pytest.importorskip("hf_longspec.cli.serve")
    name = serve.served_name(str(file))
    assert name == f"{file.parent}:{file.name}"
    assert serve.served_name("org/model") == "org/model"
    (loaded,) = serve.UnpackingManager(device="cpu", dtype="float32", force_model=name).loaded_models.values()
    assert {x.dtype for x in loaded.model.parameters()} == {torch.float32}


def test_a_draft_is_trained_for_a_gguf_file(file, main, tmp_path, tiny):
    recipe, output = tmp_path / "recipe.yaml", tmp_path / "draft"
    training = {"max_steps": 1, "per_device_train_batch_size": 1, "report_to": "none", "use_cpu": True}
    recipe.write_text(json.dumps({"pack": 64, "training": training, "draft": {}}))
    how = "--config", recipe, "--target", file, "--output-dir", output
    status, _, err = main("train", tiny.notes, *how)
    assert status == 0, err
    assert "Unpacking the weights" in err and (output / "model.safetensors").is_file()
    status, out, err = main(
        *("generate", "--prompt", PROMPT, "--target", file, "--draft", output),
        *("--max-new-tokens", 8, "--set", "gate=false", "--json"),
    )
    assert status == 0 and json.loads(out)["statistics"]["num_spec_steps"] > 0


def test_an_output_folder_does_not_hold_the_file(file, main, tmp_path, tiny):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(json.dumps({"training": {}, "dataset": {}, "target": f"{file.parent}:{file.name}"}))
    status, _, err = main("train", tiny.notes, "--config", recipe, "--output-dir", file.parent, "--overwrite")
    assert status == 2 and "is read, and lies in the output folder" in err and file.is_file()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--target", "{folder}/other.gguf"], "there is no such file. The folder has tiny-Q8_0.gguf."),
        (["--target", "{folder}", "--gguf-file", "other.gguf"], "The folder has tiny-Q8_0.gguf."),
        (["--target", "{folder}:other.gguf"], "The folder has tiny-Q8_0.gguf."),
        (["--target", "none/other.gguf"], "for a file on the Hub, pass --target org/model --gguf-file NAME."),
        (["--target", "{file}", "--gguf-file", "x.gguf"], "is a second file beside --target"),
        (["--target", "{folder}", "--gguf-file", "model.bin"], "model.bin does not end with .gguf"),
    ],
)
def test_one_line_for_what_is_not_there(file, main, monkeypatch, arguments, message):
    monkeypatch.setattr(models, "load_weights", pytest.fail)
    arguments = [part.format(folder=file.parent, file=file) for part in arguments]
    status, out, err = main("generate", "--prompt", "text", *arguments)
    assert status == 2 and not out and message in err and err.count("\n") == 1


def test_the_package_that_is_missing_is_named(tmp_path, monkeypatch):
    (tmp_path / "model.gguf").touch()
    monkeypatch.setattr(options, "find_spec", lambda name: None)
    for target in (str(tmp_path / "model.gguf"), "org/model:model.gguf"):
        with pytest.raises(CommandError, match="gguf is not installed: pip install gguf"):
            models.load_config(target)


def test_names_of_targets(tmp_path):
    assert options.name_gguf("org/model", "Q4.gguf") == "org/model:Q4.gguf"
    assert options.name_gguf(str(tmp_path), "Q4.gguf") == str(tmp_path / "Q4.gguf")
    assert models.source_of("org/model:Q4.gguf") == {
        "pretrained_model_name_or_path": "org/model",
        "gguf_file": "Q4.gguf",
    }
    with pytest.raises(CommandError, match="needs --target"):
        options.name_gguf(None, "Q4.gguf")
