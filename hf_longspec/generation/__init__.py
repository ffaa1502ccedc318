"""How a draft is used: the decoding loop, its cache, its rules, and the route from `generate()`."""

from .wings.register import register_wings

register_wings()
