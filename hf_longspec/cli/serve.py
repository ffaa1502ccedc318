"""`hf-longspec serve`: one model over the API of OpenAI, with a draft in every request."""

import os
import socket
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from ..cli import CommandError, options

try:
    import uvicorn
    from transformers.cli.serving.model_manager import ModelManager

    from .serving.engine import Engine
    from .serving.routes import MIB, Limits, Routes
except ModuleNotFoundError as error:
    remedy = "pip install -U 'transformers[serving]' 'starlette>=1.6' prometheus-client"
    raise CommandError(f"serve needs {error.name}, which is not installed: {remedy}") from error

from .models import (
    check_draft,
    dtype_of,
    find_device,
    load_config,
    load_weights,
    loading,
    open_draft,
    positions_of,
    quiet,
)

# Variable of the environment with the key of clients.
API_KEY = "HF_LONGSPEC_API_KEY"


def run(args: SimpleNamespace) -> int:
    settings, device = options.read_settings(args.setting), find_device(args.device)
    require_free(args.host, args.port)
    with quiet():
        config = load_config(args.target)
        if (args.max_length or 0) > (most := positions_of(config)):
            raise CommandError(f"--max-length {args.max_length}: the model has {most} positions. Pass at most {most}.")
        check_draft(args.draft, config, settings)
        with loading(args.target, "model of"):
            dtype = str(dtype_of(args.dtype, device)).removeprefix("torch.")
            models = UnpackingManager(device=str(device), dtype=dtype, force_model=served_name(args.target))
        key = args.api_key or os.environ.get(API_KEY)
        bounds = args.max_body, args.max_tokens, args.max_waiting, args.cache_memory
        limits = Limits(*bounds, api_key=key, origins=tuple(args.allow_origin or ()))
        rows = args.rows, args.max_length
        routes = make_routes(models, lambda model: open_draft(args.draft, model, settings), limits, *rows)
        make_server(routes, args.host, args.port, args.grace).run()
    return 0


class UnpackingManager(ModelManager):
    """The manager of `transformers serve`, which loads a GGUF file as the other commands do.

    That of transformers keeps blocks, and fails if the file does not name a class, as those of most architectures.
    """

    def _load_model(self, name: str, *args: Any, gguf_file: str | None = None, **how: Any) -> Any:
        if gguf_file is None:
            return super()._load_model(name, *args, **how)
        return load_weights(self.force_model, dtype=self.dtype).to(self.device).eval()


def served_name(target: str) -> str:
    """Return the name of a target as `transformers serve` names it: `folder:file` for a GGUF file."""
    name, file = options.split_gguf(target)
    return name if file is None else f"{name}:{file}"


def require_free(host: str, port: int) -> None:
    """Refuse an address on which something else listens; the server would say so after the model is loaded."""
    try:
        socket.create_server((host, port)).close()
    except OSError as error:
        reason = str(error.strerror).partition(" (while")[0]
        raise CommandError(f"cannot listen on {host}:{port}: {reason}. Pass another --host or --port.") from error


def make_routes(
    models: ModelManager,
    open_draft: Callable[[Any], Any],
    limits: Limits,
    rows: int | None = None,
    max_length: int | None = None,
) -> Routes:
    """Return the application for the model that is loaded.

    Args:
        models (`ModelManager`): Has loaded one model.
        open_draft (`Callable`): Returns the draft for it.
        limits (`Limits`): Bounds on requests.
        rows (`int`, *optional*): Requests that run at once.
        max_length (`int`, *optional*): Most tokens of a text.
    """
    (loaded,) = models.loaded_models.values()
    try:
        engine = Engine(loaded.model, open_draft(loaded.model), rows, max_length, limits.cache * MIB)
    except ValueError as error:
        raise CommandError(f"--rows {rows}: {error}") from error
    return Routes(engine, loaded.processor, str(models.force_model), limits)


def make_server(routes: Routes, host: str, port: int, grace: int = 2) -> uvicorn.Server:
    """Return the server. After SIGTERM or Ctrl-C, running requests have `grace` seconds to end."""
    config = uvicorn.Config(routes.app, host=host, port=port, timeout_graceful_shutdown=grace)
    return uvicorn.Server(config)
