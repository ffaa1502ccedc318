"""A simulated CUDA device, for rules that only a GPU would otherwise show to be broken.

    with SimulatedCuda() as cuda:
        model = cuda.place(model)
        text = model.generate(cuda.place(input_ids), assistant_model=draft)
        assert cuda.count("read") == 3 and not cuda.count("write")

A [`DeviceTensor`] has the device `cuda:0`, and an ordinary tensor on the CPU holds its numbers. A dispatch mode
computes every operation there and applies the rules of CUDA:

- operations on tensors of both devices fail, apart from numbers without dimensions, copies and indices;
- an operation whose result the host needs is a *read*, and a copy from pageable memory is a *write*. Both make the
  host wait. A copy from pinned memory is a *pinned* copy. The host does not wait for it and must leave the source alone
  until the next read, which is checked;
- operations that are neither views nor allocations are *launches*, and so are Triton's kernels, which the interpreter
  runs;
- a graph records launches and repeats them on the same memory. During a capture reads, writes and generators that the
  graph does not have fail. After it, memory is as before, and the tensors that the graph computes hold NaN until the
  first replay, since a capture runs nothing.

The time between two events is the number of launches between them, as milliseconds.

`simulated_graphs.py` has the rules of graphs, their memory and their streams. Neither the order of several streams, nor
limits of memory, nor the arithmetic of a GPU are simulated.
"""

import ctypes
import functools
import subprocess
import sys
import tempfile
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_map_only

from tests.simulated_graphs import PRODUCTS, GraphMemory, NotCapturable, SimulatedGraph, WrongDevice

aten = torch.ops.aten

# Sizes of the results depend on numbers on the device.
SIZED_BY_NUMBERS = {"nonzero", "masked_select", "_unique", "_unique2", "unique_dim", "unique_consecutive", "bincount"}
READS = SIZED_BY_NUMBERS | {"_local_scalar_dense", "equal"}
ALLOCATIONS = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}
FREE = ALLOCATIONS | READS | {"detach", "alias", "lift_fresh", "_reshape_alias", "_unsafe_view", "_fused_sdp_choice"}
COPIES = {"_to_copy", "copy_"}
INDEXED = {"index", "index_put", "index_put_", "_index_put_impl_"}
# Operations that take a number of the CPU, besides the pointwise ones.
TAKE_NUMBERS = {"fill_", "masked_fill", "masked_fill_", "where", "lerp"}


class RacingCopy(RuntimeError):
    """The source of a pinned copy was changed before the copy had run."""


class DeviceTensor(torch.Tensor):
    """A tensor on the simulated device. `host` holds its numbers."""

    host: torch.Tensor

    @staticmethod
    def __new__(cls, host: torch.Tensor, device: torch.device) -> "DeviceTensor":
        layout = {"strides": host.stride(), "storage_offset": host.storage_offset(), "dtype": host.dtype}
        tensor = torch.Tensor._make_wrapper_subclass(cls, host.shape, **layout, device=device)
        tensor.host = host
        return tensor

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise RuntimeError(f"{func} on a tensor of the simulated device, which is closed")

    def data_ptr(self) -> int:
        return self.host.data_ptr()

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def new_tensor(self, data: Any, **options: Any) -> torch.Tensor:
        return torch.tensor(data, **{"dtype": self.dtype, "device": self.device} | options)

    def __getitem__(self, index: Any) -> torch.Tensor:
        return super().__getitem__(_without_lists(index))

    def __setitem__(self, index: Any, value: Any) -> None:
        super().__setitem__(_without_lists(index), value)

    def __repr__(self, *args: Any, **kwargs: Any) -> str:
        return f"DeviceTensor({tuple(self.shape)}, {self.dtype}, {self.device})"

    def __deepcopy__(self, memo: dict) -> "DeviceTensor":
        is_parameter = isinstance(self, torch.nn.Parameter)
        return torch.nn.Parameter(self.detach().clone(), requires_grad=False) if is_parameter else self.clone()


def _without_lists(index: Any) -> Any:
    """Lists as tensors of the CPU: torch copies them to the device without a way to intercept it."""
    if isinstance(index, tuple):
        return tuple(map(_without_lists, index))
    return torch.tensor(index) if isinstance(index, list) else index


