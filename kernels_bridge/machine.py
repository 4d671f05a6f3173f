"""What a machine offers kernels, as a frozen value: probed here, invented in tests."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.metadata
import importlib.util
import re
import shutil
from collections.abc import Sequence
from typing import Any

import jax

from kernels_bridge import building

# Libraries by the name they are imported under, and the packages that are known to hold them. Of
# two packages with one import name, each may have kernels for other chips.
LIBRARIES: dict[str, tuple[str, ...]] = {
    "torch": ("torch",),
    "flash_mla": ("deepinfer-flashmla", "flash-mla"),
    "deep_gemm": ("deepinfer-gemm", "deep-gemm", "deepgemm"),
    "deep_select": ("deep-select", "deepselect"),
    "deep_ep": ("deepinfer-ep", "deep-ep"),
    "torch_npu": ("torch-npu",),
    "tilelang": ("tilelang",),
}
COMPILER = "c++"  # a compiler, or what it has built already
CUDA_COMPILER = "nvcc"  # likewise
NPU_COMPILER = "bisheng"  # of CANN
PLATFORMS = {"cpu": "cpu", "gpu": "cuda", "cuda": "cuda", "rocm": "rocm", "tpu": "tpu"}
ASCEND = "ascend950"  # a platform that XLA has no back end for (docs/ascend.md)


@dataclasses.dataclass(frozen=True)
class Found:
    """A library: the package it came in ("" unknown) and its version ("" unknown).

    assumed: not found, but taken to be on a machine that was named.
    """

    name: str
    package: str = ""
    version: str = ""
    assumed: bool = False

    def __str__(self) -> str:
        said = f"{self.name} {self.version}".strip() + (" (assumed)" if self.assumed else "")
        return f"{said} ({self.package})" if self.package not in ("", self.name) else said


@dataclasses.dataclass(frozen=True)
class Machine:
    """What kernels are chosen by.

    platform      "cpu", "cuda", "rocm", "tpu", as XLA names them, or ASCEND
    architecture  compute capability of an NVIDIA GPU, (9, 0) for Hopper; None where there is none
    device        the device's own name, for people
    devices       how many of them this process drives
    found         libraries and compilers that are there, in any order
    interpreter   whether Pallas kernels run in an interpreter here, as tests let them
    """

    platform: str
    architecture: tuple[int, int] | None = None
    device: str = ""
    devices: int = 1
    found: tuple[Found, ...] = ()
    interpreter: bool = False

    @property
    def has_xla(self) -> bool:
        """Whether XLA compiles for it."""
        return self.platform != ASCEND

    def find(self, name: str) -> Found | None:
        """The library or compiler of that name, None where it is not there."""
        return next((each for each in self.found if each.name == name), None)

    def __str__(self) -> str:
        number = f", {self.devices} devices" if self.devices > 1 else ""
        arch = ""
        if self.architecture is not None:
            arch = " sm_{}{}".format(*self.architecture)
        kind = f" ({self.device})" if self.device not in ("", self.platform) else ""
        return f"{self.platform}{arch}{kind}{number}"


# Machines that can be named without being there, with what they are never without.
INVENTED = {
    "h100": Machine("cuda", (9, 0), "NVIDIA H100"),
    "h200": Machine("cuda", (9, 0), "NVIDIA H200"),
    "b200": Machine("cuda", (10, 0), "NVIDIA B200"),
    ASCEND: Machine(
        ASCEND, found=tuple(Found(name, assumed=True) for name in ("torch", "torch_npu"))
    ),
}


def named(text: str, found: tuple[Found, ...] = ()) -> Machine:
    """A machine by its name: a platform ("cpu", "gpu", "tpu"), an architecture as "sm_90", or one
    of `INVENTED`.

    Raises ValueError for another name.
    """
    if text in INVENTED:
        invented, given = INVENTED[text], {each.name for each in found}
        own = [each for each in invented.found if each.name not in given]
        return dataclasses.replace(invented, found=(*found, *own))
    if text in PLATFORMS:
        return Machine(PLATFORMS[text], found=found)
    digits = text.removeprefix("sm_").removeprefix("sm")
    if text.startswith("sm") and digits.isdecimal() and len(digits) >= 2:
        return Machine("cuda", (int(digits[:-1]), int(digits[-1])), found=found)
    raise ValueError(
        f"unknown platform {text!r}: give {', '.join((*PLATFORMS, *INVENTED))}, or the "
        "architecture of an NVIDIA GPU, such as sm_90"
    )


@functools.cache
def probe() -> Machine:
    """This machine, by JAX's default back end; the first call starts it."""
    return described(jax.local_devices(), installed())


def described(devices: Sequence[Any], found: tuple[Found, ...] = ()) -> Machine:
    """The machine of these devices of JAX; what a device does not tell stays unknown."""
    first = devices[0]
    kind = str(first.platform)
    platform = PLATFORMS.get(kind, kind)
    if platform == "cuda" and "rocm" in str(getattr(first.client, "platform_version", "")).lower():
        platform = "rocm"
    architecture = None
    told = re.fullmatch(r"(\d+)\.(\d+)", str(getattr(first, "compute_capability", "")))
    if platform == "cuda" and told:
        architecture = int(told[1]), int(told[2])
    return Machine(platform, architecture, str(first.device_kind), len(devices), found)


def installed() -> tuple[Found, ...]:
    """Libraries and compilers of this environment; nothing is imported for it."""
    found = [each for name in LIBRARIES if (each := find_library(name)) is not None]
    if building.possible(jax.ffi.include_dir()):
        found.append(Found(COMPILER))
    if building.possible(jax.ffi.include_dir(), building.CUDA_SOURCE, building.CUDA):
        found.append(Found(CUDA_COMPILER))
    if shutil.which(NPU_COMPILER):
        found.append(Found(NPU_COMPILER))
    return tuple(found)


def find_library(name: str) -> Found | None:
    """The installed library that is imported as `name`, without importing it."""
    try:
        there = importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):  # a module that somebody made by hand has no spec
        there = True
    if not there:
        return None
    for package in LIBRARIES.get(name, ()):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return Found(name, package, importlib.metadata.version(package))
    for package in importlib.metadata.packages_distributions().get(name, ()):
        return Found(name, package, importlib.metadata.version(package))
    return Found(name)
