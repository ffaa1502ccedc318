"""Reading of the assistants that Google publishes for Gemma 4.

Tensors and fields are those of transformers' `gemma4_assistant` and `gemma4_unified_assistant`, whose layers are equal
as far as an assistant has them. Names and shapes are compared before a tensor is read, and only safetensors are read.
"""

from collections.abc import Mapping
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from ..loading import Checkpoint
from ..register_draft import Converter
from ..shared.convert_speculators import draft_of, refuse
from .modeling_gemma4_assistant import Gemma4AssistantDraftConfig

FORMS = {"gemma4_assistant": "gemma4_text", "gemma4_unified_assistant": "gemma4_unified_text"}
FORMATS = ("model.safetensors.index.json", "model.safetensors")
FIELDS = ("backbone_hidden_size", "use_ordered_embeddings", "num_centroids", "centroid_intermediate_top_k")
SIZES = ("E2B", "E4B", "26B-A4B", "31B", "12B")
TARGETS = {f"google/gemma-4-{size}-it-assistant": f"google/gemma-4-{size}-it" for size in SIZES}


def is_gemma4_assistant(raw: Mapping[str, Any]) -> bool:
    """Return whether a config.json is that of an assistant of Gemma 4."""
    return raw.get("model_type") in FORMS


def gemma4_assistant_draft(
    checkpoint: Checkpoint, target: PreTrainedModel | PreTrainedConfig | None, dtype: Any = None
) -> Any:
    """Return the draft of a checkpoint, see [`Converter`].

    Raises:
        ValueError: If it is not an assistant of Gemma 4, or its files do not fit together or to the target.
    """
    raw = checkpoint.read_config()
    layer = dict(raw.get("text_config") or {})
    form, kind = raw.get("model_type"), layer.pop("model_type", None)
    if form not in FORMS or kind not in (None, FORMS[form]):
        rule = f"expected one of {', '.join(FORMS)}, with the layers of its own target"
        refuse(checkpoint.source, f"config.json has model_type={form!r} and layers of {kind!r}", rule)
    # transformers' own defaults, for fields that a file leaves out
    values = {name: raw[name] for name in FIELDS if name in raw}
    facts = {} if target is None else Gemma4AssistantDraftConfig.facts_of(target)
    values |= {"vocab_size": layer.get("vocab_size", 0), "layer_config": layer}
    config = Gemma4AssistantDraftConfig(**(facts | values))
    names = {name: name.removeprefix("model.").removeprefix("masked_embedding.") for name in checkpoint.names}
    names.pop("lm_head.weight", None)  # a copy of the embedding
    draft = draft_of(checkpoint, names, config, "complete assistant of Gemma 4", dtype)
    if (ordering := draft.token_ordering) is not None:
        draft.token_ordering = ordering.long()
        if not torch.equal(draft.token_ordering.sort().values, torch.arange(len(ordering))):
            refuse(checkpoint.source, "token_ordering leaves out tokens", "expected each token of the vocabulary once")
    return draft


GEMMA4_ASSISTANT = Converter(TARGETS, r"^post_projection\.", gemma4_assistant_draft, FORMATS)
