"""A stand-in of fla-core 0.6: signatures, layouts and dtypes of the delta rules, in plain torch."""

__version__ = "0.6.0"
