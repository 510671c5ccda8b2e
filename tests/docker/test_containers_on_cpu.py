# Licensed under the Apache License, Version 2.0 (see LICENSE).
"""docker/: the linters find nothing, and what the files say would run does run here without a container."""

import json
import os
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import compose_spec
import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from recipe.agent_env.config_checks import finish_config
from recipe.agent_env.env_service.__main__ import build_parser, build_registry
from tests.env_service.service import serve_process
from tests.test_config_on_cpu import composed

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docker"
DOCKERFILE = FOLDER / "service.Dockerfile"
README = (FOLDER / "README.md").read_text(encoding="utf-8")
COMPOSE = (FOLDER / "compose.yaml").read_text(encoding="utf-8")
VALUES = {"AGENT_ENV_SERVICE_TOKEN": "secret", "TRAINER_IMAGE": "verl:0.9.1"}
HADOLINT = Path(sys.executable).parent / "hadolint"


def instructions(dockerfile: str) -> dict[str, list[str]]:
    """Arguments of each instruction of a Dockerfile, by its name, in order."""
    found: dict[str, list[str]] = {}
    lines = re.sub(r"^\s*#.*\n", "", dockerfile, flags=re.MULTILINE)
    for line in re.sub(r"\\\n\s*", " ", lines).splitlines():
        if line.strip():
            name, _, arguments = line.partition(" ")
            found.setdefault(name, []).append(arguments.strip())
    return found


SERVICE = instructions(DOCKERFILE.read_text(encoding="utf-8"))


def interpolate(text: str, values: dict[str, str]) -> str:
    """Put values in for `${NAME:-default}` and `${NAME:?message}`, as compose does before it looks at the file.

    Raises:
        KeyError: A required value is missing.
    """

    def value(match: re.Match[str]) -> str:
        name, kind, rest = match.groups()
        return values[name] if name in values or kind == "?" else rest

    return re.sub(r"\$\{(\w+):([-?])([^}]*)\}", value, text)


def lint(text: str) -> Any:
    """Parse a compose file by the Compose specification, references between its parts included."""
    compose = compose_spec.PyCompose.from_yaml(text)
    compose.validate()
    return compose.to_spec()


