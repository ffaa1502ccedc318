"""Logits processors that users may write: with state in their own attributes, and in what their functions reach.

Every processor steers the text by the number of its calls, so one call more or less, or in another order, shows.
Others are in user_places.py, with state elsewhere; in user_rules.py, by what they do with their arguments; and in
user_declarations.py, of libraries or with a declaration.
"""

import collections
import dataclasses
import enum
import functools
import itertools
import sys
import types
from typing import Any
from unittest.mock import Mock

import torch
from torch import nn

VOCAB, ENDS = 32, [10, 11]
# Every third call favours a token so much that it is emitted; the others leave a draft something to accept.
PERIOD, SPAN, STRENGTH = 3, 9, 30.0


@dataclasses.dataclass
class Made:
    """Fresh processors, further arguments of `generate`, and what a user could see of their state."""

    processors: list[Any] = dataclasses.field(default_factory=list)
    kwargs: dict[str, Any] = dataclasses.field(default_factory=dict)
    state: Any = lambda: None  # called once, after `generate`


@dataclasses.dataclass(frozen=True)
class Entry:
    """One kind of processor.

    Attributes:
        maker: Returns [`Made`] and resets what earlier processors of the kind left.
        has_model: Whether the maker takes the target.
        is_declared: Whether it truly says that its calls do not depend on each other, so that a draft is used.
        is_sampled: Whether a seed decides the sampled text, whatever else draws from the random numbers.
        has_effect: Whether the text with it differs from that without it: always, with a `"batch"` or a `"single"`
            prompt alone, or only if it is called wrongly.
    """

    maker: Any
    has_model: bool = False
    is_declared: bool = False
    is_sampled: bool = True
    has_effect: bool | str = True

    def make(self, model: Any) -> Made:
        """Return fresh processors for a call of `model`."""
        return self.maker(model) if self.has_model else self.maker()


PROCESSORS: dict[str, Entry] = {}


def kind(maker: Any = None, **facts: Any) -> Any:
    """Add a maker to the list, under its name."""
    if maker is None:
        return functools.partial(kind, **facts)
    assert maker.__name__ not in PROCESSORS
    PROCESSORS[maker.__name__] = Entry(maker, **facts)
    return maker


def place(maker: Any = None, **facts: Any) -> Any:
    """Add a processor that counts by the functions that `maker` returns: one that counts a call, and one that reads."""
    if maker is None:
        return functools.partial(place, **facts)

    @functools.wraps(maker)
    def make(*model):
        bump, read = maker(*model)
        return Made([lambda input_ids, scores: steer(input_ids, scores, bump())], state=read)

    return kind(make, **facts)


