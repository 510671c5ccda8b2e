# Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Resolve requirements/*.in into the pinned requirements/*.txt, or check that they still resolve to what is there.

Owns how the lock files are made: one resolution by uv for each supported Python, merged into one file whose lines carry
a marker only where the Pythons differ. Pins that are in a lock stay as long as they fit; `--upgrade` lets them move.
Reads package metadata only, so it downloads megabytes, not wheels. Refuses to know how anything is installed.

    python scripts/lock.py cpu gpu            write both
    python scripts/lock.py --check gpu        exit 1 when a fresh resolution differs from the file
"""

import argparse
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
REQUIREMENTS = ROOT / "requirements"
PYTHONS = ("3.10", "3.11", "3.12")

# The oldest glibc that every pinned wheel runs on: Debian 11, Ubuntu 20.04.
PLATFORM = "x86_64-manylinux_2_31"

# This project is installed from its checkout; torch's CPU build by a step of its own (scripts/setup_env.sh).
LEFT_OUT = {"cpu": ("verl-agent-env", "torch"), "gpu": ("verl-agent-env",)}

PIN = re.compile(r"^(?P<name>[A-Za-z0-9._-]+)==(?P<version>[^\s;]+)")


def marker_for(pythons: list[str]) -> str:
    """Say in a requirement marker on which of the supported Pythons a pin holds ("" for all of them)."""
    count = len(pythons)
    if count == len(PYTHONS):
        return ""
    if tuple(pythons) == PYTHONS[-count:]:
        return f' ; python_version >= "{pythons[0]}"'
    if tuple(pythons) == PYTHONS[:count]:
        return f' ; python_version < "{PYTHONS[count]}"'
    return " ; " + " or ".join(f'python_version == "{python}"' for python in pythons)


def notes_of(text: str) -> dict[str, list[str]]:
    """Map package name to the comment lines right above its pin in an `.in` file."""
    notes: dict[str, list[str]] = {}
    comment: list[str] = []
    for line in text.splitlines():
        if line.startswith("#"):
            comment.append(line)
            continue
        if pin := PIN.match(re.sub(r"\[.*?\]", "", line)):
            notes[pin["name"].lower()] = comment
        comment = []
    return notes


def resolve(kind: str, python: str, known_pins: str, upgrade: bool) -> dict[str, str]:
    """Resolve one `.in` file for one Python.

    Args:
        kind: "cpu" or "gpu".
        python: Like "3.11".
        known_pins: Text of the present lock; its pins are kept where they fit.
        upgrade: Take the newest versions instead.

    Returns:
        Package name to version, as PyPI spells the name in lower case.

    Raises:
        subprocess.CalledProcessError: Nothing satisfies all requirements; uv has said why on standard error.
    """
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "lock.txt"
        output.write_text(known_pins)
        command = [sys.executable, "-m", "uv", "pip", "compile", "--quiet", "--no-header", "--no-annotate"]
        command += ["--python-version", python, "--python-platform", PLATFORM, "--no-python-downloads"]
        command += [f"--no-emit-package={name}" for name in LEFT_OUT[kind]]
        overrides = REQUIREMENTS / f"{kind}_overrides.txt"
        command += ["--overrides", str(overrides)] if overrides.exists() else []
        command += ["--upgrade"] if upgrade else []
        command += [str(REQUIREMENTS / f"{kind}.in"), "--output-file", str(output)]
        subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        pins = [PIN.match(line) for line in output.read_text().splitlines()]
        return {pin["name"]: pin["version"] for pin in pins if pin}


def lock(kind: str, upgrade: bool) -> str:
    """Return the text of `requirements/<kind>.txt` for all supported Pythons."""
    path = REQUIREMENTS / f"{kind}.txt"
    known_pins = path.read_text() if path.exists() else ""
    source = REQUIREMENTS / f"{kind}.in"
    pythons_of_pin: dict[tuple[str, str], list[str]] = {}
    for python in PYTHONS:
        for pin in resolve(kind, python, known_pins, upgrade).items():
            pythons_of_pin.setdefault(pin, []).append(python)
    notes = notes_of(source.read_text())
    lines = [
        f"# Made by `make lock` from {source.name} and pyproject.toml for Linux x86_64 (glibc 2.31 or newer),",
        f"# Python {PYTHONS[0]} to {PYTHONS[-1]}; edit those, not this. Meant for `pip install --no-deps`.",
    ]
    for (name, version), pythons in sorted(pythons_of_pin.items()):
        lines += notes.get(name, [])
        lines.append(f"{name}=={version}{marker_for(pythons)}")
    return "\n".join(lines) + "\n"


def main() -> int:
    """Write or check the lock files named on the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("kinds", nargs="+", choices=sorted(LEFT_OUT))
    parser.add_argument("--check", action="store_true", help="compare instead of writing")
    parser.add_argument("--upgrade", action="store_true", help="let every pin move to its newest version")
    arguments = parser.parse_args()
    stale = False
    for kind in arguments.kinds:
        path = REQUIREMENTS / f"{kind}.txt"
        text = lock(kind, arguments.upgrade)
        pins = sum(1 for line in text.splitlines() if PIN.match(line))
        if not arguments.check:
            path.write_text(text)
            print(f"{path.relative_to(ROOT)}: {pins} pins")
        elif text == path.read_text():
            print(f"{path.relative_to(ROOT)}: resolves for Python {', '.join(PYTHONS)} to the {pins} pins in the file")
        else:
            stale = True
            print(f"{path.relative_to(ROOT)} is stale: run `make lock` and look at the difference", file=sys.stderr)
    return int(stale)


if __name__ == "__main__":
    sys.exit(main())
