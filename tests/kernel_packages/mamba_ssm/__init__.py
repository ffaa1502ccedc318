"""A stand-in of mamba-ssm 2.3: signatures, layouts, dtypes and in-place updates of the scans, in plain torch."""

from mamba_ssm.ops.selective_scan_interface import mamba_inner_fn, selective_scan_fn

__version__ = "2.3.2"
__all__ = ["mamba_inner_fn", "selective_scan_fn"]
