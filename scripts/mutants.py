# Licensed under the Apache License, Version 2.0 (see LICENSE).
"""Plants faults in the prompt styles one by one and counts how many the tests catch.

Owns the run of `mutmut` on a copy of that layer and its tests, so that the checkout itself is never changed. Refuses to
know the layer. Exits with 1 when fewer than the asked share is caught.

    python scripts/mutants.py [--at-least 0.9] [--children 2] [--sample]
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
WORK = ROOT / "build" / "mutants"
LAYER = "recipe/agent_env/prompt_styles"
COPIED = ["recipe/agent_env/__init__.py", LAYER, "tests/__init__.py", "tests/prompt_styles", "tests/data", "docs"]
SETTINGS = f"""
[tool.mutmut]
source_paths = ["{LAYER}"]
also_copy = ["recipe", "tests", "docs"]
pytest_add_cli_args = ["-p", "no:cacheprovider", "--hypothesis-seed=0", "-W", "ignore"]
pytest_add_cli_args_test_selection = ["tests/prompt_styles"]

[tool.pytest.ini_options]
pythonpath = ["."]
addopts = "-q -x --import-mode=importlib"
asyncio_mode = "auto"
timeout = 600
"""


def main() -> int:
    """Run the check and print its figure."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--at-least", type=float, default=0.9, help="share of the faults that must be caught")
    parser.add_argument("--children", type=int, default=os.cpu_count() or 1, help="faults tried at a time")
    parser.add_argument("--sample", action="store_true", help="try every fifth fault only")
    options = parser.parse_args()
    copy_layer()
    environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    mutmut = [sys.executable, "-m", "mutmut"]
    # A fault's name ends with its number.
    names = ["*[37]"] if options.sample else []
    run = [*mutmut, "run", "--max-children", str(options.children), *names]
    if subprocess.run(run, cwd=WORK, env=environment, check=False).returncode < 0:
        print("mutmut was stopped before it was done", file=sys.stderr)
        return 1
    subprocess.run([*mutmut, "export-cicd-stats"], cwd=WORK, env=environment, check=True)
    counts = json.loads((WORK / "mutants" / "mutmut-cicd-stats.json").read_text(encoding="utf-8"))
    caught = counts["killed"] + counts["timeout"] + counts["segfault"]
    tried = caught + counts["survived"] + counts["no_tests"] + counts["suspicious"]
    share = caught / max(1, tried)
    print(f"{caught} of {tried} planted faults caught: {share:.1%} ({counts['timeout']} of them by the time limit)")
    return 0 if share >= options.at_least else 1


def copy_layer() -> None:
    """Copy the layer and its tests; results of an earlier run stay, so that only what changed is tried again."""
    for name in COPIED:
        source, target = ROOT / name, WORK / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.rmtree(target, ignore_errors=True)
            shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy2(source, target)
    (WORK / "pyproject.toml").write_text(SETTINGS, encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
