"""A key/value cache that keeps the first and the last tokens of a text, for drafts of constant cost.

StreamingLLM, https://huggingface.co/papers/2309.17453, keeps a few first tokens (sinks) and a window of last ones. Keys
are rotated before they are cached, so here tokens stay at their true positions, and attention sees a gap after the
sinks. StreamingLLM numbers the kept tokens anew instead, for which it caches keys that are not rotated.
"""

import torch
from transformers import PreTrainedConfig

from ..attention_backends.lengths import SeqLens, on_device
from .cache import SpeculativeCache


class WindowedCache(SpeculativeCache):
    """Hold the first `sinks` and at least the last `window` tokens of every row.

    A row drops tokens when it holds a quarter of the window more than that, all at once, so that few steps move
    entries. Every row decides by its own length. Kept tokens lie side by side in the order of the text: the token at
    position p lies in slot `p - dropped`, except for the sinks.

    Args:
        config (`PreTrainedConfig`): Configuration of the model.
        batch_size (`int`): Number of rows.
        max_length (`int`): Maximum number of tokens of a row.
        tree_slots (`int`): Nodes that one step may stage after the committed tokens.
        window (`int`, *optional*): Number of last tokens to keep. All tokens are kept by default.
        sinks (`int`, *optional*, defaults to 4): Number of first tokens to keep.

    Attributes:
        dropped ([`SeqLens`]): Number of tokens that each row has dropped.
    """

    def __init__(
        self,
        config: PreTrainedConfig,
        batch_size: int,
        max_length: int,
        tree_slots: int,
        window: int | None = None,
        sinks: int = 4,
    ):
        self.window, self.sinks = window, sinks
        self.most = max_length if window is None else min(max_length, sinks + window + max(1, window // 4))
        self.dropped = SeqLens((0,) * batch_size)
        super().__init__(config, batch_size, self.most, tree_slots)

    @property
    def positions(self) -> list[int]:
        """Position of the token that follows the committed ones, in every row."""
        return [held + dropped for held, dropped in zip(self.lengths.host, self.dropped.host, strict=True)]

    def kept_of(self, length: int) -> list[int]:
        """Return the positions that a text of `length` tokens has in an empty cache, without those it would drop."""
        if self.window is None or length <= self.sinks + self.window:
            return list(range(length))
        return [*range(self.sinks), *range(length - self.window, length)]

    def trim(self) -> None:
        """Drop tokens of rows that hold too many."""
        if self.window is None or self.lengths.longest <= self.most:
            return
        kept, host = self.sinks + self.window, self.lengths.host
        drops = [length - kept if length > self.most else 0 for length in host]
        lengths = [length - drop for length, drop in zip(host, drops, strict=True)]
        dropped = [before + drop for before, drop in zip(self.dropped.host, drops, strict=True)]
        numbers = on_device([drops, lengths, dropped], self.layers[0].keys.device)  # one copy for all of them
        places = torch.arange(self.sinks, kept, device=numbers.device) + numbers[0][:, None]  # [B, window]
        for layer in self.layers:
            if layer.is_initialized:
                states = layer.keys, layer.values
                index = places.to(layer.keys.device)[:, None, :, None]
                moved = [x.gather(2, index.expand(-1, x.shape[1], -1, x.shape[3])) for x in states]
                torch._foreach_copy_([x[:, :, self.sinks : kept] for x in states], moved)
        self.dropped = SeqLens(dropped, numbers[2])
        self.set_lengths(SeqLens(lengths, numbers[1]))

    def reset(self) -> None:
        """Remove all tokens, and keep the buffers."""
        super().reset()
        self.dropped = SeqLens((0,) * self.batch_size)
