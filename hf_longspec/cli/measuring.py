"""One measured call of `generate`: the same clock for every way to decode."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.generation.streamers import BaseStreamer

WARM_UP_PROMPT, WARM_UP_TOKENS = 64, 8


@dataclass(frozen=True)
class Measurement:
    """One row of the table.

    Args:
        name (`str`): How it was decoded.
        tokens (`tuple[int, ...]`): What was emitted.
        first_token_seconds (`float`): From the call to the first token: prefill.
        decode_seconds (`float`): From the first token to the last.
        tau (`float`, *optional*): Tokens per verification; `None` for the stock loop.
        drafted (`float`): Drafted tokens per verification.
    """

    name: str
    tokens: tuple[int, ...]
    first_token_seconds: float
    decode_seconds: float
    tau: float | None = None
    drafted: float = 0.0

    @property
    def tokens_per_second(self) -> float:
        """Speed of decoding, the prefill and the first token apart."""
        return (len(self.tokens) - 1) / self.decode_seconds if self.decode_seconds else 0.0


class StopWatch(BaseStreamer):
    """Notes when tokens arrive. `generate` hands on the prompt first, which is not timed.

    Args:
        on_first_token (`Callable[[], None]`): Called when the prefill is over.
        text (`BaseStreamer`, *optional*): Receives everything too.
    """

    def __init__(self, on_first_token: Callable[[], None], text: BaseStreamer | None = None):
        self.on_first_token = on_first_token
        self.text = text
        self.saw_prompt = False
        self.arrivals: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        """Called by `generate` with the prompt, then with every token."""
        if self.saw_prompt:
            self.arrivals.append(time.perf_counter())
            if len(self.arrivals) == 1:
                self.on_first_token()
        self.saw_prompt = True
        if self.text is not None:
            self.text.put(value)

    def end(self) -> None:
        """Called by `generate` behind the last token."""
        if self.text is not None:
            self.text.end()


def measure(
    name: str,
    model: PreTrainedModel,
    draft: Any,
    input_ids: torch.Tensor,
    max_new_tokens: int,
    watch: StopWatch,
) -> Measurement:
    """Decode greedily with `draft` (`None`: the stock loop), timed by `watch`."""
    input_ids = input_ids.to(model.device)
    started = time.perf_counter()
    output = _generate(model, draft, input_ids, max_new_tokens, streamer=watch)
    tokens = tuple(output.sequences[0, input_ids.shape[1] :].tolist())
    stats = getattr(output, "speculation", None)
    return Measurement(
        name,
        tokens,
        first_token_seconds=watch.arrivals[0] - started,
        decode_seconds=watch.arrivals[-1] - watch.arrivals[0],
        tau=stats.mean_acceptance_length if stats else None,
        drafted=stats.num_draft_tokens / max(stats.num_spec_steps, 1) if stats else 0.0,
    )


def warm_up(model: PreTrainedModel, draft: Any, input_ids: torch.Tensor) -> None:
    """A few tokens behind the end of the prompt: what is slow only the first time is not measured."""
    _generate(model, draft, input_ids[:, -WARM_UP_PROMPT:].to(model.device), WARM_UP_TOKENS)


def _generate(model: PreTrainedModel, draft: Any, input_ids: torch.Tensor, max_new_tokens: int, **kwargs: Any) -> Any:
    return model.generate(
        input_ids,
        attention_mask=torch.ones_like(input_ids),
        assistant_model=draft,
        max_new_tokens=max_new_tokens,
        do_sample=False,
        return_dict_in_generate=True,
        **kwargs,
    )


def prefill_work(model: PreTrainedModel, num_tokens: int) -> int:
    """What [`watched_layers`] counts up to during the prefill of `num_tokens` tokens."""
    return len(_layers(model)) * num_tokens


@contextmanager
def watched_layers(model: PreTrainedModel, advance: Callable[[int], None]) -> Iterator[Callable[[], None]]:
    """Call `advance(tokens)` whenever a decoder layer has run; yields a function that stops this."""

    def hook(layer: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        states = args[0] if args else kwargs.get("hidden_states")
        if torch.is_tensor(states):
            advance(states.shape[1])

    handles = [layer.register_forward_hook(hook, with_kwargs=True) for layer in _layers(model)]

    def stop() -> None:
        for handle in handles:
            handle.remove()

    try:
        yield stop
    finally:
        stop()


def _layers(model: PreTrainedModel) -> Sequence[torch.nn.Module]:
    """The decoder layers; none if they cannot be told, which costs the progress bar and nothing else."""
    count = model.config.get_text_config(decoder=True).num_hidden_layers
    lists = (module for module in model.modules() if isinstance(module, torch.nn.ModuleList))
    return next((list(layers) for layers in lists if len(layers) == count), [])
