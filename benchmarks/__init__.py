"""Benchmarks that the authors run: fixed configurations for the tables in the documentation, and their results.

Run one as `python -m benchmarks.figure`, from the root of a checkout. The rules of `hf_longspec.bench` hold for every
number.
"""
