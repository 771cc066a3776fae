"""Facts about the machine, the software and the weights that go into a run's record."""

from __future__ import annotations

import hashlib
import platform
import subprocess
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

ANSWER_PACKAGES = {"torch": "torch", "transformers": "transformers", "vlmeval": "ms-vlmeval"}
"""Packages whose version can change answers: name in the record -> distribution. VLMEvalKit has
others, which are named with their version."""

HASHED_WHOLE_BYTES = 256 * 2**20
SAMPLE_BYTES = 2**20
SAMPLES = 64


def versions() -> dict[str, str | None]:
    """Installed versions of :data:`ANSWER_PACKAGES`; None for one that is not installed."""
    found: dict[str, str | None] = {}
    for name, distribution in ANSWER_PACKAGES.items():
        try:
            found[name] = version(distribution)
        except PackageNotFoundError:
            found[name] = None
    if found["vlmeval"] is None:
        found["vlmeval"] = other_vlmeval()
    return found


@cache
def other_vlmeval() -> str | None:
    """Another distribution of VLMEvalKit, or a source tree of it: its name and version.

    A source tree is named by its commit, one with changes by a digest of its files.
    """
    from mm_capacity.evaluation.vlmeval_process import providers, source_folder

    names = providers()
    if names:
        return ", ".join(f"{name} {version(name)}" for name in names)
    folder = source_folder()
    if folder is None:
        return None
    try:
        if (folder.parent / ".git").exists():
            changed = _git(folder.parent, "status", "--porcelain", "--untracked-files=no")
            commit = _git(folder.parent, "rev-parse", "HEAD")
            if not changed:
                return f"source tree {commit}"
    except (OSError, subprocess.SubprocessError):
        pass
    sha = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        sha.update(f"{path.relative_to(folder)}\0{file_digest(path)}\n".encode())
    return f"source tree {sha.hexdigest()[:16]}"


def git_commit() -> str | None:
    """Commit of the source tree this package runs from, with "+changes"; None outside of one."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return None
    try:
        commit = _git(root, "rev-parse", "HEAD")
        changed = _git(root, "status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.SubprocessError):
        return None
    return commit + ("+changes" if changed else "")


def _git(root: Path, *arguments: str) -> str:
    done = subprocess.run(
        ["git", "-C", str(root), *arguments], capture_output=True, text=True, timeout=10, check=True
    )
    return done.stdout.strip()


def machine(device: Any) -> dict[str, Any]:
    """Python, system and device of this process.

    Args:
        device: the ``torch.device`` of the model.
    """
    import torch

    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor()
    return {
        "python": platform.python_version(),
        "system": platform.platform(),
        "device_name": name or platform.machine(),
        "threads": torch.get_num_threads(),
    }


def file_digest(path: Path) -> str:
    """SHA-256 of a file; of its size and evenly spaced samples when it is a large one.

    Training moves every weight, so samples tell two checkpoints apart without reading
    hundreds of gigabytes.
    """
    size = path.stat().st_size
    sha = hashlib.sha256(str(size).encode())
    with path.open("rb") as file:
        if size <= HASHED_WHOLE_BYTES:
            while block := file.read(SAMPLE_BYTES):
                sha.update(block)
        else:
            for number in range(SAMPLES):
                file.seek(number * (size - SAMPLE_BYTES) // (SAMPLES - 1))
                sha.update(file.read(SAMPLE_BYTES))
    return sha.hexdigest()


def folder_digest(folder: Path) -> str:
    """Digest of a checkpoint folder: weights, configuration, tokenizer and processor files."""
    wanted = {".json", ".safetensors", ".bin", ".txt", ".model", ".jinja", ".py"}
    sha = hashlib.sha256()
    for path in sorted(folder.iterdir()):
        if path.is_file() and path.suffix in wanted:
            sha.update(f"{path.name}\0{file_digest(path)}\n".encode())
    return sha.hexdigest()[:16]
