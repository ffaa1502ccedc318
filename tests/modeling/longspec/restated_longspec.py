"""The LongSpec block in straight lines, for one token at a time: what the drafter is compared with.

Plain matrix products over explicit lists of positions, no cache, no ring, no tree, no attention kernel. Rotation by the
textbook formula (half of a head against the other half), so this covers targets that rotate as Llama does.
"""

import torch
from transformers import DynamicCache

from hf_longspec.generation.cache import CACHE_NAME


def rms_norm(states, weight, eps):
    return weight * states / (states.pow(2).mean(-1, keepdim=True) + eps).sqrt()


def turn(states, position, theta):
    """`(heads, D)` rotated to `position`."""
    half = states.shape[-1] // 2
    angle = position * theta ** (-torch.arange(half, dtype=states.dtype) / half)
    first, second = states[:, :half], states[:, half:]
    return torch.cat([first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin()], -1)


def attend(query, keys, values):
    """`(H, D)` to keys and values `(K, T, D)`."""
    groups = query.shape[0] // keys.shape[0]
    keys, values = keys.repeat_interleave(groups, 0), values.repeat_interleave(groups, 0)
    weights = (torch.einsum("hd,htd->ht", query, keys) / query.shape[-1] ** 0.5).softmax(-1)
    return torch.einsum("ht,htd->hd", weights, values)


class Restated:
    """Logits of a draft after a text and a path of drafted tokens."""

    def __init__(self, draft, target):
        self.config, self.target = draft.config, target
        self.weights = {name: weight.detach().double() for name, weight in draft.block.state_dict().items()}
        self.embedding = target.get_input_embeddings().weight.detach().double()
        self.head = target.get_output_embeddings().weight.detach().double()
        self.theta = target.config.rope_parameters["rope_theta"]

    def project(self, name, states):
        bias = self.weights.get(f"{name}.bias", 0.0)
        return self.weights[f"{name}.weight"] @ states + bias

    def norm(self, name, states):
        return rms_norm(states, self.weights[f"{name}.weight"], self.config.rms_norm_eps)

    def heads(self, states):
        return states.view(-1, self.config.head_dim)

    def target_keys(self, text):
        cache = DynamicCache()
        with torch.no_grad():
            self.target.double()(torch.tensor([text]), **{CACHE_NAME: cache})
        self.target.float()
        layer = cache.layers[self.config.kv_layer]
        return layer.keys[0], layer.values[0]

    def logits(self, text, path, target_keys):
        """After `path`, the root and its drafted successors, after the committed `text`."""
        tokens, here = [*text, *path], len(text) + len(path) - 1
        seen = range(max(0, here - self.config.window + 1), here + 1)
        keys, values = [], []
        for position in seen:
            normed = self.norm("input_layernorm", self.embedding[tokens[position]])
            keys.append(turn(self.heads(self.project("self_attn.k_proj", normed)), position, self.theta))
            values.append(self.heads(self.project("self_attn.v_proj", normed)))
        hidden = self.embedding[tokens[here]]
        query = self.heads(self.project("self_attn.q_proj", self.norm("input_layernorm", hidden)))
        attended = attend(turn(query, here, self.theta), torch.stack(keys, 1), torch.stack(values, 1))
        hidden = hidden + self.project("self_attn.o_proj", attended.flatten())
        if self.config.cross_attention:
            query = self.heads(self.project("cross_attn.q_proj", self.norm("post_self_attention_layernorm", hidden)))
            attended = attend(turn(query, here, self.theta), *target_keys)
            hidden = hidden + self.project("cross_attn.o_proj", attended.flatten())
        normed = self.norm("post_cross_attention_layernorm", hidden)
        gate = torch.nn.functional.silu(self.project("mlp.gate_proj", normed))
        return self.head @ (hidden + self.project("mlp.down_proj", gate * self.project("mlp.up_proj", normed)))
