"""Options that several commands share, and how their text is read."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from ...generator.arch import Arch, arch_from_cc, arch_from_name
from ...generator.errors import ConfigError, SpecError, UsageError
from ...generator.families.base import Family, KernelConfig
from ...generator.spec import AttentionSpec, ProblemShape

logger = logging.getLogger("flashsmith.cli")

#: The architecture that commands assume where there is neither a GPU nor an --arch: every family's oldest.
FALLBACK_ARCH = "sm_80"
_LENGTH = re.compile(r"([0-9]{1,18})\s*([kKmM]?)")
_GPU = re.compile(r"cuda|(?:cuda:)?([0-9]{1,9})")
_NEGATIVE = re.compile(r"-[0-9]+")
#: Seeds of inputs, schedules and searches.
MAX_SEED = 2**32 - 1
_FACTORS = {"": 1, "k": 1024, "m": 1024 * 1024}

HeadDim = Annotated[int, typer.Option("--head-dim", "-d", help="Last dimension of Q and K: a multiple of 8 up to 256.")]
HeadDimV = Annotated[int, typer.Option("--head-dim-v", help="Last dimension of V and O; 0: as Q's.")]
DType = Annotated[str, typer.Option("--dtype", help="bf16 or fp16.")]
Causal = Annotated[bool, typer.Option("--causal", help="A row sees the keys up to its own; aligned bottom right.")]
Window = Annotated[
    str, typer.Option("--window", help="LEFT,RIGHT: keys a row sees on each side, inclusive; negative: unlimited.")
]
Softcap = Annotated[float, typer.Option("--softcap", help="Scores become cap * tanh(score / cap); 0: none.")]
Alibi = Annotated[bool, typer.Option("--alibi", help="ALiBi with the slopes 2^(-8 (h + 1) / nheads).")]
MaskMod = Annotated[str, typer.Option("--mask-mod", help="A mask function: module:function or file.py:function.")]
ScoreMod = Annotated[str, typer.Option("--score-mod", help="A score function: module:function or file.py:function.")]
ArchName = Annotated[str, typer.Option("--arch", help="sm_80, sm_90, ...; default: this machine's GPU, else sm_80.")]
FamilyName = Annotated[str, typer.Option("--family", help="forward_sm80, forward_sm90, ...; default: the best.")]
Settings = Annotated[
    list[str] | None, typer.Option("--set", help="name=value: another choice of the kernel's config; may be repeated.")
]
UseDefault = Annotated[bool, typer.Option("--default", help="Start from the default config, not from a tuned one.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document to standard output.")]
SeqlenQ = Annotated[str, typer.Option("--seqlen", "-n", help="Rows of Q; 4k is 4096.")]
SeqlenK = Annotated[str, typer.Option("--seqlen-k", help="Rows of K and V; 0: as Q's.")]
Batch = Annotated[int, typer.Option("--batch", "-b", help="Batch; 0: 16384 tokens over the length.")]
NHeads = Annotated[int, typer.Option("--nheads", help="Heads of Q; 0: 2048 over the head dim.")]
NHeadsK = Annotated[int, typer.Option("--nheads-k", help="Heads of K and V; 0: as Q's.")]


def parse_length(text: str, *, name: str = "a length") -> int:
    """The number that "4096", "4k" or "1M" says (k is 1024). Raises SpecError."""
    match = _LENGTH.fullmatch(text.strip())
    if match is None:
        raise SpecError(f"{name} must be a number such as 4096, 4k or 1m (k is 1024), but got {text!r}.")
    return int(match[1]) * _FACTORS[match[2].lower()]


def parse_lengths(text: str, *, name: str = "--seqlens") -> tuple[int, ...]:
    """The numbers of a list such as "1k,4k,16k", each once. Raises SpecError."""
    lengths = tuple(dict.fromkeys(parse_length(part, name=name) for part in text.split(",")))
    if min(lengths) < 1:
        raise SpecError(f"{name} must be positive, but got {text!r}.")
    return lengths


def parse_window(text: str) -> tuple[int, int]:
    """(left, right) of "LEFT,RIGHT"; "" is no window, and any negative number is unlimited. Raises SpecError."""
    if not text:
        return -1, -1
    parts = text.split(",")
    try:
        left, right = (
            -1 if not part.strip() or _NEGATIVE.fullmatch(part.strip()) else parse_length(part, name="--window")
            for part in parts
        )
    except ValueError as error:
        if isinstance(error, SpecError):
            raise
        raise SpecError(
            f"--window must be LEFT,RIGHT, but got {text!r}. Use --window 1024,0 or --window 256,256."
        ) from None
    return left, right


def arch_of(name: str) -> Arch:
    """The architecture called `name`; for "" the GPU's, else `FALLBACK_ARCH`, which is said. Raises ArchError."""
    if name:
        return arch_from_name(name)
    info = gpu_info()
    if info is not None:
        return arch_from_cc(info.cc)
    logger.warning("No GPU was found and no --arch given: taking %s.", FALLBACK_ARCH)
    return arch_from_name(FALLBACK_ARCH)


