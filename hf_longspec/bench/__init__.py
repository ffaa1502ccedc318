"""Measurements: the code that `hf-longspec bench`, `tune`, `demo` and the benchmarks of the repository share.

- Ratios are taken side by side in one run: the methods take turns, and a ratio is the median of the ratios within each
  turn, with the lowest and the highest as its range.
- A text is checked before its speed is reported.
- The environment, the command and the commit are the first line of every result file.
- Both baselines are measured: plain `generate`, which copies its cache in every step, and the loop without a draft.
"""
