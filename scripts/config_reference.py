# Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Write docs/configuration.md from the comments of the recipe's yaml files, or check that it still says what they say.

Owns how a commented yaml file becomes tables. A key's meaning is the block of comment lines right above it; what stands
above a section introduces it. Refuses to know what any key does: nothing on the page is written here but its frame.

    python scripts/config_reference.py            write the page
    python scripts/config_reference.py --check    exit 1 when the page is out of date
"""

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[1]
CONFIG = ROOT / "recipe" / "agent_env" / "config"
PAGE = ROOT / "docs" / "configuration.md"

FRAME = """\
# Configuration reference

Made by `make docs` from the comments of the yaml files in `recipe/agent_env/config`; change those, not this page.

Settings are Hydra overrides on the command line: `env.max_turn=20`. Every key of verl's `ppo_trainer` config keeps its
place and its meaning and is not repeated here. These commands show what there is, and what a run would really use,
defaults and derived values included:

```bash
python -m recipe.agent_env.main_agent_ppo --cfg job
python -m recipe.agent_env.main_agent_ppo --cfg job --resolve --package env
```

A value in `${{...}}` is computed when the run starts. A config that cannot work ends the command before anything is
started, with the key to change; [the doctor](looking_at_runs.md#before-the-run-the-doctor) looks further.

## The main config

`config/agent_ppo_trainer.yaml`: keys of this recipe, and keys of verl whose default it changes.

{main}
## Without a GPU: `+platform=cpu`

`config/platform/cpu.yaml`, laid over the main config. Keys on the command line still win.

{cpu}"""


class ReferenceError(ValueError):
    """A yaml file lacks something that the page needs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Key:
    """One setting."""

    path: str
    """Dotted, as on the command line."""
    default: str
    """As written in the yaml file."""
    meaning: str
    """The comment above it, on one line."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Section:
    """One top-level entry of a yaml file."""

    name: str
    introduction: str
    keys: list[Key]


def read_sections(path: Path) -> list[Section]:
    """The settings of one commented yaml file, in its order; `hydra` and `defaults` are no settings.

    Raises:
        ReferenceError: A setting has no comment.
    """
    text = path.read_text(encoding="utf-8")
    root = yaml.compose(text, Loader=yaml.SafeLoader)
    assert isinstance(root, yaml.MappingNode)
    lines = text.splitlines()
    sections = []
    for name, value in root.value:
        if name.value in ("hydra", "defaults"):
            continue
        keys = read_keys(path, lines, name.value, value)
        introduction = comment_above(lines, name.start_mark.line)
        sections.append(Section(name=name.value, introduction=introduction, keys=keys))
    return sections


def read_keys(path: Path, lines: list[str], prefix: str, node: yaml.Node, group: str = "") -> list[Key]:
    """The leaves below one mapping.

    Args:
        path: The file, for messages.
        lines: Its lines.
        prefix: Dotted name of the mapping.
        node: The mapping.
        group: The comment above the mapping. It opens the meaning of its first key and is that of keys without one.
    """
    assert isinstance(node, yaml.MappingNode)
    keys: list[Key] = []
    for name, value in node.value:
        dotted = f"{prefix}.{name.value}"
        own = comment_above(lines, name.start_mark.line)
        meaning = f"{group} {own}".strip() if not keys else own or group
        if isinstance(value, yaml.MappingNode) and value.value:
            keys += read_keys(path, lines, dotted, value, meaning)
            continue
        if value.start_mark.line != value.end_mark.line:
            raise ReferenceError(f"{path.name}: {dotted}: expected a value on one line")
        if not meaning:
            raise ReferenceError(f"{path.name}: {dotted} has no comment above it")
        default = lines[value.start_mark.line][value.start_mark.column : value.end_mark.column]
        keys.append(Key(path=dotted, default=default, meaning=meaning))
    return keys


def comment_above(lines: list[str], line: int) -> str:
    """The comment block right above a line, joined; a blank line ends it."""
    block: list[str] = []
    while line > 0 and lines[line - 1].lstrip().startswith("#"):
        line -= 1
        block.insert(0, lines[line].lstrip().removeprefix("#").strip())
    return " ".join(block)


def table(section: Section) -> str:
    """One section as Markdown."""
    out = [f"### `{section.name}`", ""]
    if section.introduction:
        out += [section.introduction, ""]
    out += ["| key | default | meaning |", "|---|---|---|"]
    for key in section.keys:
        meaning = key.meaning.replace("|", "\\|")
        out.append(f"| `{key.path}` | `{key.default}` | {meaning} |")
    return "\n".join([*out, "", ""])


def render() -> str:
    """The page as it should be."""
    main = "".join(table(section) for section in read_sections(CONFIG / "agent_ppo_trainer.yaml"))
    cpu = "".join(table(section) for section in read_sections(CONFIG / "platform" / "cpu.yaml"))
    return FRAME.format(main=main, cpu=cpu).rstrip("\n") + "\n"


def main(arguments: list[str] | None = None) -> int:
    """Write or check the page; the exit status."""
    parser = argparse.ArgumentParser(description="Write docs/configuration.md from the comments of the yaml files.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 when the page is out of date")
    args = parser.parse_args(arguments)
    page = render()
    if not args.check:
        PAGE.write_text(page, encoding="utf-8")
    elif not PAGE.is_file() or PAGE.read_text(encoding="utf-8") != page:
        print(f"{PAGE.relative_to(ROOT)} is out of date: run `make docs`", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
