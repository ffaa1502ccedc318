"""Enter the wings in the lists of the core. One may be missing: the core then refuses its case by name."""

from ..cache import FILES, LAYERS
from ..wing import MODES, WINGS

try:
    from .trial import HYBRID
except ImportError:
    HYBRID = None  # type: ignore[assignment]
try:
    from .recurrent_states import LAYERS_OF_STATES, RECURRENT
except ImportError:
    LAYERS_OF_STATES, RECURRENT = {}, None  # type: ignore[assignment]
try:
    from .masked import LAYERS_OF_INDEXERS, MASKED
except ImportError:
    LAYERS_OF_INDEXERS, MASKED = {}, None  # type: ignore[assignment]
try:
    from .user_caches import UserCaches
except ImportError:
    UserCaches = None  # type: ignore[assignment, misc]
try:
    from .cache_files import load_cache, save_cache
except ImportError:
    load_cache = None  # type: ignore[assignment]
try:
    from .padding import Gaps
except ImportError:
    Gaps = None  # type: ignore[assignment, misc]
try:
    from .processors import Processors
except ImportError:
    Processors = None  # type: ignore[assignment, misc]
try:
    from .grammar import Grammars
except ImportError:
    Grammars = None  # type: ignore[assignment, misc]
try:
    from .images import Inputs
except ImportError:
    Inputs = None  # type: ignore[assignment, misc]
try:
    from .rotary_limit import RotaryFrequencies
except ImportError:
    RotaryFrequencies = None  # type: ignore[assignment, misc]
try:
    from .forward_check import FirstChecks, Hooks
except ImportError:
    FirstChecks = Hooks = None  # type: ignore[assignment, misc]
try:
    from .gate import Gate
except ImportError:
    Gate = None  # type: ignore[assignment, misc]
try:
    from .parallel import Parallel
except ImportError:
    Parallel = None  # type: ignore[assignment, misc]


def register_wings() -> None:
    """Register what is there. Repeating it changes nothing."""
    modes = RECURRENT, MASKED, HYBRID  # the last one takes all targets
    MODES[:] = [mode for mode in modes if mode is not None]
    LAYERS.update(LAYERS_OF_STATES | LAYERS_OF_INDEXERS)
    if load_cache is not None:
        FILES.update({"save": save_cache, "load": load_cache})
    wings = UserCaches, Gaps, Processors, Grammars, Inputs, RotaryFrequencies, FirstChecks, Hooks, Gate, Parallel
    WINGS.update((wing.case, wing()) for wing in wings if wing is not None and wing.case not in WINGS)
