"""How a draft is used: the decoding loop, its cache, its rules, and the route from `generate()`."""
