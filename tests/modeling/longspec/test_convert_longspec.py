"""Conversion of LongSpec's checkpoints: names, layouts, refusals, and logits against a restated block."""

import pytest
import torch
from safetensors.torch import save_file

from hf_longspec.modeling.register_draft import convert
from tests.tiny_targets import tiny_target

# Hidden width, query width, key width and inner width of the tiny targets.
D, Q, K, INNER = 64, 64, 32, 96


def published_tensors(dtype=torch.float16):
    """Return the 20 tensors of a published draft, in tiny shapes."""
    shapes = {"self_attn.o_proj.weight": (D, Q), "cross_attn.o_proj.weight": (D, Q)}
    for attention in ("self_attn", "cross_attn"):
        for name, width in (("q_proj", Q), ("k_proj", K), ("v_proj", K)):
            shapes |= {f"{attention}.{name}.weight": (width, D), f"{attention}.{name}.bias": (width,)}
    shapes |= {"mlp.gate_proj.weight": (INNER, D), "mlp.up_proj.weight": (INNER, D), "mlp.down_proj.weight": (D, INNER)}
    norms = ("input_layernorm", "post_self_attention_layernorm", "post_cross_attention_layernorm")
    shapes |= {f"{norm}.weight": (D,) for norm in norms}
    generator = torch.Generator().manual_seed(0)
    return {name: (torch.randn(shape, generator=generator) * 0.2).to(dtype) for name, shape in shapes.items()}


@pytest.fixture
def target_config(llama, tmp_path):
    llama.config.save_pretrained(tmp_path / "target")
    return str(tmp_path / "target" / "config.json")


def as_safetensors(tensors, folder):
    save_file(tensors, folder / "model.safetensors")
    return folder


def as_wrapped_file(tensors, folder):
    torch.save({f"module.draft_model.{name}": value for name, value in tensors.items()}, folder / "x.pth")
    return folder / "x.pth"


@pytest.mark.parametrize("layout", [as_safetensors, as_wrapped_file])
def test_names_with_and_without_the_trainers_prefix(layout, target_config, tmp_path, llama):
    tensors = published_tensors()
    assert len(tensors) == 20
    draft = convert(str(layout(tensors, tmp_path)), target_config)
    found = draft.block.state_dict()
    assert len(found) == 16 and draft.dtype == torch.float16
    assert all(torch.equal(value, tensors[name]) for name, value in found.items())
    assert (draft.config.window, draft.config.kv_layer, draft.setting("tree_widths")) == (513, 1, [4, 16, 16, 16, 11])


def without_a_matrix(tensors):
    del tensors["mlp.up_proj.weight"]
    return tensors | {"lm_head.weight": torch.ones(2)}


@pytest.mark.parametrize(
    ("change", "inner", "message"),
    [
        (without_a_matrix, INNER, r"missing tensors \['mlp.up_proj.weight'\], unknown tensors \['lm_head.weight'"),
        (dict, 80, r"mlp\.\w+\.weight has shape .* expected .*Pass the target"),
        (lambda _: {"model.embed_tokens.weight": torch.ones(2)}, INNER, r"'cross_attn\.' or 'model\.medusa_layers\.'"),
        (dict, None, r"the target of .* is unknown.* Pass the target, its id"),
    ],
    ids=["tensors", "another target", "no known method", "no target"],
)
def test_refusals(tmp_path, change, inner, message):
    source = str(as_safetensors(change(published_tensors()), tmp_path))
    if inner is not None:
        tiny_target("llama", intermediate_size=inner).config.save_pretrained(tmp_path / "target")
    with pytest.raises(ValueError, match=message):
        convert(source, *([] if inner is None else [str(tmp_path / "target")]))
