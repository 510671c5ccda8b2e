# Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Command line of the service.

    python -m recipe.agent_env.env_service my_pkg.my_env:MyEnv --name my_env-v0 --port 8000

Owns: turning arguments into a registry, settings and a running server. Refuses to know: how any of them works.
"""

import argparse
import os
import socket
import sys
from pathlib import Path

from recipe.agent_env.env_service.registry import EnvironmentRegistry, load_factory
from recipe.agent_env.env_service.settings import ServiceSettings

TOKEN_VARIABLE = "AGENT_ENV_SERVICE_TOKEN"
_DEFAULTS = ServiceSettings()


def build_parser() -> argparse.ArgumentParser:
    """The command line's options."""
    parser = argparse.ArgumentParser(
        prog="python -m recipe.agent_env.env_service",
        description="Serve Python environments over HTTP.",
        epilog=f"A bearer token comes from --token-file or from the variable {TOKEN_VARIABLE}, never from an argument.",
    )
    parser.add_argument("environments", nargs="*", metavar="[NAME=]PACKAGE.MODULE:CLASS", help="what to serve")
    parser.add_argument("--name", action="append", default=[], help="name of an environment, in order; repeatable")
    parser.add_argument(
        "--openenv",
        action="append",
        default=[],
        metavar="NAME=URL",
        help="serve what an OpenEnv server has; repeatable",
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to bind (default: %(default)s, this machine only)")
    parser.add_argument("--port", type=int, default=8000, help="port, 0: any free one (default: %(default)s)")
    parser.add_argument("--max-sessions", type=int, default=_DEFAULTS.max_sessions)
    parser.add_argument("--queue-wait-s", type=float, default=_DEFAULTS.queue_wait_s)
    parser.add_argument("--idle-timeout-s", type=float, default=_DEFAULTS.idle_timeout_s)
    parser.add_argument("--call-timeout-s", type=float, default=_DEFAULTS.call_timeout_s)
    parser.add_argument("--workers", type=int, default=_DEFAULTS.workers, help="processes that hold environments")
    parser.add_argument("--max-threads", type=int, default=_DEFAULTS.max_threads)
    parser.add_argument("--max-body-bytes", type=int, default=_DEFAULTS.max_body_bytes)
    parser.add_argument("--token-file", type=Path, help="file that holds the bearer token")
    parser.add_argument("--log-steps", metavar="FILE", help="append a JSON line per initialize, reset, step and close")
    parser.add_argument("--log-level", default="warning", choices=["debug", "info", "warning", "error"])
    return parser


def build_registry(specs: list[str], names: list[str], openenv: list[str] | None = None) -> EnvironmentRegistry:
    """Import the environments of the command line.

    Args:
        specs: `package.module:Class`, or `name=package.module:Class`.
        names: Names for the specs that carry none, in order; the class name where there are too few.
        openenv: `name=URL` of OpenEnv servers.

    Raises:
        ValueError: There is nothing to serve, a spec cannot be imported, or a name is left over or taken twice.
    """
    if not specs and not openenv:
        raise ValueError("nothing to serve: name a class as PACKAGE.MODULE:CLASS, or an OpenEnv server with --openenv")
    registry = EnvironmentRegistry()
    left = list(names)
    for spec in specs:
        name, separator, path = spec.rpartition("=")
        factory = load_factory(path)
        if not separator:
            name = left.pop(0) if left else getattr(factory, "__name__", path)
        registry.register(name, factory)
    if left:
        raise ValueError(f"--name {left[0]}: there is no environment left to carry it")
    for spec in openenv or []:
        # Imported here: nothing else of the service needs an HTTP client.
        from recipe.agent_env.env_service.openenv_adapter import serve_openenv

        name, _, url = spec.partition("=")
        registry.register(name, serve_openenv(url))
    return registry


def read_token(token_file: Path | None) -> str | None:
    """The bearer token from a file, else from the environment, else None.

    Raises:
        ValueError: The file cannot be read or is empty.
    """
    if token_file is None:
        return os.environ.get(TOKEN_VARIABLE) or None
    try:
        token = token_file.read_text().strip()
    except OSError as error:
        raise ValueError(f"--token-file {token_file}: {error.strerror}") from error
    if not token:
        raise ValueError(f"--token-file {token_file}: the file is empty")
    return token


def check_step_log(path: str | None) -> str | None:
    """Make sure that the step log can be written before anything is served.

    Raises:
        ValueError: It cannot.
    """
    if path is not None:
        try:
            open(path, "ab").close()
        except OSError as error:
            raise ValueError(f"--log-steps {path}: {error.strerror}") from error
    return path


def main(arguments: list[str] | None = None) -> int:
    """Run the service until SIGINT or SIGTERM.

    Returns:
        Exit status: 1 when the service could not start, 2 for wrong arguments. After a clean end uvicorn raises the
        signal again, so that the caller sees what ended the process.
    """
    args = build_parser().parse_args(arguments)
    try:
        registry = build_registry(args.environments, args.name, args.openenv)
        settings = ServiceSettings(
            max_sessions=args.max_sessions,
            queue_wait_s=args.queue_wait_s,
            idle_timeout_s=args.idle_timeout_s,
            call_timeout_s=args.call_timeout_s,
            max_threads=args.max_threads,
            workers=args.workers,
            max_body_bytes=args.max_body_bytes,
            bearer_token=read_token(args.token_file),
            step_log_path=check_step_log(args.log_steps),
        )
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if args.host not in ("127.0.0.1", "::1", "localhost") and settings.bearer_token is None:
        print(f"warning: {args.host} is open to other machines, and no bearer token is set", file=sys.stderr)
    # Imported here: worker processes import this module too, and need neither.
    import uvicorn

    from recipe.agent_env.env_service.app import create_app

    app = create_app(registry, settings)
    config = uvicorn.Config(
        app,
        host=args.host,
        port=args.port,
        log_level=args.log_level,
        access_log=False,
        # Clients keep pooled connections through long generations; uvicorn's 5 s would cut them under a POST.
        timeout_keep_alive=75,
        # A hung environment must not hold up the end of the process.
        timeout_graceful_shutdown=5,
        backlog=4096,
        server_header=False,
    )
    listener = config.bind_socket()
    host, port = listener.getsockname()[:2]

    class Server(uvicorn.Server):
        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            if self.started:
                print(f"serving {', '.join(registry.names)} at http://{host}:{port} (docs at /docs)", flush=True)

    server = Server(config)
    server.run(sockets=[listener])
    return 0 if server.started else 1


if __name__ == "__main__":
    sys.exit(main())
