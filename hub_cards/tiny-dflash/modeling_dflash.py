"""The classes of this draft, from the installed package.

`make cards` builds the complete repository, which runs without the package, in build/hub_cards.
"""

from hf_longspec import DFlashConfig, DFlashDraftModel

__all__ = ["DFlashConfig", "DFlashDraftModel"]
