"""Enter the wings in the lists of the core, which imports none of them."""

from ..cache import FILES, LAYERS
from ..wing import MODES, WINGS
from .cache_files import load_cache, save_cache
from .forward_check import FirstChecks, Hooks
from .gate import Gate
from .grammar import Grammars
from .images import Inputs
from .masked import LAYERS_OF_INDEXERS, MASKED
from .padding import Gaps
from .parallel import Parallel
from .processors import Processors
from .recurrent_states import LAYERS_OF_STATES, RECURRENT
from .rotary_limit import RotaryFrequencies
from .trial import HYBRID
from .user_caches import UserCaches


def register_wings() -> None:
    """Register all wings. Repeating it changes nothing."""
    MODES[:] = RECURRENT, MASKED, HYBRID  # the last one takes all targets
    LAYERS.update(LAYERS_OF_STATES | LAYERS_OF_INDEXERS)
    FILES.update({"save": save_cache, "load": load_cache})
    wings = UserCaches, Gaps, Processors, Grammars, Inputs, RotaryFrequencies, FirstChecks, Hooks, Gate, Parallel
    WINGS.update((wing.case, wing()) for wing in wings if wing.case not in WINGS)
