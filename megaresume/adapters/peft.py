"""PEFT's directories: an adapter as whole matrices under PEFT's names, out of a checkpoint and back into a run.

    <directory>/adapter_config.json, adapter_model.safetensors

Keys are `base_model.model.<module>.lora_A.weight`; modules have the names they have in this model. Nothing is pickled:
`adapter_model.bin` is never read.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch

from megaresume.adapters.assemble import assemble_weights
from megaresume.errors import CheckpointNotFoundError, ConfigurationError, FormatError, UnsupportedError
from megaresume.store import fs, strict_json
from megaresume.store.manifest import Manifest

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
FINGERPRINT = "megaresume_base_fingerprint"  # in the metadata of the weights' file, which other readers pass over

_PREFIX = "base_model.model."
_MAX_CONFIG_BYTES = 2**20
# Options under which a rank-r pair of matrices is not all there is to the adapter, and the values that mean "off".
_OFF: dict[str, tuple[Any, ...]] = {
    "use_dora": (False, None),
    "use_rslora": (False, None),
    "fan_in_fan_out": (False, None),
    "bias": ("none", None),
    "modules_to_save": (None, []),
    "rank_pattern": ({}, None),
    "alpha_pattern": ({}, None),
}


@dataclass(frozen=True)
class PeftAdapter:
    """What a PEFT directory holds: weights by `<module>.lora_A.weight`; the fingerprint of its base where known."""

    rank: int
    alpha: float
    targets: list[str]
    weights: dict[str, torch.Tensor]
    base_fingerprint: str | None


def export_adapter(checkpoint: Path, directory: Path, *, key: str, base: str | None) -> int:
    """Write the LoRA adapter of a committed checkpoint as a PEFT directory; return the number of its tensors.

    `key` is the adapter's name in its parameters' names, `base` what adapter_config.json names as the base model. Works
    in any process, whatever topology the checkpoint is of. Raises ConfigurationError where `directory` exists, or the
    checkpoint is not of a LoRA adapter; else what `assemble_weights` raises.
    """
    if os.path.lexists(directory):
        raise ConfigurationError(f"{directory} exists: an export goes into a new directory")
    manifest, weights = assemble_weights(checkpoint)
    config = _config_of(checkpoint, manifest)
    tensors = {_PREFIX + _without_key(name, key): tensor.contiguous() for name, tensor in weights.items()}
    metadata = {"format": "pt", FINGERPRINT: str(manifest.model["base"]["fingerprint"])}
    staging = directory.with_name(f".{directory.name}.{secrets.token_hex(4)}.tmp")
    fs.make_directory(staging)
    fs.write_file_durably(staging / WEIGHTS, safetensors.torch.save(tensors, metadata))
    fs.write_file_durably(staging / CONFIG, json.dumps(_peft_config(config, base), indent=2).encode() + b"\n")
    fs.fsync_directory(staging)
    fs.rename(staging, directory)
    fs.fsync_directory(directory.parent)
    return len(tensors)


def read_peft(directory: Path) -> PeftAdapter:
    """Read a PEFT directory, checked. CheckpointNotFoundError, FormatError, UnsupportedError name what is wrong."""
    for name in (CONFIG, WEIGHTS):
        if not (directory / name).is_file():
            found = ", ".join(sorted(os.listdir(directory))[:8]) if directory.is_dir() else "no such directory"
            raise CheckpointNotFoundError(f"{directory}: expected {CONFIG} and {WEIGHTS}, found: {found}")
    config = strict_json.read_json_strict(directory / CONFIG, _MAX_CONFIG_BYTES)
    source = directory / CONFIG
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        raise UnsupportedError(f"{source}: expected a LoRA adapter (peft_type LORA)")
    for option, off in _OFF.items():
        if config.get(option) not in off:
            raise UnsupportedError(f"{source}: {option} is {config[option]!r}, which is not supported")
    rank, alpha, targets = config.get("r"), config.get("lora_alpha"), config.get("target_modules")
    if type(rank) is not int or not isinstance(alpha, (int, float)) or type(targets) is not list:
        raise FormatError(f"{source}: expected r, lora_alpha and a list of target_modules")
    try:
        with safetensors.safe_open(directory / WEIGHTS, framework="pt") as file:
            fingerprint = (file.metadata() or {}).get(FINGERPRINT)
            weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (it is no dict)
    except safetensors.SafetensorError as error:
        raise FormatError(f"{directory / WEIGHTS}: not a safetensors file: {error}") from error
    strange = [name for name in weights if not name.startswith(_PREFIX)]
    if strange:
        raise FormatError(f"{directory / WEIGHTS}: expected names that begin with {_PREFIX}, found {strange[0]}")
    named = {name.removeprefix(_PREFIX): tensor for name, tensor in weights.items()}
    return PeftAdapter(rank, float(alpha), sorted(map(str, targets)), named, fingerprint)


def with_key(name: str, key: str) -> str:
    """`<module>.lora_A.weight` as the name that the matrix has in a model: `<module>.lora_A.<key>.weight`."""
    module, _, rest = name.rpartition(".lora_")
    matrix, _, leaf = rest.partition(".")
    return f"{module}.lora_{matrix}.{key}.{leaf}"


def _without_key(name: str, key: str) -> str:
    for matrix in ("lora_A", "lora_B"):
        if name.endswith(f".{matrix}.{key}.weight"):
            return f"{name.removesuffix(f'.{key}.weight')}.weight"
    raise ConfigurationError(f"{name} is no LoRA matrix of adapter {key}: only LoRA adapters have PEFT's form")


def _config_of(checkpoint: Path, manifest: Manifest) -> Mapping[str, Any]:
    config = manifest.model.get("adapter")
    if not isinstance(config, dict) or not {"rank", "alpha", "dropout", "targets"} <= config.keys():
        raise ConfigurationError(f"{checkpoint} is not of a LoRA adapter: only those have PEFT's form")
    return config


def _peft_config(config: Mapping[str, Any], base: str | None) -> dict[str, Any]:
    alpha = config["alpha"]
    return {
        "peft_type": "LORA",
        "task_type": None,
        "base_model_name_or_path": base,
        "inference_mode": True,
        "r": config["rank"],
        "lora_alpha": int(alpha) if float(alpha).is_integer() else alpha,
        "lora_dropout": config["dropout"],
        "target_modules": list(config["targets"]),
        "bias": "none",
        "fan_in_fan_out": False,
        "modules_to_save": None,
    }