def check_family(name: str) -> str:
    """`name`, if it is "" or a kernel family's. Raises UnsupportedError with the nearest one."""
    from ...generator.families import family_named

    return family_named(name).name if name else ""


def family_of(spec: AttentionSpec, arch: Arch, name: str = "") -> Family:
    """The family called `name`, for "" the best that does `spec` on `arch`. Raises UnsupportedError."""
    from ...generator.families import choose_family

    return choose_family(spec, arch, name=name).family


def gpu_info(index: int = 0) -> Any:
    """`driver.DeviceInfo` of a GPU, None where there is no driver or no GPU, or where FLASHSMITH_DEVICE=emulator."""
    from .. import variables

    return None if variables.device() == "emulator" else find_gpu(index)


def find_gpu(index: int = 0) -> Any:
    """`driver.DeviceInfo` of a GPU, whatever FLASHSMITH_DEVICE says; None where there is none of this index."""
    from .. import driver

    return driver.device_info(index) if 0 <= index < gpu_count() else None


def gpu_count() -> int:
    """How many GPUs this machine has."""
    from .. import driver

    return driver.device_count() if driver.driver_available() else 0


def tuning_gpu(device: str, arch: str) -> tuple[int, Any]:
    """Index and `driver.DeviceInfo` of the GPU that `flashsmith tune` times on; (0, None) means to predict.

    `device` is --device: a GPU, "emulator" to predict, or "" for FLASHSMITH_DEVICE's, else the first GPU if it is an
    `arch`. Raises UsageError where a GPU was asked for that is not there, or is no `arch`.
    """
    from .. import variables

    wanted = device or variables.device() or ""
    index = 0 if wanted in ("", "emulator") else gpu_index(wanted, others=", or emulator to predict")
    if wanted == "emulator":
        return 0, None
    info = find_gpu(index)
    the_arch = arch_from_name(arch) if arch else None
    if device:
        said = f"--device {device}"
        if info is None:
            raise UsageError(f"{said} asks for a GPU, but this machine has {_gpus()}. {_PREDICT}")
        if the_arch is not None and info.cc != the_arch.cc:
            raise UsageError(f"{said} is an {arch_from_cc(info.cc)}, --arch asks for {arch}. {_PREDICT}")
    elif wanted and info is None and the_arch is None:
        raise UsageError(f"FLASHSMITH_DEVICE={wanted} asks for a GPU, but this machine has {_gpus()}. {_PREDICT}")
    if info is None or (the_arch is not None and info.cc != the_arch.cc):
        return 0, None
    return index, info


_PREDICT = "Name an --arch without --device for a prediction; `flashsmith doctor` says what a GPU lacks."


def _gpus() -> str:
    count = gpu_count()
    return "none" if count == 0 else "one, cuda:0" if count == 1 else f"cuda:0 to cuda:{count - 1}"


