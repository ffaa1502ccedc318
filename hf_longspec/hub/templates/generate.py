"""Decode with a draft through `custom_generate`, without the route that loading the draft installs.

    target.generate(**inputs, assistant_model=draft, custom_generate="org/longspec-draft", trust_remote_code=True)

This file is published as custom_generate/generate.py. Transformers does not let it import other files of the
repository, so it calls the decoding loop as a method of the draft.
"""

from typing import Any


def generate(model: Any, assistant_model: Any = None, streamer: Any = None, **kwargs: Any) -> Any:
    """Generate like `model.generate(assistant_model=draft)` with the route installed; refuse any other assistant."""
    if not getattr(assistant_model, "_is_longspec_draft", False):
        raise ValueError(
            f"assistant_model={type(assistant_model).__name__}: expected the draft of this repository. Load it with "
            "AutoModel.from_pretrained(..., trust_remote_code=True) and pass it as assistant_model."
        )

    # transformers passes neither streamer nor assistant to a callable, so this closure holds both
    def decode(target: Any, input_ids: Any, **arguments: Any) -> Any:
        if streamer is not None:
            streamer.put(input_ids.cpu())
        return assistant_model.longspec_decoding(target, input_ids, streamer=streamer, **arguments)

    return model.generate(custom_generate=decode, **kwargs)
