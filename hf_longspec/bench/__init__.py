"""The benchmark harness. The scripts in `benchmarks/` are thin configurations of it.

Four rules hold for every number it prints:

- Ratios are taken side by side in one run: the methods are repeated in turns, at least five times, and a ratio is the
  median of the ratios within each turn. The lowest and the highest stand beside it.
- What fails its parity check is not timed: greedy float32 text must be that of plain `generate`, attention must be as
  close to a float64 reference as plain torch is.
- The environment, the command and the commit are the first line of every result file.
- Both baselines are printed: plain `generate`, which copies its cache in every step, and our own loop without a draft.
"""