def problem_from(
    *,
    head_dim: int,
    head_dim_v: int = 0,
    dtype: str = "bf16",
    causal: bool = False,
    window: str = "",
    softcap: float = 0.0,
    alibi: bool = False,
    mask_mod: str = "",
    score_mod: str = "",
) -> Any:
    """The `TuneProblem` that the options state."""
    from ..tune.request import TuneProblem

    return TuneProblem(
        dtype=dtype,
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        causal=causal,
        window_size=parse_window(window),
        softcap=softcap,
        alibi=alibi,
        mask_mod=mask_mod,
        score_mod=score_mod,
    )


def shape_from(
    seqlen: str,
    *,
    head_dim: int,
    seqlen_k: str = "0",
    batch: int = 0,
    nheads: int = 0,
    nheads_k: int = 0,
    gqa_ratio: int = 0,
) -> ProblemShape:
    """The sizes of one call, the usual benchmark's where an option is 0; `gqa_ratio` is nheads / nheads_k."""
    from ..tensors import check_limits
    from ..tune.request import usual_shape

    for name, value in (("--batch", batch), ("--nheads", nheads), ("--nheads-k", nheads_k)):
        if value < 0:
            raise SpecError(f"{name} must be 0 (the usual) or positive, but got {value}.")
    if gqa_ratio and nheads % gqa_ratio:
        raise SpecError(f"--nheads must be a multiple of each ratio of --gqa, but got {nheads} and {gqa_ratio}.")
    shape = usual_shape(
        parse_length(seqlen, name="--seqlen"),
        head_dim=head_dim,
        seqlen_k=parse_length(seqlen_k, name="--seqlen-k"),
        batch=batch,
        nheads=nheads,
        nheads_k=nheads_k,
        gqa_ratio=gqa_ratio,
    )
    check_limits(shape)
    return shape


def config_from(
    spec: AttentionSpec,
    arch: Arch,
    family: Family,
    shape: ProblemShape,
    *,
    settings: Sequence[str] | None = None,
    use_default: bool = False,
) -> tuple[KernelConfig, str]:
    """The config a call would use, changed by `settings` ("name=value"), and where it is from. Raises ConfigError."""
    from ..store_choice import choose_config, default_that_fits

    if use_default:
        config, source = default_that_fits(spec, arch, family), "default"
    else:
        resolution = choose_config(spec, arch, gpu_name_of(arch), shape, family)
        config, source = resolution.config, resolution.source
    if settings:
        config, source = with_settings(config, settings), "given"
    family.check(spec, config, arch)
    return config, source


def gpu_name_of(arch: Arch) -> str | None:
    """The name of this machine's first GPU if it is an `arch`, else None."""
    info = gpu_info()
    return info.name if info is not None and info.cc == arch.cc else None


def with_settings(config: KernelConfig, settings: Sequence[str]) -> KernelConfig:
    """`config` with the values that "name=value" texts name. Raises ConfigError."""
    values = config.to_dict()
    for setting in settings:
        name, separator, text = setting.partition("=")
        if not separator or name not in values:
            raise ConfigError(f"--set takes name=value with a name of {', '.join(values)}, but got {setting!r}.")
        values[name] = _value_like(values[name], text, name)
    return type(config).from_dict(values)


def gpu_index(text: str, *, others: str = "") -> int:
    """The index in "cuda", "cuda:1" or "1"; `others` says what else is taken. Raises UsageError."""
    match = _GPU.fullmatch(text)
    if match is None:
        raise UsageError(f"--device must be cuda or cuda:INDEX{others}, but got {text!r}.")
    return int(match[1] or 0)


def folder(path: Path | None) -> Path | None:
    """`path` made absolute, None as it is."""
    return None if path is None else path.expanduser().absolute()


def _value_like(old: int | bool | str, text: str, name: str) -> int | bool | str:
    if isinstance(old, bool):
        if text.lower() not in ("true", "false"):
            raise ConfigError(f"{name} must be true or false, but got {text!r}.")
        return text.lower() == "true"
    if isinstance(old, int):
        if not re.fullmatch("[0-9]{1,9}", text):
            raise ConfigError(f"{name} must be a positive integer, but got {text!r}.")
        return int(text)
    return text
