"""Special cases of targets and calls, a file each, and their entries in the lists of the core."""

from typing import Any

from ..cache import LAYERS
from ..special_case import MODES, SPECIAL_CASES
from .copies import Copies
from .forward_check import FirstChecks, Hooks
from .gate import Gate
from .grammar import Grammars
from .half_precision import HalfPrecision
from .images import Inputs
from .masked import LAYERS_OF_INDEXERS, MASKED
from .packed_products import PackedProducts
from .parallel import Parallel, Sharded
from .processors import Processors
from .prompt_progress import PromptProgress
from .recurrent_states import LAYERS_OF_STATES, RECURRENT
from .rotary_limit import RotaryFrequencies
from .trial import HYBRID
from .user_caches import UserCaches


def register_special_cases() -> None:
    """Register all special cases. Repeating it changes nothing."""
    MODES[:] = RECURRENT, MASKED, HYBRID  # the last one takes all targets
    LAYERS.update(LAYERS_OF_STATES | LAYERS_OF_INDEXERS)
    calls = Sharded, UserCaches, Processors, Grammars, Inputs, Copies, FirstChecks, Hooks
    targets = RotaryFrequencies, Parallel, PackedProducts, HalfPrecision, PromptProgress
    cases: tuple[Any, ...] = *calls, *targets, Gate
    SPECIAL_CASES.update((each.case, each()) for each in cases if each.case not in SPECIAL_CASES)
