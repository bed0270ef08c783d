"""Tensors from disk: dequantisation, and every way in which a set of tensors can be wrong."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from pagetable.model import Llama, ModelError, load_config, load_model, open_checkpoint
from pagetable.model.weights import open_weights
from tests.model.tiny_models import TYPES, gguf_tensors, save_hf, tiny_llama, write_gguf

SUPPORTED = [TYPES.F32, TYPES.F16, TYPES.BF16, TYPES.Q8_0, TYPES.Q4_0, TYPES.Q4_1]


def loaded(path: Path) -> dict[str, torch.Tensor]:
    return {name: place.tensor for name, place in load_model(open_checkpoint(path), kernels="torch").placements()}


@pytest.mark.parametrize("kind", SUPPORTED, ids=lambda kind: kind.name)
def test_each_gguf_type_gives_the_numbers_of_ggufs_own_code(kind: TYPES, tmp_path: Path) -> None:
    model = tiny_llama()
    ours = loaded(write_gguf(model, tmp_path / "m.gguf", kind))
    for name, weight in model.state_dict().items():
        expected = weight.numpy()
        if expected.ndim == 2:
            # Quantisation is by row, so it commutes with the reordering of rows.
            expected = gguf.quants.dequantize(gguf.quants.quantize(expected, kind), kind)
        np.testing.assert_array_equal(ours[name].numpy(), expected, err_msg=name)


def test_more_rows_than_are_dequantised_at_once(tmp_path: Path) -> None:
    model = tiny_llama(vocab_size=5000)
    ours = loaded(write_gguf(model, tmp_path / "m.gguf", TYPES.Q8_0))
    weight = model.model.embed_tokens.weight.detach().numpy()
    expected = gguf.quants.dequantize(gguf.quants.quantize(weight, TYPES.Q8_0), TYPES.Q8_0)
    np.testing.assert_array_equal(ours["model.embed_tokens.weight"].numpy(), expected)


@pytest.mark.parametrize("kind", [TYPES.Q5_0, TYPES.Q5_1])
def test_other_gguf_types_are_refused_by_name(kind: TYPES, tmp_path: Path) -> None:
    path = write_gguf(tiny_llama(), tmp_path / "m.gguf", kind)
    with pytest.raises(ModelError, match=rf"type {kind.name}, supported: F32, F16, BF16, Q8_0, Q4_0, Q4_1"):
        load_model(open_checkpoint(path))


def write_changed_gguf(folder: Path, **changes: np.ndarray | None) -> Path:
    """A tiny GGUF with tensors added, replaced, or (None) removed."""
    model = tiny_llama()
    tensors = {**gguf_tensors(model), **changes}
    return write_gguf(model, folder / "m.gguf", tensors={k: v for k, v in tensors.items() if v is not None})


def write_changed_hf(folder: Path, **changes: torch.Tensor | None) -> Path:
    save_hf(tiny_llama(), folder)
    tensors = {**load_file(folder / "model.safetensors"), **changes}
    save_file({k: v for k, v in tensors.items() if v is not None}, folder / "model.safetensors")
    return folder


def test_a_missing_gguf_tensor_is_named(tmp_path: Path) -> None:
    path = write_changed_gguf(tmp_path, **{"blk.1.ffn_up.weight": None})
    with pytest.raises(ModelError, match=r"lacks model\.layers\.1\.mlp\.up_proj\.weight"):
        load_model(open_checkpoint(path))


def test_an_extra_gguf_tensor_is_named(tmp_path: Path) -> None:
    path = write_changed_gguf(tmp_path, **{"blk.1.attn_q_norm.weight": np.ones(16, np.float32)})
    with pytest.raises(ModelError, match=r"blk\.1\.attn_q_norm\.weight, which this architecture has no use"):
        load_model(open_checkpoint(path))


def test_a_misshapen_gguf_tensor_is_named(tmp_path: Path) -> None:
    path = write_changed_gguf(tmp_path, **{"blk.0.attn_k.weight": np.ones((32, 32), np.float32)})
    with pytest.raises(ModelError, match=r"k_proj\.weight has shape \[32, 32\].*asks for \[32, 64\]"):
        load_model(open_checkpoint(path))


def test_harmless_extras_are_passed_over(tmp_path: Path) -> None:
    loaded(write_changed_gguf(tmp_path, **{"blk.0.attn_rot_embd.weight": np.ones(8, np.float32)}))
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}
    loaded(write_changed_hf(tmp_path / "hf", **extra))


def test_missing_extra_and_misshapen_safetensors_are_named(tmp_path: Path) -> None:
    cases = {
        "lacks model.norm.weight": {"model.norm.weight": None},
        "model.layers.0.self_attn.q_norm.weight, which": {"model.layers.0.self_attn.q_norm.weight": torch.ones(16)},
        "norm.weight has shape": {"model.norm.weight": torch.ones(63)},
        "lm_head.weight has type I8": {"lm_head.weight": torch.ones(160, 64, dtype=torch.int8)},
    }
    for number, (message, changes) in enumerate(cases.items()):
        path = write_changed_hf(tmp_path / str(number), **changes)
        with pytest.raises(ModelError, match=message):
            load_model(open_checkpoint(path))


def test_a_tied_head_may_lie_in_the_file_or_not(tmp_path: Path) -> None:
    model = tiny_llama(tie_word_embeddings=True)
    folder = save_hf(model, tmp_path)
    tensors = load_file(folder / "model.safetensors")
    assert "lm_head.weight" not in tensors
    assert "lm_head.weight" not in loaded(folder)
    save_file({**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"].clone()}, folder / "model.safetensors")
    loaded(folder)


def test_an_untied_head_must_be_there(tmp_path: Path) -> None:
    path = write_changed_hf(tmp_path, **{"lm_head.weight": None})
    with pytest.raises(ModelError, match=r"lacks lm_head\.weight"):
        load_model(open_checkpoint(path))


def sharded(folder: Path) -> tuple[Path, dict[str, str]]:
    save_hf(tiny_llama(), folder, max_shard_size="60KB")
    return folder, json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]


@pytest.mark.parametrize(
    "file",
    ["../outside.safetensors", "/etc/x.safetensors", "..", "a/b.safetensors", "x.bin", "a\\b.safetensors", 3, None],
)
def test_an_index_that_leads_elsewhere_is_refused(tmp_path: Path, file: object) -> None:
    folder, weight_map = sharded(tmp_path / "m")
    (tmp_path / "outside.safetensors").write_bytes((folder / weight_map["lm_head.weight"]).read_bytes())
    index = {"weight_map": {**weight_map, "lm_head.weight": file}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match=r"sends lm_head\.weight to"):
        load_model(open_checkpoint(folder))


def test_an_index_whose_file_is_missing_is_refused(tmp_path: Path) -> None:
    folder, weight_map = sharded(tmp_path)
    (folder / weight_map["lm_head.weight"]).unlink()
    with pytest.raises(ModelError, match=rf"{weight_map['lm_head.weight']} is missing"):
        load_model(open_checkpoint(folder))


def test_an_index_that_promises_what_a_file_lacks_is_refused(tmp_path: Path) -> None:
    folder, weight_map = sharded(tmp_path)
    other = next(file for file in weight_map.values() if file != weight_map["lm_head.weight"])
    index = {"weight_map": {**weight_map, "lm_head.weight": other}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match=r"lacks lm_head\.weight, which the index promises"):
        load_model(open_checkpoint(folder))


@pytest.mark.parametrize("index", [{}, {"weight_map": [1]}, {"weight_map": None}])
def test_an_index_without_a_map_is_refused(tmp_path: Path, index: object) -> None:
    folder, _ = sharded(tmp_path)
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match="weight_map"):
        load_model(open_checkpoint(folder))


def test_several_files_without_an_index_are_refused(tmp_path: Path) -> None:
    folder, _ = sharded(tmp_path)
    (folder / "model.safetensors.index.json").unlink()
    with pytest.raises(ModelError, match=r"no model\.safetensors\.index\.json"):
        load_model(open_checkpoint(folder))


def test_a_config_that_claims_a_giant_takes_no_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save_hf(tiny_llama(), tmp_path)
    config = json.loads((folder / "config.json").read_text())
    config.update(hidden_size=1 << 17, intermediate_size=1 << 20, vocab_size=1 << 22, num_hidden_layers=64)
    (folder / "config.json").write_text(json.dumps(config))
    monkeypatch.setattr(Llama, "to_empty", lambda *_, **__: pytest.fail("memory was taken"))
    with pytest.raises(ModelError, match="lacks|has shape"):
        load_model(open_checkpoint(folder))


def test_the_source_lists_canonical_names_before_reading(tmp_path: Path) -> None:
    model = tiny_llama()
    for path in (save_hf(model, tmp_path / "hf"), write_gguf(model, tmp_path / "m.gguf")):
        checkpoint = open_checkpoint(path)
        source = open_weights(checkpoint, load_config(checkpoint))
        assert dict(source.shapes) == {name: tuple(weight.shape) for name, weight in model.state_dict().items()}
