# Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Command-line arguments that name an environment service, for the commands that take no training config.

Owns their names and how they become client settings.
"""

import argparse

from recipe.agent_env.env_client import EnvClientConfig

_DEFAULT_URL = "http://localhost:8000"


def add_service_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that say which service, and how to be let in."""
    group = parser.add_argument_group("environment service")
    group.add_argument(
        "--env-url",
        action="append",
        metavar="URL",
        help=f"root URL of the service ({_DEFAULT_URL}); give it again for each further service like it",
    )
    group.add_argument("--bearer-token-file", metavar="FILE", help="file that holds the service's bearer token")
    group.add_argument("--bearer-token-env", metavar="NAME", help="environment variable that holds it")
    group.add_argument("--ca-file", metavar="FILE", help="PEM file with the authority of an https service")
    group.add_argument(
        "--request-timeout-s", type=float, default=60.0, metavar="S", help="longest wait for an answer (%(default)s)"
    )


def client_config(args: argparse.Namespace, *, max_concurrent_episodes: int = 1) -> EnvClientConfig:
    """The client's settings from parsed arguments.

    Raises:
        ValueError: One of them cannot work; names it.
    """
    return EnvClientConfig(
        endpoint=args.env_url or _DEFAULT_URL,
        bearer_token_file=args.bearer_token_file,
        bearer_token_env=args.bearer_token_env,
        ca_file=args.ca_file,
        request_timeout_s=args.request_timeout_s,
        max_concurrent_episodes=max_concurrent_episodes,
    )
