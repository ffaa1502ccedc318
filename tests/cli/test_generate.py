"""`generate`: its text against plain `generate`, and which tokens it calls drafted against a recount."""

import json
import re
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed

from hf_longspec import NgramDraftModel, StructuredOutput
from hf_longspec.cli.generate import verified_texts
from hf_longspec.cli.measuring import TokenClock
from hf_longspec.modeling.shared.ngrams import NgramDrafter
from tests.cli.conftest import run_command
from tests.watching import after

pytestmark = pytest.mark.usefixtures("every_step_speculates")
NEW = 12


@pytest.fixture(scope="module")
def target(tiny):
    model = AutoModelForCausalLM.from_pretrained(tiny.target, dtype=torch.float32).eval()
    return model, AutoTokenizer.from_pretrained(tiny.target)


@pytest.fixture(scope="module")
def expected(target, tiny):
    """Text of plain `generate` without any code of this package."""
    model, tokenizer = target
    inputs = tokenizer(tiny.notes.read_text(), return_tensors="pt")
    out = model.generate(**inputs, max_new_tokens=NEW, do_sample=False)
    return tokenizer.decode(out[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


@pytest.fixture(scope="module")
def shown(tiny):
    """One text with LongSpec: piped, and as JSON with its steps."""
    arguments = ["generate", tiny.notes, "--target", tiny.target, "--draft", tiny.longspec, "--max-new-tokens", NEW]
    arguments += ["--set", "gate=false"]  # every step drafts
    piped = run_command(*arguments, "--show-drafts")
    record = json.loads(run_command(*arguments, "--show-drafts", "--json").stdout)
    return SimpleNamespace(arguments=arguments, piped=piped, record=record)


@pytest.mark.parametrize(("draft", "way"), [("specattn", "file"), ("ngram", "prompt"), ("tokenswift", "stdin")])
def test_the_text_is_that_of_plain_generate(command, tiny, expected, draft, way):
    text = tiny.notes.read_text()
    arguments = {"file": [tiny.notes], "stdin": ["-"], "prompt": ["--prompt", text]}[way]
    arguments += ["--target", tiny.target, "--draft", getattr(tiny, draft, draft), "--max-new-tokens", NEW]
    result = command("generate", *arguments, input=text if way == "stdin" else None)
    assert result.exit_code == 0 and result.stdout == expected + "\n", result.output
    assert "tau" in result.stderr and "drafted tokens accepted" in result.stderr


def test_auto_says_what_it_chose(command, tiny, expected, tmp_path):
    for file in tiny.target.iterdir():
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / "README.md").unlink()
    (tmp_path / "README.md").write_text(f"---\ndraft_model: {tiny.tokenswift}\n---\n")
    arguments = [tiny.notes, "--target", tmp_path, "--draft", "auto", "--set", "gate=false", "--max-new-tokens", NEW]
    result = command("generate", *arguments)
    assert result.exit_code == 0 and result.stdout == expected + "\n", result.output
    choice, *_, stats = result.stderr.splitlines()
    assert re.fullmatch(r"draft: \S+, [\d.e+]+ tokens/s on this text \(.* without a draft\).*", choice), choice
    assert all(f"{name}" in choice for name in ("ngram", str(tiny.tokenswift))) and stats.split(":")[0] in choice


def test_several_samples_are_the_rows_of_one_batch(command, tiny, target):
    model, tokenizer = target
    text = tiny.notes.read_text()
    sampled = ["generate", "--prompt", text, "--target", tiny.target, "--draft", "ngram", "--max-new-tokens", NEW]
    sampled += ["--samples", 3, "--temperature", 1, "--seed", 5]
    result = command(*sampled, "--json")
    assert result.exit_code == 0, result.output
    ids = tokenizer(text, return_tensors="pt")["input_ids"].repeat_interleave(3, 0)
    set_seed(5)
    how = {"do_sample": True, "top_k": 0, "max_new_tokens": NEW, "attention_mask": torch.ones_like(ids)}
    expected = model.generate(ids, assistant_model=NgramDraftModel.from_target(model), **how)
    texts = [tokenizer.decode(row[ids.shape[1] :], skip_special_tokens=True) for row in expected]
    assert json.loads(result.stdout)["texts"] == texts and len(set(texts)) == 3
    assert command(*sampled).stdout == "\n\n".join(texts) + "\n"


def test_an_ordinary_small_model_is_recognised(command, tiny, target, expected, tmp_path):
    """A layer of the target, saved as transformers saves it."""
    _, tokenizer = target
    small = AutoModelForCausalLM.from_pretrained(tiny.target, dtype=torch.float32, num_hidden_layers=1)
    small.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    arguments = ["generate", tiny.notes, "--target", tiny.target, "--draft", tmp_path, "--max-new-tokens", NEW]
    result = command(*arguments, "--set", "window=16")
    assert result.exit_code == 0 and result.stdout == expected + "\n", result.output
    assert "assistant: tau" in result.stderr


def test_json_is_one_object_with_text_statistics_and_steps(shown, expected):
    found = shown.record
    assert found["text"] == expected
    assert found["new_tokens"] == NEW and found["seed"] is None and found["dtype"] == "float32"
    statistics = found["statistics"]
    assert statistics["num_accepted_draft_tokens"] > 0, "nothing was drafted, so nothing is shown"
    assert not [name for name in statistics if name.endswith("per_step")]
    steps = found["steps"]
    assert "".join(step["drafted"] + step["own"] for step in steps) == expected
    assert sum(step["num_accepted"] for step in steps) == statistics["num_accepted_draft_tokens"]
    assert sum(step["num_drafted"] for step in steps) == statistics["num_draft_tokens"]
    assert len(steps) == statistics["num_spec_steps"] + 1  # the first token is the prompt's


def test_sampling_follows_its_seed_and_its_options(command, tiny, target):
    """The plain draft samples like stock `generate`; the seed decides the text, and the options reach the model."""
    arguments = ["generate", tiny.notes, "--target", tiny.target, "--draft", "plain", "--max-new-tokens", 10, "--json"]
    runs = [json.loads(command(*arguments, "--temperature", 1.5, "--seed", seed).stdout) for seed in (1, 1, 2)]
    assert runs[0]["text"] == runs[1]["text"] != runs[2]["text"]
    assert runs[0]["seed"] == 1
    drawn = json.loads(command(*arguments, "--temperature", 1.5).stdout)["seed"]
    assert isinstance(drawn, int)  # so that a text can be had again
    greedy = json.loads(command(*arguments).stdout)["text"]
    for option in (["--top-k", 1], ["--top-p", 1e-6]):  # leave one token: the greedy text at any temperature
        assert json.loads(command(*arguments, "--temperature", 1.5, *option).stdout)["text"] == greedy
    punished = json.loads(command(*arguments, "--repetition-penalty", 5).stdout)["text"]
    model, tokenizer = target
    inputs = tokenizer(tiny.notes.read_text(), return_tensors="pt")
    out = model.generate(**inputs, max_new_tokens=10, do_sample=False, repetition_penalty=5.0)
    assert punished == tokenizer.decode(out[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True) != greedy


def test_a_terminal_gets_drafted_tokens_underlined(command, shown, expected):
    terminal = {"FORCE_COLOR": "1", "TERM": "xterm", "NO_COLOR": None}
    result = command(*shown.arguments, "--show-drafts", env=terminal)
    marked = re.findall(r"\x1b\[4;94m(.*?)\x1b\[0m", result.stdout, re.DOTALL)
    assert "".join(marked) == "".join(step["drafted"] for step in shown.record["steps"]) != ""
    assert re.sub(r"\x1b\[[0-9;]*m", "", result.stdout) == expected + "\n"
    assert shown.piped.stdout == expected + "\n"  # no bars and no escapes where nobody sees them
    hint, statistics = shown.piped.stderr.splitlines()
    assert hint.endswith("--json has them as text.") and "\x1b" not in hint + statistics


def test_steps_agree_with_tokens_seen_between_drafter_and_loop(target, tiny, monkeypatch):
    """A recount from outside: what the drafter proposed, and where in the text each verification ended."""
    model, tokenizer = target
    draft, proposals, lengths = NgramDraftModel.from_target(model), [], []

    def note(tree, drafter, root):
        proposals.append(int(tree.valid.sum()) - 1)
        lengths.append(len(drafter.binding.rule.sequences.generated[0]))

    after(monkeypatch, NgramDrafter, "propose", note)
    inputs = tokenizer(tiny.notes.read_text(), return_tensors="pt")
    set_seed(0)
    out = model.generate(**inputs, assistant_model=draft, max_new_tokens=40, do_sample=False)
    new = out[0, inputs["input_ids"].shape[1] :].tolist()
    steps = verified_texts(tokenizer, new, draft.last_speculation)
    assert [step.num_drafted for step in steps[1:]] == proposals
    ends = [*lengths[1:], len(new)]
    for step, start, end in zip(steps[1:], lengths, ends, strict=True):
        assert step.num_accepted == end - start - 1
        assert step.drafted + step.own == tokenizer.decode(new[start:end])
    assert max(step.num_accepted for step in steps) > 1


def test_chat_applies_the_template(command, tiny, tmp_path):
    folder = tmp_path / "chatty"
    folder.mkdir()
    for file in tiny.target.iterdir():
        (folder / file.name).symlink_to(file)
    (folder / "tokenizer_config.json").unlink()
    config = json.loads((tiny.target / "tokenizer_config.json").read_text())
    template = "{% for m in messages %}# {{ m['content'] }}\n{% endfor %}{% if add_generation_prompt %}def {% endif %}"
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": template}))
    arguments = ["--draft", "ngram", "--max-new-tokens", 6, "--json"]
    chat = json.loads(command("generate", "--prompt", "Hello", "--target", folder, "--chat", *arguments).stdout)
    same = json.loads(command("generate", "--prompt", "# Hello\ndef ", "--target", tiny.target, *arguments).stdout)
    assert chat["text"] == same["text"] and chat["prompt_tokens"] == same["prompt_tokens"]


def test_an_interrupted_text_stays(command, tiny, expected, monkeypatch):
    """Ctrl-C at the sixth token: the text so far, one line, status 130."""

    def stop(_, clock, value):
        if clock.total == 6:
            raise KeyboardInterrupt

    after(monkeypatch, TokenClock, "put", stop)
    arguments = ["--draft", "plain", "--max-new-tokens", NEW, "--json"]
    result = command("generate", tiny.notes, "--target", tiny.target, *arguments)
    text = json.loads(result.stdout)["text"]
    assert result.exit_code == 130 and text and expected.startswith(text)
    (line,) = result.stderr.splitlines()
    assert "nterrupted" in line and "speculation" not in line and "partial" not in line


@pytest.mark.parametrize("option", ["--json-schema", "--regex"])
def test_texts_with_a_structure(command, tiny, target, tmp_path, option):
    """As plain `generate` with the same processor, alone and in a batch of rows."""
    schema, regex = {"type": "array", "items": {"enum": ["on", "off"]}, "maxItems": 3}, "(left|right), [0-9]{3}"
    (tmp_path / "schema.json").write_text(json.dumps(schema))
    model, tokenizer = target
    processor = StructuredOutput(tokenizer, **({"regex": regex} if option == "--regex" else {"json_schema": schema}))
    how = {"logits_processor": [processor], "max_new_tokens": 30, "do_sample": False}
    out = model.generate(**tokenizer("Which? ", return_tensors="pt"), **how)
    text = tokenizer.decode(out[0, 7:], skip_special_tokens=True)
    common = ["--target", tiny.target, "--max-new-tokens", 30]
    common += [option, regex if option == "--regex" else tmp_path / "schema.json"]
    result = command("generate", "--prompt", "Which? ", *common, "--draft", "grammar")
    assert result.exit_code == 0 and result.stdout == text + "\n", result.output
    (tmp_path / "rows.jsonl").write_text('{"prompt": "Which? "}\n{"prompt": "A longer one: which? "}\n')
    data = ["--data", tmp_path / "rows.jsonl", "--output", tmp_path / "texts.jsonl"]
    assert command("generate", *data, *common).exit_code == 0
    records = map(json.loads, (tmp_path / "texts.jsonl").read_text().splitlines())
    assert {record["row"]: record["text"] for record in records}[0] == text