def test_dockerfile_passes_hadolint():
    done = subprocess.run([HADOLINT, "--no-color", DOCKERFILE], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")


def test_layer_of_the_readme_passes_hadolint():
    """It builds on an image of this machine, which has no version, and names a user that the image made."""
    layer = re.search(r"```dockerfile\n(.*?)```", README, re.DOTALL)
    assert layer is not None
    command = [HADOLINT, "--no-color", "--ignore", "DL3006", "--failure-threshold", "warning", "-"]
    done = subprocess.run(command, input=layer.group(1), capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_image_is_slim_has_a_health_check_and_is_not_root():
    assert SERVICE["FROM"][0].startswith("python:3.") and "-slim" in SERVICE["FROM"][0]
    assert SERVICE["USER"][-1].isdigit() and int(SERVICE["USER"][-1]) > 0
    assert len(SERVICE["HEALTHCHECK"]) == 1
    uid = re.search(r"useradd --uid (\d+)", SERVICE["RUN"][0])
    assert uid is not None and uid.group(1) == SERVICE["USER"][-1]


def test_what_is_copied_is_there_and_sent_to_the_builder():
    sent = [
        line[1:] for line in (FOLDER / f"{DOCKERFILE.name}.dockerignore").read_text().splitlines() if line[:1] == "!"
    ]
    for arguments in SERVICE["COPY"]:
        *sources, _ = arguments.split()
        for source in sources:
            assert (ROOT / source).exists(), source
            assert any(source == path or source.startswith(f"{path}/") for path in sent), source


def installed_by_the_image() -> set[str]:
    """Distributions that `requirements/service.in` brings into the image, with what they ask for themselves."""
    lines = (ROOT / "requirements" / "service.in").read_text(encoding="utf-8").splitlines()
    queue = [canonicalize_name(line) for line in lines if line and not line.startswith("#")]
    found: set[str] = set()
    while queue:
        name = queue.pop()
        if name not in found:
            found.add(name)
            wanted = [Requirement(text) for text in metadata.requires(name) or []]
            queue += [canonicalize_name(r.name) for r in wanted if r.marker is None or r.marker.evaluate({"extra": ""})]
    return found


def test_service_starts_with_only_the_packages_of_the_image(tmp_path):
    """Everything else that is installed here is hidden from the service's processes, its workers included."""
    hidden = set()
    allowed = installed_by_the_image()
    for module, distributions in metadata.packages_distributions().items():
        if not {canonicalize_name(name) for name in distributions} & allowed:
            hidden.add(module)
    assert "torch" in hidden and "fastapi" not in hidden
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\n"
        f"HIDDEN = {sorted(hidden - {'recipe', 'examples', 'tests'})!r}\n"
        "class Hide:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.partition('.')[0] in HIDDEN:\n"
        "            raise ModuleNotFoundError(f'not in the image: {name}', name=name)\n"
        "sys.meta_path.insert(0, Hide())\n"
    )
    arguments = json.loads(SERVICE["CMD"][0])
    with serve_process(*arguments, "--workers", "1", PYTHONPATH=f"{tmp_path}:{ROOT}") as process:
        env_id = process.service.open("sokoban-v0", seed=1)
        assert process.service.close(env_id).status_code == 200


def test_health_check_tells_a_service_that_answers_from_one_that_does_not():
    command = json.loads(SERVICE["HEALTHCHECK"][0].partition("CMD ")[2])
    command[0] = sys.executable
    with serve_process(
        "sokoban-v0=examples.sokoban.sokoban_env:SokobanEnv", AGENT_ENV_SERVICE_TOKEN="secret"
    ) as process:
        here = [part.replace("http://127.0.0.1:8000", process.service.url) for part in command]
        assert here != command
        assert subprocess.run(here, timeout=60).returncode == 0
    assert subprocess.run(here, timeout=60, stderr=subprocess.DEVNULL).returncode != 0


def test_entrypoint_and_commands_are_understood(tmp_path, monkeypatch):
    entry = json.loads(SERVICE["ENTRYPOINT"][0])
    assert entry[:3] == ["python", "-m", "recipe.agent_env.env_service"]
    services = yaml.safe_load(interpolate(COMPOSE, VALUES))["services"]
    page = (ROOT / "docs" / "bring_your_own_environment.md").read_text(encoding="utf-8")
    code = re.search(r"```python\n(.*?)```", page, re.DOTALL)
    assert code is not None
    (tmp_path / "guess_env.py").write_text(code.group(1), encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    shown = re.search(r"agent-env-service (guess-v0=.*)", README)
    assert shown is not None
    for command in (json.loads(SERVICE["CMD"][0]), services["env-service"]["command"], shown.group(1).split()):
        args = build_parser().parse_args([*entry[3:], *command])
        assert args.host == "0.0.0.0" and str(args.port) == SERVICE["EXPOSE"][0]
        assert len(build_registry(args.environments, args.name).names) == 1


def test_compose_file_follows_the_specification():
    spec = lint(interpolate(COMPOSE, VALUES))
    assert sorted(spec.services) == ["env-service", "trainer"]


@pytest.mark.parametrize(
    ("right", "wrong"),
    [("service_healthy", "healthy"), ("read_only: true", "readonly: true"), ("shm_size: 16gb", "shm_size: much")],
)
def test_linter_finds_mistakes(right, wrong):
    assert right in COMPOSE
    with pytest.raises(ValueError):
        lint(interpolate(COMPOSE.replace(right, wrong), VALUES))


def test_compose_file_insists_on_a_token_and_a_trainer():
    for name in VALUES:
        with pytest.raises(KeyError, match=name):
            interpolate(COMPOSE, {key: value for key, value in VALUES.items() if key != name})
    assert set(re.findall(r"\$\{(\w+)", COMPOSE)) == set(re.findall(r"^\| `([A-Z_]+)` \|", README, re.MULTILINE))


def test_trainer_of_the_compose_file_reaches_the_service_and_its_config_is_accepted():
    services = yaml.safe_load(interpolate(COMPOSE, VALUES))["services"]
    command = services["trainer"]["command"]
    assert command[:3] == ["python", "-m", "recipe.agent_env.main_agent_ppo"]
    config = finish_config(composed(*command[3:], "actor_rollout_ref.rollout.tensor_model_parallel_size=1"))
    host, port = config.env.environment_endpoint.removeprefix("http://").split(":")
    assert host in services and host in services["trainer"]["depends_on"]
    assert port == SERVICE["EXPOSE"][0]
    token = config.env.bearer_token_env
    assert services["trainer"]["environment"][token] == services[host]["environment"][token] == "secret"


def test_paths_of_the_compose_file_exist():
    services = yaml.safe_load(interpolate(COMPOSE, VALUES))["services"]
    build = services["env-service"]["build"]
    context = (FOLDER / build["context"]).resolve()
    assert context == ROOT and (context / build["dockerfile"]).is_file()
    assert os.path.normpath(FOLDER / services["trainer"]["volumes"][0].split(":")[0]) == str(ROOT)
