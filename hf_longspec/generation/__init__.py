"""How a draft is used: the decoding loop, its cache, its rules, and the route from `generate()`."""

from .special_cases import register_special_cases

register_special_cases()