# A build without CUDA cannot switch to a device, as torch does before an operation. There is nothing to switch here.
_GUARD = """
#include <c10/core/impl/DeviceGuardImplInterface.h>
C10_REGISTER_GUARD_IMPL(CUDA, c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA>);
"""


@functools.cache
def why_not() -> str | None:
    """Prepare torch for the device, once per process; return the reason why that is impossible."""
    # autograd starts a thread for each device in its first backward, after which processes cannot be forked
    with torch.inference_mode(False), torch.enable_grad():
        torch.zeros(1, requires_grad=True).sum().backward()
    if torch.version.cuda is not None:
        torch._C._ensureCUDADeviceGuardSet()
        return None
    from torch.utils.cpp_extension import include_paths

    folder = Path(tempfile.mkdtemp())
    (folder / "guard.cpp").write_text(_GUARD, encoding="utf-8")
    options = ["-std=c++20", "-shared", "-fPIC", "-O0", *(f"-I{path}" for path in include_paths())]
    paths = [str(folder / "guard.cpp"), "-o", str(folder / "guard.so"), f"-L{Path(torch.__file__).parent / 'lib'}"]
    try:
        subprocess.run(["g++", *options, *paths, "-lc10"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        return f"the simulated device needs a C++ compiler: {error}"
    ctypes.CDLL(str(folder / "guard.so"))
    return None


@dataclass(frozen=True)
class Transfer:
    """A number or tensor that crossed between host and device."""

    kind: str  # "read", "write" or "pinned"
    name: str  # of the operation
    calls: tuple[str, ...]  # callers outside of torch and of this file, the innermost first

    def __str__(self) -> str:
        return f"{self.kind} by {self.name} in " + ", from ".join(self.calls[:5])


class SimulatedGenerator(torch._C.Generator):
    """`torch.Generator`, for both devices."""

    on_device: set[int] = set()  # addresses, as operations get other objects with the same one

    def __new__(cls, device: Any = "cpu") -> "SimulatedGenerator":
        made = super().__new__(cls, device="cpu")
        (cls.on_device.add if torch.device(device).type == "cuda" else cls.on_device.discard)(made._cdata)
        return made


class SimulatedEvent:
    """`torch.cuda.Event`."""

    def __init__(self, cuda: "SimulatedCuda"):
        self.cuda, self.launches = cuda, 0

    def record(self, *args: Any) -> None:
        self.launches = self.cuda.launches.total() + self.cuda.replayed.total()

    def synchronize(self) -> None:
        self.cuda._wait()

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: "SimulatedEvent") -> float:
        return float(end.launches - self.launches)


class SimulatedCuda(TorchDispatchMode):
    """The device. It exists while the context is open.

    The current device is `cuda:0` outside of `torch.cuda.device(...)`, as for a user with several GPUs. `kernels` has,
    by the name of an operator that launches kernels, a function of tensors of the CPU that takes its place, and the
    number of launches, or a function that returns it for arguments. Other operators run as they are, their kernels in
    the interpreter.
    """

    def __init__(
        self,
        index: int = 0,
        capability: tuple[int, int] = (9, 0),
        kernels: dict[str, tuple[Callable[..., Any], Any]] | None = None,
    ):
        super().__init__()
        self.kernels = kernels or {}
        self.device = torch.device("cuda", index)
        self.capability = capability
        self.graphs: list[weakref.ref[SimulatedGraph]] = []  # every captured graph
        self.reset()
        self._memory = GraphMemory(self._wait, index + 1)
        self._pinned: dict[int, torch.Tensor] = {}
        self._pending: list[tuple[torch.Tensor, torch.Tensor, Transfer]] = []
        self._stack = ExitStack()

    def reset(self) -> None:
        """Begin to count anew. Graphs are kept."""
        self.transfers: list[Transfer] = []
        self.launches: Counter[str] = Counter()  # names of the operations launched outside of graphs
        self.replays = 0
        self.replayed: Counter[str] = Counter()  # names of the operations launched by replays

    def count(self, kind: str) -> int:
        """Return the number of transfers of a kind."""
        return sum(transfer.kind == kind for transfer in self.transfers)

    def place(self, value: Any) -> Any:
        """Return tensors, or anything that contains them, on the device; modules in place. This counts as nothing."""
        if not isinstance(value, torch.nn.Module):
            return tree_map_only(torch.Tensor, lambda x: DeviceTensor(x.detach().clone(), self.device), value)
        made: dict[int, Any] = {}
        for module in value.modules():
            for tensors in (module._parameters, module._buffers):
                for name, tensor in tensors.items():
                    if tensor is not None and not isinstance(tensor, DeviceTensor):
                        placed = made.get(id(tensor))
                        if placed is None:
                            placed = DeviceTensor(tensor.detach(), self.device)
                            if isinstance(tensor, torch.nn.Parameter):
                                placed = torch.nn.Parameter(placed, requires_grad=False)
                            made[id(tensor)] = placed
                        tensors[name] = placed
        return value

    def fetch(self, value: Any) -> Any:
        """Return tensors of the device as tensors of the CPU. This counts as nothing."""
        return tree_map_only(DeviceTensor, lambda x: x.host.clone(), value)

    def __enter__(self) -> "SimulatedCuda":
        if (reason := why_not()) is not None:
            pytest.skip(reason)
        memory = self._memory
        shape = {"multi_processor_count": 132, "total_memory": 80 << 30, "shared_memory_per_block_optin": 227 << 10}
        properties = SimpleNamespace(name="simulated", major=self.capability[0], minor=self.capability[1], **shape)
        replaced = {
            **dict.fromkeys(("_lazy_init", "empty_cache", "reset_peak_memory_stats"), lambda *args: None),
            **dict.fromkeys(("is_available", "is_initialized"), lambda: True),
            "Stream": memory.stream,
            "current_stream": memory.current_stream,
            "set_stream": memory.set_stream,
            "device_count": lambda: self.device.index + 1,
            "current_device": lambda: memory.current_device,
            "set_device": lambda device: setattr(memory, "current_device", torch.device(device).index or 0),
            "device": self._switch,
            "get_device_capability": lambda device=None: self.capability,
            "get_device_properties": lambda device=None: properties,
            "get_device_name": lambda device=None: properties.name,
            "get_rng_state": lambda device=None: torch.get_rng_state(),
            "set_rng_state": lambda state, device=None: torch.set_rng_state(state),
            "synchronize": lambda device=None: self._wait(),
            "mem_get_info": lambda device=None: (properties.total_memory, properties.total_memory),
            "max_memory_allocated": lambda device=None: 0,
            "stream": memory.on_stream,
            "default_generators": memory.generators,
            "Event": lambda *args, **kwargs: SimulatedEvent(self),
            "CUDAGraph": SimulatedGraph,
            "graph": self._capturing,
            "graph_pool_handle": memory.handle,
            "is_current_stream_capturing": lambda: memory.capture is not None,
        }
        for name, value in replaced.items():
            self._stack.enter_context(mock.patch.object(torch.cuda, name, value))
        clear = mock.patch.object(torch._C, "_cuda_clearCublasWorkspaces", memory.clear_workspaces, create=True)
        self._stack.enter_context(clear)
        self._stack.enter_context(mock.patch.object(torch, "Generator", SimulatedGenerator))
        for name in ("tensor", "as_tensor"):  # below all modes, torch copies their data to the device
            self._stack.enter_context(mock.patch.object(torch, name, _through_the_cpu(getattr(torch, name))))
        self._stack.enter_context(mock.patch.object(torch.Tensor, "pin_memory", lambda x, *args: self._pin(x)))
        self._stack.enter_context(mock.patch.object(torch.Tensor, "is_pinned", lambda x, *args: self._is_pinned(x)))
        # Module.to() would otherwise put the data of our tensors into parameters on the CPU.
        overwrites = torch.__future__.get_overwrite_module_params_on_conversion()
        self._stack.callback(torch.__future__.set_overwrite_module_params_on_conversion, overwrites)
        torch.__future__.set_overwrite_module_params_on_conversion(True)
        self._simulate_triton()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._stack.close()

    def _simulate_triton(self) -> None:
        """Run kernels on the numbers in the interpreter, each as one launch."""
        try:
            from triton.runtime.interpreter import GridExecutor
        except ImportError:
            return
        interpret = GridExecutor.__call__

        def launch(executor: Any, *args: Any, **options: Any) -> None:
            tensors = list(_tensors((args, options)))
            if not any(isinstance(x, DeviceTensor) for x in tensors):
                return interpret(executor, *args, **options)
            name = executor.fn.__name__
            if not all(isinstance(x, DeviceTensor) for x in tensors):
                raise WrongDevice(f"the kernel {name} was given a tensor of the CPU, from {_calls()[:5]}")
            if self._memory.current_device != self.device.index:
                current = self._memory.current_device
                raise WrongDevice(f"the kernel {name} on {self.device}, and cuda:{current} is the current device")
            inner, kwargs = tree_map_only(DeviceTensor, lambda x: x.host, (args, options))

            def run() -> None:
                interpret(executor, *inner, **kwargs)

            if self._memory.capture is not None:
                self._memory.capture.keep([x.host for x in tensors])
            self._note_launch(name, run, [], 1)
            with _disable_current_modes():
                run()

        self._stack.enter_context(mock.patch.object(GridExecutor, "__call__", launch))

    # -- what waits, and what is captured

    def _wait(self) -> None:
        """Wait for the device."""
        self._transfer("read", "synchronize")

    def _transfer(self, kind: str, name: str) -> Transfer:
        transfer = Transfer(kind, name, _calls())
        if self._memory.capture is not None:
            raise NotCapturable(f"while a graph is captured: {transfer}")
        self.transfers.append(transfer)
        if kind != "pinned":  # the host waited, so every copy has run
            for source, before, copy in self._pending:
                if not torch.equal(source, before):
                    raise RacingCopy(f"the source was changed before the next read: {copy}")
            self._pending.clear()
        return transfer

    def _pin(self, tensor: torch.Tensor) -> torch.Tensor:
        copy = tensor.clone()
        self._pinned[copy.untyped_storage().data_ptr()] = copy  # kept, so that no other tensor gets its address
        return copy

    def _is_pinned(self, tensor: torch.Tensor) -> bool:
        return type(tensor) is torch.Tensor and tensor.untyped_storage().data_ptr() in self._pinned

    @contextmanager
    def _switch(self, device: Any) -> Iterator[None]:
        index = device if isinstance(device, int) else torch.device(device).index
        memory, before = self._memory, self._memory.current_device
        memory.current_device = before if index is None or index < 0 else index
        try:
            yield
        finally:
            memory.current_device = before

    @contextmanager
    def _capturing(self, graph: SimulatedGraph, pool: Any = None, stream: Any = None, **kwargs: Any) -> Iterator[None]:
        if self._memory.current_device != self.device.index:
            raise WrongDevice(f"a capture on cuda:{self._memory.current_device} of a model on {self.device}")
        with self._memory.capturing(graph, pool, stream):
            yield

        names = graph.names  # a reference to the graph itself would be a cycle, and the graph would stay

        def count() -> None:
            self.replays += 1
            self.replayed += names

        graph.on_replay = count
        self.graphs.append(weakref.ref(graph))

    # -- operations

    @contextmanager
    def _again(self) -> Iterator[None]:
        """Intercept the operations inside of an operation, which torch does not do by itself."""
        super().__enter__()
        try:
            yield
        finally:
            super().__exit__(None, None, None)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        leaves = list(_tensors((args, kwargs)))
        ours = [x for x in leaves if isinstance(x, DeviceTensor)]
        device = kwargs.get("device")
        to_device = bool(ours) if device is None else torch.device(device).type == "cuda"
        name = func._schema.name.split("::")[1]
        if kwargs.pop("pin_memory", None) and not to_device:
            return self._pin(func(*args, **kwargs))
        if not ours and not to_device:
            return func(*args, **kwargs)
        stand_in, launches = self.kernels.get(func._schema.name, (None, 1))
        launches = launches(*args) if callable(launches) else launches
        if name == "_foreach_copy_":
            launches = _launches_of_copies(*args[:2])
        if stand_in is None and (own := _implementation(func)) is not None:
            with self._again():
                return own(*args, **kwargs)
        self._check_devices(name, func, leaves, ours)
        self._check_generator(kwargs.get("generator"), to_device)
        self._note_transfers(name, args, kwargs, ours, to_device)
        if device is not None:
            kwargs["device"] = torch.device("cpu")
        function = stand_in or REPLACED.get(name, func)
        inner, options = _each((args, kwargs), lambda x: x.host if isinstance(x, DeviceTensor) else x)
        mutable = func._schema.is_mutable
        if self._memory.capture is not None and mutable:
            self._memory.capture.keep([x.host for x in ours])
        found = function(*inner, **options)
        results = list(_tensors(found))
        if name == "_local_scalar_dense" or not to_device:
            return found
        memory = {x.host.untyped_storage().data_ptr() for x in ours}
        is_view = func.is_view or (not mutable and any(x.untyped_storage().data_ptr() in memory for x in results))
        if not is_view:
            if name in PRODUCTS:
                self._memory.note_product()
            run = functools.partial(function, *inner, **options)
            self._note_launch(name, run, [] if mutable else results, launches)
        same = {id(x.host): x for x in ours}
        return _each(found, lambda x: self._wrapped(x, same))

    def _wrapped(self, tensor: torch.Tensor, same: dict[int, DeviceTensor]) -> DeviceTensor:
        known = same.get(id(tensor))
        if known is None:
            return DeviceTensor(tensor, self.device)
        if known.shape != tensor.shape or known.stride() != tensor.stride():
            raise NotImplementedError("an operation in place that changes a shape")
        return known

    def _note_launch(self, name: str, run: Callable[[], Any], results: list[torch.Tensor], launches: int) -> None:
        if self._memory.capture is not None:
            self._memory.capture.allocate(results)
            if name not in ALLOCATIONS:
                self._memory.capture.graph.record(run, results)
            if name not in ALLOCATIONS and name not in FREE:
                self._memory.capture.graph.names[name] += launches
        elif name not in FREE:
            self.launches[name] += launches

    def _check_devices(self, name: str, func: Any, leaves: list, ours: list) -> None:
        if not ours or name in COPIES:
            return
        for value in leaves:
            if isinstance(value, DeviceTensor):
                continue
            is_number = value.dim() == 0 and (torch.Tag.pointwise in func.tags or name in TAKE_NUMBERS)
            is_index = name in INDEXED and not value.is_floating_point()
            if not is_number and not is_index:
                shape = tuple(value.shape)
                raise WrongDevice(f"{func} with a tensor {shape} of the CPU beside {self.device}, from {_calls()[:5]}")

    def _check_generator(self, generator: Any, to_device: bool) -> None:
        if generator is None:
            return
        if (generator._cdata in SimulatedGenerator.on_device) != to_device:
            raise WrongDevice(f"a generator of the other device, from {_calls()[:5]}")
        if self._memory.capture is not None and generator._cdata not in self._memory.capture.graph.generators:
            raise NotCapturable(f"a generator that is not registered with the graph, from {_calls()[:5]}")

    def _note_transfers(self, name: str, args: Any, kwargs: dict, ours: list, to_device: bool) -> None:
        if (
            (name == "repeat_interleave" and kwargs.get("output_size") is None and ours)
            or name in READS
            or (name == "_to_copy" and ours and not to_device)
        ):
            self._transfer("read", name)
        elif name == "_to_copy" and not ours:
            self._note_copy(name, args[0], kwargs.get("non_blocking", False))
        elif name == "copy_" and isinstance(args[0], DeviceTensor) != isinstance(args[1], DeviceTensor):
            if not isinstance(args[0], DeviceTensor):
                self._transfer("read", name)
            elif args[1].dim() or args[0].dim() == 0:  # a number is an argument of the launch
                self._note_copy(name, args[1], kwargs.get("non_blocking", args[2] if len(args) > 2 else False))
        elif name in INDEXED:
            indices = [x for x in args[1] if isinstance(x, torch.Tensor)]
            if any(not isinstance(x, DeviceTensor) for x in indices):
                self._transfer("write", name)
            masks = any(x.dtype in (torch.bool, torch.uint8) for x in indices)
            if masks and (name == "index" or args[2].numel() != 1):  # one value becomes masked_fill
                self._transfer("read", name)

    def _note_copy(self, name: str, source: torch.Tensor, non_blocking: bool) -> None:
        if non_blocking and self._is_pinned(source):
            self._pending.append((source, source.clone(), self._transfer("pinned", name)))
        else:
            self._transfer("write", name)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in arguments of an operation, which torch's functions for trees find in ten times the time."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for part in value:
            yield from _tensors(part)
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))


