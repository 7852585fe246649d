import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from pdserve.config.engine import EngineConfig
from pdserve.errors import ConfigError
from pdserve.models.registry import load_model
from pdserve.models.weights_dummy import DummyWeights
from pdserve.models.weights_safetensors import SafetensorsWeights
from tests.support.generation import generate, make_request, make_runner

NORM = "model.norm.weight"
PROMPT = list(range(10, 40))


@pytest.fixture
def folder(tiny_llama_folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_llama_folder, tmp_path / "model"))


def shard(folder: Path) -> Path:
    """Splits the folder's only weight file in two with an index; returns the index."""
    single = folder / "model.safetensors"
    tensors = load_file(single)
    names = sorted(tensors)
    weight_map = {}
    for number, part in enumerate((names[::2], names[1::2])):
        file = f"model-{number}.safetensors"
        save_file({name: tensors[name] for name in part}, folder / file)
        weight_map |= dict.fromkeys(part, file)
    single.unlink()
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}), encoding="utf-8")
    return index


def tokens_of(folder: Path, **over: object) -> list[int]:
    engine = EngineConfig(model=str(folder), **over)  # type: ignore[arg-type]  # test settings
    runner = make_runner(load_model(folder, engine), engine, num_blocks=8)
    return generate(runner, make_request(PROMPT), 12, range(4))


def test_shards_give_the_same_model_as_one_file(folder: Path) -> None:
    expected = tokens_of(folder)
    shard(folder)
    assert tokens_of(folder) == expected


def test_weights_of_another_type_are_converted(folder: Path) -> None:
    path = folder / "model.safetensors"
    halves = {name: tensor.bfloat16() for name, tensor in load_file(path).items()}
    save_file({name: tensor.float() for name, tensor in halves.items()}, path)
    expected = tokens_of(folder)
    save_file(halves, path)
    assert tokens_of(folder) == expected


def test_a_missing_tensor_is_named(folder: Path) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    del tensors[NORM]
    save_file(tensors, path)
    with pytest.raises(ConfigError, match=f"tensor {NORM} is missing"):
        load_model(folder, EngineConfig(model=""))


def test_a_wrong_shape_is_named(folder: Path) -> None:
    path = folder / "model.safetensors"
    save_file(load_file(path) | {NORM: torch.ones(63)}, path)
    with pytest.raises(ConfigError, match=rf"{NORM} must have shape \[64\], got \[63\]"):
        load_model(folder, EngineConfig(model=""))


def test_a_missing_shard_is_named(folder: Path) -> None:
    shard(folder)
    (folder / "model-1.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"shard model-1\.safetensors is missing"):
        SafetensorsWeights(folder)


def test_a_shard_outside_of_the_folder_is_refused(folder: Path) -> None:
    index = shard(folder)
    shutil.copy(folder / "model-0.safetensors", folder.parent / "out.safetensors")
    index.write_text(json.dumps({"weight_map": {NORM: "../out.safetensors"}}), encoding="utf-8")
    with pytest.raises(ConfigError, match="missing"):
        SafetensorsWeights(folder)


def test_an_index_that_names_a_tensor_its_shard_lacks_is_refused(folder: Path) -> None:
    index = shard(folder)
    weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
    weight_map["ghost"] = "model-0.safetensors"
    index.write_text(json.dumps({"weight_map": weight_map}), encoding="utf-8")
    with pytest.raises(ConfigError, match="tensor ghost is missing"):
        SafetensorsWeights(folder)


@pytest.mark.parametrize("text", ["", "{}", '{"weight_map": 3}', "[]"])
def test_a_broken_index_is_refused(folder: Path, text: str) -> None:
    shard(folder).write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=r"index\.json: cannot be read"):
        SafetensorsWeights(folder)


@pytest.mark.parametrize("size", [0, 4, 1000])
def test_a_cut_off_file_is_refused(folder: Path, size: int) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(ConfigError, match="is no safetensors file"):
        SafetensorsWeights(folder)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth"])
def test_E9_pickled_weights_are_refused_unread(folder: Path, name: str) -> None:
    (folder / "model.safetensors").rename(folder / name)
    with pytest.raises(ConfigError, match=f"{name} is a pickle"):
        SafetensorsWeights(folder)


def test_a_folder_without_weights_is_refused(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"no model\.safetensors"):
        SafetensorsWeights(folder)


def test_dummy_weights_need_no_file_and_depend_on_the_seed_alone(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    first = tokens_of(folder, load_format="dummy")
    assert tokens_of(folder, load_format="dummy") == first
    assert tokens_of(folder, load_format="dummy", seed=1) != first


def test_dummy_tensors_differ_by_name_and_norms_are_ones() -> None:
    source = DummyWeights(0)
    first, second = source.take("a.weight", (8, 4)), source.take("b.weight", (8, 4))
    assert not torch.equal(first, second)
    assert torch.equal(first, DummyWeights(0).take("a.weight", (8, 4)))
    assert torch.equal(source.take(NORM, (4,)), torch.ones(4))
