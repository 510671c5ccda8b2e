# Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Every command of this project in every page: its options exist, and a config that it would train with is accepted.

That the commands do what the pages say is tested beside what they belong to; this finds a page that was left behind.
"""

import argparse
import importlib
import re
import shlex
from pathlib import Path

import pytest

from recipe.agent_env.check import load_config
from recipe.agent_env.config_checks import finish_config, register_resolvers

ROOT = Path(__file__).parents[2]
PAGES = [
    page
    for folder in (ROOT, *(ROOT / name for name in ("docs", "docker", "examples", "recipe")))
    for page in sorted(folder.glob("*.md") if folder == ROOT else folder.rglob("*.md"))
]
PARSERS = {
    "recipe.agent_env.env_service": "recipe.agent_env.env_service.__main__",
    "recipe.agent_env.trajectory_page": "recipe.agent_env.trajectory_page.__main__",
}
TRAIN = "recipe.agent_env.main_agent_ppo"


def commands() -> list[tuple[str, list[str]]]:
    """Page and words of each `python -m` command of this project in a shell block."""
    found = []
    for page in PAGES:
        for block in re.findall(r"```bash\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL):
            for line in re.sub(r"\\\n\s*", " ", block).splitlines():
                if not line.strip().startswith(("python -m recipe.", "python -m examples.")):
                    continue  # among them lines inside a quoted text, which are no words by themselves
                words = shlex.split(line, comments=True)
                found.append((str(page.relative_to(ROOT)), [word for word in words[2:] if word != "..."]))
    return found


COMMANDS = commands()


def test_pages_have_commands():
    assert len(COMMANDS) > 12 and any(words[0] == TRAIN for _, words in COMMANDS)


@pytest.mark.parametrize(("page", "words"), COMMANDS, ids=[f"{page}:{words[0]}" for page, words in COMMANDS])
def test_options_exist_and_configs_are_accepted(page: str, words: list[str]):
    module, *arguments = words
    if module == TRAIN:
        if "--cfg" in arguments:
            return  # run by tests/docs/test_configuration_on_cpu.py
        register_resolvers()
        finish_config(load_config(arguments))
        return
    parser: argparse.ArgumentParser = importlib.import_module(PARSERS.get(module, module)).build_parser()
    parser.parse_args(arguments)