def _each(value: Any, change: Callable[[torch.Tensor], Any]) -> Any:
    """Return arguments or results of an operation with every tensor changed."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, (tuple, list)):
        parts = [_each(part, change) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    return {name: _each(part, change) for name, part in value.items()} if type(value) is dict else value


def _launches_of_copies(own: list[torch.Tensor], new: list[torch.Tensor]) -> int:
    """Return 1 if torch copies these tensors together: one dtype and, pair by pair, the same strides."""
    dtypes = {(x.dtype, y.dtype) for x, y in zip(own, new, strict=True)}
    same = all(x.stride() == y.stride() for x, y in zip(own, new, strict=True))
    return 1 if len(dtypes) == 1 and same else len(own)


def _implementation(func: Any) -> Callable[..., Any] | None:
    """The Python function of an operator of this project, which launches kernels of its own."""
    from torch._library.custom_ops import OPDEFS

    definition = OPDEFS.get(func._schema.name)
    return None if definition is None else definition._init_fn


def _through_the_cpu(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def made(data: Any, *, device: Any = None, **options: Any) -> torch.Tensor:
        if isinstance(data, DeviceTensor):
            return data.to(device=device, dtype=options.get("dtype"))
        return make(data, **options) if device is None else make(data, **options).to(device)

    return made


def _calls() -> tuple[str, ...]:
    found, frame = [], sys._getframe()
    while frame is not None and len(found) < 10:
        code = frame.f_code
        if "/torch/" not in code.co_filename and code.co_filename != __file__ and "contextlib" not in code.co_filename:
            found.append(f"{'/'.join(code.co_filename.split('/')[-2:])}:{frame.f_lineno} {code.co_name}")
        frame = frame.f_back
    return tuple(found)


def _flash_attention(query, key, value, dropout=0.0, is_causal=False, return_debug_mask=False, *, scale=None):
    attend = aten._scaled_dot_product_flash_attention_for_cpu
    out, lse = attend(query, key, value, dropout, is_causal, scale=scale)
    nothing = torch.empty(0)
    return out, lse.float(), nothing, nothing, query.shape[2], key.shape[2], nothing, nothing, nothing


def _flash_forward(query, key, value, cum_q, cum_k, max_q, max_k, dropout, is_causal, return_debug_mask, *, scale=None):
    inputs = (part.transpose(1, 2) for part in (query, key, value))
    out, lse = aten._scaled_dot_product_flash_attention_for_cpu(*inputs, dropout, is_causal, scale=scale)
    nothing = torch.empty(0)
    return out.transpose(1, 2), lse.float(), nothing, nothing, nothing


def _topk(x, k, dim=-1, largest=True, sorted=True):
    """Of equal numbers, the first ones, as a scan on a GPU finds them; those of the CPU are any."""
    return tuple(found.narrow(dim, 0, k) for found in x.sort(dim=dim, descending=largest, stable=True))


def _int4pack(pairs, inner_tiles):
    """Weights in their own order, a pair in a byte."""
    return pairs.clone()


def _int4pack_product(x, packed, group, scales):
    values = (torch.stack([packed >> 4, packed & 15], -1).flatten(1) - 8.0).unflatten(1, (-1, group))
    weight = values * scales[..., 0].T[..., None].float() + scales[..., 1].T[..., None].float()
    return (x.float() @ weight.flatten(1).to(x.dtype).float().T).to(x.dtype)


# Operations that the CPU does not have, or would choose otherwise.
REPLACED: dict[str, Callable[..., Any]] = {
    "topk": _topk,
    "_convert_weight_to_int4pack": _int4pack,
    "_weight_int4pack_mm": _int4pack_product,
    "_scaled_dot_product_flash_attention": _flash_attention,
    "_flash_attention_forward": _flash_forward,
    "_fused_sdp_choice": lambda *args, **kwargs: 0,  # the kernel in plain operations
}
