"""Benchmarks that the authors run: fixed configurations for the tables in the documentation, and their results.

Run one as `python -m benchmarks.figure`, from the root of a checkout. Four rules hold for every number:

- Ratios are taken side by side in one run: the methods are repeated in turns, at least five times, and a ratio is the
  median of the ratios within each turn. Reports give the lowest and the highest ratio with it.
- A method that fails its check is not timed: greedy float32 text must be that of plain `generate`, attention must be as
  close to a float64 reference as plain torch is.
- The environment, the command and the commit are the first line of every result file.
- Both baselines are measured: plain `generate`, which copies its cache in every step, and the loop without a draft.
"""
