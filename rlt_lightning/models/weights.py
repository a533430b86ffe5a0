"""Read, fill in, gather and write a model's weights by name, whole or sharded."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from rlt_lightning.models.embedded import find_file, resolve
from rlt_lightning.types import InputError, first_line

# A parameter's name, and the parameter, which may be sharded over ranks.
NamedTensor = tuple[str, Tensor]
# A function from a parameter's name to its whole value, in main memory.
Read = Callable[[str], Tensor]
# The most weights in one file.
FILE_BYTES = 4 * 2**30
SAFETENSORS, SAFETENSORS_INDEX = "model.safetensors", "model.safetensors.index.json"
# The most numbers that a process holds whole while a model is filled, unless one tensor has more.
GROUP_NUMEL = 2**27


def full_shape(tensor: Any) -> tuple[int, ...]:
    """Return the shape of the whole tensor, however it is sharded; nothing is gathered."""
    return tuple(getattr(tensor, "ds_shape", tensor.shape))


def count_bytes(tensor: Any) -> int:
    """Return the bytes of the whole tensor."""
    return torch.Size(full_shape(tensor)).numel() * int(tensor.element_size())


@dataclass
class Deferred:
    """A placeholder for a whole tensor that is read when it is needed, from a file or from all ranks' shards.

    Example:
        `Deferred(torch.Size([2, 3]), torch.float32, lambda: read("lm_head.weight"))`
    """

    shape: torch.Size
    dtype: torch.dtype
    full_tensor: Callable[[], Tensor]

    def element_size(self) -> int:
        """Return the bytes of one number."""
        return self.dtype.itemsize


@contextmanager
def whole_tensors(tensors: list[Tensor]) -> Iterator[list[Tensor]]:
    """Hold whole tensors inside the block; those of DeepSpeed ZeRO-3 and FSDP are gathered from all ranks.

    Where a tensor is sharded, all ranks of the trainer must call this together.
    """
    with whole_zero3_parameters([tensor for tensor in tensors if hasattr(tensor, "ds_id")]):
        yield [tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor.data for tensor in tensors]


def whole_zero3_parameters(partitioned: list[Tensor]) -> AbstractContextManager[Any]:
    """Return a context inside which these parameters of DeepSpeed ZeRO-3 are whole."""
    if not partitioned:
        return nullcontext()
    import deepspeed

    return deepspeed.zero.GatheredParameters(partitioned)


def gather_in_groups(named_tensors: list[NamedTensor], group_bytes: int) -> Iterator[list[Tensor]]:
    """Yield whole tensors in groups of at most `group_bytes`, or one; each group is freed before the next."""
    group: list[Tensor] = []
    size = 0
    for _, tensor in named_tensors:
        num_bytes = count_bytes(tensor)
        if group and size + num_bytes > group_bytes:
            yield from gather_and_release(group)
            group, size = [], 0
        group.append(tensor)
        size += num_bytes
    if group:
        yield from gather_and_release(group)


def gather_and_release(tensors: list[Tensor]) -> Iterator[list[Tensor]]:
    """Yield one list of whole tensors and empty it afterwards, so that the caller cannot keep them alive."""
    with whole_tensors(tensors) as whole:
        yield whole
        whole.clear()


@torch.no_grad()
def fill_in_place(tensors: dict[str, Tensor], read: Read) -> None:
    """Overwrite weights, sharded or not, with the values that `read` returns."""
    for name, tensor in tensors.items():
        set_whole(tensor, read(name))


@torch.no_grad()
def set_whole(tensor: Any, whole: Tensor) -> None:
    """Copy a whole tensor, the same on every rank, into one that may be sharded."""
    if hasattr(tensor, "ds_id"):
        import deepspeed

        with deepspeed.zero.GatheredParameters([tensor], modifier_rank=0):
            tensor.data.copy_(whole)
    elif hasattr(tensor, "device_mesh"):
        from torch.distributed.tensor import distribute_tensor

        whole = whole.to(tensor.device, tensor.dtype)
        part = distribute_tensor(whole, tensor.device_mesh, tensor.placements, src_data_rank=None)
        tensor.to_local().copy_(part.to_local())
    else:
        tensor.copy_(whole)


def trained_parameters(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the parameters that the optimizer trains, by name."""
    return ((name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad)


def trained_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return the stored weights that training may change, by name: all but the frozen parameters."""
    once = stored_once(model).items()
    return {
        name: tensor for name, tensor in once if tensor.requires_grad or not isinstance(tensor, nn.Parameter)
    }


def stored_once(model: nn.Module) -> dict[str, Tensor]:
    """Return parameters and persistent buffers by name; tied ones only under their first name."""
    persistent = model.state_dict().keys()
    buffers = {name: buffer for name, buffer in model.named_buffers() if name in persistent}
    return dict(model.named_parameters()) | buffers


def write_weights(
    named_tensors: list[NamedTensor],
    folder: Path,
    rank: int = 0,
    world_size: int = 1,
    file_name: str = SAFETENSORS,
) -> list[Path]:
    """Write whole tensors as safetensors, in one file or several with an index, for from_pretrained.

    Where a tensor is sharded, all ranks must call this together. Each rank writes some of the files, and
    holds one file's tensors at a time.

    Args:
        named_tensors: The same on every rank.
        folder: An existing folder to write to.
        rank: The rank of this process.
        world_size: Number of processes.
        file_name: The file's name, if one file is enough.

    Returns:
        The files that this rank has written.
    """
    from huggingface_hub import split_state_dict_into_shards_factory

    tensors: dict[str, Any] = dict(named_tensors)
    files = split_state_dict_into_shards_factory(
        tensors,
        get_storage_size=count_bytes,
        filename_pattern=file_name.replace(".", "{suffix}.", 1),
        max_shard_size=FILE_BYTES,
    )
    written: list[Path] = []
    for number, (file, names) in enumerate(files.filename_to_tensors.items()):
        on_rank = {}
        for name in names:
            with whole_tensors([tensors[name]]) as [whole]:
                if number % world_size == rank:
                    on_rank[name] = whole.detach().to("cpu", copy=True).contiguous()
        if on_rank:
            save_file(on_rank, folder / file, metadata={"format": "pt"})
            written.append(folder / file)
    if files.is_sharded and rank == 0:
        written.append(folder / SAFETENSORS_INDEX)
        written[-1].write_text(json.dumps({"metadata": {}, "weight_map": files.tensor_to_filename}))
    for path in written:
        with open(path, "rb") as handle:
            os.fsync(handle.fileno())
    return written


@torch.no_grad()
def move_towards(ours: nn.Module, theirs: dict[str, Any], alpha: float) -> None:
    """Set ours to alpha * theirs + (1 - alpha) * ours, parameter by parameter, however they are sharded."""
    for name, parameter in ours.named_parameters():
        with whole_tensors([parameter, theirs[name]]) as [our_whole, their_whole]:
            moved = torch.lerp(our_whole, their_whole.to(our_whole), alpha)
        set_whole(parameter, moved)


class WeightFiles:
    """The safetensors files of a model, read tensor by tensor.

    A file is open only while a tensor is read: its mapped pages would count as this process's memory.

    Args:
        name: Local folder, hub id, or a name such as miniature.
    """

    def __init__(self, name: str) -> None:
        from safetensors import SafetensorError, safe_open
        from transformers.utils import cached_file

        self.name = name
        try:
            index = find_file(name, SAFETENSORS_INDEX)
            names = json.loads(index.read_text())["weight_map"].values() if index else [SAFETENSORS]
            self.file_of: dict[str, str] = {}
            self.shapes: dict[str, list[int]] = {}
            for path in (str(cached_file(resolve(name), file)) for file in sorted(set(names))):
                with safe_open(path, framework="pt") as file:
                    self.file_of |= dict.fromkeys(file.keys(), path)
                    self.shapes |= {key: file.get_slice(key).get_shape() for key in file.keys()}  # noqa: SIM118
        except (OSError, SafetensorError) as error:
            raise InputError(
                f"The weights of '{name}' must be safetensors files, but are missing or damaged "
                f"({first_line(error)}). Choose another model or checkpoint."
            ) from error

    def __call__(self, key: str) -> Tensor:
        """Return one whole tensor, in the type in which it is stored."""
        from safetensors import safe_open

        with safe_open(self.file_of[key], framework="pt") as file:
            return file.get_tensor(key)

    def empty(self, key: str) -> Tensor:
        """Return a tensor's shape, as an empty tensor on the meta device."""
        return torch.empty(self.shapes[key], device="meta")


def require_weights(name: str, faulty: Collection[str]) -> None:
    """Refuse a model whose files lack weights of it, or have them in another shape.

    Args:
        name: The model.
        faulty: Names of these weights.
    """
    if faulty:
        some = ", ".join(sorted(faulty)[:3]) + (", ..." if len(faulty) > 3 else "")
        raise InputError(
            f"The files of '{name}' must have every weight of the model in its shape, but {len(faulty)} are "
            f"missing or have another one: {some}. Correct its config.json (a head that is tied to the "
            "embedding has no file), or save the whole model again."
        )
