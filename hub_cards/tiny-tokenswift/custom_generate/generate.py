# Published with a draft by hf_longspec, Apache-2.0.
"""Decoding with a draft, without the route that its own files install.

    target.generate(**inputs, assistant_model=draft, custom_generate="org/longspec-draft", trust_remote_code=True)

Published as custom_generate/generate.py. Transformers does not let this file import the others of its repository, so
the loop comes with the draft.
"""

from typing import Any


def generate(model: Any, assistant_model: Any = None, streamer: Any = None, **kwargs: Any) -> Any:
    """What `model.generate(assistant_model=draft)` does.

    Args:
        model (`PreTrainedModel`): The target.
        assistant_model (`PreTrainedModel`): The draft.
        streamer (`BaseStreamer`, *optional*): Gets the prompt, then every token.

    Raises:
        ValueError: If `assistant_model` is no draft of this kind.
    """
    if not getattr(assistant_model, "_is_longspec_draft", False):
        raise ValueError(
            f"assistant_model={type(assistant_model).__name__}: expected the draft of this repository. Load it with "
            "AutoModel.from_pretrained(..., trust_remote_code=True) and pass it as assistant_model."
        )

    # Transformers hands a callable neither streamer nor assistant, so this one brings both.
    def decode(target: Any, input_ids: Any, **arguments: Any) -> Any:
        if streamer is not None:
            streamer.put(input_ids.cpu())
        return assistant_model.longspec_decoding(target, input_ids, streamer=streamer, **arguments)

    return model.generate(custom_generate=decode, **kwargs)
