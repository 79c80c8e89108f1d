"""flashsmith: FlashAttention kernels generated as readable CUDA C++, compiled at run time, tuned on the GPU at hand.

Importing this package starts no CUDA, makes no folder and needs no GPU. The public functions are loaded on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from flashsmith.runtime.attention import attention as attention

__all__ = ["__version__", "attention"]


def __getattr__(name: str) -> Any:
    if name == "attention":
        from flashsmith.runtime.attention import attention

        globals()["attention"] = attention
        return attention
    raise AttributeError(f"module 'flashsmith' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
