"""Operations of torch, seen as they run."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Operations(TorchDispatchMode):
    """Calls `note(function, args, tensors of the result)` after every operation while it is entered."""

    def __init__(self, note):
        super().__init__()
        self.note = note

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        self.note(function, (*args, *(kwargs or {}).values()), [x for x in tree_leaves(out) if torch.is_tensor(x)])
        return out
