"""GGUF files of tiny random targets, in blocks of 8 bits, as llama.cpp writes them."""

from pathlib import Path

import numpy as np
import torch

from tests.tiny_targets import BOS_TOKEN_ID, EOS_TOKEN_ID

VOCAB_SIZE, HIDDEN_SIZE, MLP_SIZE, HEADS, KV_HEADS, LAYERS = 288, 96, 160, 6, 2, 2


def vocabulary() -> list[str]:
    """Three special tokens, one token for each byte in the letters of GPT-2, and tokens that nothing spells."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    tokens = ["<pad>", "<s>", "</s>", *bytes_to_unicode().values()]
    tokens += ["ab", "cd"]
    return [*tokens, *(f"<unused{number}>" for number in range(VOCAB_SIZE - len(tokens)))]


def write_tiny_gguf(file: Path, seed: int = 0) -> dict[str, np.ndarray]:
    """Write a Llama of two layers, and return its matrices `(rows, columns)` as the blocks round them, by name."""
    import gguf

    writer = gguf.GGUFWriter(str(file), "llama")
    writer.add_context_length(2048)
    writer.add_embedding_length(HIDDEN_SIZE)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(MLP_SIZE)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_dimension_count(HIDDEN_SIZE // HEADS)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(VOCAB_SIZE)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens := vocabulary())
    writer.add_token_types([3] * 3 + [1] * (len(tokens) - 3))
    writer.add_token_merges(["a b", "c d"])
    writer.add_bos_token_id(BOS_TOKEN_ID)
    writer.add_eos_token_id(EOS_TOKEN_ID)
    kv_size = HIDDEN_SIZE // HEADS * KV_HEADS
    sizes = {"token_embd": (VOCAB_SIZE, HIDDEN_SIZE), "output": (VOCAB_SIZE, HIDDEN_SIZE)}
    for layer in range(LAYERS):
        sizes |= {f"blk.{layer}.attn_{name}": (HIDDEN_SIZE, HIDDEN_SIZE) for name in ("q", "output")}
        sizes |= {f"blk.{layer}.attn_{name}": (kv_size, HIDDEN_SIZE) for name in ("k", "v")}
        sizes |= {f"blk.{layer}.ffn_{name}": (MLP_SIZE, HIDDEN_SIZE) for name in ("gate", "up")}
        sizes[f"blk.{layer}.ffn_down"] = HIDDEN_SIZE, MLP_SIZE
    generator, kind, rounded = torch.Generator().manual_seed(seed), gguf.GGMLQuantizationType.Q8_0, {}
    for name, (rows, columns) in sizes.items():
        scale = 1.0 if name == "token_embd" else 2.0 * columns**-0.5
        weight = (torch.randn(rows, columns, generator=generator) * scale).numpy()
        blocks = gguf.quants.quantize(weight, kind)
        rounded[name] = gguf.quants.dequantize(blocks, kind)
        writer.add_tensor(f"{name}.weight", blocks, raw_dtype=kind)
    norms = [f"blk.{layer}.{name}_norm" for layer in range(LAYERS) for name in ("attn", "ffn")]
    for name in [*norms, "output_norm"]:
        writer.add_tensor(f"{name}.weight", np.ones(HIDDEN_SIZE, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return rounded
