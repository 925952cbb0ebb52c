"""The safetensors library reads forge's files, and forge reads the library's."""

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from forge.runtime.errors import UserError
from forge.tools.hf.safetensors import DTYPES, Planned, find_tensors, read_header, write_tensors

DTYPE_LIST = sorted(DTYPES.values(), key=str)
SHAPES = [(), (3,), (0, 4), (2, 3), (2, 1, 5)]


def values(number: int, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(number)).to(dtype)


def some_tensors() -> dict[str, torch.Tensor]:
    pairs = [(dtype, shape) for dtype in DTYPE_LIST for shape in SHAPES]
    return {f"tensor.{n}": values(n, *pair) for n, pair in enumerate(pairs)}


def read(folder: Path) -> dict[str, torch.Tensor]:
    found = {}
    for name, stored in find_tensors(folder).items():
        found[name] = torch.empty(stored.shape, dtype=DTYPES[stored.dtype])
        stored.read_into(found[name])
    return found


def write(folder: Path, tensors: dict[str, torch.Tensor], limit: int) -> None:
    planned = [Planned(name, t.dtype, tuple(t.shape)) for name, t in tensors.items()]
    sizes = list(write_tensors(folder, planned, iter(tensors.values()), limit))
    assert sizes == [tensor.nbytes for tensor in tensors.values()]


def same(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    return actual.keys() == expected.keys() and all(
        actual[name].dtype == tensor.dtype and torch.equal(actual[name], tensor)
        for name, tensor in expected.items()
    )


@pytest.mark.parametrize("limit", [1, 40, 10_000])
def test_the_library_reads_forges_files(limit: int, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    write(tmp_path, some_tensors(), limit)
    files = sorted(tmp_path.glob("*.safetensors"))
    assert len(files) == {1: 20, 40: len(files), 10_000: 1}[limit] and (limit != 40 or 1 < len(files) < 20)
    together: dict[str, torch.Tensor] = {}
    for file in files:
        together |= load_file(file)
        assert sum(tensor.nbytes for tensor in load_file(file).values()) <= max(limit, 80)
    assert same(together, some_tensors())
    assert same(read(tmp_path), some_tensors())


def test_what_the_library_writes_is_read(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    save_file(some_tensors(), tmp_path / "model.safetensors", {"format": "pt"})
    assert same(read(tmp_path), some_tensors())


@pytest.mark.long
@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_no_damage_to_a_header_is_anything_but_refused(data: st.DataObject, tmp_path_factory) -> None:
    """Any changed bytes give either a UserError or tensors that lie within the file."""
    folder = tmp_path_factory.mktemp("damaged")
    write(folder, {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(3).bfloat16()}, 10_000)
    file = folder / "model.safetensors"
    content = bytearray(file.read_bytes())
    length = 8 + int.from_bytes(content[:8], "little")
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, length - 1))] = data.draw(st.integers(0, 255))
    file.write_bytes(
        content[: data.draw(st.integers(0, len(content)))] if data.draw(st.booleans()) else content
    )
    try:
        found = read_header(file)
    except UserError as error:
        assert str(file) in str(error) and error.exit_code == 2
        return
    for stored in found.values():
        if stored.dtype in DTYPES:
            stored.read_into(torch.empty(stored.shape, dtype=DTYPES[stored.dtype]))