def steer(input_ids: torch.Tensor, scores: torch.Tensor, count: int) -> torch.Tensor:
    """Favour a token by a number of calls and the last token of each row."""
    if count % PERIOD:
        return scores
    wanted = 3 + (count // PERIOD + input_ids[:, -1:]) % SPAN
    return scores.scatter_add(1, wanted, scores.new_full(wanted.shape, STRENGTH))


def favour(scores: torch.Tensor, tokens: torch.Tensor, strength: float = STRENGTH) -> torch.Tensor:
    """Favour a token of each row, of `(batch, 1)`."""
    return scores.scatter_add(1, tokens, scores.new_full(tokens.shape, strength))


def counted(call, **state):
    """Return a processor that runs `call`, whose first argument holds other state and `calls`, the number of calls."""
    held = types.SimpleNamespace(calls=0, **state)

    def processor(input_ids, scores):
        held.calls += 1
        return call(held, input_ids, scores)

    return Made([processor], state=lambda: held.calls)


class Steering:
    """Base of processors whose class is the user's; `count` is called once for each call."""

    def count(self) -> int:
        raise NotImplementedError

    def __call__(self, input_ids, scores):
        return steer(input_ids, scores, self.count())


def own(cls: Any) -> Made:
    """Return a processor whose attribute `calls` is its state."""
    one = cls()
    return Made([one], state=lambda: one.calls)


# State on the processor and its class.


@kind
def attribute():
    class Attribute(Steering):
        calls = 0

        def count(self):
            self.calls += 1
            return self.calls

    return own(Attribute)


@kind
def slots():
    class Slots:
        __slots__ = ("calls",)

        def __init__(self):
            self.calls = 0

        def __call__(self, input_ids, scores):
            self.calls += 1
            return steer(input_ids, scores, self.calls)

    return own(Slots)


class OfClass(Steering):
    calls = 0

    def count(self):
        type(self).calls += 1
        return self.calls


@kind
def class_attribute():
    OfClass.calls = 0
    return own(OfClass)


@kind
def iterator_of_class():
    class Numbers(Steering):
        numbers = iter(range(1, 1000))

        def count(self):
            return next(self.numbers)

    return Made([Numbers()], state=lambda: Numbers.numbers.__length_hint__())


@kind
def metaclass():
    class Meta(type):
        calls = 0

    class Counted(Steering, metaclass=Meta):
        def count(self):
            Meta.calls += 1
            return Meta.calls

    return Made([Counted()], state=lambda: Meta.calls)


@kind
def descriptor():
    class Next:
        value = 0

        def __get__(self, instance, owner):
            self.value += instance is not None
            return self.value

    class Described(Steering):
        number = Next()

        def count(self):
            return self.number

    return Made([Described()], state=lambda: Described.number)


@kind
def a_property():
    class Counted(Steering):
        calls = 0

        @property
        def number(self):
            self.calls += 1
            return self.calls

        def count(self):
            return self.number

    return own(Counted)


@kind
def a_dataclass():
    @dataclasses.dataclass
    class Data(Steering):
        calls: int = 0

        def count(self):
            self.calls += 1
            return self.calls

    return own(Data)


@kind
def frozen_dataclass():
    @dataclasses.dataclass(frozen=True)
    class Frozen(Steering):
        calls: int = 0

        def count(self):
            object.__setattr__(self, "calls", self.calls + 1)
            return self.calls

    return own(Frozen)


@kind
def call_of_a_made_up_class():
    calls = []

    def call(self, input_ids, scores):
        calls.append(0)
        return steer(input_ids, scores, len(calls))

    return Made([type("MadeUp", (), {"__call__": call})()], state=lambda: len(calls))


@kind
def getattr_of_another():
    class Proxy(Steering):
        def __init__(self, inner):
            vars(self)["inner"] = inner

        def __getattr__(self, name):
            return getattr(vars(self)["inner"], name)

        def __setattr__(self, name, value):
            setattr(vars(self)["inner"], name, value)

        def count(self):
            self.calls = self.calls + 1
            return self.calls

    inner = types.SimpleNamespace(calls=0)
    return Made([Proxy(inner)], state=lambda: inner.calls)


class Owner:
    calls = 0

    def process(self, input_ids, scores):
        self.calls += 1
        return steer(input_ids, scores, self.calls)

    @classmethod
    def process_by_class(cls, input_ids, scores):
        cls.calls += 1
        return steer(input_ids, scores, cls.calls)


@kind
def bound_method():
    owner = Owner()
    return Made([owner.process], state=lambda: owner.calls)


@kind
def class_method():
    owner = type("Owner", (Owner,), {"calls": 0})
    return Made([owner.process_by_class], state=lambda: owner.calls)


@kind
def declared_with_state():
    made = attribute()
    made.processors[0].stateless = False
    return made


@kind
def module_with_buffer():
    class Counted(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("calls", torch.zeros((), dtype=torch.long))

        def forward(self, input_ids, scores):
            self.calls += 1
            return steer(input_ids, scores, int(self.calls))

    one = Counted()
    return Made([one], state=lambda: int(one.calls))


# State that functions reach.

_calls = 0
_items: list[int] = []


@place
def closure():
    count = 0

    def bump():
        nonlocal count
        count += 1
        return count

    return bump, lambda: count


@place
def module_global():
    global _calls
    _calls = 0

    def bump():
        global _calls
        _calls += 1
        return _calls

    return bump, lambda: _calls


@place
def list_of_module():
    _items.clear()
    return lambda: _items.append(0) or len(_items), lambda: len(_items)


@place
def function_attribute():
    def bump():
        bump.calls += 1
        return bump.calls

    bump.calls = 0
    return bump, lambda: bump.calls


@place
def mutable_default():
    def bump(seen=[]):  # noqa: B006
        seen.append(1)
        return len(seen)

    return bump, lambda: len(bump.__defaults__[0])


@place
def partial_with_list():
    bump = functools.partial(lambda seen: seen.append(1) or len(seen), [])
    return bump, lambda: len(bump.args[0])


@place
def iterator_of_closure():
    numbers = iter(range(1, 1000))
    return lambda: next(numbers), lambda: numbers.__length_hint__()


@place
def generator_object():
    numbers = (number for number in range(1, 1000))
    return lambda: next(numbers), lambda: next(numbers)


@place
def generator_that_is_sent_to():
    def counting():
        total = 0
        while True:
            total += yield total

    generator = counting()
    next(generator)
    return lambda: generator.send(1), lambda: generator.send(0)


@place
def a_count():
    numbers = itertools.count(1)
    return lambda: next(numbers), lambda: repr(numbers)


@place
def a_cycle():
    numbers = itertools.cycle([3, 1, 6, 9, 2])
    return lambda: next(numbers), lambda: next(numbers)


@place
def helper_module():
    module = sys.modules["tests_helper_of_processors"] = types.ModuleType("tests_helper_of_processors")
    exec("calls = 0\ndef bump():\n    global calls\n    calls += 1\n    return calls\n", vars(module))  # noqa: S102

    def bump():
        import tests_helper_of_processors

        return tests_helper_of_processors.bump()

    return bump, lambda: module.calls


@place
def singledispatch():
    @functools.singledispatch
    def bump(one):
        raise TypeError

    @bump.register
    def of_int(one: int):
        bump.calls += one
        return bump.calls

    bump.calls = 0
    return lambda: bump(1), lambda: bump.calls


@place
def named_tuple_swapped():
    state = collections.namedtuple("State", "calls")
    held = {"state": state(0)}

    def bump():
        held["state"] = held["state"]._replace(calls=held["state"].calls + 1)
        return held["state"].calls

    return bump, lambda: held["state"].calls


@place
def enum_attribute():
    class Mode(enum.Enum):
        ON = 1

    Mode.ON.calls = 0

    def bump():
        Mode.ON.calls += 1
        return Mode.ON.calls

    return bump, lambda: Mode.ON.calls


@place
def namespace():
    held = types.SimpleNamespace(calls=0)
    return lambda: vars(held).update(calls=held.calls + 1) or held.calls, lambda: held.calls


@place
def cached_function():
    @functools.lru_cache
    def number(call):
        return call

    def bump():
        number(number.cache_info().misses + 1)
        return number.cache_info().misses

    return bump, lambda: number.cache_info().misses


@place
def cached_property_deleted():
    class Held:
        calls = 0

        @functools.cached_property
        def number(self):
            self.calls += 1
            return self.calls

    held = Held()
    return lambda: (vars(held).pop("number", None), held.number)[1], lambda: held.calls


@place
def mock():
    one = Mock()
    return lambda: one() and one.call_count, lambda: one.call_count
