"""Metadata of the package; the tools are configured in pyproject.toml."""

from pathlib import Path

from setuptools import find_packages, setup

setup(
    name="autopar_torch",
    version="0.1.0",
    description="One line, and a PyTorch model trains on whatever machines it was started on.",
    long_description=(Path(__file__).parent / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.11",
    packages=[
        *find_packages(include=["autopar_torch", "autopar_torch.*"]),
        "autopar_torch.hardware",  # data only: datasheets.py reads it from either place
    ],
    package_dir={"autopar_torch.hardware": "profiling/hardware"},
    package_data={"autopar_torch": ["py.typed", "shard/*.json", "report/*.css"],
                  "autopar_torch.hardware": ["*.json", "networks/*.json"]},
    entry_points={"console_scripts": ["autopar = autopar_torch.cli:main"]},
    install_requires=["torch>=2.11.0", "numpy", "msgspec", "safetensors", "rich",
                      "nvidia-ml-py"],
    extras_require={
        "test": [
            "pytest",
            "pytest-timeout",
            "pytest-xdist",
            "setuptools>=77",
            "hypothesis",
            "transformers",
            "accelerate",
            "peft",
            "safetensors",
            "ruff",
            "mypy",
            "shtab",
            "kubernetes-validate",
        ],
        "completion": ["shtab"],
        "notebook": ["nbclient", "ipykernel", "matplotlib"],
        "docs": ["mkdocs", "mkdocs-material"],
        "hf": ["transformers", "accelerate"],
    },
)
