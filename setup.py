"""Packaging: what megaresume needs, and why. Tools' settings are in pyproject.toml, the version in the package."""

import re
from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).resolve().parent
VERSION = re.search(r'^__version__ = "(.+)"$', (HERE / "megaresume" / "__init__.py").read_text("utf-8"), re.MULTILINE)
assert VERSION is not None

setup(
    name="megaresume",
    version=VERSION.group(1),
    description="Megatron-core training runs that stop anywhere and go on bit for bit",
    long_description=(HERE / "README.md").read_text("utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.10",
    packages=find_packages(include=["megaresume", "megaresume.*"]),
    package_data={"megaresume": ["py.typed"]},
    # argparse's three commands need no library, and start in a tenth of a second on a login node.
    entry_points={"console_scripts": ["megaresume = megaresume.cli.main:main"]},
    install_requires=[
        "torch>=2.6",  # the tensors, the process groups and the TCPStore; 2.6 is also what megatron-core asks for
        "numpy",  # bytes as arrays without a copy, and a random stream to be captured
        "megatron-core>=0.14",  # whose training this is; 0.12's distributed optimizer wants Transformer Engine
        "safetensors",  # the form of every shard: its own reader must be able to open ours
        "xxhash",  # digests of chunks and headers, faster than any disk
        "psutil",  # the supervisor finds a try's processes by it; megatron-core imports it without declaring it
    ],
    # Apex: fused optimizers and norms from it are recognised where it is installed, but it is not an extra, since the
    # package that PyPI calls `apex` is not NVIDIA's. Build that one from NVIDIA's own source.
    extras_require={
        "te": ["transformer-engine[pytorch]"],  # fused layers and FusedAdam on GPUs; found by import, never required
        "demo": [
            "matplotlib",  # draws losses.png
            "tqdm",  # the progress line
        ],
        "test": [
            "pytest",
            "hypothesis",  # properties of samplers, plans and readers of hostile bytes
        ],
        "lint": [
            "ruff",
            "mypy",
            "types-psutil",  # psutil ships no types of its own
        ],
        "docs": ["mkdocs-material"],  # builds docs/ into a site
    },
)
